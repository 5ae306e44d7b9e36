"""The spans of a round, from the events and notes on a tape. Pure.

    round                   from its opening to the last adoption
      open                  to its closing
        contribution        to the arrival of an island's answer; one for each
      merge                 to the new version in memory
      persist               until that is durable everywhere it must be
      publish               until a broker says that it has it; one for each
      adopt                 until an island says that it trains on it; one for each

What brokers and islands have is known from their answers and heartbeats: the last two are late by up to one of those.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aggregator.interface.events import Computed, Event, Note, Persisted, PersistFailed, Received
from aggregator.interface.notes import ContributionAccepted, RoundCancelled, RoundClosed, RoundOpened, VersionCommitted
from broker.wire.messages import Attached, Heartbeat

#: A trace is not held up for longer by who has not adopted its version.
ADOPTED_WITHIN_S = 30.0
#: Versions whose traces are held back at most; the oldest go first.
MOST_HELD = 256

Value = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One part of a round; times in seconds since the run began. ``failed`` says why, if it has."""

    name: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    failed: str = ""
    parts: tuple[Span, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Round:
    """A round under way, or a version that is not adopted yet."""

    round_id: int
    fragment: int
    opened_s: float
    attributes: dict[str, Value]
    contributions: list[Span] = field(default_factory=list)
    closed_s: float | None = None
    computed_s: float | None = None
    persisted_s: float | None = None
    not_durable: str = ""
    version: int = -1
    lacking: set[str] = field(default_factory=set)  #: islands that had to adopt it and have not
    after: list[Span] = field(default_factory=list)  #: publish and adopt
    brokers: set[int] = field(default_factory=set)  #: that have it


class RoundSpans:
    """Follows rounds, and gives each away as a span once it is over."""

    def __init__(self) -> None:
        self._rounds: dict[int, _Round] = {}  # by fragment: collecting, merging or being made durable
        self._versions: OrderedDict[tuple[int, int], _Round] = OrderedDict()  # (fragment, version) -> published
        self._done: list[Span] = []

    def take(self) -> list[Span]:
        """Returns the rounds that are over, each once."""
        done, self._done = self._done, []
        return done

    def heard(self, event: Event, now_s: float) -> None:
        """Takes in an event that went into the core."""
        match event:
            case Computed(fragment_id=p) if p in self._rounds:
                self._rounds[p].computed_s = now_s
            case Persisted(fragment_id=p) if p in self._rounds:
                self._rounds[p].persisted_s = now_s
            case PersistFailed(fragment_id=p, detail=detail) if p in self._rounds:
                self._rounds[p].not_durable = detail
            case Received(envelope=envelope, broker=broker):
                match envelope.message:
                    case Heartbeat(versions=versions):
                        self._adopted(envelope.sender, versions, now_s)
                    case Attached(versions=versions):
                        self._published(broker, versions, now_s)
                    case _:
                        pass
            case _:
                pass
        overdue = [key for key, each in self._versions.items() if now_s >= (each.persisted_s or 0) + ADOPTED_WITHIN_S]
        for key in overdue:
            self._finish(self._versions.pop(key))

    def note(self, note: Note | None, now_s: float) -> None:
        """Takes in a decision of the core."""
        match note:
            case RoundOpened(round=number, fragment=p):
                attributes: dict[str, Value] = {"asked": note.asked, "held": note.held, "flush": note.flush}
                self._rounds[p] = _Round(round_id=number, fragment=p, opened_s=now_s, attributes=attributes)
            case ContributionAccepted(fragment=p, round=number) if p in self._rounds:
                round_ = self._rounds[p]
                if round_.round_id == number:
                    facts: dict[str, Value] = {
                        "island": note.island,
                        "from_step": note.from_step,
                        "to_step": note.to_step,
                    }
                    span = Span(name="contribution", began_s=round_.opened_s, ended_s=now_s, attributes=facts)
                    round_.contributions.append(span)
            case RoundClosed(fragment=p) if p in self._rounds:
                self._rounds[p].closed_s = now_s
                self._rounds[p].attributes |= {"reason": note.reason, "missing": tuple(note.missing)}
            case RoundCancelled(fragment=p) if p in self._rounds:
                self._done.append(_cancelled(self._rounds.pop(p), note.reason, now_s))
            case VersionCommitted(fragment=p) if p in self._rounds:
                self._committed(note, self._rounds.pop(p))
            case _:
                pass

    def end(self, now_s: float, owns: Callable[[int], bool] = lambda fragment: True) -> None:
        """Ends all rounds of the fragments that an aggregator owns; those under way have failed."""
        for key in [key for key in self._versions if owns(key[0])]:
            self._finish(self._versions.pop(key))
        for p in [p for p in self._rounds if owns(p)]:
            self._done.append(_cancelled(self._rounds.pop(p), "the aggregator ended", now_s))

    # --- what happens to a round ----------------------------------------------------------------------------------

    def _committed(self, note: VersionCommitted, round_: _Round) -> None:
        if round_.round_id != note.round:
            return
        round_.version = note.version
        contributors = sorted({each.island for each in note.contributions or ()})
        round_.lacking = set(contributors)
        round_.attributes |= {
            "version": note.version,
            "digest": note.digest,
            "tokens": note.tokens,
            "staleness_mean": note.staleness_mean,
            "islands": tuple(contributors),
        }
        self._versions[round_.fragment, round_.version] = round_
        while len(self._versions) > MOST_HELD:
            self._finish(self._versions.popitem(last=False)[1])

    def _published(self, broker: int, versions: Sequence[int], now_s: float) -> None:
        for each in self._versions.values():
            if each.persisted_s is None or each.fragment >= len(versions) or broker in each.brokers:
                continue
            if versions[each.fragment] >= each.version:
                each.brokers.add(broker)
                span = Span(name="publish", began_s=each.persisted_s, ended_s=now_s, attributes={"broker": broker})
                each.after.append(span)
        self._finish_whole()

    def _adopted(self, island: str, versions: Sequence[int], now_s: float) -> None:
        for each in self._versions.values():
            if each.persisted_s is None or each.fragment >= len(versions) or island not in each.lacking:
                continue
            if versions[each.fragment] >= each.version:
                each.lacking.discard(island)
                adopted: dict[str, Value] = {"island": island, "adopted_version": versions[each.fragment]}
                each.after.append(Span(name="adopt", began_s=each.persisted_s, ended_s=now_s, attributes=adopted))
        self._finish_whole()

    def _finish_whole(self) -> None:
        """Ends what everybody has adopted; a broker may say after the islands that it has a version."""
        for key in [key for key, each in self._versions.items() if each.brokers and not each.lacking]:
            self._finish(self._versions.pop(key))

    def _finish(self, round_: _Round) -> None:
        assert round_.closed_s is not None
        assert round_.persisted_s is not None
        computed_s = round_.computed_s or round_.closed_s
        parts = (
            Span(name="open", began_s=round_.opened_s, ended_s=round_.closed_s, parts=tuple(round_.contributions)),
            Span(name="merge", began_s=round_.closed_s, ended_s=computed_s),
            Span(
                name="persist",
                began_s=computed_s,
                ended_s=round_.persisted_s,
                attributes={"not_durable": round_.not_durable} if round_.not_durable else {},
            ),
            *round_.after,
        )
        ended_s = max(part.ended_s for part in parts)
        attributes = _identity(round_) | round_.attributes | {"not_adopted": tuple(sorted(round_.lacking))}
        span = Span(name="round", began_s=round_.opened_s, ended_s=ended_s, attributes=attributes, parts=parts)
        self._done.append(span)


def _cancelled(round_: _Round, reason: str, now_s: float) -> Span:
    waited = Span(name="open", began_s=round_.opened_s, ended_s=now_s, parts=tuple(round_.contributions))
    attributes = _identity(round_) | round_.attributes
    return Span(
        name="round", began_s=round_.opened_s, ended_s=now_s, attributes=attributes, failed=reason, parts=(waited,)
    )


def _identity(round_: _Round) -> dict[str, Value]:
    return {"round": round_.round_id, "fragment": round_.fragment}
