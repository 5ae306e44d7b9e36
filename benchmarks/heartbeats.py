"""What a heartbeat costs the hub, and how soon it is answered, against the number of islands.

A real broker, aggregator and Redis serve scripted islands over real sockets, two connections each. However many they
are, all together send the same number of heartbeats a second (``--rate``), so that what the hub spends in a second is
comparable from line to line: *us per heartbeat* is its processor time, of the broker and of the aggregator, in a window
in which nothing else goes on, Redis reports included. *x first* is their sum over that of the first line; it stays near
1 if no heartbeat costs more for the islands that it is not from.

*ms* is the time from a heartbeat to the next state that its island is told, in the same window, and in a second one in
which rounds go on: every ``--every`` seconds all islands hand a fragment over and get the new version, while they send
their heartbeats at their usual times. *rounds* is how many there were, of those that fell due.

Both times are those of ``--watched`` islands, which this process plays. A process of the lowest priority plays the
others: on hosts of their own they would take no processor from the hub, nor from those.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import output
from benchmarks.fleet import Hub, cpu_s
from benchmarks.output import Column, Printer
from benchmarks.scripted import Payloads, ScriptedFleet, model, scripted_fleet
from broker.process.collecting import collect_seldom
from broker.routing.liveness import LivenessConfig
from broker.wire.errors import Unavailable
from broker.wire.messages import Codec

HUB = ("broker", "aggregator")
#: Of the process that plays the islands that are not watched: its priority, and seconds that it may take to end.
LOWEST_PRIORITY, END_S = 19, 10.0
#: Seconds between two times at which it tells its counts.
TELL_EVERY_S = 0.05

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Which islands a process plays, of how many in all.

    Attributes:
        address: Control address of the broker.
        parameters: Of the model.
        fragments: Of the model (P).
        heartbeat_s: Seconds between two heartbeats of an island.
        numbers: The islands.
        of: How many islands there are.
        train: Seconds that they train for, and seconds between two rounds.
    """

    address: str
    parameters: int
    fragments: int
    heartbeat_s: float
    numbers: tuple[int, ...]
    of: int
    train: tuple[float, float]

    def fleet(self) -> AbstractAsyncContextManager[ScriptedFleet]:
        """Has them join, and ends them with the block."""
        return scripted_fleet(
            [self.address] * len(self.numbers),
            Payloads(model(self.parameters), self.fragments, Codec.INT8),
            heartbeat_s=self.heartbeat_s,
            numbers=self.numbers,
            of=self.of,
        )


class Crowd:
    """Islands that another process plays, maybe none; they join as the block is entered, and end with it.

    Args:
        played: Which.
    """

    def __init__(self, played: Played) -> None:
        context = multiprocessing.get_context("spawn")
        self._told, self._train = context.Array("d", 4, lock=False), context.Event()
        arguments = (played, self._told, self._train)
        self._process = context.Process(target=_play, args=arguments, daemon=True) if played.numbers else None

    def __enter__(self) -> Self:
        if self._process is not None:
            self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.join(END_S)
            self._process.kill()

    def counted(self) -> tuple[int, int]:
        """Returns the heartbeats that were sent so far, and the states that islands were told."""
        return int(self._told[1]), int(self._told[2])

    async def seeded(self) -> None:
        """Returns when every island holds version 0."""
        await self._until(0)

    async def train(self) -> float:
        """Has its islands train (:meth:`ScriptedFleet.train`); returns the rounds whose version they have."""
        self._train.set()
        await self._until(3)
        return self._told[3] - 1

    async def _until(self, told: int) -> None:
        while self._process is not None and not self._told[told]:
            if not self._process.is_alive():
                raise Unavailable("the process that plays the other islands has ended: it said why", definite=True)
            await asyncio.sleep(TELL_EVERY_S)


def _play(played: Played, told: Any, train: Any) -> None:
    """Plays islands; tells whether all are seeded, heartbeats, states, and 1 plus the rounds when trained."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the other process, which ends this one
    os.nice(LOWEST_PRIORITY)

    async def training(fleet: ScriptedFleet) -> None:
        await asyncio.to_thread(train.wait)
        told[3] = 1 + await fleet.train(*played.train)

    async def play() -> None:
        async with played.fleet() as fleet:
            await fleet.seeded()
            collect_seldom()  # else its pauses are in what the islands see
            told[0] = 1
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(training(fleet))
                while True:
                    told[1:3] = counted(fleet)
                    await asyncio.sleep(TELL_EVERY_S)

    asyncio.run(play())


def counted(fleet: ScriptedFleet) -> tuple[int, int]:
    """Returns the heartbeats that were sent so far, and the states that islands were told."""
    return sum(island.beats for island in fleet.islands), sum(island.states for island in fleet.islands)


async def window(hub: Hub, fleet: ScriptedFleet, crowd: Crowd, work: Callable[[], Awaitable[Any]]) -> Window:
    """Counts while something goes on."""
    for island in fleet.islands:
        island.answers_s.clear()
    began_s, before = time.monotonic(), (*counted(fleet), *crowd.counted())
    cpu_before = {name: cpu_s(hub.pid(name)) for name in HUB}
    await work()
    seconds = time.monotonic() - began_s
    beats, states, others, others_states = (
        now - then for now, then in zip((*counted(fleet), *crowd.counted()), before, strict=True)
    )
    return Window(
        seconds=seconds,
        heartbeats=beats + others,
        states=states + others_states,
        cpu_s={name: cpu_s(hub.pid(name)) - cpu_before[name] for name in HUB},
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
    each = -(-islands // args.watched)  # spread over the fleet: who is first takes turns
    watched = Played(
        address=hub.address,
        parameters=args.parameters,
        fragments=args.fragments,
        heartbeat_s=islands / args.rate,
        numbers=tuple(range(0, islands, each)),
        of=islands,
        train=(args.rounds * args.every, args.every),
    )
    others = tuple(sorted(set(range(islands)) - set(watched.numbers)))
    with Crowd(replace(watched, numbers=others)) as crowd:
        async with watched.fleet() as fleet:
            await asyncio.gather(fleet.seeded(), crowd.seeded())
            joined_s = time.monotonic() - began_s
            collect_seldom()  # else its pauses are in what the islands see
            await asyncio.sleep(args.settle)
            quiet = await window(hub, fleet, crowd, lambda: asyncio.sleep(args.seconds))
            rounds = 0.0

            async def some_rounds() -> None:
                nonlocal rounds
                made = await asyncio.gather(fleet.train(*watched.train), crowd.train())
                rounds = (made[0] * len(watched.numbers) + made[1] * len(others)) / islands

            loaded = await window(hub, fleet, crowd, some_rounds)
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
    """Measures what the command line says; returns the exit status."""
    parser = output.parser_of("heartbeats", __doc__, "--islands 32,128,512,1000 --seconds 20")
    output.add_arguments(parser)
    parser.add_argument("--islands", type=output.numbers, default=(32, 128, 512, 1000), metavar="N,N")
    parser.add_argument("--rate", type=float, default=250.0, help="heartbeats of all in a second (default: 250)")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of a window (default: 15)")
    parser.add_argument("--every", type=float, default=8.0, help="seconds between two rounds (default: 8)")
    parser.add_argument("--rounds", type=int, default=4, help="that fall due in the second window (default: 4)")
    parser.add_argument("--watched", type=int, default=64, metavar="N", help="islands looked at (default: 64)")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds before the first window (default: 3)")
    parser.add_argument("--parameters", type=int, default=48_000, help="of the model (default: 48000)")
    parser.add_argument("--fragments", type=int, default=8, metavar="P", help="of the model (default: 8)")
    parser.add_argument("--dir", help="where temporary stores go (default: the usual place)")
    args = parser.parse_args(argv)
    return output.guarded(measure, args)


if __name__ == "__main__":
    sys.exit(main())
