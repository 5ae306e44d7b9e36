"""The brokers as the aggregator sees them: the versions that each holds.

Every broker answers each Attach with the versions it holds. One that lacks something was connected late or lost a
message: it gets what is missing, it alone, with pauses that follow the journeys to it
(:mod:`broker.routing.resending`). One that came back empty gets everything at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from broker.routing.resending import REPUBLISH_S, SILENT_S, Backoff, Carried, Patience


@dataclass(slots=True)
class _Sent:
    """The newest version of a fragment, as it was sent to one broker."""

    version: int
    at_s: float
    backoff: Backoff
    arrived: bool = False


@dataclass(slots=True)
class _Held:
    """One broker."""

    answered_at_s: float
    holds: bool = False  #: any version, then
    was_away: bool = False  #: before that
    lacks: bool = False  #: something, then
    lost_at_s: float = -math.inf  #: what was on its way then is gone
    connection: int | None = None  #: to it, by number
    sent: dict[int, _Sent] = field(default_factory=dict)
    patience: Patience = field(default_factory=lambda: Patience(REPUBLISH_S))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """The absence of a broker, now over.

    Attributes:
        broker: Its place.
        since_s: When it was heard last.
        alone: There was no other one meanwhile.
    """

    broker: int
    since_s: float
    alone: bool


class BrokerVersions:
    """The versions that all brokers hold, by their places in the configuration."""

    def __init__(self, now_s: float) -> None:
        self._began_at_s = now_s
        self._held: dict[int, _Held] = {}

    def answered(self, broker: int, versions: tuple[int, ...], now_s: float) -> Outage | None:
        """Takes an answer in; returns the outage that it ends, if there was one.

        A broker that held versions and holds none has died and come back between two answers.
        """
        at = self._held.setdefault(broker, _Held(answered_at_s=self._began_at_s))
        before_s, at.answered_at_s = at.answered_at_s, now_s
        holds = any(version >= 0 for version in versions)
        emptied, at.holds = at.holds and not holds, holds
        at.was_away = emptied or now_s - before_s > SILENT_S
        if at.was_away and not holds:
            self._lost(at, now_s)
        return Outage(broker=broker, since_s=before_s, alone=self.alone(broker, now_s)) if at.was_away else None

    def _lost(self, at: _Held, now_s: float) -> None:
        """Marks the versions in transit to a broker as lost, so that they are sent again."""
        at.lost_at_s = now_s
        at.sent = {p: sent for p, sent in at.sent.items() if sent.arrived}

    def alone(self, broker: int, now_s: float) -> bool:
        """Returns True if no other broker has answered within ``SILENT_S``."""
        return not any(place != broker and now_s - at.answered_at_s <= SILENT_S for place, at in self._held.items())

    def short(self, since_s: float) -> list[int]:
        """Returns the brokers that have answered since then, and lacked something when they did so last."""
        return [place for place, at in self._held.items() if at.lacks and at.answered_at_s >= since_s]

    def lacking(
        self,
        broker: int,
        held: Mapping[int, int],
        newest: Mapping[int, tuple[int, float | None]],
        now_s: float,
        size_bytes: int = 0,
        carried: Carried | None = None,
    ) -> list[int]:
        """Returns the fragments to publish again to one broker now; they count as sent.

        Args:
            broker: Which one.
            held: Fragment -> version that it holds.
            newest: Fragment -> newest durable version, and when every broker was sent it.
            now_s: The time.
            size_bytes: Bytes of the newest versions together: all may be on their way at once.
            carried: By the connection to that broker, if known.
        """
        at, missing = self._held[broker], []
        if carried is not None:
            if at.connection not in (None, carried.connection):
                self._lost(at, now_s)
            at.connection = carried.connection
        at.lacks = any(held.get(p, -1) < version for p, (version, _) in newest.items())
        for p, (version, published_at_s) in newest.items():
            sent, holds = at.sent.get(p), held.get(p, -1) >= version
            if sent is None or sent.version != version or (sent.arrived and not holds):
                on_its_way = published_at_s is not None and published_at_s > at.lost_at_s
                if sent is not None and sent.version == version:
                    on_its_way = False  # it was there, and the broker has died since
                sent = at.sent[p] = _Sent(version, now_s, at.patience.backoff(size_bytes))
                if on_its_way and published_at_s is not None:
                    sent.at_s = published_at_s
                    sent.backoff.tried(published_at_s)
            if holds:
                if sent.backoff.attempts == 1 and not sent.arrived and not at.was_away:
                    at.patience.took(now_s - sent.at_s)
                sent.arrived = True
            elif sent.backoff.due(now_s, carried):
                again = sent.backoff.attempts > 0
                sent.backoff.tried(now_s)
                if again and not at.was_away:
                    at.patience.in_vain(sent.backoff)
                missing.append(p)
        return missing
