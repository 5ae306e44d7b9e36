"""What is wrong in an experiment though each of its lines can be read: said before the first hour is spent.

Pure, but that the source of tasks is read for the names of their options.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from inspect import Signature
from typing import TYPE_CHECKING

from broker.errors import ConfigError
from broker.settings import nearest
from islands.options import check_options, signature_in_source
from ops.lab.cells import Cell, contains
from ops.lab.claims import Comparison
from ops.lab.settings import CellSettings, Mode

if TYPE_CHECKING:
    from ops.lab.experiment import Experiment


def check(experiment: Experiment) -> None:
    """Holds every cell, what is tuned and every claim against the grid, the settings and the task.

    Raises:
        ConfigError: With the field, the value and the cure.
    """
    _check_axes(experiment)
    for cell in experiment.cells():
        _check_cell(experiment, cell)
    for number, comparison in enumerate(experiment.comparisons):
        if comparison in experiment.comparisons[:number]:
            raise ConfigError("compare.claim", comparison.claim, "stands there twice: remove one of them")
        _check_claim(experiment, comparison)


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


def _no_axis(name: str, axes: list[str]) -> str:
    return f"is no axis of the grid; {nearest(name, axes)}" if axes else "is no axis of the grid, which has none"


# --- cells --------------------------------------------------------------------------------------------------------


def _check_cell(experiment: Experiment, cell: Cell) -> None:
    """Checks the settings of a cell with every value of what is tuned."""
    tune = experiment.tune
    if tune is None:
        _check_settings(experiment.settings_of(cell))
        return
    if tune.name in cell:
        raise ConfigError(f"grid.{tune.name}", cell[tune.name], "is tuned: leave it out of the grid, or out of [tune]")
    for rung in tune.rungs:
        steps = math.ceil(rung * experiment.settings_of(cell).steps)
        for value in tune.values:
            _check_settings(experiment.settings_of(cell, {tune.name: value, "steps": steps}))


def _check_settings(settings: CellSettings) -> None:
    if settings.mode is not Mode.DATA_PARALLEL and settings.sync_interval > settings.steps:
        cure = f"must be at most steps = {settings.steps}, or nothing is merged before the end"
        raise ConfigError("sync_interval", settings.sync_interval, cure)
    for name in ("step_times_s", "delays_s"):
        values = getattr(settings, name)
        if len(values) > settings.islands:
            raise ConfigError(name, values, f"must hold a number for each of islands = {settings.islands} at most")
    if (signature := _signature(settings.task)) is not None:
        check_options(settings.task, signature, settings.options)


@cache
def _signature(task: str) -> Signature | None:
    return signature_in_source(task)


# --- claims -------------------------------------------------------------------------------------------------------


def _check_claim(experiment: Experiment, comparison: Comparison) -> None:
    """Checks that each side of a claim selects cells of its own, and that there will be seeds to judge it by."""
    cells = experiment.cells()
    if comparison.seeds and comparison.seeds < experiment.seeds:
        cure = f"must be at least seeds = {experiment.seeds}, which every cell of the experiment is run with"
        raise ConfigError("compare.seeds", comparison.seeds, cure)
    if max(comparison.seeds, experiment.max_seeds) < 2:
        raise ConfigError("max_seeds", experiment.max_seeds, "must be at least 2 for a claim: one seed decides nothing")
    for side in ("candidate", "baseline"):
        selector = getattr(comparison, side)
        if not any(contains(cell, selector) for cell in cells):
            raise ConfigError(f"compare.{side}", dict(selector), "selects no cell of the grid: check names and values")
    if all(contains(cell, comparison.candidate) for cell in cells if contains(cell, comparison.baseline)):
        cure = "selects no cell that candidate leaves to it: give it a value that the candidate does not have"
        raise ConfigError("compare.baseline", dict(comparison.baseline), cure)
    axes = _axes(experiment)
    for name in comparison.by:
        if name not in axes:
            raise ConfigError("compare.by", name, _no_axis(name, axes))
    _check_ignored(experiment, comparison.ignore)


def _check_ignored(experiment: Experiment, names: Iterable[str]) -> None:
    """Checks that what a claim ignores is an axis, a setting or an option of the task."""
    signatures = [_signature(task) for task in {experiment.settings_of(cell).task for cell in experiment.cells()}]
    options = [f"task.{name}" for each in signatures if each is not None for name in each.parameters]
    known = [*_axes(experiment), *(each.name for each in fields(CellSettings)), *options]
    for name in names:
        if name not in known and not (name.startswith("task.") and None in signatures):
            raise ConfigError("compare.ignore", name, f"is neither an axis nor a setting; {nearest(name, known)}")
