"""The recording of a chaos run: the faults, and the run as seen from outside, in monotonic seconds.

The faults cannot stop the watching: files are read as they are. Times are those at which something was seen, on this
process's clock: those on a tape are of a clock that a fault may have made jump.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aggregator.interface.events import Note
from aggregator.interface.notes import ContributionAccepted, RoundOpened, VersionCommitted
from aggregator.interface.reading_notes import note_in
from aggregator.store.ledger_file import is_of_segment
from islands.session.pulse import Beat, read_pulse
from ops.faults.kinds import Fault
from ops.inspect.tapes import FollowedTape, ledgers_in, tapes_in
from ops.processes.cluster import ProcessEvent

#: From when to when.
Spell = tuple[float, float]


@dataclass(slots=True, kw_only=True)
class Happening:
    """A fault that was injected, or could not be.

    Attributes:
        number: From 1 on, in order.
        processes: The processes that were struck.
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
class VersionSeen:
    """A fragment version in a ledger: durable by ``at_s``, with its contributions as the ledger has them."""

    at_s: float
    version: int
    epoch: int
    contributions: Sequence[Mapping[str, Any]]

    def has(self, island_id: str, *, above_incarnation: int = 0) -> bool:
        """Returns True if an island contributed, with a life later than ``above_incarnation``."""
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
    note: Note


@dataclass(slots=True, kw_only=True)
class Recording:
    """Everything of one run.

    Attributes:
        islands: Names of the run's own islands.
        began_s: When every island trained: time 0 of the plan.
        ended_s: When the run was told to end.
        changes: When the supervisor saw a process end, or started it again.
        steps: Island -> the ends of its steps.
        notes: Decisions that may show that a fault was noticed.
        redis: (moment, whether the run's status could be read there).
    """

    islands: tuple[str, ...]
    began_s: float = 0.0
    ended_s: float = 0.0
    happenings: list[Happening] = field(default_factory=list)
    changes: list[tuple[float, ProcessEvent]] = field(default_factory=list)
    versions: list[VersionSeen] = field(default_factory=list)
    steps: dict[str, list[Beat]] = field(default_factory=dict)
    rounds: list[RoundSeen] = field(default_factory=list)
    notes: list[NoteSeen] = field(default_factory=list)
    redis: list[tuple[float, bool]] = field(default_factory=list)

    def done(self) -> list[Happening]:
        """Returns the faults that were injected."""
        return [each for each in self.happenings if not each.skipped]

    @property
    def first_fault_s(self) -> float:
        """Returns the time of the first fault; the end of the run if there was none."""
        return min((each.at_s for each in self.done()), default=self.ended_s)


# --- watching ----------------------------------------------------------------------------------------------------


def pulse_file(run_dir: Path, island: str) -> Path:
    """Returns the file in which an island shows its pulse."""
    return run_dir / "chaos" / f"{island}.pulse"


class Observer:
    """Adds to a recording what pulses, ledgers and tapes show; :meth:`look` takes a few milliseconds."""

    def __init__(self, run_dir: Path, recording: Recording) -> None:
        self._run_dir = run_dir
        self._recording = recording
        self._followed: dict[Path, FollowedTape] = {}
        self._seen: set[tuple[int, int]] = set()
        self._opened_s: dict[tuple[Path, int], float] = {}  # of rounds
        self._counts = dict.fromkeys(recording.islands, 0)

    def look(self) -> None:
        """Adds what is new in the files."""
        for island in self._recording.islands:
            self._counts[island], beats = read_pulse(pulse_file(self._run_dir, island), self._counts[island])
            self._recording.steps.setdefault(island, []).extend(beats)
        for path in ledgers_in(self._run_dir):
            for row in self._followed.setdefault(path, FollowedTape(path)).news():
                if not is_of_segment(row):
                    self._take_row(row, time.monotonic())
        for path in tapes_in(self._run_dir):
            for line in self._followed.setdefault(path, FollowedTape(path)).news():
                self._take_line(path, line, time.monotonic())

    def _take_row(self, row: dict[str, Any], now_s: float) -> None:
        key = row["fragment_id"], row["fragment_version"]
        if key not in self._seen:  # a standby's copy is no other version
            self._seen.add(key)
            seen = VersionSeen(at_s=now_s, version=key[1], epoch=row["epoch"], contributions=row["contributions"])
            self._recording.versions.append(seen)

    def _take_line(self, tape: Path, line: dict[str, Any], now_s: float) -> None:
        match note_in(line):
            case None | ContributionAccepted():
                pass
            case RoundOpened(round=number):
                self._opened_s[tape, number] = now_s
            case VersionCommitted(round=number, contributions=contributions):
                opened_s = self._opened_s.pop((tape, number), None)
                if opened_s is not None:
                    islands = frozenset(each.island for each in contributions or ())
                    seen = RoundSeen(opened_s=opened_s, committed_s=now_s, islands=islands)
                    self._recording.rounds.append(seen)
            case note:
                self._recording.notes.append(NoteSeen(at_s=now_s, note=note))
