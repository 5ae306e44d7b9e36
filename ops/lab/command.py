"""``atoll lab``: learning experiments in virtual time.

atoll lab run examples/lab/parity.toml      run it, or go on with it
atoll lab show examples/lab/parity.toml     what has been run, what is left, what it says so far
atoll lab report                            docs/results.md and its plots, from all records
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path

from broker.process import flags
from broker.process.signals import Interrupted, Signals
from broker.wire.errors import ConfigError
from ops.lab import report
from ops.lab.experiment import load
from ops.lab.report import RECORDS
from ops.lab.runner import Runner
from ops.lab.sources import as_they_are
from ops.lab.standing import stand

_SHOW_EPILOG = """example: python3 -m ops lab show examples/lab/parity.toml

--json prints for each experiment: experiment, question, runs, tuning_runs, spent_s (processor time), due,
due_after_them, left_out (which records do not count, or empty), tuned (cell, setting, value, interior: neither the
smallest nor the largest that was tried) and claims, each with claim, where, kind, margin, verdict, reason, seeds,
difference (relative: candidate / baseline - 1; null without a pair) and half_width (of its 95 % interval; null with
one pair)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``atoll lab``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run = actions.add_parser(
        "run",
        help="runs experiments, or goes on where they were stopped",
        epilog="example: python3 -m ops lab run examples/lab/parity.toml --max-seeds 1",
        allow_abbrev=False,
    )
    show = actions.add_parser(
        "show",
        help="what was run, what is left, what it says so far",
        epilog=_SHOW_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for each in (run, show):
        each.set_defaults(parser=each)  # knows the flags that may have been meant
        each.add_argument("experiments", nargs="+", type=Path, metavar="FILE", help="such as examples/lab/parity.toml")
        each.add_argument(
            "--records",
            type=flags.path,
            default=RECORDS,
            metavar="DIR",
            help=f"where records are kept (default: {RECORDS})",
        )
    show.add_argument("--json", action="store_true", help="one JSON object for each experiment, on a line")
    run.add_argument("--jobs", type=int, default=None, metavar="N", help="runs at a time (default: one per processor)")
    run.add_argument("--budget", type=float, metavar="MINUTES", help="processor time of each, instead of its file's")
    run.add_argument(
        "--max-seeds", type=int, metavar="N", help="runs of a cell at most, instead of the file's: for a first look"
    )
    run.add_argument("--limit", type=float, metavar="MINUTES", help="start no run after this long, of all files")
    run.add_argument(
        "--accelerator",
        action="store_true",
        help="use the accelerator that JAX finds; one run at a time unless --jobs says otherwise",
    )
    report.add_arguments(
        actions.add_parser(
            "report",
            help="writes docs/results.md from all records",
            epilog="example: python3 -m ops lab report --records mine --out mine.md",
            allow_abbrev=False,
        )
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; see the module's docstring."""
    match args.action:
        case "run":
            return _run(args)
        case "show":
            return _show(args)
        case _:
            return report.run(args)


def _run(args: argparse.Namespace) -> int:
    jobs = args.jobs
    if jobs is None:
        jobs = 1 if args.accelerator else len(os.sched_getaffinity(0))
    if jobs < 1:
        raise ConfigError("--jobs", jobs, "must be at least 1")
    for flag, minutes in (("--budget", args.budget), ("--limit", args.limit)):
        if minutes is not None and not minutes > 0:
            raise ConfigError(flag, minutes, "must be above 0 minutes")
    if args.max_seeds is not None and args.max_seeds < 1:
        raise ConfigError("--max-seeds", args.max_seeds, "must be at least 1")
    complete, ends_at_s = True, None if args.limit is None else time.monotonic() + 60 * args.limit
    loaded = [load(path) for path in args.experiments]  # what is wrong in any is said before the first hour is spent
    with Signals() as signals:
        for each in loaded:
            experiment = whole = as_they_are(each)
            if args.budget is not None:
                experiment = replace(experiment, budget_minutes=args.budget)
            if args.max_seeds is not None:
                experiment = experiment.limited(args.max_seeds)
            runner = Runner(
                experiment=experiment,
                directory=args.records,
                jobs=jobs,
                say=lambda line: print(line, flush=True),
                accelerator=args.accelerator,
                ends_at_s=ends_at_s,
            )
            try:
                ended = runner.run(signals.check)
                complete &= ended
            except Interrupted:
                print(
                    f"{experiment.name}: stopped; what was finished is kept, and the same command goes on", flush=True
                )
                return 130
            if args.max_seeds is not None and ended:
                left = stand(whole, args.records).left
                if more := len(left.due) + left.later:
                    print(f"{whole.name}: at least {more} more runs without --max-seeds", flush=True)
    return 0 if complete else 1


def _show(args: argparse.Namespace) -> int:
    if args.records != RECORDS and not args.records.is_dir():
        raise ConfigError("--records", str(args.records), "is no directory: give the one that lab run was given")
    for path in args.experiments:
        standing = stand(as_they_are(load(path)), args.records)
        print(json.dumps(standing.row()) if args.json else standing.text(), flush=True)
    return 0
