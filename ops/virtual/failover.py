"""Aggregators that stand by, and the Redis that holds their lease, in virtual time.

A :class:`Station` is one aggregator's disk with the process that runs on it: a :class:`SimCandidate` while it stands
by, a :class:`~ops.virtual.aggregator.SimAggregator` while it leads. The lease is changed by the real scripts of
:mod:`aggregator.process.lease`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgpack

from aggregator.process.lease import END, GIVE_UP, RENEW, TAKE
from aggregator.standby import candidate_events as cand
from aggregator.standby.candidate import Candidate
from aggregator.state.founding import Founding
from aggregator.state.records import commit_from_map
from broker.wire import messages as m
from broker.wire.records import LeaseView
from ops.devices import lua
from ops.devices.redis_commands import Data
from ops.faults.kinds import Fault, FaultKind, Role, role_of
from ops.virtual.aggregator import SimAggregator
from ops.virtual.plan import REDIS, Point, station_names
from ops.virtual.queue import Alarm
from ops.virtual.world import Disk, World

#: How long a caller waits for a Redis that does not answer.
NO_ANSWER_S = 0.5
#: Share of calls, while troubles last, that were given up when they arrived, after later ones.
LATE_CALLS = 0.02
_KEY = "lease"
#: Share of answers that are lost on the way back, while troubles last: it was done, and nobody knows.
LOST_ANSWERS = 0.02


class SimLease:
    """Redis, as far as leading one shard goes."""

    def __init__(self, simulation: World, shard: int) -> None:
        self._simulation = simulation
        suffix = f"/{shard}" if shard else ""
        self._rng = random.Random(f"{simulation.plan.seed}/redis{suffix}")
        self._late = random.Random(f"{simulation.plan.seed}/redis{suffix}, late")
        self._clock = simulation.clock("redis")
        self._data = Data(lambda: self._clock.now_s)
        self._snapshots: dict[float, Data] = {}  # what came back of each fault that has old data come back
        for fault in simulation.plan.faults:
            if role_of(fault.targets[0]) is Role.REDIS and fault.kind is not FaultKind.STOP:
                simulation.queue.at(fault.at_s / 2, partial(self._keep, fault))
                simulation.queue.at(fault.at_s + fault.for_s, partial(self._come_back, fault))

    def call(
        self, station: int, operation: Callable[[], Any], answer: Callable[[Any], None], silent: Callable[[], None]
    ) -> None:
        """Does ``operation`` a moment from now and passes on what it returns; or tells of the silence."""
        queue, now_s = self._simulation.queue, self._simulation.queue.now_s
        faults, name = self._simulation.plan.faults, self._simulation.stations[station].name
        if self._simulation.dies_at(name, Point.SEND):
            return
        fails = any(fault.lasts(now_s) and _silences(fault, name) for fault in faults)
        if fails or self._simulation.network.is_cut(name, REDIS):
            queue.after(NO_ANSWER_S, silent)
            return
        trouble = now_s < self._simulation.plan.calm_after_s
        lost = trouble and self._rng.random() < LOST_ANSWERS
        there_s, back_s = (self._rng.uniform(0.001, 0.02) for _ in range(2))
        if trouble and self._late.random() < LATE_CALLS:
            lost, there_s = True, self._late.uniform(0.0, 3.0)

        def do() -> None:
            result = operation()
            if not lost:
                queue.after(back_s, lambda: answer(result))

        if lost:
            queue.after(NO_ANSWER_S, silent)
        queue.after(there_s, do)

    @property
    def held(self) -> LeaseView:
        """What the key has."""
        return LeaseView.of(self._data.run("HGETALL", _KEY), self._clock.now_s)

    def read(self) -> LeaseView:
        """As :meth:`aggregator.process.lease.LeaseKey.read`."""
        return self.held

    def take(self, name: str, expected_epoch: int, epoch: int, store_epoch: int, lease_s: float) -> bool:
        """As :meth:`aggregator.process.lease.LeaseKey.take`."""
        return bool(self._run(TAKE, name, expected_epoch, epoch, lease_s, store_epoch))

    def renew(
        self, name: str, epoch: int, in_sync: tuple[str, ...], number: int, *, confirmed: bool
    ) -> tuple[bool, str, int]:
        """As :meth:`aggregator.process.lease.LeaseKey.renew`."""
        sync = json.dumps(sorted({name, *in_sync}))
        granted, holder, under = self._run(RENEW, name, epoch, sync, number, int(confirmed), "[]")
        return bool(granted), holder, int(under)

    def give_up(self, name: str, epoch: int, to: str) -> None:
        """As :meth:`aggregator.process.lease.LeaseKey.give_up`."""
        self._run(GIVE_UP, name, epoch, to)

    def end(self, name: str, epoch: int) -> None:
        """As :meth:`aggregator.process.lease.LeaseKey.end`."""
        self._run(END, name, epoch)

    def _run(self, script: str, *arguments: object) -> Any:
        return lua.run(script, self._data.call, [_KEY], [str(each) for each in arguments])

    def _keep(self, fault: Fault) -> None:
        self._snapshots[fault.at_s] = self._data.kept()

    def _come_back(self, fault: Fault) -> None:
        """With nothing, or with what was there earlier."""
        if fault.kind is FaultKind.STALE:
            self._data.back_to(self._snapshots[fault.at_s])
        else:
            self._data.wipe()


def _silences(fault: Fault, station: str) -> bool:
    """Whether Redis does not answer a station while a fault lasts."""
    (target,) = fault.targets
    return role_of(target) is Role.REDIS or (fault.kind is FaultKind.CUT_REDIS and target == station)


class Station:
    """One aggregator: what is on its disk, and the process that runs there now.

    Attributes:
        number: Among all stations.
        config: Says of which shard it is.
        yields: Whether it lets another one of its shard begin.
        name: Of its store.
        process: None while it is down.
    """

    def __init__(self, simulation: World, number: int, disk: Disk) -> None:
        self.simulation, self.number, self.disk = simulation, number, disk
        shard, place = divmod(number, 1 + simulation.plan.standbys)
        self.config = replace(simulation.plan.config, shard=shard)
        self.yields = place > 0
        self.name = station_names(self.config.shards, simulation.plan.standbys)[number]
        self.process: SimAggregator | SimCandidate | None = None
        self.frozen_until_s = 0.0
        self.founding: Founding | None = None  # of whoever leads here
        self.lives = 0

    @property
    def lease(self) -> SimLease:
        """Of its shard."""
        lease: SimLease = self.simulation.leases[self.config.shard]
        return lease

    def start(self) -> None:
        """Starts a process: one that stands by, where there are others."""
        if self.simulation.plan.standbys:
            process = SimCandidate(self.simulation, self, self.lives)
            self._run(process)
            process.handle(cand.Tick())
        else:
            self.lead(None)

    def lead(self, epoch: int | None, founding: Founding | None = None) -> None:
        """Lets this station lead; ``epoch`` is that of the lease, None where there is no other."""
        self.founding = founding
        if epoch is not None:
            self.simulation.invariants.leading(self, epoch)
        leader = SimAggregator(self.simulation, self, self.lives, epoch)
        self.simulation.leaders[self.config.shard] = leader
        self._run(leader)
        leader.start()

    def _run(self, process: SimAggregator | SimCandidate) -> None:
        if self.process is not None:
            self.process.kill()
        self.process = self.simulation.processes[process.address] = process
        self.lives += 1

    def crash(self, restart_s: float) -> None:
        """Kills its process; another one starts later."""
        if self.process is not None and self.process.alive:
            self.process.kill()
            self.process = None
            self.simulation.queue.after(restart_s, self.start)

    def freeze(self, for_s: float) -> None:
        """Stops its process for a while: whatever happens to it happens then."""
        self.frozen_until_s = max(self.frozen_until_s, self.simulation.queue.now_s + for_s)

    def awake(self, call: Callable[[], None]) -> None:
        """Calls now, or when the process goes on."""
        if self.simulation.queue.now_s < self.frozen_until_s:
            self.simulation.queue.at(self.frozen_until_s, lambda: self.awake(call))
        else:
            call()


class SimCandidate:
    """A process that stands by: drives :class:`aggregator.standby.candidate.Candidate` in virtual time."""

    def __init__(self, simulation: World, station: Station, life: int) -> None:
        self.simulation, self.station = simulation, station
        self.name, self.address = station.name, f"{station.name}/{life}"
        self.clock = simulation.clock(self.name)
        self.sender = m.standing_by(station.name)
        self.key = m.AGGREGATOR
        self.connection = 0
        self.sequence = 0
        self.alive = True
        self.kept_at_s = 0.0  # when the last thing that came will be on the disk
        self.rng = random.Random(f"{simulation.plan.seed}/{self.address}")
        disk = station.disk
        self.core = Candidate(
            name=station.name,
            shard=station.config.shard,
            shards=station.config.shards,
            lease_s=simulation.plan.config.lease_s,
            yields=station.yields,
            stored={p: (commit.fragment_version, commit.digest) for p, commit in disk.commits.items()},
            record=disk.record,
            now_s=self.clock.now_s,
        )
        self.alarm = Alarm(simulation.queue, lambda: self.handle(cand.Tick()), self.clock.true_s)

    def handle(self, event: cand.CandidateEvent) -> None:
        """Feeds one event to the core and carries out what it answers."""
        if self.alive:
            self.station.awake(partial(self._handle, event))

    def _handle(self, event: cand.CandidateEvent) -> None:
        if self.alive:
            self.perform(self.core.handle(event, self.clock.now_s))

    def perform(self, actions: list[cand.CandidateAction]) -> None:
        """Carries out actions; what takes time ends in an event."""
        for action in actions:
            if not self.alive:
                return  # it died of one of them
            match action:
                case cand.SendFollow(follow=follow):
                    self.send(follow)
                    self.send(m.FollowBulk(shard=follow.shard))
                case cand.Poll():
                    lease = self.station.lease
                    self.ask(lease.read, lambda seen: cand.Polled(lease=seen))
                case cand.Take(expected_epoch=expected_epoch, epoch=epoch, store_epoch=store_epoch):
                    config = self.simulation.plan.config
                    take = self.station.lease.take
                    operation = partial(take, self.station.name, expected_epoch, epoch, store_epoch, config.lease_s)
                    self.ask(operation, lambda granted: cand.LeaseTaken(granted=granted))
                case cand.Keep(message=message):
                    now_s = self.simulation.queue.now_s
                    delay_s = self.rng.uniform(*self.simulation.plan.persist_s)
                    self.kept_at_s = max(self.kept_at_s, now_s + delay_s)  # one after the other, as they came
                    keep = partial(self.station.awake, partial(self.keep, message))
                    self.simulation.queue.at(self.kept_at_s, keep)
                case cand.Lead(epoch=epoch, founding=founding):
                    self.station.lead(epoch, founding)
                case cand.Quit():
                    self.kill()
                case _:
                    self.simulation.note(self.simulation.queue.now_s, self.address, action.name, action.fields)
        self.alarm.arm(self.core.next_deadline_s())

    def ask(self, operation: Callable[[], Any], answer: Callable[[Any], cand.CandidateEvent]) -> None:
        """Asks Redis; whatever comes of it is an event."""
        silent = partial(self.handle, cand.Unpolled(detail="no answer"))
        self.station.lease.call(self.station.number, operation, lambda got: self.handle(answer(got)), silent)

    def keep(self, message: m.Replica | m.ReplicaRun) -> None:
        """A commit or a run record reaches the disk, or does not."""
        if not self.alive or self.simulation.dies_at(self.name, Point.PERSIST):
            return
        plan, disk = self.simulation.plan, self.station.disk
        if self.simulation.queue.now_s < plan.calm_after_s and self.rng.random() < plan.persist_failure:
            self.handle(cand.Kept(message=message, problem="disk full"))
            return
        if isinstance(message, m.ReplicaRun):
            disk.record = msgpack.unpackb(message.record)
        else:
            disk.commits[message.fragment_id] = commit_from_map(msgpack.unpackb(message.commit))
        if not self.simulation.dies_at(self.name, Point.PERSISTED):
            self.handle(cand.Kept(message=message))

    def received(self, message: m.Message, broker: int) -> None:
        """Takes in what came over a broker."""
        match message:
            case m.Following():
                self.handle(cand.Heard(broker=broker, following=message))
            case m.Replica() | m.ReplicaRun():
                self.handle(cand.Arrived(message=message))
            case _:
                pass

    def send(self, message: m.Message) -> None:
        """Sends one message to each broker."""
        self.sequence += 1
        for broker in range(self.simulation.plan.brokers):
            self.simulation.network.to_broker(self, m.BROKER, message, self.sequence, broker)

    def kill(self) -> None:
        """Ends the process without a word; what its alarm brings is for nobody."""
        self.alive = False
