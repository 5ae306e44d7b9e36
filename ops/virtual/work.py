"""The work of simulated processes on parameters: they count steps, or really train.

The drivers in :mod:`ops.virtual.island` and :mod:`ops.virtual.aggregator` decide when; behind these two protocols is
what. Counting costs microseconds a step and lets every payload say exactly which steps are in it, which the invariants
check. Training (:mod:`ops.lab.training`) does what the real islands do, with the same functions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Protocol

from aggregator.interface.events import Commit, Computed, Flaw, Inspection, Merge, Plant
from broker.wire.fragments import FragmentManifest, TensorSpec
from broker.wire.messages import Codec, Envelope, Payload, Reason, Version
from broker.wire.ranges import StepRange
from islands.protocol.core import Island
from islands.protocol.data_shares import DataShare
from islands.protocol.donation import PART_BYTES
from ops.faults.kinds import Lie, Payloads


class IslandWork(Protocol):
    """The parameters of one life of one island; calls come in the order of the events that cause them."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor that is not local."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one inner step."""

    def joined(self, core: Island, share: DataShare) -> None:
        """The core knows its fragments and its counters' start; ``share`` always says what to train next."""

    def seed(self, fragment_id: int) -> Payload:
        """Returns a fragment of version 0."""

    def train(self, own_tokens: int) -> None:
        """Runs one inner step; ``own_tokens`` were trained before it."""

    def copy(self, fragment_id: int) -> None:
        """Copies a fragment; a copy that was there before is forgotten."""

    def forget(self, fragment_id: int) -> None:
        """Drops the copy of a fragment, if there is one: nobody will ask for it."""

    def capture(self, fragment_id: int, steps: StepRange, codec: Codec) -> Payload:
        """Returns the pseudo-gradient of the copy, and moves the reference by what was encoded."""

    def prepare(self, version: Version, keep: float, *, mixes: bool = False) -> None:
        """Makes a version ready to be installed."""

    def install(self, fragment_id: int) -> None:
        """Installs the version that was prepared last."""

    def refresh_optimizer(self) -> None:
        """The local state was spoilt: starts with a fresh inner optimizer."""

    def copy_state(self) -> tuple[tuple[Payload, ...], int]:
        """Returns the optimizer's state in parts, for another island, and its bytes."""

    def take_state(self, parts: tuple[Payload, ...]) -> str:
        """Takes another island's state over for the first step, or says why it does not serve."""

    def end(self) -> None:
        """The process is gone."""


class AggregatorWork(Protocol):
    """The global parameters of one life of the aggregator."""

    def manifested(self, manifest: FragmentManifest) -> None:
        """The fragments are known."""

    def inspect(self, envelope: Envelope) -> Inspection:
        """Returns what the payload of a contribution or a seed holds."""

    def plant(self, action: Plant) -> Computed:
        """Makes version 0 of a fragment, in memory; returns what is reported then."""

    def merge(self, action: Merge) -> Computed:
        """Makes the next version of a fragment, in memory; returns what is reported then."""

    def persist(self, commit: Commit) -> None:
        """Takes the newest version of a fragment as durable."""

    def payload(self, fragment_id: int, digest: str) -> Payload:
        """Returns the newest durable version as it is published."""


class Works(Protocol):
    """Makes the work of each process when it starts."""

    def island(self, island_id: str, life: int) -> IslandWork:
        """Returns the work of a new process of an island."""

    def aggregator(self) -> AggregatorWork:
        """Returns the work of a new process of the aggregator; what earlier ones persisted is there."""

    def tampered(self) -> Payloads:
        """Returns what rogues can do to payloads."""


#: Of each fragment of version 0, where an honest step is 1 long.
SEED_NORM = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A payload that says which steps are in it, and what an inspection of it would find."""

    island_id: str
    incarnation: int
    fragment_id: int
    steps: StepRange
    codec: Codec
    inspection: Inspection


@dataclass(frozen=True, slots=True, kw_only=True)
class StateClaim:
    """A part of an optimizer's state that says how many steps that optimizer has seen."""

    island_id: str
    steps: int
    part: int


#: So many parts does a counting island cut its state into, the last one half full.
STATE_PARTS = 6


@dataclass(slots=True)
class CountingIsland:
    """An island that only counts steps; ``optimizer_steps``: its optimizer's, here or at its donor's."""

    address: str
    tensors: tuple[TensorSpec, ...]
    tokens_per_step: int
    core: Island | None = None
    optimizer_steps: int = 0

    def joined(self, core: Island, share: DataShare) -> None:
        """See :class:`IslandWork`."""
        self.core = core

    def seed(self, fragment_id: int) -> Payload:
        """A name instead of a tensor: nothing in the cores looks into a payload."""
        return f"{fragment_id} of {self.address}"

    def train(self, own_tokens: int) -> None:
        """Takes no time."""
        self.optimizer_steps += 1

    def copy(self, fragment_id: int) -> None:
        """There is nothing to copy."""

    def forget(self, fragment_id: int) -> None:
        """There is nothing to drop."""

    def capture(self, fragment_id: int, steps: StepRange, codec: Codec) -> Payload:
        """Returns a :class:`Claim`."""
        assert self.core is not None
        return Claim(
            island_id=self.core.island_id,
            incarnation=self.core.incarnation,
            fragment_id=fragment_id,
            steps=steps,
            codec=codec,
            inspection=Inspection(norm=float(steps.steps)),
        )

    def prepare(self, version: Version, keep: float, *, mixes: bool = False) -> None:
        """There is nothing to prepare."""

    def install(self, fragment_id: int) -> None:
        """There is nothing to install."""

    def refresh_optimizer(self) -> None:
        """It has seen nothing now."""
        self.optimizer_steps = 0

    def copy_state(self) -> tuple[tuple[Payload, ...], int]:
        """Returns a :class:`StateClaim` for each part."""
        assert self.core is not None
        claims = (
            StateClaim(island_id=self.core.island_id, steps=self.optimizer_steps, part=i) for i in range(STATE_PARTS)
        )
        return tuple(claims), STATE_PARTS * PART_BYTES - PART_BYTES // 2

    def take_state(self, parts: tuple[Payload, ...]) -> str:
        """Checks that the parts are one whole state of an optimizer that knows the run."""
        assert self.core is not None
        assert self.core.settings is not None
        assert [part.part for part in parts] == list(range(STATE_PARTS)), parts
        assert len({(part.island_id, part.steps) for part in parts}) == 1, parts
        assert parts[0].steps >= self.core.settings.recipe.sync_interval, (
            f"an untrained island gave its state: {parts[0]}"
        )
        self.optimizer_steps = parts[0].steps
        return ""

    def end(self) -> None:
        """There is nothing to give back."""


class TamperedClaims:
    """Claims as a rogue would have them: what is wrong with them is what an inspection would find."""

    def spoilt(self, payload: Claim) -> Claim:
        """See :class:`ops.faults.kinds.Payloads`."""
        return _flawed(payload, Reason.NOT_FINITE)

    def scaled(self, payload: Claim, factor: float) -> Claim:
        """See :class:`ops.faults.kinds.Payloads`."""
        norm = payload.inspection.norm
        return replace(payload, inspection=Inspection(norm=None if norm is None else norm * factor))

    def noise(self, payload: Claim, rng: random.Random) -> Claim:
        """Random bits are not finite somewhere, or make an enormous norm."""
        return self.spoilt(payload) if rng.random() < 0.5 else self.scaled(payload, 1e30)

    def misshapen(self, payload: Claim) -> Claim:
        """See :class:`ops.faults.kinds.Payloads`."""
        return _flawed(payload, Reason.WRONG_SHAPE)

    def lied(self, payload: Claim, lie: Lie, fragment_id: int, rng: random.Random) -> Claim:
        """See :class:`ops.faults.kinds.Payloads`."""
        return self.scaled(payload, lie.length)


def _flawed(claim: Claim, reason: Reason) -> Claim:
    return replace(claim, inspection=Inspection(flaw=Flaw(reason=reason, detail="tampered with")))


class CountingAggregator:
    """Digests are names that say what was merged."""

    def manifested(self, manifest: FragmentManifest) -> None:
        """See :class:`AggregatorWork`."""

    def inspect(self, envelope: Envelope) -> Inspection:
        """A name has no flaw; a claim has what it claims."""
        payload = getattr(envelope.message, "payload", None)
        return payload.inspection if isinstance(payload, Claim) else Inspection(norm=SEED_NORM)

    def plant(self, action: Plant) -> Computed:
        """Returns a name."""
        return Computed(fragment_id=action.fragment_id, fragment_version=0, digest=f"seed {action.payload}")

    def merge(self, action: Merge) -> Computed:
        """Returns a name."""
        p, version = action.fragment_id, action.fragment_version
        merged = " ".join(str(part.payload) for part in action.parts)
        return Computed(fragment_id=p, fragment_version=version, digest=f"{p}.{version}: {merged}")

    def persist(self, commit: Commit) -> None:
        """The simulation's disk keeps the commit, and there is nothing else."""

    def payload(self, fragment_id: int, digest: str) -> Payload:
        """Returns the digest: it says all there is."""
        return digest


@dataclass(frozen=True, slots=True)
class Counting:
    """Makes works that count.

    Attributes:
        tensors: The model.
        tokens_per_step: Tokens in one inner step.
    """

    tensors: tuple[TensorSpec, ...]
    tokens_per_step: int

    def island(self, island_id: str, life: int) -> IslandWork:
        """See :class:`Works`."""
        return CountingIsland(f"{island_id}/{life}", self.tensors, self.tokens_per_step)

    def aggregator(self) -> AggregatorWork:
        """See :class:`Works`."""
        return CountingAggregator()

    def tampered(self) -> Payloads:
        """See :class:`Works`."""
        return TamperedClaims()
