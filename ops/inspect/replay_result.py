"""The result of a replay: its counts, the first difference, and how much it covers. Pure.

A replay that meets no difference has proved nothing about what it did not see. So every version that anybody knows of,
by tape, ledger or recording, is either *checked* or *unchecked* for a reason, and what is missing is counted: lines
that a tape lost or that were cut short, recordings that should be there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import xxhash

Line = Mapping[str, Any]
#: Fragment and version.
Key = tuple[int, int]


class PartReason(StrEnum):
    """Why a known version could not be derived from the tape."""

    GAP = "behind lines that a full disk cost"
    DROPPED = "before the oldest life that is whole on the tape: its segments were dropped"
    CRASH = "in the last moments before a crash, or by another aggregator"
    NO_TAPE = "in a moment that is on no tape, only in a ledger"
    NOWHERE = "in a moment that is on no tape, and have no line in a ledger"


#: Which reason counts where two tapes of a run give different ones. A leader cannot tell what was made before its time:
#: what it puts down to a crash or to no tape may be in the dropped segments of the leader before.
_RANK = (PartReason.GAP, PartReason.DROPPED, PartReason.CRASH, PartReason.NO_TAPE, PartReason.NOWHERE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where a tape and its replay part.

    Attributes:
        line: Line of the tape, from 1; 0 if the difference is in no line.
        life: Life of the aggregator, from 1.
        what: A sentence.
        on_tape: The recorded value; None if it is no single value.
        replayed: The core's value instead.
    """

    line: int
    life: int
    what: str
    on_tape: Any = None
    replayed: Any = None


@dataclass(slots=True)
class Counts:
    """Counts of what was played so far.

    Attributes:
        lives: Lives of the aggregator.
        events: Fed to a core.
        decisions: Notes that agree.
        beside: Notes about standbys and the lease, which are no decisions of the core.
        versions: Durable ones, version 0 included.
        unwitnessed: Versions that a life began with and that no earlier line tells of: made in the last moments before
            a crash, or by another aggregator.
        unfollowed: Versions that became durable behind a gap.
        missing: Lines that the tape says it lost.
        skipped: Lines that could not be followed after such a gap.
        torn: Lines that a crash cut short.
        beheaded: Lines of a life whose beginning is in a segment that is gone: they cannot be followed.
        dropped: Versions in them, or made before them, that the tape still names.
    """

    lives: int = 0
    events: int = 0
    decisions: int = 0
    beside: int = 0
    versions: int = 0
    unwitnessed: int = 0
    unfollowed: int = 0
    missing: int = 0
    skipped: int = 0
    torn: int = 0
    beheaded: int = 0
    dropped: int = 0


@dataclass(slots=True)
class Coverage:
    """The checked part of a run, by one tape with ledger and recordings beside it, or by all of them.

    Attributes:
        checked: Versions that were derived from a tape.
        unchecked: Versions that are known of and were not, and why.
        missing_lines: Lines that a tape lost, or that were cut short.
        missing_recordings: Versions whose payloads were recorded and are gone; or recordings that no ledger explains.
        lives: Lives of the aggregator: none on the tape of a standby that never led.
    """

    checked: set[Key] = field(default_factory=set)
    unchecked: dict[Key, PartReason] = field(default_factory=dict)
    missing_lines: int = 0
    missing_recordings: int = 0
    lives: int = 0

    @classmethod
    def added(cls, parts: Iterable[Coverage]) -> Coverage:
        """Adds up the tapes of one run: one leader's may tell what another's does not."""
        whole = cls()
        for each in parts:
            whole.checked |= each.checked
            for key, why in each.unchecked.items():
                known = whole.unchecked.get(key, why)
                whole.unchecked[key] = min(known, why, key=_RANK.index)
            whole.missing_lines += each.missing_lines
            whole.missing_recordings += each.missing_recordings
            whole.lives += each.lives
        whole.unchecked = {key: why for key, why in whole.unchecked.items() if key not in whole.checked}
        return whole

    @property
    def versions(self) -> int:
        """The number of known versions."""
        return len(self.checked | self.unchecked.keys())

    @property
    def complete(self) -> bool:
        """True if all lines and recordings were there and all versions checked, but for dropped ones."""
        unchecked = any(why is not PartReason.DROPPED for why in self.unchecked.values())
        return not (unchecked or self.missing_lines or self.missing_recordings)

    @property
    def empty(self) -> bool:
        """True if nothing was checked although something should have been."""
        return not self.checked and bool(self.versions or not self.complete or not self.lives)

    def reasons(self) -> dict[PartReason, int]:
        """Returns reason -> how many versions were not checked for it."""
        return dict(Counter(self.unchecked.values()))

    def to_json(self) -> dict[str, Any]:
        """Returns the numbers for ``json.dumps``."""
        return {
            "versions": self.versions,
            "checked": len(self.checked),
            "unchecked": self.reasons(),
            "missing_lines": self.missing_lines,
            "missing_recordings": self.missing_recordings,
            "lives": self.lives,
        }

    def sentence(self) -> str:
        """Returns the coverage in words: ``checked 41 of 44 versions; 2 could not be: made in ..; ..``."""
        parts = [f"checked {len(self.checked):,} of {self.versions:,} versions"]
        parts += [f"{n:,} could not be: made {why}" for why, n in sorted(self.reasons().items())]
        if self.missing_lines:
            parts.append(f"{self.missing_lines:,} lines of the tape are missing")
        if self.missing_recordings:
            parts.append(f"{self.missing_recordings:,} recordings are missing or unexplained")
        return "; ".join(parts)


def fingerprint(row: Line) -> int:
    """Returns a number that two lines of a ledger share only if they say the same."""
    text = json.dumps(as_read(row), sort_keys=True, separators=(",", ":"))
    return int(xxhash.xxh3_64_intdigest(text.encode()))


def as_read(value: Any) -> Any:
    """Returns plain data as it comes back from a line."""
    return json.loads(json.dumps(value, default=str))


def what_differs(line: Line, replayed: Line) -> str:
    """Returns in a sentence how two notes differ: by their first field that does."""
    name, again = line.get("note"), replayed["note"]
    if name != again:
        return f"{name} is on the tape, and {again} was decided"
    mine, theirs = replayed["fields"], line.get("fields", {})
    for key in [*mine, *theirs]:
        if mine.get(key) != theirs.get(key):
            return f"{key} of {name} is {theirs.get(key)!r} on the tape, and {mine.get(key)!r} was decided"
    return f"{name} has something beside its fields on the tape"
