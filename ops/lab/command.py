"""``atoll lab``: learning experiments in virtual time.

atoll lab run examples/lab/parity.toml      run it, or go on with it
atoll lab show examples/lab/parity.toml     what has been run, what is left, what it says so far
atoll lab report                            the tables and plots of docs/results.md, from the records behind it
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from aggregator.store.layout import mapped
from broker.process import sources
from broker.process.signals import Interrupted, Signals
from broker.wire.errors import ConfigError
from ops.lab import report
from ops.lab.experiment import Experiment, label
from ops.lab.records import Record, newest, pack, read, write
from ops.lab.runner import Runner
from ops.lab.schedule import current, due, left_out, load
from ops.lab.statistics import findings
from ops.text import age

RECORDS = Path("runs/lab")
PUBLISHED = Path("docs/results/records.jsonl.xz")
PAGE = Path("docs/results.md")
EXPERIMENTS = Path("examples/lab")

_SHOW_EPILOG = """example: python3 -m ops lab show examples/lab/parity.toml --records docs/results/records.jsonl.xz

--json prints for each experiment: experiment, question, runs, spent_s (processor time), due, left_out (records that do
not count), cells, each with cell, seeds and loss (mean over seeds, of runs that did not diverge), and claims, each with
claim, where, kind, margin, verdict, reason, seeds, difference (relative: candidate / baseline - 1; null without a pair)
and half_width (of its 95 % interval; null with one pair)."""


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
    written = actions.add_parser(
        "report",
        help="writes tables of verdicts and plots, from records",
        epilog="example: python3 -m ops lab report --records runs/lab --out runs/lab.md",
        allow_abbrev=False,
    )
    for each in (run, show):
        each.set_defaults(parser=each)  # knows the flags that may have been meant
        each.add_argument("experiments", nargs="+", type=Path, metavar="FILE", help="such as examples/lab/parity.toml")
        each.add_argument(
            "--records",
            type=sources.as_path,
            default=RECORDS,
            metavar="DIR",
            help=f"where records are kept (default: {RECORDS}); those behind the results page are {PUBLISHED}",
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
    written.add_argument(
        "--records",
        type=sources.as_path,
        default=PUBLISHED,
        metavar="PLACE",
        help=f"of the runs (default: {PUBLISHED})",
    )
    written.add_argument(
        "--out",
        type=sources.as_path,
        metavar="FILE",
        help=f"the page; plots go to a folder of its name (default: {PAGE}, of other records a page beside them)",
    )
    written.add_argument(
        "--experiments", type=Path, default=EXPERIMENTS, metavar="DIR", help=f"their files (default: {EXPERIMENTS})"
    )
    written.add_argument(
        "--pack", type=sources.as_path, metavar="FILE.xz", help="write the records that count there, too"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; see the module's docstring."""
    match args.action:
        case "run":
            return _run(args)
        case "show":
            return _show(args)
        case _:
            return _report(args)


# --- run ------------------------------------------------------------------------------------------------------------


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
    if args.records.suffix == ".xz":
        raise ConfigError("--records", str(args.records), "cannot be added to: give a directory")
    complete, ends_at_s = True, None if args.limit is None else time.monotonic() + 60 * args.limit
    loaded = [load(path) for path in args.experiments]  # what is wrong in any is said before the first hour is spent
    with Signals() as signals:
        for whole in loaded:
            experiment = whole
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
            except Interrupted:
                print(f"{whole.name}: stopped; what was finished is kept, and the same command goes on", flush=True)
                return 130
            complete &= ended
            if ended and (more := len(due(whole, read(args.records, whole.name)))):
                print(f"{whole.name}: {more} more runs without --max-seeds", flush=True)
    return 0 if complete else 1


# --- show -----------------------------------------------------------------------------------------------------------


def _show(args: argparse.Namespace) -> int:
    if args.records != RECORDS and not args.records.exists():
        raise ConfigError("--records", str(args.records), "is not there: give the place that lab run was given")
    for path in args.experiments:
        experiment = load(path)
        row = standing(experiment, read(args.records, experiment.name))
        print(json.dumps(row) if args.json else _told(row), flush=True)
    return 0


def standing(experiment: Experiment, records: tuple[Record, ...]) -> dict[str, Any]:
    """Returns an experiment's state as plain JSON values: runs done, runs due, and its claims so far."""
    results = current(experiment, records)
    cells = []
    for cell, runs in zip(experiment.cells(), results, strict=True):
        losses = [run.loss for run in runs.values() if not run.diverged]
        cells.append({"cell": cell, "seeds": len(runs), "loss": statistics.fmean(losses) if losses else None})
    return {
        "experiment": experiment.name,
        "question": experiment.question,
        "runs": len({run.key for runs in results for run in runs.values()}),
        "spent_s": round(sum(record.spent_s for record in newest(records)), 2),
        "due": len(due(experiment, records)),
        "left_out": left_out(experiment, records),
        "cells": cells,
        "claims": [
            {
                "claim": each.comparison.claim,
                "where": dict(each.group),
                "kind": str(each.comparison.kind),
                "margin": each.comparison.margin,
                "verdict": str(each.verdict),
                "reason": each.reason,
                "seeds": len(each.differences),
                "difference": None if each.interval is None else each.interval.mean,
                "half_width": None
                if each.interval is None or not math.isfinite(each.interval.half_width)
                else each.interval.half_width,
            }
            for each in findings(experiment, results)
        ],
    }


def _told(row: dict[str, Any]) -> str:
    others = f"; {row['left_out']} records do not count" if row["left_out"] else ""
    lines = [
        f"{row['experiment']}: {row['question']}",
        f"  {row['runs']} runs in {age(row['spent_s'])} of processor time; {row['due']} due{others}",
    ]
    for each in row["cells"]:
        loss = "" if each["loss"] is None else f", mean loss {each['loss']:.4f}"
        lines.append(f"  {label(each['cell'])}: {each['seeds']} seeds{loss}")
    for each in row["claims"]:
        where = f" [{label(each['where'])}]" if each["where"] else ""
        figures = "" if each["difference"] is None else f" {100 * each['difference']:+.2f} %"
        figures += "" if each["half_width"] is None else f" ± {100 * each['half_width']:.2f} %"
        reason = f"; {each['reason']}" if each["reason"] else ""
        lines.append(f"  {each['verdict']}: {each['claim']}{where}{figures}{reason}")
    return "\n".join(lines)


# --- report ---------------------------------------------------------------------------------------------------------


def _report(args: argparse.Namespace) -> int:
    records = read(args.records)
    own = args.records == PUBLISHED
    out: Path = args.out or (PAGE if own else args.records.with_name(f"{args.records.name}-results.md"))
    if not out.suffix or out.is_dir():
        raise ConfigError("--out", str(out), "must be a file such as results.md: its plots go to a folder of its name")
    names = {record.experiment for record in records}
    paths = [path for path in sorted(args.experiments.glob("*.toml")) if path.stem in names]
    if not paths:
        cure = f"must have the file of an experiment of which there are records in {args.records}"
        raise ConfigError("--experiments", str(args.experiments), cure)
    chapters, counting = [], []
    for path in paths:
        experiment = load(path)
        results = current(experiment, [record for record in records if record.experiment == experiment.name])
        chapters.append(report.Chapter(experiment=experiment, results=results))
        counting += list({run.key: run for runs in results for run in runs.values()}.values())
    if left := len(newest(records)) - len(counting):
        print(f"atoll: {left} records are left out: they are of no experiment here as it is now", file=sys.stderr)
    with mapped(f"cannot read {out}", definite=True):
        before = out.read_text(encoding="utf-8") if out.exists() else ""
    page = report.filled(before, chapters) if "<!-- lab " in before else report.page_of(chapters, out.stem)
    drawn = report.plots(page, chapters)
    for file, svg in drawn.items():
        write(out.parent / out.stem / file, svg)
    write(out, page.encode())
    if args.pack is not None:
        write(args.pack, pack(counting))
    verdicts = Counter(str(finding.verdict) for each in chapters for finding in each.findings)
    told = ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items())) or "no claims"
    print(f"{out}: {len(chapters)} experiments, {len(counting)} runs, {len(drawn)} plots; {told}")
    return 0
