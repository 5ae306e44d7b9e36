"""The settings of a cell: all that determines a laboratory run, except its seed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from aggregator.interface.config import AggregatorConfig
from aggregator.rules.recipes import ADAMW, suited_to
from broker.base import sources
from broker.base.errors import ConfigError
from broker.base.settings import setting
from broker.wire.messages import Codec, MergeRule, Recipe
from islands.interface.config import LANGUAGE


class Mode(StrEnum):
    """The algorithm of a cell."""

    DATA_PARALLEL = "data-parallel"  # gradients are averaged at every step
    DILOCO = "diloco"  # everybody stops every H steps; one merge of the whole model
    STREAMING = "streaming"  # fragment by fragment, everybody at the same steps, tau steps of overlap
    DECOUPLED = "decoupled"  # the production programs in virtual time


#: The form of one event, in lists of them.
_EVENT_FIELDS = {
    "joins": "[island, from s, until s]",
    "outages": "[island, from s, for s]",
}
#: Fields that earlier records lack: at their defaults no part of a run's key.
_LATER = {"intervals": [], "outer_follows": True}
#: What is not an experiment's subject is as in production.
_PRODUCTION = Recipe()


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSettings:
    """One cell. Every field is a key of an experiment's tables ``[run]`` and ``[grid]``.

    Virtual times are in seconds; an inner step takes one second unless ``step_times_s`` says otherwise.
    """

    mode: Mode = setting(Mode.DECOUPLED, "data-parallel, diloco, streaming or decoupled")
    islands: int = setting(4, "islands (M)")
    steps: int = setting(1500, "inner steps per island; with unequal speeds, on average")
    task: str = setting(LANGUAGE, "package.module:function that returns the task")
    options: Mapping[str, Any] = field(default_factory=dict)

    fragments: int = setting(8, "fragments the model is cut into (P)")
    sync_interval: int = setting(24, "inner steps between two merges of one fragment (H)")
    intervals: tuple[tuple[float, ...], ...] = setting((), "intervals, whatever journeys take: [from s, H]")
    outer_follows: bool = setting(True, "whether the outer step follows an interval that is not sync_interval")
    overlap: int = setting(2, "inner steps between capture and adoption (tau)")
    quorum: int = setting(1, "contributions that may close a round (K); 0 for all islands")
    grace_factor: float = setting(0.9, "share of the spare overlap time spent waiting for stragglers; 0 for no grace")
    merge: MergeRule = setting(MergeRule(ADAMW.merge), "how pseudo-gradients of matrices are averaged")
    keep: float = setting(1.0, "share of local progress that survives an adoption")
    mix: float = setting(0.5, "share of the local value that streaming islands keep on receipt (alpha)")
    outer_learning_rate: float = setting(ADAMW.outer_learning_rate, "of the outer Nesterov step")
    outer_momentum: float = setting(ADAMW.outer_momentum, "of the outer Nesterov step")
    staleness_exponent: float = setting(_PRODUCTION.staleness_exponent, "a in (1 + staleness) ** -a")
    max_staleness: int = setting(_PRODUCTION.max_staleness, "versions the oldest step may be behind")
    presence_exponent: float = setting(0.0, "beta in (share of the live islands in the round) ** beta")
    codec: Codec = setting(Codec.F32, "how pseudo-gradients travel")
    version_codec: Codec = setting(Codec.F32, "how versions travel: f32 whole, others as differences")
    error_feedback: bool = setting(True, "keep the codec's rounding error in the island's progress")

    step_times_s: tuple[float, ...] = setting((1.0,), "virtual seconds of an inner step, island by island, repeated")
    jitter: float = setting(0.0, "relative spread of step times")
    delays_s: tuple[float, ...] = setting((0.002,), "one-way delay of each island's link, repeated")
    megabytes_per_s: float = setting(0.0, "rate of every link; 0 for infinite")
    data_ahead_s: float | None = setting(
        None, "virtual seconds of training for which an island is given data at a time (default: 10)"
    )
    joins: tuple[tuple[float, ...], ...] = setting(
        (), "islands present for a part of the run: [island, from s, until s]"
    )
    outages: tuple[tuple[float, ...], ...] = setting((), "whose link fails: [island, from s, for s]")
    chips: int = setting(
        0, "simulated chips, each interrupted once a year, whose failures pause the islands that own them; 0 for none"
    )

    evaluations: int = setting(6, "points of the loss curve, the last one included")
    held_out_sequences: int = setting(4096, "sequences that judge the final model")

    def __post_init__(self) -> None:
        for name in ("islands", "steps", "fragments", "sync_interval", "evaluations", "held_out_sequences"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "must be at least 1")
        if not 0 <= self.megabytes_per_s < math.inf:
            raise ConfigError("megabytes_per_s", self.megabytes_per_s, "must be a number from 0 on; 0 is for no limit")
        if self.chips and self.chips < self.islands:
            raise ConfigError("chips", self.chips, f"{self.islands} islands need one each; 0 for no failures")
        for name in ("jitter", "mix"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(name, getattr(self, name), "must lie between 0 and 1")
        if self.quorum > self.islands or self.quorum < 0:
            raise ConfigError("quorum", self.quorum, f"must be 0 (all) to islands = {self.islands}")
        for name in ("step_times_s", "delays_s"):
            values = getattr(self, name)
            if not values or not all(0 < value < math.inf for value in values):
                raise ConfigError(name, values, "must hold at least one number, and none that is not above 0")
        for name, form in _EVENT_FIELDS.items():
            for event in getattr(self, name):
                if len(event) != form.count(",") + 1 or event[0] not in range(self.islands) or min(event) < 0:
                    raise ConfigError(name, event, f"must read {form}, islands counting from 0")
        for each in self.intervals:
            if len(each) != 2 or each[0] < 0 or each[1] < 1 or (each[0] == 0 and each[1] != self.sync_interval):
                raise ConfigError("intervals", each, f"must read [from s, H], from 0 s on H = {self.sync_interval}")
        who = [event[0] for event in self.joins]
        for event in self.joins:
            if event[2] <= event[1] or who.count(event[0]) > 1:
                raise ConfigError("joins", event, "must end after it begins, and an island joins once")
        if self.mode is Mode.STREAMING and self.overlap >= self.sync_interval:
            cure = f"must be below sync_interval = {self.sync_interval}: a fragment is adopted before it is sent again"
            raise ConfigError("overlap", self.overlap, cure)
        uneven = len(set(self.step_times_range_s)) > 1 or self.jitter or self.intervals
        if (uneven or self.joins or self.outages or self.chips) and self.mode is not Mode.DECOUPLED:
            others = "intervals, unequal speeds, joins, outages and chips"
            cure = f"{others} are for decoupled runs: the baselines would only stand still"
            raise ConfigError("mode", str(self.mode), cure)
        if self.version_codec is not Codec.F32 and self.mode is not Mode.DECOUPLED:
            cure = "is for decoupled runs: the baselines hand versions on as they are"
            raise ConfigError("version_codec", str(self.version_codec), cure)
        if self.mode is Mode.DILOCO and self.sync_interval > self.steps:
            cure = f"must be at most steps = {self.steps}, or nothing is merged before the end"
            raise ConfigError("sync_interval", self.sync_interval, cure)
        if self.mode is Mode.DILOCO and self.fragments != 1:
            raise ConfigError("fragments", self.fragments, "must be 1 with mode = diloco: it merges the whole model")
        if self.data_ahead_s != 0:  # of records of runs with one share for each island, which nothing runs any more
            _ = self.aggregator  # checks its own relations

    @property
    def aggregator(self) -> AggregatorConfig:
        """The aggregator's settings for this cell; the driver fills in ``total_tokens`` and ``seed``."""
        fastest_s, slowest_s = self.step_times_range_s
        return AggregatorConfig(
            run_id="lab",
            islands=self.islands,
            fragments=self.fragments,
            sync_interval=self.sync_interval,
            overlap=self.overlap,
            quorum=self.quorum or self.islands,
            grace_factor=self.grace_factor,
            # Islands wait for nobody, so a round may take as long as the slowest island needs for H steps.
            round_timeout_s=max(30.0, 2 * self.sync_interval * slowest_s),
            merge=self.merge.value,
            keep=self.keep,
            outer_learning_rate=self.outer_learning_rate,
            outer_momentum=self.outer_momentum,
            staleness_exponent=self.staleness_exponent,
            max_staleness=self.max_staleness,
            presence_exponent=self.presence_exponent,
            codec=self.codec,
            version_codec=self.version_codec,
            data_ahead_s=10.0 if self.data_ahead_s is None else self.data_ahead_s,
            adapt=self.megabytes_per_s > 0,  # a link without a limit is only ever long
            heartbeat_interval_s=fastest_s / 2,
            suspect_after_s=2 * slowest_s + 2,
            share_takeover_s=0.0,  # islands that die come back: data changes hands in other tests
            dead_after_s=4 * slowest_s + 6,
        )

    def step_time_s(self, island: int) -> float:
        """Virtual seconds of an inner step of one island."""
        return self.step_times_s[island % len(self.step_times_s)]

    def delay_s(self, island: int) -> float:
        """One-way delay of the link of one island."""
        return self.delays_s[island % len(self.delays_s)]

    @property
    def step_times_range_s(self) -> tuple[float, float]:
        """Virtual seconds of an inner step of the fastest and of the slowest island."""
        times_s = [self.step_time_s(i) for i in range(self.islands)]
        return min(times_s), max(times_s)

    @property
    def longest_delay_s(self) -> float:
        """The longest delay among the islands; a list may have more entries than there are islands."""
        return max(self.delay_s(i) for i in range(self.islands))


def cell_settings(values: Mapping[str, Any]) -> CellSettings:
    """Returns the settings for dotted names: ``task.NAME`` is a task option, any other name a field.

    Settings of the outer step that are left open for our own task are those of ``up`` with that inner optimizer.

    Raises:
        ConfigError: An unknown name, a wrong value, or a relation that does not hold.
    """
    options = {name.removeprefix("task."): value for name, value in values.items() if name.startswith("task.")}
    rest = {name: value for name, value in values.items() if not name.startswith("task.")}
    if rest.get("task", LANGUAGE) == LANGUAGE and rest.get("mode") != Mode.DATA_PARALLEL:  # which merges nothing
        rest = asdict(suited_to(str(options.get("optimizer", "")))) | rest
    if rest.get("mode") == Mode.DILOCO:
        rest["fragments"] = 1  # it has no others
    return sources.from_sources(CellSettings, rest | {"options": options}, where="run")


def resolved(cell: CellSettings) -> dict[str, Any]:
    """Returns all settings as plain JSON values, task options under ``task.NAME``."""
    plain: dict[str, Any] = {}
    for each in fields(cell):
        value = getattr(cell, each.name)
        if each.name == "options":
            plain.update({f"task.{name}": option for name, option in sorted(value.items())})
        else:
            plain[each.name] = str(value) if isinstance(value, StrEnum) else _listed(value)
    return plain


def key_of(cell: CellSettings, seed: int) -> str:
    """Returns a digest of all that decides a run: the name under which its record is found again."""
    whole = {name: value for name, value in resolved(cell).items() if name not in _LATER or value != _LATER[name]}
    whole["seed"] = seed
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]


def _listed(value: Any) -> Any:
    return [_listed(each) for each in value] if isinstance(value, tuple | list) else value
