"""The plan of faults, drawn from a seed or read from a file. Pure: same seed, same plan.

A fault names its targets by word, because nobody knows beforehand who will lead or live: the name of a process
(``island-3``, ``broker-2``), ``leader`` (the aggregator that publishes), or ``any island``, ``any aggregator``
(standbys count), ``any broker``. :func:`resolve` turns the word into a process at the moment of the fault. The file's
form is in docs/chaos.md.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from broker.base import sources
from broker.base.errors import ConfigError
from broker.base.settings import nearest, setting
from ops.faults.kinds import LIES, MISBEHAVIORS, ROGUES, Fault, FaultKind, Role, role_of


class Needs(StrEnum):
    """A thing that a kind of fault needs; the text says what to do where it is missing."""

    LINKS = "needs the link proxy between islands and broker: give --link FILE"
    REDIS_LINKS = (
        'needs a link to Redis: write [link."*.redis"] into the file of --link, or give none and no --redis-url'
    )
    OWN_REDIS = "needs a Redis that this command starts: give no --redis-url, and unset REDIS_URL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nature:
    """The nature of a kind of fault.

    Attributes:
        befalls: Roles of the processes it may befall; none: it chooses its processes itself.
        usual: The target where none is named.
        for_s: How long it lasts where nothing is said; 0: a moment.
        options: Keys that a fault of this kind may have besides, with their usual values.
        needs: What must be there.
    """

    befalls: frozenset[Role] = frozenset()
    usual: str = ""
    for_s: float = 0.0
    options: Mapping[str, float | bool] = field(default_factory=lambda: MappingProxyType({}))
    needs: Needs | None = None


_OURS = frozenset({Role.ISLAND, Role.AGGREGATOR, Role.BROKER})
_PROCESSES = _OURS | {Role.REDIS, Role.LINKS}
_REDIS = frozenset({Role.REDIS})


def _on_link(for_s: float, **condition: float | bool) -> Nature:
    """A fault of a link: its options are the keys of a link's condition (:mod:`ops.links.condition`)."""
    return Nature(befalls=_OURS - {Role.BROKER}, usual="any island", for_s=for_s, options=condition, needs=Needs.LINKS)


NATURES: Mapping[FaultKind, Nature] = {
    FaultKind.KILL: Nature(befalls=_PROCESSES, usual="any island"),
    FaultKind.OUTAGE: Nature(for_s=60.0, needs=Needs.OWN_REDIS),
    FaultKind.STOP: Nature(befalls=_PROCESSES, usual="any island", for_s=3.0),
    FaultKind.CLOCK: Nature(befalls=_OURS, usual="leader", for_s=3.0, options={"jump_s": 30.0}),
    FaultKind.DISK_FULL: Nature(befalls=frozenset({Role.AGGREGATOR}), usual="leader", for_s=4.0),
    FaultKind.WIPE: Nature(befalls=_REDIS, usual="redis", needs=Needs.OWN_REDIS),
    FaultKind.STALE: Nature(befalls=_REDIS, usual="redis", needs=Needs.OWN_REDIS),
    FaultKind.PARTITION: _on_link(4.0, partition=True),
    FaultKind.CUT_REDIS: Nature(befalls=_OURS - {Role.ISLAND}, usual="leader", for_s=4.0, needs=Needs.REDIS_LINKS),
    FaultKind.SLOW: _on_link(6.0, delay_ms=200.0, mbit=2.0),
    FaultKind.CORRUPT: _on_link(4.0, corrupt_per_mb=200.0),
    FaultKind.RESET: _on_link(3.0, reset_every_s=0.5),
    **dict.fromkeys(MISBEHAVIORS, Nature(for_s=10.0)),
    **dict.fromkeys(LIES, Nature(for_s=10.0, options={"honest_s": 0.0})),
}

LEADER = "leader"
ANY = "any "
_ANY_ROLES = (Role.ISLAND, Role.AGGREGATOR, Role.BROKER)


def fault(
    kind: FaultKind,
    at_s: float,
    targets: tuple[str, ...] = (),
    for_s: float | None = None,
    options: Mapping[str, float | bool] | None = None,
) -> Fault:
    """Returns a fault with the defaults of its kind filled in."""
    nature, given = NATURES[kind], dict(options or {})
    return Fault(
        at_s=at_s,
        kind=kind,
        targets=targets or ((nature.usual,) if nature.usual else ()),
        for_s=nature.for_s if for_s is None else for_s,
        options=MappingProxyType(given if given and nature.needs is Needs.LINKS else {**nature.options, **given}),
    )


def role_of_target(target: str) -> Role | None:
    """Returns the role that a target's word speaks of; None for ``any`` of something that there is one of."""
    if target == LEADER:
        return Role.AGGREGATOR
    if target.startswith(ANY):
        return next((role for role in _ANY_ROLES if target == ANY + role), None)
    return role_of(target)


def resolve(
    target: str,
    *,
    running: Collection[str],
    disturbed: Collection[str],
    leader: str | None,
    rng: random.Random,
) -> str | None:
    """Returns the process that a target means now; None if there is none that may be struck.

    ``any`` never means a process that still suffers from another fault, nor the last healthy one of several aggregators
    or brokers: a plan that wants all of them down names them.

    Args:
        target: The word.
        running: Names of all processes that run.
        disturbed: Those among them that suffer from a fault.
        leader: The aggregator that publishes, if it is known.
        rng: Chooses among several.
    """
    if target == LEADER:
        aggregators = sorted(name for name in running if role_of(name) is Role.AGGREGATOR)
        return leader if leader in running else next(iter(aggregators), None)
    if not target.startswith(ANY):
        return target if target in running else None
    role = Role(target.removeprefix(ANY))
    all_of_them = sorted(name for name in running if role_of(name) is role)
    healthy = [name for name in all_of_them if name not in disturbed]
    last_one = len(healthy) == 1 and len(all_of_them) > 1 and role in (Role.AGGREGATOR, Role.BROKER)
    return None if last_one or not healthy else rng.choice(healthy)


# --- the plan of a run ------------------------------------------------------------------------------------------

_TABLES = ("chaos", "cluster", "fault")
_FAULT_KEYS = ("at_s", "kind", "target", "for_s")

#: What a storm goes through, in an order of its own each time: (kind, target; empty: the usual one).
DRILLS: tuple[tuple[FaultKind, str], ...] = (
    *((FaultKind.KILL, each) for each in ("any island", "leader", "any aggregator", "any broker", "redis")),
    *((FaultKind.STOP, each) for each in ("any island", "leader", "any broker", "redis")),
    *((FaultKind.CLOCK, each) for each in ("any island", "leader", "any broker")),
    (FaultKind.DISK_FULL, "leader"),
    (FaultKind.WIPE, "redis"),
    (FaultKind.STALE, "redis"),
    (FaultKind.PARTITION, "any island"),
    (FaultKind.CUT_REDIS, "leader"),
    *((each, "any island") for each in (FaultKind.SLOW, FaultKind.CORRUPT, FaultKind.RESET)),
    *((each, "") for each in ROGUES),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosConfig:
    """The settings of ``chaos`` alone: each is a flag and a key of the table ``[chaos]`` in its file."""

    seconds: float = setting(60.0, "how long faults go on, from the moment when every island trains")
    fault_every_s: float = setting(5.0, "seconds from one drawn fault to the next; 0: none but those of the file")
    fault_seed: int = setting(0, "of the drawn faults: the same seed, the same faults")
    fault_kinds: tuple[str, ...] = setting(
        (), f"kinds to draw from (default: all that are possible here but {', '.join(LIES)})"
    )
    calm_s: float = setting(10.0, "before the first drawn fault: what islands do in it is what they are measured by")
    settle_s: float = setting(15.0, "after the last fault, for everything to heal")

    def __post_init__(self) -> None:
        for name in ("fault_every_s", "calm_s", "settle_s"):
            if getattr(self, name) < 0:
                raise ConfigError(name, getattr(self, name), "must be 0 or more seconds")
        if not 0 < self.seconds <= 7 * 86_400:
            raise ConfigError("seconds", self.seconds, "must be above 0, at most a week")
        for kind in self.fault_kinds:
            if kind not in tuple(FaultKind):
                raise ConfigError("fault_kinds", kind, f"is no kind of fault; {nearest(kind, list(FaultKind))}")

    @property
    def kinds(self) -> frozenset[FaultKind] | None:
        """The kinds to draw from; None: all that are possible, without lies."""
        return frozenset(map(FaultKind, self.fault_kinds)) or None


class FaultFile(NamedTuple):
    """A file of faults: its tables [chaos] and [cluster], unchecked, and its faults in order of time."""

    chaos: Mapping[str, Any] = MappingProxyType({})
    cluster: Mapping[str, Any] = MappingProxyType({})
    faults: tuple[Fault, ...] = ()


def read_faults(text: str, *, name: str) -> FaultFile:
    """Returns the plan in a file; errors show ``name``.

    Raises:
        ConfigError: It is no TOML, or says something that cannot be; fault n of it is called ``fault[n]``.
    """
    tables = sources.parse_toml(text, field="faults", source=name)
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
    def refuse(key: str, value: object, cure: str) -> NoReturn:
        raise ConfigError(f"{where}.{key}", value, cure)

    kind = row.get("kind")
    if kind not in tuple(FaultKind):
        refuse("kind", kind, f"is no kind of fault; {nearest(str(kind), list(FaultKind))}")
    nature = NATURES[FaultKind(kind)]
    for key in ("at_s", "for_s"):
        value = row.get(key, 0.0 if key == "for_s" else None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            refuse(key, value, "must be a number of seconds, 0 or more")
    target = row.get("target", [])
    targets = [target] if isinstance(target, str) else target
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        refuse("target", target, "must be a word in quotes, or a list of them")
    for each in targets:
        if not nature.befalls:
            refuse("target", each, f"cannot be chosen for {kind}; leave it out")
        role = role_of_target(each)
        if role is None:
            refuse("target", each, f"must be any of {', '.join(_ANY_ROLES)}, leader, or a process's name")
        if role not in nature.befalls:
            refuse("target", each, f"{kind} befalls {', '.join(sorted(nature.befalls))}")
    options = {key: value for key, value in row.items() if key not in _FAULT_KEYS}
    for key, value in options.items():
        linked = nature.needs is Needs.LINKS  # the keys of a link's condition are checked by those who know them
        if key not in nature.options and not linked:
            refuse(key, value, f"is nothing that {kind} has; {nearest(key, [*_FAULT_KEYS, *nature.options])}")
        if not isinstance(value, bool | int | float) or (isinstance(value, bool) and not linked):
            refuse(key, value, f"must be a number{', true or false' if linked else ''}")
    for_s = float(row["for_s"]) if "for_s" in row else None
    return fault(FaultKind(kind), float(row["at_s"]), tuple(targets), for_s, options)


def drawn_faults(config: ChaosConfig, kinds: Collection[FaultKind], *, standbys: bool = False) -> Iterator[Fault]:
    """Yields drawn faults, one every ``fault_every_s``: rounds of all drills, each in another order.

    Durations are drawn too, between half and one and a half of what is usual. Clocks jump forward and back by turns.
    Only with standbys does "any aggregator" differ from the leader.
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
            if kind is FaultKind.CLOCK:
                jumps += 1
                options["jump_s"] = round(rng.uniform(1.0, 60.0) * (1 if jumps % 2 else -1), 2)
            yield fault(kind, round(at_s, 3), (target,) if target else (), lasts_s, options)
            at_s += config.fault_every_s


def all_faults(config: ChaosConfig, file: FaultFile, possible: Collection[Needs], *, standbys: bool) -> list[Fault]:
    """Returns every fault of a run in order of time; ``possible`` lists the needs that are met here.

    Raises:
        ConfigError: A kind that was asked for is not possible here.
    """
    able = {kind for kind, nature in NATURES.items() if nature.needs is None or nature.needs in possible}
    for kind in [*(config.kinds or ()), *(each.kind for each in file.faults)]:
        needs = NATURES[kind].needs
        if needs is not None and needs not in possible:
            raise ConfigError("kind", str(kind), needs.value)
    kinds = able - LIES.keys() if config.kinds is None else config.kinds
    faults = [*file.faults, *drawn_faults(config, kinds, standbys=standbys)]
    faults.sort(key=lambda each: each.at_s)
    if faults and faults[-1].at_s >= config.seconds:
        cure = f"must be later than the last fault, at {faults[-1].at_s:g} s"
        raise ConfigError("seconds", config.seconds, cure)
    return faults
