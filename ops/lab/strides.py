"""Inner steps in a row as one computation, where that gives the same bits.

A call of a jitted step allocates what the step needs in between, hands every parameter over and back, and is waited
for: an eighth of the time of the tiny model's steps, a quarter with Muon. Between two moments at which anybody looks at
the parameters an island takes several steps, and they are one call here. Whether a task's step can be part of a larger
computation, and whether it gives the same bits there, is found out and not assumed: some steps are run both ways.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from islands.task import Batch, OptState, Params, Schedule, Task

#: Steps in one computation at most: more save little, and their batches wait in memory.
MOST = 8
#: So many steps go one by one first: compiling takes as long as some hundreds of steps save.
ALONE = 64
#: Larger batches go one by one: steps that read so much take so long that a call is nothing beside them.
MOST_BATCH_BYTES = 1 << 20

#: A step that is still to be run: its batch, and how far the run is.
Step = tuple[Batch, Schedule]


class Strides:
    """Runs inner steps, and counts the wall time spent inside: what is left of a run is the laboratory's own.

    Args:
        task: What is trained.

    Attributes:
        train_s: Seconds inside training steps so far.
        agrees: Whether steps in a row have given the same bits as one computation; None: not found out yet. If so
            parameters that went in stay valid, and whoever wants a copy of them may keep them instead.
    """

    def __init__(self, task: Task) -> None:
        self.train_s = 0.0
        self.agrees: bool | None = None
        self._task = task
        self._run = 0

    def timed(self, call: Callable[[], Any]) -> Any:
        """Calls, waits for the last element of what comes back, and counts the time."""
        began_s = time.perf_counter()
        result = call()
        if hasattr(result[-1], "block_until_ready"):
            result[-1].block_until_ready()
        self.train_s += time.perf_counter() - began_s
        return result

    def run(self, params: Params, opt_state: OptState, steps: Sequence[Step]) -> tuple[Params, OptState]:
        """Returns what comes out of ``steps``, one after the other; the state that went in is donated."""
        for start in range(0, len(steps), MOST):
            stride = steps[start : start + MOST]
            fit = self.agrees is not False and self._run >= ALONE and _fit(stride)
            if fit and self.agrees:
                params, opt_state, _ = self.timed(partial(_as_one, self._task, params, opt_state, stride))
            elif fit and len(stride) > 1:
                params, opt_state = self._found_out(params, opt_state, stride)
            else:
                kept = _copied(params) if self.agrees else params
                params, opt_state = self._one_by_one(kept, opt_state, stride)
            self._run += len(stride)
        return params, opt_state

    def _one_by_one(self, params: Params, opt_state: OptState, steps: Sequence[Step]) -> tuple[Params, OptState]:
        for batch, schedule in steps:
            params, opt_state, _ = self.timed(partial(self._task.train, params, opt_state, batch, schedule))
        return params, opt_state

    def _found_out(self, params: Params, opt_state: OptState, steps: Sequence[Step]) -> tuple[Params, OptState]:
        """Runs the steps one by one, and once more as one computation to see whether that is the same."""
        copies = _copied((params, opt_state))
        result = self._one_by_one(params, opt_state, steps)
        try:
            if copies is None:
                self.agrees = False
            else:
                self.agrees = _bits(_as_one(self._task, copies[0], copies[1], steps)[:2]) == _bits(result)
        except Exception:  # noqa: BLE001 - whatever a step is that cannot be traced: by itself it has just worked
            self.agrees = False
        return result


def _as_one(task: Task, params: Params, opt_state: OptState, steps: Sequence[Step]) -> Any:
    """Returns parameters, state, and something to wait for."""
    import jax

    counts = np.zeros((2, MOST), np.int32)
    counts[:, : len(steps)] = np.transpose([schedule for _, schedule in steps])
    batches = jax.tree.map(_stacked, *(batch for batch, _ in steps))
    return _row(task.train)(params, opt_state, batches, counts, np.int32(len(steps)))


@lru_cache(maxsize=4)
def _row(train: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the computation that takes ``count`` steps, whatever that is: it is compiled once."""
    import jax
    import jax.numpy as jnp

    def row(params: Params, opt_state: OptState, batches: Batch, counts: Any, count: Any) -> Any:
        def step(k: Any, before: tuple[Params, OptState, Any]) -> tuple[Params, OptState, Any]:
            batch = jax.tree.map(lambda leaf: leaf[k], batches)
            stepped, state, _ = train(before[0], before[1], batch, Schedule(counts[0, k], counts[1, k]))
            return stepped, state, before[2] + 1

        return jax.lax.fori_loop(0, count, step, (params, opt_state, jnp.int32(0)))

    return jax.jit(row, donate_argnums=1)


def _stacked(*leaves: Any) -> Any:
    """Returns the leaves along a new first axis that has room for ``MOST``, so that every stride has one shape."""
    first = np.asarray(leaves[0])
    stacked = np.zeros((MOST, *first.shape), first.dtype)
    stacked[: len(leaves)] = leaves
    return stacked


def _fit(steps: Sequence[Step]) -> bool:
    """Whether the batches are small, of one structure and shape, and of numbers: random keys cannot be stacked."""
    import jax

    batches = [jax.tree.flatten(batch) for batch, _ in steps]
    if not all(isinstance(getattr(leaf, "dtype", None), np.dtype) for leaves, _ in batches for leaf in leaves):
        return False
    shapes = {(structure, *((leaf.shape, leaf.dtype) for leaf in leaves)) for leaves, structure in batches}
    return len(shapes) == 1 and sum(leaf.nbytes for leaf in batches[0][0]) <= MOST_BATCH_BYTES


def _copied(tree: Any) -> Any:
    """Returns copies of a tree of JAX arrays; None of any other."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(jnp.copy, tree) if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree)) else None


def _bits(tree: Any) -> list[bytes]:
    import jax

    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
