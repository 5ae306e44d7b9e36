"""Places the links between the processes of a run and its broker: ``up --link``.

Which clients get a link follows from the region file; each of them has two doors at the proxy for each broker, and is
told by ATOLL_BROKER to use these in place of the broker's own ports. ``config.toml`` keeps the broker's address, so
that the same file still describes the run without links.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from broker.errors import ConfigError
from broker.sockets import split_tcp
from ops.links import region
from ops.links.control import SOCKET_NAME
from ops.links.wiring import Door, Wire, Wiring
from ops.processes import ProcessSpec

#: Of the process that carries all links.
PROCESS_NAME = "links"
#: Its wiring, in the run directory.
WIRING_NAME = "links.json"
#: A client enters a broker by two: control, and bulk behind it.
DOORS_PER_BROKER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of a run, not yet carried by anybody."""

    wiring: Wiring
    run_dir: Path

    @property
    def wiring_file(self) -> Path:
        """What the links process reads."""
        return self.run_dir / WIRING_NAME

    @property
    def control(self) -> Path:
        """Where it takes orders."""
        return self.run_dir / SOCKET_NAME

    def started(self, now_s: float) -> Links:
        """Returns the links of a run that begins now: events count from here."""
        return replace(self, wiring=replace(self.wiring, began_s=now_s))

    def process(self, command: Sequence[str], environment: Mapping[str, str]) -> ProcessSpec:
        """Returns the process that carries the links: ``command`` is this program with the word ``links``."""
        arguments = ["--plan", os.fspath(self.wiring_file), "--control", os.fspath(self.control)]
        return ProcessSpec(name=PROCESS_NAME, command=[*command, *arguments], environment=environment, stop_order=1)

    def reroute(self, specs: Iterable[ProcessSpec]) -> list[ProcessSpec]:
        """Returns the processes, those with a link sent to their doors."""
        return [self._rerouted(each) for each in specs]

    def _rerouted(self, spec: ProcessSpec) -> ProcessSpec:
        wire = self.wiring.wires.get(spec.name)
        if wire is None:
            return spec
        addresses = [f"tcp://{self.wiring.host}:{door.listen}" for door in wire.doors[::DOORS_PER_BROKER]]
        return replace(spec, environment={**spec.environment, "ATOLL_BROKER": ",".join(addresses)})


def read(path: Path) -> region.Region:
    """Returns a region file.

    Raises:
        ConfigError: It cannot be read, or something in it cannot be.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as err:
        cure = "cannot be read; give the path of a TOML file, such as examples/links/three_regions.toml"
        raise ConfigError("link", str(path), f"{cure} ({err})") from err
    return region.parse(text, source=str(path))


def num_ports(described: region.Region, clients: Sequence[str], brokers: int = 1) -> int:
    """Returns how many adjacent ports the doors of a run take. Raises as :meth:`ops.links.region.Region.plans`."""
    return DOORS_PER_BROKER * brokers * len(described.plans(clients))


def place(
    described: region.Region, clients: Sequence[str], *, brokers: Sequence[str], first_port: int, run_dir: Path
) -> Links:
    """Returns the links of a run.

    Args:
        described: The region file.
        clients: Names of all processes that connect to the broker.
        brokers: Control addresses, ``tcp://HOST:PORT``.
        first_port: Of :func:`num_ports` free ones.
        run_dir: Of the run.

    Raises:
        ConfigError: A glob means no client, or a broker has no TCP address.
    """
    targets = [(host, port + i) for host, port in map(split_tcp, brokers) for i in range(DOORS_PER_BROKER)]
    wires = {}
    for index, (name, plan) in enumerate(described.plans(clients).items()):
        first = first_port + index * len(targets)
        doors = tuple(Door(listen=first + i, host=host, port=port) for i, (host, port) in enumerate(targets))
        wires[name] = Wire(doors=doors, plan=plan)
    return Links(wiring=Wiring(wires=wires), run_dir=run_dir)
