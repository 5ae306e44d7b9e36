"""A whole run in virtual time: brokers, aggregators with their disks, and islands that train.

Nothing of ours is modelled. What is simulated lies below: sockets and links (:mod:`ops.virtual.wires`), disks and Redis
(:mod:`ops.devices`), threads and clocks (:mod:`ops.virtual.loop`). The same plan gives the same run in any process.
Invariants (reference.md, section 10) are checked after every event by :class:`ops.virtual.invariants.Invariants`, which
sees everything; what befalls the processes is in the :mod:`ops.virtual.plan`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from aggregator.interface import events as agg
from aggregator.merge.passes import warm_up
from broker.wire import messages as m
from islands.protocol import events as ie
from islands.tasks.task import Params, Task
from ops.devices.disk import Disks
from ops.devices.redis import WAY_S, Redis
from ops.faults.kinds import LIES, Fault, FaultKind, Role, role_of
from ops.virtual.invariants import Invariants
from ops.virtual.island import Island
from ops.virtual.loop import EPOCH_S, Killed, Process, VirtualTime
from ops.virtual.plan import BROKER, REDIS, CrashPoint, IslandPlan, Point, SimulationPlan, station_names
from ops.virtual.queue import Clock, ClockTrouble
from ops.virtual.station import Station
from ops.virtual.wires import REDIS_ADDRESS, Broker, Wires

#: (virtual time, process, name of the decision, fields).
OnNote = Callable[[float, str, str, Mapping[str, Any]], None]
#: In memory, where there is such a place: a run has hundreds of flushes.
ROOT = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
#: Of the ways to Redis and back, so many take so long while there are troubles, in seconds.
LATE, LATE_S = 0.02, (0.5, 3.0)
#: How often an island that joins last looks whether the others have.
LOOK_AGAIN_S = 0.1


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


class Simulation:
    """One run of a :class:`SimulationPlan`, to be used in a ``with`` statement.

    Args:
        plan: What happens.
        task_of: Island -> what it trains, with parameters of this life alone.
        on_note: Takes every decision; by default they are kept in ``trace``.
        watching: Whether the invariants are checked after every event, or only as versions are made and published.

    Attributes:
        leaders: By shard, the station that led it last.
        versions: The last parameters of each island that has ended with the run, by tensor name.
    """

    def __init__(
        self,
        plan: SimulationPlan,
        task_of: Callable[[Island], Task],
        on_note: OnNote | None = None,
        *,
        watching: bool = True,
    ) -> None:
        self.plan, self.task_of = plan, task_of
        self.note = on_note or self._keep
        self.trace: list[tuple[float, str, str, str]] = []
        self.passages = Passages(plan.crash_points)
        rogues = {island.island_id: island.manner for island in plan.islands if island.manner is not None}
        claims = {name: LIES[manner].tokens for name, manner in rogues.items() if manner in LIES}
        sizes = {name: times for name, times in claims.items() if times > 1}
        self.invariants = Invariants(rogues=frozenset(rogues), sizes=sizes, watching=watching)
        self.leaders: dict[int, Station] = {}
        self.islands: dict[str, Island] = {}
        self.versions: dict[str, Params] = {}
        self._found_over = False
        self._lives: dict[str, int] = {}
        self._told: dict[str, Any] = {}  # blocks, by process
        self.folder = Path(tempfile.mkdtemp(prefix="atoll-seed-", dir=ROOT))
        self.virtual = VirtualTime(plan.seed)
        self.disks = Disks(self.virtual)
        self.redis = Redis(self.virtual, self._redis_clock())
        self.redis.way_s = self._way_to_redis_s
        self.virtual.servers[REDIS_ADDRESS] = self.redis.accept
        self.wires = Wires(self.virtual, plan)
        self.wires.sockets.on_send = self._says
        self.brokers: list[Broker] = []
        self.stations: list[Station] = []

    def __enter__(self) -> Self:
        warm_up()  # else the first run of a process writes files of the compiler in the name of its aggregator
        self.virtual.__enter__()
        self.disks.__enter__()
        plan = self.plan
        self.brokers = [self._make_broker(place) for place in range(plan.brokers)]
        for number, name in enumerate(station_names(plan.config.shards, plan.standbys)):
            self.stations.append(Station(self, number, self.disks.add(name, self.folder / name / "store")))
            self.stations[-1].start()
        self._schedule()
        return self

    def __exit__(self, *_: object) -> None:
        self.virtual.__exit__(None, None, None)
        for station in self.stations:
            station.bury()
        self.disks.__exit__(None, None, None)
        self.wires.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def now_s(self) -> float:
        """The true time."""
        return self.virtual.now_s

    @property
    def aggregator(self) -> Station:
        """The last leader of shard 0."""
        return self.leaders[0]

    def run(self, limit_s: float) -> bool:
        """Runs until every island has finished, at most until ``limit_s``; returns whether it ended."""
        ended = self.virtual.run_until(limit_s, self.ended)
        assert not self.virtual.failures, "\n".join(self.virtual.failures)
        return ended

    def ended(self) -> bool:
        """Whether the run is over for everybody who is still there."""
        for leader in self.leaders.values():  # asked after every event
            if leader.core.run.phase is not m.Phase.ENDED:
                return False
        if len(self.leaders) < self.plan.config.shards:
            return False
        live = [name for name, island in self.islands.items() if island.alive]
        return all(name in self.versions for name in live) and bool(live or self._found_over)

    def station(self, name: str) -> Station:
        """Returns the station of that name."""
        return next(station for station in self.stations if station.name == name)

    # --- what happens -----------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        at = self.virtual.at
        for island in self.plan.islands:
            at(island.joins_at_s, partial(self.start_island, island))
            name = island.island_id
            for at_s in island.crashes_at_s:
                at(at_s, partial(self.crash_island, name, island.restart_s))
            for at_s in island.twins_at_s:
                at(at_s, partial(self._start_twin, island))
            for at_s in island.pauses_at_s:
                at(at_s, partial(self._ask, name, Island.pause))
            for at_s in island.corrupt_at_s:
                at(at_s, partial(self._ask, name, Island.corrupt))
            for at_s in island.spoilt_at_s:
                at(at_s, partial(self._spoil, name))
            if island.leaves_at_s is not None:
                at(island.leaves_at_s, partial(self._ask, name, Island.leave))
        for cut in self.plan.cuts:
            if cut.link.broker == REDIS:
                at(cut.at_s, partial(self._cut_redis, cut.link.process, cut.at_s + cut.for_s))
        for fault in self.plan.faults:
            at(fault.at_s, partial(self._strike, fault))
            if fault.kind is FaultKind.STALE:
                at(fault.at_s / 2, self._snapshot)

    def _strike(self, fault: Fault) -> None:
        (target,) = fault.targets
        match role_of(target), fault.kind:
            case Role.AGGREGATOR, FaultKind.KILL:
                self.station(target).crash(fault.for_s)
            case Role.AGGREGATOR, FaultKind.STOP:
                self.station(target).freeze(fault.for_s)
            case Role.AGGREGATOR, FaultKind.CUT_REDIS:
                self._cut_redis(target, self.now_s + fault.for_s)
            case Role.BROKER, FaultKind.KILL:
                self.crash_broker(_place(target), fault.for_s)
            case Role.BROKER, FaultKind.STOP:
                self.wires.freeze(self.brokers[_place(target)].process, fault.for_s)
            case Role.REDIS, FaultKind.STOP:
                self.redis.silent_until_s = self.now_s + fault.for_s
            case Role.REDIS, FaultKind.OUTAGE:
                self._redis_fails(fault)
                self.invariants.power_lost()
                for station in self.stations:
                    station.crash(fault.for_s, power=True)
                for place in range(self.plan.brokers):
                    self.crash_broker(place, fault.for_s)
            case Role.REDIS, _:
                self._redis_fails(fault)
            case _:
                pass  # of links, whose wires know

    def _redis_fails(self, fault: Fault) -> None:
        self.redis.down = True
        self.redis.restart()

        def comes_back() -> None:
            self.redis.down = False
            if fault.kind is FaultKind.STALE:
                self.redis.data.back_to(self._redis_before)
            else:
                self.redis.data.wipe()
                if not any(station.alive for station in self.stations):
                    self.invariants.power_lost()  # an outage by another name

        self.virtual.after(fault.for_s, comes_back)

    def _snapshot(self) -> None:
        self._redis_before = self.redis.data.kept()

    def _cut_redis(self, name: str, until_s: float) -> None:
        self.redis.cut_until_s[name] = max(until_s, self.redis.cut_until_s.get(name, 0.0))

    def _way_to_redis_s(self, name: str) -> float:
        """While troubles last, some requests come long after they were given up, and some answers never."""
        late = self.now_s < self.plan.calm_after_s and self.virtual.draw(name, "late") < LATE
        return self.virtual.between(name, "way to redis", *(LATE_S if late else WAY_S))

    def _redis_clock(self) -> Callable[[], float]:
        clock = Clock(self.virtual.queue, self._troubles_of("redis"))
        return lambda: EPOCH_S + clock.now_s

    def _troubles_of(self, name: str) -> tuple[ClockTrouble, ...]:
        return tuple(each for each in self.plan.clocks if each.process == name)

    # --- brokers and islands ----------------------------------------------------------------------------------

    def _make_broker(self, place: int) -> Broker:
        return Broker(self.wires, place, self._troubles_of(f"{BROKER}{place}"))

    def crash_broker(self, place: int, restart_s: float) -> None:
        """Kills a broker; the next one at its place knows nothing."""
        if self.brokers[place].process.alive:
            self.brokers[place].process.kill()
            self.virtual.after(restart_s, lambda: self.brokers.__setitem__(place, self._make_broker(place)))

    def start_island(self, plan: IslandPlan) -> None:
        """Starts a process of an island, which goes on with what an earlier one has kept, if it has."""
        others = [other.island_id for other in self.plan.islands if other.island_id != plan.island_id]
        joined = all(name in self.islands and self.islands[name].session is not None for name in others)
        if plan.joins_last and plan.island_id not in self._lives and not joined:
            self.virtual.after(LOOK_AGAIN_S, partial(self.start_island, plan))
            return
        life = self._lives[plan.island_id] = self._lives.get(plan.island_id, -1) + 1
        island = self.islands[plan.island_id] = Island(self, plan, life)
        island.start()

    def _start_twin(self, plan: IslandPlan) -> None:
        """Starts another process of an island that lives and has joined."""
        island = self.islands.get(plan.island_id)
        if island is not None and island.alive and island.core.joined:
            self.invariants.island_killed(island)
            self.start_island(plan)

    def crash_island(self, name: str, restart_s: float) -> None:
        """Kills an island's process; another one starts later."""
        island = self.islands.get(name)
        if island is not None and island.alive:
            island.kill()
            self.invariants.island_killed(island)
            self.virtual.after(restart_s, partial(self.start_island, island.plan))

    def found_over(self, island: Island) -> None:
        """A process of an island came when all was over."""
        self._found_over = True
        self.has_ended(island, None, restarts=False)

    def has_ended(self, island: Island, params: Params | None, *, restarts: bool) -> None:
        """A process of an island has ended: with the run's last parameters, or before."""
        if params is not None:
            self.versions[island.name] = params
            return
        self.invariants.island_killed(island)
        if restarts and self.islands[island.name] is island:
            self.virtual.after(island.plan.restart_s, partial(self.start_island, island.plan))

    def _ask(self, name: str, what: Callable[[Island], None]) -> None:
        if (island := self.islands.get(name)) is not None and island.alive:
            what(island)

    def _spoil(self, name: str) -> None:
        if (island := self.islands.get(name)) is not None:
            island.spoils = True
            self.note(self.now_s, island.address, "spoilt", {})

    # --- crash points -----------------------------------------------------------------------------------------

    def dies_at(self, process: str, point: Point) -> bool:
        """Returns whether a process dies at a point that it passes; its caller raises :class:`Killed`."""
        crash = self.passages.pass_by(process, point)
        if crash is None:
            return False
        self.note(self.now_s, process, "crashed", {"at": str(point), "number": crash.number})
        if process.startswith(BROKER):
            self.crash_broker(_place(process), crash.restart_s)
        elif process in self.islands:
            self.crash_island(process, crash.restart_s)
        else:
            self.station(process).crash(crash.restart_s)
        return True

    def _says(self, process: Process) -> None:
        if self.dies_at(process.name, Point.SEND):
            raise Killed

    # --- what is decided --------------------------------------------------------------------------------------

    def acts(self, island: Island, event: ie.Event | None, actions: Sequence[ie.Action]) -> None:
        """An island's core has answered an event, or has begun."""
        if isinstance(event, ie.Boundary):
            for _, batch in event.trained:
                self.invariants.trained(batch)
        if self._told.get(island.address) is not island.core.blocks:
            self._told[island.address] = island.core.blocks
            self.invariants.told(island.name, island.core.blocks)
        self.invariants.after_island_event(island)
        for action in actions:
            match action:
                case ie.Note():
                    self.note(self.now_s, island.address, action.name, action.fields)
                case ie.Fail() if action.reason != m.Reason.RUN_ENDED:
                    self.invariants.island_failed(self, island, action)

    def leads(self, station: Station) -> None:
        """A core is about to lead."""
        self.note(self.now_s, station.address, "leads", {"epoch": station.core.run.epoch})
        if self.plan.standbys:
            self.invariants.leading(station)
        for commit in station.commits().values():  # also what a life has written that died before it knew
            self.invariants.persisted(commit)
        self.leaders[station.config.shard] = station

    def hears(self, station: Station, event: agg.Event) -> None:
        """Called before a core takes an event."""
        if isinstance(event, agg.Persisted):
            self.invariants.persisted(station.persisting[event.fragment_id, event.fragment_version])

    def decides(self, station: Station, actions: Sequence[agg.Action]) -> None:
        """Called when a core has answered, before any action is carried out."""
        for action in actions:
            match action:
                case agg.Send():
                    self.invariants.speaking(station.address, station.config.shard, station.core.run.epoch)
                case agg.Publish():
                    self.invariants.publishing(action, station.core.run.epoch, station.config.shard)
                    self.invariants.replicated(self, station, action)
                case agg.Note():
                    self.note(self.now_s, station.address, action.name, action.fields)
        self.invariants.after_aggregator_event(station)

    def _keep(self, now_s: float, who: str, name: str, fields: Mapping[str, Any]) -> None:
        """Keeps a decision for the story of a failed seed."""
        self.trace.append((round(now_s, 6), who, name, str(dict(fields))))


def _place(broker: str) -> int:
    return int(broker.removeprefix(BROKER))
