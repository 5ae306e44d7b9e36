"""The rounds of a run, from their openings to the islands that have adopted their versions. Pure.

What brokers and islands have is known from their answers and heartbeats: that is late by up to one of those.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aggregator.interface.events import Note
from aggregator.interface.notes import ContributionAccepted, RoundCancelled, RoundClosed, RoundOpened, VersionCommitted

Line = Mapping[str, Any]

#: Rounds that are remembered; the oldest fall out.
MAX_ROUNDS = 3000
#: A version is not followed for longer where somebody has not adopted it.
ADOPTED_WITHIN_S = 30.0
#: Versions that are followed at most; the oldest go first.
MOST_FOLLOWED = 256


@dataclass(slots=True, kw_only=True)
class Round:
    """One round; times in seconds since the run began.

    Attributes:
        changed: Number of the last change that a page shows, in the order of all changes.
        answers: The contributions that came in time, and when.
        committed: The version that it led to; None while it has not, or if it was cancelled.
        not_durable: Why its version could not be written at first.
        brokers: Broker -> when it said that it has the version.
        adopted: Contributor -> when it said that it trains on this version or a later one, and which.
        failed: Why it came to nothing.
    """

    number: int
    fragment: int
    opened_s: float
    opened: RoundOpened | None = None
    changed: int
    answers: list[tuple[float, ContributionAccepted]] = field(default_factory=list)
    closed: RoundClosed | None = None
    closed_s: float | None = None
    computed_s: float | None = None
    persisted_s: float | None = None
    not_durable: str = ""
    committed: VersionCommitted | None = None
    committed_s: float | None = None
    contributors: frozenset[str] = frozenset()
    brokers: dict[int, float] = field(default_factory=dict)
    adopted: dict[str, tuple[float, int]] = field(default_factory=dict)
    failed: str = ""
    failed_s: float = 0.0
    cancelled: bool = False

    def forget(self) -> None:
        """Drops the lists of islands, once no island can follow the round any more."""
        self.answers, self.brokers, self.adopted = [], {}, {}
        if self.committed is not None:
            self.committed = replace(self.committed, contributions=None, missing=())


class Rounds:
    """Follows rounds from their openings to the adoption of their versions.

    Args:
        change: Returns the number of a new change.

    Attributes:
        over: Is told of each round that leads to nothing more: it has failed, or its version is adopted.
    """

    def __init__(self, change: Callable[[], int]) -> None:
        self._change = change
        self.over: Callable[[Round], None] = lambda each: None
        self.known: dict[tuple[int, int], Round] = {}  # by fragment and number: shards count by themselves
        self._open: dict[int, Round] = {}  # by fragment: collecting, merging or being made durable
        self._versions: OrderedDict[tuple[int, int], Round] = OrderedDict()  # fragment and version -> published

    def note(self, note: Note, now_s: float) -> None:
        """Takes a decision of the core."""
        match note:
            case RoundOpened(fragment=p):
                self._open[p] = self._begin(note, now_s)
                self._open[p].opened = note
            case ContributionAccepted(fragment=p, round=number) if p in self._open:
                if self._open[p].number == number:
                    self._open[p].answers.append((now_s, note))
            case RoundClosed(fragment=p, round=number) if (p, number) in self.known:
                here = self.known[p, number]
                here.closed, here.closed_s, here.changed = note, now_s, self._change()
            case RoundCancelled(fragment=p, round=number) if (p, number) in self.known:
                here = self.known[p, number]
                here.closed_s, here.changed, here.cancelled = now_s, self._change(), True
                self._fail(p, note.reason, now_s)
            case VersionCommitted():
                self._committed(note, now_s)
            case _:
                pass

    def _begin(self, note: RoundOpened | VersionCommitted, opened_s: float) -> Round:
        begun = Round(number=note.round, fragment=note.fragment, opened_s=opened_s, changed=self._change())
        self.known[note.fragment, note.round] = begun
        while len(self.known) > MAX_ROUNDS:
            self.known.pop(next(iter(self.known)))
        return begun

    def _committed(self, note: VersionCommitted, now_s: float) -> None:
        here = self.known.get((note.fragment, note.round))
        if here is None:  # Redis tells of versions alone
            here = self._begin(note, max(0.0, now_s - note.took_s))
        here.closed_s = now_s if here.closed_s is None else here.closed_s
        here.committed, here.committed_s, here.changed = note, now_s, self._change()
        here.contributors = frozenset(each.island for each in note.contributions or ())
        if self._open.pop(note.fragment, None) is not here:
            here.forget()
            return
        self._versions[note.fragment, note.version] = here
        while len(self._versions) > MOST_FOLLOWED:
            self._finish(next(iter(self._versions)))

    def event(self, line: Line, now_s: float) -> None:
        """Takes an event that the core got."""
        here = self._open.get(line.get("fragment_id", -1))
        match line["event"], line.get("kind"):
            case "computed", _ if here is not None:
                here.computed_s = now_s
            case "persisted", _ if here is not None:
                here.persisted_s = now_s
            case "persist_failed", _ if here is not None:
                here.not_durable = line["detail"]
            case "received", "heartbeat":
                for each, version in self._having(line["body"].get("versions", ())):
                    if line["sender"] in each.contributors:
                        each.adopted.setdefault(line["sender"], (now_s, version))
            case "received", "attached":
                for each, _ in self._having(line["body"]["versions"]):
                    each.brokers.setdefault(line["broker"], now_s)
            case _:
                pass
        for key, each in list(self._versions.items()) if self._versions else ():
            whole = each.brokers and len(each.adopted) == len(each.contributors)
            if whole or now_s >= (each.persisted_s or 0) + ADOPTED_WITHIN_S:
                self._finish(key)

    def _having(self, versions: Sequence[int]) -> list[tuple[Round, int]]:
        """Returns the rounds whose versions a holder of ``versions`` has, with its version of the fragment."""
        followed = [each for each in self._versions.items() if each[1].persisted_s is not None]
        return [(each, versions[p]) for (p, version), each in followed if p < len(versions) and versions[p] >= version]

    def end(self, now_s: float, owns: Callable[[int], bool] = lambda fragment: True) -> None:
        """Ends all rounds of an aggregator's fragments; those under way have failed."""
        for key in [key for key in self._versions if owns(key[0])]:
            self._finish(key)
        for p in [p for p in self._open if owns(p)]:
            self._fail(p, "the aggregator ended", now_s)
        for each in self.known.values():
            if each.closed_s is None and owns(each.fragment):
                each.closed_s, each.cancelled, each.changed = now_s, True, self._change()

    def _fail(self, fragment: int, reason: str, now_s: float) -> None:
        here = self._open.pop(fragment, None)
        if here is not None:
            here.failed, here.failed_s = reason, now_s
            self._end(here)

    def _finish(self, key: tuple[int, int]) -> None:
        self._end(self._versions.pop(key))

    def _end(self, here: Round) -> None:
        self.over(here)
        here.forget()
