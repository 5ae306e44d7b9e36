"""The gap between islands and data-parallel training by the scaling laws (arXiv 2503.09799)."""

from __future__ import annotations

#: Islands -> A and alpha of the ratio of the fitted loss to that of data-parallel training: A N^alpha.
LAW = {1: (1.0129, -0.0008), 2: (1.0353, -0.0016), 4: (1.0901, -0.0039)}
#: Parameters of the smallest model that it was fitted to. At fewer it is only drawn on.
FITTED_FROM = 35e6


def law_gap(parameters: float, islands: int) -> float:
    """Returns by which share of it the loss of islands is above that of data-parallel training.

    Args:
        parameters: N.
        islands: M, a key of :data:`LAW`.
    """
    factor, power = LAW[islands]
    return float(factor * parameters**power - 1)
