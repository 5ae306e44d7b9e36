"""The result of a replay: its counts, and the first difference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import xxhash

from aggregator.core import Aggregator
from aggregator.events import Merge

Line = Mapping[str, Any]
#: Fragment and version.
Key = tuple[int, int]


class PartReason(StrEnum):
    """Why a version that is known of could not be derived from the tape."""

    GAP = "behind lines that a full disk cost"
    CRASH = "in the last moments before a crash, or by another aggregator"
    NO_TAPE = "in a moment that is on no tape, only in a ledger"
    NOWHERE = "in a moment that is on no tape, and have no line in a ledger"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a tape and its replay part.

    Attributes:
        line: Of the tape, from 1; 0 where it is no line.
        life: Of the aggregator, from 1.
        what: A sentence.
        on_tape: What stands there; None if it is no single value.
        replayed: What the core says instead.
    """

    line: int
    life: int
    what: str
    on_tape: Any = None
    replayed: Any = None


class ByteCheck(Protocol):
    """Derives the bytes of versions again, in the order in which they were made; says what is wrong, or nothing."""

    def begin(self, core: Aggregator) -> None:
        """A life begins, from the commits that ``core`` was made with."""
        ...

    def planted(self, fragment_id: int, digest: str) -> None:
        """Version 0 of a fragment is in memory."""
        ...

    def merged(self, core: Aggregator, action: Merge, digest: str) -> str:
        """A merge was reported with ``digest``; returns what contradicts it, or an empty text."""
        ...

    def persisted(self, fragment_id: int) -> None:
        """Takes the newest version of a fragment as durable."""
        ...


class NoBytes:
    """Checks no bytes: none were recorded.

    Attributes:
        missing: Merged versions of lives that recorded payloads: those are gone.
    """

    def __init__(self) -> None:
        self.missing = 0

    def begin(self, core: Aggregator) -> None:
        """See :class:`ByteCheck`."""

    def planted(self, fragment_id: int, digest: str) -> None:
        """See :class:`ByteCheck`."""

    def merged(self, core: Aggregator, action: Merge, digest: str) -> str:
        """See :class:`ByteCheck`."""
        self.missing += core.run.config.record_payloads
        return ""

    def persisted(self, fragment_id: int) -> None:
        """See :class:`ByteCheck`."""


@dataclass(slots=True)
class Counts:
    """What was played so far.

    Attributes:
        lives: Of the aggregator.
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


def fingerprint(row: Mapping[str, Any]) -> int:
    """Returns a number that two lines of a ledger share only if they say the same."""
    text = json.dumps(as_read(row), sort_keys=True, separators=(",", ":"))
    return int(xxhash.xxh3_64_intdigest(text.encode()))


def as_read(value: Any) -> Any:
    """Returns plain data as it comes back from a line."""
    return json.loads(json.dumps(value, default=str))


def what_differs(line: Line, replayed: Line) -> str:
    """Says in a sentence how two notes differ: the first field will do."""
    name, again = line.get("note"), replayed["note"]
    if name != again:
        return f"{name} is on the tape, and {again} was decided"
    mine, theirs = replayed["fields"], line.get("fields", {})
    for key in [*mine, *theirs]:
        if mine.get(key) != theirs.get(key):
            return f"{key} of {name} is {theirs.get(key)!r} on the tape, and {mine.get(key)!r} was decided"
    return f"{name} has something beside its fields on the tape"
