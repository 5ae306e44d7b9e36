"""Divergence: tells a sudden fall of the fleet's agreement from the slow fall of every run. Pure.

Islands whose training comes apart point in different directions before any loss rises. But agreement also falls where
all is well: from 0.5 to 0.2 in the first rounds, then slowly, as what is left to learn drowns in the noise of batches.
So a run is held against itself, by two means over versions of all fragments:

* the *present* one over about ``SHORT`` versions, or two rounds of every fragment if that is more: fragments differ;
* the *usual* one over ``TIMES`` as many. It follows a slow fall, and is not asked before it is full.

Agreement has fallen when the present mean is below ``FALLEN`` of the usual one, and lower by more than ``DEVIATIONS``
standard errors: where agreement is low and rounds are noisy, half of it is reached by chance. (Two healthy runs of
``examples/numpy_task.py``, whose learning rate falls to a tenth, came down to 2 % and 14 % of a usual mean of 0.07,
at 3.5 standard errors.) It has recovered above ``RECOVERED``: by itself, or because the usual mean has come down to a
lasting change after one or two of its own lengths; and not while the islands point against each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: Versions of the present mean, at least, and how many times as many the usual one has.
SHORT, TIMES = 16, 8
#: Shares of the usual mean.
FALLEN, RECOVERED = 0.5, 0.7
#: Standard errors of the present mean.
DEVIATIONS = 5.0


@dataclass(slots=True)
class Course:
    """The fleet's agreement over the last versions, and over many.

    Attributes:
        versions: How many have said something of it.
        present: The short mean of the fleet's level.
        usual: The long one.
        variance: Variance of one version's level around the long mean.
        moves: How many versions have said how they agree with the momentum before them.
        momentum: Short mean of that cosine.
        fallen: Training begins to diverge.
    """

    versions: int = 0
    present: float = 0.0
    usual: float = 0.0
    variance: float = 0.0
    moves: int = 0
    momentum: float = 0.0
    fallen: bool = False

    def learn(self, level: float, fragments: int) -> None:
        """Takes the agreement of one version; ``fragments``: how many fall due in turn."""
        self.versions += 1
        short = max(SHORT, 2 * fragments)
        self.present += (level - self.present) / min(self.versions, short)
        off, rate = level - self.usual, 1 / min(self.versions, TIMES * short)
        self.usual += rate * off
        self.variance = (1 - rate) * (self.variance + rate * off * off)
        if self.versions < TIMES * short:
            return
        # A mean with weights that shrink by 1 - 1/n has the variance of 2n - 1 values.
        error = math.sqrt(self.variance / (2 * short - 1))
        if self.fallen:
            self.fallen = self.present < max(0.0, RECOVERED * self.usual)
        else:
            self.fallen = self.present < min(FALLEN * self.usual, self.usual - DEVIATIONS * error)

    def moved(self, cosine: float, fragments: int) -> None:
        """Takes the cosine of a version's merge with the momentum before it."""
        self.moves += 1
        self.momentum += (cosine - self.momentum) / min(self.moves, max(SHORT, 2 * fragments))

    @property
    def agreement(self) -> float | None:
        """The short mean; None before the first version."""
        return self.present if self.versions else None

    @property
    def momentum_cosine(self) -> float | None:
        """The short mean of the cosine with the momentum; None before the first."""
        return self.momentum if self.moves else None

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Goes on from the newest of some records, each with the fields of this class."""
        newest = max(records, key=lambda record: record["versions"] + record["moves"], default={})
        for name, value in newest.items():
            setattr(self, name, value)
