"""Keeps the training rates of all islands, for the ratio of the fleet's rate to one island's. Pure.

The rates of all islands that advance are kept in order, with their sum, so that the answer to a heartbeat costs nothing
for those that were not heard of. The sum is one of whole numbers: what is added and taken out again leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from aggregator.rules.ranked import Ranked
from aggregator.rules.step_clock import StepClock

#: No island counts for more than so many times the fleet's lower median, nor for less: a claim, or a pause, of one
#: island must not move the schedules of the others.
SPREAD = 32.0
#: A rate is counted in such parts of a token per second: all of a float's digits, of any that is not very small.
PARTS = 2**64


class FleetRates:
    """Tokens per second of every island that advances.

    Args:
        clock: Says which they are, and how long a step takes.
        tokens_per_step: Of an island, as known now.
    """

    def __init__(self, clock: StepClock, tokens_per_step: Callable[[str], float]) -> None:
        self._clock = clock
        self._tokens_per_step = tokens_per_step
        self._news = clock.follow()
        self._rates = Ranked()
        self._sum = 0  # of all of them, in parts

    def look_at(self, island_id: str) -> None:
        """The tokens per step of an island may have changed."""
        self._news.add(island_id)

    def ratio(self, island_id: str, now_s: float) -> float:
        """Returns the tokens that the fleet trains per token of an island, by rates within :data:`SPREAD`."""
        self._look(now_s)
        rates = self._rates
        own = rates.get(island_id)
        if not own:
            return float(max(1, len(rates)))
        middle = rates[(len(rates) - 1) // 2][0]
        least, most = middle / SPREAD, middle * SPREAD
        slow, fast = rates.below(least), len(rates) - rates.up_to(most)
        total = self._sum - sum(_parts(rate) for rate, _ in rates.between(0, slow))
        total -= sum(_parts(rate) for rate, _ in rates.between(len(rates) - fast, len(rates)))
        total += slow * _parts(least) + fast * _parts(most)
        own = min(max(own, least), most)
        return total / _parts(own) if _parts(own) else float(len(rates))

    def _look(self, now_s: float) -> None:
        self._clock.num_advancing(now_s)  # which finds out who that is
        for island_id in self._news:
            line = self._clock.line(island_id)
            self._sum -= _parts(self._rates.get(island_id) or 0.0)
            if line is None:
                self._rates.drop(island_id)
                continue
            rate = self._tokens_per_step(island_id) / line[2]
            self._rates.put(island_id, rate)
            self._sum += _parts(rate)
        self._news.clear()


def _parts(rate: float) -> int:
    return round(rate * PARTS)
