"""The narrowing drill: in mid-run an island's link is cut to a twentieth of its rate, then widened.

Redis, broker, aggregator and islands are the processes of a run, and train at a steady pace; one island reaches the
broker over an emulated link (``ops/links``) that its traffic fills to 5-10 % each way. What happened is read from what
any run leaves: the codec of each contribution and who is in which version from the aggregator's tape, steps from the
pulse files of the islands, bytes from the link's own counters. With ``--strict`` the exit status is 1 unless

* no island's training stands still for more than 0.2 s beyond its pace, in any phase;
* the island behind the link is in at least half of the versions that are made while it is narrow;
* its contributions are all in the recipe's codec again within 30 s after.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aggregator.store.tape import read_lines
from benchmarks import output
from benchmarks.fleet import RUN, Hub
from benchmarks.output import Column, Printer
from broker.base import sources
from broker.base.errors import ConfigError, Unavailable
from broker.wire.messages import Codec
from islands.session.pulse import CAPACITY
from ops.chaos.recording import Observer, Recording, RoundSeen, pulse_file
from ops.chaos.report import longest_stall
from ops.link_proxy import placing
from ops.link_proxy.control import LinkControl, LinkCount
from ops.links import region
from ops.links.condition import MEGA
from ops.processes.child_process import ProcessSpec
from ops.processes.cluster import free_ports
from ops.run.daemons import our_command

#: What ``--strict`` asks for.
MOST_STALL_S, LEAST_SHARE, MOST_BACK_S = 0.2, 0.5, 30.0
#: Time to start, join and compile, until the island behind the link is in a version of every fragment.
START_WITHIN_S = 120.0
#: From then to the first phase: caches fill, the pace settles.
WARM_UP_S = 5.0
POLL_S = 0.1
#: Counters are written by the links process, which answers between two turns of its own.
CONTROL_WITHIN_S = 10.0

#: What islands train, and the rate in Mbit/s that it fills to 5-10 % each way: bf16, H = 24, 0.1 s a step.
ISLANDS, CODEC = 3, Codec.BF16
TASK, OPTIONS, MBIT = "islands.language:task", {"model": "tiny", "batch": 4}, 12.0

COLUMNS = (
    Column(key="phase", title="phase"),
    Column(key="mbit", title="Mbit/s", form="g"),
    Column(key="seconds", title="seconds", form=",.0f"),
    Column(key="up_fill", title="up filled", form=".0%"),
    Column(key="down_fill", title="down filled", form=".0%"),
    Column(key="versions", title="versions"),
    Column(key="share", title="its island in", form=".0%"),
    Column(key="others_share", title="others in", form=".0%"),
    Column(key="codecs", title="its codecs"),
    Column(key="stall_ms", title="its longest stall ms", form=",.0f"),
    Column(key="others_stall_ms", title="others' ms", form=",.0f"),
    Column(key="back_s", title="codec back after s", form=".1f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributed:
    """A pseudo-gradient at the aggregator, ``at_s`` by the monotonic clock that all processes share."""

    at_s: float
    island: str
    codec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of the drill: the link's rate in Mbit/s, when it began and ended, and the bytes each way."""

    name: str
    mbit: float
    from_s: float
    to_s: float
    up_bytes: int
    down_bytes: int


def contributions_of(lines: Iterable[Mapping[str, Any]]) -> list[Contributed]:
    """Returns the contributions on a tape, in its order, but for those whose payload had a flaw.

    Where a contribution's tensors differ in their codec, it is that of most elements.
    """
    found = []
    for line in lines:
        if line.get("event") == "received" and line["kind"] == "contribution" and line["flaw"] is None:
            elements: Counter[str] = Counter()
            for codec, shape, _ in line["buffers"]:
                elements[codec] += math.prod(shape)
            codec = max(elements, key=elements.__getitem__)
            found.append(Contributed(at_s=line["now_s"], island=line["sender"], codec=codec))
    return found


def share_of(island: str, versions: Sequence[RoundSeen]) -> float | None:
    """Returns the part of the versions that an island is in; None of none."""
    return sum(island in each.islands for each in versions) / len(versions) if versions else None


def back_after_s(contributions: Iterable[Contributed], widened_s: float, codec: str) -> float | None:
    """Returns how long after the widening one island's contributions were in ``codec`` again, for good.

    That is to the first one that no contribution in another codec follows; None if there is none.
    """
    back_s: float | None = None
    for each in contributions:
        if each.at_s >= widened_s:
            if each.codec != codec:
                back_s = None
            elif back_s is None:
                back_s = each.at_s - widened_s
    return back_s


def row_of(
    phase: Phase,
    island: str,
    *,
    pace_s: float,
    versions: Sequence[RoundSeen],
    contributions: Sequence[Contributed],
    steps: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Returns the line of one phase.

    Args:
        phase: It.
        island: Whose link it is.
        pace_s: Least time of a step, on every island.
        versions: Of the whole run.
        contributions: Of the whole run.
        steps: Island -> the ends of its steps, in order, of the whole run.
    """
    spell = phase.from_s, phase.to_s
    made = [each for each in versions if phase.from_s <= each.committed_s < phase.to_s]
    sent = [each for each in contributions if phase.from_s <= each.at_s < phase.to_s and each.island == island]
    stalls_ms = {name: 1e3 * longest_stall(ends, spell, pace_s)[0] for name, ends in steps.items()}
    others = [name for name in steps if name != island]
    shares = [share for name in others if (share := share_of(name, made)) is not None]
    full_bytes = phase.mbit * MEGA / 8 * (phase.to_s - phase.from_s)
    codecs = Counter(each.codec for each in sent)
    return {
        "phase": phase.name,
        "mbit": phase.mbit,
        "seconds": phase.to_s - phase.from_s,
        "up_fill": phase.up_bytes / full_bytes,
        "down_fill": phase.down_bytes / full_bytes,
        "versions": len(made),
        "share": share_of(island, made),
        "others_share": min(shares, default=None),
        "contributions": dict(codecs),
        "codecs": ", ".join(f"{codec} {count}" for codec, count in codecs.most_common()) or "none",
        "stalls_ms": stalls_ms,
        "stall_ms": stalls_ms[island],
        "others_stall_ms": max((stalls_ms[name] for name in others), default=None),
        "back_s": None,
    }


def exceeded(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns what was not as it should be, a sentence each, of the rows before, narrow and after."""
    said = []
    for row in rows:
        for name, stall_ms in row["stalls_ms"].items():
            if stall_ms > 1e3 * MOST_STALL_S:
                said.append(f"{row['phase']}: {name} stood still for {stall_ms:.0f} ms, more than {MOST_STALL_S:g} s")
    _, narrow, after = rows
    if narrow["share"] is None or narrow["share"] < LEAST_SHARE:
        share = "no version was made" if narrow["share"] is None else f"its island is in {narrow['share']:.0%} of them"
        said.append(f"narrow: {share}, less than {LEAST_SHARE:.0%}")
    if after["back_s"] is None or after["back_s"] > MOST_BACK_S:
        back = "never" if after["back_s"] is None else f"after {after['back_s']:.1f} s"
        said.append(f"after: its codec was back {back}, later than {MOST_BACK_S:g} s")
    return said


class Drill:
    """One run: a hub, islands, and the link of the last one.

    Args:
        args: Flags of the command.
        directory: Existing and empty.
        printer: Told what happens.
    """

    def __init__(self, args: argparse.Namespace, directory: Path, printer: Printer) -> None:
        self._args, self._directory, self._printer = args, directory, printer
        self._names = tuple(f"island-{i}" for i in range(ISLANDS))
        self.narrow = self._names[-1]
        self._hub = Hub(directory, islands=ISLANDS, codec=CODEC)
        self.recording = Recording(islands=self._names)
        self._observer = Observer(directory, self.recording)
        self._link = placing.place(
            region.parse(self._region(), source="the drill's link"),
            {self.narrow: [self._address(0), self._address(1)]},
            find_ports=free_ports,
            run_dir=directory,
        )
        self._control = LinkControl(self._link.control, within_s=CONTROL_WITHIN_S)

    def run(self) -> list[Phase]:
        """Trains through the three phases, and ends everything; raises Unavailable if a process dies."""
        args = self._args
        with self._hub as hub:
            self._link.wiring_file.write_text(self._link.wiring.dump(), encoding="utf-8")
            hub.start([self._link.process(our_command("links"), hub.numeric_environment())])
            hub.cluster.wait_for_port(placing.PROCESS_NAME, self._link.wiring.wires[self.narrow].doors[-1].listen)
            hub.start(self._link.reroute(self._islands()))
            self._wait_for_training()
            self._observe(WARM_UP_S)
            wide = self._control.conditions()[self.narrow]
            rate = args.mbit / args.times
            phases = [self._phase("before", args.mbit, args.before)]
            self._control.set(self.narrow, wide.changed({"mbit": rate}))
            phases.append(self._phase("narrow", rate, args.narrow))
            self._control.clear(self.narrow)
            phases.append(self._phase("after", args.mbit, args.after))
            self._observer.look()
        self._observer.look()  # what the aggregator wrote before it ended
        return phases

    def rows(self, phases: Sequence[Phase]) -> list[dict[str, Any]]:
        """Returns the line of each phase, once everything has ended."""
        contributions = contributions_of(read_lines(self._hub.tape))
        steps = {name: [beat.at_s for beat in beats] for name, beats in self.recording.steps.items()}
        rows = [
            row_of(
                phase,
                self.narrow,
                pace_s=self._args.pace,
                versions=self.recording.rounds,
                contributions=contributions,
                steps=steps,
            )
            for phase in phases
        ]
        own = [each for each in contributions if each.island == self.narrow and each.at_s < phases[-1].to_s]
        rows[-1]["back_s"] = back_after_s(own, phases[-1].from_s, str(CODEC))
        return rows

    def _region(self) -> str:
        delay_ms = self._args.round_trip_ms / 2
        return f'[link."{self.narrow}"]\nmbit = {self._args.mbit}\ndelay_ms = {delay_ms}\n'

    def _address(self, beyond: int) -> tuple[str, int]:
        host, _, port = self._hub.address.removeprefix("tcp://").rpartition(":")
        return host, int(port) + beyond

    def _islands(self) -> list[ProcessSpec]:
        cpus = sorted(os.sched_getaffinity(0))
        specs = []
        for i, name in enumerate(self._names):
            config, pulse = self._directory / f"{name}.toml", pulse_file(self._directory, name)
            island = {
                "run_id": RUN,
                "broker": self._hub.address,
                "task": TASK,
                "island_id": name,
                "pace": self._args.pace,
                "pulse": os.fspath(pulse),
            }
            config.write_text(sources.to_toml({"island": island, "task": OPTIONS}), encoding="utf-8")
            spec = ProcessSpec(
                name=name,
                command=our_command("island", "--config", os.fspath(config)),
                environment=self._hub.numeric_environment() | {"JAX_PLATFORMS": "cpu"},
                cpus=(cpus[i % len(cpus)],),
                ends_by_itself=True,
            )
            specs.append(spec)
        return specs

    def _wait_for_training(self) -> None:
        ends_s = time.monotonic() + START_WITHIN_S
        while sum(self.narrow in each.islands for each in self.recording.rounds) < self._hub.config.fragments:
            if time.monotonic() > ends_s:
                what = f"after {START_WITHIN_S:g} s {self.narrow} is in too few versions"
                raise Unavailable(f"{what}; give the link a higher --mbit", definite=True)
            self._observe(POLL_S)

    def _phase(self, name: str, mbit: float, seconds: float) -> Phase:
        self._printer.say(f"{name}: {mbit:g} Mbit/s for {seconds:g} s")
        before, from_s = self._count(), time.monotonic()
        self._observe(seconds)
        after, to_s = self._count(), time.monotonic()
        up_bytes, down_bytes = after.up_bytes - before.up_bytes, after.down_bytes - before.down_bytes
        return Phase(name=name, mbit=mbit, from_s=from_s, to_s=to_s, up_bytes=up_bytes, down_bytes=down_bytes)

    def _count(self) -> LinkCount:
        return self._control.counts()[self.narrow]

    def _observe(self, seconds: float) -> None:
        ends_s = time.monotonic() + seconds
        while (left_s := ends_s - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left_s))
            self._hub.check()
            self._observer.look()


def measure(args: argparse.Namespace, printer: Printer) -> int:
    """Runs the drill; with ``--strict`` returns 1 if a limit was exceeded."""
    if args.pace * CAPACITY < 10 * POLL_S:
        raise ConfigError("pace", args.pace, "must be longer, or steps are lost between two looks at them")
    with tempfile.TemporaryDirectory(prefix="atoll-narrowing-") as directory:
        drill = Drill(args, Path(directory), printer)
        rows = drill.rows(drill.run())
    for row in rows:
        printer.add(row)
    said = exceeded(rows)
    for each in said:
        printer.say(each)
    return int(args.strict and bool(said))


def main(argv: list[str] | None = None) -> int:
    parser = output.parser_of("narrowing", __doc__, "--narrow 60 --strict")
    parser.add_argument("--pace", type=float, default=0.1, help="least seconds of an inner step, of all (0.1)")
    parser.add_argument("--mbit", type=float, default=MBIT, help="rate of the link each way (12)")
    parser.add_argument("--round-trip-ms", type=float, default=40.0, help="of the link (40)")
    parser.add_argument("--times", type=float, default=20.0, help="how many times narrower it becomes (20)")
    for name, what in (("before", "as wide as it is"), ("narrow", "narrow"), ("after", "wide again")):
        parser.add_argument(f"--{name}", type=float, default=60.0, metavar="S", help=f"seconds {what} (60)")
    parser.add_argument("--strict", action="store_true", help="fail if a limit is exceeded")
    args = parser.parse_args(argv)
    if args.quick:
        args.pace, args.before, args.narrow, args.after = 0.05, 3.0, 4.0, 3.0
    return output.guarded(measure, args, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
