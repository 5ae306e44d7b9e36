"""How many versions may be under way to one island at once. Pure.

An island's ``Want`` lists the versions that it has, so it acknowledges what it was sent. To wait for that after every
version costs a round trip each: where round trips take several inner steps, islands adopt late, and train on versions
that are old. So more of them may be under way, of different fragments, and their number follows what deliveries take,
as in TCP Vegas (Brakmo and Peterson, 1995). While they arrive about as fast as one by itself does, there may be one
more; where they take longer, they wait for each other, the link is full, and their number is halved. On a full link one
at a time is best: what goes next is then the newest that there is.
"""

from __future__ import annotations

from typing import NamedTuple

#: A delivery that takes so many times the least that one of its fragment took lately has waited for others.
FULL = 1.5
#: What was the least grows by this factor with every delivery: routes change.
FORGETTING = 1.02
#: Less is no journey: the link is not to blame for the differences.
LEAST_S = 0.05
#: What has not arrived after so many times what one of its fragment took last is lost, if the island still asks.
LOST = 3.0


class Sent(NamedTuple):
    """A version under way."""

    version: int
    at_s: float
    again: bool  # so nobody knows which copy arrives


class Taken(NamedTuple):
    """What deliveries of one fragment took, acknowledgement included."""

    least_s: float
    last_s: float


class Window:
    """The versions under way to one island.

    Attributes:
        size: How many there may be, at least 1.
        versions: By fragment, those that the island has, as it said over this connection; None while it said nothing.
        under_way: What was sent, by fragment.
    """

    __slots__ = ("_lost", "_taken", "size", "under_way", "versions")

    def __init__(self) -> None:
        self.size = 1
        self.versions: tuple[int, ...] | None = None
        self.under_way: dict[int, Sent] = {}
        self._lost: dict[int, int] = {}  # fragment -> version
        self._taken: dict[int, Taken] = {}  # by fragment

    @property
    def is_open(self) -> bool:
        """Whether one more may be sent."""
        return self.versions is not None and len(self.under_way) < self.size

    def wants(self, versions: tuple[int, ...], now_s: float) -> None:
        """The island says what it has: that has arrived. It says so again while it lacks something."""
        filled, repeated = len(self.under_way) >= self.size, versions == self.versions
        self.versions = versions
        for p, sent in list(self.under_way.items()):
            taken, age_s = self._taken.get(p), now_s - sent.at_s
            if p < len(versions) and versions[p] >= sent.version:
                del self.under_way[p]
                if not sent.again:
                    self._took(p, age_s, filled=filled)
            elif repeated if taken is None else age_s > LOST * taken.last_s:
                del self.under_way[p]
                self._lost[p] = sent.version

    def sent(self, fragment_id: int, version: int, now_s: float) -> None:
        """A version is under way from now on."""
        again = self._lost.pop(fragment_id, None) == version
        self.under_way[fragment_id] = Sent(version, now_s, again)

    def took_back(self, fragment_id: int) -> None:
        """A version was not sent after all."""
        self.under_way.pop(fragment_id, None)

    def close(self) -> None:
        """The connection is gone, with what was under way."""
        self.versions = None
        self.under_way.clear()

    def _took(self, fragment_id: int, took_s: float, *, filled: bool) -> None:
        """Changes the size after a delivery that took so long; ``filled``: there was no room for another beside it."""
        before = self._taken.get(fragment_id)
        least_s = took_s if before is None else min(took_s, FORGETTING * before.least_s)
        self._taken[fragment_id] = Taken(least_s, took_s)
        if took_s > FULL * max(least_s, LEAST_S):
            self.size = max(1, self.size // 2)
        elif filled:
            self.size += 1
