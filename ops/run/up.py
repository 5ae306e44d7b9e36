"""``up``: a whole run on this machine, in one command.

Settles the settings, has the run trained (:mod:`ops.run.local_run`), evaluates the model before and after, and reports.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from broker.base.errors import ConfigError, Unavailable
from broker.process.signals import Interrupted, Signals
from ops.dashboard.command import HOST, PORT, check_packages, listen
from ops.dashboard.plot import FILE, WholeRun, write_report
from ops.evaluation.curve_file import read_points
from ops.models.global_model import Which, export
from ops.run import daemons, explained_settings, local_plan, resume
from ops.run.display import Display
from ops.run.end_of_run import MODEL, SEED, GaveUp, in_short, judge, keep
from ops.run.local_plan import LocalPlan
from ops.run.local_run import LocalRun
from ops.run.prepare import prepare
from ops.run.report import Metrics
from ops.story.curve import Point
from ops.terminal import Screen

_EPILOG = """
--resume RUN_DIR continues a run that was stopped, killed or cut off by a power failure. It keeps the settings, the run
id and the exact momentum, and nothing that was merged is lost.

A run ends at the first heartbeat after its tokens, and then merges what the islands still have.
What its recipe leaves open suits the inner optimizer of its first island; status and report say what it came to.

exit status:
  0    the run trained its tokens, and the report is complete
  1    a process could not be kept alive, or the model could not be evaluated; the report has what is known
  2    a setting is wrong, or contradicts those of the run to be resumed
  130  interrupted by Ctrl-C (143 by SIGTERM, 129 by SIGHUP); the report has what was done until then"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``up``."""
    parser.add_argument(
        "--json", action="store_true", help="the report as one JSON object, on standard output's last line"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RUN_DIR",
        help=f"go on with the run in this directory, with its own settings; only {resume.CHANGES_HELP}",
    )
    parser.add_argument(
        "--explain-settings",
        action="store_true",
        help="show every setting that decides learning, with the paper's beside it, and start nothing (also as --json)",
    )
    parser.add_argument(
        "--dashboard",
        type=int,
        metavar="PORT",
        nargs="?",
        const=PORT,
        help=f"serve a page of the run, for this machine's browsers (default port: {PORT})",
    )
    local_plan.add_arguments(parser)
    parser.epilog = f"{parser.epilog}\n{_EPILOG}"


def run(args: argparse.Namespace) -> int:
    """Runs from start to report; returns the exit status that ``--help`` lists.

    Raises:
        ConfigError: A setting cannot work; nothing was started.
        Unavailable: The run directory cannot be written, or there is no Redis; nothing is left running.
    """
    started_s = time.monotonic()
    if args.explain_settings:
        return _explain(args)
    if args.dashboard is not None:
        check_packages("dashboard", args.dashboard)
        listen(HOST, args.dashboard).close()  # else it is taken: said before anything is started
    plan = prepare(args)
    run_ = LocalRun(
        plan=plan,
        started_s=started_s,
        resumed=args.resume is not None,
        dashboard=args.dashboard,
        as_called=args.as_called,
    )
    with Signals() as signals, Display() as display:
        status = 0 if run_.resumed and resume.has_ended(plan) else run_.train(display, signals)
        if plan.metrics_ports and status not in (1, 2):  # nobody is to look for what ended well, or was ended
            with contextlib.suppress(Unavailable):
                daemons.write_scrape_targets(plan, live=False)
        judged: tuple[Metrics, Metrics] = ({}, {})
        if status == 0:
            try:
                judged = evaluate(plan, run_.last_stores(), display, signals)
            except (GaveUp, Unavailable, ConfigError) as err:
                status, run_.note = 1, f"not evaluated: {in_short(err)}"
                display.note(f"not evaluated: {err}")
            except Interrupted as err:
                status, run_.note = 128 + err.number, str(err)
        if status == 0:
            run_.export_model(judged, display, signals)
    with contextlib.suppress(ConfigError, Unavailable):  # of a run that never began, or a disk that is full
        told = WholeRun(plan.run_dir)
        run_.told = told.history
        write_report(told, plan.run_dir / FILE, stopped=True)
    keep(plan, run_.report(status, judged), as_json=args.json)
    return status


def _explain(args: argparse.Namespace) -> int:
    """Shows the settings that decide learning, and starts nothing."""
    url = "redis://127.0.0.1:6379"  # of no concern here, as are directory and port
    plan = local_plan.resolve(args, run_dir=Path("run").absolute(), port=1024, redis_url=url, redis_port=None)
    rows = explained_settings.explained(plan.aggregator)
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        Screen().print(explained_settings.render(plan.aggregator.profile, rows))
    return 0


# --- after --------------------------------------------------------------------------------------------------------


def evaluate(plan: LocalPlan, stores: Sequence[Path], display: Display, signals: Signals) -> tuple[Metrics, Metrics]:
    """Returns the held-out metrics of version 0 and the newest model, and leaves ``model.safetensors``.

    What was evaluated while the run trained is not evaluated again.

    Raises:
        GaveUp: An evaluation failed; the message has the end of its log.
        Interrupted: A signal came.
        Unavailable: The store cannot be read.
    """
    # The first version is in the store of whoever began: a standby may have come after it.
    first = export(plan.run_dir, plan.run_dir / SEED, which=Which.SEED)
    last = export(stores, plan.run_dir / MODEL)
    points = read_points(plan.run_dir)
    found = known(points, first.digest), known(points, last.digest)
    missing = " and ".join(when for when, metrics in zip(("before", "after"), found, strict=True) if not metrics)
    if missing:
        display.note(f"evaluating the model {missing}")
    return judge(plan, signals, found=found)


def known(points: Sequence[Point], model: str) -> Metrics:
    """Returns what was measured of a model while the run trained; nothing if it, or a part of it, was not."""
    for point in reversed(points):
        if point.model == model and not point.failed:
            return {name: {"value": x, "better": point.better.get(name, "")} for name, x in point.metrics.items()}
    return {}
