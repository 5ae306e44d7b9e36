"""What to run next: decided from the experiment and the records so far, and from nothing else. Pure.

So an experiment that was stopped goes on where it was, whoever stopped it; and a file of records that was copied from
another machine counts as much as one that was made here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from broker.wire.errors import ConfigError
from ops.lab.cells import Cell, CellKey, cell_key
from ops.lab.comparisons import findings
from ops.lab.experiment import Experiment
from ops.lab.records import Record, Stage, newest, of_newest_code
from ops.lab.settings import CellSettings, key_of
from ops.lab.statistics import seeds_needed
from ops.lab.tuning import Attempt, Search, Tune, Tuned, Tuning, search


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run that is due.

    Attributes:
        experiment: Its name.
        stage: Whether it tunes or counts.
        fields: The cell, with what was tuned.
        settings: Everything.
        seed: Of this run.
    """

    experiment: str
    stage: Stage
    fields: Cell
    settings: CellSettings
    seed: int

    @property
    def key(self) -> tuple[Stage, str]:
        """Under which its record is found."""
        return self.stage, key_of(self.settings, self.seed)

    @property
    def inner_steps(self) -> int:
        """Of all islands together: about what it costs."""
        return self.settings.steps * self.settings.islands


@dataclass(frozen=True, slots=True, kw_only=True)
class Agenda:
    """What is left to do, as far as it is known.

    Attributes:
        due: Runs that can start now, most urgent first.
        later: Runs that will follow at least: those of cells whose tuning is not done.
        tuned: Group -> the value chosen, and whether it lies at an edge of those tried.
    """

    due: tuple[Run, ...]
    later: int
    tuned: Mapping[CellKey, Tuned]


def agenda(experiment: Experiment, records: Sequence[Record]) -> Agenda:
    """Returns what to run next: tuning first, then every cell's first seed, then the second, and so on.

    Args:
        experiment: What is asked.
        records: Of this experiment, of any age: a record whose settings have changed since is not of these cells.
    """
    done = {(record.stage, record.key): record for record in of_newest_code(records, experiment.sources)}
    due, tuned = _tuning(experiment, done)
    waiting = 0
    by_seed: dict[int, list[Run]] = {}
    for cell in experiment.cells():
        fields = dict(cell)
        if experiment.tune is not None:
            winner = tuned[_group(experiment.tune, cell)]
            if winner is None:
                waiting += experiment.seeds
                continue
            fields[experiment.tune.name] = winner.best
        for seed in range(experiment.seeds):
            by_seed.setdefault(seed, []).append(_final(experiment, fields, seed))
    for run in _more_seeds(experiment, done.values(), tuned):
        by_seed.setdefault(run.seed, []).append(run)
    # Cells that come to the same settings are one run; its record serves them all.
    wanted = {run.key: run for run in (*due, *(run for seed in sorted(by_seed) for run in by_seed[seed]))}
    chosen = {group: winner for group, winner in tuned.items() if winner is not None}
    return Agenda(due=tuple(run for key, run in wanted.items() if key not in done), later=waiting, tuned=chosen)


def current(experiment: Experiment, records: Iterable[Record]) -> tuple[Record, ...]:
    """Returns the newest records whose settings are those of a cell as it is now, once for each such cell.

    What a record calls its cell does not count: that was the file of its day. Nor do runs at a rate that was the best
    one until more rates were tried, or longer runs of them.
    """
    return tuple(record for record, chosen in _of_cells(experiment, records) if chosen)


def passed_over(experiment: Experiment, records: Iterable[Record]) -> tuple[Record, ...]:
    """Returns the other runs of cells as they are now: at rates that were the best ones until more was known."""
    return tuple(record for record, chosen in _of_cells(experiment, records) if not chosen)


def _of_cells(experiment: Experiment, records: Iterable[Record]) -> Iterator[tuple[Record, bool]]:
    """Yields the newest record of every cell as it is now, and whether it is at the rate chosen for that."""
    tune, cells, keys = experiment.tune, experiment.cells(), _Keys(experiment)
    records = newest(of_newest_code(records, experiment.sources))
    _, tuned = _tuning(experiment, {(record.stage, record.key): record for record in records})
    of_group: dict[CellKey, int] = {}
    for i, cell in enumerate(cells):
        of_group.setdefault(_group(tune, cell) if tune is not None else (), i)
    for record in records:
        value = None if tune is None else record.settings.get(tune.name)
        if not isinstance(value, int | float | None):
            continue  # of an older form of the file: what is tuned is a number
        if record.stage is Stage.FINAL:
            for i, cell in enumerate(cells):
                if record.key == keys.of_final(i, value, record.seed):
                    winner = None if tune is None else tuned[_group(tune, cell)]
                    yield replace(record, cell=_at(tune, cell, value)), winner is None or winner.best == value
        elif tune is not None:
            # On behalf of the first cell of its group; on an early rung it is shorter than that.
            for i in of_group.values():
                if record.key == keys.of_rung(i, value, record.settings.get("steps"), record.seed):
                    yield replace(record, cell=_at(tune, cells[i], value)), True


class _Keys:
    """The keys of an experiment's runs, each made once: of hundreds of records most are of the same settings."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._cells = experiment.cells()
        self._settings: dict[tuple[int, str, Any], CellSettings | None] = {}
        self._keys: dict[tuple[int, str, Any, int], str] = {}

    def of_final(self, i: int, value: Any, seed: int) -> str:
        """Returns the key of a final run of cell ``i`` at a value of what is tuned; empty if there is none."""
        return self._of(i, value, None, seed)

    def of_rung(self, i: int, value: Any, steps: Any, seed: int) -> str:
        """Likewise of a tuning run; empty if no rung has so many steps."""
        whole, tune = self._made(i, value, None), self._experiment.tune
        if whole is None or tune is None or steps not in {math.ceil(rung * whole.steps) for rung in tune.rungs}:
            return ""
        return self._of(i, value, steps, seed)

    def _of(self, i: int, value: Any, steps: Any, seed: int) -> str:
        which = (i, repr(value), steps, seed)  # 1 and 1.0 are two settings of a task
        if which not in self._keys:
            settings = self._made(i, value, steps)
            self._keys[which] = "" if settings is None else key_of(settings, seed)
        return self._keys[which]

    def _made(self, i: int, value: Any, steps: Any) -> CellSettings | None:
        which = (i, repr(value), steps)
        if which not in self._settings:
            fields = _at(self._experiment.tune, self._cells[i], value)
            try:
                settings = self._experiment.settings_of(fields, {} if steps is None else {"steps": steps})
            except ConfigError:
                settings = None  # no cell has that
            self._settings[which] = settings
        return self._settings[which]


def _final(experiment: Experiment, fields: Cell, seed: int) -> Run:
    settings = experiment.settings_of(fields)
    return Run(experiment=experiment.name, stage=Stage.FINAL, fields=dict(fields), settings=settings, seed=seed)


def left_out(experiment: Experiment, kept: Sequence[Record], counting: Sequence[Record]) -> str:
    """Says which of the records that were made do not count, and why; empty if all of them do."""
    kept = newest(kept)
    edited = len(kept) - len(of_newest_code(kept, experiment.sources))
    others = len(kept) - len(counting) - edited
    reasons = ((edited, "an older form of the task or of its text"), (others, "other settings than the file"))
    return "; ".join(_do_not_count(number, have) for number, have in reasons if number > 0)


def _do_not_count(number: int, have: str) -> str:
    return (
        f"{number} records have {have}, and do not count" if number > 1 else f"1 record has {have}, and does not count"
    )


def _more_seeds(experiment: Experiment, records: Iterable[Record], tuned: Mapping[CellKey, Tuned | None]) -> list[Run]:
    """Returns the next seed of both sides of every claim that is planned with more, or too wide for its margin."""
    runs: dict[tuple[Stage, str], Run] = {}
    finals = [record for record in current(experiment, records) if record.stage is Stage.FINAL]
    for finding in findings(experiment.comparisons, finals):
        if finding.settled:
            continue
        differences = list(finding.differences.values())
        margin = finding.comparison.margin
        if not set(range(experiment.seeds)) <= set(finding.seeds):
            continue  # the first ones are still on their way
        if experiment.tune and any(tuned[_group(experiment.tune, cell)] is None for cell in finding.cells):
            continue  # another rate may turn out to be the best
        planned = finding.comparison.seeds
        # Seeds of which one side diverged count as run, and not as pairs.
        pairs_to_be_had = experiment.max_seeds - len(finding.seeds) + len(differences)
        if not planned and not seeds_needed(differences, margin=margin, max_seeds=pairs_to_be_had):
            continue
        # Those that are missing, some of which may have been taken out of the records: planned ones all at once.
        missing = sorted(set(range(planned or len(finding.seeds) + 1)) - set(finding.seeds))
        for seed in missing if planned else missing[:1]:
            for fields in finding.cells:
                run = _final(experiment, fields, seed)
                runs[run.key] = run
    return list(runs.values())


def _at(tune: Tune | None, cell: Cell, value: Any) -> dict[str, Any]:
    """Returns a cell with a value of what is tuned, if anything is."""
    return dict(cell) if tune is None else dict(cell) | {tune.name: value}


def _group(tune: Tune, cell: Cell) -> CellKey:
    """Returns what the cells that share one best value have in common; of several grids some may lack an axis."""
    return cell_key({name: cell[name] for name in tune.by if name in cell})


def _tuning(
    experiment: Experiment, done: Mapping[tuple[Stage, str], Record]
) -> tuple[list[Run], dict[CellKey, Tuned | None]]:
    """Returns the tuning runs that are due, and group -> the value that was found; None while it is not."""
    tune = experiment.tune
    if tune is None:
        return [], {}
    due: list[Run] = []
    tuned: dict[CellKey, Tuned | None] = {}
    for cell in experiment.cells():
        group = _group(tune, cell)
        if group not in tuned:  # on behalf of its first cell
            found, wanted = _search(experiment, tune, cell, done)
            tuned[group] = found.winner
            due += wanted
    return due, tuned


def _search(
    experiment: Experiment, tune: Tune, cell: Cell, done: Mapping[tuple[Stage, str], Record]
) -> tuple[Search, list[Run]]:
    """Returns how far the tuning of a cell's group is, and the runs that are due."""
    steps = experiment.settings_of(cell).steps

    def run(attempt: Attempt) -> Run:
        more = {tune.name: attempt.value, "steps": math.ceil(attempt.rung * steps)}
        fields = dict(cell) | {tune.name: attempt.value}
        settings = experiment.settings_of(cell, more)
        return Run(experiment=experiment.name, stage=Stage.TUNE, fields=fields, settings=settings, seed=attempt.seed)

    def loss_of(attempt: Attempt) -> float | None:
        record = done.get(run(attempt).key)
        return None if record is None else math.inf if record.diverged else record.loss

    def possible(value: float) -> bool:
        try:
            experiment.settings_of(cell, {tune.name: value})
        except ConfigError:
            return False  # a bound of the setting: nothing lies beyond
        return True

    found = search(tune, loss_of, possible)
    return found, [run(attempt) for attempt in found.due]


def tunings(experiment: Experiment, records: Iterable[Record]) -> tuple[Tuning, ...]:
    """Returns how far tuning is, of every group of cells of which there is a tuning run."""
    tune, records = experiment.tune, newest(of_newest_code(records, experiment.sources))
    if tune is None:
        return ()
    done = {(record.stage, record.key): record for record in records}
    tokens: dict[CellKey, int] = {}
    for record in current(experiment, records):
        if record.stage is Stage.TUNE:
            group = _group(tune, record.cell)
            tokens[group] = max(record.tokens, tokens.get(group, 0))
    found: dict[CellKey, Tuning] = {}
    for cell in experiment.cells():
        group = _group(tune, cell)
        if group in tokens and group not in found:
            how_far, _ = _search(experiment, tune, cell, done)
            found[group] = Tuning(group=group, name=tune.name, search=how_far, tokens=tokens[group])
    return tuple(found.values())


def estimate_s(run: Run, records: Sequence[Record]) -> float | None:
    """Returns about how long a run will take, from a mean step of the experiment's records; None if there are none."""
    rates = [r.wall_s / (int(r.settings["steps"]) * int(r.settings["islands"])) for r in records if r.wall_s]
    return run.inner_steps * sum(rates) / len(rates) if rates else None
