"""Published gaps between DiLoCo and data-parallel training by size of the model, and their line down to ours. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from ops.lab.statistics import Interval
from ops.lab.trends import level_at, trend

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


def gap_at(parameters: float, islands: int) -> Interval | None:
    """Returns the relative gap at a size on the straight line through published ones over the logarithm of size.

    Far from the published sizes it is an extrapolation and no more. None if nothing was published for so many islands.
    """
    gaps = _gaps(islands)
    return None if gaps is None else level_at(parameters, list(gaps), list(gaps.values()))


def rounded(islands: int) -> tuple[float, float]:
    """Returns the lowest and the highest gap of the smallest model that losses printed to two decimals leave open.

    Raises:
        KeyError: Nothing was published for so many islands.
    """
    size = min(DATA_PARALLEL)
    ours, theirs, half = DILOCO[islands][size], DATA_PARALLEL[size], 0.005
    return (ours - half) / (theirs + half) - 1, (ours + half) / (theirs - half) - 1


def slope(islands: int) -> Interval | None:
    """Returns by how much published gaps change per tenfold of parameters; None as :func:`gap_at`."""
    gaps = _gaps(islands)
    return None if gaps is None else trend(list(gaps), list(gaps.values()))


def _gaps(islands: int) -> dict[float, float] | None:
    losses = DILOCO.get(islands)
    return None if losses is None else {size: loss / DATA_PARALLEL[size] - 1 for size, loss in losses.items()}
