"""Measures a link by the chunks that pass it: bytes per second each way, and the round trip. Pure.

What counts is the time between two chunks that follow each other, as they arrive or are noted as received: the link was
busy in between. A sender that waits for notes, or a machine that is busy, can only make a link look slower than it is.
So a rate is the median of a few samples, and unknown until there are enough.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import Final, NamedTuple

#: A sample covers this many bytes or seconds, whichever comes first.
SAMPLE_BYTES: Final = 32 << 10
SAMPLE_S: Final = 0.5
#: Samples of which the median is the rate: three of a link that has changed are enough.
SAMPLES: Final = 5
#: Round trips of which the shortest counts.
ROUND_TRIPS: Final = 16
#: At least this part of the time of a chunk alone on its way is due to the link's rate, not its length.
LEAST_PART: Final = 0.25


class Link(NamedTuple):
    """Measurements of a link; None: not measured yet."""

    up: float | None = None  #: bytes/s
    down: float | None = None  #: bytes/s
    round_trip_s: float | None = None


class RateMeter:
    """Measures the rate of one direction."""

    def __init__(self) -> None:
        self._nbytes, self._took_s = 0, 0.0
        self._samples: deque[float] = deque(maxlen=SAMPLES)

    def moved(self, nbytes: int, took_s: float) -> None:
        """Adds bytes and the time that they took; the link carried nothing else meanwhile."""
        self._nbytes, self._took_s = self._nbytes + nbytes, self._took_s + max(0.0, took_s)
        if self._took_s and (self._nbytes >= SAMPLE_BYTES or self._took_s >= SAMPLE_S):
            self._samples.append(self._nbytes / self._took_s)
            self._nbytes, self._took_s = 0, 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """The rate; None until it was measured a few times."""
        return median_low(self._samples) if len(self._samples) > SAMPLES // 2 else None


class SendingMeter(RateMeter):
    """Measures rate and round trip of the sending direction, by the receiver's notes of chunks."""

    def __init__(self) -> None:
        super().__init__()
        self._round_trips_s: deque[float] = deque(maxlen=ROUND_TRIPS)
        self._noted_s = 0.0

    @property
    def round_trip_s(self) -> float | None:
        """The shortest recent time from sending a chunk over an idle link to its note; None if none yet.

        On a narrow link most of it is what the chunk itself takes.
        """
        return min(self._round_trips_s, default=None)

    def noted(self, nbytes: int, sent_s: float, now_s: float) -> None:
        """Adds bytes that the receiver has noted; ``sent_s`` is when the first of them was sent."""
        took_s = now_s - max(sent_s, self._noted_s)
        if sent_s >= self._noted_s:  # nothing was under way before
            self._round_trips_s.append(took_s)
            took_s = max(LEAST_PART * took_s, took_s - min(self._round_trips_s))
        self._noted_s = now_s
        self.moved(nbytes, took_s)


class ReceivingMeter(RateMeter):
    """Measures the rate of incoming chunks, by the time from one chunk of a message to the next."""

    _arrived_s = 0.0

    def arrived(self, nbytes: int, now_s: float, *, goes_on: bool) -> None:
        """Adds a chunk that has arrived; with ``goes_on`` it continues the message of the chunk before."""
        if goes_on:
            self.moved(nbytes, now_s - self._arrived_s)
        self._arrived_s = now_s
