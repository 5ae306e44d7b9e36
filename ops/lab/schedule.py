"""The schedule of an experiment: whether its parts fit together, which rate is best, and what to run next.

All of it is decided from the experiment and the records so far. So an experiment that was stopped goes on where it was,
whoever stopped it, and records that were copied from another machine count as much as those that were made here.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from broker.process.settings import nearest
from broker.wire.errors import ConfigError
from islands.tasks.options import check_mentioned, check_options, module_and_function, no_module, signature_in_source
from ops.lab.experiment import Cell, CellKey, Comparison, Equal, Experiment, Tune, cell_key, contains, label, read
from ops.lab.records import Record, Stage, newest, of_newest_code
from ops.lab.settings import CellSettings, key_of
from ops.lab.statistics import TOLERANCE, fits, groups, sides


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: of which experiment, to tune or to count, of which cell with what was tuned, all settings, the seed."""

    experiment: str
    stage: Stage
    fields: Cell
    settings: CellSettings
    seed: int

    @property
    def key(self) -> tuple[Stage, str]:
        """Under which its record is found."""
        return self.stage, key_of(self.settings, self.seed)


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


def agenda(experiment: Experiment, records: Iterable[Record]) -> Agenda:
    """Returns what to run next: tuning first, then every cell's first seed, then the second, and so on.

    Args:
        experiment: What is asked.
        records: Of this experiment, of any age: a record whose settings have changed since is not of these cells.
    """
    done = _done(experiment, records)
    tuning, tuned = _tuning(experiment, done)
    later, by_seed = 0, dict[int, list[Run]]()
    for cell, seeds in zip(experiment.cells(), _seeds(experiment), strict=True):
        chosen = _chosen(experiment, cell, tuned)
        if chosen is None:
            later += seeds
        for seed in range(seeds if chosen is not None else 0):
            by_seed.setdefault(seed, []).append(_final(experiment, chosen or {}, seed))
    # Cells that come to the same settings are one run; its record serves them all.
    wanted = {run.key: run for run in (*tuning, *(run for seed in sorted(by_seed) for run in by_seed[seed]))}
    winners = {group: winner for group, winner in tuned.items() if winner is not None}
    return Agenda(due=tuple(run for key, run in wanted.items() if key not in done), later=later, tuned=winners)


def current(experiment: Experiment, records: Iterable[Record]) -> tuple[Record, ...]:
    """Returns the newest records whose settings are those of a cell as it is now, once for each such cell.

    What a record calls its cell does not count: that was the file of its day. Nor do runs at a rate that was the best
    one until more rates were tried.
    """
    done = _done(experiment, records)
    runs, tuned = _tuning(experiment, done)
    seeds = sorted({record.seed for record in done.values() if record.stage is Stage.FINAL})
    for cell in experiment.cells():
        chosen = _chosen(experiment, cell, tuned)
        runs += [_final(experiment, chosen, seed) for seed in seeds] if chosen is not None else []
    return tuple(replace(done[run.key], cell=run.fields) for run in runs if run.key in done)


def left_out(experiment: Experiment, records: Iterable[Record]) -> int:
    """Returns how many of the records that were made are of other settings, or of an older form of the task."""
    return len(newest(records)) - len({(record.stage, record.key) for record in current(experiment, records)})


def _done(experiment: Experiment, records: Iterable[Record]) -> dict[tuple[Stage, str], Record]:
    return {(record.stage, record.key): record for record in newest(of_newest_code(records, experiment.sources))}


def _seeds(experiment: Experiment) -> list[int]:
    """Returns how many seeds each cell is run with: as many as every cell, or as the claims on it ask for."""
    seeds = [experiment.seeds] * len(experiment.cells())
    for comparison in experiment.comparisons:
        for _, candidates, baselines in _pairings(experiment, comparison):
            for i, _ in (*candidates, *baselines):
                seeds[i] = max(seeds[i], comparison.seeds)
    return seeds


def _chosen(experiment: Experiment, cell: Cell, tuned: Mapping[CellKey, Tuned | None]) -> Cell | None:
    """Returns a cell with the best value of what is tuned; None while that is not known."""
    tune = experiment.tune
    winner = None if tune is None else tuned[_group(tune, cell)]
    return cell if tune is None else None if winner is None else {**cell, tune.name: winner.best}


def _final(experiment: Experiment, cell: Cell, seed: int) -> Run:
    settings = experiment.settings_of(cell)
    return Run(experiment=experiment.name, stage=Stage.FINAL, fields=dict(cell), settings=settings, seed=seed)


def _group(tune: Tune, cell: Cell) -> CellKey:
    """Returns what the cells that share one best value have in common; of several grids some may lack an axis."""
    return cell_key({name: cell[name] for name in tune.by if name in cell})


# --- tuning ---------------------------------------------------------------------------------------------------------


class Attempt(NamedTuple):
    """One tuning run: a value, the share of the steps, and the seed."""

    value: float
    rung: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The best of the values tried.

    Attributes:
        best: The value with the lowest loss; of equal ones the smallest.
        interior: Smaller and larger values were tried and were worse.
        next_value: What to try next if it is not interior: as far beyond the edge, in ratio, as its neighbour is
            within. None if interior, or if there is no such value.
    """

    best: float
    interior: bool
    next_value: float | None


def _tuning(
    experiment: Experiment, done: Mapping[tuple[Stage, str], Record]
) -> tuple[list[Run], dict[CellKey, Tuned | None]]:
    """Returns the tuning runs that were or are to be made, and group -> the best value; None while it is not known."""
    tune = experiment.tune
    if tune is None:
        return [], {}
    runs: list[Run] = []
    tuned: dict[CellKey, Tuned | None] = {}
    for cell in experiment.cells():
        if (group := _group(tune, cell)) in tuned:
            continue  # the first cell of a group stands for all of them
        steps = experiment.settings_of(cell).steps

        def run(attempt: Attempt, cell: Cell = cell, steps: int = steps) -> Run:
            more = {tune.name: attempt.value, "steps": math.ceil(attempt.rung * steps)}
            named, settings = {**cell, tune.name: attempt.value}, experiment.settings_of(cell, more)
            return Run(experiment=experiment.name, stage=Stage.TUNE, fields=named, settings=settings, seed=attempt.seed)

        def loss_of(attempt: Attempt, run: Callable[[Attempt], Run] = run) -> float | None:
            record = done.get(run(attempt).key)
            return None if record is None else math.inf if record.diverged else record.loss

        def possible(value: float, cell: Cell = cell) -> bool:
            try:
                experiment.settings_of(cell, {tune.name: value})
            except ConfigError:
                return False  # a bound of the setting: nothing lies beyond
            return True

        asked, tuned[group] = search(tune, loss_of, possible)
        runs += map(run, asked)
    return runs, tuned


def search(
    tune: Tune, loss_of: Callable[[Attempt], float | None], possible: Callable[[float], bool]
) -> tuple[list[Attempt], Tuned | None]:
    """Follows a tuning as far as its runs have come.

    Args:
        tune: How.
        loss_of: The loss of an attempt, infinite if it diverged; None if it was not run.
        possible: Says whether the setting may have a value beyond those declared.

    Returns:
        The attempts that were asked for so far, and the best value; None while some of them have no loss.
    """
    asked: dict[Attempt, None] = {}
    steps = _steps(tune, possible)
    wanted = next(steps)
    while True:
        asked |= dict.fromkeys(wanted)
        losses = [loss for attempt in wanted if (loss := loss_of(attempt)) is not None]
        if len(losses) < len(wanted):
            return list(asked), None
        try:
            wanted = steps.send(losses)
        except StopIteration as end:
            return list(asked), end.value


def _steps(tune: Tune, possible: Callable[[float], bool]) -> Generator[Sequence[Attempt], Sequence[float], Tuned]:
    """Yields the attempts that are needed next, is sent their losses, and returns the best value.

    Successive halving over the declared values, then beyond an edge while the best lies there. One seed may favour a
    rate, so the best of the last rung can be run with more seeds, and the lowest mean wins.
    """
    values, last = list(tune.values), tune.rungs[-1]
    for rung in tune.rungs[:-1]:
        losses = dict(zip(values, (yield [Attempt(value, rung, tune.seed) for value in values]), strict=True))
        most = len(losses) + tune.extend
        # Where everything diverged smaller values may not.
        while not _best(losses, tune.keep) and len(losses) < most:
            beyond = _beyond(losses, tune.values, possible)
            if beyond is None:
                break
            (losses[beyond],) = yield [Attempt(beyond, rung, tune.seed)]
        values = sorted(_best(losses, tune.keep))
        if not values:
            return interior(losses)

    losses = dict(zip(values, (yield [Attempt(value, last, tune.seed) for value in values]), strict=True))
    most = len(values) + tune.extend
    # Beyond the edge while the best lies there, and beside it what an earlier rung dropped.
    while len(losses) < most and (beyond := _beyond(losses, tune.values, possible)) is not None:
        (losses[beyond],) = yield [Attempt(beyond, last, tune.seed)]
    if tune.seeds == 1:
        return interior(losses)

    # Who does not race counts as worse, but where the winner lies at the edge the value beyond it joins.
    means, racing = dict.fromkeys(losses, math.inf), _best(losses, tune.keep)
    while racing:
        found = iter((yield [Attempt(value, last, tune.seed + k) for value in racing for k in range(tune.seeds)]))
        for value in racing:
            means[value] = math.fsum(next(found) for _ in range(tune.seeds)) / tune.seeds
        beyond = _beyond(means, tune.values, possible) if len(means) < most else None
        racing = [] if beyond is None else [beyond]
    return interior(means)


def _best(losses: Mapping[float, float], keep: int) -> list[float]:
    """Returns the values that go on, best first; those that diverged never do."""
    return sorted((value for value in losses if math.isfinite(losses[value])), key=losses.__getitem__)[:keep]


def interior(losses: Mapping[float, float]) -> Tuned:
    """Returns the best value, whether it is interior to the values tried, and if not, the value to try next.

    Args:
        losses: Of every value tried, in any order; not finite where the run diverged. A single value is an edge, and
            twice as much is tried next.
    """
    tried = sorted(losses)
    ranked = [losses[value] if math.isfinite(losses[value]) else math.inf for value in tried]
    index = ranked.index(min(ranked))
    best = tried[index]
    if 0 < index < len(tried) - 1:
        return Tuned(best=best, interior=True, next_value=None)
    neighbour = best / 2 if len(tried) == 1 else tried[1 if index == 0 else -2]
    next_value = best * best / neighbour if min(best, neighbour) > 0 else None
    return Tuned(best=best, interior=False, next_value=next_value)


def _beyond(
    losses: Mapping[float, float], declared: Sequence[float], possible: Callable[[float], bool]
) -> float | None:
    """Returns the value to try beside the best if that lies at an edge of those tried; None if there is none.

    A declared value that an earlier rung dropped comes first.
    """
    found = interior(losses)
    if found.interior:
        return None
    untried = [value for value in declared if value not in losses]
    if found.best == min(losses) and (smaller := [value for value in untried if value < found.best]):
        return max(smaller)
    if found.best == max(losses) and (larger := [value for value in untried if value > found.best]):
        return min(larger)
    beyond = found.next_value
    if beyond is not None and all(isinstance(value, int) for value in declared):
        beyond = round(beyond)
    return beyond if beyond is not None and beyond not in losses and possible(beyond) else None


# --- checks ---------------------------------------------------------------------------------------------------------


def load(path: Path) -> Experiment:
    """Reads an experiment, and holds its cells against the settings and the task, its claims against the cells.

    Raises:
        ConfigError: The file cannot be read, or something in it is wrong: it names the field, the value and the cure.
    """
    try:
        experiment = read(path)
        _check_names(experiment)
        cells = [cell for each in experiment.cells() for cell in _settings_of(experiment, each)]
        _check_tasks(cells)
        for comparison in experiment.comparisons:
            _check_claim(experiment, comparison)
    except ConfigError as err:
        raise ConfigError(f"{path.name}: {err.field}", err.value, err.cure) from err
    return experiment


def _check_names(experiment: Experiment) -> None:
    """Checks that whatever is set is a setting, and that no cell gets one from two places."""
    known = [each.name for each in fields(CellSettings) if each.name != "options"]
    axes, tune = _axes(experiment), experiment.tune
    tuned = [] if tune is None else [tune.name]
    variants = {axis: set().union(*values.values()) for axis, values in experiment.variants.items()}
    places: dict[str, Iterable[str]] = {"run": experiment.base, "tune.name": tuned}
    places |= {"grid": [name for name in axes if name not in variants]}
    places |= {f"variants.{axis}": sorted(names) for axis, names in variants.items()}
    for place, names in places.items():
        for name in names:
            if name not in known and not name.startswith("task."):
                raise ConfigError(place, name, f"is no setting; {nearest(name, [*known, f'task.{name}'])}")
    for place, names in (("variants", variants), ("tune.by", () if tune is None else tune.by)):
        for name in names:
            _check_axis(place, name, axes)
    if "steps" in tuned:
        raise ConfigError("tune.name", "steps", "cannot be tuned: runs of other lengths differ in what they were given")
    for name in set(tuned) & {name for axis in axes for name in variants.get(axis, {axis})}:
        raise ConfigError("tune.name", name, "is set by the grid as well: leave it out of one of them")
    for grid in experiment.grids:
        for one, other in itertools.combinations(grid, 2):
            if twice := sorted(variants.get(one, {one}) & variants.get(other, {other})):
                cure = f"is set by the axis {one} as well: leave it to one of them"
                raise ConfigError(f"grid.{other}", twice[0], cure)


def _axes(experiment: Experiment) -> list[str]:
    return list(dict.fromkeys(name for grid in experiment.grids for name in grid))


def _check_axis(field: str, name: str, axes: list[str]) -> None:
    if name not in axes:
        cure = f"is no axis of the grid; {nearest(name, axes)}" if axes else "is no axis of the grid, which has none"
        raise ConfigError(field, name, cure)


def _settings_of(experiment: Experiment, cell: Cell) -> Iterator[CellSettings]:
    """Yields the settings of a cell with every value of what is tuned, and with every length; each checks itself."""
    tune = experiment.tune
    if tune is None:
        yield experiment.settings_of(cell)
        return
    for value in tune.values:
        yield (whole := experiment.settings_of(cell, {tune.name: value}))
        for rung in tune.rungs:
            try:
                yield experiment.settings_of(cell, {tune.name: value, "steps": math.ceil(rung * whole.steps)})
            except ConfigError as err:
                raise ConfigError(err.field, err.value, f"{err.cure} (a rung of {rung:g} of the steps)") from err


def _check_tasks(cells: Iterable[CellSettings]) -> None:
    """Holds options against the source of their task, where that tells."""
    search_in = [os.getcwd(), *sys.path]  # where runs look, too
    signatures = {}
    for each in cells:
        if each.task not in signatures:
            package = module_and_function(each.task)[0].partition(".")[0]
            if PathFinder.find_spec(package, search_in) is None:
                raise no_module(each.task, package)
            check_mentioned(each.task, search=search_in)
            signatures[each.task] = signature_in_source(each.task, search=search_in)
        if (signature := signatures[each.task]) is not None:
            check_options(each.task, signature, each.options)


def _check_claim(experiment: Experiment, comparison: Comparison) -> None:
    """Checks that a claim has cells on both sides, and one baseline for each group, whatever tuning chooses."""
    if max(comparison.seeds, experiment.seeds) < 2:
        raise ConfigError("compare.seeds", comparison.seeds, "must be at least 2 for a claim: one seed decides nothing")
    axes, tune = _axes(experiment), experiment.tune
    for name in comparison.by:
        _check_axis("compare.by", name, axes)
    known = [*axes, *([] if tune is None else [tune.name])]
    for name in comparison.ignore:
        if name not in known:
            cure = f"is neither an axis of the grid nor tuned; {nearest(name, known)}"
            raise ConfigError("compare.ignore", name, cure)
    for side in ("candidate", "baseline"):
        selector = getattr(comparison, side)
        if not any(contains(cell, selector) for cell in experiment.cells()):
            raise ConfigError(f"compare.{side}", dict(selector), "selects no cell of the grid: check names and values")
    for group, candidates, baselines in _pairings(experiment, comparison):
        where = label(dict(group)) if group else "all"
        if not baselines:
            cure = f"has no cell to compare with for {where}: name what differs, such as a tuned setting, in ignore"
            raise ConfigError("compare.baseline", dict(comparison.baseline), cure)
        for side, cells in (("candidate", candidates), ("baseline", baselines)):
            if len(cells) > 1:
                cure = f"leaves several cells to compare for {where}: name a value of what they differ in"
                raise ConfigError(f"compare.{side}", dict(getattr(comparison, side)), cure)
        _check_tokens(experiment, comparison, candidates[0][0], baselines[0][0])


def _check_tokens(experiment: Experiment, comparison: Comparison, ours: int, theirs: int) -> None:
    """Checks that the runs of a pair will have trained as much, where their steps are of the same size."""
    one, other = (next(_settings_of(experiment, experiment.cells()[i])) for i in (ours, theirs))
    if comparison.equal is Equal.TIME or (one.task, one.options) != (other.task, other.options):
        return
    steps, others = one.steps * one.islands, other.steps * other.islands
    if abs(steps / others - 1) > TOLERANCE and not (one.joins or other.joins):
        cure = f'compares {steps:,} steps of all islands with {others:,}: set steps, or write equal = "time"'
        raise ConfigError("compare.claim", comparison.claim, cure)


def _pairings(
    experiment: Experiment, comparison: Comparison
) -> list[tuple[CellKey, list[tuple[int, Cell]], list[tuple[int, Cell]]]]:
    """Returns the groups of a claim, each with its candidates and its baselines: their numbers, and their cells.

    What is tuned has a value of its own in each group that is tuned by itself: it may come out differently there.
    """
    tune, cells = experiment.tune, list(enumerate(experiment.cells()))
    if tune is not None:
        cells = [(i, cell | {tune.name: str(_group(tune, cell))}) for i, cell in cells]

    def cell_of(numbered: tuple[int, dict[str, Any]]) -> Cell:
        return numbered[1]

    candidates, baselines = sides(comparison, cells, cell_of=cell_of)
    return [
        (group, list(of_group), [each for each in baselines if fits(each[1], dict(group), comparison)])
        for group, of_group in groups(comparison, candidates, cell_of=cell_of).items()
    ]
