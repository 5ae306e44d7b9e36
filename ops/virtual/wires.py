"""The simulated network of a run: a host for each machine, links with their faults, real brokers."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from broker.gateway.config import BrokerConfig
from broker.server import serve
from ops.faults.kinds import FaultKind
from ops.virtual.loop import Process, VirtualTime
from ops.virtual.plan import BROKER, REDIS, LinkModel, SimulationPlan, station_names
from ops.virtual.queue import ClockTrouble
from ops.virtual.zeromq.network import Link, Network
from ops.virtual.zeromq.sockets import Context

REDIS_ADDRESS = ("redis", 6379)
REDIS_URL = f"redis://{REDIS_ADDRESS[0]}:{REDIS_ADDRESS[1]}"
#: Of a broker, for control; the next one is for bulk.
PORT = 7700


def address_of(broker: int) -> str:
    """Returns the address at which a broker listens."""
    return f"tcp://{_host(broker)}:{PORT}"


def _host(broker: int) -> str:
    return f"127.0.1.{1 + broker}"


class Wires:
    """The simulated network of a plan.

    Attributes:
        sockets: What carries bytes.
        hosts: Name of an island, an aggregator or a broker -> its host.
    """

    def __init__(self, virtual: VirtualTime, plan: SimulationPlan) -> None:
        self.virtual, self.plan = virtual, plan
        self.sockets = Network(virtual)
        self.sockets.__enter__()
        stations = station_names(plan.config.shards, plan.standbys)
        names = [*stations, *(island.island_id for island in plan.islands)]
        self.hosts = {name: f"127.0.2.{n}" for n, name in enumerate(names, start=1)}
        self.hosts |= {f"{BROKER}{place}": _host(place) for place in range(plan.brokers)}
        for name in stations:
            self.become(name, plan.link)
        for island in plan.islands:
            self.become(island.island_id, island.link or plan.link)
            for at_s, for_s in island.outages:
                for place in range(plan.brokers):
                    self._cut_at(at_s, island.island_id, place, for_s)
        for cut in plan.cuts:
            if cut.link.broker != REDIS and cut.link.process in self.hosts:  # some plans cut an island that is none
                up, down = (cut.stops(way, cut.at_s) for way in ("up", "down"))
                self._cut_at(cut.at_s, cut.link.process, cut.link.broker, cut.for_s, up=up, down=down)
        for at_s, name in plan.deaf:
            virtual.at(at_s, partial(self.sockets.deafen, self.hosts[name], PORT + 1))
        for at_s, name, place in plan.breaks:
            if name in self.hosts:
                virtual.at(at_s, partial(self.sockets.break_all, self.hosts[name], _host(place)))
        for fault in plan.faults:
            if fault.kind is FaultKind.PARTITION:
                for name in stations:
                    self._cut_at(fault.at_s, name, int(fault.targets[0].removeprefix(BROKER)), fault.for_s)

    def become(self, name: str, model: LinkModel) -> None:
        """Gives the links of a machine the delay and the rate of a model, in both directions."""
        for place in range(self.plan.brokers):
            for link in self.links(name, place):
                link.delay_s, link.bytes_per_s = model.delay_s, model.bytes_per_s

    def links(self, name: str, broker: int) -> tuple[Link, Link]:
        """Returns the links from a machine to a broker, and back."""
        ends = self.hosts[name], _host(broker)
        return self.sockets.link(*ends), self.sockets.link(*ends[::-1])

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


class Broker:
    """A broker's process."""

    def __init__(self, wires: Wires, place: int, troubles: tuple[ClockTrouble, ...]) -> None:
        self.process = wires.virtual.process(f"{BROKER}{place}", troubles)
        config = BrokerConfig(
            run_id=wires.plan.config.run_id, host=_host(place), port=PORT, name=f"hub-{place}", redis_url=REDIS_URL
        )
        self.process.start(serve(config, stop=asyncio.Event(), context=wires.context(self.process)))
