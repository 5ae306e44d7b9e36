"""Clocks that are wrong: they jump, run too fast or too slowly, or stand still.

Each process of a simulated run reads its own clock, as each machine does. What a core is told, and what it asks to be
woken at, is in that clock's time; the network, the disk and the observer live in true time.
"""

from __future__ import annotations

from dataclasses import dataclass

from ops.virtual.queue import EventQueue

#: A wait is never shorter than this: rounding must not wake a process again and again before its deadline.
SHORTEST_WAIT_S = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockTrouble:
    """What is wrong with the clock of one process, from when and for how long; what it was off by then, it stays off.

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
    """What one process reads; the true time where nothing is wrong with it."""

    def __init__(self, queue: EventQueue, troubles: tuple[ClockTrouble, ...]) -> None:
        self._queue = queue
        self._troubles = troubles
        self._changes_s = sorted({s for each in troubles for s in (each.at_s, each.at_s + each.for_s)})

    @property
    def now_s(self) -> float:
        """What it shows now."""
        true_s = self._queue.now_s
        if not self._troubles:
            return true_s
        return true_s + sum(each.offset_s(true_s) for each in self._troubles)

    def true_s(self, shown_s: float) -> float:
        """Returns when, in true time, to look again whether it shows ``shown_s``: then, or when its rate changes."""
        true_s = self._queue.now_s
        if not self._troubles:
            return shown_s
        rate = 1.0 + sum(each.rate - 1.0 for each in self._troubles if each.at_s <= true_s < each.at_s + each.for_s)
        changes_at_s = next((at_s for at_s in self._changes_s if at_s > true_s), float("inf"))
        wait_s = shown_s - self.now_s
        due_s = true_s + (max(SHORTEST_WAIT_S, wait_s / rate) if rate > 0 or wait_s <= 0 else float("inf"))
        return min(due_s, changes_at_s)
