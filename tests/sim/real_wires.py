"""Real brokers, and endpoints of islands, over simulated sockets."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from broker.gateway.config import BrokerConfig
from broker.server import serve
from broker.transport.endpoint import Endpoint
from broker.wire import messages as m
from broker.wire.messages import Channel
from islands.protocol import events as ie
from ops.faults.kinds import FaultKind
from ops.virtual.island import SimIsland
from ops.virtual.loop import Process, VirtualTime
from ops.virtual.network import Network
from ops.virtual.plan import REDIS, Point, SimulationPlan, station_names
from ops.virtual.queue import ClockTrouble
from ops.virtual.zeromq.network import Network as Sockets
from ops.virtual.zeromq.sockets import Context

REDIS_URL, PORT = "redis://redis:6379", 7700


def address_of(broker: int) -> str:
    """Returns where a broker listens."""
    return f"tcp://{_host(broker)}:{PORT}"


def _host(broker: int) -> str:
    return f"127.0.1.{1 + broker}"


class Wires:
    """The simulated network of a plan: a host for each machine, by name, and links with what befalls them."""

    def __init__(self, virtual: VirtualTime, plan: SimulationPlan) -> None:
        self.virtual, self.plan = virtual, plan
        self.sockets = Sockets(virtual)
        self.sockets.__enter__()
        stations = station_names(plan.config.shards, plan.standbys)
        names = [*stations, *(island.island_id for island in plan.islands)]
        self.hosts = {name: f"127.0.2.{n}" for n, name in enumerate(names, start=1)}
        self.hosts |= {f"broker-{place}": _host(place) for place in range(plan.brokers)}
        for name in names:
            for place in range(plan.brokers):
                for link in (self._link(name, place), self._link(name, place, down=True)):
                    link.delay_s = plan.link.delay_s
        for cut in plan.cuts:
            if cut.link.broker != REDIS and cut.link.process in self.hosts:  # some plans cut an island that is none
                up, down = (cut.stops(way, cut.at_s) for way in ("up", "down"))
                self._cut_at(cut.at_s, cut.link.process, cut.link.broker, cut.for_s, up=up, down=down)
        for island in plan.islands:
            for at_s, for_s in island.outages:
                for place in range(plan.brokers):
                    self._cut_at(at_s, island.island_id, place, for_s)
        for fault in plan.faults:
            if fault.kind is FaultKind.PARTITION:
                for name in stations:
                    self._cut_at(fault.at_s, name, int(fault.targets[0].rpartition("-")[2]), fault.for_s)

    def _link(self, name: str, broker: int, *, down: bool = False) -> Any:
        ends = self.hosts[name], _host(broker)
        return self.sockets.link(*(ends[::-1] if down else ends))

    def _cut_at(self, at_s: float, name: str, broker: int, for_s: float, *, up: bool = True, down: bool = True) -> None:
        host, other = self.hosts[name], _host(broker)
        if up:
            self.virtual.at(at_s, lambda: self.sockets.cut(host, other, for_s))
        if down:
            self.virtual.at(at_s, lambda: self.sockets.cut(other, host, for_s))

    def context(self, process: Process) -> Any:
        """Returns what makes the sockets of a process."""
        return Context(self.sockets, process, self.hosts[process.name])

    def freeze(self, process: Process, for_s: float) -> None:
        """Stops a process, and its threads with it."""
        self.sockets.freeze(self.hosts[process.name], process, for_s)

    def close(self) -> None:
        """Gives the descriptors back."""
        self.sockets.__exit__()


class Server:
    """A broker's process, as a simulation sees it."""

    def __init__(self, wires: Wires, place: int, run_id: str, troubles: tuple[ClockTrouble, ...]) -> None:
        self._wires, self._frozen_until_s = wires, 0.0
        self.process = wires.virtual.process(f"broker-{place}", troubles)
        config = BrokerConfig(run_id=run_id, host=_host(place), port=PORT, name=f"hub-{place}", redis_url=REDIS_URL)
        self.process.start(serve(config, stop=asyncio.Event(), context=wires.context(self.process)))

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.alive

    @property
    def answers(self) -> bool:
        """Whether a connection can be made."""
        return self.alive and self._wires.virtual.now_s >= self._frozen_until_s

    def kill(self) -> None:
        """Ends it without a word."""
        self.process.kill()

    def freeze(self, for_s: float) -> None:
        """Stops it for a while."""
        self._frozen_until_s = self._wires.virtual.now_s + for_s
        self._wires.freeze(self.process, for_s)


class Port:
    """The endpoints of an island towards one broker, in a process of their own."""

    def __init__(self, wires: Wires, island: SimIsland) -> None:
        self.island, self.connection = island, island.connection
        self.process = wires.virtual.process(island.name)
        context, address = wires.context(self.process), address_of(island.core.broker)
        self.endpoints = {channel: Endpoint(context, address, channel) for channel in Channel}
        self.waiting: dict[Channel, asyncio.Queue[m.Envelope]] = {channel: asyncio.Queue() for channel in Channel}
        self.process.start(self.main())

    async def main(self) -> None:
        """Runs until it is killed."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            for channel, endpoint in self.endpoints.items():
                await stack.enter_async_context(endpoint)
                group.create_task(self._send(channel))
                group.create_task(self._receive(channel))

    async def _send(self, channel: Channel) -> None:
        while True:
            await self.endpoints[channel].send(await self.waiting[channel].get())

    async def _receive(self, channel: Channel) -> None:
        while True:
            envelope = await self.endpoints[channel].recv(1.0)
            if envelope is not None and self.island.alive:
                flaw, carried = self.island.flaw_in(envelope.message), self.endpoints[Channel.BULK].carried
                self.island.handle(ie.Received(envelope=envelope, flaw=flaw, carried=carried))


class OverSockets(Network):
    """What islands say goes through their ports; nobody else speaks through this."""

    def __init__(self, simulation: Any) -> None:
        super().__init__(simulation)
        self._hub = simulation
        self._ports: dict[str, Port] = {}

    def to_broker(self, process: Any, to: str, message: m.Message, sequence: int, broker: int = 0) -> None:
        """Sends what an island says."""
        if not process.alive or not process.connected or self._hub.dies_at(process.name, Point.SEND):
            return
        envelope = m.Envelope(
            run_id=self._hub.plan.config.run_id,
            sender=process.core.island_id if process.core.joined else m.joining(process.core.nonce),
            incarnation=process.core.incarnation,
            sequence=sequence,
            to=to,
            message=message,
        )
        port = self._port(process)
        port.process.call_soon(port.waiting[message.channel].put_nowait, envelope)

    def _port(self, island: SimIsland) -> Port:
        """Returns the port of an island's present life and connection."""
        port = self._ports.get(island.name)
        if port is None or port.island is not island or port.connection != island.connection:
            if port is not None:
                port.process.kill()
            port = self._ports[island.name] = Port(self._hub.wires, island)
        return port
