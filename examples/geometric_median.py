"""Bring your own merge rule: the geometric median of a round's pseudo-gradients.

    python3 -m ops up --merge examples.geometric_median:GeometricMedian

The point with the smallest sum of distances to all contributions, each by its share. Whoever is far from the others
pulls no harder than whoever is near, so fewer than half of the weight cannot carry it away (Pillutla, Kakade and
Harchaoui, https://arxiv.org/abs/1912.13445). It is found by Weiszfeld's steps, each a mean by the inverse distances.
All of these follow from products of contributions, so the rule never sees an element of one.

The median is shorter than what it is the median of, as pseudo-gradients of honest islands are nearly orthogonal. So its
weights are given to radial-directional averaging, which averages lengths apart; with the kernel ``mean`` it is the
geometric median itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aggregator.interface.merge_rule import MergeRound, RoundRule

#: Of Weiszfeld: each is a mean over numbers, so there is nothing to save.
STEPS = 32
#: Of the mean length: distances below it count as that, as a contribution may lie on the median.
NEAR = 1e-3


class GeometricMedian(RoundRule):
    """The weights of the geometric median."""

    kernel = "rda"
    compares = True

    def factors(self, round: MergeRound, state: Any) -> tuple[Sequence[float], Any]:
        """Returns what makes of shares the weights of the geometric median; there is no state."""
        shares = np.array([each.share for each in round.contributions])
        products = np.array(round.products)
        squares = np.diag(products)
        usual = shares @ np.sqrt(squares)
        if not usual:
            return [1.0] * len(shares), None
        weights = shares  # of the median so far
        for _ in range(STEPS):
            distances = squares - 2 * products @ weights + weights @ products @ weights
            weights = shares / np.sqrt(np.maximum(distances, (NEAR * usual) ** 2))
            weights /= weights.sum()
        return np.divide(weights, shares, out=np.zeros_like(shares), where=shares > 0).tolist(), None
