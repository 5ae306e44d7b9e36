"""Plays a tape into a core, and compares every decision with the recorded one.

:class:`Replay` takes the lines of a tape one by one and keeps no more than the core itself does, and a fingerprint per
version; a tape of days is as good as one of minutes. It stops at the first difference: what follows from it would only
be noise.

What must agree (reference.md, section 10, point 10):

* every note of the core, word for word, number for number;
* every completion with an order: nothing is computed or durable that the core did not ask for;
* the beginning of each life with the end of the one before: what was durable is there, with the same books;
* with recorded payloads, every byte of every version (:mod:`ops.inspect.rederivation`).

What may be missing: the last lines before a crash (versions of that moment can be in the store and not on the tape),
and what a full disk cost, which the tape says itself. The latter makes the rest of that life impossible to follow. So
does a segment that was dropped (:mod:`aggregator.store.segments`): the life that goes on behind it lost its beginning.
None of it is a difference, and none of it is passed over in silence: each version that is known of and could not be
derived is in :attr:`Replay.unchecked` with the reason, for a :class:`~ops.inspect.replay_result.Coverage` to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aggregator.interface.events import Action, Commit, Computed, Event, Merge, Note, Persist, Persisted, Plant
from aggregator.interface.notes import RolledBack, VersionCommitted
from aggregator.interface.reading_notes import note_in
from aggregator.rounds.core import Aggregator
from aggregator.standby.replication import NOTES
from aggregator.state.records import commit_from_map, commit_to_map, ledger_line
from aggregator.store.segments import Header
from aggregator.store.tape import note_line, read_event, read_start
from ops.inspect.replay_result import (
    Counts,
    Difference,
    Key,
    Line,
    PartReason,
    as_read,
    fingerprint,
    what_differs,
)

if TYPE_CHECKING:
    from ops.inspect.rederivation import Rederivation

#: Notes that no core decided.
_BESIDE = {each.name for each in (*NOTES, RolledBack)}


@dataclass(slots=True)
class _Life:
    """One life of the aggregator, as far as it was played."""

    core: Aggregator | None  #: None: its beginning is in a segment that is gone
    expected: list[Note] = field(default_factory=list)  #: decisions whose lines must come next
    ordered: dict[int, Plant | Merge] = field(default_factory=dict)
    commits: dict[int, Commit] = field(default_factory=dict)  #: the newest one ordered, per fragment
    begun: dict[int, Commit] = field(default_factory=dict)  #: those it began with
    durable: dict[int, int] = field(default_factory=dict)  #: fragment -> newest durable version
    behind: Difference | None = None  #: it began with less than was durable, and may do nothing but wait
    started: bool = False
    lost: bool = False  #: lines are missing: the core is no longer where the tape is


class Replay:
    """Plays one tape; see the module's docstring.

    Attributes:
        counts: So far.
        fingerprints: (fragment, version) -> fingerprints of the ledger lines of its commits; more than one only for a
            version 0 that was seeded anew.
        digests: (fragment, version) -> digest, of all versions that the tape names, derived or not.
        durable: (fragment, version) of the commits that were reported durable.
        unchecked: (fragment, version) of those that the tape knows of, and that could not be derived from it.
        given_up: (fragment, version) of those that a new lineage went back behind.
        epochs: Epochs of the lives on this tape.
        missing_recordings: Merged versions whose payloads were recorded and are gone.
        gone: First and last number of segments that are gone, and how many lines they had.
    """

    def __init__(self, check: Rederivation | None = None) -> None:
        self.counts = Counts()
        self.fingerprints: dict[Key, set[int]] = {}
        self.digests: dict[Key, str] = {}
        self.durable: set[Key] = set()
        self.unchecked: dict[Key, PartReason] = {}
        self.given_up: set[Key] = set()
        self.epochs: set[int] = set()
        self.missing_recordings = 0
        self.gone: list[tuple[int, int, int]] = []
        self._segment = self._dropped = 0  # the one that is played; up to which the rule has dropped
        self._lives_before = 0
        self._failover = False
        self._check = check
        self._life: _Life | None = None
        self._unreported: dict[Key, Commit] = {}  # the last ones that earlier lives ordered, and did not hear of again
        self._unreadable: int | None = None
        self._number = 0

    def take(self, number: int, line: Line | None) -> Difference | None:
        """Plays the next line; returns the difference it shows, after which nothing more may be played.

        Args:
            number: Number of the line, from 1.
            line: The line; None for one that is no JSON object.
        """
        before, self._number = self._number, number
        try:
            if line is not None and "segment" in line:
                self._enter(Header.read(line), before)
                return None
            self._segment = max(self._segment, 1)
            difference = self._take(line)
        except Exception as err:  # noqa: BLE001 - a line that was tampered with can set off anything in a core
            difference = self._difference(f"this line cannot be played: {type(err).__name__}: {err}")
        behind = self._life.behind if self._life is not None else None
        return difference if difference is None or behind is None else behind  # the rest follows from that

    def _take(self, line: Line | None) -> Difference | None:
        if line is None:
            self._unreadable = self._number if self._unreadable is None else self._unreadable
            self.counts.torn += 1
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
        if self._life.lost or self._life.core is None:
            self._skip(line)
            return None
        if not self._life.started:
            # The core was started a moment after its first line was written: its first note has the time.
            self._life.started = True
            wrong = self._order(self._life.core.start(line["now_s"]))
            if wrong is not None:
                return wrong
        return self._event(line) if "event" in line else self._note(line)

    @property
    def failover(self) -> bool:
        """True if other aggregators may have led this run, with versions that this ledger lacks."""
        return self._failover

    @property
    def missing_lines(self) -> int:
        """Lines of lost segments that no rule dropped: a rule drops the oldest, never one in the middle."""
        return sum(max(1, lines) for first, last, lines in self.gone if first > 1 or last > self._dropped)

    def tells_from(self) -> dict[int, int]:
        """Returns fragment -> oldest version that the tape names."""
        oldest: dict[int, int] = {}
        for p, version in self.digests:
            oldest[p] = min(version, oldest.get(p, version))
        return oldest

    def heard_of(self, row: Line) -> None:
        """Takes a ledger's line as the completion of a commit that was being written when its life ended."""
        key = row["fragment_id"], row["fragment_version"]
        commit = self._unreported.get(key) or (None if self._life is None else self._life.commits.get(key[0]))
        if commit is None or commit.fragment_version != key[1] or key in self.durable:
            return
        if fingerprint(row) == fingerprint(ledger_line(commit)):
            self._witness(commit)

    # --- segments -----------------------------------------------------------------------------------------------

    def _enter(self, header: Header, before: int) -> None:
        """Begins a segment; ``before`` is the number of the last line of the segment before."""
        expected, self._segment = self._segment + 1, header.segment
        self._dropped = max(self._dropped, header.dropped)
        if header.segment <= expected:
            return
        self.gone.append((expected, header.segment - 1, header.lines - before))
        self._life, self._unreadable = None, None
        self._lives_before = header.lives - self.counts.lives
        if header.life is not None:  # it has lost its beginning, unless the next line begins another
            self._life = _Life(None)
            self._failover = bool(header.life.get("config", {}).get("failover"))
            self.epochs.add(int(header.life["epoch"]))

    # --- lives ------------------------------------------------------------------------------------------------

    def _begin(self, line: Line) -> Difference | None:
        before, core = self._life, Aggregator(**read_start(line))
        commits = () if before is None else before.commits.values()
        self._unreported |= {(each.fragment_id, each.fragment_version): each for each in commits}
        life = self._life = _Life(core)
        self.counts.lives += 1
        self.epochs.add(core.run.epoch)
        self._failover = core.run.config.failover
        rows = {row["fragment_id"]: row for row in line["commits"]}
        for p in sorted({*rows, *(() if before is None else before.durable)}):
            durable = -1 if before is None else before.durable.get(p, -1)
            version = rows[p]["fragment_version"] if p in rows else -1
            if version < durable:
                # Its store went back. That is no difference yet: it may notice, say so, and wait.
                has = f"version {version}" if p in rows else "no version"
                what = f"this life begins with {has} of fragment {p}, and version {durable} was durable"
                life.behind = life.behind or self._difference(what)
                life.durable[p] = durable
                continue
            life.durable[p], life.begun[p] = version, commit_from_map(rows[p])
            wrong = self._begin_with(life.begun[p], rows[p], before)
            if wrong is not None:
                return wrong
        if self._check is not None:
            self._check.begin(core)
        return None

    def _begin_with(self, commit: Commit, row: Line, before: _Life | None) -> Difference | None:
        """Compares a commit that a life begins with, on the tape as ``row``, with the end of the life before."""
        p, version = commit.fragment_id, commit.fragment_version
        durable = -1 if before is None else before.durable.get(p, -1)
        known = None if before is None else before.commits.get(p, before.begun.get(p))
        unknown = before is None or (before.core is None and durable < 0)
        why = PartReason.DROPPED if unknown and self.gone else PartReason.CRASH
        if known is not None and version == known.fragment_version:
            ordered = as_read(commit_to_map(known))
            if row == ordered:
                if version > durable:
                    self._witness(known)  # its completion was not on the tape any more
                return None
            if version <= durable or row["epoch"] == known.epoch:
                what = f"the commit of version {version} of fragment {p} is not the one that was ordered"
                return self._difference(what, row, ordered)
            if commit.contributions:
                self._miss(commit)  # ordered here, and made by the next leader
            else:
                self._new_lineage(commit, durable)  # what was ordered never came to the disk
        elif version > durable:
            if version > 0 and not commit.contributions and why is PartReason.CRASH:
                if known is not None and known.digest == commit.digest:
                    self._witness(known)  # likewise: what goes on from it had it, as after a restore from a copy
                self._new_lineage(commit, durable)
                return None
            first = version if unknown else durable + 1
            for each in range(first, version):
                self._unchecked(p, each, PartReason.CRASH)
            self._miss(commit, why)
        else:
            self._known(commit)  # made behind a gap
        return None

    def _new_lineage(self, commit: Commit, durable: int) -> None:
        """Takes a new lineage: an earlier version goes on under a number above all that were seen."""
        p, version = commit.fragment_id, commit.fragment_version
        kept = [v for (q, v), digest in self.digests.items() if q == p and v < version and digest == commit.digest]
        self.given_up |= {(p, each) for each in range(max(kept, default=durable) + 1, version)}
        if kept:
            self._known(commit)
            self.durable.add((p, version))
            self.counts.versions += 1
        else:
            self._miss(commit)

    def _miss(self, commit: Commit, why: PartReason = PartReason.CRASH) -> None:
        """Takes the version that a life's first line has, and no line before tells of."""
        self._known(commit)
        self._unchecked(commit.fragment_id, commit.fragment_version, why)

    def _unchecked(self, p: int, version: int, why: PartReason) -> None:
        key = p, version
        if key in self.durable or key in self.unchecked:
            return
        self.unchecked[key] = why
        if why is PartReason.GAP:
            self.counts.unfollowed += 1
        elif why is PartReason.DROPPED:
            self.counts.dropped += 1
        else:
            self.counts.unwitnessed += 1

    # --- lines ------------------------------------------------------------------------------------------------

    def _skip(self, line: Line) -> None:
        """Skips a line behind a gap; the versions in it count as known, and not derived."""
        why = PartReason.GAP
        if self._now().core is None:
            why = PartReason.DROPPED
            self.counts.beheaded += 1
        else:
            self.counts.skipped += 1
        if line.get("event") == "persisted":
            p, version = line["fragment_id"], line["fragment_version"]
            self._now().durable[p] = version
            self._unchecked(p, version, why)
        elif isinstance(note := note_in(line), VersionCommitted):
            self.digests[note.fragment, note.version] = note.digest

    def _event(self, line: Line) -> Difference | None:
        life = self._now()
        if life.expected:
            note = life.expected[0]
            what = f"here {note.name} was decided, which is not on the tape"
            return self._difference(what, None, as_read(note_line(note, line["now_s"])))
        event = read_event(line)
        wrong = self._completion(event)
        if wrong is not None:
            return wrong
        assert life.core is not None
        wrong = self._order(life.core.handle(event, line["now_s"]))
        self.counts.events += 1
        return wrong

    def _note(self, line: Line) -> Difference | None:
        life = self._now()
        if line.get("note") in _BESIDE:
            self.counts.beside += 1
            return None
        if not life.expected:
            return self._difference(f"{line.get('note')} is on the tape, and nothing was decided here", dict(line))
        replayed = as_read(note_line(life.expected.pop(0), line["now_s"]))
        if line != replayed:
            return self._difference(what_differs(line, replayed), dict(line), replayed)
        self.counts.decisions += 1
        return None

    def _completion(self, event: Event) -> Difference | None:
        """Checks that a completed action had been ordered."""
        life = self._now()
        match event:
            case Computed(fragment_id=p, fragment_version=version):
                order = life.ordered.pop(p, None)
                ordered = None if order is None else order.fragment_version if isinstance(order, Merge) else 0
                if ordered != version:
                    what = f"version {version} of fragment {p} was computed, and {_ordered(ordered)}"
                    return self._difference(what)
                if isinstance(order, Merge):
                    assert life.core is not None
                    wrong = self._merged(life.core, order, event)
                    return self._difference(wrong) if wrong else None
                if self._check is not None:
                    self._check.planted(p)
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

    def _merged(self, core: Aggregator, action: Merge, event: Computed) -> str:
        """Returns the flaw in the bytes of a version; empty if they agree or were not recorded."""
        if self._check is None:
            self.missing_recordings += core.run.config.record_payloads
            return ""
        wrong = self._check.merged(core, action, event)
        self.missing_recordings = self._check.missing
        return wrong

    def _order(self, actions: list[Action]) -> Difference | None:
        """Records a core's actions; returns a difference if one contradicts its store."""
        life = self._now()
        for action in actions:
            if life.behind is not None and isinstance(action, Plant | Merge | Persist):
                return life.behind
            match action:
                case Note():
                    life.expected.append(action)
                case Plant() | Merge():
                    life.ordered[action.fragment_id] = action
                case Persist(commit=commit):
                    life.commits[commit.fragment_id] = commit
                case _:
                    pass
        return None

    def _witness(self, commit: Commit) -> None:
        key = commit.fragment_id, commit.fragment_version
        self.counts.versions += key not in self.durable
        self.durable.add(key)
        self._known(commit)
        if self._check is not None:
            self._check.persisted(commit.fragment_id)

    def _known(self, commit: Commit) -> None:
        key = commit.fragment_id, commit.fragment_version
        self.digests[key] = commit.digest
        self.fingerprints.setdefault(key, set()).add(fingerprint(ledger_line(commit)))

    def _now(self) -> _Life:
        assert self._life is not None
        return self._life

    def _difference(self, what: str, on_tape: Any = None, replayed: Any = None) -> Difference:
        life = self._lives_before + self.counts.lives
        return Difference(line=self._number, life=life, what=what, on_tape=on_tape, replayed=replayed)


def _ordered(version: int | None) -> str:
    return "nothing was ordered" if version is None else f"version {version} was ordered"
