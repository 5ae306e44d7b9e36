"""Inner steps in a row as one computation, where that gives the same bits.

A call of a jitted step allocates what the step needs in between, hands every parameter over and back, and is waited
for: an eighth of the time of the tiny model's steps, a quarter with Muon. Between two moments at which anybody looks at
the parameters an island takes several steps, and they are one call here. Whether that gives the same bits is found out
and not assumed: of a step that says it is a function of its arguments alone, some are run both ways. That tells of
arrays and batches like those alone. What differs from them in structure, shape or type goes one by one, such as the
first steps of an island whose optimizer starts with other types than it goes on with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from islands.tasks.task import Batch, OptState, Params, Schedule, Task

#: Steps in one computation at most: more save little, and their batches wait in memory.
MOST = 8
#: So many steps go one by one first: compiling takes as long as some hundreds of steps save.
ALONE = 64
#: So many steps have to give the same bits both ways: two of them may by chance.
COMPARED = 16
#: Larger batches go one by one: steps that read so much take so long that a call is nothing beside them.
MOST_BATCH_BYTES = 1 << 20

#: A step that is still to be run: its batch, and how far the run is.
Step = tuple[Batch, Schedule]


def put_off(batch: Batch, schedule: Schedule) -> Step:
    """Returns a step to be run later, with a batch of its own: whoever made it may fill the same arrays again."""
    import jax

    try:
        return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, batch), schedule
    except Exception:  # noqa: BLE001 - a batch that is no tree for JAX is the task's own
        return batch, schedule


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
        self.agrees: bool | None = None if _pure(task) else False
        self._task = task
        self._run = 0
        self._kind: Hashable = None  # of what was compared
        self._compared = 0

    def timed(self, call: Callable[[], Any]) -> Any:
        """Calls, waits for the last element of what comes back, and counts the time."""
        began_s = time.perf_counter()
        result = call()
        if hasattr(result[-1], "block_until_ready"):
            result[-1].block_until_ready()
        self.train_s += time.perf_counter() - began_s
        return result

    def may_wait(self, steps: Sequence[Step]) -> bool:
        """Whether one more step may be put off behind ``steps``: nothing is gained where each goes by itself."""
        return len(steps) < MOST and self.agrees is not False and _kind_of_batches(steps[-1:]) is not None

    def run(self, params: Params, opt_state: OptState, steps: Sequence[Step]) -> tuple[Params, OptState]:
        """Returns what comes out of ``steps``, one after the other; what went in may be donated, but see ``agrees``."""
        for start in range(0, len(steps), MOST):
            stride = steps[start : start + MOST]
            kind = self._kind_of(params, opt_state, stride)
            if kind is not None and self.agrees and kind == self._kind:
                params, opt_state, _ = self.timed(partial(_as_one, self._task, params, opt_state, stride))
            elif kind is not None and self.agrees is None and len(stride) > 1:
                params, opt_state = self._found_out(params, opt_state, stride, kind)
            else:
                kept = _copied(params) if self.agrees else params
                params, opt_state = self._one_by_one(kept, opt_state, stride)
            self._run += len(stride)
        return params, opt_state

    def _kind_of(self, params: Params, opt_state: OptState, steps: Sequence[Step]) -> Hashable:
        """Returns what steps have in common for which there is one computation; None if they go one by one."""
        if self.agrees is False or self._run < ALONE:
            return None
        arrays, batches = _kind_of_arrays((params, opt_state)), _kind_of_batches(steps)
        return None if arrays is None or batches is None else (arrays, batches)

    def _one_by_one(self, params: Params, opt_state: OptState, steps: Sequence[Step]) -> tuple[Params, OptState]:
        for batch, schedule in steps:
            params, opt_state, _ = self.timed(partial(self._task.train, params, opt_state, batch, schedule))
        return params, opt_state

    def _found_out(
        self, params: Params, opt_state: OptState, steps: Sequence[Step], kind: Hashable
    ) -> tuple[Params, OptState]:
        """Runs the steps one by one, and once more as one computation to see whether that is the same."""
        if kind != self._kind:
            self._kind, self._compared = kind, 0
        before = _copied(params), _copied(opt_state)
        result = self._one_by_one(params, opt_state, steps)
        try:
            same = _bits(_as_one(self._task, *before, steps)[:2]) == _bits(result)
        except Exception:  # noqa: BLE001 - whatever a step is that cannot be traced: by itself it has just worked
            same = False
        self._compared += len(steps)
        if not same:
            self.agrees = False
        elif self._compared >= COMPARED:
            self.agrees = True
        return result


def _pure(task: Task) -> bool:
    import jax

    return task.pure or isinstance(task.train, jax.stages.Wrapped)


def _as_one(task: Task, params: Params, opt_state: OptState, steps: Sequence[Step]) -> Any:
    """Returns parameters, state, and something to wait for."""
    import jax

    counts = np.zeros((2, MOST), np.int32)
    counts[:, : len(steps)] = np.transpose([schedule for _, schedule in steps])
    batches = jax.tree.map(_stacked, *(batch for batch, _ in steps))
    return _row(task.train)(params, opt_state, batches, counts, np.int32(len(steps)))


@lru_cache(maxsize=4)
def _row(train: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the computation that takes ``count`` steps, whatever that is: it is compiled once.

    It donates nothing: arrays of a state may be one and the same, or the task's own.
    """
    import jax
    import jax.numpy as jnp

    def row(params: Params, opt_state: OptState, batches: Batch, counts: Any, count: Any) -> Any:
        def step(k: Any, before: tuple[Params, OptState, Any]) -> tuple[Params, OptState, Any]:
            batch = jax.tree.map(lambda leaf: leaf[k], batches)
            stepped, state, _ = train(before[0], before[1], batch, Schedule(counts[0, k], counts[1, k]))
            return stepped, state, before[2] + 1

        return jax.lax.fori_loop(0, count, step, (params, opt_state, jnp.int32(0)))

    return jax.jit(row)


def _stacked(*leaves: Any) -> Any:
    """Returns the leaves along a new first axis that has room for ``MOST``, so that every stride has one shape."""
    first = np.asarray(leaves[0])
    stacked = np.zeros((MOST, *first.shape), first.dtype)
    stacked[: len(leaves)] = leaves
    return stacked


def _kind_of_arrays(tree: Any) -> Hashable:
    """Returns structure, shapes and types of a tree of JAX arrays; None of any other."""
    import jax

    leaves, structure = jax.tree.flatten(tree)
    if not all(isinstance(leaf, jax.Array) for leaf in leaves):
        return None
    return structure, *(leaf.aval for leaf in leaves)


def _kind_of_batches(steps: Sequence[Step]) -> Hashable:
    """Returns structure, shapes and types that small batches have in common; None of any that cannot be stacked.

    Random keys cannot: their type is none of NumPy's.
    """
    import jax

    try:
        batches = [jax.tree.flatten(batch) for batch, _ in steps]
        if not all(_is_of_numbers(leaf) for leaves, _ in batches for leaf in leaves):
            return None
        kinds = {(structure, *((leaf.shape, leaf.dtype) for leaf in leaves)) for leaves, structure in batches}
    except Exception:  # noqa: BLE001 - a batch that is no tree for JAX
        return None
    small = sum(leaf.nbytes for leaf in batches[0][0]) <= MOST_BATCH_BYTES
    return kinds.pop() if len(kinds) == 1 and small else None


def _is_of_numbers(leaf: Any) -> bool:
    import jax

    return isinstance(leaf, np.ndarray | np.generic | jax.Array) and isinstance(leaf.dtype, np.dtype)


def _copied(tree: Any) -> Any:
    """Returns a tree with copies of its JAX arrays, which alone may be donated."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def _bits(tree: Any) -> list[bytes]:
    import jax

    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
