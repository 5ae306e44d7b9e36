"""The world of a simulated run as its processes share it: time, chance, the plan, and each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aggregator.interface import events as agg
from broker.wire.fragments import FragmentManifest
from islands.protocol.paused import Paused
from ops.virtual.plan import IslandPlan, Point, SimulationPlan
from ops.virtual.queue import Clock, EventQueue
from ops.virtual.work import Works

#: (virtual time, process, name of the decision, fields).
OnNote = Callable[[float, str, str, Mapping[str, Any]], None]


@dataclass(slots=True)
class Disk:
    """The disk of an aggregator, which survives its crashes."""

    record: dict[str, Any] | None = None
    commits: dict[int, agg.Commit] = field(default_factory=dict)
    manifest: FragmentManifest | None = None


class World:
    """A simulated run as its processes see it; :class:`ops.virtual.simulation.Simulation` makes one.

    Processes of one kind do not import those of another: what they hold of each other has no type here.
    """

    plan: SimulationPlan
    works: Works
    note: OnNote
    queue: EventQueue
    rng: random.Random
    trace: list[tuple[float, str, str, str]]
    network: Any  #: ops.virtual.network.Network
    invariants: Any  #: ops.virtual.invariants.Invariants
    brokers: list[Any]  #: SimBroker
    islands: dict[str, Any]  #: SimIsland, by island id
    processes: dict[str, Any]  #: by address
    leaders: dict[int, Any]  #: SimAggregator: whoever led each shard last
    stations: list[Any]  #: Station
    leases: list[Any]  #: SimLease, by shard
    _clocks: dict[str, Clock]

    def clock(self, process: str) -> Clock:
        """The clock that the processes of that name read."""
        clock = self._clocks.get(process)
        if clock is None:
            wrong = tuple(each for each in self.plan.clocks if each.process == process)
            clock = self._clocks[process] = Clock(self.queue, wrong)
        return clock

    @property
    def disk(self) -> Disk:
        """Of whoever led shard 0 last."""
        disk: Disk = self.aggregator.disk
        return disk

    @property
    def aggregator(self) -> Any:
        """Whoever led shard 0 last."""
        return self.leaders[0]

    def dies_at(self, process: str, point: Point) -> bool:
        """A process comes by a point; returns whether it dies there, which is then done."""
        raise NotImplementedError

    def start_island(self, plan: IslandPlan, paused: Paused | None = None) -> None:
        """Starts a process of an island."""
        raise NotImplementedError

    def replace_failed(self, island: Any) -> None:
        """An island gave up: whoever supervises it starts another process."""
        raise NotImplementedError

    def begin_lineage(self, above: Mapping[int, int], epoch: int) -> None:
        """The aggregator gives up what its disk lacks, and starts again under new numbers."""
        raise NotImplementedError
