"""Virtual time and what passes in it: the event queue, links, alarms, and clocks that are wrong.

Each process of a simulated run reads its own clock, as each machine does. What a core is told, and what it asks to be
woken at, is in that clock's time; the network, the disk and the observer live in true time.
"""

from __future__ import annotations

import heapq
import random
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """The delays, losses and rate of messages between two processes.

    Attributes:
        delay_s: Least and greatest one-way delay; each message draws its own, so that messages overtake each other.
        loss: Probability that a message never arrives.
        duplication: Probability that it arrives twice.
        bytes_per_s: Rate for payloads; 0 for infinite.
    """

    delay_s: tuple[float, float] = (0.001, 0.005)
    loss: float = 0.0
    duplication: float = 0.0
    bytes_per_s: float = 0.0

    def arrivals_s(self, rng: random.Random, queued_s: float = 0.0) -> list[float]:
        """Returns the delays after which copies of one message arrive: none, one, or two.

        Args:
            rng: Of the run.
            queued_s: Until the last byte has left, from :class:`Sender`.
        """
        copies = 1 + (rng.random() < self.duplication)
        if rng.random() < self.loss:
            copies -= 1
        return [queued_s + rng.uniform(*self.delay_s) for _ in range(copies)]


@dataclass(slots=True)
class Sender:
    """One direction of one link: what is sent waits until what was sent before has left."""

    free_at_s: float = 0.0
    given_bytes: float = 0.0

    def queued_s(self, now_s: float, size_bytes: int, bytes_per_s: float) -> float:
        """Queues a message; returns the time until its last byte has left, 0 with a rate of 0."""
        self.given_bytes += size_bytes
        if not bytes_per_s:
            return 0.0
        self.free_at_s = max(self.free_at_s, now_s) + size_bytes / bytes_per_s
        return self.free_at_s - now_s

    def lose(self, size_bytes: int) -> list[float]:
        """Nothing arrives of a message that has left: no delay."""
        self.given_bytes += size_bytes
        return []

    def carried_bytes(self, now_s: float, bytes_per_s: float) -> int:
        """Returns how much has left so far."""
        return round(self.given_bytes - max(0.0, self.free_at_s - now_s) * bytes_per_s)


@dataclass(slots=True)
class Alarm:
    """The one timer of a driver: re-armed after each event, old settings are ignored when they ring.

    With a clock that is wrong it may ring early; what it rings for then has it set again.
    """

    queue: EventQueue
    ring: Callable[[], None]
    true_s: Callable[[float], float] = float  #: when to ring, of what the driver's clock shall show
    set_for_s: float | None = None
    generation: int = 0

    def arm(self, at_s: float | None) -> None:
        """Sets the time of the next ring; None for never."""
        if at_s == self.set_for_s:
            return
        self.set_for_s = at_s
        self.generation += 1
        if at_s is None:
            return
        generation = self.generation

        def ring() -> None:
            if generation == self.generation:
                self.set_for_s = None
                self.ring()

        self.queue.at(self.true_s(at_s), ring)


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
