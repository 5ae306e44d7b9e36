"""What the laboratory adds to the training steps it runs: ``python -m benchmarks.lab_overhead``.

The same inner steps, with the same shapes and as many of them, run as a plain loop and as a decoupled run in virtual
time; the two alternate, in one process with the environment of a laboratory run, after one of each to compile.
*Overhead* is processor time of the run without its held-out evaluations, against that of the plain loop: the median of
the ratios of neighbouring runs, since a machine's speed drifts.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from functools import partial

from benchmarks import output
from benchmarks.output import Column
from islands.tasks.task import DataShare, Params, Schedule, Task, load_task
from ops.lab import decoupled
from ops.lab.settings import CellSettings, cell_settings
from ops.processes.numeric import heap_that_stays, one_thread_environment

COLUMNS = (
    Column(key="islands", title="islands"),
    Column(key="model", title="model"),
    Column(key="optimizer", title="optimizer"),
    Column(key="steps", title="steps"),
    Column(key="plain_s", title="plain loop s", form=".2f"),
    Column(key="lab_s", title="laboratory s", form=".2f"),
    Column(key="overhead", title="overhead", form="+.1%"),
)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark and returns its exit status."""
    parser = output.parser_of("lab_overhead", __doc__, "--islands 4,8 --model tiny")
    parser.add_argument("--islands", type=output.numbers, default=(2, 8), metavar="N,N", help="fleets (default: 2,8)")
    parser.add_argument("--model", default="tiny", help="tiny, small or medium (default: %(default)s)")
    parser.add_argument("--optimizer", default="adamw", help="adamw or muon, inside (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sequences per inner step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=384, help="inner steps per island (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=5, help="runs of each kind (default: %(default)s)")
    output.add_arguments(parser)
    return output.guarded(measure, parser.parse_args(argv))


def measure(args: argparse.Namespace) -> int:
    """Measures every fleet and prints the table."""
    quick = bool(args.quick)
    fleets = (2,) if quick else args.islands
    steps, repetitions = (24, 1) if quick else (args.steps, args.repetitions)
    options = {"model": args.model, "optimizer": args.optimizer, "batch": 4 if quick else args.batch}
    task = load_task("islands.language:task", options)
    printer = output.Printer(COLUMNS, as_json=args.json)
    for islands in fleets:
        cell = cell_settings({"mode": "decoupled", "islands": islands, "steps": steps, "evaluations": 1})
        printer.say(f"{islands} islands, {steps} inner steps of each")
        plain_s, lab_s = _alternating(repetitions, task, cell)
        printer.add(
            {
                "islands": islands,
                "model": args.model,
                "optimizer": args.optimizer,
                "steps": steps * islands,
                "plain_s": statistics.median(plain_s),
                "lab_s": statistics.median(lab_s),
                "overhead": statistics.median(lab / plain for plain, lab in zip(plain_s, lab_s, strict=True)) - 1,
            }
        )
    printer.close()
    return 0


def _alternating(repetitions: int, task: Task, cell: CellSettings) -> tuple[list[float], list[float]]:
    """Returns processor seconds of the plain loop and of the laboratory, for the steps of the cell."""
    plain_s, lab_s = [], []
    gc.collect()
    gc.freeze()  # as a run of the laboratory does once its task is loaded
    for repetition in range(repetitions + 1):
        began_s = time.process_time()
        _plain(task, cell.steps * cell.islands)
        passed_s = time.process_time() - began_s
        began_s = time.process_time()
        outcome = decoupled.run(task, cell, seed=0, judge=_no_judge)
        steps = outcome.tokens / task.tokens_per_step
        lab_passed_s = (time.process_time() - began_s) * cell.steps * cell.islands / steps
        if repetition:
            plain_s.append(passed_s)
            lab_s.append(lab_passed_s)
    return plain_s, lab_s


def _plain(task: Task, steps: int) -> None:
    params, state = task.init(0)
    batches = task.data(DataShare(index=0, count=1))
    for t in range(steps):
        step = partial(task.train, params, state, next(batches), Schedule(t, steps))
        params, state, loss = step()
        loss.block_until_ready()


def _no_judge(params: Params) -> float:
    return 0.0


if __name__ == "__main__":
    # One processor and one thread, as a run of the laboratory has: libraries read that as they are imported.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if "intra_op_parallelism_threads=1" not in os.environ.get("XLA_FLAGS", ""):
        arguments = [sys.executable, "-m", "benchmarks.lab_overhead", *sys.argv[1:]]
        os.execve(sys.executable, arguments, os.environ | one_thread_environment() | heap_that_stays())
    sys.exit(main())
