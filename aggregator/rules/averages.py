"""A moving average of measured times. Pure."""

from __future__ import annotations


class MovingAverage:
    """An exponential average that no sample spoils for long, be it an outage or a first compilation.

    A sample counts as at most four times the average, and the average as at most four times a sample.
    """

    __slots__ = ("_rate", "value")

    def __init__(self, rate: float = 0.2) -> None:
        self._rate = rate
        self.value: float | None = None

    def add(self, sample: float) -> None:
        """Takes one sample, at least 0."""
        before = sample if self.value is None else self.value
        if before and sample:
            before, sample = min(before, 4 * sample), min(sample, 4 * before)
        self.value = before + self._rate * (sample - before)

    def get(self, default: float = 0.0) -> float:
        """The average, or ``default`` before the first sample."""
        return default if self.value is None else self.value
