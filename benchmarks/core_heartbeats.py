"""Measures a heartbeat's cost to the aggregator's core by number of islands: no socket, disk, Redis.

The core is fed what a fleet says in virtual time: all join, one gives version 0, and all send heartbeats, evenly
spread, while rounds are open that nobody answers. *us* is this process's time for one heartbeat, with the question for
the next deadline that its driver asks after it: the best of some repetitions, for others use the machine. *x first* is
that over the first line's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque

from aggregator.interface import events as agg
from aggregator.interface.config import AggregatorConfig
from aggregator.rounds.core import Aggregator
from benchmarks import output
from benchmarks.fleet import RUN
from benchmarks.output import Column, Printer
from broker.wire import messages as m
from broker.wire.fragments import Kind, TensorSpec

STEP_S, FRAGMENTS, REPETITIONS = 0.25, 8, 5
COLUMNS = (
    Column(key="islands", title="islands"),
    Column(key="joins_us", title="us per join", form=",.0f"),
    Column(key="us", title="us per heartbeat", form=",.0f"),
    Column(key="ratio", title="x first", form=".2f"),
    Column(key="open_rounds", title="rounds open"),
)


class Fleet:
    """A core, and what its islands and its disk say to it.

    Args:
        islands: How many.
        fragments: Of the model, one tensor each.
    """

    def __init__(self, islands: int, fragments: int) -> None:
        config = AggregatorConfig(run_id=RUN, islands=islands, fragments=fragments, sync_interval=4 * fragments)
        self.now_s, self.sequence = 0.0, 0
        self.names = [f"island-{i}" for i in range(islands)]
        self.core = Aggregator(config, now_s=0.0)
        self.heartbeat_s = config.liveness.interval_of(islands)
        self._fragments = fragments
        self._todo: deque[agg.Event] = deque()
        self._take(self.core.start(0.0))
        self._complete()

    def join(self) -> None:
        """Lets all join, and one give version 0."""
        tensors = tuple(
            TensorSpec(name=f"w{p}", shape=(8, 8), dtype="float32", kind=Kind.RDA) for p in range(self._fragments)
        )
        for name in self.names:
            join = m.Join(nonce=name, island_id=name, hint="", tensors=tensors, tokens_per_step=8)
            self.now_s += 0.001
            self.say(m.joining(name), join, 0)
        self.beat(self.names[0], held=False)  # whose answer asks for version 0
        for p in range(self._fragments):
            self.say(self.names[0], m.Seed(fragment_id=p, payload=()), 1)

    def beat(self, name: str, *, held: bool = True) -> None:
        """Sends a heartbeat of an island that steps with the clock."""
        step = int(self.now_s / STEP_S)
        beat = m.Heartbeat(
            inner_step=step,
            tokens=8 * step,
            loss=1.0,
            step_time_s=STEP_S,
            sync_share=0.0,
            bytes_up=0,
            bytes_down=0,
            versions=(0 if held else -1,) * self._fragments,
            overwritten_tokens=(0,) * self._fragments,
            outstanding=(),
            stopped=False,
        )
        self.say(name, beat, 1)

    def round_of_beats(self) -> float:
        """Sends one heartbeat of each island; returns the seconds that one took."""
        spent_s = 0.0
        for name in self.names:
            self.now_s += self.heartbeat_s / len(self.names)
            began_s = time.process_time()
            self.beat(name)
            self.core.next_deadline_s()
            spent_s += time.process_time() - began_s
        return spent_s / len(self.names)

    def say(self, sender: str, message: m.Message, incarnation: int) -> None:
        """Hands a message to the core, and whatever follows."""
        self.sequence += 1
        envelope = m.Envelope(
            run_id=RUN,
            sender=sender,
            incarnation=incarnation,
            sequence=self.sequence,
            to=m.AGGREGATOR,
            message=message,
        )
        self._take(self.core.handle(agg.Received(envelope=envelope, payload_bytes=0), self.now_s))
        self._complete()

    def _complete(self) -> None:
        while self._todo:
            self._take(self.core.handle(self._todo.popleft(), self.now_s))

    def _take(self, actions: list[agg.Action]) -> None:
        for action in actions:
            match action:
                case agg.SaveRun(serial=serial):
                    self._todo.append(agg.RunSaved(serial=serial))
                case agg.Plant(fragment_id=p):
                    self._todo.append(agg.Computed(fragment_id=p, fragment_version=0, digest=f"{p}.0"))
                case agg.Persist(commit=commit):
                    done = agg.Persisted(fragment_id=commit.fragment_id, fragment_version=commit.fragment_version)
                    self._todo.append(done)
                case _:
                    pass


def measure(args: argparse.Namespace, printer: Printer) -> None:
    """Measures every number of islands."""
    first_us: float | None = None
    for islands in (4, 8) if args.quick else args.islands:
        fleet = Fleet(islands, FRAGMENTS)
        began_s = time.process_time()
        fleet.join()
        joins_us = 1e6 * (time.process_time() - began_s) / islands
        for _ in range(max(2, round(2.0 / fleet.heartbeat_s))):
            fleet.round_of_beats()  # until rounds are open
        us = 1e6 * min(fleet.round_of_beats() for _ in range(REPETITIONS))
        first_us = first_us or us
        rounds = len(fleet.core.run.schedule.open_rounds)
        printer.add({"islands": islands, "joins_us": joins_us, "us": us, "ratio": us / first_us, "open_rounds": rounds})


def main(argv: list[str] | None = None) -> int:
    parser = output.parser_of("core_heartbeats", __doc__, "--islands 32,128,512,1000")
    parser.add_argument("--islands", type=output.numbers, default=(32, 128, 512, 1000), metavar="N,N")
    return output.guarded(measure, parser.parse_args(argv), COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
