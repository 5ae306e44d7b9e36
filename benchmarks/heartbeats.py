"""What a heartbeat costs the hub, and how soon it is answered, against the number of islands.

A real broker, aggregator and Redis serve scripted islands over real sockets, two connections each. However many they
are, all together send the same number of heartbeats a second (``--rate``), so that what the hub spends in a second is
comparable from line to line: *us per heartbeat* is its processor time, of the broker and of the aggregator, in a window
in which nothing else goes on, Redis reports included. *x first* is their sum over that of the first line; it stays near
1 if no heartbeat costs more for the islands that it is not from.

*ms* is the time from a heartbeat to the next state that its island is told, in the same window, and in a second one in
which rounds go on: every ``--every`` seconds all islands hand a fragment over and get the new version, while they send
their heartbeats at their usual times. *rounds* is how many there were, of those that fell due.

This process plays all islands, and what it takes itself is in these times: of a thousand islands, half a processor.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import output
from benchmarks.fleet import Hub, cpu_s
from benchmarks.output import Column, Printer
from benchmarks.scripted import Payloads, ScriptedFleet, model, scripted_fleet
from broker.process.limits import collect_seldom
from broker.routing.liveness import LivenessConfig
from broker.wire.messages import Codec

HUB = ("broker", "aggregator")
PARAMETERS, FRAGMENTS = 48_000, 8
SETTLE_S = 3.0  #: before the first window

COLUMNS = (
    Column(key="islands", title="islands"),
    Column(key="joined_s", title="joined s", form=".1f"),
    Column(key="heartbeats_per_s", title="heartbeats/s", form=".0f"),
    Column(key="answered", title="answered", form=".0%"),
    Column(key="broker_us", title="broker us per heartbeat", form=",.0f"),
    Column(key="aggregator_us", title="aggregator us", form=",.0f"),
    Column(key="ratio", title="x first", form=".2f"),
    Column(key="p50_ms", title="p50 ms", form=",.1f"),
    Column(key="p99_ms", title="p99 ms", form=",.1f"),
    Column(key="loaded_p50_ms", title="p50 ms in rounds", form=",.1f"),
    Column(key="loaded_p99_ms", title="p99 ms in rounds", form=",.1f"),
    Column(key="pace", title="rounds", form=".0%"),
)


def counted(fleet: ScriptedFleet) -> tuple[int, int]:
    """Returns the heartbeats that were sent so far, and the states that islands were told."""
    return sum(island.beats for island in fleet.islands), sum(island.states for island in fleet.islands)


async def window(hub: Hub, fleet: ScriptedFleet, work: Awaitable[Any]) -> dict[str, Any]:
    """Returns what was counted while something went on."""
    for island in fleet.islands:
        island.answers_s.clear()
    began_s, (beats, states) = time.monotonic(), counted(fleet)
    before = {name: cpu_s(hub.pid(name)) for name in HUB}
    await work
    seconds, (beats_then, states_then) = time.monotonic() - began_s, counted(fleet)
    broker_s, aggregator_s = (cpu_s(hub.pid(name)) - before[name] for name in HUB)
    sent, told = beats_then - beats, states_then - states
    answers_s = sorted(each for island in fleet.islands for each in island.answers_s)
    return {
        "heartbeats_per_s": sent / seconds,
        "answered": told / max(1, sent),
        "broker_us": 1e6 * broker_s / max(1, sent),
        "aggregator_us": 1e6 * aggregator_s / max(1, told),  # of those that it answered: it may not keep up
        "p50_ms": 1e3 * answers_s[len(answers_s) // 2] if answers_s else None,
        "p99_ms": 1e3 * answers_s[99 * len(answers_s) // 100] if answers_s else None,
    }


def allowances(heartbeat_s: float) -> LivenessConfig:
    """Returns allowances for silence under which islands send heartbeats at least ``heartbeat_s`` apart."""
    usual = LivenessConfig()
    return LivenessConfig(
        suspect_after_s=max(usual.suspect_after_s, 2 * heartbeat_s),
        dead_after_s=max(usual.dead_after_s, 3 * heartbeat_s),
    )


async def measured(hub: Hub, islands: int, args: argparse.Namespace) -> dict[str, Any]:
    """Returns one line, without its ratio."""
    began_s = time.monotonic()
    payloads = Payloads(model(PARAMETERS), FRAGMENTS, Codec.INT8)
    async with scripted_fleet([hub.address] * islands, payloads, heartbeat_s=islands / args.rate) as fleet:
        await fleet.seeded()
        joined_s = time.monotonic() - began_s
        collect_seldom()  # else its pauses are in what the islands see
        await asyncio.sleep(SETTLE_S)
        row = {"islands": islands, "joined_s": joined_s} | await window(hub, fleet, asyncio.sleep(args.seconds))
        training = asyncio.ensure_future(fleet.train(args.rounds * args.every, args.every))
        loaded = await window(hub, fleet, training)
        hub.check()
    row |= {f"loaded_{name}": loaded[name] for name in ("p50_ms", "p99_ms")}
    return row | {"hub_us": row["broker_us"] + row["aggregator_us"], "pace": training.result() / args.rounds}


def measure(args: argparse.Namespace, printer: Printer) -> None:
    """Measures every number of islands, each at a hub of its own."""
    counts = args.islands
    if args.quick:
        counts, args.rate, args.seconds, args.every = (4, 8), 40.0, 1.5, 0.5
    first_us: float | None = None
    for islands in counts:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="heartbeats-")))
            settings = {"islands": islands, "fragments": FRAGMENTS, "sync_interval": 1000 * FRAGMENTS}
            hub = stack.enter_context(Hub(directory, liveness=allowances(islands / args.rate), **settings))
            printer.say(f"{islands} islands")
            row = asyncio.run(measured(hub, islands, args))
        first_us = first_us or row["hub_us"]
        printer.add({**row, "ratio": row["hub_us"] / first_us})


def main(argv: list[str] | None = None) -> int:
    parser = output.parser_of("heartbeats", __doc__, "--islands 32,128,512,1000 --seconds 20")
    parser.add_argument("--islands", type=output.numbers, default=(32, 128, 512, 1000), metavar="N,N")
    parser.add_argument("--rate", type=float, default=250.0, help="heartbeats of all in a second (default: 250)")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a window (default: 15)")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between two rounds (default: 8)")
    parser.add_argument("--rounds", type=int, default=4, help="that fall due in the second window (default: 4)")
    args = parser.parse_args(argv)
    return output.guarded(measure, args, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
