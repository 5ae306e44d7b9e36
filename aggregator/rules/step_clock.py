"""The step clock: estimates each island's inner step from its reports, and the fleet's rates. Pure.

See docs/reference.md, section 4.1. Heartbeats and contributions report an island's step counter; in between it is
extrapolated at the island's own pace, for a bounded time. One that has not advanced for longer does not count, nor
does one that is dead or in quarantine, whatever pace it had claimed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aggregator.rules.deadlines import ROUNDING_S, Deadlines
from aggregator.rules.ranked import Ranked

#: An island counts for at most this many times the fleet's lower median, and at least that part of it: a claim, or a
#: pause, of one island must not move the schedules of the others.
SPREAD = 32.0
#: A rate is counted in such parts of a token per second: all of a float's digits, of any that is not very small.
PARTS = 2**64


@dataclass(slots=True)
class Pace:
    """The step of one island, as last reported."""

    inner_step: int
    reported_at_s: float
    advanced_at_s: float
    step_time_s: float | None
    allowance_s: float  #: of silence: for so long it goes on being extrapolated, and counts as advancing


class StepClock:
    """Estimates every island's inner step at any moment.

    Who advances is known from the last question. With the next one those islands are looked at anew that were heard of
    since, or of which :meth:`look_at` was told, or for which the time has come at which that may change by itself.

    Args:
        heartbeat_interval_s: How often counters are reported.
        counts: Says whether an island counts at a time; None: all do.
        until_s: Says when that may change by itself, likewise; None: never. A time that is past is not one.

    Attributes:
        heartbeat_interval_s: How often counters are reported now.
    """

    def __init__(
        self,
        heartbeat_interval_s: float,
        counts: Callable[[str, float], bool] | None = None,
        until_s: Callable[[str, float], float] | None = None,
    ) -> None:
        self.heartbeat_interval_s = heartbeat_interval_s
        self._counts = counts or (lambda *_: True)
        self._until_s = until_s or (lambda *_: math.inf)
        self._paces: dict[str, Pace] = {}
        self._times_s = Ranked()  # seconds per inner step of each island that advances
        self._lines: dict[str, tuple[float, int, float]] = {}
        self._unseen: dict[str, None] = {}  # to be looked at, in order
        self._changes = Deadlines()  # when each is to be looked at by itself
        self._looked_at_s: float | None = None  # the moment that all this is of; None: look again
        self._asked_at_s = -math.inf
        self._followers: list[set[str]] = []
        self._advancing: tuple[str, ...] | None = None  # made when it is asked for
        self._moment: dict[str, float] | None = None

    def report(self, island_id: str, inner_step: int, now_s: float, step_time_s: float | None = None) -> None:
        """Takes a step counter that the island itself reported; older reports are ignored."""
        self._news_of(island_id)
        pace = self._paces.get(island_id)
        if pace is None:
            self._paces[island_id] = Pace(inner_step, now_s, now_s, step_time_s, self._allowance_s(step_time_s))
            return
        if step_time_s is not None:
            pace.step_time_s, pace.allowance_s = step_time_s, self._allowance_s(step_time_s)
        if inner_step > pace.inner_step:
            pace.inner_step, pace.reported_at_s, pace.advanced_at_s = inner_step, now_s, now_s
        elif inner_step == pace.inner_step:
            # Still within the same step: what was extrapolated beyond it has not happened.
            pace.reported_at_s = max(pace.reported_at_s, now_s - (pace.step_time_s or 0.0))

    def look_again(self) -> None:
        """Drops the cache: called before and after each event, so that answers depend on events alone."""
        self._looked_at_s = self._moment = None

    def look_at(self, island_id: str) -> None:
        """Notes that an island may have begun or ceased to count; asked once the cache is dropped."""
        self._unseen[island_id] = None

    def standing(self, island_id: str, now_s: float, patience_s: float) -> bool:
        """Returns True if a reported counter has not grown for ``patience_s``, and for four of its steps."""
        pace = self._paces.get(island_id)
        return pace is not None and now_s - pace.advanced_at_s > max(patience_s, pace.allowance_s)

    def forget(self, island_id: str) -> None:
        """Drops an island that left, died or starts anew."""
        self._news_of(island_id)
        self._paces.pop(island_id, None)

    def _news_of(self, island_id: str) -> None:
        self.look_again()
        self._unseen[island_id] = None
        for follower in self._followers:
            follower.add(island_id)

    def follow(self) -> set[str]:
        """Returns a set that collects each island that is heard of, or begins or stops to advance."""
        self._followers.append(set())
        return self._followers[-1]

    def knows(self, island_id: str) -> bool:
        """Returns True once the island has reported a step, so that :meth:`estimate` can be asked about it."""
        return island_id in self._paces

    def estimate(self, island_id: str, now_s: float) -> float:
        """Returns the island's inner step at ``now_s``; it never runs ahead of a report for long."""
        pace = self._paces[island_id]
        if not pace.step_time_s:
            return float(pace.inner_step)
        elapsed_s = min(max(0.0, now_s - pace.reported_at_s), pace.allowance_s)
        return pace.inner_step + elapsed_s / pace.step_time_s

    def step_time_s(self, island_id: str) -> float | None:
        """The island's seconds per inner step, if it has reported any."""
        pace = self._paces.get(island_id)
        return pace.step_time_s if pace else None

    def heard_lately(self, now_s: float) -> tuple[str, ...]:
        """Returns the islands that advance, and those that have only just stopped to."""
        more_s = 2 * self.heartbeat_interval_s
        return tuple(i for i, p in self._paces.items() if now_s - p.advanced_at_s <= p.allowance_s + more_s)

    def lines(self, now_s: float) -> Mapping[str, tuple[float, int, float]]:
        """Returns the last (time, step, seconds per step) of each island that counts and advances, to read."""
        if self._looked_at_s != now_s:
            self._look(now_s)
        return self._lines

    def advancing(self, now_s: float) -> tuple[str, ...]:
        """Returns the islands that count and whose counter grew lately, sorted."""
        if self._looked_at_s != now_s:
            self._look(now_s)
        if self._advancing is None:
            self._advancing = tuple(sorted(self._lines))
        return self._advancing

    def at(self, now_s: float) -> Mapping[str, float]:
        """Returns the inner step of each island that advances; one object until an island is heard of."""
        advancing = self.advancing(now_s)
        if self._moment is None:
            self._moment = {i: self.estimate(i, now_s) for i in advancing}
        return self._moment

    def median_step_time_s(self, now_s: float) -> float | None:
        """Returns the upper median step time of advancing islands: the pace of the lower median one."""
        if self._looked_at_s != now_s:
            self._look(now_s)
        order = self._times_s.order
        return order[len(order) // 2][0] if order else None

    def _look(self, now_s: float) -> None:
        """Finds the islands that advance at a moment; valid until the cache is dropped, or for that moment."""
        if now_s < self._asked_at_s:  # of an earlier moment: some may have advanced then
            self._unseen.update(dict.fromkeys(self._paces))
        self._looked_at_s = self._asked_at_s = now_s
        self._moment = None
        for island_id in self._changes.due(now_s + ROUNDING_S):
            self._unseen[island_id] = None
        for island_id in self._unseen:
            self._look_at(island_id, now_s)
        self._unseen.clear()

    def _look_at(self, island_id: str, now_s: float) -> None:
        pace, before = self._paces.get(island_id), self._times_s.value.get(island_id)
        step_time_s = None
        if pace is not None and pace.step_time_s and now_s - pace.advanced_at_s <= pace.allowance_s:
            # Nothing but a report makes another one advance; this one may end to by itself, or begin to count.
            until_s = self._until_s(island_id, now_s)
            at_s = pace.advanced_at_s + pace.allowance_s
            if now_s - ROUNDING_S < until_s < at_s:
                at_s = until_s
            known = self._changes.get(island_id)
            if known is None or at_s < known:  # one that is too early costs a look
                self._changes.put(island_id, at_s)
            if self._counts(island_id, now_s):
                step_time_s = pace.step_time_s
        else:
            self._changes.drop(island_id)
        if pace is not None and step_time_s is not None:
            self._lines[island_id] = pace.reported_at_s, pace.inner_step, step_time_s
        if step_time_s == before:
            return
        if step_time_s is None:
            self._times_s.drop(island_id)
            del self._lines[island_id]
        else:
            self._times_s.put(island_id, step_time_s)
        if before is None or step_time_s is None:
            self._advancing = None
        for follower in self._followers:
            follower.add(island_id)

    def _allowance_s(self, step_time_s: float | None) -> float:
        return max(3 * self.heartbeat_interval_s, 4 * (step_time_s or 0.0))


class FleetRates:
    """Tokens per second of every island that advances, for the ratio of the fleet's rate to one island's.

    The rates are kept in order, with their sum, so that the answer to a heartbeat costs nothing for those that were not
    heard of. The sum is one of whole numbers: what is added and taken out again leaves nothing.

    Args:
        clock: Says which they are, and how long a step takes.
        tokens_per_step: Returns an island's tokens per step, as known now.
        counted: The part of an island's tokens that counts (:mod:`aggregator.rules.claims`).
    """

    def __init__(
        self, clock: StepClock, tokens_per_step: Callable[[str], float], counted: Callable[[str], float] = lambda _: 1.0
    ) -> None:
        self._clock = clock
        self._tokens_per_step = tokens_per_step
        self._counted = counted
        self._news = clock.follow()
        self._rates = Ranked()
        self._sum = 0  # of all of them, in parts

    def look_at(self, island_id: str) -> None:
        """Notes that the tokens per step of an island may have changed."""
        self._news.add(island_id)

    def ratio(self, island_id: str, now_s: float) -> float:
        """Returns the tokens of the fleet that count per token of an island, by rates within :data:`SPREAD`."""
        self._look(now_s)
        order = self._rates.order
        own = self._rates.value.get(island_id)
        if not own:
            return float(max(1, len(order)))
        middle = self._rates.middle
        least, most = middle / SPREAD, middle * SPREAD
        total = self._sum
        if order[0][0] < least or order[-1][0] > most:
            slow, usual = self._rates.below(least), self._rates.below(math.nextafter(most, math.inf))
            total -= sum(_parts(rate) for rate, _ in (*order[:slow], *order[usual:]))
            total += slow * _parts(least) + (len(order) - usual) * _parts(most)
        own = _parts(min(max(own, least), most) / self._counted(island_id))
        return total / own if own else float(len(order))

    def _look(self, now_s: float) -> None:
        lines = self._clock.lines(now_s)
        for island_id in self._news:
            line = lines.get(island_id)
            self._sum -= _parts(self._rates.value.get(island_id) or 0.0)
            if line is None:
                self._rates.drop(island_id)
                continue
            rate = self._tokens_per_step(island_id) * self._counted(island_id) / line[2]
            self._rates.put(island_id, rate)
            self._sum += _parts(rate)
        self._news.clear()


def _parts(rate: float) -> int:
    return round(rate * PARTS)
