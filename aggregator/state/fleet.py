"""The islands of a run: its members, how they are reached, and who of them counts. Pure.

Islands speak through one broker at a time and change it without saying so. Whoever was never heard in this life of the
aggregator, or not lately among very many, is addressed through every broker: the one that knows it passes the message
on, the others drop it.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict

from aggregator.interface.config import AggregatorConfig
from aggregator.rules.claims import Claims
from aggregator.rules.quarantine import Quarantine
from aggregator.state.members import Member, Members, PendingJoins
from broker.routing.resending import SILENT_S
from broker.wire.messages import Envelope, Reason

#: Names remembered: every member, and as many processes that are about to join.
MOST_NAMES = 20_000


class Routes:
    """Sender -> place of the broker that it was last heard over."""

    def __init__(self) -> None:
        self._last_heard: OrderedDict[str, tuple[tuple[int, int], int]] = OrderedDict()

    def heard(self, envelope: Envelope, broker: int) -> bool:
        """Takes note of a message; says whether it is the sender's newest.

        An older one, such as a broker sets free that was frozen, changes nothing.
        """
        name, order = envelope.sender, (envelope.incarnation, envelope.sequence)
        known = self._last_heard.get(name)
        if known is not None and order < known[0]:
            return False
        self._last_heard[name] = order, broker
        self._last_heard.move_to_end(name)
        if len(self._last_heard) > MOST_NAMES:
            self._last_heard.popitem(last=False)
        return True

    def to(self, name: str) -> int | None:
        """Returns the broker to send by; None: each of them."""
        known = self._last_heard.get(name)
        return None if known is None else known[1]


class Fleet:
    """The islands of a run.

    Attributes:
        refusals: Messages refused, by reason, those of strangers included.
        answered_at_s: When a broker answered last; before the first nobody is missed.
    """

    def __init__(self, config: AggregatorConfig) -> None:
        self._expected, self._liveness = config.islands, config.liveness
        self.members = Members(self._liveness)
        self.pending_joins = PendingJoins()
        self.routes = Routes()
        self.claims = Claims(config.trusted_tokens or {}, config.pace_spread)
        self.quarantine = Quarantine(config.quarantine_s, self.members.changed)
        self.refusals: Counter[str] = Counter()
        self.answered_at_s = math.inf

    def eligible(self, now_s: float) -> frozenset[str]:
        """Ids of the live islands that are not quarantined: those that a round could consist of."""
        live, out = self.members.live_ids(now_s), self.quarantine.out(now_s)
        return live - out if out else live

    def counts(self, island_id: str, now_s: float) -> bool:
        """Returns True for an island of :meth:`eligible`."""
        return self.members.lives(island_id, now_s) and not self.quarantine.holds(island_id, now_s)

    def has(self, life: tuple[str, int], now_s: float) -> bool:
        """Returns True while an island counts, under the incarnation that is given."""
        member = self.members.get(life[0])
        return member is not None and member.incarnation == life[1] and self.counts(life[0], now_s)

    def counts_until_s(self, island_id: str, now_s: float) -> float:
        """Returns when :meth:`counts` may change by time alone: by silence, or the end of a quarantine."""
        return min(self.members.dies_at_s(island_id), self.quarantine.until_s(island_id, now_s))

    def deaf(self, now_s: float) -> bool:
        """True if no broker answers, or this process was held up: silence says nothing then."""
        return now_s - self.answered_at_s > SILENT_S

    def size(self, now_s: float) -> int:
        """Returns how many islands are expected, or live if these are more."""
        return max(self._expected, len(self.members.live_ids(now_s)))

    def heartbeat_interval_s(self, now_s: float) -> float:
        """Seconds between two heartbeats of an island, in a fleet of this size."""
        return self._liveness.interval_of(self.size(now_s))

    def too_many_heartbeats(self, now_s: float) -> str:
        """A warning with its cure if the fleet sends more heartbeats than a hub answers; else empty."""
        return self._liveness.too_many(self.size(now_s))

    def count_refusal(self, reason: Reason, member: Member | None = None) -> None:
        """Counts a refusal, for the sender too if it is a member."""
        self.refusals[reason] += 1
        if member is not None:
            member.refusals[reason] = member.refusals.get(reason, 0) + 1
