"""Runs an experiment: several runs at once, each in its own process, until none is due.

After every run :mod:`ops.lab.schedule` decides from the records which runs are due.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aggregator.store.layout import mapped
from broker.base.errors import Unavailable
from ops.lab.records import Record, append, newest, read
from ops.lab.schedule import Run, due, left_out
from ops.plans.cell import resolved
from ops.plans.experiment import Experiment, label
from ops.processes.child_process import Child, ProcessSpec, stop_in_order
from ops.processes.numeric import compilation_cache, heap_that_stays, one_thread_environment
from ops.run_directory import hold
from ops.text import age

LOOK_EVERY_S = 0.5
STOP_WITHIN_S = 3.0

#: So many failures without one run that succeeds have one cause, and hundreds more would tell no more of it.
FAILURES = 3


@dataclass(slots=True)
class _Running:
    run: Run
    child: Child
    slot: int
    result: Path


@dataclass(slots=True)
class Runner:
    """Runs one experiment.

    Attributes:
        experiment: The experiment to run.
        directory: Where records are kept.
        jobs: Runs at a time; each has a processor of its own.
        say: Prints a line.
    """

    experiment: Experiment
    directory: Path
    jobs: int
    say: Callable[[str], None]
    _records: list[Record] = field(default_factory=list)  # of any age: other settings have been paid for as well
    _running: list[_Running] = field(default_factory=list)
    _failed: set[str] = field(default_factory=set)
    _succeeded: bool = False

    def run(self, check: Callable[[], None]) -> bool:
        """Carries out due runs; returns whether none is left.

        Args:
            check: Called often; an error from it ends the current runs, and is passed on.

        Raises:
            Unavailable: A record cannot be written, or the same experiment is being run by somebody else.
        """
        name = self.experiment.name
        with _locked(self.directory, name), tempfile.TemporaryDirectory(prefix=".", dir=self.directory) as scratch:
            self._records = list(read(self.directory, name))
            left = due(self.experiment, self._records)
            if left:
                bounds = f"{self.jobs} at a time, {self.experiment.budget_minutes:.3g} processor minutes at most"
                self.say(f"{name}: {len(left)} runs due; {bounds}")
            if others := left_out(self.experiment, self._records):
                self.say(f"{name}: {others} records have other settings than the file: left out")
            try:
                while True:
                    check()
                    if self._take_in():
                        left = due(self.experiment, self._records)
                    busy = {each.run.key for each in self._running}
                    waiting = [run for run in left if run.key not in busy | self._failed]
                    over = self.over() if waiting else ""
                    if not over:
                        self._start(waiting, Path(scratch))
                    if not self._running:
                        self._say_end(over, len(left))
                        return not left
                    time.sleep(LOOK_EVERY_S)
            finally:
                stop_in_order([each.child for each in self._running], within_s=STOP_WITHIN_S)
                self._take_in(stopped=True)

    def over(self) -> str:
        """Returns why no further run is started; empty if there is no reason."""
        if sum(record.spent_s for record in newest(self._records)) >= 60 * self.experiment.budget_minutes:
            return (
                f"the budget of {self.experiment.budget_minutes:.3g} processor minutes is spent: raise budget_minutes"
            )
        return "none succeeded" if len(self._failed) >= FAILURES and not self._succeeded else ""

    def _start(self, waiting: Sequence[Run], scratch: Path) -> None:
        free = sorted(set(range(self.jobs)) - {each.slot for each in self._running})
        processors = sorted(os.sched_getaffinity(0))
        alone = self.jobs >= len(processors)  # else another experiment may be at work, and would get the same ones
        for slot, run in zip(free, waiting, strict=False):
            result, log = (scratch / f"run-{slot}.{ending}" for ending in ("json", "log"))
            for left_over in (result, log):
                left_over.unlink(missing_ok=True)
            job = {"settings": resolved(run.settings), "seed": run.seed, "cell": dict(run.cell)}
            told = json.dumps(job | {"experiment": self.experiment.name})
            spec = ProcessSpec(
                name=f"run-{slot}",
                command=[sys.executable, "-P", "-m", "ops.lab.worker", told, str(result)],
                environment=_environment(),
                cpus=(processors[slot % len(processors)],) if alone else (),
            )
            child = Child(spec, log, now_s=time.monotonic())
            self._running.append(_Running(run=run, child=child, slot=slot, result=result))
            self.say(f"{self._name(run)}: begins")

    def _take_in(self, *, stopped: bool = False) -> bool:
        """Saves and announces the records of ended runs; returns whether there was one.

        Args:
            stopped: Runs were stopped: those that have brought no record did not fail.

        Raises:
            Unavailable: A record cannot be written.
        """
        ended = [(each, status) for each in self._running if (status := each.child.poll()) is not None]
        for each, status in ended:
            self._running.remove(each)
            if status == 0 and each.result.exists():
                self.keep(Record.from_json(each.result.read_text(encoding="utf-8")), each.run)
            elif not stopped:
                self._failed.add(each.run.key)
                why = f"failed with status {status}: {each.child.error() or 'it said nothing'}"
                why = f"killed by signal {-status}, by hand or for want of memory" if status < 0 else why
                self.say(f"{self._name(each.run)}: {why}; the same command tries it again")
        return bool(ended)

    def keep(self, record: Record, run: Run) -> None:
        """Saves the record of an ended run.

        Raises:
            Unavailable: It cannot be written.
        """
        append(self.directory, record)
        self._records.append(record)
        self._succeeded = True
        loss = "diverged" if record.diverged else f"loss {record.loss:.4f}"
        left = len(due(self.experiment, self._records))
        self.say(f"{self._name(run)}: {loss} in {age(record.wall_s)}; {left} to go")

    def _say_end(self, over: str, left: int) -> None:
        told = [f"{len(self._failed)} runs failed"] if self._failed else []
        told += [over] if over else []
        told += [f"{left} runs are left"] if left else []
        self.say(f"{self.experiment.name}: {'; '.join(told) or 'complete'}")

    def _name(self, run: Run) -> str:
        return f"{self.experiment.name}: {label(run.cell)}, seed {run.seed}"


@contextmanager
def _locked(directory: Path, experiment: str) -> Iterator[None]:
    """Holds the lock of an experiment during its runs.

    Raises:
        Unavailable: Somebody else runs the same experiment, or the lock cannot be had.
    """
    path = directory / f".{experiment}.lock"
    with mapped(f"cannot lock {path}", definite=True):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        held = hold(path)  # the file stays: removing it could let two processes lock two files of that name
    except BlockingIOError as err:
        raise Unavailable(f"{experiment} is being run already, with records in {directory}", definite=True) from err
    try:
        yield
    finally:
        os.close(held)


def _environment() -> dict[str, str]:
    # A run imports what this process does, from wherever that was started.
    path = os.pathsep.join(each for each in (*sys.path, os.getcwd()) if each)
    return {"PYTHONPATH": path} | compilation_cache() | heap_that_stays() | one_thread_environment()
