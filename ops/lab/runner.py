"""Runs experiments: several runs at a time, each in a process of its own, until nothing is due or the budget is spent.

Shell. What is due is decided in :mod:`ops.lab.schedule` from the records alone, after every run anew.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ops.lab import archive, progress
from ops.lab.cells import label
from ops.lab.experiment import Experiment
from ops.lab.markdown import duration
from ops.lab.progress import SPEAK_EVERY_S
from ops.lab.records import Record, Stage
from ops.lab.schedule import Run, agenda, current, estimate_s
from ops.lab.settings import resolved
from ops.numeric import compilation_cache, one_thread_environment
from ops.processes import Child, ProcessSpec, last_lines, stop_in_order

LOOK_EVERY_S = 0.5
STOP_WITHIN_S = 3.0

#: So many failures without one run that succeeds have one cause, and hundreds more would tell no more of it.
FAILURES = 3

Say = Callable[[str], None]


@dataclass(slots=True)
class _Running:
    run: Run
    child: Child
    slot: int
    points: int = 0  # of its loss curve, when it was last spoken of
    spoken_s: float = 0.0  # after its beginning


@dataclass(slots=True)
class Runner:
    """One experiment being run.

    Attributes:
        experiment: What is asked.
        directory: Where records are kept.
        jobs: Runs at a time; each has a processor of its own.
        say: Prints a line.
        accelerator: Runs may use one: they are neither pinned nor kept to the CPU.
        limit_s: Wall time after which no further run is started; None for no limit but the budget.
    """

    experiment: Experiment
    directory: Path
    jobs: int
    say: Say
    accelerator: bool = False
    limit_s: float | None = None
    _running: list[_Running] = field(default_factory=list)
    _failed: dict[tuple[Stage, str], str] = field(default_factory=dict)
    _succeeded: int = 0

    def records(self) -> list[Record]:
        """Returns the records of this experiment that are of its present form."""
        path = archive.path_of(self.directory, self.experiment.name)
        return list(current(self.experiment, archive.read(path)))

    def run(self, check: Callable[[], None]) -> bool:
        """Runs what is due; returns whether nothing is left.

        Args:
            check: Called often; what it raises ends the runs that are going on, and leaves this.

        Raises:
            Unavailable: A record cannot be written, or the same experiment is being run by somebody else.
        """
        with archive.locked(self.directory, self.experiment.name):
            return self._run(check)

    def _run(self, check: Callable[[], None]) -> bool:
        began_s = time.monotonic()
        records = self.records()
        left = agenda(self.experiment, records)
        self._say_beginning(len(left.due), left.later)
        with tempfile.TemporaryDirectory(prefix="atoll-lab-") as scratch:
            try:
                while True:
                    check()
                    if new := self._collect(Path(scratch), records):
                        records = list(current(self.experiment, [*records, *new]))
                        left = agenda(self.experiment, records)
                    busy = {each.run.key for each in self._running}
                    due = [run for run in left.due if run.key not in busy and run.key not in self._failed]
                    over = self._over(records, began_s) if due else ""
                    if not over:
                        self._start(due, Path(scratch))
                    self._say_progress(Path(scratch))
                    if not self._running:
                        self._say_end(over, len(left.due) + left.later)
                        return not left.due and not left.later
                    time.sleep(LOOK_EVERY_S)
            finally:
                stop_in_order([each.child for each in self._running], within_s=STOP_WITHIN_S)

    def _over(self, records: Sequence[Record], began_s: float) -> str:
        """Says why no further run is started; empty if there is no reason."""
        spent_s = sum(record.spent_s for record in records)
        if spent_s >= 60 * self.experiment.budget_minutes:
            return f"the budget of {self.experiment.budget_minutes:.0f} processor minutes is spent"
        if self.limit_s is not None and time.monotonic() - began_s >= self.limit_s:
            return f"the time limit of {self.limit_s / 60:.0f} minutes is reached"
        if len(self._failed) >= FAILURES and not self._succeeded:
            return "none succeeded"
        return ""

    def _start(self, due: Sequence[Run], scratch: Path) -> None:
        free = sorted(set(range(self.jobs)) - {each.slot for each in self._running})
        for slot, run in zip(free, due, strict=False):
            name = f"run-{slot}"
            settings = resolved(run.settings)
            job = {
                "settings": settings,
                "seed": run.seed,
                "experiment": run.experiment,
                "stage": run.stage,
                "fields": dict(run.fields),
            }
            (scratch / f"{name}.job").write_text(json.dumps(job))
            for left_over in ("json", "progress", "log"):
                (scratch / f"{name}.{left_over}").unlink(missing_ok=True)
            command = [
                sys.executable,
                "-m",
                "ops.lab.worker",
                str(scratch / f"{name}.job"),
                str(scratch / f"{name}.json"),
                str(scratch / f"{name}.progress"),
            ]
            processors = sorted(os.sched_getaffinity(0))
            spec = ProcessSpec(
                name=name,
                command=command,
                environment=_environment(self.accelerator),
                cpus=() if self.accelerator else (processors[slot % len(processors)],),
            )
            child = Child(spec, scratch / f"{name}.log", now_s=time.monotonic())
            self._running.append(_Running(run=run, child=child, slot=slot))
            self.say(f"{_name(run)}: begins")

    def _collect(self, scratch: Path, records: Sequence[Record]) -> list[Record]:
        """Takes in what has ended."""
        new: list[Record] = []
        for each in list(self._running):
            status = each.child.poll()
            if status is None:
                continue
            self._running.remove(each)
            result = scratch / f"run-{each.slot}.json"
            if status != 0 or not result.exists():
                why = _why(status, scratch / f"run-{each.slot}.log")
                self._failed[each.run.key] = why
                self.say(f"{_name(each.run)}: {why}; the same command tries it again")
                continue
            record = Record.from_json(result.read_text())
            archive.append(self.directory, record)
            new.append(record)
            self._succeeded += 1
            self._say_done(record, each, [*records, *new])
        return new

    def _say_beginning(self, due: int, later: int) -> None:
        if due or later:
            rest = f", at least {later} after them" if later else ""
            bounds = f"{self.jobs} at a time, {self.experiment.budget_minutes:.0f} processor minutes at most"
            self.say(f"{self.experiment.name}: {due} runs due{rest}; {bounds}")

    def _say_progress(self, scratch: Path) -> None:
        for each in self._running:
            elapsed_s = time.monotonic() - each.child.started_s
            if elapsed_s - each.spoken_s < SPEAK_EVERY_S:
                continue
            reached = progress.latest(scratch / f"run-{each.slot}.progress")
            if reached is not None and reached.points > each.points:
                each.points, each.spoken_s = reached.points, elapsed_s
                self.say(f"{_name(each.run)}: {reached.sentence(elapsed_s)}")

    def _say_done(self, record: Record, each: _Running, records: Sequence[Record]) -> None:
        left = agenda(self.experiment, records)
        busy = [other.run for other in self._running]
        waiting = [run for run in left.due if run.key not in {other.key for other in busy}]
        times = [estimate_s(run, records) for run in (*waiting, *busy)]
        left_s = sum(time_s for time_s in times if time_s is not None) / self.jobs
        loss = "diverged" if record.diverged else f"loss {record.loss:.4f}"
        rest = f"{len(waiting) + len(busy)} to go, about {duration(round(left_s))}"
        if left.later:
            rest += f", then {left.later} that wait for a tuned rate"
        self.say(f"{_name(each.run)}: {loss} in {record.wall_s:.0f} s; {rest}")

    def _say_end(self, over: str, left: int) -> None:
        name = self.experiment.name
        if self._failed and not self._succeeded:
            self.say(f"{name}: {len(self._failed)} runs failed, and none succeeded; {left} are left")
        elif self._failed:
            self.say(f"{name}: {len(self._failed)} runs failed; the others are kept")
        elif over:
            self.say(f"{name}: {over}; {left} runs are left. Run it again with --budget to go on")
        else:
            self.say(f"{name}: complete")


def _why(status: int, log: Path) -> str:
    """Says how a run ended that brought no record."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}, by hand or for want of memory"
    return f"failed with status {status}: {last_lines(log, 3)}"


def _environment(accelerator: bool) -> dict[str, str]:
    # A run imports what this process does, from wherever that was started.
    path = os.pathsep.join(each for each in (os.getcwd(), *sys.path) if each)
    ours = {"PYTHONPATH": path} | compilation_cache()
    return ours if accelerator else ours | one_thread_environment()


def _name(run: Run) -> str:
    stage = "tuning " if run.stage is Stage.TUNE else ""
    return f"{run.experiment}: {stage}{label(run.fields)}, seed {run.seed}"
