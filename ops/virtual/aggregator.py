"""The process of a leader: drives :class:`aggregator.rounds.core.Aggregator` in virtual time.

It mirrors :mod:`aggregator.process.leader` action by action; where that uses sockets, a merging thread and a disk, this
one schedules the completion after a drawn delay. What is merged is plugged in (:mod:`ops.virtual.work`).
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from aggregator.interface import events as agg
from aggregator.rounds.core import Aggregator
from aggregator.standby.replicas import replica_of, run_message
from aggregator.standby.replication import Replication
from aggregator.standby.replication_events import (
    Deliver,
    Deposed,
    GiveUp,
    Local,
    Renew,
    Renewed,
    RenewFailed,
    Replicate,
    ReplicateRun,
    ReplicationAction,
    ReplicationEvent,
)
from broker.wire import messages as m
from ops.virtual.plan import Point
from ops.virtual.queue import Alarm
from ops.virtual.world import World


class SimAggregator:
    """One process that leads: the driver of :class:`aggregator.rounds.core.Aggregator` in virtual time.

    With an epoch of the lease, :class:`aggregator.standby.replication.Replication` stands between the disk and the
    core.
    """

    sender = m.AGGREGATOR

    def __init__(self, simulation: World, station: Any, life: int, epoch: int | None) -> None:
        self.simulation, self.station, self.disk, self.life = simulation, station, station.disk, life
        self.name, self.address = station.name, f"{station.name}/{life}"
        self.clock = simulation.clock(self.name)
        self.connection = 0
        self.bulk_numbers: Counter[int] = Counter()  # of the bulk connection to each broker
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
        self.routes: dict[str, int] = {}  # by which broker each standby was heard last
        self.work = simulation.works.aggregator()
        if disk.manifest is not None:
            self.work.manifested(disk.manifest)
        self.ordered: dict[int, int] = {}  # number of the newest order, per fragment
        self.computed: dict[int, str] = {}  # digest last computed, per fragment
        self.orders = 0
        self.free_at_s: dict[str, float] = {}  # each thread, where they are counted
        self.saved_serial = 0
        self.renewals, self.confirmed = 0, False  # of the lease, as aggregator.process.lease.LeaseKey counts them
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
                    self.order(self.work.plant(action))
                case agg.Merge():
                    made = action.fragment_id, action.fragment_version
                    self.simulation.network.version_codecs[made] = action.version_codec
                    self.simulation.invariants.merging(action)
                    self.order(self.work.merge(action))
                case agg.Persist():
                    self.later(plan.persist_s, partial(self.persist, action.commit), "disk")
                    if self.replication is not None:
                        self.replicate(self.replication.persist(action.commit, self.clock.now_s))
                case agg.SaveRun():
                    self.record = action
                    self.later(plan.persist_s, partial(self.save_run, action), "disk")
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
                        base=action.base,
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
        """Carries out what stands between the disk and the core, as :mod:`aggregator.process.leader` does."""
        assert self.replication is not None
        shard, epoch, lease = self.station.config.shard, self.replication.epoch, self.station.lease
        for action in actions:
            if not self.alive:
                return
            match action:
                case Replicate(to=to, commit=commit):
                    self.send(m.standing_by(to), replica_of(commit, shard, epoch, commit.digest), self.routes.get(to))
                case ReplicateRun(to=to):
                    if self.record is not None:
                        message = run_message(self.record.record, shard, epoch, self.record.serial)
                        self.send(m.standing_by(to), message, self.routes.get(to))
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

    def renew_bulk(self, by: int, number: int) -> None:
        """Makes another bulk connection to a broker in the place of that one, which delivers nothing."""
        if self.alive and by in self.deaf and self.bulk_numbers[by] == number:
            self.deaf.discard(by)
            self.bulk_numbers[by] += 1
            self.simulation.note(self.simulation.queue.now_s, self.address, "bulk.renewed", {})

    def renewed(self, answer: tuple[bool, str, int]) -> None:
        """Redis has answered whether the lease was renewed, and whose it is."""
        granted, holder, epoch = answer
        self.confirmed = self.confirmed or granted
        self.handle(Renewed(granted=granted, holder=holder, epoch=epoch))

    def later(self, delay_s: tuple[float, float], call: Callable[[], None], thread: str) -> None:
        """Runs ``call`` after a random delay, once the process is awake and if it lives; see ``in_turn``."""
        delay, now_s = self.rng.uniform(*delay_s), self.simulation.queue.now_s
        if self.simulation.plan.in_turn:
            delay += max(0.0, self.free_at_s.get(thread, now_s) - now_s)
            self.free_at_s[thread] = now_s + delay

        def when_awake() -> None:
            self.station.awake(lambda: call() if self.alive else None)

        self.simulation.queue.after(delay, when_awake)

    def order(self, done: agg.Computed) -> None:
        """A merge or a seed has begun, and replaces what its fragment was waiting for."""
        self.orders += 1
        self.ordered[done.fragment_id] = self.orders
        self.later(self.simulation.plan.merge_s, partial(self.compute, done, self.orders), "compute")

    def compute(self, done: agg.Computed, order: int) -> None:
        """A merge or a seed is in memory, if it is still the newest order of its fragment."""
        if self.ordered[done.fragment_id] != order:
            return
        self.computed[done.fragment_id] = done.digest
        self.handle(done)

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
            self.simulation.network.to_broker(self, to, message, self.sequence, broker)

    def kill(self) -> None:
        """Ends the process without a word."""
        self.alive = False
        self.alarm.arm(None)
