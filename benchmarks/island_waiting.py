"""Measures an island's time for synchronisation, and its steps per second against training alone.

One island is pinned to a processor of its own. Redis, broker, aggregator and the other islands share the remaining
ones, so that what is seen is the cost of taking part and not of sharing a processor. The base is the same task in the
same loop without Atoll, on the same processor. Base and fleets alternate within one run, and medians count.

``sync share`` is what the island itself reports (report.json): the part of the training thread's time that was spent
in ``Island.step``. ``CPU per step`` counts the whole process, with the threads that encode and send beside training;
unlike steps per second it hardly changes when others use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import output
from benchmarks.fleet import ROOT_ENVIRONMENT, RUN, Hub, group, module_command
from benchmarks.output import Column, Printer, median
from benchmarks.stopwatch import Timing
from broker.process import toml
from broker.wire.errors import ConfigError, Unavailable
from ops.processes.child_process import ProcessSpec
from ops.processes.cluster import Change, LocalCluster
from ops.processes.numeric import compilation_cache, one_thread_environment
from ops.run.daemons import our_command

#: Steps before these seconds are not counted: caches fill, the first rounds open. At most as long as what is counted.
WARM_UP_S = 2.0
#: Time to start, join and compile, beyond what is measured.
START_WITHIN_S = 90.0
POLL_S = 0.05

#: Name -> task, its options, and how many tokens an inner step trains (for the report only).
TASKS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "numpy": ("examples.numpy_task:task", {}),
    "numpy-1M": ("examples.numpy_task:task", {"hidden": 20_480}),
    "jax-tiny": ("islands.language:task", {"model": "tiny"}),
    "jax": ("islands.language:task", {}),
}

COLUMNS = (
    Column(key="task", title="task"),
    Column(key="islands", title="islands"),
    Column(key="steps_per_s", title="steps/s", form=",.1f"),
    Column(key="speed", title="x alone", form=".3f"),
    Column(key="cpu_ms_per_step", title="CPU ms per step", form=",.3f"),
    Column(key="cpu", title="x alone", form=".3f"),
    Column(key="sync_share", title="sync share", form=".3%"),
    Column(key="rounds_per_s", title="rounds/s", form=".2f"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run: ``sync_share`` and ``rounds_per_s`` are None where there is no fleet."""

    timing: Timing
    sync_share: float | None = None
    rounds_per_s: float | None = None


def run_alone(task: str, options: Mapping[str, Any], seconds: float, directory: Path, cpu: int) -> Sample:
    """Trains without Atoll on one processor."""
    out = directory / "timing.json"
    command = module_command(
        "benchmarks.stopwatch",
        *("--task", task, "--options", json.dumps(dict(options)), "--out", os.fspath(out)),
        *("--seconds", str(seconds), "--warm-up-s", str(min(WARM_UP_S, seconds))),
    )
    environment = ROOT_ENVIRONMENT | one_thread_environment() | compilation_cache()
    spec = ProcessSpec(name="alone", command=command, environment=environment, cpus=(cpu,), ends_by_itself=True)
    with group(directory / "logs", [spec]) as cluster:
        return Sample(timing=_timing(out, cluster, seconds))


def run_fleet(
    task: str,
    options: Mapping[str, Any],
    islands: int,
    seconds: float,
    directory: Path,
    cpu: int,
    others: tuple[int, ...],
) -> Sample:
    """Trains as one of ``islands``, the only one on its processor."""
    out = directory / "timing.json"
    timing = {"inner": task, "out": os.fspath(out), "seconds": seconds, "warm_up_s": min(WARM_UP_S, seconds), **options}
    with ExitStack() as stack:
        hub = stack.enter_context(Hub(directory, cpus=others, islands=islands))
        island = {"run_id": RUN, "broker": hub.address}
        specs = []
        for i in range(islands):
            config = directory / f"island-{i}.toml"
            name, mine = ("benchmarks.stopwatch:timed", timing) if i == 0 else (task, options)
            config.write_text(
                toml.dump({"island": island | {"task": name, "island_id": f"island-{i}"}, "task": mine}),
                encoding="utf-8",
            )
            spec = ProcessSpec(
                name=f"island-{i}",
                command=our_command("island", "--config", os.fspath(config)),
                environment=hub.numeric_environment(),
                cpus=(cpu,) if i == 0 else others,
                ends_by_itself=True,
            )
            specs.append(spec)
        began_s = time.monotonic()
        hub.start(specs)
        measured = _timing(out, hub.cluster, seconds)
        took_s = time.monotonic() - began_s
    report = json.loads(hub.report.read_text(encoding="utf-8"))
    rounds = sum(report["rounds"].values())
    share = report["islands"]["island-0"]["sync_share"]
    return Sample(timing=measured, sync_share=share, rounds_per_s=rounds / took_s)


def _timing(out: Path, cluster: LocalCluster, seconds: float) -> Timing:
    """Waits for the stopwatch; raises Unavailable if a process dies first, or it never comes."""
    ends_s = time.monotonic() + seconds + WARM_UP_S + START_WITHIN_S
    while not out.exists():
        for event in cluster.poll():
            if event.change is not Change.ENDED:
                raise Unavailable(f"{event.detail}: see {cluster.log_of(event.process)}", definite=True)
        if time.monotonic() > ends_s:
            raise Unavailable(f"no timing after {START_WITHIN_S:g} s more than was measured", definite=True)
        time.sleep(POLL_S)
    return Timing(**json.loads(out.read_text(encoding="utf-8")))


def row_of(name: str, islands: int, samples: list[Sample], base: list[Sample]) -> dict[str, Any]:
    """Returns the line of a task and fleet size: medians, and medians of ratios to the base beside each."""
    speeds = [each.timing.steps / each.timing.wall_s for each in samples]
    cpus = [each.timing.cpu_s / each.timing.steps for each in samples]
    base_speeds = [each.timing.steps / each.timing.wall_s for each in base]
    base_cpus = [each.timing.cpu_s / each.timing.steps for each in base]
    shares = [each.sync_share for each in samples if each.sync_share is not None]
    rounds = [each.rounds_per_s for each in samples if each.rounds_per_s is not None]
    return {
        "task": name,
        "islands": islands,
        "repetitions": len(samples),
        "steps_per_s": median(speeds),
        "speed": median(a / b for a, b in zip(speeds, base_speeds, strict=True)),
        "cpu_ms_per_step": 1e3 * median(cpus),
        "cpu": median(a / b for a, b in zip(cpus, base_cpus, strict=True)),
        "sync_share": median(shares) if shares else None,
        "rounds_per_s": median(rounds) if rounds else None,
    }


def measure(args: argparse.Namespace) -> int:
    """Alternates base and fleets, then prints a line for each."""
    tasks, fleets, repetitions, seconds = args.task or ["numpy", "jax"], args.islands, args.repetitions, args.seconds
    if args.quick:
        tasks, fleets, repetitions, seconds = ["numpy"], (1,), 1, 0.5
    cpu, *rest = sorted(os.sched_getaffinity(0))
    if not rest:
        raise ConfigError("cpus", 1, "this process may use one processor only; the measured island needs its own")
    printer = Printer(COLUMNS, as_json=args.json)
    for name in tasks:
        task, options = TASKS[name]
        samples: dict[int, list[Sample]] = {0: [], **{n: [] for n in fleets}}
        for repetition in range(repetitions):
            for n in samples:
                printer.say(f"{name}, {f'{n} islands' if n else 'alone'}, repetition {repetition + 1} of {repetitions}")
                with tempfile.TemporaryDirectory(prefix="atoll-waiting-", dir=args.dir) as directory:
                    path = Path(directory)
                    if n:
                        samples[n].append(run_fleet(task, options, n, seconds, path, cpu, tuple(rest)))
                    else:
                        samples[0].append(run_alone(task, options, seconds, path, cpu))
        for n, measured in samples.items():
            printer.add(row_of(name, n, measured, samples[0]))
    printer.close()
    return 0


def main(argv: list[str] | None = None) -> int:
    """Parses, measures, prints."""
    parser = output.parser_of("island_waiting", __doc__, "--task jax --islands 1,4 --seconds 20 --repetitions 5")
    output.add_arguments(parser)
    parser.add_argument("--task", choices=list(TASKS), action="append", help="repeatable (numpy and jax)")
    parser.add_argument("--islands", type=output.numbers, default=(1, 4))
    parser.add_argument("--seconds", type=float, default=10.0, help="measured per run, after a warm-up of 2 s (10)")
    parser.add_argument("--repetitions", type=int, default=3, help="of base and fleets, in turn (3)")
    parser.add_argument("--dir", default=None, help="where temporary stores are written")
    return output.guarded(measure, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
