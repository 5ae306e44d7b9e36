"""The kinds of faults, whom they may befall, and who that is when the time has come. Pure.

A fault names its targets by word, because nobody knows beforehand who will lead or live: the name of a process
(``island-3``, ``broker-2``), ``leader`` (the aggregator that publishes), or ``any island``, ``any aggregator``
(standbys count), ``any broker``. :func:`resolve` turns the word into a process at the moment of the fault.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from broker.process.settings import nearest
from broker.wire.errors import ConfigError


class Role(StrEnum):
    """What a process is for, which its name says."""

    ISLAND = "island"
    AGGREGATOR = "aggregator"  # the leader and its standbys
    BROKER = "broker"
    REDIS = "redis"
    ROGUE = "rogue"
    LINKS = "links"


_ROLE_OF_WORD = {
    "aggregator": Role.AGGREGATOR,
    "standby": Role.AGGREGATOR,
    "broker": Role.BROKER,
    "redis": Role.REDIS,
    "rogue": Role.ROGUE,
    "links": Role.LINKS,
}


def role_of(process: str) -> Role:
    """Returns the role of a process of a run: ``standby-1`` is an aggregator, whatever is nothing else an island."""
    return _ROLE_OF_WORD.get(process.partition("-")[0], Role.ISLAND)


class Needs(StrEnum):
    """What a kind of fault cannot do without."""

    LINKS = "links"  # the proxy between clients and broker
    REDIS_LINKS = "redis-links"  # .. and between them and Redis
    ROGUE = "rogue"  # an island that misbehaves
    OWN_REDIS = "redis"  # a Redis server that the run itself has started


class Kind(StrEnum):
    """A kind of fault."""

    KILL = "kill"  # SIGKILL, then held down
    OUTAGE = "outage"  # every aggregator, every broker and Redis killed at once, and held down
    STOP = "stop"  # SIGSTOP, later SIGCONT: the process freezes with every connection open
    CLOCK = "clock"  # its monotonic clock jumps, and later back
    DISK_FULL = "disk-full"  # no file may grow
    WIPE = "wipe"  # Redis killed, and started empty
    STALE = "stale"  # Redis killed, and started with data from the beginning of the run
    PARTITION = "partition"  # nothing passes between a process and the broker
    CUT_REDIS = "cut-redis"  # nothing passes between a process and Redis
    SLOW = "slow"  # a far and narrow link
    CORRUPT = "corrupt"  # bytes are changed on the way
    RESET = "reset"  # connections are cut, again and again
    NAN = "nan"  # an island more, which sends what is not finite,
    SCALE = "scale"  # .. a thousand times too long pseudo-gradients,
    REPLAY = "replay"  # .. everything several times, and old messages again,
    GARBAGE = "garbage"  # .. bytes without meaning


@dataclass(frozen=True, slots=True, kw_only=True)
class Nature:
    """What there is to know about a kind.

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


_PROCESSES = frozenset({Role.ISLAND, Role.AGGREGATOR, Role.BROKER, Role.REDIS, Role.LINKS})
_OURS = frozenset({Role.ISLAND, Role.AGGREGATOR, Role.BROKER})
_CLIENTS = frozenset({Role.ISLAND, Role.AGGREGATOR})
_REDIS = frozenset({Role.REDIS})
_REDIS_CLIENTS = frozenset({Role.AGGREGATOR, Role.BROKER})


def _on_link(for_s: float, **condition: float | bool) -> Nature:
    """A fault of a link: its options are the keys of a link's condition (:mod:`ops.links.condition`)."""
    return Nature(befalls=_CLIENTS, usual="any island", for_s=for_s, options=condition, needs=Needs.LINKS)


_MISBEHAVES = Nature(for_s=10.0, needs=Needs.ROGUE)

NATURES: Mapping[Kind, Nature] = {
    Kind.KILL: Nature(befalls=_PROCESSES, usual="any island"),
    Kind.OUTAGE: Nature(for_s=60.0, needs=Needs.OWN_REDIS),
    Kind.STOP: Nature(befalls=_PROCESSES, usual="any island", for_s=3.0),
    Kind.CLOCK: Nature(befalls=_OURS, usual="leader", for_s=3.0, options={"jump_s": 30.0}),
    Kind.DISK_FULL: Nature(befalls=frozenset({Role.AGGREGATOR}), usual="leader", for_s=4.0),
    Kind.WIPE: Nature(befalls=_REDIS, usual="redis", needs=Needs.OWN_REDIS),
    Kind.STALE: Nature(befalls=_REDIS, usual="redis", needs=Needs.OWN_REDIS),
    Kind.PARTITION: _on_link(4.0, partition=True),
    Kind.CUT_REDIS: Nature(befalls=_REDIS_CLIENTS, usual="leader", for_s=4.0, needs=Needs.REDIS_LINKS),
    Kind.SLOW: _on_link(6.0, delay_ms=200.0, mbit=2.0),
    Kind.CORRUPT: _on_link(4.0, corrupt_per_mb=200.0),
    Kind.RESET: _on_link(3.0, reset_every_s=0.5),
    Kind.NAN: _MISBEHAVES,
    Kind.SCALE: _MISBEHAVES,
    Kind.REPLAY: _MISBEHAVES,
    Kind.GARBAGE: _MISBEHAVES,
}

LEADER = "leader"
ANY = "any "
_ANY_ROLES = (Role.ISLAND, Role.AGGREGATOR, Role.BROKER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens, to whom, when, and for how long.

    Attributes:
        at_s: Seconds from the moment when every island trains.
        targets: Words as in this module's docstring; several are struck at the same moment.
        for_s: How long it lasts; for a kill, how long the process is held down.
        options: As :attr:`Nature.options`.
    """

    at_s: float
    kind: Kind
    targets: tuple[str, ...] = ()
    for_s: float = 0.0
    options: Mapping[str, float | bool] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def ends_s(self) -> float:
        """When it is over."""
        return self.at_s + self.for_s

    def __str__(self) -> str:
        """Returns it in words, for display and report."""
        whom = f" {' + '.join(self.targets)}" if self.targets else ""
        return f"{self.kind}{whom}" + (f" for {self.for_s:g} s" if self.for_s else "")


def fault(
    kind: Kind,
    at_s: float,
    targets: tuple[str, ...] = (),
    for_s: float | None = None,
    options: Mapping[str, float | bool] | None = None,
) -> Fault:
    """Returns a fault with what is usual for its kind where nothing is said.

    Raises:
        ConfigError: It could not happen to such a target, or has an option that its kind does not know.
    """
    nature = NATURES[kind]
    targets = targets or ((nature.usual,) if nature.usual else ())
    for target in targets:
        role = role_of_target(target)
        if not nature.befalls:
            raise ConfigError("target", target, f"cannot be chosen for {kind}; leave it out")
        if role not in nature.befalls:
            raise ConfigError("target", target, f"{kind} befalls {', '.join(sorted(nature.befalls))}")
    given = dict(options or {})
    for name, value in given.items():
        linked = nature.needs is Needs.LINKS  # the keys of a link's condition are checked by those who know them
        if name not in nature.options and not linked:
            known = ["at_s", "kind", "target", "for_s", *nature.options]
            raise ConfigError(name, value, f"is nothing that {kind} has; {nearest(name, known)}")
        usual = nature.options.get(name, 0.0)
        if isinstance(usual, bool) != isinstance(value, bool) and not linked:
            raise ConfigError(
                name, value, "must be a number" if not isinstance(usual, bool) else "must be true or false"
            )
    lasts_s = nature.for_s if for_s is None else for_s
    if at_s < 0:
        raise ConfigError("at_s", at_s, "must be 0 or more: seconds from the moment when every island trains")
    if lasts_s < 0:
        raise ConfigError("for_s", lasts_s, "must be 0 or more")
    merged = given if given and nature.needs is Needs.LINKS else {**nature.options, **given}
    return Fault(at_s=at_s, kind=kind, targets=targets, for_s=lasts_s, options=MappingProxyType(merged))


def role_of_target(target: str) -> Role:
    """Returns the role that a target's word speaks of.

    Raises:
        ConfigError: ``any`` of something that there may not be several of.
    """
    if target == LEADER:
        return Role.AGGREGATOR
    if target.startswith(ANY):
        word = target.removeprefix(ANY)
        if word not in _ANY_ROLES:
            raise ConfigError("target", target, f"must be any of {', '.join(_ANY_ROLES)}, leader, or a process's name")
        return Role(word)
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
        rng: Chooses; drawn from once per call at most.
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


def option(fault: Fault, name: str) -> float:
    """Returns a numeric option of a fault."""
    value: Any = fault.options[name]
    return float(value)
