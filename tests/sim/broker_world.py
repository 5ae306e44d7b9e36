"""The real broker and real endpoints in virtual time: clients that send megabytes over links that break.

Nothing is modelled but the sockets and the network below them: what runs are :func:`broker.server.serve` and
:class:`~broker.transport.endpoint.Endpoint` with all that they use. The clients are as simple as can be: islands say
what they have, hand arrays over until somebody says that they have come, and receive versions; an aggregator receives
arrays and publishes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import zlib
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np

from broker import server
from broker.base.errors import Unavailable
from broker.gateway.config import BrokerConfig
from broker.process import clocks
from broker.transport import sockets
from broker.transport.endpoint import Endpoint
from broker.transport.sockets import BULK_OPTIONS
from broker.wire import messages as m
from broker.wire.frames import verify
from broker.wire.messages import AGGREGATOR, BROKER, Channel, Envelope
from ops.virtual.loop import VirtualTime
from ops.virtual.zeromq.network import Network
from ops.virtual.zeromq.sockets import Context
from tests import relay_bench
from tests.aggregator_hand import beat
from tests.broker_bench import RUN, contribution, version

BROKER_HOST, ADDRESS = "127.0.0.1", "tcp://127.0.0.1:7001"
#: Faults begin and end within this time; then connections come back, within the next.
TROUBLE_S, REPAIR_S = 15.0, 150.0
#: Where nothing is wrong any more, an array is over there and its version back within this time, beside the link's own.
SOON_S = 2.0
#: A sender that nobody tells that its chunks have come ends the connection within this time.
IDLE_S = 15.0
#: So many arrays of each island in the end, where nothing is wrong.
LAST = 3
#: What an island hands over, it hands over again if nobody says that it has come.
AGAIN_S = 6.0


@dataclass(frozen=True)
class Plan:
    """What one seed draws."""

    islands: int
    connections: int  # of each bulk endpoint
    elements: int  # of an array, at most
    delay_s: tuple[float, float]
    bytes_per_s: float
    io_s: tuple[float, float]  # of the threads that send
    mark: int  # of the queues of bulk connections: one of 1 is full all the time
    idle_polls: float
    publishes: bool  # the aggregator; if not, it says nothing on the bulk channel but what it has received
    turn_s: tuple[float, float]
    job_s: tuple[float, float]
    faults: tuple[tuple[float, str, str, float], ...]  # (when, kind, island or aggregator or broker, for how long)

    @classmethod
    def draw(cls, seed: int) -> Plan:
        """Returns the plan of a seed."""
        rng = random.Random(seed)
        islands = rng.randint(1, 3)
        names = [*(f"i{n}" for n in range(islands)), AGGREGATOR]
        kinds = ["cut up", "cut down", "cut", "break", "freeze", "kill", "freeze broker", "restart broker"]
        faults = []
        for _ in range(rng.choice((0, 0, 1, 3, 6))):
            kind, for_s = rng.choice(kinds), rng.choice((0.05, 0.5, 3.0, 8.0))
            faults.append((rng.uniform(0.5, TROUBLE_S - for_s), kind, rng.choice(names), for_s))
        bytes_per_s = rng.choice((0.0, 20e6, 4e6))
        return cls(
            islands=islands,
            connections=rng.choice((1, 1, 2, 4)),
            elements=rng.choice((1 << 14, 1 << 16, 1 << 16, 1 << 18, 1 << 18, 1 << 18 if bytes_per_s else 1 << 20)),
            delay_s=rng.choice(((0.0002, 0.001), (0.0005, 0.005), (0.02, 0.06))),
            bytes_per_s=bytes_per_s,
            io_s=rng.choice(((1e-5, 5e-5), (1e-5, 0.05))),
            mark=rng.choice((BULK_OPTIONS.high_water_mark, 2, 1, 1)),
            idle_polls=rng.choice((0.0, 0.05, 0.5)),
            publishes=rng.random() < 0.6,
            turn_s=rng.choice(((1e-5, 1e-4), (1e-5, 1e-4), (1e-4, 3e-3))),
            job_s=rng.choice(((1e-4, 1e-2), (1e-2, 0.5))),
            faults=tuple(sorted(faults)),
        )


class NoRegistry:
    """A registry whose Redis never answers."""

    run_id, address = RUN, "nowhere"

    async def aclose(self):
        """Closes nothing."""

    def __getattr__(self, name):
        async def fails(*args, **kwargs):
            raise Unavailable("there is no Redis", definite=True)

        return fails


def array(sender: str, number: int, elements: int) -> np.ndarray:
    """An array that tells whose and which it is, of a size that follows from that."""
    rng = random.Random(f"{sender} {number}")
    values = np.zeros(max(8, int(elements * rng.choice((1.0, 0.3, 0.05, 1e-4)))), np.float32)
    values[:4] = values[-4:] = sum(sender.encode()), number, len(values), 1.0
    return values


def check_array(payload, sender, number, elements):
    """Raises AssertionError unless a payload is that array, whole."""
    expected, got = array(sender, number, elements), np.frombuffer(payload[0].data, np.float32)
    assert np.array_equal(got, expected), f"array {number} of {sender} is torn"


class World:
    """A broker, an aggregator and islands, each a process on a host of its own."""

    def __init__(self, seed: int) -> None:
        self.plan = Plan.draw(seed)
        self.virtual = VirtualTime(seed)
        self.network = Network(self.virtual)
        self.trace = 0  # a checksum of who did how much, and when
        self.virtual.on_turn = self._on_turn
        self.network.io_s, self.network.idle_polls = self.plan.io_s, self.plan.idle_polls
        self.islands = [f"i{n}" for n in range(self.plan.islands)]
        names = [AGGREGATOR, *self.islands]
        self.hosts = {BROKER: BROKER_HOST} | {name: f"127.0.0.{n}" for n, name in enumerate(names, start=2)}
        for name in names:
            way = BROKER_HOST, self.hosts[name]
            for link in (self.network.link(*way), self.network.link(*reversed(way))):
                link.delay_s, link.bytes_per_s = self.plan.delay_s, self.plan.bytes_per_s
        self.processes, self.clients = {}, {}
        self.sequences = defaultdict(int)
        self.epoch = self.fragment_version = 0
        self.pause_s = 1.0  # of an island between two arrays,
        self.ask_s = 3.0 if self.plan.faults else 30.0  # of a client between two requests
        self.published = {}  # (island, number of its array) -> the version that was made of it
        self.sent = defaultdict(int)  # island -> number of its last array
        self.acknowledged = defaultdict(dict)  # island -> number -> when it was told that it has come
        self.held = defaultdict(dict)  # island -> version -> when it came
        self.took_s = defaultdict(list)  # island -> how long its arrays took
        self.received = defaultdict(list)  # what the broker has read, by connection
        self.delivered = defaultdict(list)  # what each life of a client has received, by connection

    def _on_turn(self, *turn) -> None:
        self.trace = zlib.crc32(repr(turn).encode(), self.trace)

    # --- processes ---

    def process(self, name):
        """Starts the process of a name."""
        process = self.processes[name] = self.virtual.process(name)
        process.turn_s = self.plan.turn_s
        process.job_s = lambda pool: self.virtual.between(name, "job", *self.plan.job_s)
        context = Context(self.network, process, self.hosts[name])
        if name == BROKER:
            config = BrokerConfig(run_id=RUN, host=BROKER_HOST, port=7001, name="hub")
            registries = NoRegistry(), NoRegistry()
            main = server.serve(config, stop=asyncio.Event(), context=context, registries=registries)
        else:
            self.clients[name] = Client(self, name, context)
            main = self.clients[name].main()
        process.start(main)

    def run(self) -> None:
        """Runs the seed.

        Raises:
            AssertionError: Something was torn, came twice or in the wrong order, or traffic did not go on.
        """
        options = replace(BULK_OPTIONS, high_water_mark=self.plan.mark)
        with (
            self.virtual,
            self.network,
            mock.patch.object(server, "event_of", self._event_of(server.event_of)),
            mock.patch.object(sockets, "BULK_OPTIONS", options),
        ):
            for name, at_s in zip(self.hosts, (0.0, 0.0, *[1.0] * self.plan.islands), strict=True):
                self.virtual.at(at_s, lambda name=name: self.process(name))
            self._until(1.0)
            if self.plan.faults:
                self._trouble()
            else:  # the first answer may come before the broker knows the way
                assert self._until(20.0, dict.fromkeys(self.islands, 1)), f"nothing came: {self._state()}"
            self._well()
            self._idle()

    def _trouble(self):
        """Faults come and go; after them arrays are handed over as before."""
        for at_s, kind, name, for_s in self.plan.faults:
            self.virtual.at(at_s, lambda kind=kind, name=name, for_s=for_s: self._fault(kind, name, for_s))
        self._until(TROUBLE_S)
        wanted = {name: self.sent[name] + 2 for name in self.islands}
        assert self._until(TROUBLE_S + REPAIR_S, wanted), f"no traffic after the faults: {self._state()}"

    def _well(self):
        """Nothing is wrong: what is handed over comes soon, and nothing else wakes who waits for it."""
        self.pause_s, self.ask_s = 0.05, 30.0
        self.took_s.clear()
        wanted = {name: self.sent[name] + (LAST if self.plan.faults else 3 * LAST) for name in self.islands}
        assert self._until(self.virtual.now_s + 60.0, wanted), f"no traffic: {self._state()}"
        slowest_s = max(max(each) for each in self.took_s.values())
        assert slowest_s <= self._soon_s, f"an array and its version took {slowest_s:.1f} s: {self._state()}"

    def _idle(self):
        """Nobody says anything: no connection is ended, for none owes anything."""
        self.pause_s = 2 * IDLE_S
        self._until(self.virtual.now_s + 1.0)
        before = self._connections()
        self._until(self.virtual.now_s + IDLE_S)
        assert before == self._connections(), f"connections were ended where nothing was wrong: {self._state()}"
        assert self.plan.faults or set(before.values()) == {1}, f"there was no reason for so many: {before}"

    @property
    def _soon_s(self) -> float:
        """Within which an array and a version of it have gone over, all islands at once."""
        plan = self.plan
        link_s = 12.0 * plan.islands * plan.elements / plan.bytes_per_s if plan.bytes_per_s else 0.0
        return SOON_S + link_s + 30 * plan.delay_s[1] + 150 * plan.turn_s[1] + 4 * plan.job_s[1] + 50 * plan.io_s[1]

    def _connections(self):
        """The number of the connection of each endpoint."""
        return {
            (name, channel): self.processes[name].run(lambda each=endpoint: each.connection)
            for name, client in self.clients.items()
            for channel, endpoint in client.endpoints.items()
        }

    def _done(self, name):
        return max(self.acknowledged[name], default=0)

    def _until(self, end_s, wanted=None):
        """Runs until a time, or until each island has handed its array of that number over; returns whether it has."""

        def done():
            return wanted is not None and all(self._done(name) >= number for name, number in wanted.items())

        while not done() and self.virtual.now_s < end_s:
            self.virtual.run_until(min(end_s, self.virtual.now_s + 0.5))
            assert not self.virtual.failures, self.virtual.failures[0]
        return done()

    def _state(self):
        now_s = self.virtual.now_s
        return f"at {now_s:.1f} s {self.plan}, sent {dict(self.sent)}, done { ({n: self._done(n) for n in self.sent}) }"

    def _event_of(self, event_of):
        async def recorded(channel, taken, limits, key):
            event = await event_of(channel, taken, limits, key)
            envelope = getattr(event, "envelope", None)
            assert envelope is not None, f"the broker cannot read what came: {event}"
            self.take_note(self.received[channel, taken.peer], envelope)
            return event

        return recorded

    def take_note(self, before, envelope):
        """Holds that over one connection nothing comes twice, but for versions, and that arrays come in order."""
        number, kind = envelope.sequence, type(envelope.message)
        again = isinstance(envelope.message, m.Version) and before and before[-1] == (number, kind)
        assert again or number not in {each for each, _ in before}, f"{kind.__name__} {number} has come twice"
        earlier = [each for each, was in before if was is kind and kind in (m.Contribution, m.Version)]
        assert not earlier or earlier[-1] <= number, f"{kind.__name__} {number} comes behind {earlier[-1]}"
        before.append((number, kind))

    # --- faults ---

    def _fault(self, kind, name, for_s):
        network, host = self.network, self.hosts[name]
        if kind in ("cut", "cut up"):
            network.cut(host, BROKER_HOST, for_s)
        if kind in ("cut", "cut down"):
            network.cut(BROKER_HOST, host, for_s)
        if kind == "break":
            network.break_all(host, BROKER_HOST)
        if kind in ("freeze", "freeze broker"):
            name = BROKER if "broker" in kind else name
            network.freeze(self.hosts[name], self.processes[name], for_s)
        if kind in ("kill", "restart broker"):
            name = BROKER if "broker" in kind else name
            self.processes[name].kill()
            self.virtual.after(for_s, lambda: self._restart(name))

    def _restart(self, name):
        if not self.processes[name].alive:
            self.process(name)


class Client:
    """One life of an island or an aggregator."""

    def __init__(self, world, name, context):
        self.world, self.name, self.context = world, name, context
        self.island = name != AGGREGATOR
        self.endpoints = {
            channel: Endpoint(
                context,
                ADDRESS,
                channel,
                connections=world.plan.connections if channel is Channel.BULK else 1,
                on_unreadable=self._unreadable,
            )
            for channel in Channel
        }
        self.news = asyncio.Event()
        self.to_publish = {}
        if not self.island:
            world.epoch += 1

    async def main(self):
        """Runs until it is killed."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            for channel, endpoint in self.endpoints.items():
                await stack.enter_async_context(endpoint)
                group.create_task(self._receive(channel))
            for each in (self._speak, self._ask, self._hand_over if self.island else self._publish):
                group.create_task(each())

    def _unreadable(self, error, origin):
        raise AssertionError(f"{self.name} cannot read what came: {error}")

    async def say(self, message, to):
        """Sends a message; returns whether a connection took it."""
        self.world.sequences[self.name] += 1
        envelope = Envelope(
            run_id=RUN,
            sender=self.name,
            incarnation=int(self.island),
            sequence=self.world.sequences[self.name],
            to=to,
            message=message,
        )
        return await self.endpoints[message.channel].send(envelope)

    @property
    def newest(self):
        """The newest version that this island has."""
        return max(self.world.held[self.name], default=-1)

    async def _speak(self):
        """Says again and again who is there, on the control channel."""
        while True:
            if self.island:
                await self.say(beat(1, versions=(self.newest,)), AGGREGATOR)
            else:
                await self.say(m.Attach(shard=0, epoch=self.world.epoch, versions=(-1,), shards=1), BROKER)
            await asyncio.sleep(1.0)

    async def _ask(self):
        """The same on the bulk channel."""
        while True:
            if self.island:
                await self.say(m.Want(versions=(self.newest,)), BROKER)
            else:
                await self.say(m.AttachBulk(shard=0, epoch=self.world.epoch, shards=1), BROKER)
            await asyncio.sleep(self.world.ask_s)

    async def _hand_over(self):
        """Hands over one array after the other, each again until it has come and a version of it is back."""
        world, name = self.world, self.name
        while True:
            world.sent[name] += 1
            number, began_s = world.sent[name], clocks.monotonic()
            values = array(name, number, world.plan.elements)
            while number not in world.acknowledged[name]:
                self.news.clear()
                await self.say(contribution(values, from_step=number), AGGREGATOR)
                try:
                    async with asyncio.timeout(AGAIN_S):
                        while number not in world.acknowledged[name]:
                            await self.news.wait()
                            self.news.clear()
                except TimeoutError:
                    pass
            while world.plan.publishes and self.newest < world.published.get((name, number), self.newest + 1):
                self.news.clear()
                await self.news.wait()
            world.took_s[name].append(clocks.monotonic() - began_s)
            await asyncio.sleep(world.pause_s)

    async def _publish(self):
        """Publishes a version whenever something has come."""
        while True:
            await self.news.wait()
            self.news.clear()
            self.world.fragment_version += 1
            number = self.world.fragment_version
            self.world.published |= dict.fromkeys(self.to_publish, number)
            self.to_publish.clear()
            values = array("version", number, self.world.plan.elements)
            await self.say(version(values, number, self.world.epoch), BROKER)

    async def _receive(self, channel):
        endpoint = self.endpoints[channel]
        while True:
            envelope = await endpoint.recv(30.0)
            if envelope is None:
                continue
            verify(envelope)
            key = id(self), channel, endpoint.connection
            if envelope.sender != BROKER:
                self.world.take_note(self.world.delivered[(*key, envelope.sender)], envelope)
            match envelope.message:
                case m.Contribution() as got:
                    number = got.steps.from_step
                    check_array(got.payload, envelope.sender, number, self.world.plan.elements)
                    if self.world.plan.publishes and (envelope.sender, number) not in self.world.published:
                        self.to_publish[envelope.sender, number] = None
                        self.news.set()
                    state = relay_bench.fleet_state(epoch=self.world.epoch)
                    await self.say(replace(state, trained_tokens=number), envelope.sender)
                case m.FleetState() as got:
                    self.world.acknowledged[self.name].setdefault(got.trained_tokens, clocks.monotonic())
                    self.news.set()
                case m.Version() as got:
                    check_array(got.payload, "version", got.fragment_version, self.world.plan.elements)
                    self.world.held[self.name][got.fragment_version] = clocks.monotonic()
                    self.news.set()
                    await self.say(m.Want(versions=(self.newest,)), BROKER)
                case m.Attached() as got if got.versions[0] < self.world.fragment_version:
                    self.news.set()  # the broker has lost the newest version
                case _:
                    pass


class Log(logging.Handler):
    """Prints what the processes of a world log, with their time and name."""

    def __init__(self, virtual):
        super().__init__()
        self._virtual = virtual

    def emit(self, record):
        """Prints one record."""
        running = self._virtual.running
        print(f"{self._virtual.now_s:10.4f} {running.name if running else '':10} {record.getMessage()}")


def run(seed: int) -> World:
    """Runs a seed; raises AssertionError with its number."""
    world = World(seed)
    try:
        world.run()
    except AssertionError as err:
        raise AssertionError(f"seed {seed}: {err}") from err
    return world


if __name__ == "__main__":  # python3 -m tests.sim.broker_world SEED
    seen = World(int(sys.argv[1]))
    logging.basicConfig(level=logging.INFO, handlers=[Log(seen.virtual)])
    print(seen.plan)
    seen.run()
