"""Real training in virtual time, as the work of simulated processes (:mod:`ops.virtual.work`).

Everything that touches a tensor is production code: the task's train step, the island's reference and placement, the
aggregator's merge and outer step. What is added is when steps run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from aggregator.interface.events import Commit, Computed, Inspection, Merge, Plant
from aggregator.merge import versions
from aggregator.merge.fragment_state import FragmentState, Vector
from aggregator.merge.outer_step import OuterStep
from aggregator.merge.payload_checks import inspect
from broker.wire.fragments import FragmentManifest, TensorSpec
from broker.wire.messages import Codec, Envelope, Payload, Version
from broker.wire.ranges import StepRange
from islands.arrays import placement
from islands.arrays.parameters import Parameters
from islands.arrays.partition import tensor_specs
from islands.arrays.placement import Placement
from islands.arrays.reference import Reference, encode_seed
from islands.between_steps import InitialValues
from islands.protocol.core import Island
from islands.session import checkpoint, state_parts
from islands.session.training_state import Needed, Position, Snapshot
from islands.tasks.task import Batch, DataShare, Params, Schedule, Task, endless_batches
from ops.faults.kinds import TamperedTensors

#: The durable global parameters of a run, fragment by fragment.
Durable = dict[int, FragmentState]
#: Judges parameters on the way: a few sequences.
Judge = Callable[[Params], float]


def values_of(tensors: Iterable[TensorSpec], vector: Vector) -> Iterator[tuple[str, Vector]]:
    """Yields the name and the value, in its shape, of every tensor of a fragment."""
    start = 0
    for tensor in tensors:
        yield tensor.name, vector[start : start + tensor.size].reshape(tensor.shape)
        start += tensor.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The settings of a cell that affect an island's training, beside the task.

    Attributes:
        feedback: Whether the codec's rounding error stays in the island's progress.
        seed: The seed of parameters and data order.
        fleet_tokens: Tokens of one step of the whole fleet.
        total_tokens: The run's target, for schedules.
    """

    feedback: bool
    seed: int
    fleet_tokens: int
    total_tokens: int


class TrainingIsland:
    """The parameters of one life of one island: see :class:`ops.virtual.work.IslandWork`."""

    def __init__(self, task: Task, rule: Rule) -> None:
        self.params, self.opt_state = task.init(rule.seed)
        self.tensors = tensor_specs(self.params, task.kinds, task.unit_axes)
        self.tokens_per_step = task.tokens_per_step
        self._task, self._rule = task, rule
        self._parameters = Parameters(self.params)
        self._manifest: FragmentManifest
        self._core: Island
        self._references: tuple[Reference, ...] = ()
        self._placements: tuple[Placement, ...] = ()
        self._copies: dict[int, list[Any]] = {}
        self._prepared: dict[int, tuple[tuple[Any, ...], float, bool]] = {}
        self._data: Iterator[Batch]
        self._beginning: InitialValues

    def joined(self, core: Island, share: DataShare) -> None:
        """Cuts the tree into the run's fragments and opens the data."""
        assert core.manifest is not None
        self._core, self._manifest = core, core.manifest
        self._parameters.assign(core.manifest)
        self._references = tuple(Reference(tensors) for tensors in core.manifest.fragments)
        of = self._parameters.of_fragment
        self._placements = tuple(Placement(of(self.params, p)) for p in range(len(core.manifest)))
        self._data = endless_batches(self._task, share)
        self._beginning = InitialValues(self._parameters.of_none(self.params))

    def seed(self, fragment_id: int) -> Payload:
        """Returns a fragment of the initial parameters, float32."""
        leaves = [placement.to_host(leaf) for leaf in self._parameters.of_fragment(self.params, fragment_id)]
        return encode_seed(self._manifest.fragments[fragment_id], leaves)

    def train(self, own_tokens: int) -> None:
        """Runs one inner step, with the current batch and schedule."""
        fleet_tokens = self._rule.fleet_tokens
        step = int(self._core.schedule.at(own_tokens) / fleet_tokens)
        schedule = Schedule(step=step, total_steps=self._rule.total_tokens // fleet_tokens)
        self.params, self.opt_state, _ = self._task.train(self.params, self.opt_state, next(self._data), schedule)

    def copy(self, fragment_id: int) -> None:
        """Copies a fragment; an earlier copy of it is forgotten."""
        leaves = self._parameters.of_fragment(self.params, fragment_id)
        self._copies[fragment_id] = self._placements[fragment_id].copy(leaves)

    def forget(self, fragment_id: int) -> None:
        """Drops the copy of a fragment."""
        self._copies.pop(fragment_id, None)

    def capture(self, fragment_id: int, steps: StepRange, codec: Codec) -> Payload:
        """Returns reference minus copy, encoded."""
        copies = [placement.to_host(leaf) for leaf in self._copies.pop(fragment_id)]
        reference = self._references[fragment_id]
        return reference.capture(copies, codec, feedback=self._rule.feedback)

    def prepare(self, version: Version, keep: float, *, mixes: bool = False) -> None:
        """Computes the shift of a version."""
        p = version.fragment_id
        shift = self._references[p].shift(version.payload, keep, self._placements[p].dtypes, mixes=mixes)
        self._prepared[p] = shift, keep, mixes

    def install(self, fragment_id: int) -> None:
        """Adopts the version that was prepared."""
        self.forget(fragment_id)
        shift, keep, mixes = self._prepared.pop(fragment_id)
        here, reference = self._placements[fragment_id], self._references[fragment_id]
        before = self._parameters.of_fragment(self.params, fragment_id)
        # A shift goes into the addition as it is: to place it first takes longer, and here no training waits for it.
        installed = here.install(before, shift if keep else here.place(shift, keep), keep)
        on_host = [placement.to_host(leaf) for leaf in before] if keep else []
        reference.installed(shift, keep, here.dtypes, on_host, mixes=mixes)
        self.params = self._parameters.replace(self.params, {fragment_id: installed})

    def refresh_optimizer(self) -> None:
        """Resets the optimizer, and unsynchronised parameters to their first values."""
        local = self._beginning.restored(self._parameters.of_none(self.params))
        self.params = self._parameters.replace_local(self.params, local)
        self.opt_state = self._task.fresh_optimizer(self.params)

    def copy_state(self) -> tuple[tuple[Payload, ...], int]:
        """Returns copies of the optimizer's leaves, as a donor sends them."""
        snapshot = Snapshot(state=checkpoint.copied(self.opt_state), cursor=0, local=())
        return state_parts.cut(checkpoint.packed(snapshot, (), Position(0, 0), 0))

    def take_state(self, parts: tuple[Payload, ...]) -> str:
        """Loads a donor's state if it fits and is finite; returns whether it did."""
        needed = Needed(state=checkpoint.leaves_of(self.opt_state), local=())
        size = sum(memoryview(each.data).nbytes for part in parts for each in part)
        found, flaw = state_parts.read(parts, size, needed)
        if found is not None:
            self.opt_state = checkpoint.restored(self.opt_state, found.state)
        return flaw

    def end(self) -> None:
        """Frees the parameters: a run may have hundreds of lives."""
        self.params = self.opt_state = None


class TrainingAggregator:
    """The global parameters: see :class:`ops.virtual.work.AggregatorWork`."""

    def __init__(self, durable: Durable, outer_step: OuterStep) -> None:
        self._durable = durable
        self._outer_step = outer_step
        self._manifest: FragmentManifest | None = None
        self._pending: dict[int, versions.Made] = {}

    def manifested(self, manifest: FragmentManifest) -> None:
        """See :class:`ops.virtual.work.AggregatorWork`."""
        self._manifest = manifest

    def inspect(self, envelope: Envelope) -> Inspection:
        """Returns the facts about a payload."""
        return inspect(envelope, self._manifest)

    def plant(self, action: Plant) -> Computed:
        """Makes version 0 from a seed."""
        made = versions.plant(self._tensors(action.fragment_id), action)
        self._pending[action.fragment_id] = made
        return made.reported(action.fragment_id)

    def merge(self, action: Merge) -> Computed:
        """Makes the next version from the newest durable one."""
        p = action.fragment_id
        made, _ = versions.merge(self._tensors(p), action, self._durable[p], self._outer_step)
        self._pending[p] = made
        return made.reported(p)

    def persist(self, commit: Commit) -> None:
        """Makes the newest version durable."""
        made = self._pending[commit.fragment_id]
        assert made.digest == commit.digest
        self._durable[commit.fragment_id] = made.state

    def payload(self, fragment_id: int, digest: str) -> Payload:
        """Returns the durable parameters, float32."""
        return versions.payload_of(self._tensors(fragment_id), self._durable[fragment_id])

    def _tensors(self, fragment_id: int) -> tuple[TensorSpec, ...]:
        assert self._manifest is not None
        return self._manifest.fragments[fragment_id]


class Training:
    """Makes the training work of processes: see :class:`ops.virtual.work.Works`."""

    def __init__(self, task: Task, rule: Rule, outer_step: OuterStep) -> None:
        self.durable: Durable = {}
        self._task, self._rule, self._outer_step = task, rule, outer_step

    def island(self, island_id: str, life: int) -> TrainingIsland:
        """See :class:`ops.virtual.work.Works`."""
        return TrainingIsland(self._task, self._rule)

    def aggregator(self) -> TrainingAggregator:
        """See :class:`ops.virtual.work.Works`."""
        return TrainingAggregator(self.durable, self._outer_step)

    def tampered(self) -> TamperedTensors:
        """See :class:`ops.virtual.work.Works`."""
        return TamperedTensors()
