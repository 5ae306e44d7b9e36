"""The recipe of a run: all settings that affect learning, except the task and its data.

The aggregator owns it. It is settled when the first island joins, kept in the run record, served to every island, and
reported. What is left open is chosen by the inner optimizer alone (:mod:`aggregator.rules.recipes`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any, NamedTuple

from broker.base.errors import ConfigError
from broker.base.settings import changeable, fixed
from broker.wire.number_formats import Codec


class MergeRule(StrEnum):
    """The average of the pseudo-gradients of matrices (reference.md, section 4.4)."""

    RDA = "rda"  # length and direction apart
    MEAN = "mean"  # the plain weighted mean


class OwnRule(NamedTuple):
    """The name of a merge rule of one's own; a settled run has all three parts.

    Attributes:
        kernel: The :class:`MergeRule` that its factors are given to.
        path: ``package.module:Class`` (:mod:`aggregator.interface.merge_rule`).
        digest: 16 hex digits over its source file.
    """

    kernel: str
    path: str
    digest: str


_OWN = re.compile(rf"(?:({'|'.join(MergeRule)})\+)?([A-Za-z_][\w.]*:[A-Za-z_]\w*)(?:#([0-9a-f]{{16}}))?", re.ASCII)


def own_rule(merge: str | None) -> OwnRule | None:
    """Returns the parts of a rule's name, empty where left out; None if the text names none.

    It is ``[kernel+]package.module:Class[#digest]``.
    """
    found = _OWN.fullmatch(merge or "")
    return None if found is None else OwnRule(*(part or "" for part in found.groups()))


class Profile(StrEnum):
    """A named set of default settings for a recipe (:mod:`aggregator.rules.recipes`)."""

    DECOUPLED = "decoupled"  # ours
    PAPER = "paper"  # Decoupled DiLoCo as published, arXiv 2604.21428
    DILOCO = "diloco"  # everybody waits at a barrier, arXiv 2311.08105
    STREAMING = "streaming"  # fragment by fragment at fixed steps, with overlap and mixing, arXiv 2501.18512


class Pacing(StrEnum):
    """The rule by which fragments fall due and versions are adopted (reference.md, section 4.1)."""

    ADAPTIVE = "adaptive"  # due by the lower median of the islands, adopted as soon as may be
    LOCKSTEP = "lockstep"  # at the same step of every island, which waits for the version tau steps later
    FIXED = "fixed"  # when t mod H = t_p, t being the steps of the K-th fastest; adopted tau steps after capture


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The recipe of a run: keys of ``[recipe]``, most also flags of ``atoll aggregator``.

    A fixed field decides how model and progress are cut, or is followed by islands. A changeable one may be another
    after a restart.

    Three are None until the first island joins, unless they are given; then they suit its inner optimizer.
    """

    profile: Profile = fixed(
        Profile.DECOUPLED, "settings to begin with; those that are given win", subject="learning rule"
    )
    merge: str | None = fixed(
        None,
        "how pseudo-gradients of matrices are merged: rda, mean, or package.module:Class of a rule of your own "
        "(default: by the inner optimizer)",
    )
    outer_learning_rate: float | None = changeable(
        None, "learning rate of the outer optimizer (default: by the inner optimizer)"
    )
    outer_momentum: float | None = changeable(
        None, "Nesterov momentum of the outer optimizer; 0: plain SGD (default: by the inner optimizer)"
    )
    keep: float = fixed(1.0, "share of local progress that survives an adoption; 0: overwrite, as in the paper")
    mix: float = fixed(
        0.0, "share of the local value that an adoption leaves, where it overwrites (alpha); 0: nothing", flag=None
    )
    staleness_exponent: float = changeable(0.5, "how fast a stale contribution loses weight; 0: not at all")
    presence_exponent: float = changeable(
        0.0, "how much the outer step shrinks where islands are missing; 0: not", flag=None
    )
    max_staleness: int = changeable(8, "versions that the oldest step of a contribution may be behind")
    caps: bool = changeable(True, "limit what one island weighs, and how long a merge of opposed directions is")

    fragments: int = fixed(8, "fragments that the model is cut into", subject="rounds")
    sync_interval: int = fixed(24, "inner steps between two merges of one fragment")
    pacing: Pacing = fixed(Pacing.ADAPTIVE, "when fragments fall due and versions are adopted")
    overlap: int = changeable(2, "inner steps that may pass between sending a fragment and adopting its new version")
    rounds_in_flight: int = changeable(2, "least number of rounds open at once; slow links get more", flag=None)
    quorum: int = changeable(1, "islands that are enough to close a round, 0 for all; or as many as are alive")
    grace_factor: float = changeable(0.9, "share of the spare time that a round waits for stragglers", flag=None)
    grace_by_arrivals: bool = changeable(
        True, "wait as long as nine in ten contributions took lately, if that is more", flag=None
    )
    hold: bool = changeable(
        True, "keep contributions that come after their round for the next one, or refuse them", flag=None
    )
    round_timeout_s: float = changeable(30.0, "seconds after which a round closes with what it has")
    outlier_factor: float = changeable(
        10.0, "refuse a contribution that is so many times longer than usual; 0: refuse none for that", flag=None
    )

    codec: Codec = fixed(Codec.BF16, "number format of pseudo-gradients on the wire", subject="wire")
    version_codec: Codec | None = changeable(
        None, "number format of versions on the wire: f32 whole, others as differences (default: as codec)"
    )

    adapt: bool = changeable(
        True, "narrower number formats, and fewer rounds of an island, where links are too slow for these"
    )

    def __post_init__(self) -> None:
        if self.merge is not None and self.merge not in set(MergeRule) and own_rule(self.merge) is None:
            cure = f"must be one of {', '.join(MergeRule)}, or package.module:Class of a rule of your own"
            raise ConfigError("merge", self.merge, cure)
        for name in ("fragments", "sync_interval", "rounds_in_flight", "max_staleness"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        if self.overlap < 1 and self.pacing is not Pacing.LOCKSTEP:
            raise ConfigError("overlap", self.overlap, "must be at least 1, unless islands wait (pacing = lockstep)")
        if self.pacing is Pacing.LOCKSTEP and not 0 <= self.overlap < self.sync_interval:
            cure = f"must be from 0 to below sync_interval = {self.sync_interval}: a version is adopted before the next"
            raise ConfigError("overlap", self.overlap, cure)
        if not 0 <= self.mix < 1:
            raise ConfigError("mix", self.mix, "must be from 0 to below 1")
        if self.mix and self.keep:
            raise ConfigError("mix", self.mix, f"goes with keep = 0, not with keep = {self.keep:g}")
        for name in ("quorum", "staleness_exponent", "presence_exponent", "grace_factor"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "must not be negative")
        if self.fragments > self.sync_interval:
            most = f"must not exceed sync_interval = {self.sync_interval}"
            cure = f"{most}: at most one fragment falls due per inner step"
            raise ConfigError("fragments", self.fragments, cure)
        if self.outlier_factor and self.outlier_factor < 3:
            cure = "must be at least 3: healthy contributions differ by half; 10 is usual, 0 for none"
            raise ConfigError("outlier_factor", self.outlier_factor, cure)
        if self.outer_momentum is not None and not 0 <= self.outer_momentum < 1:
            cure = "must be from 0 to below 1, or steps grow without bound"
            raise ConfigError("outer_momentum", self.outer_momentum, cure)
        if self.outer_learning_rate is not None and self.outer_learning_rate <= 0:
            raise ConfigError("outer_learning_rate", self.outer_learning_rate, "must be above 0")
        if not 0 <= self.keep <= 1:
            raise ConfigError("keep", self.keep, "must lie between 0 (overwrite) and 1 (keep every step)")
        if self.round_timeout_s <= 0:
            raise ConfigError("round_timeout_s", self.round_timeout_s, "must be above 0, 30 is usual")

    @property
    def codec_of_versions(self) -> Codec:
        """The number format of versions; with all but f32 they travel as differences."""
        return self.codec if self.version_codec is None else self.version_codec

    @property
    def kernel(self) -> str:
        """The :class:`MergeRule` of a settled recipe, whose weights a rule of one's own may change."""
        own = own_rule(self.merge)
        return str(self.merge) if own is None else own.kernel

    @property
    def settled(self) -> bool:
        """True if no setting is left open."""
        return None not in (self.merge, self.outer_learning_rate, self.outer_momentum, self.version_codec)

    @property
    def outer_rule(self) -> tuple[float, float]:
        """The outer learning rate and momentum of a settled recipe."""
        assert self.outer_learning_rate is not None
        assert self.outer_momentum is not None
        return self.outer_learning_rate, self.outer_momentum


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A setting of the recipe that an island requires, with its value as JSON."""

    name: str
    value: str


#: Names of its settings, in order.
RECIPE = tuple(each.name for each in dataclasses.fields(Recipe))


def recipe_of(settings: Recipe) -> Recipe:
    """Returns the recipe from the settings of a process."""
    return Recipe(**{name: getattr(settings, name) for name in RECIPE})


def recipe_table(recipe: Recipe) -> dict[str, Any]:
    """Returns name -> value as plain data, in order, without open settings."""
    values = {name: getattr(recipe, name) for name in RECIPE}
    return {
        name: value.value if isinstance(value, Enum) else value for name, value in values.items() if value is not None
    }


def recipe_digest(table: Mapping[str, Any]) -> str:
    """Returns the digest of a :func:`recipe_table`, 16 hex digits, equal for equal recipes."""
    text = json.dumps(dict(table), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recipe_line(table: Mapping[str, Any]) -> str:
    """Returns the main settings of a :func:`recipe_table` in one line for people."""
    if "outer_momentum" not in table:
        return "open until the first island joins"
    rate, momentum = table["outer_learning_rate"], table["outer_momentum"]
    step = f"{table['profile']}: {table['merge']}, outer rate {rate:g}, momentum {momentum:g}"
    rounds = f"H {table['sync_interval']}, P {table['fragments']}, tau {table['overlap']}, K {table['quorum']}"
    init = table.get("inputs", {}).get("init")
    began = f"; from {init[:16]}" if init else ""
    return f"{step}; {rounds}; keep {table['keep']:g}; {table['codec']} ({recipe_digest(table)}){began}"
