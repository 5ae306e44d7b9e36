"""The daemons of a local run: command, environment and processors of each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from aggregator.store.layout import ledger_path
from broker.clients.connections import LEAST_FILES_FOR_UNIX
from broker.process.limits import most_open_files
from ops import run_directory
from ops.faults.kinds import Role
from ops.launcher import python_path
from ops.plans.devices import Placement, Platform, merged
from ops.processes.child_process import ProcessSpec
from ops.run.local_plan import LocalPlan

#: The process that evaluates the run while it trains, which no run needs.
FOLLOWER = str(Role.EVALUATION)
DASHBOARD = "dashboard"
#: Where the processes serve metrics, in the run directory.
TARGETS_FILE = "metrics.json"

#: Of processes that leave the accelerators to the islands.
ON_CPU = {"JAX_PLATFORMS": "cpu"}


def processes(
    plan: LocalPlan, *, environment: Mapping[str, str], island_environment: Mapping[str, str]
) -> list[ProcessSpec]:
    """Returns the processes of the run but for Redis, in the order in which to start them.

    Args:
        plan: The run.
        environment: Variables of all of them.
        island_environment: Variables that the numeric ones get besides. Those of an island's devices are the plan's.
    """
    numeric = {**environment, **island_environment}
    if unix_sockets := _unix_sockets(plan):
        numeric["ATOLL_BROKER"] = ",".join(f"ipc://{each}" for each in unix_sockets.values())
    config = ["--config", os.fspath(plan.config_file)]
    specs = _brokers(plan, config, environment)
    for name, shard in plan.shards.items():
        own = ["--standby"] if "standby" in name else []
        if name != "aggregator":
            own += ["--store", os.fspath(plan.store_of(name))]
            own += ["--tape", os.fspath(plan.run_dir / name / "events.jsonl")]
        if shard:
            own += ["--shard", str(shard), "--report", os.fspath(plan.reports[shard])]
        specs.append(
            ProcessSpec(
                name=name,
                command=our_command("aggregator", *config, *own),
                environment=numeric | ON_CPU,
                ends_by_itself=True,
                progress=ledger_path(plan.store_of(name)),
            )
        )
    places = plan.devices or (Placement(),) * len(plan.island_ids)
    for index, (island_id, place) in enumerate(zip(plan.island_ids, places, strict=True)):
        steps = plan.run_dir / "logs" / f"{island_id}.health"  # modified by its steps alone
        own = ["--island-id", island_id, "--health", os.fspath(steps)]
        if plan.up.keys:
            own += ["--key", os.fspath(plan.keys_dir / f"island-{island_id}.secret")]
        if plan.island.state_dir is None:  # a restarted island goes on with its own optimizer state
            own += ["--state-dir", os.fspath(plan.run_dir / "islands")]
        if plan.up.pace:
            own += ["--pace", str(plan.up.pace[index % len(plan.up.pace)])]
        specs.append(
            ProcessSpec(
                name=island_id,
                command=our_command("island", *config, *own),
                environment=merged(numeric, place),
                cpus=_processors(index, place),
                ends_by_itself=True,
                progress=steps,
            )
        )
    ports = plan.metrics_ports
    specs = [
        replace(each, command=[*each.command, "--metrics-port", str(ports[each.name])]) if ports else each
        for each in specs
    ]
    if plan.links is None:
        return specs
    return [plan.links.process(our_command("links"), environment), *plan.links.reroute(specs)]


def _processors(index: int, place: Placement) -> tuple[int, ...]:
    """Returns the processors to pin a CPU island to: XLA's flags alone do not keep its threads to one."""
    if place.platform is not Platform.CPU:
        return ()  # its step runs elsewhere; compiling and copying take what they find
    cpus = sorted(os.sched_getaffinity(0))
    return tuple(dict.fromkeys(cpus[(index * place.count + k) % len(cpus)] for k in range(place.count)))


def _brokers(plan: LocalPlan, config: Sequence[str], environment: Mapping[str, str]) -> list[ProcessSpec]:
    """Brokers read what they need from the file; several have a name and a port each."""
    specs, unix_sockets = [], _unix_sockets(plan)
    for name, port in plan.broker_ports.items():
        own = ["--broker-name", name, "--port", str(port)] if len(plan.broker_ports) > 1 else []
        if unix_sockets:
            own += ["--ipc", unix_sockets[name]]
        command = our_command("broker", *config, *own)
        specs.append(ProcessSpec(name=name, command=command, environment=environment, stop_order=1))
    return specs


def _unix_sockets(plan: LocalPlan) -> dict[str, str]:
    """Returns the Unix socket on which each broker listens as well, without a file; Linux has such.

    They cost less than loopback TCP (benchmarks/README.md). Who reaches the port may use it, and nobody else: both are
    of one network namespace. Where a process may have few open files there are none.
    """
    some = sys.platform == "linux" and most_open_files() >= LEAST_FILES_FOR_UNIX
    named = plan.broker_ports.items() if some else ()
    return {name: f"@atoll-{port}" for name, port in named}


def follower(plan: LocalPlan, *, environment: Mapping[str, str]) -> ProcessSpec:
    """Returns the process that evaluates the run while it trains; it may use any processor, and gives way."""
    command = our_command("evaluate", "--follow", os.fspath(plan.run_dir), "--every", str(plan.up.evaluate_every))
    return ProcessSpec(name=FOLLOWER, command=command + benchmarks(plan), environment=environment, ends_by_itself=True)


def dashboard(plan: LocalPlan, port: int, *, environment: Mapping[str, str]) -> ProcessSpec:
    """Returns the process that serves the page of the run."""
    command = our_command("dashboard", os.fspath(plan.run_dir), "--port", str(port))
    return ProcessSpec(name=DASHBOARD, command=command, environment=environment)


def write_scrape_targets(plan: LocalPlan, *, live: bool = True) -> Path:
    """Writes where processes serve metrics, for Prometheus' ``file_sd_configs``; returns the file.

    Of a run that is not live there are none: a process that has done its work is not one that is down.
    """
    ports = plan.metrics_ports.items() if live else ()
    targets = [{"targets": [f"127.0.0.1:{port}"], "labels": {"process": name}} for name, port in ports]
    file = plan.run_dir / TARGETS_FILE
    run_directory.write(file, json.dumps(targets, indent=1) + "\n")
    return file


def loggers(plan: LocalPlan, *, environment: Mapping[str, str]) -> list[ProcessSpec]:
    """Returns the processes that write the figures of the run into libraries, one for each."""
    return [
        ProcessSpec(
            name=f"log-{number}",
            command=our_command("log", os.fspath(plan.run_dir), "--to", target),
            environment=environment,
            ends_by_itself=True,
        )
        for number, target in enumerate(plan.up.log_to, start=1)
    ]


def benchmarks(plan: LocalPlan) -> list[str]:
    """Returns the flags of ``evaluate`` that name the user's own functions."""
    return [word for path in plan.up.benchmark for word in ("--benchmark", path)]


def our_command(*arguments: str) -> list[str]:
    """Returns the command that runs this very program, even if the current directory holds another."""
    return [sys.executable, "-P", "-m", "ops", *arguments]


def our_environment(redis_url: str) -> dict[str, str]:
    """Returns the variables under which :func:`our_command` finds this program."""
    return {
        "ATOLL_NO_VENV": "1",
        "ATOLL_BROKER": "",  # the file has the address
        "ATOLL_KEY": "",  # each has its own, or none
        "ATOLL_LOG": "text",  # into files that people read
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
        "REDIS_URL": redis_url,
    }
