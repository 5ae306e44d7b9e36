"""Runs experiments: several runs at a time, each in a process of its own, until nothing is due or the budget is spent.

Shell. What is due is decided in :mod:`ops.lab.schedule` from the records alone, after every run anew.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from aggregator.store.layout import mapped
from broker.wire.errors import Unavailable
from ops.lab import archive, processors, progress
from ops.lab.cells import label
from ops.lab.experiment import Experiment
from ops.lab.markdown import duration
from ops.lab.processors import Processor
from ops.lab.progress import SPEAK_EVERY_S
from ops.lab.records import Record, Stage, edited_since, newest
from ops.lab.schedule import Agenda, Run, agenda, current, estimate_s, left_out
from ops.lab.settings import resolved
from ops.processes.child_process import Child, ProcessSpec, end_of, stop_in_order
from ops.processes.numeric import compilation_cache, heap_that_stays, one_thread_environment

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
    processor: Processor
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
        ends_at_s: When, by the monotonic clock, no further run is started; None for no limit but the budget.
    """

    experiment: Experiment
    directory: Path
    jobs: int
    say: Say
    accelerator: bool = False
    ends_at_s: float | None = None
    _running: list[_Running] = field(default_factory=list)
    _failed: dict[tuple[Stage, str], str] = field(default_factory=dict)
    _succeeded: int = 0
    _edited: str = ""  #: a source or text that is another one than when this began: its runs would never count

    def run(self, check: Callable[[], None]) -> bool:
        """Runs what is due; returns whether nothing is left.

        Args:
            check: Called often; what it raises ends the runs that are going on, and leaves this.

        Raises:
            Unavailable: A record cannot be written, or the same experiment is being run by somebody else.
        """
        place = self.directory, self.experiment.name
        with archive.locked(*place), archive.workspace(*place) as scratch:
            archive.forget_logs(*place)
            return self._run(check, scratch)

    def _run(self, check: Callable[[], None], scratch: Path) -> bool:
        # Of any age: what was run with other settings has been paid for as well.
        records = list(archive.read(archive.path_of(self.directory, self.experiment.name)))
        left = self._left(records)
        self._say_beginning(len(left.due), left.later)
        if others := left_out(self.experiment, records, current(self.experiment, records)):
            self.say(f"{self.experiment.name}: {others}")
        try:
            while True:
                check()
                left = self._take_in(scratch, records) or left
                busy = {each.run.key for each in self._running}
                due = [run for run in left.due if run.key not in busy and run.key not in self._failed]
                over = self._over(records) if due else ""
                if not over:
                    self._start(due, scratch)
                self._say_progress(scratch)
                if not self._running:
                    self._say_edges(left)
                    self._say_end(over, len(left.due) + left.later)
                    return not left.due and not left.later
                time.sleep(LOOK_EVERY_S)
        finally:
            stop_in_order([each.child for each in self._running], within_s=STOP_WITHIN_S)
            self._take_in(scratch, records, whole=True)

    def _take_in(self, scratch: Path, records: list[Record], *, whole: bool = False) -> Agenda | None:
        """Adds what has ended to the records, and says so; returns what is left then, None if nothing has ended."""
        ended = self._collect(scratch, whole=whole)
        if not ended:
            return None
        records += [record for record, _ in ended]
        left = self._left(records)
        for record, each in ended:
            self._say_done(record, each, records, left)
        return left

    def _left(self, records: Sequence[Record]) -> Agenda:
        return agenda(self.experiment, current(self.experiment, records))

    def _over(self, records: Sequence[Record]) -> str:
        """Says why no further run is started, and what would start one; empty if there is no reason."""
        if sum(record.spent_s for record in newest(records)) >= 60 * self.experiment.budget_minutes:
            return f"the budget of {self.experiment.budget_minutes:.3g} processor minutes is spent: --budget gives more"
        if self.ends_at_s is not None and time.monotonic() >= self.ends_at_s:
            return "the time limit is reached: the same command goes on"
        if self._edited:
            return f"{self._edited} was edited meanwhile: the same command goes on with it as it is now"
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
            with mapped(f"cannot write to {scratch}", definite=True):
                (scratch / f"{name}.job").write_text(json.dumps(job), encoding="utf-8")
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
            processor = Processor(None) if self.accelerator else processors.take(slot)
            spec = ProcessSpec(
                name=name, command=command, environment=_environment(self.accelerator), cpus=processor.cpus
            )
            child = Child(spec, scratch / f"{name}.log", now_s=time.monotonic())
            self._running.append(_Running(run=run, child=child, slot=slot, processor=processor))
            self.say(f"{_name(run)}: begins")

    def _collect(self, scratch: Path, *, whole: bool) -> list[tuple[Record, _Running]]:
        """Keeps the records of what has ended; with ``whole`` only of what ended by itself: the others were stopped.

        Raises:
            Unavailable: A record cannot be written. It is printed: hours of work have no other copy.
        """
        new: list[tuple[Record, _Running]] = []
        for each in list(self._running):
            status = each.child.poll()
            if status is None:
                continue
            self._running.remove(each)
            each.processor.free()
            result = scratch / f"run-{each.slot}.json"
            if whole and status != 0:
                continue
            if status != 0 or not result.exists():
                log = scratch / f"run-{each.slot}.log"
                why = _why(status, log)
                said = archive.keep_log(self.directory, self.experiment.name, _name(each.run), log)
                self._failed[each.run.key] = why
                where = "" if said is None else f"the end of what it said is in {said}, "
                self.say(f"{_name(each.run)}: {why}; {where}the same command tries it again{self._beyond(each.run)}")
                continue
            record = Record.from_json(result.read_text(encoding="utf-8"))
            try:
                archive.append(self.directory, record)
            except Unavailable:
                path = archive.path_of(self.directory, self.experiment.name)
                self.say(f"{_name(each.run)}: has ended, and this line belongs to {path}:\n{record.to_json()}")
                raise
            new.append((record, each))
            self._edited = edited_since(record, self.experiment.sources) or self._edited
            self._succeeded += 1
        return new

    def _beyond(self, run: Run) -> str:
        """What to do where it was tuning that asked for a value which the task does not take."""
        tune = self.experiment.tune
        if tune is None or run.stage is not Stage.TUNE or run.fields.get(tune.name) in tune.values:
            return ""
        return f", and with extend = 0 in [tune] no value is tried beyond those of {self.experiment.path.name}"

    def _say_beginning(self, due: int, later: int) -> None:
        if due or later:
            rest = f", at least {later} after them" if later else ""
            bounds = f"{self.jobs} at a time, {self.experiment.budget_minutes:.3g} processor minutes at most"
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

    def _say_done(self, record: Record, each: _Running, records: Sequence[Record], left: Agenda) -> None:
        busy = [other.run for other in self._running]
        passed = {other.key for other in busy} | self._failed.keys()
        waiting = [run for run in left.due if run.key not in passed]
        times = [estimate_s(run, records) for run in (*waiting, *busy)]
        left_s = sum(time_s for time_s in times if time_s is not None) / self.jobs
        loss = "diverged" if record.diverged else f"loss {record.loss:.4f}"
        rest = f"{len(waiting) + len(busy)} to go, about {duration(round(left_s))}"
        if left.later:
            rest += f", then {left.later} that wait for a tuned rate"
        self.say(f"{_name(each.run)}: {loss} in {duration(record.wall_s)}; {rest}")

    def _say_edges(self, left: Agenda) -> None:
        for group, winner in left.tuned.items():
            if self.experiment.tune is not None and not winner.interior:
                told = winner.told(self.experiment.tune.name)
                self.say(f"{self.experiment.name}: {label(dict(group))}: {told}")

    def _say_end(self, over: str, left: int) -> None:
        told = [f"{len(self._failed)} runs failed"] if self._failed else []
        told += [over] if over else []
        told += [f"{left} runs are left"] if left else []
        self.say(f"{self.experiment.name}: {'; '.join(told) or 'complete'}")


def _why(status: int, log: Path) -> str:
    """Says how a run ended that brought no record."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}, by hand or for want of memory"
    with suppress(OSError):
        # Of a traceback what matters: where, and what.
        lines = [line for line in end_of(log) if line.strip(" ^~")]
        begins = max((i for i, line in enumerate(lines) if line.startswith("  File ")), default=max(0, len(lines) - 3))
        if lines:
            return f"failed with status {status}: {' / '.join(map(str.strip, lines[begins:]))}"
    return f"failed with status {status}: it said nothing"


def _environment(accelerator: bool) -> dict[str, str]:
    # A run imports what this process does, from wherever that was started.
    path = os.pathsep.join(each for each in (os.getcwd(), *sys.path) if each)
    ours = {"PYTHONPATH": path} | compilation_cache() | heap_that_stays()
    return ours if accelerator else ours | one_thread_environment()


def _name(run: Run) -> str:
    stage = "tuning " if run.stage is Stage.TUNE else ""
    return f"{run.experiment}: {stage}{label(run.fields)}, seed {run.seed}"
