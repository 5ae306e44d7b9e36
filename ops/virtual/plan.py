"""The plan of a simulated run: its fleet, its links, and what befalls them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from aggregator.interface.config import AggregatorConfig
from ops.faults.kinds import Fault, FaultKind
from ops.virtual.queue import ClockTrouble


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkModel:
    """The delay and the rate of the links between a machine and the brokers.

    Attributes:
        delay_s: Least and greatest one-way delay; each message draws its own.
        bytes_per_s: Rate of each direction; 0 for infinite.
    """

    delay_s: tuple[float, float] = (0.001, 0.005)
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandPlan:
    """One island of a simulated fleet.

    Attributes:
        step_time_s: Mean seconds per inner step.
        jitter: Relative spread of step times.
        joins_at_s: When its first process starts.
        joins_last: It does not start before all others have joined.
        crashes_at_s: When its process is killed; it comes back ``restart_s`` later.
        leaves_at_s: When it ends on purpose; None for never.
        twins_at_s: When another process of it starts, while the one there is knows nothing of it.
        pauses_at_s: When its process is told to end; another one goes on ``restart_s`` later with what it kept.
        pauses: Times (from when, for how long) at which it does not step, while its process lives.
        outages: Times (from when, for how long) at which nothing passes its link.
        corrupt_at_s: When a bit of its memory changes.
        spoilt_at_s: When its next step makes parameters that are not finite.
        link: Its own link; None for that of the plan.
        manner: How it misbehaves; None for not at all.
        misbehaves: Share of its contributions that it tampers with.
        honest_until_s: It is honest before.
    """

    island_id: str
    step_time_s: float
    jitter: float = 0.1
    joins_at_s: float = 0.0
    joins_last: bool = False
    crashes_at_s: tuple[float, ...] = ()
    restart_s: float = 1.0
    leaves_at_s: float | None = None
    twins_at_s: tuple[float, ...] = ()
    pauses_at_s: tuple[float, ...] = ()
    pauses: tuple[tuple[float, float], ...] = ()
    outages: tuple[tuple[float, float], ...] = ()
    corrupt_at_s: tuple[float, ...] = ()
    spoilt_at_s: tuple[float, ...] = ()
    link: LinkModel | None = None
    manner: FaultKind | None = None
    misbehaves: float = 1.0
    honest_until_s: float = 0.0

    def stepped_at_s(self, now_s: float, step_s: float) -> float:
        """Returns when a step that begins now and takes ``step_s`` ends: a pause stretches it."""
        ends_at_s = now_s + step_s
        for at_s, for_s in self.pauses:
            if at_s < ends_at_s and at_s + for_s > now_s:
                ends_at_s += at_s + for_s - max(now_s, at_s)
        return ends_at_s


#: Faults of one broker: it dies and the next one knows nothing, it stands still, nothing passes to an aggregator.
BROKER_FAULTS = (FaultKind.KILL, FaultKind.STOP, FaultKind.PARTITION)
#: Faults of one aggregator: it dies and the next one finds its disk, it stands still, Redis does not answer it.
AGGREGATOR_FAULTS = (FaultKind.KILL, FaultKind.STOP, FaultKind.CUT_REDIS)
#: Faults of Redis: it does not answer, and has afterwards what it had, or nothing; or everything but the islands loses
#: power, and aggregators have their disks afterwards, brokers and Redis nothing; or it has what it had at half the age.
REDIS_FAULTS = (FaultKind.STOP, FaultKind.WIPE, FaultKind.OUTAGE, FaultKind.STALE)


#: The end of a link that is no broker.
REDIS = -1


class Way(StrEnum):
    """The directions of a link that are cut."""

    BOTH = "both"
    UP = "up"  # what the process says
    DOWN = "down"  # what it would hear


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Between a process and a broker, or Redis."""

    process: str
    broker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A link that nothing passes, from when and for how long; a cut of Redis is of both directions."""

    link: Link
    at_s: float
    for_s: float
    way: Way = Way.BOTH

    def stops(self, direction: str, now_s: float) -> bool:
        """Whether it keeps a message from going ``up`` or ``down`` now."""
        return self.at_s <= now_s < self.at_s + self.for_s and self.way in (Way.BOTH, direction)


class Point(StrEnum):
    """A point at which a process may die."""

    SEND = "send"  # about to say something, to a process or to Redis: what it said before is out, this is not
    PERSIST = "persist"  # about to write a commit or a run record
    PERSISTED = "persisted"  # it is on the disk, and nobody knows


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashPoint:
    """The ``number``-th pass of a process, in any life, by a point (from 1); it starts again later."""

    process: str
    point: Point
    number: int
    restart_s: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    """Everything that determines a simulated run, with its seed."""

    seed: int
    islands: tuple[IslandPlan, ...]
    config: AggregatorConfig
    link: LinkModel = field(default_factory=LinkModel)
    merge_s: tuple[float, float] = (0.001, 0.01)
    persist_s: tuple[float, float] = (0.001, 0.02)
    persist_failure: float = 0.0
    capture_s: tuple[float, float] = (0.0005, 0.005)
    job_s: tuple[float, float] = (1e-4, 1e-2)  # of a thread of an island
    brokers: int = 1
    standbys: int = 0  # aggregators besides the first of each shard; with them the config has ``failover``
    faults: tuple[Fault, ...] = ()  # of one broker, one aggregator, or ``redis``; of the kinds above
    cuts: tuple[Cut, ...] = ()  # of single links, by direction
    breaks: tuple[tuple[float, str, int], ...] = ()  # connections that end: when, of which process, to which broker
    deaf: tuple[tuple[float, str], ...] = ()  # bulk connections that stand, and carry nothing: when, of which process
    clocks: tuple[ClockTrouble, ...] = ()
    crash_points: tuple[CrashPoint, ...] = ()
    restart_s: float = 0.5
    checkpoints: bool = True  # islands have a disk
    donor_wait_s: float = 0.0  # in which a new process may look for another island's optimizer state; 0: starts fresh
    calm_after_s: float = 1e9


#: Before the number of a broker, in the names of those that may crash or have a clock.
BROKER = "broker-"


def station_names(shards: int, standbys: int) -> tuple[str, ...]:
    """Returns the names of all aggregators as in ``up``: by shard, the first and then its standbys."""
    names: list[str] = []
    for shard in range(shards):
        prefix = f"aggregator-{shard}" if shard else ""
        names.append(prefix or "aggregator")
        names += (f"{prefix}-standby-{i}".removeprefix("-") for i in range(1, 1 + standbys))
    return tuple(names)
