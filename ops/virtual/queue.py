"""Virtual time: the event queue, and clocks that are wrong.

Each process of a simulated run reads its own clock, as each machine does; the network, the disk and the observer live
in true time.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

#: So many events at one moment are somebody who asks to be woken now, and then does nothing.
MOST_AT_ONCE = 5_000


class EventQueue:
    """Calls functions at virtual times; ties are broken by the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._at_once = 0  # events since time went on

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Schedules ``call``; a time in the past means now."""
        self._count += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._count, call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Schedules ``call`` in ``delay_s``."""
        self.at(self.now_s + delay_s, call)

    def run_until(self, end_s: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Runs events up to ``end_s``, or until ``done()``; returns whether it was done."""
        while not done():
            if not self._heap or self._heap[0][0] > end_s:
                self.now_s = max(self.now_s, end_s)
                return False
            time_s, _, call = heapq.heappop(self._heap)
            self._at_once = self._at_once + 1 if time_s == self.now_s else 0
            assert self._at_once < MOST_AT_ONCE, f"time stands still at {time_s} s: somebody is woken again and again"
            self.now_s = time_s
            call()
        return True


# --- clocks ------------------------------------------------------------------------------------------------------

#: A wait is never shorter than this: rounding must not wake a process again and again before its deadline.
SHORTEST_WAIT_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockTrouble:
    """A fault of one process's clock, from when and for how long; what it was off by then, it stays off.

    Attributes:
        process: The name of an island or a station, ``broker-N`` or ``redis``.
        at_s: When it begins, in true time.
        for_s: How long the rate is wrong.
        jump_s: By what it jumps when that begins; negative for back.
        rate: Seconds that it shows for each true second; 0 stands still.
    """

    process: str
    at_s: float
    for_s: float = 0.0
    jump_s: float = 0.0
    rate: float = 1.0

    def offset_s(self, true_s: float) -> float:
        """By how much the clock is ahead because of this."""
        if true_s < self.at_s:
            return 0.0
        return self.jump_s + (self.rate - 1.0) * min(true_s - self.at_s, self.for_s)


class Clock:
    """The clock that one process reads; it shows the true time where nothing is wrong with it."""

    def __init__(self, queue: EventQueue, troubles: tuple[ClockTrouble, ...]) -> None:
        self._queue = queue
        self._troubles = troubles
        self._changes_s = sorted({s for each in troubles for s in (each.at_s, each.at_s + each.for_s)})

    @property
    def now_s(self) -> float:
        """The time that it shows now."""
        true_s = self._queue.now_s
        if not self._troubles:
            return true_s
        return true_s + sum(each.offset_s(true_s) for each in self._troubles)

    def true_s(self, shown_s: float) -> float:
        """Returns the true time to look again whether it shows ``shown_s``: then, or when its rate changes."""
        true_s = self._queue.now_s
        if not self._troubles:
            return shown_s
        rate = 1.0 + sum(each.rate - 1.0 for each in self._troubles if each.at_s <= true_s < each.at_s + each.for_s)
        changes_at_s = next((at_s for at_s in self._changes_s if at_s > true_s), float("inf"))
        wait_s = shown_s - self.now_s
        due_s = true_s + (max(SHORTEST_WAIT_S, wait_s / rate) if rate > 0 or wait_s <= 0 else float("inf"))
        return min(due_s, changes_at_s)
