"""The systems as processes: a coordinator where there is one, and two peers in one training loop."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.fleet import ROOT_ENVIRONMENT, RUN, check, hub_command, peak_bytes, written
from benchmarks.regions.network import Network
from broker.base.errors import Unavailable
from broker.gateway.config import BrokerConfig
from ops.processes.child_process import ProcessSpec, last_lines
from ops.processes.cluster import LocalCluster
from ops.processes.numeric import one_thread_environment
from ops.processes.supervision import ONE_LIFE
from ops.run.daemons import ON_CPU, our_environment

PORT = 29_510
START_WITHIN_S = 150.0
POLL_S = 0.1
PEERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One system of the comparison, in one setting.

    Attributes:
        name: In the table.
        package: Whose environment it needs; empty for Atoll.
        fragments: Of the model.
        delay: Steps between sending a fragment and adopting it, where that is a setting.
        coordinators: Names of the processes that coordinate.
    """

    name: str
    package: str = ""
    fragments: int = 1
    delay: int = 0
    coordinators: tuple[str, ...] = ()


SYSTEMS = (
    System(name="atoll", fragments=8, coordinators=("broker", "aggregator")),
    System(name="atoll, whole", coordinators=("broker", "aggregator")),
    System(name="torchft", package="torchft", coordinators=("lighthouse",)),
    System(name="torchft, streaming", package="torchft", fragments=8, delay=4, coordinators=("lighthouse",)),
    System(name="hivemind", package="hivemind"),
)


class Running:
    """A system that runs."""

    def __init__(self, system: System, cluster: LocalCluster, files: Sequence[Path], network: Network | None) -> None:
        self._system = system
        self._cluster = cluster
        self._files = files
        self._network = network

    def lines(self, peer: int) -> list[dict[str, Any]]:
        """Returns what a peer has written."""
        path = self._files[peer]
        text = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in text]

    def wait(self, reached: Callable[[], bool], what: str, within_s: float) -> None:
        """Waits; raises Unavailable with the end of the first peer's log if it does not come."""
        until_s = time.monotonic() + within_s
        while not reached():
            check(self._cluster)
            if time.monotonic() > until_s:
                end = last_lines(self._cluster.log_of("peer-0"))
                raise Unavailable(
                    f"{self._system.name}: {what} within {within_s:g} s; its log ends:\n{end}", definite=True
                )
            time.sleep(POLL_S)

    def rest(self, seconds: float) -> None:
        """Lets it run."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._cluster.poll()
            time.sleep(POLL_S)

    def pid(self, peer: int) -> int:
        """Returns the process of a peer."""
        return int(next(line["pid"] for line in self.lines(peer) if line["kind"] == "ready"))

    def kill(self, *names: str) -> None:
        """Kills processes: kill -9."""
        for name in names:
            pid = self._cluster.pid(name)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)

    def poison(self, peer: int) -> None:
        """Makes a peer's parameters NaN."""
        os.kill(self.pid(peer), signal.SIGUSR1)

    def carried_bytes(self) -> int | None:
        """Returns all bytes that have passed the loopback device of the system's own namespace, with headers."""
        if self._network is None:
            return None
        for line in Path(f"/proc/{self._network.pids[0]}/net/dev").read_text(encoding="utf-8").splitlines():
            name, _, fields = line.partition(":")
            if name.strip() == "lo":
                return int(fields.split()[8])
        return None

    def peer_bytes(self, peer: int) -> int:
        """Returns the most memory of a peer and its own processes, less the peer's before it joined."""
        resting = next(line["bytes"] for line in self.lines(peer) if line["kind"] == "resting")
        return sum(map(peak_bytes, _tree(self.pid(peer)))) - int(resting)


@contextmanager
def running(
    system: System, load: Mapping[str, Any], directory: Path, network: Network | None, python: str
) -> Iterator[Running]:
    """Runs a system with two peers for the body of a ``with`` block; both have begun to train.

    Args:
        system: Which.
        load: ``parameters``, ``step_s`` (the pause of a step), ``interval`` (steps between two syncs of the whole).
        directory: Existing and empty.
        network: With the region it runs in, so that its bytes can be counted; else they are not.
        python: Interpreter of its environment.

    Raises:
        Unavailable: A peer did not begin in time.
    """
    (directory / "logs").mkdir()
    files = [directory / f"peer-{i}.jsonl" for i in range(PEERS)]
    place = partial(network.inside, 0) if network is not None else list
    address, coordinators = _coordinators(system, load, directory, python)
    environment = one_thread_environment() | ROOT_ENVIRONMENT | our_environment("") | ON_CPU
    specs = [
        ProcessSpec(name=name, command=place(command), environment=environment)
        for name, command in coordinators.items()
    ]
    module = f"benchmarks.peers.{system.package or 'atoll'}_peer"
    delay = min(system.delay, load["interval"] // system.fragments - 1)  # a fragment is not sent before it was adopted
    told = {**load, "coordinator": address, "fragments": system.fragments, "delay": delay}
    for i, file in enumerate(files):
        own = json.dumps(told | {"number": i, "out": os.fspath(file)})
        command = [python, "-P", "-m", module, own]
        specs.append(ProcessSpec(name=f"peer-{i}", command=place(command), environment=environment))
    with LocalCluster(directory / "logs", policy=ONE_LIFE) as cluster:
        found = Running(system, cluster, files, network)
        if system.package == "hivemind":  # the second one needs the first one's address
            cluster.start(specs[:1])
            found.wait(Path(address).exists, "the first peer was not there", START_WITHIN_S)
            cluster.start(specs[1:])
        else:
            cluster.start(specs)
        found.wait(
            lambda: all(any(line["kind"] == "synced" for line in found.lines(i)) for i in range(PEERS)),
            "two peers did not synchronise",
            START_WITHIN_S,
        )
        yield found


def _coordinators(
    system: System, load: Mapping[str, Any], directory: Path, python: str
) -> tuple[str, Mapping[str, list[str]]]:
    """Returns the address that peers join at, and the commands of what coordinates them."""
    match system.package:
        case "torchft":
            lighthouse = [os.fspath(Path(python).parent / "torchft_lighthouse"), "--bind", f"127.0.0.1:{PORT}"]
            return f"http://127.0.0.1:{PORT}", {"lighthouse": [*lighthouse, "--min_replicas", "1"]}
        case "hivemind":
            return os.fspath(directory / "first-peer.txt"), {}
    address = f"tcp://127.0.0.1:{PORT}"
    broker = BrokerConfig(run_id=RUN, port=PORT, redis_url="")
    hub = {"broker": address, "redis_url": "", "islands": PEERS, "fragments": system.fragments}
    written(directory, broker, sync_interval=load["interval"], **hub)
    return address, {name: hub_command(directory, name) for name in ("broker", "aggregator")}


def _tree(pid: int) -> list[int]:
    """Returns a process and all below it."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = path.read_text(encoding="utf-8").split() if path.exists() else []
    return [pid, *[each for child in children for each in _tree(int(child))]]
