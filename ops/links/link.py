"""One link: its two lanes and its condition. Pure.

A link has a *plan*: the condition that it starts with and timed events, from the region file. Whoever speaks to the
control socket lays *orders* over it, each a whole condition for a while or until further notice: of those that are
still in force the last one given counts, and when none is left the plan does.

Connections are numbered by whoever carries their bytes; a number is a flow of both lanes. When the link is reset, or
partitioned for longer than the kernels at its ends bear, all of them are to be reset: :meth:`Link.advance` says so.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ops.links.condition import FAULTLESS, LinkCondition, Way
from ops.links.lane import Lane

#: Both ends of a real connection would notice a partition of this length: TCP_KEEPALIVE_IDLE + INTVL * CNT, as
#: :mod:`broker.transport.sockets` sets them. Here the kernel of this machine answers those probes itself, so the proxy
#: resets.
PARTITION_BREAKS_AFTER_S = 35.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEvent:
    """A timed change of a link.

    Attributes:
        at_s: Seconds from the beginning of the run.
        for_s: How long it holds; None for until the end.
        changes: Keys of a table of conditions, over whatever the link is like at that time.
    """

    at_s: float
    for_s: float | None = None
    changes: Mapping[str, Any]

    def holds(self, run_s: float) -> bool:
        """Whether it is in force so many seconds into the run."""
        return self.at_s <= run_s and (self.for_s is None or run_s < self.at_s + self.for_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPlan:
    """The plan of one link, from the region file."""

    base: LinkCondition = FAULTLESS
    events: Sequence[LinkEvent] = ()

    def condition(self, run_s: float) -> LinkCondition:
        """Returns the condition so many seconds into the run; of two events that hold, the later one wins."""
        condition = self.base
        for event in sorted(self.events, key=lambda each: each.at_s):
            if event.holds(run_s):
                condition = condition.changed(event.changes)
        return condition

    def next_change_s(self, run_s: float) -> float | None:
        """Returns the next time, in seconds of the run, at which an event begins or ends."""
        edges = [each.at_s for each in self.events]
        edges += [each.at_s + each.for_s for each in self.events if each.for_s is not None]
        return min((edge for edge in edges if edge > run_s), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """A condition that was asked for while the link was up, and until when it holds."""

    condition: LinkCondition
    until_s: float | None


class Link:
    """One client's way to the broker and back.

    Args:
        plan: From the region file.
        began_s: When the run began; later than that, events that are over are over.
        random_source: Draws jitter, damage and resets.
        now_s: Of the link's own beginning.
    """

    def __init__(self, plan: LinkPlan, *, began_s: float, random_source: random.Random, now_s: float) -> None:
        self._plan = plan
        self._began_s = began_s
        self._random = random_source
        self._orders: list[_Order] = []
        self._condition = plan.condition(now_s - began_s)
        self._advanced_to_s = now_s
        self._reset_at_s = self._drawn_reset_s(now_s)
        self._broken_at_s = self._first_break_s(now_s)
        self.lanes = {way: Lane(self._condition.way(way), random_source) for way in Way}

    @property
    def condition(self) -> LinkCondition:
        """The condition of the link now."""
        return self._condition

    def order(self, condition: LinkCondition, *, for_s: float | None, now_s: float) -> None:
        """Puts the link into a condition, for a while or from now on; the caller advances it after that."""
        if for_s is None:  # nothing that was ordered before can come to count again
            self._orders.clear()
        self._orders.append(_Order(condition=condition, until_s=None if for_s is None else now_s + for_s))

    def clear(self) -> None:
        """Forgets all orders: the plan counts again; the caller advances the link after that."""
        self._orders.clear()

    def advance(self, now_s: float) -> bool:
        """Brings the condition up to date; returns whether all connections are to be reset now."""
        due = False
        self._advanced_to_s = now_s
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
        change_s = self._plan.next_change_s(self._advanced_to_s - self._began_s)
        times_s = [
            None if change_s is None else self._began_s + change_s,
            self._reset_at_s,
            self._broken_at_s,
            *(each.until_s for each in self._orders),
            *(lane.next_s() for lane in self.lanes.values()),
        ]
        return min((each for each in times_s if each is not None), default=None)

    def _condition_at(self, now_s: float) -> LinkCondition:
        self._orders = [each for each in self._orders if each.until_s is None or now_s < each.until_s]
        return self._orders[-1].condition if self._orders else self._plan.condition(now_s - self._began_s)

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
