"""Really training inside virtual time: the work that :mod:`ops.virtual.work` plugs into the simulated processes.

Everything that touches a tensor is production code: the task's train step, the island's reference and placement, the
aggregator's merge and outer step. What is added is when steps run. An inner step has no effect that anybody sees until
what it made is handed over, or something is installed, so steps are put off until then (:class:`Stepper`) and run in a
row (:mod:`ops.lab.strides`); islands that are behind by then step together, as one ``vmap`` where an accelerator makes
that worth it. Copies are put off likewise: of those that are taken at every boundary most are replaced by the next one
before anybody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from aggregator.events import Commit, Inspection, Merge, Plant
from aggregator.merge import versions
from aggregator.merge.inspection import inspect
from aggregator.merge.outer_step import OuterStep
from broker.wire.fragments import FragmentManifest, TensorSpec
from broker.wire.messages import Codec, Envelope, Payload, Version
from broker.wire.ranges import StepRange
from islands.arrays import placement
from islands.arrays.initial_values import InitialValues
from islands.arrays.partition import tensor_specs
from islands.arrays.placement import Parameters, Placement
from islands.arrays.reference import Reference, encode_seed
from islands.protocol.core import Island
from islands.session import checkpoint, state_parts
from islands.session.training_state import Position, Snapshot
from islands.tasks.task import Batch, DataShare, Schedule, Task, endless_batches
from ops.chaos.tampering import TamperedTensors
from ops.lab.merging import Merges
from ops.lab.strides import Step, Strides, put_off


class Stepper:
    """Runs inner steps that were put off, those of several islands together.

    Args:
        task: What is trained.
        together: Islands that step as one computation at most; 1 runs them one by one, which is faster on a CPU.
    """

    def __init__(self, task: Task, together: int = 1) -> None:
        self.strides = Strides(task)
        self._task = task
        self._together = together
        self._behind: dict[int, TrainingIsland] = {}  # in the order in which they fell behind
        self._stacked: Any = None

    @property
    def keeps(self) -> bool:
        """Whether parameters stay valid when the next step is run."""
        return self._together == 1 and self.strides.agrees is True

    def later(self, island: TrainingIsland) -> None:
        """Notes that an island has a step to run."""
        self._behind[id(island)] = island

    def forget(self, island: TrainingIsland) -> None:
        """Drops the steps of a process that is gone."""
        self._behind.pop(id(island), None)

    def catch_up(self, island: TrainingIsland, steps: int | None = None) -> None:
        """Runs the steps of ``island`` that were put off, and what of the others' fits in with them.

        Args:
            island: Whose.
            steps: Until it has run so many in all; None: every one.
        """
        while island.put_off and (steps is None or island.steps_run < steps):
            company = [island] if self._together == 1 else self._company(island)
            if len(company) == 1:
                steps_ahead = island.next_steps(None if steps is None else steps - island.steps_run)
                island.params, island.opt_state = self.strides.run(island.params, island.opt_state, steps_ahead)
            else:
                self._step_together(company)
            for each in company:
                if not each.put_off:
                    self.forget(each)

    def _company(self, island: TrainingIsland) -> list[TrainingIsland]:
        others = [each for each in self._behind.values() if each is not island and each.put_off]
        size = min(1 + len(others), self._together)
        size = 1 << (size.bit_length() - 1)  # few sizes, since each is compiled
        return [island, *others[: size - 1]]

    def _step_together(self, company: list[TrainingIsland]) -> None:
        if self._stacked is None:
            self._stacked = _stacked_step(self._task)
        work = [step for each in company for step in each.next_steps(1)]
        trees = [(each.params, each.opt_state) for each in company]
        batches = [batch for batch, _ in work]
        schedules = [(np.float32(s.step), np.float32(s.total_steps)) for _, s in work]
        results, _ = self.strides.timed(partial(self._stacked, trees, batches, schedules))
        for each, (params, state) in zip(company, results, strict=True):
            each.params, each.opt_state = params, state


def _stacked_step(task: Task) -> Callable[..., Any]:
    """Returns the train step for a list of islands: stacked, stepped as one, and unstacked again."""
    import jax
    import jax.numpy as jnp

    def step(trees: list[Any], batches: list[Batch], schedules: list[tuple[Any, Any]]) -> tuple[list[Any], Any]:
        stack = lambda *leaves: jnp.stack(leaves)  # noqa: E731
        params, state = jax.tree.map(stack, *trees)
        batch = jax.tree.map(stack, *batches)
        schedule = Schedule(*jax.tree.map(stack, *schedules))
        params, state, loss = jax.vmap(task.train)(params, state, batch, schedule)
        each = [jax.tree.map(lambda leaf, i=i: leaf[i], (params, state)) for i in range(len(trees))]
        return each, loss

    return jax.jit(step, donate_argnums=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What the work needs to know of a cell, beside the task.

    Attributes:
        kinds: Of tensors, over those of the task.
        codec: Of pseudo-gradients.
        feedback: Whether what the codec rounds away stays in the island's progress.
        seed: Of parameters and data order.
        fleet_tokens: Tokens of one step of the whole fleet.
        total_tokens: Of the run, for schedules.
    """

    kinds: dict[str, str]
    codec: Codec
    feedback: bool
    seed: int
    fleet_tokens: int
    total_tokens: int


class TrainingIsland:
    """The parameters of one life of one island: see :class:`ops.virtual.work.IslandWork`."""

    def __init__(self, task: Task, rule: Rule, stepper: Stepper) -> None:
        self.put_off: list[Step] = []
        self.steps_run = 0
        self.params, self.opt_state = task.init(rule.seed)
        self.tensors = tensor_specs(self.params, rule.kinds, task.unit_axes)
        self.tokens_per_step = task.tokens_per_step
        self._task, self._rule, self._stepper = task, rule, stepper
        self._parameters = Parameters(self.params)
        self._manifest: FragmentManifest
        self._core: Island
        self._references: tuple[Reference, ...] = ()
        self._placements: tuple[Placement, ...] = ()
        self._copies: dict[int, list[Any]] = {}
        self._to_copy: dict[int, int] = {}  # fragment -> after how many steps
        self._prepared: dict[int, tuple[tuple[Any, ...], float]] = {}
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
        """Puts off one inner step, with the batch and the schedule of now."""
        fleet_tokens = self._rule.fleet_tokens
        step = int(self._core.schedule_tokens(own_tokens) / fleet_tokens)
        schedule = Schedule(step=step, total_steps=self._rule.total_tokens // fleet_tokens)
        self.put_off.append(put_off(next(self._data), schedule))
        self._stepper.later(self)

    def next_steps(self, most: int | None) -> list[Step]:
        """Takes the next of the steps that were put off, to be run now: they change what is still to be copied.

        Args:
            most: So many at most; None: as many as there are. A copy that is due on the way ends them, too.
        """
        for fragment_id in [p for p, steps in self._to_copy.items() if steps == self.steps_run]:
            self._copy_now(fragment_id)
        until_copies = [steps - self.steps_run for steps in self._to_copy.values()]
        count = min([len(self.put_off) if most is None else most, *until_copies])
        taken, self.put_off = self.put_off[:count], self.put_off[count:]
        self.steps_run += len(taken)
        return taken

    def copy(self, fragment_id: int) -> None:
        """Has a fragment copied as it is after every step so far; an earlier copy is forgotten."""
        self._copies.pop(fragment_id, None)
        self._to_copy[fragment_id] = self.steps_run + len(self.put_off)

    def forget(self, fragment_id: int) -> None:
        """Nobody will ask for a fragment's copy."""
        self._copies.pop(fragment_id, None)
        self._to_copy.pop(fragment_id, None)

    def _copy_now(self, fragment_id: int) -> None:
        del self._to_copy[fragment_id]
        leaves = self._parameters.of_fragment(self.params, fragment_id)
        self._copies[fragment_id] = leaves if self._stepper.keeps else self._placements[fragment_id].copy(leaves)

    def capture(self, fragment_id: int, steps: StepRange) -> Payload:
        """Returns reference minus copy, encoded."""
        if fragment_id in self._to_copy:
            self._stepper.catch_up(self, self._to_copy[fragment_id])
        if fragment_id in self._to_copy:
            self._copy_now(fragment_id)
        copies = [placement.to_host(leaf) for leaf in self._copies.pop(fragment_id)]
        reference = self._references[fragment_id]
        return reference.capture(copies, self._rule.codec, feedback=self._rule.feedback)

    def prepare(self, version: Version, keep: float) -> None:
        """Computes what installing adds."""
        p = version.fragment_id
        shift = self._references[p].shift(version.payload, keep, self._placements[p].dtypes)
        self._prepared[p] = shift, keep

    def install(self, fragment_id: int) -> None:
        """Adopts the version that was prepared."""
        self._stepper.catch_up(self)
        self.forget(fragment_id)
        shift, keep = self._prepared.pop(fragment_id)
        here, reference = self._placements[fragment_id], self._references[fragment_id]
        before = self._parameters.of_fragment(self.params, fragment_id)
        # A shift goes into the addition as it is: to place it first takes longer, and here no training waits for it.
        installed = here.install(before, shift if keep else here.place(shift, keep), keep)
        on_host = [placement.to_host(leaf) for leaf in before] if keep else []
        reference.installed(shift, keep, here.dtypes, on_host)
        self.params = self._parameters.replace(self.params, {fragment_id: installed})

    def refresh_optimizer(self) -> None:
        """Starts with an optimizer that has seen no step, and with unsynchronised parameters as they were."""
        self._stepper.catch_up(self)
        local = self._beginning.restored(self._parameters.of_none(self.params))
        self.params = self._parameters.replace_local(self.params, local)
        self.opt_state = self._task.fresh_optimizer(self.params)

    def copy_state(self) -> tuple[tuple[Payload, ...], int]:
        """Returns copies of the optimizer's leaves, as a donor sends them."""
        self._stepper.catch_up(self)
        snapshot = Snapshot(state=checkpoint.copied(self.opt_state), cursor=0, local=())
        return state_parts.cut(checkpoint.packed(snapshot, (), Position(0, 0), 0))

    def take_state(self, parts: tuple[Payload, ...]) -> str:
        """Takes a donor's state over if it fits and is finite."""
        needed = state_parts.Needed(state=checkpoint.leaves_of(self.opt_state), local=())
        size = sum(memoryview(each.data).nbytes for part in parts for each in part)
        found, flaw = state_parts.read(parts, size, needed)
        if found is not None:
            self.opt_state = checkpoint.restored(self.opt_state, found.state)
        return flaw

    def end(self) -> None:
        """Gives the parameters back: a run may see hundreds of lives."""
        self._stepper.forget(self)
        self.put_off.clear()
        self._to_copy.clear()
        self.params = self.opt_state = None


class TrainingAggregator:
    """The global parameters: see :class:`ops.virtual.work.AggregatorWork`."""

    def __init__(self, merges: Merges, outer_step: OuterStep) -> None:
        self._merges = merges
        self._outer_step = outer_step
        self._manifest: FragmentManifest | None = None
        self._pending: dict[int, versions.Made] = {}

    def manifested(self, manifest: FragmentManifest) -> None:
        """See :class:`ops.virtual.work.AggregatorWork`."""
        self._manifest = manifest

    def inspect(self, envelope: Envelope) -> Inspection:
        """Returns what a payload holds."""
        return inspect(envelope, self._manifest)

    def plant(self, action: Plant) -> str:
        """Makes version 0."""
        made = versions.plant(self._tensors(action.fragment_id), action)
        self._pending[action.fragment_id] = made
        return made.digest

    def merge(self, action: Merge) -> str:
        """Makes the next version from the newest durable one."""
        p = action.fragment_id
        made, merged = versions.merge(self._tensors(p), action, self._merges.durable[p], self._outer_step)
        self._merges.merged(p, merged.delta, merged.cosine)
        self._pending[p] = made
        return made.digest

    def persist(self, commit: Commit) -> None:
        """What was made last is durable."""
        made = self._pending[commit.fragment_id]
        assert made.digest == commit.digest
        self._merges.durable[commit.fragment_id] = made.state

    def payload(self, fragment_id: int, digest: str) -> Payload:
        """Returns the durable parameters, float32."""
        return versions.payload_of(self._tensors(fragment_id), self._merges.durable[fragment_id], Codec.F32)

    def _tensors(self, fragment_id: int) -> tuple[TensorSpec, ...]:
        assert self._manifest is not None
        return self._manifest.fragments[fragment_id]


class Training:
    """Makes works that train: see :class:`ops.virtual.work.Works`."""

    def __init__(self, task: Task, rule: Rule, stepper: Stepper, outer_step: OuterStep) -> None:
        self.merges = Merges()
        self._task, self._rule, self._stepper, self._outer_step = task, rule, stepper, outer_step

    def island(self, island_id: str, life: int) -> TrainingIsland:
        """See :class:`ops.virtual.work.Works`."""
        return TrainingIsland(self._task, self._rule, self._stepper)

    def aggregator(self) -> TrainingAggregator:
        """See :class:`ops.virtual.work.Works`."""
        return TrainingAggregator(self.merges, self._outer_step)

    def tampered(self) -> TamperedTensors:
        """See :class:`ops.virtual.work.Works`."""
        return TamperedTensors()
