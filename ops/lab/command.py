"""``atoll lab``: learning experiments in virtual time.

atoll lab run examples/lab/parity.toml      run it, or continue it
atoll lab show examples/lab/parity.toml     finished and missing runs, verdicts so far
atoll lab report                            the tables and plots of docs/results.md, from the records behind it
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import Counter
from pathlib import Path

from aggregator.store.layout import mapped
from broker.base import sources
from broker.base.errors import ConfigError
from broker.process.signals import Interrupted, Signals
from ops.lab import report
from ops.lab.records import Record, newest, pack, read, write
from ops.lab.runner import Runner
from ops.lab.schedule import current, due, left_out, load
from ops.lab.statistics import findings
from ops.plans.experiment import Experiment, label
from ops.text import age

RECORDS = Path("runs/lab")
PUBLISHED = Path("docs/results/records.jsonl.xz")
PAGE = Path("docs/results.md")
EXPERIMENTS = Path("examples/lab")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``atoll lab``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run = actions.add_parser(
        "run",
        help="run experiments, or continue them where they stopped",
        epilog="example: python3 -m ops lab run examples/lab/parity.toml --max-seeds 1",
        allow_abbrev=False,
    )
    show = actions.add_parser(
        "show",
        help="show finished and missing runs, and verdicts so far",
        epilog=f"example: python3 -m ops lab show examples/lab/parity.toml --records {PUBLISHED}",
        allow_abbrev=False,
    )
    written = actions.add_parser(
        "report",
        help=f"writes the tables of verdicts and the plots of {PAGE}, from records",
        epilog="example: python3 -m ops lab report --add runs/lab",
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
    run.add_argument("--jobs", type=int, default=None, metavar="N", help="runs at a time (default: one per processor)")
    run.add_argument(
        "--max-seeds", type=int, metavar="N", help="runs of a cell at most, instead of the file's: for a first look"
    )
    written.add_argument(
        "--add", type=sources.as_path, metavar="DIR", help=f"records to add to those behind the page ({PUBLISHED})"
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
    jobs = len(os.sched_getaffinity(0)) if args.jobs is None else args.jobs
    if jobs < 1:
        raise ConfigError("--jobs", jobs, "must be at least 1")
    if args.max_seeds is not None and args.max_seeds < 1:
        raise ConfigError("--max-seeds", args.max_seeds, "must be at least 1")
    if args.records.suffix == ".xz":
        raise ConfigError("--records", str(args.records), "cannot be added to: give a directory")
    complete = True
    loaded = [load(path) for path in args.experiments]  # errors in any of them come before the first hour is spent
    with Signals() as signals:
        for whole in loaded:
            experiment = whole if args.max_seeds is None else whole.limited(args.max_seeds)
            runner = Runner(
                experiment=experiment,
                directory=args.records,
                jobs=jobs,
                say=lambda line: print(line, flush=True),
            )
            try:
                ended = runner.run(signals.check)
            except Interrupted:
                print(f"{whole.name}: stopped; finished runs are kept, and the same command continues", flush=True)
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
        print(progress_of(experiment, read(args.records, experiment.name)), flush=True)
    return 0


def progress_of(experiment: Experiment, records: tuple[Record, ...]) -> str:
    """Returns the state of an experiment as lines: finished and missing runs, and verdicts so far."""
    results = current(experiment, records)
    runs = len({run.key for of_cell in results for run in of_cell.values()})
    spent_s = round(sum(record.spent_s for record in newest(records)), 2)
    others = f"; {left} records do not count" if (left := left_out(experiment, records)) else ""
    lines = [
        f"{experiment.name}: {experiment.question}",
        f"  {runs} runs in {age(spent_s)} of processor time; {len(due(experiment, records))} due{others}",
    ]
    for cell, of_cell in zip(experiment.cells(), results, strict=True):
        losses = [run.loss for run in of_cell.values() if not run.diverged]
        loss = f", mean loss {statistics.fmean(losses):.4f}" if losses else ""
        lines.append(f"  {label(cell)}: {len(of_cell)} seeds{loss}")
    for each in findings(experiment, results):
        where = f" [{label(each.group)}]" if each.group else ""
        figures = f" {report.difference(each.interval)}" if each.interval is not None else ""
        reason = f"; {each.reason}" if each.reason else ""
        lines.append(f"  {each.verdict}: {each.comparison.claim}{where}{figures}{reason}")
    return "\n".join(lines)


# --- report ---------------------------------------------------------------------------------------------------------


def _report(args: argparse.Namespace) -> int:
    records = (*read(PUBLISHED), *(read(args.add) if args.add is not None else ()))
    names = {record.experiment for record in records}
    paths = [path for path in sorted(EXPERIMENTS.glob("*.toml")) if path.stem in names]
    chapters, counting = [], []
    for path in paths:
        experiment = load(path)
        results = current(experiment, [record for record in records if record.experiment == experiment.name])
        chapters.append(report.Chapter(experiment=experiment, results=results))
        counting += list({run.key: run for runs in results for run in runs.values()}.values())
    if left := len(newest(records)) - len(counting):
        print(f"atoll: {left} records are left out: they are of no experiment here as it is now", file=sys.stderr)
    with mapped(f"cannot read {PAGE}", definite=True):
        page = report.filled(PAGE.read_text(encoding="utf-8"), chapters)
    drawn = report.plots(page, chapters)
    for file, svg in drawn.items():
        write(PAGE.parent / PAGE.stem / file, svg)
    write(PAGE, page.encode())
    if args.add is not None:
        write(PUBLISHED, pack(counting))
    verdicts = Counter(str(finding.verdict) for each in chapters for finding in each.findings)
    told = ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items())) or "no claims"
    print(f"{PAGE}: {len(chapters)} experiments, {len(counting)} runs, {len(drawn)} plots; {told}")
    return 0
