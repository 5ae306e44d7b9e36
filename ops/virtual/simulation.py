"""A whole run in virtual time: the production cores behind a modelled network and disk.

One process, one seeded event queue, no sockets, no clock: the same seed and configuration give the same run, byte for
byte. What the processes do with parameters is plugged in (:mod:`ops.virtual.work`): steps are only counted, so that a
fleet costs microseconds per step, or the laboratory really trains. Invariants (reference.md, section 10) are checked
after every event by :class:`ops.virtual.invariants.Invariants`, which sees everything. The processes themselves are in
:mod:`ops.virtual.island`, :mod:`ops.virtual.aggregator`, :mod:`ops.virtual.failover` and :mod:`ops.virtual.broker`,
what lies between them in :mod:`ops.virtual.network`, and what befalls them is a :mod:`ops.virtual.plan`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from aggregator.rounds.recovery import renumbered
from broker.chunks.subflow import STALLED_S
from broker.wire import messages as m
from islands.protocol import events as ie
from islands.protocol.paused import Paused
from ops.faults.kinds import LIES, FaultKind, Role, role_of
from ops.virtual.aggregator import SimAggregator
from ops.virtual.broker import SimBroker
from ops.virtual.failover import SimLease, Station
from ops.virtual.invariants import Invariants
from ops.virtual.island import SimIsland
from ops.virtual.network import Network, Process
from ops.virtual.plan import BROKER, CrashPoint, IslandPlan, Point, SimulationPlan
from ops.virtual.queue import Clock, EventQueue
from ops.virtual.work import Counting, Works
from ops.virtual.world import Disk, OnNote, World

#: As in :mod:`islands.loop`, for what a process that is told to end still hands over.
PAUSE_WITHIN_S = 1.5


class Passages:
    """Counts how often each process has come by each point."""

    def __init__(self, crashes: Iterable[CrashPoint]) -> None:
        self._crashes = {(each.process, each.point, each.number): each for each in crashes}
        self.counts: dict[tuple[str, Point], int] = {}

    def pass_by(self, process: str, point: Point) -> CrashPoint | None:
        """Counts, and returns the crash that happens there, if any does."""
        place = process, point
        number = self.counts[place] = self.counts.get(place, 0) + 1
        return self._crashes.get((process, point, number)) if self._crashes else None


class Simulation(World):
    """One run of a :class:`SimulationPlan`.

    Args:
        plan: What happens.
        works: What the processes do with parameters; counting steps if not given.
        on_note: Takes every decision; by default they are kept in ``trace``.
        watching: Whether the invariants are checked after every event, or only as versions are made and published.
        network: What carries messages.
    """

    def __init__(
        self,
        plan: SimulationPlan,
        works: Works | None = None,
        on_note: OnNote | None = None,
        *,
        watching: bool = True,
        network: Callable[[Simulation], Network] = Network,
    ) -> None:
        self.plan = plan
        self.works = works or Counting(plan.model(), plan.tokens_per_step)
        self.note = on_note or self.keep
        self.queue = self.make_queue()
        self.rng = random.Random(plan.seed)
        self.network = network(self)
        self._clocks: dict[str, Clock] = {}
        self.passages = Passages(plan.crash_points)
        self.leases = self.make_leases()
        rogues = {island.island_id: island.manner for island in plan.islands if island.manner is not None}
        claims = {name: LIES[manner].tokens for name, manner in rogues.items() if manner in LIES}
        sizes = {name: times for name, times in claims.items() if times > 1}
        self.invariants = Invariants(rogues=frozenset(rogues), sizes=sizes, watching=watching)
        self.trace: list[tuple[float, str, str, str]] = []
        self.brokers = [self.make_broker(place) for place in range(plan.brokers)]
        self.islands: dict[str, SimIsland] = {}
        self.processes: dict[str, Process] = {}
        self.leaders: dict[int, SimAggregator] = {}  # whoever led each shard last
        self.stations = [self.make_station(number) for number in range(plan.config.shards * (1 + plan.standbys))]
        self._lives: dict[str, int] = {}
        for station in self.stations:
            station.start()
        for island in plan.islands:
            self.queue.at(island.joins_at_s, partial(self.start_island, island))
            for at_s in island.crashes_at_s:
                self.queue.at(at_s, partial(self.crash_island, island))
            for at_s in island.deaf_at_s:
                self.queue.at(at_s, partial(self.deafen, island))
            for at_s in island.pauses_at_s:
                self.queue.at(at_s, partial(self.pause, island))
            if island.leaves_at_s is not None:
                self.queue.at(island.leaves_at_s, partial(self.leave, island))
        for at_s in plan.aggregator_deaf_at_s:
            self.queue.at(at_s, self.deafen_aggregator)
        for fault in plan.faults:
            (target,) = fault.targets
            match role_of(target), fault.kind:
                case Role.AGGREGATOR, FaultKind.KILL:
                    self.queue.at(fault.at_s, partial(self.station(target).crash, fault.for_s))
                case Role.AGGREGATOR, FaultKind.STOP:
                    self.queue.at(fault.at_s, partial(self.station(target).freeze, fault.for_s))
                case Role.BROKER, FaultKind.KILL:
                    self.queue.at(fault.at_s, partial(self.crash_broker, _place(target), fault.for_s))
                case Role.BROKER, FaultKind.STOP:
                    self.queue.at(fault.at_s, partial(self.freeze_broker, _place(target), fault.for_s))
                case Role.REDIS, FaultKind.OUTAGE:
                    self.queue.at(fault.at_s, partial(self.cut_power, fault.for_s))
                case _:
                    pass  # looked at with each message, and each call of Redis

    def make_queue(self) -> EventQueue:
        """Returns the time of this run."""
        return EventQueue()

    def make_broker(self, place: int) -> SimBroker:
        """Returns a new process of a broker."""
        return SimBroker(self, place)

    def make_leases(self) -> list[SimLease]:
        """Returns the lease of each shard."""
        return [SimLease(self, shard) for shard in range(self.plan.config.shards)]

    def make_station(self, number: int) -> Station:
        """Returns the machine of an aggregator."""
        return Station(self, number, Disk())

    def run(self, limit_s: float) -> bool:
        """Runs until every island has finished, at most ``limit_s`` of virtual time; returns whether it ended."""
        return self.queue.run_until(limit_s, self.ended)

    def ended(self) -> bool:
        """Whether the run is over for everybody who is still there."""
        for leader in self.leaders.values():  # asked after every event
            if leader.core.run.phase is not m.Phase.ENDED:
                return False
        if len(self.leaders) < self.plan.config.shards:
            return False
        live = [i for i in self.islands.values() if i.alive]
        return bool(live) and all(i.core.finished for i in live)

    def station(self, name: str) -> Station:
        """Returns the station of that name."""
        found: Station = next(station for station in self.stations if station.name == name)
        return found

    # --- faults -----------------------------------------------------------------------------------------------

    def dies_at(self, process: str, point: Point) -> bool:
        """A process comes by a point; returns whether it dies there, which is then done."""
        crash = self.passages.pass_by(process, point)
        if crash is None:
            return False
        self.note(self.queue.now_s, process, "crashed", {"at": str(point), "number": crash.number})
        if process.startswith(BROKER):
            self.crash_broker(_place(process), crash.restart_s)
        elif process in self.islands:
            self.crash_island(replace(self.islands[process].plan, restart_s=crash.restart_s))
        else:
            self.station(process).crash(crash.restart_s)
        return True

    def start_island(self, plan: IslandPlan, paused: Paused | None = None) -> None:
        """Starts a process of an island, which goes on with what an earlier one has kept, if it has."""
        if plan.joins_last and plan.island_id not in self._lives and not self._others_joined(plan):
            self.queue.after(0.1, partial(self.start_island, plan))
            return
        life = self._lives[plan.island_id] = self._lives.get(plan.island_id, -1) + 1
        island = SimIsland(self, plan, life, paused)
        self.processes[island.address] = self.islands[plan.island_id] = island
        island.perform(island.core.start(island.clock.now_s))

    def _others_joined(self, plan: IslandPlan) -> bool:
        names = [other.island_id for other in self.plan.islands if other.island_id != plan.island_id]
        return all(name in self.islands and self.islands[name].core.joined for name in names)

    def crash_island(self, plan: IslandPlan) -> None:
        """Kills an island's process; another one starts later."""
        island = self.islands.get(plan.island_id)
        if island is not None and island.alive:
            island.kill()
            self.invariants.island_killed(island)
            self.queue.after(plan.restart_s, partial(self.start_island, island.plan))

    def replace_failed(self, island: SimIsland) -> None:
        """An island gave up: whoever supervises it starts another process, unless there is one."""
        if self.islands[island.plan.island_id] is island:
            self.invariants.island_killed(island)
            self.queue.after(island.plan.restart_s, partial(self.start_island, island.plan))

    def cut_power(self, for_s: float) -> None:
        """Stops aggregators and brokers; all of them start again at once. Islands, elsewhere, train on."""
        self.invariants.power_lost()
        for station in self.stations:
            station.crash(for_s)
        for place in range(self.plan.brokers):
            self.crash_broker(place, for_s)

    def deafen(self, plan: IslandPlan) -> None:
        """Lets an island's bulk connection stand, and deliver nothing any more, until its end notices."""
        island = self.islands.get(plan.island_id)
        if island is not None:
            island.deaf = True
            self.queue.after(STALLED_S, partial(island.renew_bulk, island.bulk_number))

    def deafen_aggregator(self) -> None:
        """The same of the aggregator's bulk connection to the first broker."""
        aggregator = self.aggregator
        aggregator.deaf.add(0)
        self.queue.after(STALLED_S, partial(aggregator.renew_bulk, 0, aggregator.bulk_numbers[0]))

    def leave(self, plan: IslandPlan) -> None:
        """Lets an island end on purpose."""
        island = self.islands.get(plan.island_id)
        if island is not None and island.alive and island.core.joined:
            island.handle(ie.Leaving(reason="leaves"))
            island.kill()
            self.invariants.island_killed(island)

    def pause(self, plan: IslandPlan) -> None:
        """Tells an island's process to end; after a moment for its hand-over, the next one goes on."""
        island = self.islands.get(plan.island_id)
        if island is None or not island.alive or not island.training:
            return
        island.pause()

        def end() -> None:
            if island.alive:
                paused = island.end()
                self.invariants.island_killed(island)
                self.queue.after(plan.restart_s, partial(self.start_island, island.plan, paused))

        self.queue.after(PAUSE_WITHIN_S, end)

    def crash_broker(self, place: int, restart_s: float) -> None:
        """Kills a broker; the next one at its place knows nothing."""
        if not self.brokers[place].alive:
            return
        self.brokers[place].kill()

        def restart() -> None:
            self.brokers[place] = self.make_broker(place)

        self.queue.after(restart_s, restart)

    def begin_lineage(self, above: Mapping[int, int], epoch: int) -> None:
        """The aggregator gives up what its disk lacks, and starts again under new numbers."""
        for p, version in above.items():
            if version > self.disk.commits[p].fragment_version:
                commit = self.disk.commits[p] = renumbered(self.disk.commits[p], version, epoch)
                self.invariants.persisted(commit)
        assert self.disk.record is not None
        self.disk.record["epoch"] = max(self.disk.record["epoch"], epoch - 1)
        self.queue.after(0.0, partial(self.aggregator.station.crash, self.plan.restart_s))

    def freeze_broker(self, place: int, for_s: float) -> None:
        """Stops a broker's process for a while."""
        self.brokers[place].freeze(for_s)

    def keep(self, now_s: float, who: str, name: str, fields: Mapping[str, Any]) -> None:
        """Keeps a decision for whoever reads the story of a failed seed."""
        self.trace.append((round(now_s, 6), who, name, str(dict(fields))))


def _place(broker: str) -> int:
    return int(broker.removeprefix(BROKER))
