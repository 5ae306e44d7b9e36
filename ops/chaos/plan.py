"""A plan of faults: drawn from a seed, or read from a file. Pure: the same seed or text gives the same plan.

The file is TOML::

    [chaos]                  # all optional; each is also a flag, which wins
    seconds = 600.0          # of faults; before them comes the start, after them settle_s to heal
    fault_every_s = 5.0      # draws faults, every kind in turn; 0: only those below
    fault_seed = 1
    fault_kinds = ["kill", "stop"]
    settle_s = 20.0

    [cluster]                # settings of `up` under their names, as flags would give them
    islands = 16
    pace = [0.2]

    [[fault]]                # as many as wanted
    at_s = 10.0              # from the moment when every island trains
    kind = "kill"
    target = "leader"        # or a list; usual for the kind if left out
    for_s = 2.0
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.process import toml
from broker.process.settings import nearest, setting
from broker.wire.errors import ConfigError
from ops.chaos.faults import NATURES, Fault, Kind, Needs, fault

_TABLES = ("chaos", "cluster", "fault")
_FAULT_KEYS = ("at_s", "kind", "target", "for_s")

#: What a storm goes through, in an order of its own each time: (kind, target; empty: the usual one).
DRILLS: tuple[tuple[Kind, str], ...] = (
    (Kind.KILL, "any island"),
    (Kind.KILL, "leader"),
    (Kind.KILL, "any aggregator"),
    (Kind.KILL, "any broker"),
    (Kind.KILL, "redis"),
    (Kind.STOP, "any island"),
    (Kind.STOP, "leader"),
    (Kind.STOP, "any broker"),
    (Kind.STOP, "redis"),
    (Kind.CLOCK, "any island"),
    (Kind.CLOCK, "leader"),
    (Kind.CLOCK, "any broker"),
    (Kind.DISK_FULL, "leader"),
    (Kind.WIPE, "redis"),
    (Kind.STALE, "redis"),
    (Kind.PARTITION, "any island"),
    (Kind.CUT_REDIS, "leader"),
    (Kind.SLOW, "any island"),
    (Kind.CORRUPT, "any island"),
    (Kind.RESET, "any island"),
    (Kind.NAN, ""),
    (Kind.SCALE, ""),
    (Kind.REPLAY, ""),
    (Kind.GARBAGE, ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosConfig:
    """What only ``chaos`` needs to know; every field is a flag and a key of the table ``[chaos]`` in its file."""

    seconds: float = setting(60.0, "how long faults go on, from the moment when every island trains")
    fault_every_s: float = setting(5.0, "seconds from one drawn fault to the next; 0: none but those of the file")
    fault_seed: int = setting(0, "of the drawn faults: the same seed, the same faults")
    fault_kinds: tuple[str, ...] = setting((), "kinds to draw from (default: all that are possible here)")
    calm_s: float = setting(10.0, "before the first drawn fault: what islands do in it is what they are measured by")
    settle_s: float = setting(15.0, "after the last fault, for everything to heal")

    def __post_init__(self) -> None:
        for name in ("fault_every_s", "calm_s", "settle_s"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "must be 0 or more seconds")
        if not 0 < self.seconds <= 7 * 86_400:
            raise ConfigError("seconds", self.seconds, "must be above 0, at most a week")
        for kind in self.fault_kinds:
            if kind not in tuple(Kind):
                raise ConfigError("fault_kinds", kind, f"is no kind of fault; {nearest(kind, list(Kind))}")

    @property
    def kinds(self) -> frozenset[Kind] | None:
        """The kinds to draw from; None: all that are possible."""
        return frozenset(map(Kind, self.fault_kinds)) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFile:
    """What a file of faults says.

    Attributes:
        chaos: Its table [chaos], not checked yet.
        cluster: Its table [cluster], not checked yet.
        faults: In the order of their times.
    """

    chaos: Mapping[str, Any] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()


def read_faults(text: str, *, name: str) -> FaultFile:
    """Returns what a file says; ``name`` is shown where it is wrong.

    Raises:
        ConfigError: It is no TOML, or says something that cannot be; fault n of it is called ``fault[n]``.
    """
    tables = toml.parse(text, field="faults", source=name)
    for table in tables:
        if table not in _TABLES:
            raise ConfigError(table, name, f"is no table of this file; {nearest(table, _TABLES)}")
    for table in ("chaos", "cluster"):
        if not isinstance(tables.get(table, {}), dict):
            raise ConfigError(table, tables[table], f"must be a table; write [{table}] and the settings below it")
    rows = tables.get("fault", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError("fault", rows, "must be tables; write [[fault]] before each")
    faults = [_fault(row, f"fault[{number}]") for number, row in enumerate(rows, start=1)]
    return FaultFile(
        chaos=tables.get("chaos", {}),
        cluster=tables.get("cluster", {}),
        faults=tuple(sorted(faults, key=lambda each: each.at_s)),
    )


def _fault(row: Mapping[str, Any], where: str) -> Fault:
    kind = row.get("kind")
    if kind not in tuple(Kind):
        raise ConfigError(f"{where}.kind", kind, f"is no kind of fault; {nearest(str(kind), list(Kind))}")
    for key in ("at_s", "for_s"):
        value = row.get(key, 0.0 if key == "for_s" else None)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise ConfigError(f"{where}.{key}", value, "must be a number of seconds")
    target = row.get("target", [])
    targets = [target] if isinstance(target, str) else target
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise ConfigError(f"{where}.target", target, "must be a word in quotes, or a list of them")
    options = {key: value for key, value in row.items() if key not in _FAULT_KEYS}
    for key, value in options.items():
        if not isinstance(value, bool | int | float):
            raise ConfigError(f"{where}.{key}", value, "must be a number, true or false")
    for_s = float(row["for_s"]) if "for_s" in row else None
    try:
        return fault(Kind(kind), float(row["at_s"]), tuple(targets), for_s, options)
    except ConfigError as err:
        raise ConfigError(f"{where}.{err.field}", err.value, err.cure) from err


def drawn_faults(config: ChaosConfig, kinds: Collection[Kind], *, standbys: bool = False) -> Iterator[Fault]:
    """Yields the faults of a storm: one every ``fault_every_s``, every drill in turn, each time in another order.

    Durations are drawn too, between half and one and a half of what is usual. Clocks jump forward and back by turns.

    Args:
        config: Seed, rate and times.
        kinds: Kinds to draw from.
        standbys: Whether there are any: only then does "any aggregator" differ from the leader.
    """
    if config.fault_every_s == 0:
        return
    rng = random.Random(f"faults {config.fault_seed}")
    drills = [each for each in DRILLS if each[0] in kinds and (standbys or each[1] != "any aggregator")]
    at_s = config.calm_s
    jumps = 0
    while drills:
        for kind, target in rng.sample(drills, len(drills)):
            if round(at_s, 3) >= config.seconds:
                return
            lasts_s = round(NATURES[kind].for_s * rng.uniform(0.5, 1.5), 2)
            options: dict[str, float | bool] = {}
            if kind is Kind.CLOCK:
                jumps += 1
                options["jump_s"] = round(rng.uniform(1.0, 60.0) * (1 if jumps % 2 else -1), 2)
            yield fault(kind, round(at_s, 3), (target,) if target else (), lasts_s, options)
            at_s += config.fault_every_s


def all_faults(config: ChaosConfig, file: FaultFile, possible: Collection[Needs], *, standbys: bool) -> list[Fault]:
    """Returns every fault of a run, in the order of their times.

    Args:
        config: Flags and [chaos].
        file: The file's own faults.
        possible: What is there of all that a kind may need.
        standbys: Whether there are standby aggregators.

    Raises:
        ConfigError: A kind that was asked for is not possible here.
    """
    able = {kind for kind, nature in NATURES.items() if nature.needs is None or nature.needs in possible}
    for kind in [*(config.kinds or ()), *(each.kind for each in file.faults)]:
        if kind not in able:
            raise ConfigError("kind", str(kind), cure_of(NATURES[kind].needs))
    kinds = able if config.kinds is None else config.kinds
    faults = [*file.faults, *drawn_faults(config, kinds, standbys=standbys)]
    faults.sort(key=lambda each: each.at_s)
    if faults and faults[-1].at_s >= config.seconds:
        cure = f"must be later than the last fault, at {faults[-1].at_s:g} s"
        raise ConfigError("seconds", config.seconds, cure)
    return faults


def cure_of(needs: Needs | None) -> str:
    """Says what to do where something that a kind needs is missing."""
    match needs:
        case Needs.LINKS:
            return "needs the link proxy between islands and broker: give --link FILE"
        case Needs.REDIS_LINKS:
            return (
                'needs a link to Redis: write [link."*.redis"] into the file of --link, or give none and no --redis-url'
            )
        case Needs.ROGUE:
            return "needs the misbehaving island ops.chaos.rogue, which this program does not have"
        case Needs.OWN_REDIS:
            return "needs a Redis that this command starts: give no --redis-url, and unset REDIS_URL"
        case None:
            return "is possible"


def summary(faults: Sequence[Fault]) -> dict[str, int]:
    """Returns kind -> how many."""
    return {str(kind): n for kind in Kind if (n := sum(each.kind is kind for each in faults))}
