"""The beginning of a recipe: its profile, then defaults that suit the inner optimizer. Pure.

docs/results.md has what our defaults were compared with (``outer``, ``parity-muon``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from broker.base.errors import ConfigError
from broker.process.demands import demanded
from broker.wire.messages import Codec, Demand, MergeRule, Pacing, Profile, Recipe, own_rule


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterDefaults:
    """The default merge rule and outer step of a run."""

    merge: str
    outer_learning_rate: float
    outer_momentum: float


#: Along rate / (1 - momentum) = 1 the loss with RDA is flat, from rate 1 without momentum to 0.5 with 0.5.
ADAMW = OuterDefaults(merge=MergeRule.RDA.value, outer_learning_rate=0.7, outer_momentum=0.3)
#: RDA, with rate 1 and without momentum, is 1.1 % behind with four islands.
MUON = OuterDefaults(merge=MergeRule.MEAN.value, outer_learning_rate=0.7, outer_momentum=0.5)


def suited_to(inner_optimizer: str) -> OuterDefaults:
    """Returns the defaults that suit an inner optimizer, by its name; AdamW's for one that is not known."""
    return MUON if inner_optimizer == "muon" else ADAMW


#: No limit of staleness: more versions than a contribution can be old.
NO_LIMIT: Final = 1_000_000

#: What the ancestors have in common. Their H is 500 (DiLoCo), 30 and 100 (Streaming); here it is that of the others.
_ANCESTOR: Final[dict[str, Any]] = {
    "merge": MergeRule.MEAN.value,
    "keep": 0.0,
    "staleness_exponent": 0.0,
    "max_staleness": NO_LIMIT,
    "caps": False,
    "pacing": Pacing.LOCKSTEP,
    "quorum": 0,
    "grace_by_arrivals": False,
    "round_timeout_s": 3600.0,
    "outlier_factor": 0.0,
    "codec": Codec.F32,
    "version_codec": Codec.F32,
    "adapt": False,
}

#: Settings of each profile, where they are not the defaults of :class:`Recipe`. The paper's are those of Decoupled
#: DiLoCo (https://arxiv.org/abs/2604.21428); rate and momentum, which it does not print, are DiLoCo's.
PROFILES: Final[Mapping[Profile, Mapping[str, Any]]] = {
    Profile.DECOUPLED: {},
    Profile.PAPER: {
        "merge": MergeRule.RDA.value,
        "outer_learning_rate": 0.7,
        "outer_momentum": 0.9,
        "keep": 0.0,
        "staleness_exponent": 0.0,
        "max_staleness": NO_LIMIT,
        "caps": False,
        "fragments": 24,
        "sync_interval": 24,
        "overlap": 2,
        "pacing": Pacing.FIXED,
        "rounds_in_flight": 24,
        "quorum": 1,
        "grace_by_arrivals": False,
        "hold": False,
        "outlier_factor": 0.0,
        "codec": Codec.BF16,
        "version_codec": Codec.F32,
        "adapt": False,
    },
    Profile.DILOCO: _ANCESTOR
    | {
        "outer_learning_rate": 0.7,
        "outer_momentum": 0.9,
        "fragments": 1,
        "overlap": 0,
    },
    Profile.STREAMING: _ANCESTOR
    | {
        "outer_learning_rate": 0.4,
        "outer_momentum": 0.9,
        "mix": 0.5,
        "overlap": 2,
        "codec": Codec.INT4,
    },
}

#: Setting -> why our default is not the paper's.
REASONS: Final[Mapping[str, str]] = {
    "outer_momentum": "at short intervals a heavy outer momentum loses (docs/results.md, outer)",
    "keep": "no token that was trained is dropped",
    "staleness_exponent": "a stale contribution moves the model less",
    "max_staleness": "an island that was away for long takes the global parameters instead",
    "caps": "one island that claims much, or opposed directions, cannot carry the model away",
    "fragments": "small models have few tensors; with more, headers cost more than they spread",
    "pacing": "the median is not led by the fastest island, and an early version is worth more",
    "rounds_in_flight": "more are opened where round trips are long",
    "grace_by_arrivals": "on links that are longer than tau steps, the formula leaves no time for anybody",
    "hold": "what comes late is still worth something",
    "outlier_factor": "one broken island must not poison the others",
    "version_codec": "differences take half the bytes or fewer, and what rounding leaves out of one is in the next",
    "adapt": "a link that becomes narrow costs bits, not rounds",
}


def begun_with(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given settings, over those of the profile that they name."""
    return {**PROFILES[Profile(given.get("profile", Profile.DECOUPLED))], **given}


def settle(recipe: Recipe, inner_optimizer: str = "", demands: Sequence[Demand] = ()) -> Recipe:
    """Returns a recipe with nothing left open: demands fill it, else the inner optimizer's defaults.

    Versions travel as pseudo-gradients do.

    Raises:
        ConfigError: A demand names no setting of a recipe, or a value that it cannot have, or that no island may bring.
    """
    suited = suited_to(inner_optimizer)
    wanted = {name: value for name, value in demanded(demands).items() if getattr(recipe, name) is None}
    if own_rule(wanted.get("merge")):
        cure = "a rule of one's own is the aggregator's to import: start it with --merge, or leave it out at the island"
        raise ConfigError("merge", wanted["merge"], cure)
    open_ = {each.name: getattr(suited, each.name) for each in fields(suited) if getattr(recipe, each.name) is None}
    return replace(recipe, **{"version_codec": recipe.codec_of_versions} | open_ | wanted)
