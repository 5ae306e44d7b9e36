"""The processes of a simulated run: drivers of the production cores in virtual time.

Each mirrors its real counterpart (:mod:`islands.session`, :mod:`aggregator.leader`, :mod:`broker.server`) action by
action; where those use sockets, threads and a disk, these schedule the completion after a drawn delay.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgpack

from aggregator import events as agg
from aggregator.core import Aggregator
from aggregator.records import commit_to_map
from aggregator.replication import (
    Deliver,
    Deposed,
    GiveUp,
    Local,
    Renew,
    Renewed,
    RenewFailed,
    Replicate,
    ReplicateRun,
    Replication,
    ReplicationAction,
    ReplicationEvent,
)
from broker import messages as m
from broker.identity import Identity, KeyRole
from broker.relay import AllowListChanged, Relay, RelayAction, RelayConfig, RelayEvent
from broker.relay import Note as RelayNote
from broker.relay import Observe as RelayObserve
from broker.relay import Send as RelaySend
from broker.relay import Tick as RelayTick
from islands import core as isl
from islands import events as ie
from islands.shares import DataShare, Taken
from ops.chaos.manners import Rogue
from ops.virtual.crash_points import Point
from ops.virtual.queue import Alarm

#: How often a process tries to connect to a broker that does not answer.
CONNECT_AGAIN_S = 0.3

if TYPE_CHECKING:
    from ops.virtual.failover import Station
    from ops.virtual.simulation import IslandPlan, Simulation


class SimIsland:
    """One process of an island: the driver of :class:`islands.core.Island` in virtual time."""

    def __init__(self, simulation: Simulation, plan: IslandPlan, life: int) -> None:
        self.simulation, self.plan, self.life = simulation, plan, life
        self.name, self.address = plan.island_id, f"{plan.island_id}/{life}"
        self.clock = simulation.clock(self.name)
        self.key = plan.island_id  # stands for the public key of its connections
        self.alive = True
        self.stopped = False
        self.work = simulation.works.island(plan.island_id, life)
        self.step = self.tokens = self.start_step = 0
        self.ready: list[int] = []
        self.recovering = self.fresh_optimizer = False
        self.held: list[int] = []  # of a recovery, until every fragment is there: as in islands.session
        self.copies: dict[int, int] = {}
        self.watched: frozenset[int] = frozenset()
        self.training = self.searching = False
        self.stepped_at_s = math.inf  # when its first step ended
        self.data: DataShare
        self.shares: tuple[m.Share, ...] = ()
        self.trained: list[tuple[int, Taken]] = []  # since the last boundary
        self.gift_wanted = False  # another island needs a copy of the optimizer's state
        self.rng = random.Random(f"{simulation.plan.seed}/{self.address}")
        self.rogue = None
        if plan.manner is not None:
            self.rogue = Rogue(
                plan.manner, plan.misbehaves, simulation.works.tampered(), random.Random(f"rogue {self.address}")
            )
        self.core = isl.Island(
            island_id=plan.island_id,
            hint="",
            nonce=f"{plan.island_id}-{life}",
            tensors=self.work.tensors,
            tokens_per_step=self.work.tokens_per_step,
            brokers=simulation.plan.brokers,
        )
        self.connection = 0
        self.bulk_line = 0  # how often the core has made its bulk connection anew
        self.deaf = False  # what comes over that is swallowed
        self.connected = simulation.plan.brokers == 1  # a single broker's connection is never looked at
        self.sequence = 0
        self.alarm = Alarm(simulation.queue, lambda: self.handle(ie.Tick()), self.clock.true_s)
        if not self.connected:
            self.connect()

    def connect(self) -> None:
        """Leaves the broker and connects to the one of the core's choice, as soon as that answers."""
        self.connection += 1
        self.connected = self.deaf = False
        self.reach(self.connection)

    def line_of(self, channel: m.Channel) -> str:
        """Names its present connection on a channel."""
        return f"{self.connection}.{self.bulk_line}" if channel is m.Channel.BULK else str(self.connection)

    def reach(self, connection: int) -> None:
        """Tries to make a connection, again and again, unless it is given up for another one."""
        if not self.alive or connection != self.connection or self.connected:
            return
        queue = self.simulation.queue
        if self.simulation.brokers[self.core.broker].answers and self.reachable:
            self.connected = True
            queue.after(0.0, lambda: self.line(connection))
        else:
            queue.after(CONNECT_AGAIN_S, lambda: self.reach(connection))

    @property
    def reachable(self) -> bool:
        """Whether a connection to the broker of its choice can be made."""
        simulation = self.simulation
        cut = bool(simulation.plan.cuts) and simulation.is_cut(self.name, self.core.broker)
        return not cut and self.plan.reachable(simulation.queue.now_s)

    def lose(self) -> None:
        """The broker's process is gone: the connection breaks, and is tried again."""
        connection, self.connected = self.connection, False
        self.simulation.queue.after(0.0, lambda: self.line(connection))
        self.simulation.queue.after(CONNECT_AGAIN_S, lambda: self.reach(connection))

    def line(self, connection: int) -> None:
        """Tells the core how its connection stands."""
        if connection == self.connection:
            self.handle(ie.Line(stands=self.connected))

    def handle(self, event: ie.Event) -> None:
        """Feeds one event to the core and carries out what it answers."""
        if self.alive:
            self.perform(self.core.handle(event, self.clock.now_s))
            self.simulation.invariants.after_island_event(self)

    def perform(self, actions: list[ie.Action]) -> None:
        """Carries out actions; what takes time ends in an event."""
        queue, plan = self.simulation.queue, self.simulation.plan
        for action in actions:
            if not self.alive:
                return  # it died of one of them
            match action:
                case ie.Send():
                    for message in self.rogue.outgoing(action.message) if self.rogue else (action.message,):
                        self.sequence += 1
                        self.simulation.to_broker(self, action.to, message, self.sequence)
                case ie.Connect():
                    self.connect()
                case ie.RenewBulk():
                    self.bulk_line += 1
                    self.deaf = False
                case ie.Joined():
                    self.step = self.start_step = action.start_step
                    self.tokens = action.start_tokens
                    self.data = DataShare.of(self.core.shares, self.simulation.plan.config.seed)
                    self.work.joined(self.core, self.data)
                case ie.Watch():
                    self.watched = action.fragments
                case ie.Capture():
                    assert self.copies[action.fragment_id] == action.step, "a capture names a copy that is gone"
                    steps = self.core.fragments[action.fragment_id].capturing
                    assert steps is not None
                    payload = self.work.capture(action.fragment_id, steps)
                    done = ie.Captured(fragment_id=action.fragment_id, payload=payload)
                    queue.after(self.rng.uniform(*plan.capture_s), partial(self.handle, done))
                case ie.Prepare():
                    self.work.prepare(action.version, action.keep)
                    prepared = partial(self.prepared, action.version, action.keep)
                    queue.after(self.rng.uniform(*plan.capture_s), prepared)
                case ie.EncodeSeed():
                    payload = self.work.seed(action.fragment_id)
                    seeded = ie.SeedEncoded(fragment_id=action.fragment_id, payload=payload)
                    queue.after(self.rng.uniform(*plan.capture_s), partial(self.handle, seeded))
                case ie.Fail():
                    self.simulation.invariants.island_failed(self, action)
                    self.kill()
                    self.simulation.replace_failed(self)
                case ie.RefreshOptimizer():
                    self.recovering = True
                    self.held.clear()
                case ie.CopyState():
                    self.gift_wanted = True
                case ie.CheckState():
                    checked = ie.StateChecked(flaw=self.work.take_state(action.parts))
                    queue.after(self.rng.uniform(*plan.capture_s), partial(self.handle, checked))
                case ie.Settled():
                    self.simulation.note(queue.now_s, self.address, "island.settled", {"source": action.source})
                    self.begin(action.source)
                case ie.Note():
                    if action.name in ("broker.left", "bulk.renewed"):
                        self.simulation.note(queue.now_s, self.address, action.name, action.fields)
        if self.core.startable and not self.training and not self.searching and self.alive:
            if plan.donor_wait_s:
                self.searching = True
                self.handle(ie.StateNeeded(most_bytes=1 << 60, patience_s=plan.donor_wait_s))
            else:
                self.begin(m.StateSource.FRESH)
        self.alarm.arm(self.core.next_deadline_s() if self.alive else None)

    def begin(self, source: m.StateSource) -> None:
        """Starts to train, with an optimizer state from ``source``."""
        if not self.training and self.alive:
            self.training = True
            self.handle(ie.Restored(source=source))
            self.boundary()
            self.next_step()

    def prepared(self, version: m.Version, keep: float) -> None:
        """A version is ready to be installed; those of a recovery all at once, with a fresh optimizer."""
        if not self.alive:
            return
        if self.recovering and keep == 0:
            self.held.append(version.fragment_id)
            if len(self.held) == len(self.core.fragments):
                self.ready += self.held
                self.held.clear()
                self.recovering, self.fresh_optimizer = False, True
        else:
            self.ready.append(version.fragment_id)
        self.handle(ie.Prepared(fragment_id=version.fragment_id, fragment_version=version.fragment_version))
        if self.stopped:
            self.boundary()

    def next_step(self) -> None:
        """Starts an inner step."""
        spread = self.plan.jitter * self.plan.step_time_s
        step_s = max(1e-3, self.rng.uniform(self.plan.step_time_s - spread, self.plan.step_time_s + spread))
        ends_at_s = self.plan.stepped_at_s(self.simulation.queue.now_s, step_s)
        self.simulation.queue.at(ends_at_s, self.stepped)

    def stepped(self) -> None:
        """An inner step ended."""
        if not self.alive:
            return
        if self.core.shares is not self.shares:
            self.shares = self.core.shares
            self.data.hold(self.shares)
        self.work.train(self.tokens)
        taken = self.data.trained()
        self.simulation.invariants.trained(taken)
        self.trained.append((self.step, taken))
        self.stepped_at_s = min(self.stepped_at_s, self.simulation.queue.now_s)
        self.step += 1
        self.tokens += self.work.tokens_per_step
        self.stopped = self.core.done
        vitals = ie.Vitals(loss=1.0, step_time_s=self.plan.step_time_s, sync_share=0.0, bytes_up=0, bytes_down=0)
        self.core.handle(vitals, self.clock.now_s)
        self.boundary()
        if not self.stopped:
            self.next_step()

    def boundary(self) -> None:
        """What the training thread does between two steps: install what is ready, then copy what is watched."""
        installed, self.ready = tuple(self.ready), []
        for p in installed:
            self.copies.pop(p, None)
            self.work.install(p)
        if self.fresh_optimizer and installed:
            self.fresh_optimizer = False
            self.work.refresh_optimizer()
        assert self.core.manifest is not None
        wanted = self.core.manifest.moving if self.stopped else sorted(self.watched)
        if self.gift_wanted:
            self.gift_wanted = False
            parts, state_bytes = self.work.copy_state()
            done = ie.StateCopied(parts=parts, state_bytes=state_bytes)
            self.simulation.queue.after(self.rng.uniform(*self.simulation.plan.capture_s), partial(self.handle, done))
        copied = tuple(wanted)
        for p in copied:
            self.work.copy(p)
        self.copies.update(dict.fromkeys(copied, self.step))
        trained, self.trained = tuple(self.trained), []
        self.handle(
            ie.Boundary(
                inner_step=self.step,
                tokens=self.tokens,
                installed=installed,
                copied=copied,
                trained=trained,
                stopped=self.stopped,
            )
        )

    def kill(self) -> None:
        """Ends the process without a word."""
        self.alive = False
        self.work.end()
        self.alarm.arm(None)


class SimAggregator:
    """One process that leads: the driver of :class:`aggregator.core.Aggregator` in virtual time.

    With an epoch of the lease, :class:`aggregator.replication.Replication` stands between the disk and the core.
    """

    sender = m.AGGREGATOR

    def __init__(self, simulation: Simulation, station: Station, life: int, epoch: int | None) -> None:
        self.simulation, self.station, self.disk, self.life = simulation, station, station.disk, life
        self.name, self.address = station.name, f"{station.name}/{life}"
        self.clock = simulation.clock(self.name)
        self.connection = 0
        self.deaf: set[int] = set()  # brokers whose bulk connection delivers nothing, either way
        self.key = m.AGGREGATOR
        self.alive = True
        self.rng = random.Random(f"{simulation.plan.seed}/{self.address}")
        disk, config, now_s = station.disk, station.config, self.clock.now_s
        self.core = Aggregator(
            config,
            now_s=now_s,
            record=disk.record,
            commits=disk.commits,
            epoch=epoch or 1,
            founding=station.founding,
        )
        self.replication: Replication | None = None
        if epoch is not None:
            self.replication = Replication(
                name=station.name,
                epoch=epoch,
                lease_s=config.lease_s,
                standby_lag_s=config.standby_lag_s,
                commits=disk.commits,
                foundings=self.core.run.foundings,
                now_s=now_s,
            )
        self.record: agg.SaveRun | None = None  # the newest asked for
        self.ways: dict[str, int] = {}  # by which broker each standby was heard last
        self.work = simulation.works.aggregator()
        if disk.manifest is not None:
            self.work.manifested(disk.manifest)
        self.ordered: dict[int, int] = {}  # number of the newest order, per fragment
        self.computed: dict[int, str] = {}  # digest last computed, per fragment
        self.orders = 0
        self.saved_serial = 0
        self.renewals, self.confirmed = 0, False  # of the lease, as broker.lease.LeaseKey counts them
        self.sequence = 0
        self.deadline_s: float | None = None  # of the core, after its last event
        self.alarm = Alarm(simulation.queue, lambda: self.handle(agg.Tick()), self.clock.true_s)

    def start(self) -> None:
        """Begins to lead."""
        self.perform(self.core.start(self.clock.now_s))

    def handle(self, event: agg.Event | ReplicationEvent) -> None:
        """Feeds one event to whom it is for, as soon as the process runs, and carries out what is answered."""
        if self.alive:
            self.station.awake(partial(self._handle, event))

    def _handle(self, event: agg.Event | ReplicationEvent) -> None:
        if not self.alive:
            return
        now_s = self.clock.now_s
        if isinstance(event, ReplicationEvent):
            assert self.replication is not None
            self.replicate(self.replication.handle(event, now_s))
            self._arm()
            return
        if isinstance(event, agg.Tick) and self.replication is not None:
            self.replicate(self.replication.tick(now_s))
        if self.alive:
            self.feed(event)

    def feed(self, event: agg.Event) -> None:
        """Feeds one event to the core and carries out what it answers."""
        self.perform(self.core.handle(event, self.clock.now_s))
        self.simulation.invariants.after_aggregator_event(self)

    def perform(self, actions: list[agg.Action]) -> None:
        """Carries out actions; what takes time ends in an event."""
        plan = self.simulation.plan
        for action in actions:
            if not self.alive:
                return  # it died of one of them
            match action:
                case agg.Send():
                    self.simulation.invariants.speaking(self.address, self.station.config.shard, self.core.run.epoch)
                    self.send(action.to, action.message, action.by)
                case agg.Plant():
                    self.order(action.fragment_id, 0, self.work.plant(action))
                case agg.Merge():
                    self.simulation.invariants.merging(action)
                    self.order(action.fragment_id, action.fragment_version, self.work.merge(action))
                case agg.Persist():
                    self.later(plan.persist_s, partial(self.persist, action.commit))
                    if self.replication is not None:
                        self.replicate(self.replication.persist(action.commit, self.clock.now_s))
                case agg.SaveRun():
                    self.record = action
                    self.later(plan.persist_s, partial(self.save_run, action))
                case agg.RenewBulk(by=by):
                    self.deaf.discard(by)
                case agg.Publish():
                    self.simulation.invariants.publishing(action, self.core.run.epoch, self.station.config.shard)
                    self.simulation.invariants.replicated(self, action)
                    version = m.Version(
                        shard=self.station.config.shard,
                        epoch=self.core.run.epoch,
                        fragment_id=action.fragment_id,
                        fragment_version=action.fragment_version,
                        digest=action.digest,
                        contributions=action.contributions,
                        payload=self.work.payload(action.fragment_id, action.digest),
                    )
                    self.send(m.BROKER, version, action.by)
                case agg.Note():
                    self.simulation.note(self.simulation.queue.now_s, self.address, action.name, action.fields)
                case agg.Manifested():
                    self.disk.manifest = action.manifest
                    self.work.manifested(action.manifest)
                case agg.NewLineage(above=above, epoch=epoch):
                    self.simulation.begin_lineage(above, epoch)
                case agg.Finished():
                    if self.replication is not None and self.core.run.phase is m.Phase.ENDED:
                        self.station.lease.end(self.station.name, self.replication.epoch)
        self.deadline_s = self.core.next_deadline_s(self.clock.now_s)
        self._arm()

    def _arm(self) -> None:
        deadline_s = self.deadline_s
        if self.replication is not None and not self.core.finished:
            deadline_s = min(deadline_s or math.inf, self.replication.next_deadline_s())
        self.alarm.arm(deadline_s if self.alive else None)

    def replicate(self, actions: list[ReplicationAction]) -> None:
        """Carries out what stands between the disk and the core, as :mod:`aggregator.leader` does."""
        assert self.replication is not None
        shard, epoch, lease = self.station.config.shard, self.replication.epoch, self.station.lease
        for action in actions:
            if not self.alive:
                return
            match action:
                case Replicate(to=to, commit=commit):
                    self.send(m.standing_by(to), _replica(commit, shard, epoch), self.ways.get(to))
                case ReplicateRun(to=to):
                    if self.record is not None:
                        message = _replica_run(self.record, shard, epoch)
                        self.send(m.standing_by(to), message, self.ways.get(to))
                case Renew(in_sync=in_sync):
                    self.renewals += 1
                    lease.call(
                        self.station.number,
                        partial(lease.renew, self.name, epoch, in_sync, self.renewals, confirmed=self.confirmed),
                        self.renewed,
                        partial(self.handle, RenewFailed(detail="no answer")),
                    )
                case Deliver(event=event):
                    if isinstance(event, agg.Persisted):
                        self.simulation.invariants.persisted(self.disk.commits[event.fragment_id])
                    self.feed(event)
                case GiveUp(to=to):
                    give_up = partial(lease.give_up, self.station.name, epoch, to)
                    lease.call(self.station.number, give_up, lambda _: None, lambda: None)
                case Deposed():
                    self.simulation.note(self.simulation.queue.now_s, self.address, "deposed", {"by": action.holder})
                    self.kill()
                    self.station.start()
                    return
                case agg.Note():
                    self.simulation.note(self.simulation.queue.now_s, self.address, action.name, action.fields)

    def renewed(self, answer: tuple[bool, str, int]) -> None:
        """Redis has answered whether the lease was renewed, and whose it is."""
        granted, holder, epoch = answer
        self.confirmed = self.confirmed or granted
        self.handle(Renewed(granted=granted, holder=holder, epoch=epoch))

    def later(self, delay_s: tuple[float, float], call: Callable[[], None]) -> None:
        """Runs ``call`` after a random delay, if the process lives then, and as soon as it runs."""

        def when_awake() -> None:
            self.station.awake(lambda: call() if self.alive else None)

        self.simulation.queue.after(self.rng.uniform(*delay_s), when_awake)

    def order(self, fragment_id: int, fragment_version: int, digest: str) -> None:
        """A merge or a seed has begun, and replaces what its fragment was waiting for."""
        self.orders += 1
        self.ordered[fragment_id] = self.orders
        plan = self.simulation.plan
        self.later(plan.merge_s, partial(self.compute, fragment_id, fragment_version, digest, self.orders))

    def compute(self, fragment_id: int, fragment_version: int, digest: str, order: int) -> None:
        """A merge or a seed is in memory, if it is still the newest order of its fragment."""
        if self.ordered[fragment_id] != order:
            return
        self.computed[fragment_id] = digest
        self.handle(agg.Computed(fragment_id=fragment_id, fragment_version=fragment_version, digest=digest))

    def persist(self, commit: agg.Commit) -> None:
        """A commit reaches the disk, or does not."""
        if self.simulation.dies_at(self.name, Point.PERSIST):
            return
        p, version = commit.fragment_id, commit.fragment_version
        calm = self.simulation.queue.now_s > self.simulation.plan.calm_after_s
        if not calm and self.rng.random() < self.simulation.plan.persist_failure:
            self.handle(agg.PersistFailed(fragment_id=p, fragment_version=version, detail="disk full"))
            return
        if self.computed[commit.fragment_id] != commit.digest:
            return  # of a seed that was given up
        self.work.persist(commit)
        self.disk.commits[commit.fragment_id] = commit
        self.done(agg.Persisted(fragment_id=p, fragment_version=version))

    def done(self, event: agg.Persisted | agg.RunSaved) -> None:
        """Something is on this disk; it is durable where nobody else must have it."""
        if self.replication is None and isinstance(event, agg.Persisted):
            self.simulation.invariants.persisted(self.disk.commits[event.fragment_id])
        if not self.simulation.dies_at(self.name, Point.PERSISTED):
            self.handle(event if self.replication is None else Local(event=event))

    def save_run(self, action: agg.SaveRun) -> None:
        """The run record reaches the disk, unless a later one of this life is there already."""
        if self.simulation.dies_at(self.name, Point.PERSIST):
            return
        newest = self.disk.record
        if action.serial > self.saved_serial and (newest is None or newest["epoch"] <= action.record["epoch"]):
            self.saved_serial = action.serial
            self.disk.record = dict(action.record)
        self.done(agg.RunSaved(serial=action.serial))

    def send(self, to: str, message: m.Message, by: int | None) -> None:
        """Sends one message to a broker, or to each."""
        self.sequence += 1
        for broker in range(self.simulation.plan.brokers) if by is None else (by,):
            self.simulation.to_broker(self, to, message, self.sequence, broker)

    def kill(self) -> None:
        """Ends the process without a word."""
        self.alive = False
        self.alarm.arm(None)


def _replica(commit: agg.Commit, shard: int, epoch: int) -> m.Replica:
    """As :func:`aggregator.replicas.replica_of`, with a name instead of arrays."""
    return m.Replica(
        shard=shard,
        epoch=epoch,
        fragment_id=commit.fragment_id,
        fragment_version=commit.fragment_version,
        digest=commit.digest,
        round_id=commit.round_id,
        commit=msgpack.packb(commit_to_map(commit)),
        payload=commit.digest,
    )


def _replica_run(action: agg.SaveRun, shard: int, epoch: int) -> m.ReplicaRun:
    """As :func:`aggregator.replicas.run_message`."""
    return m.ReplicaRun(shard=shard, epoch=epoch, serial=action.serial, record=msgpack.packb(dict(action.record)))


class SimBroker:
    """One process of a broker: the driver of :class:`broker.relay.Relay` in virtual time."""

    def __init__(self, simulation: Simulation, place: int) -> None:
        self.simulation, self.place = simulation, place
        self.name = f"broker-{place}"
        self.clock = simulation.clock(self.name)
        self.alive = True
        self.frozen = False
        self.backlog: list[RelayEvent] = []  # what came while it was frozen
        self.relay = Relay(RelayConfig(run_id=simulation.plan.config.run_id))
        islands = [plan.island_id for plan in simulation.plan.islands]
        allowed = {name: Identity(role=KeyRole.ISLAND, name=name) for name in islands}
        allowed[m.AGGREGATOR] = Identity(role=KeyRole.AGGREGATOR, name=m.AGGREGATOR)
        self.relay.handle(AllowListChanged(allowed=allowed), self.clock.now_s)
        self.alarm = Alarm(simulation.queue, lambda: self.handle(RelayTick()), self.clock.true_s)

    @property
    def answers(self) -> bool:
        """Whether a connection can be made: a frozen process takes them, but does not shake hands."""
        return self.alive and not self.frozen

    def handle(self, event: RelayEvent) -> None:
        """Feeds one event to the relay and carries out what it answers."""
        if self.frozen:
            self.backlog.append(event)
        elif self.alive:
            self.perform(self.relay.handle(event, self.clock.now_s))

    def perform(self, actions: list[RelayAction]) -> None:
        """Passes on what the relay lets through."""
        for action in actions:
            if not self.alive:
                return  # it died of one of them
            match action:
                case RelaySend():
                    self.simulation.from_broker(self, action)
                case RelayObserve() | RelayNote():
                    pass
        self.alarm.arm(self.relay.next_deadline_s())

    def freeze(self, for_s: float) -> None:
        """Stops the process for a while; its connections stay, and what comes waits."""
        if self.answers:
            self.frozen = True
            self.simulation.queue.after(for_s, self.thaw)

    def thaw(self) -> None:
        """Goes on, with everything that came meanwhile."""
        self.frozen = False
        backlog, self.backlog = self.backlog, []
        for event in backlog:
            self.handle(event)

    def kill(self) -> None:
        """Ends the process without a word."""
        self.alive = False
        self.alarm.arm(None)
        for island in self.simulation.islands.values():
            if island.alive and island.connected and island.core.broker == self.place and island.connection:
                island.lose()
