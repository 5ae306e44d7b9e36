"""The absence of islands from a version, and its reason, from the event tape. Pure.

:class:`Storyteller` follows who is known, when each was last heard, and what became of each round; of past rounds it
keeps only the one that was asked for. The ledger has who is in a version; the tape alone has why the others are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aggregator.interface.events import Note
from aggregator.interface.leader_notes import BrokerBack
from aggregator.interface.notes import (
    ContributionHeld,
    ContributionRefused,
    ContributionRetry,
    IslandAdvancing,
    IslandBelieved,
    IslandCorrupted,
    IslandDoubted,
    IslandJoined,
    IslandLeft,
    IslandQuarantined,
    IslandStanding,
    Merging,
    RolledBack,
    RoundCancelled,
    RoundClosed,
    RoundOpened,
    VersionCommitted,
)
from aggregator.interface.reading_notes import note_in

Line = Mapping[str, Any]


class AbsenceReason(StrEnum):
    """Why a known island was not in a version."""

    LEFT = "left"
    DEAD = "dead"
    NOT_JOINED = "not joined yet"
    NOT_READY = "not ready"
    NOTHING = "nothing to hand over"
    REFUSED = "refused"
    RETRY = "to be sent again"
    QUARANTINED = "quarantined"
    LATE = "too late"
    SILENT = "no answer"
    UNRESPONSIVE = "not waited for"


#: A reason, and a sentence about it or an empty text.
Why = tuple[AbsenceReason, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """An island that was not in a version, and why; ``detail`` is a sentence, or empty."""

    island: str
    why: AbsenceReason
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The round to explain: by fragment and version (None: the newest), or by its id."""

    fragment: int | None = None
    version: int | None = None
    round_id: int | None = None


@dataclass(slots=True)
class Known:
    """An island's state, from the tape."""

    heard_at_s: float
    incarnation: int = 0
    ready: bool = False
    left: str | None = None  #: the reason it gave
    quarantined: str = ""  #: for what, until ``quarantined_until_s``
    quarantined_until_s: float = -math.inf
    link: Line = field(default_factory=dict)  #: as its last heartbeat says
    standing: bool = False  #: it makes no steps
    corrupted: str = ""  #: what it found corrupt, until it holds every fragment again
    doubted: str = ""  #: what of its claims is not believed


@dataclass(slots=True)
class RoundStory:
    """One round, from its opening to its version or its cancellation.

    Attributes:
        asked: Islands that were asked.
        unasked: The other islands known then, and why they were not.
        missing: Islands that were waited for when it closed.
        committed: Its version; None if it was cancelled, or the version is not on the tape.
        late: Island -> seconds after the closing at which its answer came.
        caught_up: Island -> version that took its late answer in.
        beheaded: The tape has lost the beginning of the life: islands that it had not heard since are not known.
        standing: Islands that made no steps when it closed.
        nothing: Islands that answered "nothing", and why, as far as it is known.
        codecs: Island and first step of contributions to the fragment that came lately -> their number format.
        doubted: Island -> what of its claims was not believed when the round closed.
    """

    round_id: int
    fragment: int
    opened_at_s: float
    life: int
    flush: bool
    asked: frozenset[str]
    unasked: dict[str, Why]
    nothing: dict[str, str] = field(default_factory=dict)
    codecs: Mapping[tuple[str, int], str] = field(default_factory=dict)
    refused: dict[str, Why] = field(default_factory=dict)
    closed_at_s: float | None = None
    reason: str = ""
    missing: frozenset[str] = frozenset()
    joined: dict[str, float] = field(default_factory=dict)
    gone: dict[str, Why] = field(default_factory=dict)
    standing: set[str] = field(default_factory=set)
    doubted: Mapping[str, str] = field(default_factory=dict)
    committed: VersionCommitted | None = None
    late: dict[str, float] = field(default_factory=dict)
    caught_up: dict[str, int] = field(default_factory=dict)
    beheaded: bool = False

    @property
    def took_s(self) -> float | None:
        """Seconds from its opening to its closing; None if it is not closed."""
        return None if self.closed_at_s is None else round(self.closed_at_s - self.opened_at_s, 4)

    @property
    def contributions(self) -> Sequence[Merging]:
        """Returns the contributions in its version."""
        return () if self.committed is None else self.committed.contributions or ()

    def absences(self) -> list[Absence]:
        """Returns why each known island that is not in the version is not, by island."""
        present = {each.island for each in self.contributions}
        everybody = {*self.asked, *self.unasked, *self.joined, *self.refused, *self.missing} - present
        reasons = {island: self._why(island) for island in sorted(everybody)}
        return [Absence(island=island, why=why, detail=detail) for island, (why, detail) in reasons.items()]

    def _why(self, island: str) -> Why:
        if island in self.refused:
            return self.refused[island]
        if island in self.nothing:
            return AbsenceReason.NOTHING, self.nothing[island]
        if island in self.joined:
            after_s = self.joined[island] - self.opened_at_s
            return AbsenceReason.NOT_JOINED, f"it joined {after_s:.1f} s after the opening"
        if island in self.late:
            detail = f"its answer came {self.late[island]:.3f} s after the closing"
            into = self.caught_up.get(island)
            detail += f", and is in version {into}" if into is not None else ""
            if island in self.asked - self.missing:
                detail += "; it was not waited for, since it had missed two rounds in a row or the wait was over"
            return AbsenceReason.LATE, detail
        if island in self.unasked:
            return self.unasked[island]
        if island in self.gone:
            return self.gone[island]
        if island in self.missing:
            return AbsenceReason.SILENT, "it was waited for until the round closed"
        if island in self.standing:
            return AbsenceReason.UNRESPONSIVE, "it was heard, but made no steps"
        return AbsenceReason.UNRESPONSIVE, "it had missed two rounds in a row, and did not answer"


class Storyteller:
    """Follows a tape and keeps the wanted round; see the module's docstring.

    Attributes:
        found: The last round so far that fits the target.
        went_back: Fragment and version of each lineage that began with a snapshot.
    """

    def __init__(self, target: Target) -> None:
        self.found: RoundStory | None = None
        self.went_back: set[tuple[int, int]] = set()
        self._target = target
        self._life = 0
        self._dead_after_s = 6.0
        self._beheaded = False  # the tape has lost the beginning of this life
        self._known: dict[str, Known] = {}
        self._rounds: dict[int, RoundStory] = {}  # open, or on their way to a version
        self._codecs: dict[int, dict[tuple[str, int], str]] = {}  # fragment -> those of what came since its version
        self._last: Line = {}  # the event that the notes before us follow from

    def take(self, line: Line) -> None:
        """Reads the next line."""
        if line.get("missing"):
            self._behead(line.get("life") or {})
        if "tape" in line:
            self._begin(line)
        elif "event" in line:
            self._last = line
            if line["event"] == "received":
                self._received(line)
        elif "note" in line:
            self._note(note_in(line), line["now_s"])

    def _begin(self, line: Line) -> None:
        """Begins a life: the members of the run record count as just heard, and no round is open."""
        self._life += 1
        self._beheaded = False
        self._dead_after_s = line["config"].get("dead_after_s", self._dead_after_s)
        self._rounds.clear()
        now_s, record = line["now_s"], line.get("record") or {}
        self._known = {
            name: Known(heard_at_s=now_s, incarnation=row[2], left="it had left before" if row[5] else None)
            for name, row in record.get("members", {}).items()
        }
        for name, (_, _, left_s, reason, _) in record.get("quarantine", {}).items():
            if name in self._known:
                self._known[name].quarantined, self._known[name].quarantined_until_s = reason, now_s + left_s

    def _behead(self, life: Line) -> None:
        """Continues a life whose beginning is lost: no island is known until it is heard."""
        self._beheaded = True
        self._dead_after_s = life.get("config", {}).get("dead_after_s", self._dead_after_s)
        self._rounds.clear()
        self._known = {}

    def _received(self, line: Line) -> None:
        if line["kind"] == "roster":
            self._enrolled(line["body"]["members"], line["now_s"])
        known = self._known.get(line["sender"])
        beats = line["kind"] == "heartbeat" and line.get("flaw") is None
        if self._beheaded and beats and (known is None or known.incarnation < line["incarnation"]):
            known = self._known[line["sender"]] = Known(heard_at_s=line["now_s"], incarnation=line["incarnation"])
        if known is None or line["incarnation"] != known.incarnation:
            return
        known.heard_at_s = line["now_s"]
        body = line["body"]
        if line["kind"] == "heartbeat":
            known.ready, known.left = all(version >= 0 for version in body["versions"]), None
            known.link = body.get("link") or {}
            known.corrupted = "" if known.ready else known.corrupted
        elif line["kind"] == "nothing" and body["round_id"] in self._rounds:
            self._rounds[body["round_id"]].nothing[line["sender"]] = _nothing(known.link)
        elif line["kind"] == "contribution" and line.get("buffers"):
            codecs = self._codecs.setdefault(body["fragment_id"], {})
            codecs[line["sender"], body["steps"]["from_step"]] = line["buffers"][0][0]

    def _note(self, note: Note | None, now_s: float) -> None:
        known = self._known.get(getattr(note, "island", ""))
        match note:
            case IslandJoined(island=island, incarnation=incarnation):
                self._joined(island, incarnation, now_s)
            case IslandLeft(reason=reason) if known is not None:
                known.left = reason or "it gave no reason"
            case IslandQuarantined(reason=reason, for_s=for_s) if known is not None:
                known.quarantined, known.quarantined_until_s = reason, now_s + for_s
            case IslandStanding() | IslandAdvancing() if known is not None:
                known.standing = isinstance(note, IslandStanding)
            case IslandCorrupted(island=island, fragment=p) if known is not None:
                known.corrupted = f"it had found fragment {p} corrupt in its memory, and adopted it anew"
                for story in self._rounds.values():
                    if story.fragment == p:
                        story.nothing[island] = known.corrupted
            case IslandDoubted(detail=detail) if known is not None:
                known.doubted = detail
            case IslandBelieved() if known is not None:
                known.doubted = ""
            case BrokerBack():  # nobody could be heard while it was away: who lived then counts as just heard
                for each in self._known.values():
                    each.heard_at_s = now_s
            case RoundOpened():
                self._opened(note, now_s)
            case ContributionRefused() | ContributionRetry():
                answered = self._rounds.get(self._answered(note))
                if answered is not None:
                    why = AbsenceReason.REFUSED if isinstance(note, ContributionRefused) else AbsenceReason.RETRY
                    answered.refused[note.island] = why, f"{note.reason}: {note.detail}".rstrip(": ")
            case ContributionHeld():
                self._held(note, now_s)
            case RoundClosed() | RoundCancelled():
                self._closed(note, now_s)
            case VersionCommitted():
                self._committed(note)
            case RolledBack(versions=versions):
                self.went_back |= set(enumerate(versions))
            case _:
                pass

    def _joined(self, island: str, incarnation: int, now_s: float) -> None:
        before, begun = self._known.get(island), Known(heard_at_s=now_s, incarnation=incarnation)
        if before is not None:  # a new life ends neither a quarantine nor a doubt
            begun.doubted = before.doubted
            begun.quarantined, begun.quarantined_until_s = before.quarantined, before.quarantined_until_s
        self._known[island] = begun
        for story in self._rounds.values():
            if story.closed_at_s is None:
                story.joined[island] = now_s

    def _enrolled(self, members: Sequence[Line], now_s: float) -> None:
        """Adds the islands that shard 0 has admitted: other shards hear of islands by it alone."""
        for each in members:
            island, known = each["island_id"], self._known.get(each["island_id"])
            if known is None or known.incarnation < each["incarnation"]:
                self._joined(island, each["incarnation"], now_s)
                known = self._known[island]
            if each["left"] and known.left is None:
                known.left = "it said so"

    def _opened(self, note: RoundOpened, now_s: float) -> None:
        unasked = {island: why for island, known in self._known.items() if (why := self._unfit(known, now_s))}
        self._rounds[note.round] = RoundStory(
            round_id=note.round,
            fragment=note.fragment,
            opened_at_s=now_s,
            life=self._life,
            flush=note.flush,
            asked=frozenset(self._known) - frozenset(unasked),
            unasked=unasked,
            beheaded=self._beheaded,
        )

    def _unfit(self, known: Known, now_s: float) -> Why | None:
        """Returns why an island cannot be asked at a time; None if it can."""
        silent_s = now_s - known.heard_at_s
        if known.left is not None:
            return AbsenceReason.LEFT, known.left
        if silent_s >= self._dead_after_s:
            return AbsenceReason.DEAD, f"silent for {silent_s:.1f} s"
        if now_s < known.quarantined_until_s:
            return AbsenceReason.QUARANTINED, known.quarantined
        if not known.ready:
            return AbsenceReason.NOT_READY, known.corrupted or "it had not yet reported that it holds every fragment"
        return None

    def _answered(self, note: ContributionRefused | ContributionRetry) -> int:
        """Returns the round that a contribution answered, or the one of its fragment that is open."""
        last = self._last
        came = last.get("kind") == "contribution" and last["sender"] == note.island
        if came and last["body"]["fragment_id"] == note.fragment:  # else the closing of another round refused it
            return int(last["body"]["round_id"])
        return next((n for n, story in self._rounds.items() if story.fragment == note.fragment), -1)

    def _held(self, note: ContributionHeld, now_s: float) -> None:
        story = self._rounds.get(note.round)
        if story is None and self.found is not None and self.found.life == self._life:
            story = self.found if self.found.round_id == note.round else None
        if story is not None and story.closed_at_s is not None:
            story.late[note.island] = now_s - story.closed_at_s

    def _closed(self, note: RoundClosed | RoundCancelled, now_s: float) -> None:
        story = self._rounds.get(note.round)
        if story is None:
            return
        story.closed_at_s, story.reason = now_s, note.reason
        story.missing = frozenset(note.missing) if isinstance(note, RoundClosed) else frozenset()
        story.doubted = {name: known.doubted for name, known in self._known.items() if known.doubted}
        for island in story.asked:
            known = self._known.get(island)
            why = self._unfit(known, now_s) if known is not None else None
            if known is not None and known.standing:
                story.standing.add(island)
            if why is not None and why[0] in (AbsenceReason.LEFT, AbsenceReason.DEAD):
                story.gone[island] = why
        if isinstance(note, RoundCancelled):
            self._rounds.pop(story.round_id)
            if self._target.round_id == story.round_id:
                self.found = story

    def _committed(self, note: VersionCommitted) -> None:
        story, found = self._rounds.pop(note.round, None), self.found
        codecs = self._codecs.get(note.fragment, {})
        merged = {key: codecs.pop(key, "") for each in note.contributions or () for key in [each.key]}
        if found is not None and found.fragment == note.fragment and note.round != found.round_id:
            for each in note.contributions or ():
                if each.island in found.late and not each.fresh:
                    found.caught_up.setdefault(each.island, note.version)
        if story is None:
            return
        story.committed, story.codecs = note, merged
        target = self._target
        if story.round_id == target.round_id or (
            story.fragment == target.fragment and target.version in (None, note.version)
        ):
            self.found = story


def _nothing(link: Line) -> str:
    """Returns why an island may have answered "nothing"."""
    if link.get("share", 1.0) < 1:
        return f"its link carries {link['codec']} in 1 of {round(1 / link['share'])} rounds"
    return "it had no step since its last hand-over"
