"""Outer round latency, and memory of aggregator and broker, by model size and number of islands.

A real broker and a real aggregator (with its disk and Redis) serve scripted islands over real sockets. A round moves
one fragment, 1/P of the model: it is *opened*, every island hands over its pseudo-gradient, the aggregator merges,
steps and writes (fsync included), the version is *committed*, then *received* by the islands. Beside each round, in
turn, as many bytes as pass sockets in it, of both hops, pass one connection of raw TCP: latency is shown in multiples
of that. And as many bytes as a version's file has are written and flushed by themselves: *disk*, beside *persist*.

Memory is VmHWM less that of the same process under a model of almost no parameters, in multiples of the model's float32
bytes. Besides the model, both may hold bounded pools: here the contributions of the open round, one message per island,
and what is in sockets, a few messages whatever the number of islands. The columns "less round" leave the first out;
with ``--strict`` the exit status is 1 unless

    aggregator <= 1 x model + pools,    broker <= 1 x model + pools,    pools = (islands + 10) messages of one fragment

or for the aggregator six vectors of the fragment, where that is more than a model: its state before and after a merge.
Both keep memory of chunks besides, 128 MiB or a model at the most.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from aggregator.store.tape import read_lines
from benchmarks import output
from benchmarks.fleet import Hub
from benchmarks.output import Column, Printer, median
from benchmarks.scripted import SPACING_STEPS, Arrival, Payloads, model, scripted_fleet
from broker.base.errors import Unavailable
from broker.chunks.receiving import SPARE_BYTES
from broker.wire.messages import Codec

MIB = 1 << 20
WARM_UP_ROUNDS = 3
#: Messages of one fragment that may be in the sockets of a process, both high-water marks and one being copied each.
SOCKET_MESSAGES = 10
#: What is written to the disk at a time.
PIECE_BYTES = 8 * MIB
#: A model that weighs nothing, to find out what the processes take without one.
NO_MODEL = 48

COLUMNS = (
    Column(key="parameters", title="parameters", form=",d"),
    Column(key="islands", title="islands"),
    Column(key="over", title="over"),
    Column(key="codecs", title="up/down"),
    Column(key="latency_ms", title="latency ms", form=",.1f"),
    Column(key="collect_ms", title="collect", form=",.1f"),
    Column(key="merge_ms", title="merge", form=",.1f"),
    Column(key="persist_ms", title="persist", form=",.1f"),
    Column(key="deliver_ms", title="deliver", form=",.1f"),
    Column(key="disk_ms", title="disk ms", form=",.1f"),
    Column(key="tcp_ms", title="TCP ms", form=",.1f"),
    Column(key="times_tcp", title="x TCP", form=".1f"),
    Column(key="aggregator_models", title="aggr. x model", form=".2f"),
    Column(key="aggregator_lean_models", title="less round", form=".2f"),
    Column(key="broker_models", title="broker x model", form=".2f"),
    Column(key="broker_lean_models", title="less round", form=".2f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table."""

    parameters: int
    islands: int
    fragments: int
    codec: Codec
    rounds: int
    ipc: bool = False  # over a Unix socket, not TCP


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """When one round passed its stages, in seconds of the monotonic clock that all processes share."""

    opened_s: float
    closed_s: float
    computed_s: float
    committed_s: float
    received_s: float  # by the last island


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of one case after the warm-up: stages, raw TCP and disk in seconds, and memory."""

    payloads: Payloads
    stages: list[Stages]
    tcp_s: list[float]
    disk_s: list[float]
    peaks: Mapping[str, int]


def run_case(case: Case, directory: Path, *, alone: bool = True) -> Measured:
    """Runs one case in an empty directory; with ``alone``, TCP and disk by themselves beside each round."""
    payloads = Payloads(model(case.parameters), case.fragments, case.codec)
    hub = Hub(
        directory,
        islands=case.islands,
        fragments=case.fragments,
        sync_interval=case.fragments * SPACING_STEPS,
        codec=case.codec,
        round_timeout_s=120.0,
        ipc=case.ipc,
    )
    tcp_s: list[float] = []
    disk_s: list[float] = []
    # Up from each island, and all of them to the aggregator; a version to the broker, and down to each island.
    passing = (3 * case.islands + 1) * message_bytes(payloads)
    with hub:

        async def drive() -> list[Arrival]:
            async with scripted_fleet([hub.address] * case.islands, payloads) as fleet:
                await fleet.seeded()
                for _ in range(WARM_UP_ROUNDS + case.rounds):
                    await fleet.round()
                    hub.check()
                    if alone:  # in this thread: the islands wait, and nothing else may run beside it
                        tcp_s.append(raw_tcp_s(passing))
                        disk_s.append(disk_alone_s(directory, hub.config.store))
                return [arrival for island in fleet.islands for arrival in island.arrivals]

        arrivals = asyncio.run(drive())
        peaks = {name: hub.peak_bytes(name) for name in ("broker", "aggregator")}
    stages = stages_of(hub.tape, arrivals)
    overlap = any(after.opened_s < before.received_s for before, after in pairwise(stages))
    if overlap or len(stages) != WARM_UP_ROUNDS + case.rounds:
        what = f"{len(stages)} rounds were seen, {WARM_UP_ROUNDS + case.rounds} were run"
        raise Unavailable(f"{what}, or some overlapped: their times mean nothing, run it again", definite=True)
    return Measured(
        payloads=payloads,
        stages=stages[WARM_UP_ROUNDS:],
        tcp_s=tcp_s[WARM_UP_ROUNDS:],
        disk_s=disk_s[WARM_UP_ROUNDS:],
        peaks=peaks,
    )


def disk_alone_s(directory: Path, store: Path) -> float:
    """Writes as many bytes to a file as the newest version has; returns the seconds, fsync included."""
    newest = max(store.glob("fragments/*/*"), key=lambda path: path.stat().st_mtime)
    left, piece = newest.stat().st_size, memoryview(os.urandom(PIECE_BYTES))
    path = directory / "alone"
    began_s = time.monotonic()
    with path.open("wb", buffering=0) as file:
        while left:
            left -= file.write(piece[:left]) or 0
        os.fsync(file.fileno())
    took_s = time.monotonic() - began_s
    path.unlink()
    return took_s


def raw_tcp_s(num_bytes: int) -> float:
    """Returns the seconds that so many bytes take over one connection of loopback, without anything else."""
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as here:
        there = door.accept()[0]

        def read() -> None:
            buffer = bytearray(PIECE_BYTES)
            while there.recv_into(buffer):
                pass

        reader, left, piece = threading.Thread(target=read), num_bytes, memoryview(bytes(PIECE_BYTES))
        with there:
            began_s = time.perf_counter()
            reader.start()
            while left:
                left -= here.send(piece[:left])
            here.shutdown(socket.SHUT_WR)
            reader.join()
            return time.perf_counter() - began_s


def stages_of(tape: Path, arrivals: list[Arrival]) -> list[Stages]:
    """Returns the stages of every round in order: from the tape, but the receipt as islands noted it."""
    passed: dict[object, float] = {}
    received: dict[tuple[int, int], float] = {}
    for arrival in arrivals:
        version = arrival.fragment_id, arrival.fragment_version
        received[version] = max(arrival.at_s, received.get(version, 0.0))
    stages = []
    for line in read_lines(tape):
        now_s, fields = line.get("now_s", 0.0), line.get("fields", {})
        match line.get("note") or line.get("event"):
            case "round.opened" | "round.closed" as note:
                passed[note, fields["round"]] = now_s
            case "computed":
                passed[line["fragment_id"], line["fragment_version"]] = now_s
            case "version.committed" if (version := (fields["fragment"], fields["version"])) in received:
                stages.append(
                    Stages(
                        opened_s=passed["round.opened", fields["round"]],
                        closed_s=passed["round.closed", fields["round"]],
                        computed_s=passed[version],
                        committed_s=now_s,
                        received_s=received[version],
                    )
                )
            case _:
                pass
    return stages


def message_bytes(payloads: Payloads) -> int:
    """Returns the bytes of one pseudo-gradient of a fragment."""
    return sum(memoryview(each.data).nbytes for each in payloads.delta(0))


def row_of(case: Case, measured: Measured, base: Mapping[str, int]) -> dict[str, Any]:
    """Returns the line of one case: medians over its rounds."""
    stages, payloads = measured.stages, measured.payloads
    model_bytes = 4 * payloads.parameters
    round_bytes = case.islands * message_bytes(payloads)
    making_bytes = 6 * 4 * max(payloads.manifest.sizes)
    pools_bytes = round_bytes + min(SPARE_BYTES, model_bytes)
    pools_bytes += SOCKET_MESSAGES * 4 * payloads.manifest.sizes[0]  # whole, as version 0 of every fragment goes
    bounds = {"aggregator": max(model_bytes, making_bytes) + pools_bytes, "broker": model_bytes + pools_bytes}
    memory: dict[str, Any] = {}
    for name, bound in bounds.items():
        held = measured.peaks[name] - base[name]
        memory |= {f"{name}_models": held / model_bytes, f"{name}_lean_models": (held - round_bytes) / model_bytes}
        memory[f"{name}_within"] = held <= bound
    latency_s = median(each.received_s - each.opened_s for each in stages)
    tcp_s = median(measured.tcp_s)
    return {
        "parameters": payloads.parameters,
        "islands": case.islands,
        "fragments": case.fragments,
        "over": "ipc" if case.ipc else "tcp",
        "codecs": f"{case.codec}/{case.codec}",
        "rounds": len(stages),
        "latency_ms": 1e3 * latency_s,
        "collect_ms": 1e3 * median(each.closed_s - each.opened_s for each in stages),
        "merge_ms": 1e3 * median(each.computed_s - each.closed_s for each in stages),
        "persist_ms": 1e3 * median(each.committed_s - each.computed_s for each in stages),
        "deliver_ms": 1e3 * median(each.received_s - each.committed_s for each in stages),
        "disk_ms": 1e3 * median(measured.disk_s),
        "tcp_ms": 1e3 * tcp_s,
        "times_tcp": latency_s / tcp_s,
        **memory,
    }


def measure(args: argparse.Namespace, printer: Printer) -> int:
    """Runs every case; with ``--strict`` returns 1 if one of them exceeds its bound of memory."""
    parameters, islands, codecs = args.parameters, args.islands, args.codec or [Codec.BF16, Codec.F32]
    rounds = args.rounds
    if args.quick:
        parameters, islands, codecs, rounds = (1_000_000,), (2,), [Codec.BF16], 3
    within = True

    def run(case: Case, *, alone: bool = True) -> Measured:
        over = "a Unix socket" if case.ipc else "TCP"
        printer.say(f"{case.parameters:,} parameters, {case.islands} islands, {case.codec} up, over {over}")
        with tempfile.TemporaryDirectory(prefix="atoll-latency-") as directory:
            return run_case(case, Path(directory), alone=alone)

    none = Case(parameters=NO_MODEL, islands=2, fragments=args.fragments, codec=Codec.F32, rounds=rounds)
    base = run(none, alone=False).peaks
    for count, m, codec, over in product(parameters, islands, codecs, args.over or ["tcp", "ipc"]):
        case = replace(none, parameters=count, islands=m, codec=codec, ipc=over == "ipc")
        row = row_of(case, run(case), base)
        within = within and row["aggregator_within"] and row["broker_within"]
        printer.add(row)
    if not within:
        printer.say("a process held more than its bound, see aggregator_within and broker_within of --json")
    return int(args.strict and not within)


def main(argv: list[str] | None = None) -> int:
    example = "--parameters 1M,10M --islands 1,4,16 --codec bf16"
    parser = output.parser_of("round_latency", __doc__, example)
    parser.add_argument("--parameters", type=output.numbers, default=(1_000_000, 10_000_000, 100_000_000))
    parser.add_argument("--islands", type=output.numbers, default=(1, 4, 16))
    parser.add_argument("--fragments", type=int, default=8, help="P: a round moves 1/P of the model (8)")
    parser.add_argument("--codec", type=Codec, action="append", help="of pseudo-gradients; repeatable (bf16 and f32)")
    parser.add_argument(
        "--over", choices=["tcp", "ipc"], action="append", help="the carrier of ours; repeatable (both)"
    )
    parser.add_argument("--rounds", type=int, default=16, help="rounds measured per case, after 3 to warm up (16)")
    parser.add_argument(
        "--strict", action="store_true", help="fail if memory exceeds its bound; from 10M parameters on"
    )
    return output.guarded(measure, parser.parse_args(argv), COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
