"""What is wrong between the parts of an experiment that are right by themselves: said before the first hour is spent.

Cells are held against the task's source, claims against the cells that they would compare.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib.machinery import PathFinder
from inspect import Signature
from typing import TYPE_CHECKING

from broker.process.settings import nearest
from broker.wire.errors import ConfigError
from islands.tasks.options import check_mentioned, check_options, module_and_function, no_module, signature_in_source
from ops.lab.cells import Cell, cell_key, contains, label, varying
from ops.lab.claims import Comparison, Equal
from ops.lab.comparisons import TOLERANCE, fits, groups, sides
from ops.lab.settings import HOLDS_OUT, CellSettings

if TYPE_CHECKING:
    from ops.lab.experiment import Experiment


def check(experiment: Experiment) -> None:
    """Holds every cell, what is tuned and every claim against the grid, the settings and the task.

    Raises:
        ConfigError: With the field, the value and the cure.
    """
    _check_names(experiment)
    _check_axes(experiment)
    _check_set_once(experiment)
    cells = [_check_cell(experiment, cell) for cell in experiment.cells()]
    _check_tasks(cells)
    _check_fleets(cells)
    for number, comparison in enumerate(experiment.comparisons):
        if comparison in experiment.comparisons[:number]:
            raise ConfigError("compare.claim", comparison.claim, "stands there twice: remove one of them")
        _check_claim(experiment, comparison)


def _check_names(experiment: Experiment) -> None:
    """Checks that whatever is set is a setting, where it stands."""
    known = [each.name for each in fields(CellSettings) if each.name != "options"]
    places: dict[str, Iterable[str]] = {"run": experiment.base}
    places |= {"grid": [name for name in _axes(experiment) if name not in experiment.variants]}
    for axis, values in experiment.variants.items():
        places |= {f"variants.{axis}.{value!r}": names for value, names in values.items()}
    if experiment.tune is not None:
        places["tune.name"] = [experiment.tune.name]
    for place, names in places.items():
        for name in names:
            if name not in known and not name.startswith("task."):
                likely = nearest(name, [*known, f"task.{name}"])
                raise ConfigError(place, name, f"is no setting; {likely}")


def _axes(experiment: Experiment) -> list[str]:
    return list(dict.fromkeys(name for grid in experiment.grids for name in grid))


def _check_axes(experiment: Experiment) -> None:
    """Checks that what is tuned for, and what has variants, is an axis of one grid at least."""
    axes = _axes(experiment)
    for name in experiment.variants:
        if name not in axes:
            raise ConfigError("variants", name, _no_axis(name, axes))
    for name in experiment.tune.by if experiment.tune is not None else ():
        if name not in axes:
            raise ConfigError("tune.by", name, _no_axis(name, axes))


def _check_set_once(experiment: Experiment) -> None:
    """Checks that no cell gets one setting from two places: the last one would win, and labels would lie."""
    tuned = experiment.tune.name if experiment.tune is not None else ""
    if tuned == "steps":
        raise ConfigError("tune.name", tuned, "cannot be tuned: runs of other lengths differ in what they were given")
    sources = {name: {name} for name in _axes(experiment) if name not in experiment.variants}
    for axis, values in experiment.variants.items():
        sources[axis] = {name for each in values.values() for name in each}
    for grid in experiment.grids:
        for one, other in itertools.combinations(grid, 2):
            if twice := sorted(sources[one] & sources[other]):
                cure = f"is set by the axis {one} as well: leave it to one of them"
                raise ConfigError(f"grid.{other}", twice[0], cure)
    for axis in experiment.variants:
        if tuned in sources[axis]:
            raise ConfigError(f"variants.{axis}", tuned, "is tuned: leave it out of the variants, or out of [tune]")


def _no_axis(name: str, axes: list[str]) -> str:
    return f"is no axis of the grid; {nearest(name, axes)}" if axes else "is no axis of the grid, which has none"


# --- cells --------------------------------------------------------------------------------------------------------


def _check_cell(experiment: Experiment, cell: Cell) -> CellSettings:
    """Checks the settings of a cell with every value of what is tuned; returns those with the first."""
    tune = experiment.tune
    if tune is None:
        return experiment.settings_of(cell)
    if tune.name in cell:
        raise ConfigError(f"grid.{tune.name}", cell[tune.name], "is tuned: leave it out of the grid, or out of [tune]")
    whole = [experiment.settings_of(cell, {tune.name: value}) for value in tune.values]
    for rung in tune.rungs:
        steps = math.ceil(rung * whole[0].steps)
        for value in tune.values:
            try:
                experiment.settings_of(cell, {tune.name: value, "steps": steps})
            except ConfigError as err:
                raise ConfigError(err.field, err.value, f"{err.cure} (a rung of {rung:g} of the steps)") from err
    return whole[0]


def _check_tasks(cells: Iterable[CellSettings]) -> None:
    """Holds options against the source of their task, where that tells."""
    search = [os.getcwd(), *sys.path]  # where runs look, too
    signatures = {}
    for task in {each.task for each in cells}:
        package = module_and_function(task)[0].partition(".")[0]
        if PathFinder.find_spec(package, search) is None:
            raise no_module(task, package)
        check_mentioned(task, search=search)
        signatures[task] = signature_in_source(task, search=search)
    for each in cells:
        if (signature := signatures[each.task]) is not None:
            check_options(each.task, signature, each.options)
            _check_sequences(each, signature)


def _check_sequences(cell: CellSettings, signature: Signature) -> None:
    """Checks that there is somebody to be told how much to hold out, where that is said."""
    for each in fields(cell):
        value = getattr(cell, each.name)
        if not each.name.endswith("_sequences") or value == each.default:
            continue
        if not signature.parameters.keys() >= HOLDS_OUT:
            cure = f"{cell.task} cannot be told, having no {' and '.join(sorted(HOLDS_OUT))}: leave this out"
            raise ConfigError(each.name, value, cure)
        if "held_out_tokens" in cell.options:
            raise ConfigError(each.name, value, "is told already, by task.held_out_tokens: leave one of them out")


def _check_fleets(cells: Sequence[CellSettings]) -> None:
    """Checks that no island is described that no cell has; smaller cells take the first of a list."""
    most = max((each.islands for each in cells), default=0)
    for each in cells:
        for name in ("step_times_s", "delays_s"):
            values = getattr(each, name)
            if len(values) > most:
                cure = f"has {len(values)} numbers, one for each island: no cell has more than {most} islands"
                raise ConfigError(name, values, cure)


# --- claims -------------------------------------------------------------------------------------------------------


def _check_claim(experiment: Experiment, comparison: Comparison) -> None:
    """Checks that each side of a claim has cells of its own that can be paired, and that there will be seeds."""
    cells = experiment.cells()
    if comparison.seeds and comparison.seeds < experiment.seeds:
        cure = f"must be at least seeds = {experiment.seeds}, which every cell of the experiment is run with"
        raise ConfigError("compare.seeds", comparison.seeds, cure)
    if (comparison.seeds or experiment.max_seeds) < 2:
        name, seeds = ("compare.seeds", comparison.seeds) if comparison.seeds else ("max_seeds", experiment.max_seeds)
        raise ConfigError(name, seeds, "must be at least 2 for a claim: one seed decides nothing")
    for side in ("candidate", "baseline"):
        selector = getattr(comparison, side)
        if not any(contains(cell, selector) for cell in cells):
            raise ConfigError(f"compare.{side}", dict(selector), "selects no cell of the grid: check names and values")
    if all(contains(cell, comparison.candidate) for cell in cells if contains(cell, comparison.baseline)):
        cure = "selects no cell that candidate leaves to it: give it a value that the candidate does not have"
        raise ConfigError("compare.baseline", dict(comparison.baseline), cure)
    axes, tune = _axes(experiment), experiment.tune
    for name in comparison.by:
        if name not in axes:
            raise ConfigError("compare.by", name, _no_axis(name, axes))
    known = [*axes, *([] if tune is None else [tune.name])]
    for name in comparison.ignore:
        if name not in known:
            raise ConfigError(
                "compare.ignore", name, f"is neither an axis of the grid nor tuned; {nearest(name, known)}"
            )
    _check_pairs(experiment, comparison)


def _check_pairs(experiment: Experiment, comparison: Comparison) -> None:
    """Checks that there is one baseline for each group of candidates, whatever tuning chooses."""
    tune, cells = experiment.tune, experiment.cells()
    if tune is not None:  # each group that is tuned by itself may choose a value of its own
        cells = [cell | {tune.name: str(cell_key({n: cell[n] for n in tune.by if n in cell}))} for cell in cells]
    candidates, baselines = sides(comparison, cells, cell_of=dict)
    for key, of_group in groups(comparison, candidates, cell_of=dict).items():
        group = dict(key)
        baseline = next((cell for cell in baselines if fits(cell, group, comparison)), None)
        _check_tokens(experiment, comparison, of_group[0], baseline)
        fitting = {cell_key(cell) for cell in baselines if fits(cell, group, comparison)}
        if len(fitting) == 1 and len({cell_key(cell) for cell in of_group}) == 1:
            continue
        if tune is not None and tune.name not in comparison.ignore and not fitting:
            cure = f"must name {tune.name}: it is tuned for each side, so they may differ in it"
            raise ConfigError("compare.ignore", list(comparison.ignore), cure)
        where = label(group) if group else "all"
        if not fitting:
            cure = f"has no cell to compare with for {where}: give it the same values, or name what differs in ignore"
        else:
            several = varying(dict(cell) for cell in (fitting if len(fitting) > 1 else map(cell_key, of_group)))
            cure = f"leaves several cells to compare for {where}, which differ in {', '.join(several)}: name a value"
        raise ConfigError("compare.baseline", dict(comparison.baseline), cure)


def _check_tokens(experiment: Experiment, comparison: Comparison, candidate: Cell, baseline: Cell | None) -> None:
    """Checks that the runs of a pair will have trained as much, where their steps are of the same size."""
    if baseline is None or comparison.equal is not Equal.TOKENS:
        return
    tuned = {} if experiment.tune is None else {experiment.tune.name: experiment.tune.values[0]}
    ours, theirs = (experiment.settings_of(dict(cell) | tuned) for cell in (candidate, baseline))
    if (ours.task, ours.options) != (theirs.task, theirs.options) or ours.joins or theirs.joins:
        return
    steps, others = (each.steps * each.islands for each in (ours, theirs))
    if abs(steps / others - 1) > TOLERANCE:
        cure = (
            f"compares {steps:,} steps of all islands with {others:,}, so there will be no verdict at equal tokens: "
            'let variants set steps, or write equal = "time"'
        )
        raise ConfigError("compare.claim", comparison.claim, cure)
