"""Processes measured by a benchmark: Redis, a broker and an aggregator, exactly as ``up`` starts them.

What stands against them here is scripted (:mod:`benchmarks.scripted`).
Nothing survives the ``with`` block, nor the process that holds it (:mod:`ops.processes.child`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aggregator.interface.config import AggregatorConfig
from broker.base import settings, sources
from broker.base.errors import Unavailable
from broker.gateway.config import BrokerConfig
from broker.routing.liveness import LivenessConfig
from ops.processes.child_process import ProcessSpec, last_lines
from ops.processes.cluster import Change, LocalCluster, free_ports
from ops.processes.numeric import compilation_cache, one_thread_environment
from ops.processes.redis_server import server
from ops.run.daemons import ON_CPU, our_command, our_environment

RUN = "benchmark"
ROOT = Path(__file__).resolve().parent.parent
#: Under which :func:`module_command` finds this checkout.
ROOT_ENVIRONMENT = {"PYTHONPATH": os.fspath(ROOT), "PYTHONUNBUFFERED": "1"}
STOP_WITHIN_S = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Hub:
    """Redis, broker and aggregator of one run.

    Args:
        directory: Existing and empty; everything is written in it.
        ipc: Whether the aggregator, and islands by :attr:`address`, come over a Unix socket, as those of ``up`` do.
        liveness: Allowances for silence; None: the usual ones.
        aggregator: Settings of the aggregator beyond addresses and files.
    """

    def __init__(
        self,
        directory: Path,
        *,
        ipc: bool = False,
        liveness: LivenessConfig | None = None,
        **aggregator: Any,
    ) -> None:
        liveness = liveness or LivenessConfig()
        port, redis_port = free_ports(2), free_ports(1)
        unix_socket = f"@atoll-{port}"
        self.address = f"ipc://{unix_socket}" if ipc else f"tcp://127.0.0.1:{port}"
        self.tape = directory / "events.jsonl"
        self._directory = directory
        self._redis = server(port=redis_port, directory=directory)
        self._port, self._redis_port = port, redis_port
        ipc_name = unix_socket if ipc else ""
        broker = BrokerConfig(run_id=RUN, redis_url=self._redis.url, liveness=liveness, port=port, ipc=ipc_name)
        common = {"broker": self.address, "redis_url": self._redis.url}
        self.config = written(directory, broker, tape=self.tape, **common, **asdict(liveness), **aggregator)
        (directory / "logs").mkdir()
        self.cluster = LocalCluster(directory / "logs")

    def __enter__(self) -> Self:
        """Starts the three; the broker accepts connections on return.

        Raises:
            Unavailable: One of them did not start; the message has the end of its log.
        """
        self.cluster.__enter__()
        try:
            self._start("redis", self._redis.command, self._redis_port, stop_order=2)
            self._start("broker", hub_command(self._directory, "broker"), self._port, stop_order=1)
            command = hub_command(self._directory, "aggregator")
            self.start([self._spec("aggregator", command, ends_by_itself=True)])
        except BaseException:
            self.cluster.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends everything; the tape is complete afterwards."""
        try:
            self.cluster.stop(within_s=STOP_WITHIN_S)
        finally:
            self.cluster.__exit__(kind, error, trace)

    def start(self, specs: Iterable[ProcessSpec]) -> None:
        """Starts further processes beside them."""
        self.cluster.start(specs)

    def numeric_environment(self) -> dict[str, str]:
        """Returns the variables that ``up`` gives to numeric processes."""
        return our_environment(self._redis.url) | one_thread_environment() | compilation_cache()

    def peak_bytes(self, name: str) -> int:
        """Returns the most memory that one of the three has held so far; raises Unavailable if one has ended."""
        self.check()
        return peak_bytes(self.pid(name))

    def check(self) -> None:
        """Raises Unavailable if a process died: a restarted one would be measured as if nothing had happened."""
        check(self.cluster)

    def pid(self, name: str) -> int:
        """Returns the number of the process of that name, which runs."""
        pid = self.cluster.pid(name)
        assert pid is not None, f"{name} does not run"
        return pid

    def _start(self, name: str, command: list[str], port: int, *, stop_order: int) -> None:
        self.start([self._spec(name, command, stop_order=stop_order)])
        self.cluster.wait_for_port(name, port)

    def _spec(self, name: str, command: list[str], **options: Any) -> ProcessSpec:
        environment = self.numeric_environment() | ON_CPU
        return ProcessSpec(name=name, command=command, environment=environment, **options)


def written(directory: Path, broker: BrokerConfig, /, **aggregator: Any) -> AggregatorConfig:
    """Writes the settings of a hub with its store in a directory; returns the aggregator's."""
    config = AggregatorConfig(run_id=RUN, store=directory / "store", **aggregator)
    tables = {"broker": settings.to_table(broker), "aggregator": settings.to_table(config)}
    (directory / "hub.toml").write_text(sources.to_toml(tables, heading="Settings of a benchmark"), encoding="utf-8")
    return config


def hub_command(directory: Path, name: str) -> list[str]:
    """Returns the command of the broker or the aggregator whose settings :func:`written` wrote."""
    return our_command(name, "--config", os.fspath(directory / "hub.toml"))


def check(cluster: LocalCluster) -> None:
    """Raises Unavailable with the end of its log if a process of a cluster died."""
    for event in cluster.poll():
        if event.change is not Change.ENDED:
            end = last_lines(cluster.log_of(event.process))
            raise Unavailable(f"{event.detail}; its log ends:\n{end}", definite=True)


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of this checkout with this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]


def peak_bytes(pid: int) -> int:
    """Returns VmHWM of a process, in bytes: ru_maxrss is inherited from the parent.

    Raises:
        Unavailable: There is no such process.
    """
    try:
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    except OSError as err:
        raise Unavailable(f"process {pid} has no status to read ({err.strerror}): it has ended", definite=True) from err
    raise Unavailable(f"process {pid} has no VmHWM: it is ending", definite=True)


def cpu_s(pid: int) -> float:
    """Returns the processor time that a process has used, in seconds; OSError if there is none."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
