"""Published gaps between DiLoCo and data-parallel training by size of the model, and their line down to ours. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ops.lab.statistics import Interval, trend

#: Parameters -> loss of data-parallel training on C4, with 20 to 25 tokens per parameter: Streaming DiLoCo
#: (https://arxiv.org/abs/2501.18512), as are those below.
DATA_PARALLEL: Mapping[float, float] = {35e6: 3.51, 100e6: 3.19, 200e6: 2.97, 300e6: 2.80, 500e6: 2.67, 1e9: 2.49}

#: Islands -> parameters -> loss with H = 30. For two islands DiLoCo, for four Streaming DiLoCo with 4 bits.
DILOCO: Mapping[int, Mapping[float, float]] = {
    2: {35e6: 3.54, 100e6: 3.21, 200e6: 2.98, 300e6: 2.81, 500e6: 2.68, 1e9: 2.49},
    4: {35e6: 3.60, 100e6: 3.25, 200e6: 3.02, 300e6: 2.84, 500e6: 2.70, 1e9: 2.50},
}

#: How far a relative gap may be from the true one, for losses that are printed to two decimals: half a unit in each.
ROUNDING = 2 * 0.005 / min(DATA_PARALLEL.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A straight line through published gaps over the logarithm of size.

    Attributes:
        slope: Change of the relative gap per tenfold of parameters.
        middle: Mean of log10 of the published sizes.
        level: The gap there.
    """

    slope: Interval
    middle: float
    level: float

    def at(self, parameters: float) -> float:
        """Returns the relative gap at a size; far from the published ones it is an extrapolation and no more."""
        return self.level + self.slope.mean * (math.log10(parameters) - self.middle)


def line(islands: int) -> Line | None:
    """Returns the line for so many islands; None where nothing was published."""
    losses = DILOCO.get(islands)
    if losses is None:
        return None
    gaps = {size: loss / DATA_PARALLEL[size] - 1 for size, loss in losses.items()}
    return Line(
        slope=trend(list(gaps), list(gaps.values())),
        middle=math.fsum(map(math.log10, gaps)) / len(gaps),
        level=math.fsum(gaps.values()) / len(gaps),
    )
