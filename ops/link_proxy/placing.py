"""Puts links between the processes of a run and its brokers and Redis: ``up --link``.

Which of them there are follows from the region file. A link to the brokers has the name of its client, and two doors at
the proxy for each broker; the client is told by ATOLL_BROKER to use these in place of the brokers' own ports. A link to
Redis is called ``NAME.redis`` and has one door, of which REDIS_URL tells. ``config.toml`` keeps the true addresses, so
that the same file still describes the run without links.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

from broker.base import sources
from broker.wire.addresses import split_tcp
from ops.link_proxy.control import SOCKET_NAME
from ops.links import region
from ops.links.region import TO_REDIS
from ops.links.wiring import HOST, Door, Wire, Wiring
from ops.processes.child_process import ProcessSpec

#: Name of the process that carries all links.
PROCESS_NAME = "links"
#: Its wiring, in the run directory.
WIRING_NAME = "links.json"
#: A client enters a broker by two: control, and bulk behind it.
DOORS_PER_BROKER = 2
#: Port of a Redis whose URL names none.
REDIS_PORT = 6379


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of a run, before their proxy runs."""

    wiring: Wiring
    run_dir: Path

    @property
    def wiring_file(self) -> Path:
        """The input file of the links process."""
        return self.run_dir / WIRING_NAME

    @property
    def control(self) -> Path:
        """The control socket of the links process."""
        return self.run_dir / SOCKET_NAME

    def process(self, command: Sequence[str], environment: Mapping[str, str]) -> ProcessSpec:
        """Returns the links process; ``command`` is this program with the word ``links``."""
        arguments = ["--plan", os.fspath(self.wiring_file), "--control", os.fspath(self.control)]
        return ProcessSpec(name=PROCESS_NAME, command=[*command, *arguments], environment=environment, stop_order=1)

    def reroute(self, specs: Iterable[ProcessSpec]) -> list[ProcessSpec]:
        """Returns the processes; those with a link connect to its ports."""
        return [self._rerouted(each) for each in specs]

    def _rerouted(self, spec: ProcessSpec) -> ProcessSpec:
        environment = dict(spec.environment)
        wire = self.wiring.wires.get(spec.name)
        if wire is not None:
            addresses = [f"tcp://{HOST}:{door.listen}" for door in wire.doors[::DOORS_PER_BROKER]]
            environment["ATOLL_BROKER"] = ",".join(addresses)
        wire = self.wiring.wires.get(spec.name + TO_REDIS)
        if wire is not None:
            url = urlsplit(environment["REDIS_URL"])
            who = url.netloc.rpartition("@")
            there = f"{who[0]}{who[1]}{HOST}:{wire.doors[0].listen}"
            environment["REDIS_URL"] = url._replace(netloc=there).geturl()
        return replace(spec, environment=environment)


def read(path: Path) -> region.Tables:
    """Returns a region file.

    Raises:
        ConfigError: It cannot be read, or something in it cannot be.
    """
    cure = "give the path of a TOML file, such as examples/links/three_regions.toml"
    return region.parse(sources.toml_text(path, field="link", cure=cure), source=str(path))


def ways(
    clients: Iterable[str], brokers: Iterable[str], *, redis_clients: Iterable[str], redis_url: str
) -> dict[str, list[tuple[str, int]]]:
    """Returns link -> its target addresses, one per port, for all links that a region file may name.

    Args:
        clients: Names of all processes that connect to the brokers.
        brokers: Control addresses, ``tcp://HOST:PORT``.
        redis_clients: Names of all processes that connect to Redis.
        redis_url: Where it is; those of a Redis without a TCP port, with TLS or behind Sentinel lead nowhere.

    Raises:
        ConfigError: A broker has no TCP address.
    """
    targets = [(host, port + i) for host, port in map(split_tcp, brokers) for i in range(DOORS_PER_BROKER)]
    found = dict.fromkeys(clients, targets)
    url = urlsplit(redis_url)
    if url.scheme == "redis" and url.hostname:
        found |= {name + TO_REDIS: [(url.hostname, url.port or REDIS_PORT)] for name in redis_clients}
    return found


def place(
    tables: region.Tables,
    ways: Mapping[str, Sequence[tuple[str, int]]],
    *,
    find_ports: Callable[[int], int],
    run_dir: Path,
) -> Links:
    """Returns the links of a run, with a local port for each target.

    Args:
        tables: Of the region file.
        ways: Of :func:`ways`.
        find_ports: Returns the first of a number of adjacent free ports.
        run_dir: The run directory.

    Raises:
        ConfigError: A glob means no link.
    """
    conditions = region.conditions(tables, list(ways))
    ports = count(find_ports(sum(len(ways[name]) for name in conditions)))
    wires = {}
    for name, condition in conditions.items():
        doors = tuple(Door(listen=next(ports), host=host, port=port) for host, port in ways[name])
        wires[name] = Wire(doors=doors, condition=condition)
    return Links(wiring=Wiring(wires=wires), run_dir=run_dir)
