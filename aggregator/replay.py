"""A tape played again: the same events into the same core, and every decision compared with the one on the tape.

:class:`Replay` takes the lines of a tape one by one and keeps no more than the core itself does, and a fingerprint per
version; a tape of days is as good as one of minutes. It stops at the first difference: what follows from it would only
be noise.

What must agree (design, section 10, point 10):

* every note of the core, word for word, number for number;
* every completion with an order: nothing is computed or durable that the core did not ask for;
* the beginning of each life with the end of the one before: what was durable is there, with the same books;
* with recorded payloads, every byte of every version (:mod:`aggregator.rederivation`).

What may be missing: the last lines before a crash (the tape is written twice a second; versions of that moment are in
the store and not on the tape), and what a full disk cost, which the tape says itself. The latter makes the rest of that
life impossible to follow; it is counted as skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash

from aggregator.core import Aggregator
from aggregator.events import Action, Commit, Computed, Event, Merge, Note, Persist, Persisted, Plant
from aggregator.records import commit_to_map, ledger_line
from aggregator.tape import note_line, read_event, read_start

Line = Mapping[str, Any]


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
        """What was made last of a fragment is durable."""
        ...


class NoBytes:
    """Checks no bytes: none were recorded."""

    def begin(self, core: Aggregator) -> None:
        """See :class:`ByteCheck`."""

    def planted(self, fragment_id: int, digest: str) -> None:
        """See :class:`ByteCheck`."""

    def merged(self, core: Aggregator, action: Merge, digest: str) -> str:
        """See :class:`ByteCheck`."""
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
        versions: Durable ones, version 0 included.
        unwitnessed: Versions that a life began with and that no earlier line tells of: made in the last moments before
            a crash, or by another aggregator.
        missing: Lines that the tape says it lost.
        skipped: Lines that could not be followed after such a gap.
    """

    lives: int = 0
    events: int = 0
    decisions: int = 0
    versions: int = 0
    unwitnessed: int = 0
    missing: int = 0
    skipped: int = 0


@dataclass(slots=True)
class _Life:
    """One life of the aggregator, as far as it was followed."""

    core: Aggregator
    expected: list[Note] = field(default_factory=list)  #: decisions whose lines must come next
    ordered: dict[int, Plant | Merge] = field(default_factory=dict)
    commits: dict[int, Commit] = field(default_factory=dict)  #: the newest one ordered, per fragment
    durable: dict[int, int] = field(default_factory=dict)  #: fragment -> version reported durable
    started: bool = False
    lost: bool = False  #: lines are missing: the core is no longer where the tape is


class Replay:
    """Plays one tape; see the module's docstring.

    Attributes:
        counts: So far.
        fingerprints: (fragment, version) -> fingerprints of the ledger lines of its commits; more than one only for a
            version 0 that was seeded anew.
        durable: (fragment, version) of the commits that were reported durable.
    """

    def __init__(self, check: ByteCheck | None = None) -> None:
        self.counts = Counts()
        self.fingerprints: dict[tuple[int, int], set[int]] = {}
        self.durable: set[tuple[int, int]] = set()
        self._check: ByteCheck = check if check is not None else NoBytes()
        self._life: _Life | None = None
        self._unreadable: int | None = None
        self._number = 0

    def take(self, number: int, line: Line | None) -> Difference | None:
        """Plays the next line; returns the difference it shows, after which nothing more may be played.

        Args:
            number: Of the line, from 1.
            line: The line; None for one that is no JSON object.
        """
        self._number = number
        try:
            return self._take(line)
        except Exception as err:  # noqa: BLE001 - a line that was tampered with can set off anything in a core
            return self._difference(f"this line cannot be played: {type(err).__name__}: {err}")

    def _take(self, line: Line | None) -> Difference | None:
        if line is None:
            self._unreadable = self._number if self._unreadable is None else self._unreadable
            return None
        if self._unreadable is not None and "tape" not in line and "gap" not in line:
            # A crash cuts the last line of a life short, a failing disk says how much is gone. This is neither.
            self._number = self._unreadable
            return self._difference("this line cannot be read, and the life goes on behind it")
        self._unreadable = None
        if "tape" in line:
            return self._begin(line)
        if self._life is None:
            return self._difference("the tape does not begin with the beginning of a life")
        if "gap" in line:
            self.counts.missing += line["gap"]
            self._life.lost = True
            return None
        if self._life.lost:
            self.counts.skipped += 1
            return None
        if not self._life.started:
            # The core was started a moment after its first line was written: its first note has the time.
            self._life.started = True
            self._order(self._life.core.start(line["now_s"]))
        return self._event(line) if "event" in line else self._note(line)

    # --- lives ------------------------------------------------------------------------------------------------

    def _begin(self, line: Line) -> Difference | None:
        before, core = self._life, read_start(line)
        self.counts.lives += 1
        self._life = _Life(core)
        for row in line["commits"]:
            p, version = row["fragment_id"], row["fragment_version"]
            known = before.commits.get(p) if before is not None else None
            durable = before.durable.get(p, -1) if before is not None else -1
            if version < durable:
                what = f"this life begins with version {version} of fragment {p}, and version {durable} was durable"
                return self._difference(what)
            if known is not None and version == known.fragment_version:
                ordered = _as_read(commit_to_map(known))
                if row == ordered:
                    self._witness(known)  # if its completion was not on the tape any more
                elif version <= durable or row["epoch"] == known.epoch:
                    what = f"the commit of version {version} of fragment {p} is not the one that was ordered"
                    return self._difference(what, row, ordered)
                else:
                    self.counts.unwitnessed += 1  # ordered here, and made by the next leader
            elif before is None or before.lost or version > durable:
                first = durable + 1 if before is not None else version
                self.counts.unwitnessed += version - first + 1
        self._check.begin(core)
        return None

    # --- lines ------------------------------------------------------------------------------------------------

    def _event(self, line: Line) -> Difference | None:
        life = self._now()
        if life.expected:
            note = life.expected[0]
            what = f"here {note.name} was decided, which is not on the tape"
            return self._difference(what, None, _as_read(note_line(note, line["now_s"])))
        event = read_event(line)
        wrong = self._completion(event)
        if wrong is not None:
            return wrong
        self._order(life.core.handle(event, line["now_s"]))
        self.counts.events += 1
        return None

    def _note(self, line: Line) -> Difference | None:
        life = self._now()
        if not life.expected:
            return self._difference(f"{line.get('note')} is on the tape, and nothing was decided here", dict(line))
        replayed = _as_read(note_line(life.expected.pop(0), line["now_s"]))
        if line != replayed:
            return self._difference(_what_differs(line, replayed), dict(line), replayed)
        self.counts.decisions += 1
        return None

    def _completion(self, event: Event) -> Difference | None:
        """Checks that what was completed had been ordered."""
        life = self._now()
        match event:
            case Computed(fragment_id=p, fragment_version=version, digest=digest):
                order = life.ordered.pop(p, None)
                ordered = None if order is None else order.fragment_version if isinstance(order, Merge) else 0
                if ordered != version:
                    what = f"version {version} of fragment {p} was computed, and {_ordered(ordered)}"
                    return self._difference(what)
                if not isinstance(order, Merge):
                    self._check.planted(p, digest)
                    return None
                wrong = self._check.merged(life.core, order, digest)
                return self._difference(wrong) if wrong else None
            case Persisted(fragment_id=p, fragment_version=version):
                commit = life.commits.get(p)
                if commit is None or commit.fragment_version != version:
                    ordered = None if commit is None else commit.fragment_version
                    return self._difference(f"version {version} of fragment {p} is durable, and {_ordered(ordered)}")
                life.durable[p] = version
                self._witness(commit)
            case _:
                pass
        return None

    def _order(self, actions: list[Action]) -> None:
        life = self._now()
        for action in actions:
            match action:
                case Note():
                    life.expected.append(action)
                case Plant() | Merge():
                    life.ordered[action.fragment_id] = action
                case Persist(commit=commit):
                    life.commits[commit.fragment_id] = commit
                case _:
                    pass

    def _witness(self, commit: Commit) -> None:
        key = commit.fragment_id, commit.fragment_version
        self.counts.versions += key not in self.durable
        self.durable.add(key)
        self.fingerprints.setdefault(key, set()).add(fingerprint(ledger_line(commit)))
        self._check.persisted(commit.fragment_id)

    def _now(self) -> _Life:
        assert self._life is not None
        return self._life

    def _difference(self, what: str, on_tape: Any = None, replayed: Any = None) -> Difference:
        return Difference(line=self._number, life=self.counts.lives, what=what, on_tape=on_tape, replayed=replayed)


def fingerprint(row: Mapping[str, Any]) -> int:
    """Returns a number that two lines of a ledger share only if they say the same."""
    text = json.dumps(_as_read(row), sort_keys=True, separators=(",", ":"))
    return int(xxhash.xxh3_64_intdigest(text.encode()))


def _as_read(value: Any) -> Any:
    """Returns plain data as it comes back from a line."""
    return json.loads(json.dumps(value, default=str))


def _what_differs(line: Line, replayed: Line) -> str:
    """Says in a sentence how two notes differ: the first field will do."""
    name, again = line.get("note"), replayed["note"]
    if name != again:
        return f"{name} is on the tape, and {again} was decided"
    mine, theirs = replayed["fields"], line.get("fields", {})
    for key in [*mine, *theirs]:
        if mine.get(key) != theirs.get(key):
            return f"{key} of {name} is {theirs.get(key)!r} on the tape, and {mine.get(key)!r} was decided"
    return f"{name} has something beside its fields on the tape"


def _ordered(version: int | None) -> str:
    return "nothing was ordered" if version is None else f"version {version} was ordered"
