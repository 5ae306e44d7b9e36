"""Limits the versions under way from the broker to one island, by their delivery times. Pure.

An island's ``Want`` lists the versions that it has, so it acknowledges what it was sent. To wait for that after every
version costs a round trip each: where round trips take several inner steps, islands adopt late, and train on versions
that are old. So more of them may be under way, of different fragments, and their number follows what deliveries take,
as in TCP Vegas (Brakmo and Peterson, 1995). While they arrive about as fast as one by itself does, there may be one
more; where they take longer, they wait for each other, the link is full, and their number is halved. On a full link one
at a time is best: what goes next is then the newest that there is. So another one is tried ever more seldom there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

#: A delivery has waited for others if it takes this multiple of its fragment's recent least.
FULL = 1.5
#: Good deliveries of a full window before it grows by one: at first, and at most.
SOON, SELDOM = 1, 64
#: The least delivery time grows by this factor with every delivery, because routes change.
FORGETTING = 1.02
#: Less is no journey: the link is not to blame for the differences.
LEAST_S = 0.05
#: A version is lost if it takes this multiple of its fragment's last delivery and the island still asks.
LOST = 3.0


class Sent(NamedTuple):
    """A version that was sent and not yet acknowledged."""

    version: int
    at_s: float
    again: bool  # so nobody knows which copy arrives
    beside: int  # number of others under way then


class Taken(NamedTuple):
    """Delivery time of a version of one fragment, in seconds, until the island reports to have it."""

    least_s: float
    last_s: float


class Window:
    """The versions under way to one island."""

    __slots__ = ("_lost", "_patience", "_sequence", "_taken", "_until_next", "size", "under_way", "versions")

    def __init__(self) -> None:
        self.size = 1  # how many there may be, at least 1
        #: By fragment, those that the island has, as it said over this connection; None while it said nothing.
        self.versions: tuple[int, ...] | None = None
        self.under_way: dict[int, Sent] = {}  # by fragment
        self._lost: dict[int, int] = {}  # fragment -> version
        self._taken: dict[int, Taken] = {}  # by fragment
        self._sequence = 0  # of the heartbeat that was heard last
        self._patience = self._until_next = SOON  # deliveries

    @property
    def is_open(self) -> bool:
        """Returns whether the broker may send another version now."""
        return self.versions is not None and len(self.under_way) < self.size

    def wants(self, versions: tuple[int, ...], now_s: float, sequence: int = 0) -> None:
        """Takes the versions that an island reports in ``Want``: they have arrived.

        One that a heartbeat has overtaken, by the ``sequence`` of the messages, knows less.
        """
        if self.versions is not None and sequence < self._sequence and len(versions) == len(self.versions):
            versions = tuple(map(max, self.versions, versions))
        repeated = versions == self.versions
        self.versions = versions
        self._arrived(now_s)
        for p, sent in list(self.under_way.items()):
            taken = self._taken.get(p)
            if repeated if taken is None else now_s - sent.at_s > LOST * taken.last_s:
                del self.under_way[p]
                self._lost[p] = sent.version

    def adopted(self, versions: tuple[int, ...], now_s: float, sequence: int = 0) -> None:
        """Takes the versions that an island trains with, from its heartbeat: they have arrived.

        It overtakes a ``Want`` that waits behind contributions, on an island's narrow link for minutes.
        """
        if self.versions is not None and len(versions) == len(self.versions):
            self.versions, self._sequence = tuple(map(max, self.versions, versions)), sequence
            self._arrived(now_s)

    def _arrived(self, now_s: float) -> None:
        assert self.versions is not None
        arrived = {p: s for p, s in self.under_way.items() if p < len(self.versions) and self.versions[p] >= s.version}
        for p, sent in arrived.items():
            del self.under_way[p]
            if not sent.again:
                self._took(p, now_s - sent.at_s, filled=sent.beside + 1 >= self.size)
        # A connection keeps the order: what was sent before has arrived by now, and was refused.
        latest_s = max((sent.at_s for sent in arrived.values()), default=-math.inf)
        for p, sent in list(self.under_way.items()):
            if sent.at_s < latest_s:
                del self.under_way[p]
                self._lost[p] = sent.version

    def sent(self, fragment_id: int, version: int, now_s: float) -> None:
        """Notes that a version was sent."""
        again = self._lost.pop(fragment_id, None) == version
        self.under_way[fragment_id] = Sent(version, now_s, again, len(self.under_way))

    def took_back(self, fragment_id: int) -> None:
        """Notes that a version was not sent after all."""
        self.under_way.pop(fragment_id, None)

    def close(self) -> None:
        """Notes that the connection was lost, with all versions under way."""
        self.versions = None
        self.under_way.clear()

    def _took(self, fragment_id: int, took_s: float, *, filled: bool) -> None:
        """Adapts the window size to a delivery time; ``filled``: the window was full then."""
        before = self._taken.get(fragment_id)
        least_s = took_s if before is None else min(took_s, FORGETTING * before.least_s)
        self._taken[fragment_id] = Taken(least_s, took_s)
        if took_s > FULL * max(least_s, LEAST_S):
            if self.size > 1:
                self._patience = min(SELDOM, 2 * self._patience)
            self.size, self._until_next = max(1, self.size // 2), self._patience
        elif filled:
            if self.size > 1:
                self._patience = max(SOON, self._patience // 2)
            self._until_next -= 1
            if self._until_next <= 0:
                self.size, self._until_next = self.size + 1, SOON
