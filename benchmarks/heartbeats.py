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
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What was counted in one stretch of time."""

    seconds: float
    heartbeats: int
    states: int  #: that islands were told: in a quiet window, heartbeats answered
    cpu_s: dict[str, float]
    answers_s: list[float]

    @property
    def broker_us(self) -> float:
        """Processor time of the broker in microseconds, for each heartbeat that came."""
        return 1e6 * self.cpu_s["broker"] / max(1, self.heartbeats)

    @property
    def aggregator_us(self) -> float:
        """Processor time of the aggregator in microseconds, for each that it answered: it may not keep up."""
        return 1e6 * self.cpu_s["aggregator"] / max(1, self.states)

    def percentile_ms(self, share: float) -> float | None:
        """Returns the time within which so large a share of the heartbeats was answered; None if none was."""
        ordered = sorted(self.answers_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def counted(fleet: ScriptedFleet) -> tuple[int, int]:
    """Returns the heartbeats that were sent so far, and the states that islands were told."""
    return sum(island.beats for island in fleet.islands), sum(island.states for island in fleet.islands)


async def window(hub: Hub, fleet: ScriptedFleet, work: Callable[[], Awaitable[Any]]) -> Window:
    """Counts while something goes on."""
    for island in fleet.islands:
        island.answers_s.clear()
    began_s, (beats, states) = time.monotonic(), counted(fleet)
    before = {name: cpu_s(hub.pid(name)) for name in HUB}
    await work()
    seconds, (beats_then, states_then) = time.monotonic() - began_s, counted(fleet)
    return Window(
        seconds=seconds,
        heartbeats=beats_then - beats,
        states=states_then - states,
        cpu_s={name: cpu_s(hub.pid(name)) - before[name] for name in HUB},
        answers_s=[each for island in fleet.islands for each in island.answers_s],
    )


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
    payloads = Payloads(model(args.parameters), args.fragments, Codec.INT8)
    async with scripted_fleet([hub.address] * islands, payloads, heartbeat_s=islands / args.rate) as fleet:
        await fleet.seeded()
        joined_s = time.monotonic() - began_s
        collect_seldom()  # else its pauses are in what the islands see
        await asyncio.sleep(args.settle)
        quiet = await window(hub, fleet, lambda: asyncio.sleep(args.seconds))
        rounds = 0.0

        async def some_rounds() -> None:
            nonlocal rounds
            rounds = await fleet.train(args.rounds * args.every, args.every)

        loaded = await window(hub, fleet, some_rounds)
        hub.check()
    return {
        "islands": islands,
        "joined_s": joined_s,
        "heartbeats_per_s": quiet.heartbeats / quiet.seconds,
        "answered": quiet.states / max(1, quiet.heartbeats),
        "broker_us": quiet.broker_us,
        "aggregator_us": quiet.aggregator_us,
        "hub_us": quiet.broker_us + quiet.aggregator_us,
        "p50_ms": quiet.percentile_ms(0.5),
        "p99_ms": quiet.percentile_ms(0.99),
        "loaded_p50_ms": loaded.percentile_ms(0.5),
        "loaded_p99_ms": loaded.percentile_ms(0.99),
        "rounds": rounds,
        "pace": rounds / args.rounds,
    }


def measure(args: argparse.Namespace) -> int:
    """Measures every number of islands, each at a hub of its own."""
    printer = Printer(COLUMNS, as_json=args.json)
    counts = args.islands
    if args.quick:
        counts, args.rate, args.seconds, args.settle = (4, 8), 40.0, 1.5, 0.2
        args.every, args.rounds = 0.5, 4
    first_us: float | None = None
    for islands in counts:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="heartbeats-", dir=args.dir)))
            settings = {"islands": islands, "fragments": args.fragments, "sync_interval": 1000 * args.fragments}
            hub = stack.enter_context(Hub(directory, liveness=allowances(islands / args.rate), **settings))
            printer.say(f"{islands} islands")
            row = asyncio.run(measured(hub, islands, args))
        first_us = first_us or row["hub_us"]
        printer.add({**row, "ratio": row["hub_us"] / first_us})
    printer.close()
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = output.parser_of("heartbeats", __doc__, "--islands 32,128,512,1000 --seconds 20")
    output.add_arguments(parser)
    parser.add_argument("--islands", type=output.numbers, default=(32, 128, 512, 1000), metavar="N,N")
    parser.add_argument("--rate", type=float, default=250.0, help="heartbeats of all in a second (default: 250)")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a window (default: 15)")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between two rounds (default: 8)")
    parser.add_argument("--rounds", type=int, default=4, help="that fall due in the second window (default: 4)")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds before the first window (default: 3)")
    parser.add_argument("--parameters", type=int, default=48_000, help="of the model (default: 48000)")
    parser.add_argument("--fragments", type=int, default=8, metavar="P", help="of the model (default: 8)")
    parser.add_argument("--dir", help="where temporary stores go (default: the usual place)")
    args = parser.parse_args(argv)
    return output.guarded(measure, args)


if __name__ == "__main__":
    sys.exit(main())
