"""The processes of a simulated run: drivers of the production cores in virtual time.

Each mirrors its real counterpart (:mod:`islands.session`, :mod:`aggregator.service`, :mod:`broker.server`) action by
action; where those use sockets, threads and a disk, these schedule the completion after a drawn delay.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from aggregator import events as agg
from aggregator.core import Aggregator
from broker import messages as m
from broker.relay import Blocked, Relay, RelayConfig, Unreachable
from broker.relay import Note as RelayNote
from broker.relay import Observe as RelayObserve
from broker.relay import Received as RelayReceived
from broker.relay import Send as RelaySend
from broker.relay import Tick as RelayTick
from islands import core as isl
from islands import events as ie
from islands.shares import DataShare, Taken
from ops.virtual.queue import Alarm

if TYPE_CHECKING:
    from ops.virtual.simulation import IslandPlan, Simulation


class SimIsland:
    """One process of an island: the driver of :class:`islands.core.Island` in virtual time."""

    def __init__(self, simulation: Simulation, plan: IslandPlan, life: int) -> None:
        self.simulation, self.plan, self.life = simulation, plan, life
        self.address = f"{plan.island_id}/{life}"
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
        self.data: DataShare
        self.shares: tuple[m.Share, ...] = ()
        self.trained: list[tuple[int, Taken]] = []  # since the last boundary
        self.gift_wanted = False  # another island needs a copy of the optimizer's state
        self.rng = random.Random(f"{simulation.plan.seed}/{self.address}")
        self.core = isl.Island(
            island_id=plan.island_id,
            hint="",
            nonce=f"{plan.island_id}-{life}",
            tensors=self.work.tensors,
            tokens_per_step=self.work.tokens_per_step,
        )
        self.sequence = 0
        self.alarm = Alarm(simulation.queue, lambda: self.handle(ie.Tick()))

    def handle(self, event: ie.Event) -> None:
        """Feeds one event to the core and carries out what it answers."""
        if self.alive:
            self.perform(self.core.handle(event, self.simulation.queue.now_s))
            self.simulation.invariants.after_island_event(self)

    def perform(self, actions: list[ie.Action]) -> None:
        """Carries out actions; what takes time ends in an event."""
        queue, plan = self.simulation.queue, self.simulation.plan
        for action in actions:
            match action:
                case ie.Send():
                    self.sequence += 1
                    self.simulation.to_broker(self, action.to, action.message, self.sequence)
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
                    pass
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
        self.step += 1
        self.tokens += self.work.tokens_per_step
        self.stopped = self.core.done
        vitals = ie.Vitals(loss=1.0, step_time_s=self.plan.step_time_s, sync_share=0.0, bytes_up=0, bytes_down=0)
        self.core.handle(vitals, self.simulation.queue.now_s)
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
    """One process of the aggregator: the driver of :class:`aggregator.core.Aggregator` in virtual time."""

    def __init__(self, simulation: Simulation, life: int) -> None:
        self.simulation, self.life = simulation, life
        self.address = f"aggregator/{life}"
        self.alive = True
        self.rng = random.Random(f"{simulation.plan.seed}/{self.address}")
        disk, now_s = simulation.disk, simulation.queue.now_s
        self.core = Aggregator(simulation.plan.config, now_s=now_s, record=disk.record, commits=disk.commits)
        self.work = simulation.works.aggregator()
        if disk.manifest is not None:
            self.work.manifested(disk.manifest)
        self.ordered: dict[int, int] = {}  # number of the newest order, per fragment
        self.computed: dict[int, str] = {}  # digest last computed, per fragment
        self.orders = 0
        self.sequence = 0
        self.alarm = Alarm(simulation.queue, lambda: self.handle(agg.Tick()))
        self.perform(self.core.start(now_s))

    def handle(self, event: agg.Event) -> None:
        """Feeds one event to the core and carries out what it answers."""
        if self.alive:
            self.perform(self.core.handle(event, self.simulation.queue.now_s))
            self.simulation.invariants.after_aggregator_event(self)

    def perform(self, actions: list[agg.Action]) -> None:
        """Carries out actions; what takes time ends in an event."""
        plan = self.simulation.plan
        for action in actions:
            match action:
                case agg.Send():
                    self.send(action.to, action.message)
                case agg.Plant():
                    self.order(action.fragment_id, 0, self.work.plant(action))
                case agg.Merge():
                    self.simulation.invariants.merging(action)
                    self.order(action.fragment_id, action.fragment_version, self.work.merge(action))
                case agg.Persist():
                    self.later(plan.persist_s, partial(self.persist, action.commit))
                case agg.SaveRun():
                    self.later(plan.persist_s, partial(self.save_run, action))
                case agg.Publish():
                    self.simulation.invariants.publishing(action, self.core.run.epoch)
                    version = m.Version(
                        epoch=self.core.run.epoch,
                        fragment_id=action.fragment_id,
                        fragment_version=action.fragment_version,
                        digest=action.digest,
                        contributions=action.contributions,
                        payload=self.work.payload(action.fragment_id, action.digest),
                    )
                    self.send(m.BROKER, version)
                case agg.Note():
                    self.simulation.note(self.simulation.queue.now_s, self.address, action.name, action.fields)
                case agg.Manifested():
                    self.simulation.disk.manifest = action.manifest
                    self.work.manifested(action.manifest)
                case agg.Finished():
                    pass
        self.alarm.arm(self.core.next_deadline_s(self.simulation.queue.now_s) if self.alive else None)

    def later(self, delay_s: tuple[float, float], call: Callable[[], None]) -> None:
        """Runs ``call`` after a random delay, if the process lives then."""
        self.simulation.queue.after(self.rng.uniform(*delay_s), lambda: call() if self.alive else None)

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
        p, version = commit.fragment_id, commit.fragment_version
        calm = self.simulation.queue.now_s > self.simulation.plan.calm_after_s
        if not calm and self.rng.random() < self.simulation.plan.persist_failure:
            self.handle(agg.PersistFailed(fragment_id=p, fragment_version=version, detail="disk full"))
            return
        if self.computed[commit.fragment_id] != commit.digest:
            return  # of a seed that was given up
        self.work.persist(commit)
        self.simulation.disk.commits[commit.fragment_id] = commit
        self.simulation.invariants.persisted(commit)
        self.handle(agg.Persisted(fragment_id=p, fragment_version=version))

    def save_run(self, action: agg.SaveRun) -> None:
        """The run record reaches the disk."""
        newest = self.simulation.disk.record
        if newest is None or newest["epoch"] <= action.record["epoch"]:
            self.simulation.disk.record = dict(action.record)
        self.handle(agg.RunSaved(serial=action.serial))

    def send(self, to: str, message: m.Message) -> None:
        """Sends one message to the broker."""
        self.sequence += 1
        self.simulation.to_broker(self, to, message, self.sequence)

    def kill(self) -> None:
        """Ends the process without a word."""
        self.alive = False
        self.alarm.arm(None)


class SimBroker:
    """One process of the broker: the driver of :class:`broker.relay.Relay` in virtual time."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.alive = True
        self.relay = Relay(RelayConfig(run_id=simulation.plan.config.run_id))
        self.alarm = Alarm(simulation.queue, lambda: self.handle(RelayTick()))

    def handle(self, event: RelayReceived | RelayTick | Unreachable | Blocked) -> None:
        """Feeds one event to the relay and carries out what it answers."""
        if not self.alive:
            return
        for action in self.relay.handle(event, self.simulation.queue.now_s):
            match action:
                case RelaySend():
                    self.simulation.from_broker(self, action)
                case RelayObserve() | RelayNote():
                    pass
        self.alarm.arm(self.relay.next_deadline_s())

    def kill(self) -> None:
        """Ends the process without a word."""
        self.alive = False
        self.alarm.arm(None)
