"""A whole run in virtual time: the production island, relay and aggregator cores behind a modelled network and disk.

One process, one seeded event queue, no sockets, no clock: the same seed and configuration give the same run, byte for
byte. Training is a *work* that is plugged in; :class:`CountingWork` only counts, so that a fleet costs microseconds per
step and every payload says exactly which steps are in it. Invariants (design, section 10) are checked after every event
by :class:`ops.invariants.Invariants`, which sees everything.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aggregator import events as agg
from aggregator.config import AggregatorConfig
from aggregator.core import Aggregator
from broker import messages as m
from broker.fragments import Kind, TensorSpec
from broker.relay import Blocked, Relay, RelayConfig, Unreachable
from broker.relay import Note as RelayNote
from broker.relay import Observe as RelayObserve
from broker.relay import Received as RelayReceived
from broker.relay import Send as RelaySend
from broker.relay import Tick as RelayTick
from islands import core as isl
from islands import events as ie
from ops.invariants import Invariants
from ops.virtual import Alarm, EventQueue, LinkModel


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandPlan:
    """One island of a simulated fleet.

    Attributes:
        step_time_s: Mean seconds per inner step.
        jitter: Relative spread of step times.
        joins_at_s: When its first process starts.
        crashes_at_s: When its process is killed; it comes back ``restart_s`` later.
        leaves_at_s: When it ends on purpose; None for never.
    """

    island_id: str
    step_time_s: float
    jitter: float = 0.1
    joins_at_s: float = 0.0
    crashes_at_s: tuple[float, ...] = ()
    restart_s: float = 1.0
    leaves_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    """Everything that determines a simulated run, with its seed."""

    seed: int
    islands: tuple[IslandPlan, ...]
    config: AggregatorConfig
    link: LinkModel = LinkModel()
    merge_s: tuple[float, float] = (0.001, 0.01)
    persist_s: tuple[float, float] = (0.001, 0.02)
    persist_failure: float = 0.0
    capture_s: tuple[float, float] = (0.0005, 0.005)
    aggregator_crashes_at_s: tuple[float, ...] = ()
    broker_crashes_at_s: tuple[float, ...] = ()
    restart_s: float = 0.5
    calm_after_s: float = 1e9
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


class SimIsland:
    """One process of an island: the driver of :class:`islands.core.Island` in virtual time."""

    def __init__(self, simulation: Simulation, plan: IslandPlan, life: int) -> None:
        self.simulation, self.plan, self.life = simulation, plan, life
        self.address = f"{plan.island_id}/{life}"
        self.alive = True
        self.stopped = False
        self.tokens_per_step = simulation.plan.tokens_per_step
        self.step = self.tokens = self.start_step = 0
        self.ready: list[int] = []
        self.copies: dict[int, int] = {}
        self.watched: frozenset[int] = frozenset()
        self.training = False
        self.rng = random.Random(f"{simulation.plan.seed}/{self.address}")
        self.core = isl.Island(
            island_id=plan.island_id,
            hint="",
            nonce=f"{plan.island_id}-{life}",
            tensors=simulation.plan.model(),
            tokens_per_step=self.tokens_per_step,
        )
        self.sequence = 0
        self.alarm = Alarm(simulation.queue, lambda: self.handle(ie.Tick()))
        self.perform(self.core.start(simulation.queue.now_s))

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
                case ie.Watch():
                    self.watched = action.fragments
                case ie.Capture():
                    assert self.copies[action.fragment_id] == action.step, "a capture names a copy that is gone"
                    steps = self.core.fragments[action.fragment_id].capturing
                    payload = (self.core.island_id, self.core.incarnation, action.fragment_id, steps)
                    done = ie.Captured(fragment_id=action.fragment_id, payload=payload)
                    queue.after(self.rng.uniform(*plan.capture_s), lambda e=done: self.handle(e))  # type: ignore[misc]
                case ie.Prepare():
                    queue.after(self.rng.uniform(*plan.capture_s), lambda v=action.version: self.prepared(v))  # type: ignore[misc]
                case ie.EncodeSeed():
                    seeded = ie.SeedEncoded(fragment_id=action.fragment_id, payload=self.address)
                    queue.after(self.rng.uniform(*plan.capture_s), lambda e=seeded: self.handle(e))  # type: ignore[misc]
                case ie.Fail():
                    self.simulation.invariants.island_failed(self, action)
                    self.kill()
                case ie.RefreshOptimizer() | ie.Note():
                    pass
        if self.core.startable and not self.training and self.alive:
            self.training = True
            self.boundary()
            self.next_step()
        self.alarm.arm(self.core.next_deadline_s() if self.alive else None)

    def prepared(self, version: m.Version) -> None:
        """A version is ready to be installed."""
        if not self.alive:
            return
        self.ready.append(version.fragment_id)
        self.handle(ie.Prepared(fragment_id=version.fragment_id, fragment_version=version.fragment_version))
        if self.stopped:
            self.boundary()

    def next_step(self) -> None:
        """Starts an inner step."""
        spread = self.plan.jitter * self.plan.step_time_s
        step_s = max(1e-3, self.rng.uniform(self.plan.step_time_s - spread, self.plan.step_time_s + spread))
        self.simulation.queue.after(step_s, self.stepped)

    def stepped(self) -> None:
        """An inner step ended."""
        if not self.alive:
            return
        self.step += 1
        self.tokens += self.tokens_per_step
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
        assert self.core.manifest is not None
        wanted = self.core.manifest.moving if self.stopped else sorted(self.watched)
        busy = {p for p, f in self.core.fragments.items() if f.stage is isl.Stage.CAPTURING}
        copied = tuple(p for p in wanted if p not in busy)
        self.copies.update(dict.fromkeys(copied, self.step))
        self.handle(
            ie.Boundary(
                inner_step=self.step, tokens=self.tokens, installed=installed, copied=copied, stopped=self.stopped
            )
        )

    def kill(self) -> None:
        """Ends the process without a word."""
        self.alive = False
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
        self.computed: dict[int, str] = {}  # digest last computed, per fragment
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
        for action in actions:
            match action:
                case agg.Send():
                    self.send(action.to, action.message)
                case agg.Plant():
                    digest = f"seed {action.fragment_id} of {action.payload}"
                    self.later(self.simulation.plan.merge_s, lambda a=action, d=digest: self.compute(a.fragment_id, 0, d))
                case agg.Merge():
                    digest = f"{action.fragment_id}.{action.fragment_version}: " + " ".join(
                        str(part.payload) for part in action.parts
                    )
                    self.simulation.invariants.merging(action)
                    self.later(
                        self.simulation.plan.merge_s,
                        lambda a=action, d=digest: self.compute(a.fragment_id, a.fragment_version, d),  # type: ignore[misc]
                    )
                case agg.Persist():
                    self.later(self.simulation.plan.persist_s, lambda c=action.commit: self.persist(c))  # type: ignore[misc]
                case agg.SaveRun():
                    self.later(self.simulation.plan.persist_s, lambda a=action: self.save_run(a))  # type: ignore[misc]
                case agg.Publish():
                    self.simulation.invariants.publishing(action, self.core.run.epoch)
                    version = m.Version(
                        epoch=self.core.run.epoch,
                        fragment_id=action.fragment_id,
                        fragment_version=action.fragment_version,
                        digest=action.digest,
                        contributions=action.contributions,
                        payload=action.digest,
                    )
                    self.send(m.BROKER, version)
                case agg.Note():
                    self.simulation.note(self.address, action.name, action.fields)
                case agg.Manifested() | agg.Finished():
                    pass
        self.alarm.arm(self.core.next_deadline_s(self.simulation.queue.now_s) if self.alive else None)

    def later(self, delay_s: tuple[float, float], call: Callable[[], None]) -> None:
        """Runs ``call`` after a random delay, if the process lives then."""
        self.simulation.queue.after(self.rng.uniform(*delay_s), lambda: call() if self.alive else None)

    def compute(self, fragment_id: int, fragment_version: int, digest: str) -> None:
        """A merge is in memory."""
        self.computed[fragment_id] = digest
        self.handle(agg.Computed(fragment_id=fragment_id, fragment_version=fragment_version, digest=digest))

    def persist(self, commit: agg.Commit) -> None:
        """A commit reaches the disk, or does not."""
        keys = {"fragment_id": commit.fragment_id, "fragment_version": commit.fragment_version}
        calm = self.simulation.queue.now_s > self.simulation.plan.calm_after_s
        if not calm and self.rng.random() < self.simulation.plan.persist_failure:
            self.handle(agg.PersistFailed(**keys, detail="disk full"))  # type: ignore[arg-type]
            return
        assert commit.digest == self.computed[commit.fragment_id]
        self.simulation.disk.commits[commit.fragment_id] = commit
        self.simulation.invariants.persisted(commit)
        self.handle(agg.Persisted(**keys))  # type: ignore[arg-type]

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


class Simulation:
    """One run of a :class:`SimulationPlan`."""

    def __init__(self, plan: SimulationPlan) -> None:
        self.plan = plan
        self.queue = EventQueue()
        self.rng = random.Random(plan.seed)
        self.disk = Disk()
        self.invariants = Invariants(plan.tokens_per_step)
        self.trace: list[tuple[float, str, str, str]] = []
        self.broker = SimBroker(self)
        self.aggregator = SimAggregator(self, 0)
        self.islands: dict[str, SimIsland] = {}
        self.processes: dict[str, SimIsland | SimAggregator] = {self.aggregator.address: self.aggregator}
        self._lives: dict[str, int] = {}
        for island in plan.islands:
            self.queue.at(island.joins_at_s, lambda i=island: self.start_island(i))  # type: ignore[misc]
            for at_s in island.crashes_at_s:
                self.queue.at(at_s, lambda i=island: self.crash_island(i))  # type: ignore[misc]
            if island.leaves_at_s is not None:
                self.queue.at(island.leaves_at_s, lambda i=island: self.leave(i))  # type: ignore[misc]
        for at_s in plan.aggregator_crashes_at_s:
            self.queue.at(at_s, self.crash_aggregator)
        for at_s in plan.broker_crashes_at_s:
            self.queue.at(at_s, self.crash_broker)

    def run(self, limit_s: float) -> bool:
        """Runs until every island has finished, at most ``limit_s`` of virtual time; returns whether it ended."""
        return self.queue.run_until(limit_s, self.ended)

    def ended(self) -> bool:
        """Whether the run is over for everybody who is still there."""
        live = [i for i in self.islands.values() if i.alive]
        return self.aggregator.core.run.phase is m.Phase.ENDED and bool(live) and all(i.core.finished for i in live)

    # --- faults -----------------------------------------------------------------------------------------------

    def start_island(self, plan: IslandPlan) -> None:
        """Starts a process of an island."""
        life = self._lives[plan.island_id] = self._lives.get(plan.island_id, -1) + 1
        # Announced before its first action: the address must be known when the answer arrives.
        island = SimIsland.__new__(SimIsland)
        self.processes[f"{plan.island_id}/{life}"] = island
        self.islands[plan.island_id] = island
        island.__init__(self, plan, life)  # type: ignore[misc]

    def crash_island(self, plan: IslandPlan) -> None:
        """Kills an island's process; another one starts later."""
        island = self.islands.get(plan.island_id)
        if island is not None and island.alive:
            island.kill()
            self.invariants.island_killed(island)
            self.queue.after(plan.restart_s, lambda: self.start_island(plan))

    def leave(self, plan: IslandPlan) -> None:
        """Lets an island end on purpose."""
        island = self.islands.get(plan.island_id)
        if island is not None and island.alive and island.core.joined:
            island.handle(ie.Leaving(reason="leaves"))
            island.kill()
            self.invariants.island_killed(island)

    def crash_aggregator(self) -> None:
        """Kills the aggregator; its successor reads the same disk."""
        if not self.aggregator.alive:
            return
        self.aggregator.kill()
        life = self.aggregator.life + 1

        def restart() -> None:
            self.aggregator = SimAggregator(self, life)
            self.processes[self.aggregator.address] = self.aggregator

        self.queue.after(self.plan.restart_s, restart)

    def crash_broker(self) -> None:
        """Kills the broker; the next one knows nothing."""
        if not self.broker.alive:
            return
        self.broker.kill()

        def restart() -> None:
            self.broker = SimBroker(self)

        self.queue.after(self.plan.restart_s, restart)

    # --- the network ------------------------------------------------------------------------------------------

    def link(self) -> LinkModel:
        """The links as they are now: faultless once the plan's troubles are over."""
        if self.queue.now_s <= self.plan.calm_after_s:
            return self.plan.link
        return LinkModel(delay_s=self.plan.link.delay_s, bytes_per_s=self.plan.link.bytes_per_s)

    def to_broker(self, process: SimIsland | SimAggregator, to: str, message: m.Message, sequence: int) -> None:
        """Carries a message from a process to the broker."""
        sender, incarnation = m.AGGREGATOR, 0
        if isinstance(process, SimIsland):
            incarnation = process.core.incarnation
            sender = process.core.island_id if process.core.joined else m.joining(process.core.nonce)
        envelope = m.Envelope(
            run_id=self.plan.config.run_id,
            sender=sender,
            incarnation=incarnation,
            sequence=sequence,
            to=to,
            message=message,
        )
        event = RelayReceived(
            channel=message.channel, peer=process.address.encode(), envelope=envelope, size_bytes=self.size(message)
        )
        for delay_s in self.link().arrivals_s(self.rng, event.size_bytes):
            self.queue.after(delay_s, lambda: self.broker.handle(event))

    def from_broker(self, broker: SimBroker, action: RelaySend) -> None:
        """Carries a message from the broker to a process, or says that there is none."""
        process = self.processes.get(action.peer.decode())
        if process is None or not process.alive:
            gone = Unreachable(
                channel=action.channel, peer=action.peer, envelope=action.envelope, size_bytes=action.size_bytes
            )
            self.queue.after(0.0, lambda: broker.handle(gone))
            return
        for delay_s in self.link().arrivals_s(self.rng, action.size_bytes):
            self.queue.after(delay_s, lambda: self.deliver(process, action.envelope))

    def deliver(self, process: SimIsland | SimAggregator, envelope: m.Envelope) -> None:
        """Hands a message to a process."""
        if isinstance(process, SimIsland):
            process.handle(ie.Received(envelope=envelope))
        else:
            process.handle(agg.Received(envelope=envelope, payload_bytes=self.size(envelope.message)))

    def size(self, message: m.Message) -> int:
        """Modelled bytes of a message."""
        if isinstance(message, m.Contribution | m.Version | m.Seed):
            manifest = self.aggregator.core.run.manifest
            return 4 * manifest.sizes[message.fragment_id] if manifest is not None else 0
        return 200

    def note(self, who: str, name: str, fields: Any) -> None:
        """Keeps a decision for whoever reads the story of a failed seed."""
        self.trace.append((round(self.queue.now_s, 6), who, name, str(dict(fields))))
