"""An island's process in a simulation: drives :class:`islands.protocol.core.Island` in virtual time.

It mirrors :mod:`islands.session.session` action by action; where that uses sockets and a training thread, this one
schedules the completion after a drawn delay. What is trained is plugged in (:mod:`ops.virtual.work`).
"""

from __future__ import annotations

import math
import random
from functools import partial

from broker.wire import messages as m
from islands.protocol import core as isl
from islands.protocol import events as ie
from islands.protocol.data_shares import DataShare, TrainedBatch
from islands.protocol.lockstep import Lockstep
from islands.protocol.paused import Paused
from ops.faults.kinds import Rogue
from ops.virtual.plan import IslandPlan
from ops.virtual.queue import Alarm
from ops.virtual.world import World

#: How often a process tries to connect to a broker that does not answer.
CONNECT_AGAIN_S = 0.3


class SimIsland:
    """One process of an island: the driver of :class:`islands.protocol.core.Island` in virtual time."""

    def __init__(self, simulation: World, plan: IslandPlan, life: int, paused: Paused | None = None) -> None:
        self.simulation, self.plan, self.life = simulation, plan, life
        self.name, self.address = plan.island_id, f"{plan.island_id}/{life}"
        self.clock = simulation.clock(self.name)
        self.key = plan.island_id  # stands for the public key of its connections
        self.alive = True
        self.stopped = self.pausing = False
        self.work = simulation.works.island(plan.island_id, life)
        self.step = self.tokens = self.start_step = 0
        self.ready: list[int] = []
        self.recovering = self.fresh_optimizer = False
        self.held: list[int] = []  # of a recovery, until every fragment is there: as in islands.session.exchange
        self.copies: dict[int, int] = {}
        self.watched: frozenset[int] = frozenset()
        self.lockstep: Lockstep
        self.waits = False  # for a version, in lockstep
        self.training = self.searching = False
        self.stepped_at_s = math.inf  # when its first step ended
        self.data: DataShare
        self.blocks: tuple[m.Block, ...] = ()
        self.trained: list[tuple[int, TrainedBatch]] = []  # since the last boundary
        self.gift_wanted = False  # another island needs a copy of the optimizer's state
        self.rng = random.Random(f"{simulation.plan.seed}/{self.address}")
        self.rogue = None
        if plan.manner is not None:
            self.rogue = Rogue(
                plan.manner,
                plan.misbehaves,
                simulation.works.tampered(),
                random.Random(f"rogue {self.address}"),
                honest=lambda: simulation.queue.now_s < plan.honest_until_s,
            )
        self.core = isl.Island(
            island_id=plan.island_id,
            hint="",
            nonce=f"{plan.island_id}-{life}",
            tensors=self.work.tensors,
            tokens_per_step=self.tokens_per_step,
            brokers=simulation.plan.brokers,
            paused=paused,
            several_hosts=plan.plans_every > 1,
        )
        self.arrived: dict[int, int] = {}  # fragment -> newest version, whole or made whole
        self.connection = 0
        self.bulk_line = 0  # how often the core has made its bulk connection anew
        self.deaf = False  # what comes over that is swallowed
        self.connected = simulation.plan.brokers == 1  # a single broker's connection is never looked at
        self.sequence = 0 if paused is None else paused.sequence
        self.alarm = Alarm(simulation.queue, lambda: self.handle(ie.Tick()), self.clock.true_s)
        if not self.connected:
            self.connect()

    def connect(self) -> None:
        """Leaves the broker and connects to the one of the core's choice, as soon as that answers."""
        self.connection += 1
        self.connected = self.deaf = False
        self.reach(self.connection)

    @property
    def tokens_per_step(self) -> int:
        """What it says that one inner step has, now."""
        return self.work.tokens_per_step * (self.rogue.tokens if self.rogue else 1)

    @property
    def bulk_number(self) -> int:
        """Of its present bulk connection, of all that there were."""
        return self.connection + self.bulk_line

    def renew_bulk(self, number: int) -> None:
        """Makes another bulk connection in the place of that one, which delivers nothing."""
        if self.alive and self.deaf and self.bulk_number == number:
            self.bulk_line += 1
            self.deaf = False
            self.simulation.note(self.simulation.queue.now_s, self.address, "bulk.renewed", {})

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
        cut = bool(simulation.plan.cuts) and simulation.network.is_cut(self.name, self.core.broker)
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

    def flaw_in(self, message: m.Message) -> str:
        """Says if a version is the difference to one not here, as ``HeldVersions`` of islands does."""
        if not isinstance(message, m.Version):
            return ""
        p, held = message.fragment_id, self.arrived.get(message.fragment_id, -1)
        if message.base not in (None, held):
            return f"it is the difference to version {message.base}, and version {held} is here"
        self.arrived[p] = message.fragment_version
        return ""

    def handle(self, event: ie.Event) -> None:
        """Feeds one event to the core and carries out what it answers."""
        if self.alive:
            self.perform(self.core.handle(event, self.clock.now_s))
            self.simulation.invariants.after_island_event(self)

    def perform(self, actions: list[ie.Action]) -> None:  # noqa: PLR0915  one case for each action
        """Carries out actions; what takes time ends in an event."""
        queue, plan = self.simulation.queue, self.simulation.plan
        for action in actions:
            if not self.alive:
                return  # it died of one of them
            match action:
                case ie.Send():
                    for message in self.rogue.outgoing(action.message) if self.rogue else (action.message,):
                        self.sequence += 1
                        self.simulation.network.to_broker(self, action.to, message, self.sequence)
                case ie.Connect():
                    self.connect()
                case ie.Joined():
                    self.step = self.start_step = action.start_step
                    self.tokens = action.start_tokens
                    settings = self.core.settings
                    assert settings is not None
                    self.lockstep = Lockstep(settings.recipe, action.manifest.moving)
                    self.data = DataShare.of(self.core.blocks, settings.seed, life=self.core.incarnation)
                    self.simulation.invariants.told(self.name, self.core.blocks)
                    self.work.joined(self.core, self.data)
                case ie.Watch():
                    self.watched = action.fragments
                case ie.Capture():
                    assert self.copies[action.fragment_id] == action.step, "a capture names a copy that is gone"
                    steps = self.core.fragments[action.fragment_id].capturing
                    assert steps is not None
                    payload = self.work.capture(action.fragment_id, steps, action.codec)
                    done = ie.Captured(fragment_id=action.fragment_id, payload=payload)
                    queue.after(self.rng.uniform(*plan.capture_s), partial(self.handle, done))
                case ie.Prepare():
                    self.work.prepare(action.version, action.keep, mixes=action.mixes)
                    prepared = partial(self.prepared, action.version, action.keep)
                    queue.after(self.rng.uniform(*plan.capture_s), prepared)
                case ie.EncodeSeed():
                    payload = self.work.seed(action.fragment_id)
                    seeded = ie.SeedEncoded(fragment_id=action.fragment_id, payload=payload)
                    queue.after(self.rng.uniform(*plan.capture_s), partial(self.handle, seeded))
                case ie.Fail(reason=m.Reason.RUN_ENDED):
                    self.kill()
                    self.simulation.invariants.island_killed(self)
                case ie.Fail():
                    self.simulation.invariants.island_failed(self, action)
                    self.kill()
                    self.simulation.replace_failed(self)
                case ie.RefreshOptimizer():
                    self.recovering = True
                    self.held.clear()
                case ie.CopyState():
                    self.gift_wanted = True
                    if self.waits:
                        queue.after(0.0, self.boundary)
                case ie.CheckState():
                    checked = ie.StateChecked(flaw=self.work.take_state(action.parts))
                    queue.after(self.rng.uniform(*plan.capture_s), partial(self.handle, checked))
                case ie.Settled():
                    self.simulation.note(queue.now_s, self.address, "island.settled", {"source": action.source})
                    self.begin(action.source)
                case ie.Note():
                    if action.name in ("broker.left", "link.adapted"):
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
        self.handle(ie.Prepared(fragment_id=version.fragment_id))
        if self.stopped:
            self.boundary()
        elif self.waits:
            self.boundary()
            self.go_on()

    def go_on(self) -> None:
        """Starts the next step, unless training waits for a version, as islands in lockstep do."""
        self.waits = not self.core.done and self.lockstep.holds(self.step, self.versions())
        if not self.waits:
            self.next_step()

    def versions(self) -> tuple[int, ...]:
        """The versions in the parameters."""
        return tuple(fragment.version for fragment in self.core.fragments.values())

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
        if self.core.blocks is not self.blocks:
            self.blocks = self.core.blocks
            self.data.hold(self.blocks, self.core.incarnation)
            self.simulation.invariants.told(self.name, self.blocks)
        self.work.train(self.tokens)
        taken = self.data.trained()
        self.simulation.invariants.trained(taken)
        self.trained.append((self.step, taken))
        self.stepped_at_s = min(self.stepped_at_s, self.simulation.queue.now_s)
        self.step += 1
        self.tokens += self.tokens_per_step
        self.stopped = self.core.done or self.pausing
        vitals = ie.Vitals(loss=1.0, step_time_s=self.plan.step_time_s, sync_share=0.0, bytes_up=0, bytes_down=0)
        self.core.handle(vitals, self.clock.now_s)
        self.boundary()
        if not self.stopped:
            self.go_on()

    def boundary(self) -> None:
        """Installs what is ready, then copies what is watched, as the training thread does between two steps."""
        installed, self.ready = tuple(self.ready), []
        assert self.core.manifest is not None
        together = self.stopped or self.step % self.plan.plans_every == 0
        due = (self.watched if together else frozenset()) | self.lockstep.due(self.step, self.versions())
        copied = tuple(self.core.manifest.moving if self.stopped else sorted(due))
        for p in copied:  # about to be replaced: what is put off until an installation need not stop for it
            self.work.forget(p)
        for p in installed:
            self.copies.pop(p, None)
            self.work.install(p)
        if self.fresh_optimizer and installed:
            self.fresh_optimizer = False
            self.work.refresh_optimizer()
        if self.gift_wanted:
            self.gift_wanted = False
            parts, state_bytes = self.work.copy_state()
            done = ie.StateCopied(parts=parts, state_bytes=state_bytes)
            self.simulation.queue.after(self.rng.uniform(*self.simulation.plan.capture_s), partial(self.handle, done))
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

    def pause(self) -> None:
        """The process is told to end: it stops at its next boundary, and hands over what it has."""
        self.pausing = True

    def end(self) -> Paused | None:
        """Ends the process that was told to; returns what it keeps for the next one."""
        self.handle(ie.Leaving(reason="paused", departure=m.Departure.PAUSED))
        paused = self.core.pause(self.simulation.plan.config.run_id, self.sequence)
        self.kill()
        return paused

    def kill(self) -> None:
        """Ends the process without a word."""
        self.alive = False
        self.work.end()
        self.alarm.arm(None)
