"""The wide-area network as arithmetic: when a packet that enters it leaves it, or that it is dropped.

Every region has one link to a core that has no limits, so a packet passes two pipes: up from its region, and down to
the other. A pipe has a rate and a queue before it; what finds the queue full is dropped, as a router does, and TCP sees
the loss. The delay is in between, half of the round trip. No clock and no socket here.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count

#: Of an IPv4 header: where the last byte of the destination stands.
_LAST_OF_DESTINATION = 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a region's link is like, the same in both directions.

    Attributes:
        delay_s: One way, from region to region.
        bytes_per_s: Rate of each direction.
        queue_bytes: What may wait before it.
    """

    delay_s: float
    bytes_per_s: float
    queue_bytes: float

    @classmethod
    def of(cls, *, round_trip_ms: float, mbit: float) -> Shape:
        """Returns a link whose queue holds what is on its way in a round trip, and at least 0.1 s of its rate."""
        rate = mbit * 1e6 / 8
        return cls(delay_s=round_trip_ms / 2e3, bytes_per_s=rate, queue_bytes=rate * max(0.1, round_trip_ms / 1e3))


class Pipe:
    """One direction of one link."""

    def __init__(self, shape: Shape) -> None:
        self.passed_bytes = 0
        self.dropped = 0
        self._shape = shape
        self._free_at_s = 0.0

    def offer(self, size: int, at_s: float) -> float | None:
        """Returns when a packet is through that comes at ``at_s``; None if it is dropped."""
        waits_s = max(0.0, self._free_at_s - at_s)
        if waits_s * self._shape.bytes_per_s > self._shape.queue_bytes:
            self.dropped += 1
            return None
        self._free_at_s = at_s + waits_s + size / self._shape.bytes_per_s
        self.passed_bytes += size
        return self._free_at_s


class Core:
    """All pipes, and the packets between them.

    Args:
        regions: How many; the address of region i ends in i + 1.
        shape: Of every region's link.
    """

    def __init__(self, regions: int, shape: Shape) -> None:
        self.up = [Pipe(shape) for _ in range(regions)]
        self.down = [Pipe(shape) for _ in range(regions)]
        self._delay_s = shape.delay_s
        self._waiting: list[tuple[float, int, bool, int, bytes]] = []
        self._numbers = count()

    def offer(self, source: int, packet: bytes, at_s: float) -> None:
        """Takes a packet that a region sends; one that is no IPv4, or goes nowhere, is dropped."""
        if len(packet) <= _LAST_OF_DESTINATION or packet[0] >> 4 != 4:
            return
        destination = packet[_LAST_OF_DESTINATION] - 1
        if not 0 <= destination < len(self.down):
            return
        through_s = self.up[source].offer(len(packet), at_s)
        if through_s is not None:
            self._put(through_s + self._delay_s, False, destination, packet)

    def take(self, now_s: float) -> list[tuple[int, bytes]]:
        """Returns what has arrived: region and packet, in order."""
        arrived = []
        while self._waiting and self._waiting[0][0] <= now_s:
            at_s, _, through, destination, packet = heapq.heappop(self._waiting)
            if through:
                arrived.append((destination, packet))
                continue
            # At the time it came there, not now: a carrier that is late must not slow the link down.
            through_s = self.down[destination].offer(len(packet), at_s)
            if through_s is not None:
                self._put(through_s, True, destination, packet)
        return arrived

    def next_s(self) -> float | None:
        """Returns when :meth:`take` is to be called next; None if nothing is on its way."""
        return self._waiting[0][0] if self._waiting else None

    def _put(self, at_s: float, through: bool, destination: int, packet: bytes) -> None:
        heapq.heappush(self._waiting, (at_s, next(self._numbers), through, destination, packet))
