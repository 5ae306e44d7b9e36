"""A whole run in virtual time: the production island, relay and aggregator cores behind a modelled network and disk.

One process, one seeded event queue, no sockets, no clock: the same seed and configuration give the same run, byte for
byte. What the processes do with parameters is plugged in (:mod:`ops.virtual.work`): steps are only counted, so that a
fleet costs microseconds per step, or the laboratory really trains. Invariants (design, section 10) are checked after
every event by :class:`ops.virtual.invariants.Invariants`, which sees everything. The processes themselves are in
:mod:`ops.virtual.island`, :mod:`ops.virtual.aggregator`, :mod:`ops.virtual.failover` and :mod:`ops.virtual.broker`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

from aggregator import events as agg
from aggregator.config import AggregatorConfig
from aggregator.recovery import renumbered
from aggregator.replication import Followed, Outranked
from broker import messages as m
from broker.fragments import FragmentManifest, Kind, TensorSpec
from broker.hearing import Carried
from broker.relay import Received as RelayReceived
from broker.relay import Send as RelaySend
from broker.relay import Unreachable
from broker.tensors import payload_bytes
from islands import events as ie
from islands.donation import PART_BYTES
from ops.chaos.manners import Manner
from ops.virtual.aggregator import SimAggregator
from ops.virtual.broker import SimBroker
from ops.virtual.clocks import Clock, ClockTrouble
from ops.virtual.crash_points import CrashPoint, Passages, Point
from ops.virtual.failover import RedisTrouble, SimCandidate, SimLease, Station, StationTrouble
from ops.virtual.failover import Trouble as StationOrRedisTrouble
from ops.virtual.invariants import Invariants
from ops.virtual.island import SimIsland
from ops.virtual.partitions import Cut, Way
from ops.virtual.queue import EventQueue, LinkModel, Sender
from ops.virtual.work import Counting, Works

Process = SimIsland | SimAggregator | SimCandidate

#: Before the number of a broker, in the names of those that may crash or have a clock.
BROKER = "broker-"

#: (virtual time, process, name of the decision, fields).
OnNote = Callable[[float, str, str, Mapping[str, Any]], None]


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
        pauses: Times (from when, for how long) at which it does not step, while its process lives.
        outages: Times (from when, for how long) at which nothing passes its link.
        deaf_at_s: When a damaged byte makes its bulk connection swallow all that comes, until it makes another one.
        link: Its own link; None for that of the plan.
        manner: How it misbehaves; None for not at all.
        misbehaves: Share of its contributions that it tampers with.
    """

    island_id: str
    step_time_s: float
    jitter: float = 0.1
    joins_at_s: float = 0.0
    joins_last: bool = False
    crashes_at_s: tuple[float, ...] = ()
    restart_s: float = 1.0
    leaves_at_s: float | None = None
    pauses: tuple[tuple[float, float], ...] = ()
    outages: tuple[tuple[float, float], ...] = ()
    deaf_at_s: tuple[float, ...] = ()
    link: LinkModel | None = None
    manner: Manner | None = None
    misbehaves: float = 1.0

    def stepped_at_s(self, now_s: float, step_s: float) -> float:
        """Returns when a step that begins now and takes ``step_s`` ends: a pause stretches it."""
        ends_at_s = now_s + step_s
        for at_s, for_s in self.pauses:
            if at_s < ends_at_s and at_s + for_s > now_s:
                ends_at_s += at_s + for_s - max(now_s, at_s)
        return ends_at_s

    def reachable(self, now_s: float) -> bool:
        """Whether its link works."""
        return not any(at_s <= now_s < at_s + for_s for at_s, for_s in self.outages)


class Trouble(StrEnum):
    """What may happen to one broker of several."""

    CRASH = "crash"  # its process dies; the next one knows nothing
    FREEZE = "freeze"  # its process stops, its connections stand
    CUT = "cut"  # nothing passes between it and the aggregator


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerTrouble:
    """A trouble of the broker at one place, from when and for how long."""

    trouble: Trouble
    broker: int
    at_s: float
    for_s: float

    def cuts(self, broker: int, now_s: float) -> bool:
        """Whether it keeps a broker from the aggregator now."""
        return self.trouble is Trouble.CUT and self.broker == broker and self.at_s <= now_s < self.at_s + self.for_s


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
    aggregator_crashes_at_s: tuple[float, ...] = ()
    aggregator_deaf_at_s: tuple[float, ...] = ()  # damaged bytes make its bulk connection to the first broker useless
    brokers: int = 1
    broker_crashes_at_s: tuple[float, ...] = ()  # of the first one
    broker_troubles: tuple[BrokerTrouble, ...] = ()
    standbys: int = 0  # aggregators besides the first of each shard; with them the config has ``failover``
    troubles: tuple[StationOrRedisTrouble, ...] = ()
    cuts: tuple[Cut, ...] = ()  # of single links, by direction
    clocks: tuple[ClockTrouble, ...] = ()
    crash_points: tuple[CrashPoint, ...] = ()
    restart_s: float = 0.5
    donor_wait_s: float = (
        0.0  #: how long a new process may look for another island's optimizer state; 0: it starts fresh
    )
    calm_after_s: float = 1e9
    accounts: bool = True  # whether kernels say what a connection has carried
    tokens_per_step: int = 100
    tensors: tuple[TensorSpec, ...] = ()

    def model(self) -> tuple[TensorSpec, ...]:
        """The tensors of the run: those given, or a few of different sizes."""
        if self.tensors:
            return self.tensors
        return tuple(
            TensorSpec(name=f"layer/{i}", shape=(64 * (1 + i % 3), 32), dtype="float32", kind=Kind.RDA)
            for i in range(2 * self.config.fragments)
        )


@dataclass(slots=True)
class Disk:
    """What survives an aggregator's crash."""

    record: dict[str, Any] | None = None
    commits: dict[int, agg.Commit] = field(default_factory=dict)
    manifest: FragmentManifest | None = None


def line_of(process: Process, channel: m.Channel) -> str:
    """Names the present connection of a process on a channel."""
    return process.line_of(channel) if isinstance(process, SimIsland) else str(process.connection)


class Simulation:
    """One run of a :class:`SimulationPlan`.

    Args:
        plan: What happens.
        works: What the processes do with parameters; counting steps if not given.
        on_note: Takes every decision; by default they are kept in ``trace``.
        watching: Whether the invariants are checked after every event, or only as versions are made and published.
    """

    def __init__(
        self,
        plan: SimulationPlan,
        works: Works | None = None,
        on_note: OnNote | None = None,
        *,
        watching: bool = True,
    ) -> None:
        self.plan = plan
        self.works = works or Counting(plan.model(), plan.tokens_per_step)
        self.note = on_note or self.keep
        self.queue = EventQueue()
        self.rng = random.Random(plan.seed)
        self._clocks: dict[str, Clock] = {}
        self.passages = Passages(plan.crash_points)
        self.leases = [SimLease(self, shard) for shard in range(plan.config.shards)]
        self.invariants = Invariants(
            rogues=frozenset(i.island_id for i in plan.islands if i.manner is not None), watching=watching
        )
        self.trace: list[tuple[float, str, str, str]] = []
        self.brokers = [SimBroker(self, place) for place in range(plan.brokers)]
        self.islands: dict[str, SimIsland] = {}
        self.processes: dict[str, Process] = {}
        self.leaders: dict[int, SimAggregator] = {}  # whoever led each shard last
        self.stations = [Station(self, number, Disk()) for number in range(plan.config.shards * (1 + plan.standbys))]
        self._lives: dict[str, int] = {}
        self._senders: dict[tuple[str, str, m.Channel], Sender] = {}
        for station in self.stations:
            station.start()
        for island in plan.islands:
            self.queue.at(island.joins_at_s, partial(self.start_island, island))
            for at_s in island.crashes_at_s:
                self.queue.at(at_s, partial(self.crash_island, island))
            for at_s in island.deaf_at_s:
                self.queue.at(at_s, partial(self.deafen, island))
            if island.leaves_at_s is not None:
                self.queue.at(island.leaves_at_s, partial(self.leave, island))
        for at_s in plan.aggregator_crashes_at_s:
            self.queue.at(at_s, partial(self.stations[0].crash, plan.restart_s))
        for at_s in plan.aggregator_deaf_at_s:
            self.queue.at(at_s, lambda: self.aggregator.deaf.add(0))
        for trouble in plan.troubles:
            match trouble.kind:
                case StationTrouble.CRASH:
                    self.queue.at(trouble.at_s, partial(self.stations[trouble.station].crash, trouble.for_s))
                case StationTrouble.FREEZE:
                    self.queue.at(trouble.at_s, partial(self.stations[trouble.station].freeze, trouble.for_s))
                case RedisTrouble.POWER:
                    self.queue.at(trouble.at_s, partial(self.cut_power, trouble.for_s))
                case _:
                    pass  # looked at with each call of Redis
        for at_s in plan.broker_crashes_at_s:
            self.queue.at(at_s, partial(self.crash_broker, 0, plan.restart_s))
        for each in plan.broker_troubles:
            match each.trouble:
                case Trouble.CRASH:
                    self.queue.at(each.at_s, partial(self.crash_broker, each.broker, each.for_s))
                case Trouble.FREEZE:
                    self.queue.at(each.at_s, partial(self.freeze_broker, each.broker, each.for_s))
                case Trouble.CUT:
                    pass  # looked at by each message

    @property
    def aggregator(self) -> SimAggregator:
        """Whoever led shard 0 last."""
        return self.leaders[0]

    @property
    def disk(self) -> Disk:
        """Of whoever led shard 0 last."""
        return self.aggregator.disk

    def run(self, limit_s: float) -> bool:
        """Runs until every island has finished, at most ``limit_s`` of virtual time; returns whether it ended."""
        return self.queue.run_until(limit_s, self.ended)

    def ended(self) -> bool:
        """Whether the run is over for everybody who is still there."""
        phases = [leader.core.run.phase for leader in self.leaders.values()]
        if len(phases) < self.plan.config.shards or set(phases) != {m.Phase.ENDED}:
            return False
        live = [i for i in self.islands.values() if i.alive]
        return bool(live) and all(i.core.finished for i in live)

    def clock(self, process: str) -> Clock:
        """The clock that the processes of that name read."""
        clock = self._clocks.get(process)
        if clock is None:
            wrong = tuple(each for each in self.plan.clocks if each.process == process)
            clock = self._clocks[process] = Clock(self.queue, wrong)
        return clock

    # --- faults -----------------------------------------------------------------------------------------------

    def dies_at(self, process: str, point: Point) -> bool:
        """A process comes by a point; returns whether it dies there, which is then done."""
        crash = self.passages.pass_by(process, point)
        if crash is None:
            return False
        self.note(self.queue.now_s, process, "crashed", {"at": str(point), "number": crash.number})
        if process.startswith(BROKER):
            self.crash_broker(int(process.removeprefix(BROKER)), crash.restart_s)
        elif process in self.islands:
            self.crash_island(replace(self.islands[process].plan, restart_s=crash.restart_s))
        else:
            next(station for station in self.stations if station.name == process).crash(crash.restart_s)
        return True

    def start_island(self, plan: IslandPlan) -> None:
        """Starts a process of an island."""
        if plan.joins_last and plan.island_id not in self._lives and not self._others_joined(plan):
            self.queue.after(0.1, partial(self.start_island, plan))
            return
        life = self._lives[plan.island_id] = self._lives.get(plan.island_id, -1) + 1
        island = SimIsland(self, plan, life)
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
        """Lets an island's bulk connection stand, and deliver nothing any more."""
        island = self.islands.get(plan.island_id)
        if island is not None:
            island.deaf = True

    def leave(self, plan: IslandPlan) -> None:
        """Lets an island end on purpose."""
        island = self.islands.get(plan.island_id)
        if island is not None and island.alive and island.core.joined:
            island.handle(ie.Leaving(reason="leaves"))
            island.kill()
            self.invariants.island_killed(island)

    def crash_broker(self, place: int, restart_s: float) -> None:
        """Kills a broker; the next one at its place knows nothing."""
        if not self.brokers[place].alive:
            return
        self.brokers[place].kill()

        def restart() -> None:
            self.brokers[place] = SimBroker(self, place)

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

    # --- the network ------------------------------------------------------------------------------------------

    def arrivals_s(self, process: Process, message: m.Message, direction: str, broker: int) -> list[float]:
        """Returns the delays after which copies of a message get through to or from a process, if any does.

        Bulk waits for bulk, control for control: they have connections of their own. Links are faultless once the
        plan's troubles are over.
        """
        link = self.link_of(process)
        sender = self._senders.setdefault((process.address, direction, message.channel), Sender())
        if self.plan.cuts and self.is_cut(process.name, broker, direction):
            return sender.lose(self.size(message))
        if isinstance(process, SimIsland) and not process.plan.reachable(self.queue.now_s):
            return sender.lose(self.size(message))
        if self.queue.now_s > self.plan.calm_after_s:
            link = LinkModel(delay_s=link.delay_s, bytes_per_s=link.bytes_per_s)
        queued_s = sender.queued_s(self.queue.now_s, self.size(message), link.bytes_per_s)
        return link.arrivals_s(self.rng, queued_s)

    def link_of(self, process: Process) -> LinkModel:
        """Returns the model of a process's own link."""
        own = process.plan.link if isinstance(process, SimIsland) else None
        return own or self.plan.link

    def carried(self, process: Process) -> Carried | None:
        """Returns what a process's link has carried of bulk, for all of its brokers; None where no kernel says it."""
        if not self.plan.accounts:
            return None
        now_s, rate = self.queue.now_s, self.link_of(process).bytes_per_s
        up, down = (
            self._senders.setdefault((process.address, direction, m.Channel.BULK), Sender())
            for direction in ("up", "down")
        )
        carried = up.carried_bytes(now_s, rate)
        number = process.bulk_number if isinstance(process, SimIsland) else 0
        return Carried(carried, down.carried_bytes(now_s, rate), round(up.given_bytes) - carried, number)

    def carried_onwards(self, broker: SimBroker, event: RelayReceived) -> Carried | None:
        """Returns what the link of the aggregator has carried to which a message goes on, as its broker sees it."""
        route = broker.relay.onwards(event.peer, event.envelope)
        process = None if route is None else self.processes.get(route.decode().partition("#")[0])
        found = None if process is None else self.carried(process)
        if process is None or found is None:
            return None
        given = self._senders[process.address, "down", m.Channel.BULK].given_bytes
        return Carried(up=found.down, down=found.up, waiting=round(given) - found.down)

    def to_broker(self, process: Process, to: str, message: m.Message, sequence: int, broker: int = 0) -> None:
        """Carries a message from a process to a broker: an island's own, or the one that an aggregator names."""
        if not process.alive or self.dies_at(process.name, Point.SEND):
            return
        sender, incarnation = "", 0
        if isinstance(process, SimIsland):
            incarnation = process.core.incarnation
            sender = process.core.island_id if process.core.joined else m.joining(process.core.nonce)
            broker = process.core.broker
            if not process.connected:
                return
        elif self.cut_off(broker):
            return
        else:
            sender = process.sender
        delays_s = self.arrivals_s(process, message, "up", broker)
        if not delays_s or self.swallows(process, message, broker):
            return
        envelope = m.Envelope(
            run_id=self.plan.config.run_id,
            sender=sender,
            incarnation=incarnation,
            sequence=sequence,
            to=to,
            message=message,
        )
        event = RelayReceived(
            channel=message.channel,
            peer=f"{process.address}#{line_of(process, message.channel)}".encode(),
            envelope=envelope,
            size_bytes=self.size(message),
            key=process.key,
        )

        def arrives() -> None:
            if isinstance(process, SimAggregator) and message.channel is m.Channel.BULK and process.core.finished:
                return  # what still waited for a turn on its link went with it
            self.brokers[broker].handle(event)

        for delay_s in delays_s:
            self.queue.after(delay_s, arrives)

    def cut_off(self, broker: int) -> bool:
        """Whether nothing passes between a broker and the aggregator now."""
        return any(each.cuts(broker, self.queue.now_s) for each in self.plan.broker_troubles)

    def is_cut(self, process: str, broker: int, direction: str = "") -> bool:
        """Whether nothing passes a link now, in one direction; in neither, without a handshake, or in any."""
        now_s, directions = self.queue.now_s, (direction,) if direction else (Way.UP, Way.DOWN)
        return any(
            cut.link.broker == broker and cut.link.process == process and cut.stops(each, now_s)
            for cut in self.plan.cuts
            for each in directions
        )

    def from_broker(self, broker: SimBroker, action: RelaySend) -> None:
        """Carries a message from the broker to a process, or says that there is none."""
        if self.dies_at(broker.name, Point.SEND):
            return
        address, _, line = action.peer.decode().partition("#")
        process = self.processes.get(address)
        if process is None or not process.alive or line != line_of(process, action.channel):
            gone = Unreachable(
                channel=action.channel, peer=action.peer, envelope=action.envelope, size_bytes=action.size_bytes
            )
            self.queue.after(0.0, lambda: broker.handle(gone))
            return
        if not isinstance(process, SimIsland) and self.cut_off(broker.place):
            sender = self._senders.setdefault((process.address, "down", action.channel), Sender())
            sender.lose(self.size(action.envelope.message))
            return
        for delay_s in self.arrivals_s(process, action.envelope.message, "down", broker.place):
            self.queue.after(delay_s, partial(self.deliver, process, line, action.envelope, broker.place))

    def deliver(self, process: Process, line: str, envelope: m.Envelope, broker: int) -> None:
        """Hands a message to a process, unless it has left the connection that this came by."""
        if line != line_of(process, envelope.message.channel):
            return
        if isinstance(process, SimIsland):
            if process.deaf and envelope.message.channel is m.Channel.BULK:
                return
            process.handle(ie.Received(envelope=envelope, carried=self.carried(process)))
            return
        message = envelope.message
        if isinstance(process, SimCandidate):
            process.received(message, broker)
            return
        if self.swallows(process, message, broker):
            return
        if isinstance(message, m.Attached) and process.replication is not None:
            process.replication.reached(process.clock.now_s)
        if isinstance(message, m.Follow):
            name = envelope.sender.removeprefix(m.standing_by(""))
            process.ways[name] = broker
            process.handle(Followed(name=name, follow=message))
            return
        if isinstance(message, m.Refused):
            event = agg.refusal_of_ours(message, broker)
            if event is not None:
                process.handle(event)
            if isinstance(event, agg.Fenced) and process.replication is not None:
                process.handle(Outranked())
            return
        has_payload = isinstance(message, m.Contribution | m.Seed)
        found = process.work.inspect(envelope) if has_payload else agg.Inspection()
        received = agg.Received(
            envelope=envelope,
            flaw=found.flaw,
            payload_bytes=self.size(message),
            norm=found.norm,
            broker=broker,
            carried=self.carried(process),
        )
        process.handle(received)

    def swallows(self, process: Process, message: m.Message, broker: int) -> bool:
        """Whether an aggregator's bulk connection to a broker has become deaf."""
        return isinstance(process, SimAggregator) and message.channel is m.Channel.BULK and broker in process.deaf

    def size(self, message: m.Message) -> int:
        """Bytes of a message: of what was encoded, or as many as float32 would take."""
        if isinstance(message, m.Replica):  # parameters and momentum
            manifest = self.disk.manifest
            return 0 if manifest is None else 8 * manifest.sizes[message.fragment_id]
        if isinstance(message, m.Contribution | m.Version | m.Seed):
            if isinstance(message.payload, tuple):
                return payload_bytes(message.payload)
            manifest = self.disk.manifest if self.leaders else None
            known = manifest is not None and message.fragment_id < len(manifest)
            return 4 * manifest.sizes[message.fragment_id] if manifest is not None and known else 0
        if isinstance(message, m.StatePart):
            return min(message.state_bytes, PART_BYTES)
        return 200

    def keep(self, now_s: float, who: str, name: str, fields: Mapping[str, Any]) -> None:
        """Keeps a decision for whoever reads the story of a failed seed."""
        self.trace.append((round(now_s, 6), who, name, str(dict(fields))))
