"""Atoll beside torchft and hivemind, two peers each, in one training loop on this machine's loopback.

The others need environments of their own, made from the requirements beside this module, which ``--python`` names; one
that has none or does not start here is left out, and the error said. Every system is run once for each fault and all
take turns, so what is measured before the faults is measured three times: *sync*, from the capture of a whole model to
the adoption of what came of it (fragments one after another); *held up*, by how much that makes the loop's calls of the
system longer; *waits*, by how much it makes the steps' own changes of the parameters longer, which come behind copies
and additions that a call has only dispatched; bytes carried for it, per peer; and memory, of a peer beyond the
framework and its first copy of the model. Then the other peer is killed, or what coordinates, or a peer's parameters
are made NaN. Nothing that is killed is started again. Every system has its own defaults, time-outs too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import output
from benchmarks.output import Column, Printer, median
from benchmarks.peers import reading
from benchmarks.peers.loop import COLUMNS as WIDTH
from benchmarks.peers.loop import TENSORS, rows_of
from benchmarks.peers.systems import SYSTEMS, Running, System, running
from benchmarks.regions.network import Network, regions
from broker.base.errors import Unavailable

COLUMNS = (
    Column(key="system", title="system"),
    Column(key="parameters", title="parameters", form=","),
    Column(key="sync_ms", title="sync, ms", form=",.0f"),
    Column(key="held_up_ms", title="held up, ms", form=",.1f"),
    Column(key="waits_ms", title="waits, ms", form=",.1f"),
    Column(key="mb", title="MB per sync and peer", form=",.1f"),
    Column(key="models", title="memory, models", form=".1f"),
    Column(key="peer_stall_s", title="stall, peer killed, s", form=".1f"),
    Column(key="coordinator_stall_s", title="coordinator killed, s", form=".1f"),
    Column(key="goes_on", title="goes on without it"),
    Column(key="nan", title="a NaN peer makes others NaN"),
)
PEER, COORDINATOR, NAN = "peer", "coordinator", "nan"
PYTHON_HELP = "interpreter of torchft or hivemind, such as torchft=venv/bin/python; repeatable"
#: Of the end of the time after a fault: whether it trains then is whether it goes on.
LAST_S = 5.0
#: So much longer is looked at the loss of a coordinator: time-outs of a minute are usual there.
COORDINATOR_TIMES = 3


def observe(running_system: Running, system: System, fault: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns what one run shows: before the fault, and after it."""
    begins_s, before = time.monotonic(), running_system.carried_bytes()
    running_system.rest(args.seconds)
    ends_s, after = time.monotonic(), running_system.carried_bytes()
    lines = running_system.lines(0)
    syncs = reading.whole_syncs(lines, system.fragments, begins_s=begins_s, ends_s=ends_s)
    found: dict[str, Any] = {
        "system": system.name,
        "fault": fault,
        "syncs": syncs,
        "sync_ms": reading.sync_ms(lines, begins_s=begins_s, ends_s=ends_s),
        "held_up_ms": reading.longer_ms("took_s", lines, syncs, begins_s=begins_s, ends_s=ends_s),
        "waits_ms": reading.longer_ms("changed_s", lines, syncs, begins_s=begins_s, ends_s=ends_s),
        "mb": None if before is None or after is None or not syncs else (after - before) / 2e6 / syncs,
        "peer_bytes": running_system.peer_bytes(0),
    }
    fault_s = time.monotonic()
    match fault:
        case "peer":
            running_system.kill("peer-1")
        case "coordinator":
            running_system.kill(*system.coordinators)
        case "nan":
            running_system.poison(1)
    running_system.rest(args.watch * (COORDINATOR_TIMES if fault == COORDINATOR else 1))
    ends_s, lines = time.monotonic(), running_system.lines(0)
    return found | {
        "stall_s": reading.stall_s(lines, fault_s=fault_s, ends_s=ends_s),
        "steps_per_s_after": reading.steps_per_s(lines, begins_s=ends_s - LAST_S, ends_s=ends_s),
        "finite": reading.finite(lines, begins_s=fault_s, ends_s=ends_s),
        "failure": reading.failure(lines),
    }


def row_of(system: System, parameters: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the line of one system: medians of all its runs, and what each fault did."""

    def of_all(key: str) -> float | None:
        values = [each[key] for each in found if each[key] is not None]
        return median(values) if values else None

    by_fault = {each["fault"]: each for each in found}
    coordinator, poisoned = by_fault.get(COORDINATOR), by_fault.get(NAN)
    peer_bytes = of_all("peer_bytes")
    return {
        "system": system.name,
        "parameters": parameters,
        "runs": len(found),
        "sync_ms": of_all("sync_ms"),
        "held_up_ms": of_all("held_up_ms"),
        "waits_ms": of_all("waits_ms"),
        "mb": of_all("mb"),
        "models": None if peer_bytes is None else peer_bytes / (4 * parameters),
        "peer_stall_s": by_fault[PEER]["stall_s"] if PEER in by_fault else None,
        "coordinator_stall_s": coordinator["stall_s"] if coordinator else None,
        "goes_on": None if coordinator is None else "yes" if coordinator["steps_per_s_after"] else "no",
        "nan": None if poisoned is None else "no" if poisoned["finite"] else "yes",
    }


@contextlib.contextmanager
def _namespace(printer: Printer) -> Iterator[Network | None]:
    """Yields a network namespace, whose loopback device counts bytes; None where there can be none."""
    with contextlib.ExitStack() as stack:
        network: Network | None = None
        try:
            network = stack.enter_context(regions(1, round_trip_ms=0.0, mbit=1000.0))
        except Unavailable as err:
            printer.say(f"bytes are not counted: {err}")
        yield network


def measure(args: argparse.Namespace, printer: Printer) -> None:
    """Runs every system for every fault, in turn, and prints a line for each system."""
    systems = [each for each in SYSTEMS if not args.system or each.name in args.system]
    faults = [PEER] if args.quick else [PEER, COORDINATOR, NAN]
    pythons = {"": sys.executable, **dict(each.split("=", 1) for each in args.python or () if "=" in each)}
    for system in [each for each in systems if each.package not in pythons]:
        printer.say(f"without {system.name}: --python {system.package}=.. names no interpreter for it")
    systems = [each for each in systems if each.package in pythons]
    raw: list[dict[str, Any]] = []
    for parameters in args.parameters:
        load = {"parameters": parameters, "step_s": args.step, "interval": args.sync_interval}
        found: dict[str, list[dict[str, Any]]] = {each.name: [] for each in systems}
        for fault in faults:
            for system in systems:
                if fault == COORDINATOR and not system.coordinators:
                    continue
                printer.say(f"{system.name}, {parameters:,} parameters, then: {fault}")
                with contextlib.ExitStack() as stack:
                    name = stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-peers-"))
                    network = stack.enter_context(_namespace(printer))
                    python = pythons[system.package]
                    try:
                        started = stack.enter_context(running(system, load, Path(name), network, python))
                        found[system.name].append(observe(started, system, fault, args))
                    except Unavailable as err:
                        if not system.package:
                            raise
                        printer.say(f"{system.name} did not run: {err}")
                        raw.append({"system": system.name, "fault": fault, "failure": str(err)})
                if args.raw is not None:  # what is there so far: the whole takes long
                    output.keep(args.raw, raw + [each for runs in found.values() for each in runs])
        total = rows_of(parameters) * WIDTH * TENSORS
        for system in systems:
            if found[system.name]:
                printer.add(row_of(system, total, found[system.name]))
            raw += [each | {"parameters": total} for each in found[system.name]]
    if args.raw is not None:
        output.keep(args.raw, raw)
    for each in raw:
        if each.get("failure"):
            printer.say(f"{each['system']}, {each['fault']}: {json.dumps(each['failure'])}")


def main(arguments: list[str] | None = None) -> int:
    parser = output.parser_of("peers", __doc__, "--system atoll --system torchft --parameters 17.1M")
    names = [each.name for each in SYSTEMS]
    parser.add_argument("--system", choices=names, action="append", metavar="NAME", help=f"of {'; '.join(names)} (all)")
    parser.add_argument("--parameters", type=output.numbers, default=(17_100_000,), help="such as 1M,17.1M (17.1M)")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of a step's pause (0.02)")
    parser.add_argument("--sync-interval", type=int, default=80, help="steps between two syncs of the model (80)")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured before the fault (20)")
    parser.add_argument(
        "--watch", type=float, default=30.0, help="seconds after a fault; three times that for a coordinator (30)"
    )
    parser.add_argument("--python", action="append", metavar="NAME=FILE", help=PYTHON_HELP)
    parser.add_argument("--raw", type=Path, metavar="FILE", help="where every run is kept, as JSON lines (.gz)")
    args = parser.parse_args(arguments)
    if args.quick:
        args.system, args.parameters = args.system or ["atoll"], (1_000_000,)
        args.seconds, args.watch, args.sync_interval = 3.0, 3.0, 16
    return output.guarded(measure, args, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
