"""Checks an experiment, and lists its runs and those that are due.

All of it is decided from the experiment and the records so far. So a stopped experiment continues where it was,
and records that were copied from another machine count as much as those that were made here.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from broker.base.errors import ConfigError
from broker.base.settings import nearest
from broker.base.sources import read_toml
from islands.tasks.options import check_options, signature_in_source
from ops.lab.records import Record, newest
from ops.plans.cell import CellSettings, key_of
from ops.plans.experiment import Cell, Comparison, Experiment, contains, experiment_of, label


class Run(NamedTuple):
    """One run: cell, settings, seed, and the key of its record."""

    cell: Cell
    settings: CellSettings
    seed: int
    key: str


def runs_of(experiment: Experiment) -> list[list[Run]]:
    """Returns the runs of every cell by seed; their number is that of all cells, or of the cell's claims."""
    cells = experiment.cells()
    seeds = [experiment.seeds] * len(cells)
    for comparison in experiment.comparisons:
        for pairing in experiment.pairings(comparison):
            for i in (*pairing.candidates, *pairing.baselines):
                seeds[i] = max(seeds[i], comparison.seeds)
    runs = []
    for cell, count in zip(cells, seeds, strict=True):
        settings = experiment.settings_of(cell)
        every = range(experiment.first_seed, experiment.first_seed + count)
        runs.append([Run(cell, settings, seed, key_of(settings, seed)) for seed in every])
    return runs


def due(experiment: Experiment, records: Iterable[Record]) -> list[Run]:
    """Returns the runs without a record: every cell's first seed, then the second, and so on.

    Cells that come to the same settings are one run; its record serves them all.
    """
    done = {record.key for record in records}
    wanted: dict[str, Run] = {}
    for run in sorted((run for runs in runs_of(experiment) for run in runs), key=lambda run: run.seed):
        wanted.setdefault(run.key, run)
    return [run for key, run in wanted.items() if key not in done]


def current(experiment: Experiment, records: Iterable[Record]) -> list[dict[int, Record]]:
    """Returns for every cell seed -> the newest record with its current settings.

    The cell's name in a record does not count: the file may have changed since.
    """
    done = {record.key: record for record in records}
    return [{run.seed: done[run.key] for run in runs if run.key in done} for runs in runs_of(experiment)]


def left_out(experiment: Experiment, records: Iterable[Record]) -> int:
    """Returns the number of records with other settings or seeds."""
    records = tuple(records)
    counting = {record.key for of_cell in current(experiment, records) for record in of_cell.values()}
    return len(newest(records)) - len(counting)


# --- checks ---------------------------------------------------------------------------------------------------------


def load(path: Path) -> Experiment:
    """Returns an experiment from a file; checks cells against settings and task, claims against cells.

    Raises:
        ConfigError: The file cannot be read, or something in it is wrong: it names the field, the value and the cure.
    """
    try:
        table = read_toml(path, field="experiment", cure="there are some in examples/lab")
        experiment = experiment_of(path, table)
        _check_names(experiment)
        _check_tasks([experiment.settings_of(cell) for cell in experiment.cells()])
        for comparison in experiment.comparisons:
            _check_claim(experiment, comparison)
    except ConfigError as err:
        raise ConfigError(f"{path.name}: {err.field}", err.value, err.cure) from err
    return experiment


def _check_names(experiment: Experiment) -> None:
    """Checks that variants belong to axes, and that no cell gets a setting from two places."""
    variants = {axis: set().union(*values.values()) for axis, values in experiment.variants.items()}
    for axis in variants:
        _check_known("variants", axis, _axes(experiment))
    for grid in experiment.grids:
        for one, other in itertools.combinations(grid, 2):
            if twice := sorted(variants.get(one, {one}) & variants.get(other, {other})):
                cure = f"is set by the axis {one} as well: leave it to one of them"
                raise ConfigError(f"grid.{other}", twice[0], cure)


def _axes(experiment: Experiment) -> list[str]:
    return list(dict.fromkeys(name for grid in experiment.grids for name in grid))


def _check_known(field: str, name: str, axes: list[str]) -> None:
    if name not in axes:
        cure = f"is no axis of the grid; {nearest(name, axes)}" if axes else "is no axis of the grid, which has none"
        raise ConfigError(field, name, cure)


def _check_tasks(cells: Iterable[CellSettings]) -> None:
    """Checks options against the source of their task, as far as it shows them."""
    search = [*sys.path, os.getcwd()]  # where runs look, too
    signatures = {}
    for each in cells:
        if each.task not in signatures:
            signatures[each.task] = signature_in_source(each.task, search=search)
        if (signature := signatures[each.task]) is not None:
            check_options(each.task, signature, each.options)


def _check_claim(experiment: Experiment, comparison: Comparison) -> None:
    """Checks that a claim has cells on both sides, and one baseline per group."""
    if max(comparison.seeds, experiment.seeds) < 2:
        raise ConfigError("compare.seeds", comparison.seeds, "must be at least 2 for a claim: one seed decides nothing")
    for name in comparison.ignore:
        _check_known("compare.ignore", name, _axes(experiment))
    cells = experiment.cells()
    for side in ("candidate", "baseline"):
        selector = getattr(comparison, side)
        if not any(contains(cell, selector) for cell in cells):
            raise ConfigError(f"compare.{side}", dict(selector), "selects no cell of the grid: check names and values")
    for group, candidates, baselines in experiment.pairings(comparison):
        if not baselines:
            cure = f"has no cell to compare with for {label(group)}: name what differs, such as a rate, in ignore"
            raise ConfigError("compare.baseline", dict(comparison.baseline), cure)
        for side, found in (("candidate", candidates), ("baseline", baselines)):
            if len(found) > 1:
                cure = f"leaves several cells to compare for {label(group)}: give values for the fields that differ"
                raise ConfigError(f"compare.{side}", dict(getattr(comparison, side)), cure)
