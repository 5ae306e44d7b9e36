"""The end of a local run: evaluates and exports the model, writes and prints the report."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from aggregator.store.layout import model_path
from broker.process.signals import Signals
from islands.interface.config import LANGUAGE
from ops import run_directory
from ops.plans import devices
from ops.processes.child_process import ProcessSpec, last_lines
from ops.processes.cluster import Change, LocalCluster
from ops.processes.numeric import compilation_cache, one_thread_environment
from ops.processes.supervision import ONE_LIFE
from ops.run import daemons
from ops.run.local_plan import LocalPlan
from ops.run.report import Metrics, Report, render
from ops.text import finite

POLL_S = 0.1
#: In the run directory: version 0, the newest model, and that for other tools.
SEED, MODEL, EXPORT = "seed.safetensors", "model.safetensors", "export"


class GaveUp(Exception):
    """A process could not be kept alive; ``misset``: for its settings."""

    def __init__(self, detail: str, *, misset: bool = False) -> None:
        super().__init__(detail)
        self.misset = misset


def in_short(err: Exception | str) -> str:
    """Returns the error in a sentence, without the end of the log that tells more."""
    return str(err).partition("; the end of ")[0].partition("\n")[0]


def loss_unit(plan: LocalPlan) -> str:
    """Returns the unit of the task's loss, where it is known."""
    return "nats per token" if plan.island.task == LANGUAGE else ""


def judge(plan: LocalPlan, signals: Signals, *, found: tuple[Metrics, Metrics] = ({}, {})) -> tuple[Metrics, Metrics]:
    """Returns the held-out metrics of :data:`SEED`, which is removed, and of :data:`MODEL`.

    What is missing is judged at the same time, in processes of their own: this one never loads JAX.

    Args:
        plan: The run.
        signals: Asked several times a second.
        found: What is known of the two already.

    Raises:
        GaveUp: An evaluation failed; the message has the end of its log.
        Interrupted: A signal came.
    """
    before, after = plan.run_dir / SEED, plan.run_dir / MODEL
    environment = daemons.our_environment(plan.redis_url) | one_thread_environment() | compilation_cache()
    environment |= devices.for_evaluation(plan.devices, sum(not metrics for metrics in found))
    logs = plan.run_dir / "logs"
    specs = [
        ProcessSpec(
            name=name,
            command=daemons.our_command("evaluate", "--config", os.fspath(plan.config_file), "--model", os.fspath(path))
            + daemons.benchmarks(plan),
            environment=environment,
            ends_by_itself=True,
        )
        for name, path, metrics in zip(("evaluate-before", "evaluate-after"), (before, after), found, strict=True)
        if not metrics
    ]
    run_to_the_end(specs, logs, signals)
    before.unlink()
    judged = iter([_metrics_in(logs / f"{spec.name}.log") for spec in specs])
    first, second = (metrics or next(judged) for metrics in found)
    return first, second


def knows_model(plan: LocalPlan) -> bool:
    """Returns True if islands have brought the small files of their model."""
    return any(model_path(plan.store_of(name)).is_dir() for name in plan.shards)


def export_model(plan: LocalPlan, report: Report, signals: Signals) -> Path | None:
    """Writes the newest model as ``from_pretrained`` loads it; None without small files of it.

    Args:
        plan: The run.
        report: So far: the model's card has its metrics.
        signals: Asked several times a second.

    Raises:
        GaveUp: The export failed; the message has the end of its log.
        Interrupted: A signal came.
    """
    if not knows_model(plan):
        return None
    _write(plan, finite(report))
    folder = plan.run_dir / EXPORT
    shutil.rmtree(folder, ignore_errors=True)  # of the run before it went on
    spec = ProcessSpec(
        name="export",
        command=daemons.our_command("export", os.fspath(plan.run_dir), "--hf", os.fspath(folder)),
        environment=daemons.our_environment(plan.redis_url) | one_thread_environment() | daemons.ON_CPU,
        ends_by_itself=True,
    )
    run_to_the_end([spec], plan.run_dir / "logs", signals)
    return folder


def run_to_the_end(specs: Iterable[ProcessSpec], logs: Path, signals: Signals) -> None:
    """Runs processes until all have done their work; the first that dies ends the others.

    Raises:
        GaveUp: One of them failed; the message has the end of its log.
        Interrupted: A signal came.
    """
    with LocalCluster(logs, policy=ONE_LIFE) as cluster:
        cluster.start(specs)
        while cluster.running():
            signals.check()
            for event in cluster.poll():
                if event.change is Change.GAVE_UP:
                    raise GaveUp(event.detail, misset=event.misset)
            time.sleep(POLL_S)


def keep(plan: LocalPlan, report: Report, *, as_json: bool, text: Callable[[Report], str] = render) -> None:
    """Writes a report to the run directory, and says it: as JSON, or as ``text`` makes it."""
    whole: Report = finite(report)
    try:
        _write(plan, whole)
    finally:  # said at least, where it cannot be kept
        print(json.dumps(whole, allow_nan=False) if as_json else text(whole), flush=True)


def _write(plan: LocalPlan, report: Report) -> None:
    run_directory.write(plan.run_dir / "report.json", json.dumps(report, indent=2, allow_nan=False) + "\n")


def _metrics_in(log: Path) -> Metrics:
    line = last_lines(log, 1)
    try:
        found: Metrics = json.loads(line)["metrics"]
    except (ValueError, KeyError, TypeError) as err:
        raise GaveUp(f"{log} should end with what was evaluated, not with {line!r}") from err
    return found
