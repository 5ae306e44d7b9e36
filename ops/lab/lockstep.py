"""The baselines as plain loops: data-parallel, synchronous DiLoCo and Streaming DiLoCo.

Every island takes the same number of steps, and everybody is at the same one. Nothing here is shared with the
production cores but the merge and the outer step, whose rule, rate and momentum are settings of the cell: so what
differs between a baseline and a decoupled run is how islands work together and nothing else. (DiLoCo's own values are
``merge = "mean"``, 0.7 and 0.9.) Island i of M draws part i of the batches, all together those of decoupled islands.

    data-parallel   every step: one inner step on the batches of all islands together
    diloco          every H steps: everybody stops; Delta_i = Theta - local_i; Theta <- outer(Theta, merge(Delta));
                    local_i <- Theta                                       (https://arxiv.org/abs/2311.08105)
    streaming       the same fragment by fragment, p being due when t mod H = offset_p; what is sent at t is adopted at
                    t + tau: local <- mix * local + (1 - mix) * Theta'    (https://arxiv.org/abs/2501.18512)

Time: islands have one speed. They wait where they need what others send, for the link, and nowhere else.
Data-parallel training pays for its ring at the end of every step: nothing overlaps there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aggregator.interface.events import Part
from aggregator.merge.fragment_state import Vector, seeded
from aggregator.merge.kernels import merge_fragment
from aggregator.merge.outer_step import make_outer_step
from broker.base.errors import ConfigError
from broker.wire.fragments import FragmentManifest, TensorSpec, merged_by, partition
from broker.wire.ranges import StepRange
from broker.wire.tensors import encode_tensor, payload_bytes
from islands.arrays.partition import tensor_specs
from islands.arrays.tree import flatten, unflatten
from islands.tasks.task import Batch, DataShare, Params, Schedule, Task, endless_batches
from ops.lab.records import Judge, Outcome, Point
from ops.plans.cell import CellSettings, Mode


@dataclass(slots=True)
class Learner:
    """One island of a baseline."""

    params: Params
    opt_state: Any
    data: Iterator[Batch]

    def step(self, task: Task, schedule: Schedule) -> None:
        """Takes one inner step, on the next batch."""
        self.params, self.opt_state, _ = task.train(self.params, self.opt_state, next(self.data), schedule)


def run(task: Task, cell: CellSettings, seed: int, judge: Judge) -> Outcome:
    """Returns the outcome of one run of a baseline.

    Args:
        task: The task to train.
        cell: A cell of any mode except ``decoupled``.
        seed: The seed of parameters, data order and step times.
        judge: Called for every point of the loss curve but the last.
    """
    if cell.mode is Mode.DATA_PARALLEL:
        return _data_parallel(task, cell, seed, judge)
    return _diloco(task, cell, seed, judge)


# --- data-parallel ----------------------------------------------------------------------------------------------


def _data_parallel(task: Task, cell: CellSettings, seed: int, judge: Judge) -> Outcome:
    sources = [_data(task, cell, i, seed) for i in range(cell.islands)]
    everybody = Learner(*task.init(seed), (_joined(list(batches)) for batches in zip(*sources, strict=True)))
    curve: list[Point] = []
    num_bytes = 2 * sum(np.asarray(leaf).size for leaf in flatten(everybody.params).values())  # gradients in bfloat16
    ring_s = _journey_s(cell) + _busy_s(cell, num_bytes * 2 * (1 - 1 / cell.islands)) if cell.islands > 1 else 0.0
    now_s, fleet_tokens = 0.0, cell.islands * task.tokens_per_step
    for t in range(cell.steps):
        everybody.step(task, Schedule(step=t, total_steps=cell.steps))
        now_s += cell.step_time_s(0) + ring_s
        if _on_the_way(t + 1, cell):
            curve.append(Point((t + 1) * fleet_tokens, now_s, judge(everybody.params)))
    tokens = cell.steps * fleet_tokens
    return Outcome(
        params=everybody.params,
        curve=curve,
        tokens=tokens,
        merged_tokens=tokens,
        virtual_s=now_s,
    )


def _joined(batches: list[Batch]) -> Batch:
    """Returns the batches of all islands joined along the first axis of every leaf.

    Raises:
        ConfigError: A leaf has no axis of examples.
    """
    if len(batches) == 1:
        return batches[0]
    import jax

    def joined(path: Any, *leaves: Any) -> Any:
        if not isinstance(getattr(leaves[0], "dtype", None), np.dtype) or not np.ndim(leaves[0]):
            cure = "has no axis of examples: data-parallel runs join the batches of all islands along their first axes"
            raise ConfigError("batch" + jax.tree_util.keystr(path), repr(leaves[0]), cure)
        return np.concatenate([np.asarray(each) for each in leaves])

    return jax.tree_util.tree_map_with_path(joined, *batches)


# --- DiLoCo, whole or in fragments ------------------------------------------------------------------------------


def _diloco(task: Task, cell: CellSettings, seed: int, judge: Judge) -> Outcome:
    learners = [Learner(*task.init(seed), _data(task, cell, i, seed)) for i in range(cell.islands)]
    initial, _ = task.init(seed)  # what no island shares is judged as it was, as in production: steps donate their own
    tensors = merged_by(tensor_specs(initial, task.kinds, task.unit_axes), cell.merge)
    manifest = partition(tensors, cell.fragments)
    outer = Outer(cell, manifest, initial)
    overlap = cell.overlap if cell.mode is Mode.STREAMING else 0
    curve: list[Point] = []
    under_way: dict[int, list[int]] = {}  # step -> fragments to adopt
    here_s: dict[int, float] = {}  # fragment -> when its new value is with every island
    link_free_s = 0.0  # a link sends one thing after another, as those of a decoupled fleet do
    now_s = 0.0
    for t in range(1, cell.steps + 1):
        schedule = Schedule(step=t - 1, total_steps=cell.steps)
        for learner in learners:
            learner.step(task, schedule)
        now_s += cell.step_time_s(0)
        last = t == cell.steps
        # At the end contributions under way arrive first: no step is merged twice.
        arriving = sorted(p for at, waiting in under_way.items() if at == t or last for p in waiting)
        under_way.pop(t, None)
        due = outer.due(t, last=last)
        for p in arriving:
            now_s = max(now_s, here_s[p])
            outer.adopt(p, learners, cell.mix)
        num_bytes = sum(outer.send(p, learners) for p in due)
        if due:
            link_free_s = max(now_s, link_free_s) + _busy_s(cell, num_bytes)
        for p in due:
            here_s[p] = link_free_s + _journey_s(cell)
            if overlap and not last:
                under_way.setdefault(t + overlap, []).append(p)
            else:
                outer.adopt(p, learners, 0.0)
        if due and (last or not overlap):
            now_s = max(here_s[p] for p in due)
        if _on_the_way(t, cell):
            tokens = t * cell.islands * task.tokens_per_step
            curve.append(Point(tokens, now_s, judge(outer.params(initial))))
    tokens = cell.steps * cell.islands * task.tokens_per_step
    return Outcome(
        params=outer.params(initial),
        curve=curve,
        tokens=tokens,
        merged_tokens=tokens,
        virtual_s=now_s,
        rounds=outer.rounds(),
    )


class Outer:
    """The global parameters of a baseline."""

    def __init__(self, cell: CellSettings, manifest: FragmentManifest, params: Params) -> None:
        self._cell = cell
        self._manifest = manifest
        self._outer_step = make_outer_step(cell.outer_learning_rate, cell.outer_momentum)
        self._state = {p: seeded(self._vector(p, params)) for p in manifest.moving}
        spacing = cell.sync_interval / len(manifest.moving)  # frozen fragments never fall due, as in production
        self._offsets = {p: round((k + 1) * spacing) % cell.sync_interval for k, p in enumerate(manifest.moving)}

    def rounds(self) -> int:
        """Returns the number of merges of a fragment."""
        return sum(state.version for state in self._state.values())

    def due(self, t: int, *, last: bool) -> list[int]:
        """Returns the fragments that are sent after step ``t``; all of them after the last one."""
        return [p for p, offset in self._offsets.items() if last or t % self._cell.sync_interval == offset]

    def send(self, p: int, learners: list[Learner]) -> int:
        """Merges the learners' pseudo-gradients of one fragment (:meth:`merge`)."""
        theta = self.vector(p)
        return self.merge(p, [theta - self._vector(p, learner.params) for learner in learners])

    def vector(self, p: int) -> Vector:
        """Returns the global parameters of a fragment: float32 [elements], tensors in manifest order."""
        return self._state[p].params

    def merge(self, p: int, deltas: Sequence[Vector]) -> int:
        """Merges the islands' pseudo-gradients, float32 [elements of the fragment], and takes the outer step.

        Returns:
            The bytes that one of them sends and receives: what is global comes back as float32, whatever went up.
        """
        parts = []
        tensors = self._manifest.fragments[p]
        steps = StepRange(from_step=0, to_step=1, from_tokens=0, to_tokens=1)
        for i, delta in enumerate(deltas):
            payload = tuple(
                encode_tensor(np.ascontiguousarray(value), self._cell.codec) for _, value in values_of(tensors, delta)
            )
            parts.append(
                Part(island_id=f"island-{i}", steps=steps, payload=payload, token_weight=1.0, staleness_weight=1.0)
            )
        merged = merge_fragment(tensors, parts, compared=())
        self._state[p] = self._outer_step(self._state[p], merged.delta)
        return payload_bytes(parts[0].payload) + merged.delta.nbytes

    def adopt(self, p: int, learners: list[Learner], mix: float) -> None:
        """Installs a fragment's global parameters into an island, mixed with its local ones."""
        theta = self._state[p].params
        for learner in learners:
            value = theta
            if mix:
                value = np.float32(mix) * self._vector(p, learner.params) + np.float32(1 - mix) * theta
            learner.params = self._placed(p, learner.params, value)

    def params(self, like: Params) -> Params:
        """Returns the global parameters as a tree."""
        for p, state in self._state.items():
            like = self._placed(p, like, state.params)
        return like

    def _vector(self, p: int, params: Params) -> Vector:
        leaves = flatten(params)
        return np.concatenate([np.asarray(leaves[t.name], np.float32).reshape(-1) for t in self._manifest.fragments[p]])

    def _placed(self, p: int, params: Params, vector: Vector) -> Params:
        leaves = dict(flatten(params))
        for name, value in values_of(self._manifest.fragments[p], vector):
            leaves[name] = _like(leaves[name], value)
        return unflatten(params, leaves)


def values_of(tensors: Iterable[TensorSpec], vector: Vector) -> Iterator[tuple[str, Vector]]:
    """Yields the name and the value, in its shape, of every tensor of a fragment."""
    start = 0
    for tensor in tensors:
        yield tensor.name, vector[start : start + tensor.size].reshape(tensor.shape)
        start += tensor.size


def _like(leaf: Any, value: Vector) -> Any:
    """Returns ``value`` as an array with the type and dtype of ``leaf``."""
    if isinstance(leaf, np.ndarray):
        return value.astype(leaf.dtype)
    import jax

    return jax.device_put(value.astype(leaf.dtype))


# --- time and data ----------------------------------------------------------------------------------------------


def _journey_s(cell: CellSettings) -> float:
    """Returns the seconds of the slowest round trip."""
    return 2 * cell.longest_delay_s


def _busy_s(cell: CellSettings, num_bytes: float) -> float:
    """Returns the seconds that a link takes for ``num_bytes`` bytes."""
    rate = 1e6 * cell.megabytes_per_s
    return num_bytes / rate if rate else 0.0


def _data(task: Task, cell: CellSettings, index: int, seed: int) -> Iterator[Batch]:
    return endless_batches(task, DataShare(index=index, count=cell.islands, seed=seed))


def _on_the_way(t: int, cell: CellSettings) -> bool:
    """Returns whether a point of the loss curve is due after step ``t``."""
    return t < cell.steps and (t * cell.evaluations) // cell.steps > ((t - 1) * cell.evaluations) // cell.steps
