"""The runner of an experiment: several runs at a time, each in a process of its own, until nothing is due.

What is due is decided in :mod:`ops.lab.schedule` from the records alone, after every run anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from aggregator.store.layout import mapped
from broker.process import user_files
from broker.wire.errors import Unavailable
from ops.lab.experiment import Experiment, label
from ops.lab.records import Record, Stage, append, edited_since, newest, path_of, read
from ops.lab.schedule import Agenda, Run, agenda, left_out
from ops.lab.settings import resolved
from ops.lab.worker import latest
from ops.processes.child_process import Child, ProcessSpec, end_of, stop_in_order
from ops.processes.numeric import compilation_cache, heap_that_stays, one_thread_environment

LOOK_EVERY_S = 0.5
STOP_WITHIN_S = 3.0
#: Between two lines of one run, and from its beginning to the first.
SPEAK_EVERY_S = 60.0

#: So many failures without one run that succeeds have one cause, and hundreds more would tell no more of it.
FAILURES = 3


@dataclass(slots=True)
class _Running:
    run: Run
    child: Child
    slot: int
    lock: int | None  # on its processor
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
    say: Callable[[str], None]
    accelerator: bool = False
    ends_at_s: float | None = None
    _running: list[_Running] = field(default_factory=list)
    _failed: set[tuple[Stage, str]] = field(default_factory=set)
    _succeeded: int = 0
    _edited: str = ""  #: a source or text that is another one than when this began: its runs would never count

    def run(self, check: Callable[[], None]) -> bool:
        """Runs what is due; returns whether nothing is left.

        Args:
            check: Called often; what it raises ends the runs that are going on, and leaves this.

        Raises:
            Unavailable: A record cannot be written, or the same experiment is being run by somebody else.
        """
        with _workspace(self.directory, self.experiment.name) as scratch:
            return self._run(check, scratch)

    def _run(self, check: Callable[[], None], scratch: Path) -> bool:
        name = self.experiment.name
        # Of any age: what was run with other settings has been paid for as well.
        records = list(read(self.directory, name))
        left = self._left(records)
        if left.due or left.later:
            rest = f", at least {left.later} after them" if left.later else ""
            bounds = f"{self.jobs} at a time, {self.experiment.budget_minutes:.3g} processor minutes at most"
            self.say(f"{name}: {len(left.due)} runs due{rest}; {bounds}")
        if others := left_out(self.experiment, records):
            self.say(f"{name}: {others} records have other settings than the file, or an older task, and do not count")
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
                    self._say_end(over, left)
                    return not left.due and not left.later
                time.sleep(LOOK_EVERY_S)
        finally:
            stop_in_order([each.child for each in self._running], within_s=STOP_WITHIN_S)
            self._take_in(scratch, records, stopped=True)

    def _take_in(self, scratch: Path, records: list[Record], *, stopped: bool = False) -> Agenda | None:
        """Adds what has ended to the records, and says so; returns what is left then, None if nothing has ended."""
        ended = self._collect(scratch, stopped=stopped)
        if not ended:
            return None
        records += [record for record, _ in ended]
        left = self._left(records)
        for record, run in ended:
            self._say_done(record, run, records, left)
        return left

    def _left(self, records: Sequence[Record]) -> Agenda:
        return agenda(self.experiment, records)

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
            job = {
                "settings": resolved(run.settings),
                "seed": run.seed,
                "experiment": run.experiment,
                "stage": run.stage,
                "fields": dict(run.fields),
            }
            files = [scratch / f"run-{slot}.{ending}" for ending in ("job", "json", "progress", "log")]
            with mapped(f"cannot write to {scratch}", definite=True):
                for left_over in files:
                    left_over.unlink(missing_ok=True)
                files[0].write_text(json.dumps(job), encoding="utf-8")
            command = [sys.executable, "-m", "ops.lab.worker", *map(str, files[:3])]
            cpus, lock = ((), None) if self.accelerator else take_processor(slot)
            spec = ProcessSpec(
                name=f"run-{slot}", command=command, environment=_environment(self.accelerator), cpus=cpus
            )
            child = Child(spec, files[3], now_s=time.monotonic())
            self._running.append(_Running(run=run, child=child, slot=slot, lock=lock))
            self.say(f"{_name(run)}: begins")

    def _collect(self, scratch: Path, *, stopped: bool) -> list[tuple[Record, Run]]:
        """Keeps the records of what has ended by itself: what was ``stopped`` before has brought none.

        Raises:
            Unavailable: A record cannot be written. It is printed: hours of work have no other copy.
        """
        new: list[tuple[Record, Run]] = []
        for each in list(self._running):
            status = each.child.poll()
            if status is None:
                continue
            self._running.remove(each)
            if each.lock is not None:
                os.close(each.lock)
            result = scratch / f"run-{each.slot}.json"
            if status != 0 or not result.exists():
                if not stopped:
                    self._failed.add(each.run.key)
                    why = _why(status, scratch / f"run-{each.slot}.log")
                    self.say(f"{_name(each.run)}: {why}; the same command tries it again")
                continue
            record = Record.from_json(result.read_text(encoding="utf-8"))
            try:
                append(self.directory, record)
            except Unavailable:
                path = path_of(self.directory, self.experiment.name)
                self.say(f"{_name(each.run)}: has ended, and this line belongs to {path}:\n{record.to_json()}")
                raise
            new.append((record, each.run))
            self._edited = edited_since(record, self.experiment.sources) or self._edited
            self._succeeded += 1
        return new

    def _say_progress(self, scratch: Path) -> None:
        for each in self._running:
            elapsed_s = time.monotonic() - each.child.started_s
            if elapsed_s - each.spoken_s < SPEAK_EVERY_S:
                continue
            reached = latest(scratch / f"run-{each.slot}.progress")
            if reached is not None and reached.points > each.points:
                each.points, each.spoken_s = reached.points, elapsed_s
                share = reached.points / reached.of
                done = f"{100 * share:.0f} % in {duration(elapsed_s)}, loss {reached.loss:.4f} so far"
                self.say(f"{_name(each.run)}: {done}; about {duration(elapsed_s * (1 / share - 1))} to go")

    def _say_done(self, record: Record, run: Run, records: Sequence[Record], left: Agenda) -> None:
        busy = [other.run for other in self._running]
        passed = {other.key for other in busy} | self._failed
        waiting = [run for run in left.due if run.key not in passed]
        left_s = sum(estimate_s(run, records) for run in (*waiting, *busy)) / self.jobs
        loss = "diverged" if record.diverged else f"loss {record.loss:.4f}"
        rest = f"{len(waiting) + len(busy)} to go, about {duration(left_s)}"
        if left.later:
            rest += f", then {left.later} that wait for a tuned rate"
        self.say(f"{_name(run)}: {loss} in {duration(record.wall_s)}; {rest}")

    def _say_end(self, over: str, left: Agenda) -> None:
        name, tune = self.experiment.name, self.experiment.tune
        for group, winner in left.tuned.items():
            if tune is not None and not winner.interior:
                at_edge = (
                    f"{tune.name} = {winner.best:g} lies at the edge of what was tried: a larger extend tries more"
                )
                self.say(f"{name}: {label(dict(group))}: {at_edge}")
        told = [f"{len(self._failed)} runs failed"] if self._failed else []
        told += [over] if over else []
        told += [f"{count} runs are left"] if (count := len(left.due) + left.later) else []
        self.say(f"{name}: {'; '.join(told) or 'complete'}")


def estimate_s(run: Run, records: Sequence[Record]) -> float:
    """Returns about how long a run will take, from a mean step of the records; 0 if there are none."""
    rates = [r.wall_s / (int(r.settings["steps"]) * int(r.settings["islands"])) for r in records if r.wall_s]
    return run.settings.steps * run.settings.islands * sum(rates) / max(1, len(rates))


def duration(seconds: float) -> str:
    """Returns a duration in one or two units."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def take_processor(turn: int) -> tuple[tuple[int, ...], int | None]:
    """Returns a processor that no other run of this user has, and the lock on it: a file descriptor to be closed.

    Where all are taken, or it cannot be told, it is one by turns and without a lock. Two laboratories would otherwise
    both begin with the first processor, and train at half their speed beside one that does nothing.
    """
    allowed = sorted(os.sched_getaffinity(0))
    for number in allowed:
        try:
            lock = user_files.lock(f"lab-processor-{number}")
        except BlockingIOError:
            continue
        if lock is None:
            break
        return (number,), lock
    return (allowed[turn % len(allowed)],), None


@contextmanager
def _workspace(directory: Path, experiment: str) -> Iterator[Path]:
    """Holds an experiment while it is run, and yields a temporary folder for what runs leave on their way.

    The folder is not beside the records: when their disk is full, a run's result still has a place to be printed from.
    Whoever was killed could not remove it, so it has the same name every time, and one that is there goes first.

    Raises:
        Unavailable: Somebody else runs the same experiment, or something cannot be written.
    """
    path = directory / f".{experiment}.lock"
    with mapped(f"cannot lock {path}", definite=True):
        directory.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    with file:  # it stays: whoever removed it would let two others lock two files of that name
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise Unavailable(f"{experiment} is being run already, with records in {directory}", definite=True) from err
        with mapped("cannot make a temporary folder, for which TMPDIR may name a place", definite=True):
            place = zlib.crc32(os.fsencode(directory.resolve()))
            scratch = Path(tempfile.gettempdir(), f"atoll-lab-{os.getuid()}-{place:08x}-{experiment}")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(mode=0o700)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _why(status: int, log: Path) -> str:
    """Says how a run ended that brought no record: by the last lines of what it said."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}, by hand or for want of memory"
    said: list[str] = []
    with suppress(OSError):
        said = [line.strip() for line in end_of(log) if line.strip(" ^~\n")][-3:]
    return f"failed with status {status}: {' / '.join(said) or 'it said nothing'}"


def _environment(accelerator: bool) -> dict[str, str]:
    # A run imports what this process does, from wherever that was started.
    path = os.pathsep.join(each for each in (os.getcwd(), *sys.path) if each)
    ours = {"PYTHONPATH": path} | compilation_cache() | heap_that_stays()
    return ours if accelerator else ours | one_thread_environment()


def _name(run: Run) -> str:
    stage = "tuning " if run.stage is Stage.TUNE else ""
    return f"{run.experiment}: {stage}{label(run.fields)}, seed {run.seed}"
