"""What was done to a run and what was seen of it, in monotonic seconds: the material of the report. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ops.chaos.faults import Fault


class Change(StrEnum):
    """What became of a process."""

    STARTED = "started"  # again
    DIED = "died"
    ENDED = "ended"
    GAVE_UP = "gave_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """A fault that was injected, or could not be.

    Attributes:
        number: From 1 on, in order.
        processes: Who was struck.
        at_s: When.
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
class ClockJump:
    """From ``at_s`` on, a machine's clock as a process sees it is ``offset_s`` ahead.

    The process itself reads a clock that never goes back (:class:`broker.process.clocks.SteadyClock`).
    """

    at_s: float
    process: str
    offset_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSeen:
    """A fragment version appeared in a ledger: it was durable by ``at_s``; ``row`` is the ledger's line."""

    at_s: float
    fragment_id: int
    version: int
    epoch: int
    row: Mapping[str, Any]

    @property
    def contributions(self) -> Sequence[Mapping[str, Any]]:
        """Who is in it, as the ledger has it."""
        parts: Sequence[Mapping[str, Any]] = self.row["contributions"]
        return parts

    def has(self, island_id: str, *, above_incarnation: int = 0) -> bool:
        """Whether an island is in it, with a life later than ``above_incarnation``."""
        return any(
            each["island_id"] == island_id and each["incarnation"] > above_incarnation for each in self.contributions
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An inner step's end, and the process that ran it."""

    at_s: float
    pid: int


@dataclass(slots=True, kw_only=True)
class Recording:
    """Everything of one run.

    Attributes:
        islands: Names of the run's own islands.
        pace_s: Seconds that a step of each takes at least, by setting; 0 for as fast as it can.
        began_s: When every island trained: time 0 of the plan.
        ended_s: When the run was told to end.
        redis: (moment, whether the run's status could be read there).
        late: (moment, seconds): the observer woke so much later than it had asked to; the machine was busy elsewhere.
    """

    islands: tuple[str, ...]
    pace_s: Mapping[str, float] = field(default_factory=dict)
    began_s: float = 0.0
    ended_s: float = 0.0
    happenings: list[Happening] = field(default_factory=list)
    changes: list[ProcessChange] = field(default_factory=list)
    jumps: list[ClockJump] = field(default_factory=list)
    versions: list[VersionSeen] = field(default_factory=list)
    steps: dict[str, list[Step]] = field(default_factory=dict)
    redis: list[tuple[float, bool]] = field(default_factory=list)
    late: list[tuple[float, float]] = field(default_factory=list)

    def done(self) -> list[Happening]:
        """Returns the faults that were injected."""
        return [each for each in self.happenings if not each.skipped]

    def spells(self, process: str) -> list[tuple[float, float]]:
        """Returns when faults lasted on a process: (from, to), the end of the run for those that still do."""
        return [
            (each.at_s, self.ended_s if each.ended_s is None else each.ended_s)
            for each in self.done()
            if process in each.processes
        ]
