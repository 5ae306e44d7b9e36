"""The defaults of a recipe that follow from the inner optimizer. Pure.

docs/results.md has what they were compared with (``outer``, ``parity-muon``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from broker.process.demands import demanded
from broker.wire.messages import Demand, MergeRule, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterDefaults:
    """The merge rule and the outer step of a run that is not told otherwise."""

    merge: MergeRule
    outer_learning_rate: float
    outer_momentum: float


ADAMW = OuterDefaults(merge=MergeRule.RDA, outer_learning_rate=1.0, outer_momentum=0.0)
#: RDA, with AdamW's outer step, is 1.1 % behind with four islands.
MUON = OuterDefaults(merge=MergeRule.MEAN, outer_learning_rate=0.7, outer_momentum=0.5)


def suited_to(inner_optimizer: str) -> OuterDefaults:
    """Returns the defaults that suit an inner optimizer, by its name; AdamW's for one that is not known."""
    return MUON if inner_optimizer == "muon" else ADAMW


def settle(recipe: Recipe, inner_optimizer: str = "", demands: Sequence[Demand] = ()) -> Recipe:
    """Returns a recipe that leaves nothing open: what was not given is as demanded, or suits the inner optimizer.

    Raises:
        ConfigError: A demand names no setting of a recipe, or a value that it cannot have.
    """
    suited = suited_to(inner_optimizer)
    wanted = {name: value for name, value in demanded(demands).items() if getattr(recipe, name) is None}
    open_ = {each.name: getattr(suited, each.name) for each in fields(suited) if getattr(recipe, each.name) is None}
    return replace(recipe, **open_ | wanted)
