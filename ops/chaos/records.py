"""The recording of a chaos run: what was done to it and what was seen of it, in monotonic seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from islands.session.pulse import Beat
from ops.chaos.plan import Fault
from ops.processes.cluster import Change

#: From when to when.
Spell = tuple[float, float]


@dataclass(slots=True, kw_only=True)
class Happening:
    """A fault that was injected, or could not be.

    Attributes:
        number: From 1 on, in order.
        processes: Those that were struck.
        ended_s: When it was taken back; None if it still lasts.
        skipped: Why nothing was done; empty if it was.
    """

    number: int
    fault: Fault
    processes: tuple[str, ...]
    at_s: float
    ended_s: float | None = None
    skipped: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessChange:
    """The supervisor saw a process end, or started it again."""

    at_s: float
    process: str
    change: Change


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSeen:
    """A fragment version appeared in a ledger: it was durable by ``at_s``; who is in it, as the ledger has it."""

    at_s: float
    version: int
    epoch: int
    contributions: Sequence[Mapping[str, Any]]

    def has(self, island_id: str, *, above_incarnation: int = 0) -> bool:
        """Whether an island is in it, with a life later than ``above_incarnation``."""
        return any(
            each["island_id"] == island_id and each["incarnation"] > above_incarnation for each in self.contributions
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSeen:
    """A round that led to a version: when it was open, and who is in it."""

    opened_s: float
    committed_s: float
    islands: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteSeen:
    """A decision of an aggregator, on its tape."""

    at_s: float
    name: str
    fields: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class Recording:
    """Everything of one run.

    Attributes:
        islands: Names of the run's own islands.
        began_s: When every island trained: time 0 of the plan.
        ended_s: When the run was told to end.
        steps: Island -> the ends of its steps.
        notes: Decisions that may show that a fault was noticed.
        redis: (moment, whether the run's status could be read there).
        late: (moment, seconds): the observer woke so much later than it had asked to; the machine was busy elsewhere.
    """

    islands: tuple[str, ...]
    began_s: float = 0.0
    ended_s: float = 0.0
    happenings: list[Happening] = field(default_factory=list)
    changes: list[ProcessChange] = field(default_factory=list)
    versions: list[VersionSeen] = field(default_factory=list)
    steps: dict[str, list[Beat]] = field(default_factory=dict)
    rounds: list[RoundSeen] = field(default_factory=list)
    notes: list[NoteSeen] = field(default_factory=list)
    redis: list[tuple[float, bool]] = field(default_factory=list)
    late: list[tuple[float, float]] = field(default_factory=list)

    def done(self) -> list[Happening]:
        """Returns the faults that were injected."""
        return [each for each in self.happenings if not each.skipped]

    @property
    def first_fault_s(self) -> float:
        """When the first of them struck; the end if there was none."""
        return min((each.at_s for each in self.done()), default=self.ended_s)
