"""Real islands in a simulated run: ``islands.join`` and its loop, over a network of messages instead of sockets.

What stands in for :class:`broker.transport.endpoint.Endpoint` is at the end. All else of the island is what runs
everywhere: the session, its exchange with the training thread, the work on arrays, checkpoints on a disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

from aggregator.merge import versions
from aggregator.merge.outer_step import OuterStep
from broker.base.errors import ConfigError, RunEnded, Unavailable
from broker.process.signals import Interrupted
from broker.routing.events import Received
from broker.transport.endpoint import Traffic
from broker.wire import messages as m
from islands import daemon
from islands.arrays.tree import named_leaves
from islands.interface.config import IslandConfig
from islands.joining import join_on
from islands.session import connections, session
from ops.faults.kinds import TamperedTensors
from ops.lab.training import TrainingAggregator
from ops.virtual.island import SimIsland
from ops.virtual.loop import Killed, VirtualTime
from ops.virtual.machine import SimMachine
from ops.virtual.plan import IslandPlan, Point, SimulationPlan
from ops.virtual.simulation import Simulation
from tests.sim.packed import packed_plan, short_plan

#: Within which a run ends, whatever befalls it.
LIMIT_S = 300.0
#: What a step adds to every element.
STEP = 0.25


class RealSimulation(Simulation):
    """A simulated run whose islands are real; brokers and aggregators are the simulation's.

    Args:
        plan: What happens.
        folder: The disk of all islands.
        job_s: Least and greatest time of a job of a thread.
        shows_state: Whether the loops show an optimizer's state.
        corrupt_at_s: When a bit changes in the memory of an island: (time, island).
        spoilt_at_s: When a step of an island goes wrong, likewise.
        task: That they train, as the daemon does; None: they count.
    """

    def __init__(
        self, plan, folder, *, job_s=(1e-4, 1e-2), shows_state=True, corrupt_at_s=(), spoilt_at_s=(), task=None
    ):
        self.task, self.kind = task, RealIsland if task is None else TaskIsland
        # The simulation's aggregators publish whole versions.
        plan = replace(plan, config=replace(plan.config, version_codec=m.Codec.F32))
        self.virtual = VirtualTime(plan.seed)
        self.folder, self.job_s, self.shows_state = folder, job_s, shows_state
        self.versions = {}  # island -> its last parameters
        super().__init__(plan, Tensors(plan))
        self.virtual._queue = self.queue  # one time for both kinds of processes
        self.virtual.at, self.virtual.after = self.queue.at, self.queue.after
        self.plague(corrupt_at_s, spoilt_at_s)

    def plague(self, corrupt_at_s, spoilt_at_s):
        """Lets islands be corrupted and spoilt at times."""
        for at_s, name in corrupt_at_s:
            self.queue.at(at_s, lambda name=name: name in self.islands and self.islands[name].corrupt())
        for at_s, name in spoilt_at_s:
            self.queue.at(at_s, lambda name=name: name in self.islands and self.islands[name].spoil())

    def run(self, limit_s):
        """Runs it; the stand-ins are there meanwhile, and nothing is left afterwards."""
        with (
            self.virtual,
            mock.patch.object(connections, "Endpoint", SimEndpoint),
            mock.patch("islands.joining.Session", WatchedSession),
        ):
            ended = super().run(limit_s)
            assert not self.virtual.failures, "\n".join(self.virtual.failures)
            return ended

    def ended(self):
        """Whether the run is over for everybody who is still there, training loops included."""
        live = [name for name, island in self.islands.items() if island.alive]
        return super().ended() and self.versions.keys() >= set(live)

    @property
    def addresses(self):
        """Of the brokers, as islands are told."""
        return [f"tcp://127.0.0.1:{7001 + 10 * place}" for place in range(self.plan.brokers)]

    def context_of(self, island):
        """Returns what the sockets of a process come from."""
        return SimContext(island)

    def start_island(self, plan: IslandPlan, paused=None):
        if plan.joins_last and plan.island_id not in self._lives and not self._others_joined(plan):
            self.queue.after(0.1, lambda: self.start_island(plan))
            return
        life = self._lives[plan.island_id] = self._lives.get(plan.island_id, -1) + 1
        island = self.kind(self, plan, life)
        self.processes[island.address] = self.islands[plan.island_id] = island
        island.machine.train(island.train)

    def _others_joined(self, plan):
        names = [other.island_id for other in self.plan.islands if other.island_id != plan.island_id]
        return all(name in self.islands and self.islands[name].session is not None for name in names)

    def leave(self, plan):
        if (island := self.islands.get(plan.island_id)) is not None:
            island.asked = "leave"

    def pause(self, plan):
        if (island := self.islands.get(plan.island_id)) is not None:
            island.asked = "pause"


class Merging(TrainingAggregator):
    """An aggregator's tensors; what any of them has ever made, by its digest."""

    def __init__(self, by_digest):
        super().__init__({}, OuterStep(1.0, 0.0))
        self._by_digest = by_digest

    def merge(self, action):
        p, version = action.fragment_id, action.fragment_version
        self._durable[p] = self._by_digest[p, version - 1]
        return self._made(super().merge(action))

    def plant(self, action):
        return self._made(super().plant(action))

    def _made(self, computed):
        self._by_digest[computed.digest] = self._pending[computed.fragment_id].state
        return computed

    def persist(self, commit):
        self._by_digest[commit.fragment_id, commit.fragment_version] = self._by_digest[commit.digest]

    def payload(self, fragment_id, digest):
        return versions.payload_of(self._tensors(fragment_id), self._by_digest[digest])


@dataclass
class Tensors:
    """Works of aggregators that merge tensors."""

    plan: SimulationPlan
    by_digest: dict = field(default_factory=dict)

    def aggregator(self):
        return Merging(self.by_digest)

    def island(self, island_id, life):
        raise NotImplementedError

    def tampered(self):
        return TamperedTensors()


class WatchedSession(session.Session):
    """The session of an island that invariants look at after every event."""

    def __init__(self, config, core, array_work, exchange, **more):
        super().__init__(config, core, array_work, exchange, **more)
        self.island, self.told = exchange.machine.island, None
        self.island.session = self

    def _catch_up(self):
        super()._catch_up()
        if self.island.alive:
            self.island.simulation.invariants.after_island_event(self.island)

    def _after(self):
        super()._after()
        if self.island.alive and self.told is not self._core.blocks:
            self.told = self._core.blocks
            self.island.simulation.invariants.told(self.island.name, self.told)

    def _trained(self):
        taken = super()._trained()
        for _, batch in taken:
            self.island.simulation.invariants.trained(batch)
        return taken


class RealIsland(SimIsland):
    """One process of an island, as the simulation and its network see it."""

    def __init__(self, simulation: RealSimulation, plan: IslandPlan, life: int) -> None:
        self.simulation, self.plan, self.life = simulation, plan, life
        self.name, self.address, self.key = plan.island_id, f"{plan.island_id}/{life}", plan.island_id
        self.clock, self.rogue = simulation.clock(self.name), None
        troubles = tuple(each for each in simulation.plan.clocks if each.process == self.name)
        process = simulation.virtual.process(self.name, troubles)
        process.job_s = lambda pool: simulation.virtual.between(self.name, f"job {pool}", *simulation.job_s)
        self.process, self.machine = process, SimMachine(process, lambda: simulation.context_of(self))
        self.machine.island = self
        self.session: WatchedSession | None = None
        self.alive, self.asked = True, ""
        self.connection, self.bulk_line = 0, 0
        self.connected = self.deaf = False
        self.endpoints: dict[m.Channel, SimEndpoint] = {}
        self.stepped_at_s = float("inf")
        self.restored, self.spoilt, self.corrupted = "", "", False

    # --- its training -----------------------------------------------------------------------------------------

    def train(self) -> None:
        """Runs lives as a supervisor would want them: what fails ends this one."""
        simulation, plan, machine = self.simulation, self.plan, self.machine
        begun = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in simulation.plan.model()}
        try:
            with join_on(
                machine,
                simulation.addresses,
                begun,
                init=lambda seed: {name: x + 1 for name, x in begun.items()},
                run=simulation.plan.config.run_id,
                island_id=plan.island_id,
                tokens_per_step=simulation.plan.tokens_per_step,
                donor_wait_s=simulation.plan.donor_wait_s,
                state_dir=simulation.folder / plan.island_id,
                checkpoint_interval_s=2.0,
                max_message_bytes=1 << 28,
            ) as island:
                self.loop(island, begun)
        except (ConfigError, RunEnded, Unavailable) as error:
            self.gave_up(error)

    def loop(self, island, begun) -> None:
        """Counts: each step adds the same to every element."""
        simulation, queue = self.simulation, self.simulation.queue
        params, (count,) = island.restore(begun, [0])
        self.restored = island.restored
        while not island.done:
            island.share.take()
            spread = self.plan.jitter * self.plan.step_time_s
            least, most = self.plan.step_time_s - spread, self.plan.step_time_s + spread
            step_s = simulation.virtual.between(self.name, "step", least, most)
            self.machine.sleep(self.plan.stepped_at_s(queue.now_s, step_s) - queue.now_s)
            params, count = {name: x + np.float32(STEP) for name, x in params.items()}, count + 1
            self.stepped_at_s = min(self.stepped_at_s, queue.now_s)
            if self.spoilt == "soon":
                self.spoilt, params = "now", {name: x * np.float32(np.nan) for name, x in params.items()}
            params = island.step(params, [count] if simulation.shows_state else None, loss=1.0)
            finite = all(np.isfinite(x).all() for x in params.values())
            assert finite or self.spoilt == "now"
            if self.spoilt == "now" and finite:
                # A version that overwrites for another reason may come first: then nobody has seen what was spoilt.
                overwritten = self.corrupted or not simulation.plan.config.keep
                assert island.reset_optimizer or overwritten, "it was not told that parameters were replaced"
                self.spoilt = "mended"
            if self.asked == "leave":
                island.leave("leaves", m.Departure.STOPPED)
                self.end(restarts=False)
                return
            if self.asked == "pause":
                island.pause(params, ([count], None))
                self.end(restarts=True)
                return
        self.ends_with(island.close(params))

    def ends_with(self, params) -> None:
        """Training has ended: by the end of the run, or because that fell silent."""
        if self.core.finished:
            self.simulation.versions[self.name] = dict(named_leaves(params))
        else:
            self.end(restarts=True)

    def corrupt(self) -> None:
        """A bit changes in a reference of this island."""
        references = self.session._array_work._references if self.alive and self.session is not None else ()
        if references and references[0].values:
            # A copy: what it has may be the bytes of a version that others have, too.
            self.corrupted = True
            references[0].values[0] = values = references[0].values[0].copy()
            values.reshape(-1).view(np.uint32)[0] ^= 1 << 20
            self.simulation.note(self.simulation.queue.now_s, self.address, "corrupted", {})

    def spoil(self) -> None:
        """The next step makes parameters that are not finite."""
        self.spoilt = "soon"
        self.simulation.note(self.simulation.queue.now_s, self.address, "spoilt", {})

    def gave_up(self, error: Exception) -> None:
        """A supervisor starts another process, unless there is one, or the run is over."""
        self.simulation.note(self.simulation.queue.now_s, self.address, "gave up", {"error": str(error)})
        self.end(restarts=not isinstance(error, RunEnded))

    def end(self, *, restarts: bool) -> None:
        """This process has ended."""
        simulation = self.simulation
        self.alive = False
        simulation.invariants.island_killed(self)
        if restarts and simulation.islands[self.name] is self:
            simulation.queue.after(self.plan.restart_s, lambda: simulation.start_island(self.plan))

    # --- as the simulation sees it ----------------------------------------------------------------------------

    @property
    def core(self):
        """That of its session; before there is one, a core that has done nothing."""
        return self.session._core if self.session is not None else NOBODY

    @property
    def training(self):
        return self.session is not None and self.stepped_at_s < float("inf")

    @property
    def step(self):
        return self.session._exchange.position.step

    @property
    def tokens(self):
        return self.session._exchange.position.tokens

    def kill(self) -> None:
        self.alive = self.connected = False
        self.process.kill()

    def line(self, connection: int) -> None:
        if connection == self.connection:
            for endpoint in self.endpoints.values():
                endpoint.changed.set()

    def flaw_in(self, message) -> str:
        return ""  # it looks by itself

    def handle(self, event) -> None:
        channel = event.envelope.message.channel
        if self.alive and channel in self.endpoints:
            self.endpoints[channel].arrived.put_nowait(event.envelope)


class TaskIsland(RealIsland):
    """An island that is the daemon's whole training of a task; a step takes as long as its pace."""

    def train(self) -> None:
        simulation, plan = self.simulation, self.plan
        config = IslandConfig(
            broker=",".join(simulation.addresses),
            run_id=simulation.plan.config.run_id,
            island_id=plan.island_id,
            pace=plan.step_time_s,
            donor_wait_s=simulation.plan.donor_wait_s,
            state_dir=simulation.folder / plan.island_id,
            checkpoint_interval_s=2.0,
            max_message_bytes=1 << 28,
        )
        try:
            self.ends_with(daemon.train(config, simulation.task, check=self.check, machine=self.machine))
        except Interrupted:
            self.end(restarts=True)
        except (ConfigError, RunEnded, Unavailable) as error:
            self.gave_up(error)

    def check(self) -> None:
        """Raises what ends this process."""
        if self.asked:
            raise Interrupted(signal.SIGTERM)


NOBODY = SimpleNamespace(joined=False, finished=False, broker=0, fragments={}, island_id="", incarnation=0)


# --- what stands in for sockets ---------------------------------------------------------------------------------


@dataclass
class SimContext:
    """A context for :class:`SimEndpoint`."""

    island: RealIsland

    def term(self) -> None:
        """There is nothing to end."""


class SimEndpoint:
    """As :class:`broker.transport.endpoint.Endpoint`, over the messages of a simulated network."""

    no_address = ""

    def __init__(self, context: SimContext, address: str, channel: m.Channel, **_: object) -> None:
        self.island, self.channel, self.traffic = context.island, channel, Traffic()
        self.changed, self.arrived = asyncio.Event(), asyncio.Queue()

    async def __aenter__(self):
        if not self.island.endpoints:
            self.island.connect()
        self.island.endpoints[self.channel] = self
        return self

    async def __aexit__(self, *_):
        del self.island.endpoints[self.channel]
        if not self.island.endpoints:
            self.island.connected = False
            self.island.connection += 1

    @property
    def carried(self):
        return self.island.simulation.network._carried(self.island, self.island.core.broker)

    async def line(self, stands: bool, timeout_s: float) -> bool:
        if self.island.connected == stands and timeout_s > 0:
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.changed.wait()
        return self.island.connected

    async def recv(self, timeout_s: float):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self.arrived.get()

    async def send(self, envelope: m.Envelope) -> bool:
        island, message = self.island, envelope.message
        simulation, broker = island.simulation, island.core.broker
        if not island.connected:
            return False
        if simulation.dies_at(island.name, Point.SEND):
            raise Killed
        network, size = simulation.network, simulation.network._size(message)
        self.traffic.bytes_up += size
        event = Received(
            channel=self.channel,
            peer=f"{island.address}#{island.line_of(self.channel)}".encode(),
            envelope=envelope,
            size_bytes=size,
            key=island.key,
        )
        for delay_s in network.arrivals_s(island, message, "up", broker):
            simulation.queue.after(delay_s, lambda: simulation.brokers[broker].handle(event))
        return True


def folder_of(tmp_path: Path, seed: int) -> Path:
    """Returns an empty disk for the islands of a seed."""
    made = tmp_path / str(seed)
    made.mkdir()
    return made


def check_final_parameters(simulation: RealSimulation) -> None:
    """Every island that has ended has the run's last versions, bit for bit."""
    for name, params in simulation.versions.items():
        for p, fragment in simulation.islands[name].core.fragments.items():
            state = simulation.works.by_digest[p, fragment.version]
            start = 0
            for tensor in simulation.disk.manifest.fragments[p]:
                expected = state.params[start : start + tensor.size].reshape(tensor.shape)
                assert np.array_equal(params[tensor.name], expected), f"{name} ends with another {tensor.name}"
                start += tensor.size


# --- seeds ------------------------------------------------------------------------------------------------------


def simulation_of(seed: int, folder: Path) -> RealSimulation:
    """Returns the run of a seed: troubles of :mod:`tests.sim.packed`, slow threads, bits that change in memory."""
    plan, rng = packed_plan(seed), random.Random(f"real {seed}")
    honest = tuple(island for island in plan.islands if island.manner is None)  # rogues are the simulation's own
    plan = replace(plan, islands=honest or short_plan().islands)
    names = [island.island_id for island in plan.islands]
    corrupt = [(rng.uniform(0.5, 4.0), rng.choice(names)) for _ in range(rng.choice([0, 0, 1, 2]))]
    job_s = rng.choice([(1e-4, 1e-2), (1e-4, 1e-2), (1e-3, 0.1), (1e-3, 0.5)])
    shows_state = rng.random() < 0.8
    spoilt = [(rng.uniform(1.0, 4.0), rng.choice(names)) for _ in range(rng.choice([0, 0, 1]))]
    happens = {"corrupt_at_s": corrupt, "spoilt_at_s": spoilt}
    return RealSimulation(plan, folder_of(folder, seed), job_s=job_s, shows_state=shows_state, **happens)


def check(seed: int, folder: Path) -> RealSimulation:
    """Runs a seed to its end; what fails names it."""
    try:
        simulation = simulation_of(seed, folder)
        assert simulation.run(LIMIT_S), "it never ended"
        simulation.invariants.at_end(simulation)
        check_final_parameters(simulation)
    except AssertionError as err:
        raise AssertionError(f"seed {seed}: {err}") from err
    return simulation


def story(seed: int, folder: Path) -> str:
    """Returns every turn of every island, and every decision, of a seed."""
    simulation, turns = simulation_of(seed, folder), []
    simulation.virtual.on_turn = lambda *turn: turns.append(str(turn))
    simulation.run(LIMIT_S)
    return "\n".join([*turns, *map(str, simulation.trace)])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        if sys.argv[1] == "--story":
            print(story(int(sys.argv[2]), Path(made)))
        else:
            for number in range(int(sys.argv[1]), int(sys.argv[-1]) + 1):
                check(number, Path(made))
