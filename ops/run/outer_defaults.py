"""Default outer step and merge rule for each inner optimizer of the built-in task. Pure.

``up`` begins with them where nothing else is asked for. docs/results.md has what they were compared with (``outer``,
``parity-muon``).
"""

from __future__ import annotations

from dataclasses import dataclass

from aggregator.config import AggregatorConfig

_PRODUCTION = AggregatorConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterDefaults:
    """The merge rule and the outer step of a run that is not told otherwise.

    Attributes:
        merge: How changes of matrices are merged: ``rda`` or ``mean``.
        outer_learning_rate: Of the outer Nesterov step.
        outer_momentum: Likewise.
    """

    merge: str = "rda"
    outer_learning_rate: float = _PRODUCTION.outer_learning_rate
    outer_momentum: float = _PRODUCTION.outer_momentum


#: The settings of the aggregator among them.
OUTER_STEP = ("outer_learning_rate", "outer_momentum")

ADAMW = OuterDefaults()
#: RDA, with the production step, is 1.1 % behind with four islands.
MUON = OuterDefaults(merge="mean", outer_learning_rate=0.7, outer_momentum=0.5)


def suited_to(optimizer: object) -> OuterDefaults:
    """Returns the defaults that suit an inner optimizer, by the name that the task knows it by."""
    return MUON if optimizer == "muon" else ADAMW
