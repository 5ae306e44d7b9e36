"""One link: two lanes and a condition. Pure.

A link has the condition of the region file. Whoever speaks to the control socket lays *orders* over it, each a whole
condition for a while or until further notice: of those that are still in force the last one given counts, and when none
is left the file does.

The carrier of the bytes numbers connections; a number is a flow of both lanes. When the link is reset, or
partitioned for longer than the kernels at its ends bear, all of them are to be reset: :meth:`Link.advance` says so.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ops.links.condition import LinkCondition, Way
from ops.links.lane import Lane

#: Both ends of a real connection would notice a partition of this length: TCP_KEEPALIVE_IDLE + INTVL * CNT, as
#: :mod:`broker.transport.sockets` sets them. Here the kernel of this machine answers those probes itself, so the proxy
#: resets.
PARTITION_BREAKS_AFTER_S = 35.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """A condition that was ordered during the run, and its end."""

    condition: LinkCondition
    until_s: float | None


class Link:
    """The link of one client to the broker.

    Args:
        usual: Its condition where no order says otherwise.
        random_source: Draws jitter, damage and resets.
        now_s: The time at which the link begins.
    """

    def __init__(self, usual: LinkCondition, *, random_source: random.Random, now_s: float) -> None:
        self._usual = self._condition = usual
        self._random = random_source
        self._orders: list[_Order] = []
        self._reset_at_s = self._drawn_reset_s(now_s)
        self._broken_at_s = self._first_break_s(now_s)
        self.lanes = {way: Lane(self._condition.way(way), random_source) for way in Way}

    @property
    def condition(self) -> LinkCondition:
        """The current condition of the link."""
        return self._condition

    def order(self, condition: LinkCondition, *, for_s: float | None, now_s: float) -> None:
        """Sets the condition, for a time or for good; the caller advances the link after that."""
        if for_s is None:  # nothing that was ordered before can come to count again
            self._orders.clear()
        self._orders.append(_Order(condition=condition, until_s=None if for_s is None else now_s + for_s))

    def clear(self) -> None:
        """Forgets all orders: the file counts again; the caller advances the link after that."""
        self._orders.clear()

    def advance(self, now_s: float) -> bool:
        """Updates the condition; returns whether to reset all connections now."""
        due = False
        self._enter(self._condition_at(now_s), now_s)
        if self._reset_at_s is not None and now_s >= self._reset_at_s:
            self._reset_at_s = self._drawn_reset_s(now_s)
            due = True
        if self._broken_at_s is not None and now_s >= self._broken_at_s:
            self._broken_at_s = self._first_break_s(now_s)
            due = True
        return due

    def next_s(self) -> float | None:
        """Returns when to advance or take from a lane again; None: not before something happens."""
        times_s = [
            self._reset_at_s,
            self._broken_at_s,
            *(each.until_s for each in self._orders),
            *(lane.next_s() for lane in self.lanes.values()),
        ]
        return min((each for each in times_s if each is not None), default=None)

    def _condition_at(self, now_s: float) -> LinkCondition:
        self._orders = [each for each in self._orders if each.until_s is None or now_s < each.until_s]
        return self._orders[-1].condition if self._orders else self._usual

    def _enter(self, condition: LinkCondition, now_s: float) -> None:
        before, self._condition = self._condition, condition
        for way, lane in self.lanes.items():
            lane.change(condition.way(way), now_s)
        if condition.reset_every_s != before.reset_every_s:
            self._reset_at_s = self._drawn_reset_s(now_s)
        if condition.partitioned != before.partitioned:
            self._broken_at_s = self._first_break_s(now_s)

    def _drawn_reset_s(self, now_s: float) -> float | None:
        mean_s = self._condition.reset_every_s
        return now_s + self._random.expovariate(1 / mean_s) if mean_s else None

    def _first_break_s(self, now_s: float) -> float | None:
        return now_s + PARTITION_BREAKS_AFTER_S if self._condition.partitioned else None
