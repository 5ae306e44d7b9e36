"""What to run next: decided from the experiment and the records so far, and from nothing else. Pure.

So an experiment that was stopped goes on where it was, whoever stopped it; and a file of records that was copied from
another machine counts as much as one that was made here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from broker.errors import ConfigError
from ops.lab.cells import Cell, CellKey, cell_key
from ops.lab.comparisons import findings
from ops.lab.experiment import Experiment, Tune
from ops.lab.records import Record, Stage, newest
from ops.lab.settings import CellSettings, key_of
from ops.lab.statistics import interior, seeds_needed, survivors


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
        tuned: Group -> the value chosen.
    """

    due: tuple[Run, ...]
    later: int
    tuned: Mapping[CellKey, float]


def agenda(experiment: Experiment, records: Sequence[Record]) -> Agenda:
    """Returns what to run next: tuning first, then every cell's first seed, then the second, and so on.

    Args:
        experiment: What is asked.
        records: Of this experiment, of any age: a record whose settings have changed since is not of these cells.
    """
    done = {(record.stage, record.key): record for record in records}
    due, tuned = _tuning(experiment, done)
    waiting = 0
    by_seed: dict[int, list[Run]] = {}
    for cell in experiment.cells():
        fields = dict(cell)
        if experiment.tune is not None:
            value = tuned[_group(experiment.tune, cell)]
            if value is None:
                waiting += experiment.seeds
                continue
            fields[experiment.tune.name] = value
        for seed in range(experiment.seeds):
            by_seed.setdefault(seed, []).append(_final(experiment, fields, seed))
    for run in _more_seeds(experiment, done.values(), tuned):
        by_seed.setdefault(run.seed, []).append(run)
    # Cells that come to the same settings are one run; its record serves them all.
    wanted_runs = {run.key: run for seed in sorted(by_seed) for run in by_seed[seed]}
    finals = [run for key, run in wanted_runs.items() if key not in done]
    chosen = {group: value for group, value in tuned.items() if value is not None}
    return Agenda(due=(*due, *finals), later=waiting, tuned=chosen)


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
    tune = experiment.tune
    records = newest(records)
    _, tuned = _tuning(experiment, {(record.stage, record.key): record for record in records})
    for record in records:
        groups: set[CellKey] = set()
        for cell in experiment.cells():
            fields = dict(cell)
            more: dict[str, Any] = {}
            chosen = True
            group = _group(tune, cell) if tune is not None else ()
            if tune is not None:
                fields[tune.name] = record.settings.get(tune.name)
            if record.stage is Stage.TUNE:
                # On behalf of the first cell of its group; on an early rung it is shorter than that.
                if tune is None or group in groups:
                    continue
                groups.add(group)
                more["steps"] = record.settings.get("steps")
            elif tune is not None:
                chosen = tuned[group] in (None, fields[tune.name])
            try:
                settings = experiment.settings_of(fields, more)
            except ConfigError:
                continue  # not of this cell
            if record.key == key_of(settings, record.seed):
                yield replace(record, cell=fields), chosen


def _final(experiment: Experiment, fields: Cell, seed: int) -> Run:
    settings = experiment.settings_of(fields)
    return Run(experiment=experiment.name, stage=Stage.FINAL, fields=dict(fields), settings=settings, seed=seed)


def _more_seeds(experiment: Experiment, records: Iterable[Record], tuned: Mapping[CellKey, float | None]) -> list[Run]:
    """Returns the next seed of both sides of every claim whose interval is wider than its margin."""
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
        # Seeds of which one side diverged count as run, and not as pairs.
        pairs_to_be_had = experiment.max_seeds - len(finding.seeds) + len(differences)
        if not seeds_needed(differences, margin=margin, max_seeds=pairs_to_be_had):
            continue
        seed = min(
            set(range(len(finding.seeds) + 1)) - set(finding.seeds)
        )  # one may have been taken out of the records
        for fields in finding.cells:
            run = _final(experiment, fields, seed)
            runs[run.key] = run
    return list(runs.values())


def _group(tune: Tune, cell: Cell) -> CellKey:
    """Returns what the cells that share one best value have in common."""
    return cell_key({name: cell[name] for name in tune.by})


def _tuning(
    experiment: Experiment, done: Mapping[tuple[Stage, str], Record]
) -> tuple[list[Run], dict[CellKey, float | None]]:
    """Returns the tuning runs that are due, and group -> the value that was found; None while it is not."""
    tune = experiment.tune
    if tune is None:
        return [], {}
    due: list[Run] = []
    tuned: dict[CellKey, float | None] = {}
    for cell in experiment.cells():
        group = _group(tune, cell)
        if group not in tuned:  # on behalf of its first cell
            wanted, tuned[group] = _tuning_of(experiment, tune, cell, done)
            due += wanted
    return due, tuned


def _tuning_of(
    experiment: Experiment, tune: Tune, cell: Cell, done: Mapping[tuple[Stage, str], Record]
) -> tuple[list[Run], float | None]:
    """Returns the tuning runs of a cell's group that are due, or the value that was found."""
    steps = experiment.settings_of(cell).steps

    def possible(value: float) -> bool:
        try:
            experiment.settings_of(cell, {tune.name: value})
        except ConfigError:
            return False  # a bound of the setting: nothing lies beyond
        return True

    def run(value: float, rung: float, seed: int = tune.seed) -> Run:
        settings = experiment.settings_of(cell, {tune.name: value, "steps": math.ceil(rung * steps)})
        fields = dict(cell) | {tune.name: value}
        return Run(experiment=experiment.name, stage=Stage.TUNE, fields=fields, settings=settings, seed=seed)

    values = list(tune.values)
    for rung in tune.rungs:
        runs = [run(value, rung) for value in values]
        missing = [each for each in runs if each.key not in done]
        if missing:
            return missing, None
        records = [done[each.key] for each in runs]
        if rung != tune.rungs[-1]:
            values = sorted(each[tune.name] for each in survivors(records, tune.keep))
            if not values:
                return [], tune.values[0]  # everything diverged: the smallest rate will show it again
            continue
        # The last rung: beyond the edge while the best lies there, and beside it what an earlier rung dropped.
        losses = {v: _loss(r) for v, r in zip(values, records, strict=True)}
        most = len(values) + tune.extend
        while (beyond := _beyond(losses, tune.values, possible)) is not None and len(losses) < most:
            extra = run(beyond, rung)
            if extra.key not in done:
                return [extra], None
            losses[beyond] = _loss(done[extra.key])
        if tune.seeds == 1:
            return [], interior(list(losses), list(losses.values())).best
        return _race(tune, losses, lambda value, seed: run(value, tune.rungs[-1], seed), possible, done, most)
    raise AssertionError("a tuning has at least one rung")


def _race(
    tune: Tune,
    losses: Mapping[float, float],
    run: Callable[[float, int], Run],
    possible: Callable[[float], bool],
    done: Mapping[tuple[Stage, str], Record],
    most: int,
) -> tuple[list[Run], float | None]:
    """Returns the runs of the last rung's other seeds that are due, or the value with the lowest mean of all seeds.

    Only the best by the first seed take part. What does not counts as tried and worse, but where the winner lies at the
    edge, the value beyond it joins.

    Args:
        tune: How.
        losses: Value -> loss with the first seed.
        run: (value, seed) -> the run.
        possible: Says whether the setting may have a value.
        done: Key -> record.
        most: Values to try in all.
    """
    racing = sorted((value for value in losses if math.isfinite(losses[value])), key=losses.__getitem__)[: tune.keep]
    means = dict.fromkeys(losses, math.inf)
    while racing:
        runs = {value: [run(value, tune.seed + k) for k in range(tune.seeds)] for value in racing}
        if missing := [each for value in racing for each in runs[value] if each.key not in done]:
            return missing, None
        for value in racing:
            means[value] = math.fsum(_loss(done[each.key]) for each in runs[value]) / tune.seeds
        beyond = _beyond(means, tune.values, possible)
        racing = [beyond] if beyond is not None and len(means) < most else []
    return [], interior(list(means), list(means.values())).best


def _loss(record: Record) -> float:
    return math.inf if record.diverged else record.loss


def _beyond(
    losses: Mapping[float, float], declared: Sequence[float], possible: Callable[[float], bool]
) -> float | None:
    """Returns the value to try beside the best if that lies at an edge of those tried; None if there is none."""
    found = interior(list(losses), list(losses.values()))
    if found.interior:
        return None
    if (beside := _beside(found.best, losses, declared)) is not None:
        return beside
    beyond = found.next_value
    if beyond is not None and all(isinstance(value, int) for value in declared):
        beyond = round(beyond)
    return beyond if beyond is not None and beyond not in losses and possible(beyond) else None


def _beside(best: float, losses: Mapping[float, float], declared: Sequence[float]) -> float | None:
    """Returns the declared neighbour of an edge that has no loss yet, if there is one."""
    smaller = [v for v in declared if v < best and v not in losses]
    larger = [v for v in declared if v > best and v not in losses]
    if best == min(losses) and smaller:
        return max(smaller)
    if best == max(losses) and larger:
        return min(larger)
    return None


def estimate_s(run: Run, records: Sequence[Record]) -> float | None:
    """Returns about how long a run will take, from the records of the experiment; None if there are none."""
    rates = [r.wall_s / (int(r.settings["steps"]) * int(r.settings["islands"])) for r in records if r.wall_s]
    return run.inner_steps * sum(rates) / len(rates) if rates else None
