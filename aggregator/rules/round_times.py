"""Measured round times: they set the waits, and the number of rounds open at once.

Design: sections 4.1 and 4.5.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque

from aggregator.config import AggregatorConfig
from aggregator.rules.averages import MovingAverage
from aggregator.rules.quorum import Waits, grace_window_s
from broker.wire.messages import Pacing

#: Arrivals remembered for the 90th percentile, and rounds whose late arrivals still count into it.
REMEMBERED = 64


class RoundTimes:
    """Moving averages of a round's parts; rounds that span an outage are left out by the caller."""

    def __init__(self, config: AggregatorConfig) -> None:
        self._config = config
        self._quorum_s = MovingAverage()
        self._sync_s = MovingAverage()
        self._journey_s = MovingAverage()
        self._arrivals_s: deque[float] = deque(maxlen=REMEMBERED)
        self._opened_at_s: OrderedDict[int, float] = OrderedDict()

    def opened(self, round_id: int, now_s: float) -> None:
        """Remembers a round, so that what arrives for it is timed even after it has closed."""
        self._opened_at_s[round_id] = now_s  # again after an outage
        if len(self._opened_at_s) > REMEMBERED:
            self._opened_at_s.popitem(last=False)

    def arrived(self, round_id: int, now_s: float) -> None:
        """Times a contribution from the opening of the round that it answers, on time or late."""
        opened_at_s = self._opened_at_s.get(round_id)
        if opened_at_s is not None:
            self._arrivals_s.append(now_s - opened_at_s)

    def quorum_met(self, took_s: float) -> None:
        """Takes xi_quorum, the time from a round's opening to its quorum."""
        self._quorum_s.add(took_s)

    def committed(self, opened_at_s: float, closed_at_s: float, now_s: float) -> None:
        """Adds one sample of the sync time and of the whole round trip."""
        self._sync_s.add(now_s - closed_at_s)
        self._journey_s.add(now_s - opened_at_s)

    @property
    def journey_s(self) -> float | None:
        """Moving average from the opening of a round to its durable version; None before the first."""
        return self._journey_s.value

    @property
    def sync_s(self) -> float | None:
        """Moving average from the closing of a round to its durable version; None before the first."""
        return self._sync_s.value

    def arrivals_p90_s(self) -> float:
        """Returns the time within which nine in ten contributions arrived lately; 0 before the first."""
        if not self._arrivals_s:
            return 0.0
        ordered = sorted(self._arrivals_s)
        return ordered[math.ceil(0.9 * len(ordered)) - 1]

    def waits(self, step_s: float, interval_steps: int) -> Waits:
        """Returns how long a round waits now, at a median inner step of ``step_s``."""
        c = self._config
        grace_s = grace_window_s(
            factor=c.grace_factor,
            overlap_steps=c.overlap,
            step_s=step_s,
            quorum_s=self._quorum_s.get(),
            sync_s=self._sync_s.get(),
        )
        # Answers are given at the end of a step: those of equal islands come up to a step apart, one now, another then.
        half_s = interval_steps / 2 * step_s
        arrivals_s = min(self.arrivals_p90_s() + step_s, half_s) if c.grace_by_arrivals else 0.0
        return Waits(quorum=c.quorum or c.islands, grace_s=grace_s, arrivals_s=arrivals_s, timeout_s=c.round_timeout_s)

    def rounds_allowed(self, num_fragments: int, step_s: float, interval_steps: int) -> int:
        """Returns how many rounds may be open: enough that one journey's length does not stretch H."""
        if self._config.pacing is Pacing.LOCKSTEP:
            return num_fragments
        if not step_s:
            return self._config.rounds_in_flight
        journey_steps = self._journey_s.get() / step_s
        needed = math.ceil(num_fragments * journey_steps / interval_steps) + 1
        return min(num_fragments, max(self._config.rounds_in_flight, needed))
