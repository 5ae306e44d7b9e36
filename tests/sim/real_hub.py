"""Simulated runs whose aggregators are the real process: its loop, store, workers and lease in virtual time.

So are brokers, and endpoints over simulated sockets (:mod:`tests.sim.real_wires`). Islands are those of
:mod:`ops.virtual.simulation`, and hand over real tensors.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from aggregator.interface import events as agg
from aggregator.rounds.core import Aggregator
from broker.transport.endpoint import Endpoint
from broker.wire import messages as m
from broker.wire.records import LeaseView
from broker.wire.tensors import decode_tensor, encode_tensor
from ops.devices import disk as disks
from ops.devices.redis import WAY_S, Redis
from ops.devices.station import Station
from ops.faults.kinds import FaultKind, Role, TamperedTensors, role_of
from ops.virtual import work
from ops.virtual.loop import EPOCH_S, Killed, VirtualTime
from ops.virtual.network import Network
from ops.virtual.plan import REDIS, Point, SimulationPlan, station_names
from ops.virtual.queue import ClockTrouble
from ops.virtual.simulation import Simulation
from tests.sim.real_wires import REDIS_URL, OverSockets, Server, Wires, address_of

#: In memory, where there is such a place: a run has hundreds of flushes.
ROOT = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
REDIS_ADDRESS = ("redis", 6379)
#: Of the ways to Redis and back, so many take so long, in seconds.
LATE, LATE_S = 0.02, (0.5, 3.0)
#: Parameters and norms: every honest step is 1 long, in the same direction.
SEED_NORM = work.SEED_NORM


# --- islands hand over real tensors -----------------------------------------------------------------------------------


class TensorIsland(work.CountingIsland):
    """Counts steps, and hands them over as tensors whose length says how many they are."""

    def _filled(self, fragment_id: int, length: float, codec: m.Codec) -> m.Payload:
        assert self.core is not None
        assert self.core.manifest is not None
        tensors = self.core.manifest.fragments[fragment_id]
        each = length / np.sqrt(sum(tensor.size for tensor in tensors))
        return tuple(encode_tensor(np.full(tensor.shape, each, np.float32), codec) for tensor in tensors)

    def seed(self, fragment_id: int) -> m.Payload:
        return self._filled(fragment_id, SEED_NORM, m.Codec.F32)

    def capture(self, fragment_id: int, steps: Any, codec: m.Codec) -> m.Payload:
        return self._filled(fragment_id, float(steps.steps), codec)

    def copy_state(self) -> tuple[tuple[m.Payload, ...], int]:
        said = [np.array([self.optimizer_steps, part], np.float32) for part in range(work.STATE_PARTS)]
        return tuple((encode_tensor(each, m.Codec.F32),) for each in said), super().copy_state()[1]

    def take_state(self, parts: tuple[m.Payload, ...]) -> str:
        said = [decode_tensor(payload[0]) for payload in parts]
        claims = [work.StateClaim(island_id="", steps=int(steps), part=int(part)) for steps, part in said]
        return super().take_state(tuple(claims))


class Tensors(work.Counting):
    """Makes works that hand over tensors."""

    def island(self, island_id: str, life: int) -> work.IslandWork:
        return TensorIsland(f"{island_id}/{life}", self.tensors, self.tokens_per_step)

    def tampered(self) -> Any:
        return TamperedTensors()


# --- the run ----------------------------------------------------------------------------------------------------------


class Post:
    """A station as the simulation's faults and invariants see it."""

    def __init__(self, simulation: RealHub, number: int, disk: Any) -> None:
        shard, place = divmod(number, 1 + simulation.plan.standbys)
        plan, self.simulation, self.number = simulation.plan, simulation, number
        self.name = station_names(plan.config.shards, plan.standbys)[number]
        self.config = replace(
            plan.config,
            shard=shard,
            standby=place > 0,
            redis_url=REDIS_URL,
            broker=",".join(map(address_of, range(plan.brokers))),
        )
        kept = simulation.disks.add(self.name, simulation.folder / self.name)
        self.machine = Station(
            simulation.virtual,
            self.name,
            self.config,
            kept,
            context=simulation.make_context,
            watcher=simulation,
            clocks=simulation.troubles_of(self.name),
        )
        self.machine.restart_s = plan.restart_s
        self.machine.job_s = self._job_s
        kept.before, kept.after = self._before, self._after
        self.persisting: dict[tuple[int, int], agg.Commit] = {}
        self.replication: Any = None
        self.deaf: set[int] = set()
        self.address = ""
        self.epoch = 0

    def _job_s(self, pool: str) -> float:
        plan, virtual = self.simulation.plan, self.simulation.virtual
        times = {"disk": plan.persist_s, "compute": plan.merge_s}.get(pool, plan.capture_s)
        return virtual.between(self.name, f"job {pool}", *times)

    def _before(self, change: str) -> None:
        simulation = self.simulation
        if not self.machine.alive or simulation.dies_at(self.name, Point.PERSIST):
            raise Killed
        calm = simulation.queue.now_s > simulation.plan.calm_after_s
        share = 0.0 if calm else simulation.plan.persist_failure / 4  # a commit has several writes
        if change == "write" and share and simulation.virtual.draw(self.name, "full") < share:
            raise disks.full()

    def _after(self, change: str) -> None:
        if change == "fsync" and self.simulation.dies_at(self.name, Point.PERSISTED):
            raise Killed

    # what ops.virtual.simulation and ops.virtual.invariants ask of stations, and of who leads

    @property
    def core(self) -> Aggregator:
        assert self.machine.core is not None
        return self.machine.core

    @property
    def disk(self) -> Any:
        return SimpleNamespace(commits=self.machine.commits(), manifest=None)

    @property
    def lease(self) -> Any:
        key = f"atoll:{self.config.run_id}:lease:{self.config.shard}"
        return SimpleNamespace(held=LeaseView.of(self.simulation.redis.data.keys.get(key, {}), 0.0))

    @property
    def station(self) -> Post:
        return self

    @property
    def process(self) -> Any:
        return self.machine

    def start(self) -> None:
        self.machine.start()

    def crash(self, restart_s: float, *, power: bool = False) -> None:
        self.machine.crash(restart_s, power=power)

    def freeze(self, for_s: float) -> None:
        if self.machine.process is not None:
            self.simulation.wires.freeze(self.machine.process, for_s)


class RealHub(Simulation):
    """One run of a plan with real aggregators; to be used in a ``with`` statement."""

    def __init__(self, plan: SimulationPlan) -> None:
        self.plan = plan
        self.folder = Path(tempfile.mkdtemp(prefix="atoll-seed-", dir=ROOT))
        self.virtual = VirtualTime(plan.seed)
        self.virtual.__enter__()
        self.disks = disks.Disks(self.virtual).__enter__()
        self.wires = Wires(self.virtual, plan)
        self._sends = mock.patch.object(Endpoint, "send", self._sending(Endpoint.send))
        self._sends.start()
        clock = self._redis_clock
        self.redis = Redis(self.virtual, lambda: EPOCH_S + clock())
        self.redis.way_s = self._way_to_redis_s
        self.virtual.servers[REDIS_ADDRESS] = self.redis.accept
        self.posts: dict[str, Post] = {}
        super().__init__(plan, Tensors(plan.model(), plan.tokens_per_step), network=lambda _: self.make_network())

    def _way_to_redis_s(self, name: str) -> float:
        """While troubles last, some requests come long after they were given up, and some answers never."""
        late = self.virtual.now_s < self.plan.calm_after_s and self.virtual.draw(name, "late") < LATE
        return self.virtual.between(name, "way to redis", *(LATE_S if late else WAY_S))

    def _redis_clock(self) -> float:
        return self.clock("redis").now_s

    def close(self) -> None:
        self.virtual.__exit__(None, None, None)
        for each in self.stations:
            each.machine.disk.close_files()
        self.disks.__exit__(None, None, None)
        self._sends.stop()
        self.wires.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RealHub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- how a simulation is made -------------------------------------------------------------------------------------

    def make_network(self) -> Network:
        """Returns what carries the islands' messages."""
        return OverSockets(self)

    def make_broker(self, place: int) -> Any:
        """Returns a new process of a broker."""
        return Server(self.wires, place, self.plan.config.run_id, self.troubles_of(f"broker-{place}"))

    def make_context(self, station: Station, life: int) -> Any:
        """Returns what makes the sockets of an aggregator's life."""
        assert station.process is not None
        return self.wires.context(station.process)

    def _sending(self, send: Callable[..., Any]) -> Callable[..., Any]:
        async def sending(endpoint: Endpoint, envelope: m.Envelope, **how: Any) -> bool:
            process = self.virtual.running
            if process is not None and process.name in self.posts and self.dies_at(process.name, Point.SEND):
                raise Killed
            sent: bool = await send(endpoint, envelope, **how)
            return sent

        return sending

    def troubles_of(self, name: str) -> tuple[ClockTrouble, ...]:
        """Returns what is wrong with the clock of a machine."""
        return tuple(each for each in self.plan.clocks if each.process == name)

    def make_queue(self) -> Any:
        return self.virtual._queue

    def make_leases(self) -> list[Any]:
        for fault in self.plan.faults:
            role, kind = role_of(fault.targets[0]), fault.kind
            end_s = fault.at_s + fault.for_s
            if role is Role.REDIS and kind is FaultKind.STOP:
                self.queue.at(fault.at_s, lambda end_s=end_s: setattr(self.redis, "silent_until_s", end_s))
            elif role is Role.REDIS:
                self.queue.at(fault.at_s, self._redis_dies)
                if kind is FaultKind.STALE:
                    self.queue.at(fault.at_s / 2, self._redis_snapshot)
                self.queue.at(end_s, lambda kind=kind: self._redis_comes_back(kind))
            elif kind is FaultKind.CUT_REDIS:
                self.queue.at(fault.at_s, lambda name=fault.targets[0], end_s=end_s: self._cut(name, end_s))
        for cut in self.plan.cuts:
            if cut.link.broker == REDIS:
                end_s = cut.at_s + cut.for_s
                self.queue.at(cut.at_s, lambda name=cut.link.process, end_s=end_s: self._cut(name, end_s))
        return []

    def make_station(self, number: int) -> Any:
        post = Post(self, number, None)
        self.posts[post.name] = post
        return post

    def cut_power(self, for_s: float) -> None:
        for post in self.posts.values():
            post.crash(for_s, power=True)
        super().cut_power(for_s)

    def _cut(self, name: str, end_s: float) -> None:
        self.redis.cut_until_s[name] = max(end_s, self.redis.cut_until_s.get(name, 0.0))

    def _redis_dies(self) -> None:
        self.redis.down = True
        self.redis.restart()

    def _redis_snapshot(self) -> None:
        self.snapshot = self.redis.data.kept()

    def _redis_comes_back(self, kind: FaultKind) -> None:
        self.redis.down = False
        if kind is FaultKind.STALE:
            self.redis.data.back_to(self.snapshot)
        else:
            self.redis.data.wipe()
            if not any(post.machine.alive for post in self.posts.values()):
                self.invariants.power_lost()  # an outage by another name

    # --- what leaders decide ------------------------------------------------------------------------------------------

    def leads(self, station: Station, core: Aggregator) -> None:
        post = self.posts[station.name]
        post.address = f"{station.name}/{station.lives}.{core.run.epoch}"
        post.persisting.clear()
        post.replication = SimpleNamespace(epoch=core.run.epoch) if self.plan.standbys else None
        self.note(self.queue.now_s, post.address, "leads", {"epoch": core.run.epoch})
        if self.plan.standbys:
            self.invariants.leading(post, core.run.epoch)
        self.leaders[post.config.shard] = post  # type: ignore[assignment]

    def hears(self, station: Station, event: agg.Event) -> None:
        if isinstance(event, agg.Persisted):
            post = self.posts[station.name]
            self.invariants.persisted(post.persisting[event.fragment_id, event.fragment_version])

    def decides(self, station: Station, actions: Sequence[agg.Action]) -> None:
        post = self.posts[station.name]
        shard, epoch = post.config.shard, post.core.run.epoch
        for action in actions:
            match action:
                case agg.Send():
                    self.invariants.speaking(post.address, shard, epoch)
                case agg.Merge():
                    self.invariants.merging(action)
                case agg.Persist(commit=commit):
                    post.persisting[commit.fragment_id, commit.fragment_version] = commit
                case agg.Publish():
                    self.invariants.publishing(action, epoch, shard)
                    self.invariants.replicated(post, action)  # type: ignore[arg-type]
                case agg.Note():
                    self.note(self.queue.now_s, post.address, action.name, action.fields)
        self.invariants.after_aggregator_event(post)  # type: ignore[arg-type]


class Doomed(RealHub):
    """A run in which whoever leads dies soon, until it is calm."""

    def leads(self, station: Station, core: Aggregator) -> None:
        super().leads(station, core)
        if self.queue.now_s < self.plan.calm_after_s:
            lives_s = self.virtual.between(station.name, "lives", 0.2, 2.0)
            self.queue.after(lives_s, lambda: station.crash(0.3))


def run(plan: SimulationPlan, limit_s: float, kind: type[RealHub] = RealHub) -> RealHub:
    """Runs a plan to its end; what is wrong carries the last decisions of the run."""
    with kind(plan) as simulation:
        try:
            ended = simulation.run(limit_s)
            assert not simulation.virtual.failures, simulation.virtual.failures[0]
            assert ended, f"not ended after {limit_s} virtual seconds"
            simulation.invariants.at_end(simulation)
        except AssertionError as err:
            story = "\n".join(
                f"{at:10.4f} {who} {name} {facts}"[:300] for at, who, name, facts in simulation.trace[-40:]
            )
            troubles = [each for post in simulation.posts.values() for each in post.machine.troubles]
            raise AssertionError(f"{err}\n{plan}\n{troubles}\n...\n{story}") from err
    return simulation
