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
from typing import Any

from aggregator.interface.events import Computed, Event, Persisted, PersistFailed, Received
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

    def note(self, name: str, facts: Mapping[str, Any], now_s: float) -> None:
        """Takes in a decision of the core."""
        match name:
            case "round.opened":
                attributes = {key: facts[key] for key in ("asked", "held", "flush")}
                self._rounds[facts["fragment"]] = _Round(
                    round_id=facts["round"], fragment=facts["fragment"], opened_s=now_s, attributes=attributes
                )
            case "contribution.accepted":
                self._contributed(facts, now_s)
            case "round.closed":
                self._closed(facts, now_s)
            case "round.cancelled":
                round_ = self._rounds.pop(facts["fragment"], None)
                if round_ is not None:
                    self._done.append(_cancelled(round_, facts["reason"], now_s))
            case "version.committed":
                self._committed(facts)
            case _:
                pass

    def end(self, now_s: float, owns: Callable[[int], bool] = lambda fragment: True) -> None:
        """Ends all rounds of the fragments that an aggregator owns; those under way have failed."""
        for key in [key for key in self._versions if owns(key[0])]:
            self._finish(self._versions.pop(key))
        for p in [p for p in self._rounds if owns(p)]:
            self._done.append(_cancelled(self._rounds.pop(p), "the aggregator ended", now_s))

    # --- what happens to a round ----------------------------------------------------------------------------------

    def _contributed(self, facts: Mapping[str, Any], now_s: float) -> None:
        round_ = self._rounds.get(facts["fragment"])
        if round_ is None or round_.round_id != facts["round"]:
            return
        attributes = {"island": facts["island"], "from_step": facts["from_step"], "to_step": facts["to_step"]}
        span = Span(name="contribution", began_s=round_.opened_s, ended_s=now_s, attributes=attributes)
        round_.contributions.append(span)

    def _closed(self, facts: Mapping[str, Any], now_s: float) -> None:
        round_ = self._rounds.get(facts["fragment"])
        if round_ is not None:
            round_.closed_s = now_s
            round_.attributes |= {"reason": facts["reason"], "missing": tuple(facts["missing"])}

    def _committed(self, facts: Mapping[str, Any]) -> None:
        round_ = self._rounds.pop(facts["fragment"], None)
        if round_ is None or round_.round_id != facts["round"]:
            return
        round_.version = facts["version"]
        contributors = sorted({each["island"] for each in facts["contributions"]})
        round_.lacking = set(contributors)
        round_.attributes |= {
            "version": facts["version"],
            "digest": facts["digest"],
            "tokens": facts["tokens"],
            "staleness_mean": facts["staleness_mean"],
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
