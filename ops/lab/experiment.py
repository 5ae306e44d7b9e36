"""An experiment: a question, the cells that answer it, and what is claimed. Read from a TOML file.

question = "..."                     what the runs are to answer
notes = "..."                        where we differ from what was published, and why
seeds = 3                            runs of every cell, paired by seed; up to max_seeds where an interval is wider
max_seeds = 6                        than the margin of a claim, unless that is planned with a number of its own
budget_minutes = 60                  processor time after which no further run is started

[run]                                settings of every cell (ops.lab.settings)
[grid] or [[grid]]                   settings with a list of values: their product is the cells
[variants.NAME."a name"]             values of a grid's axis NAME that stand for several settings each
[tune]                               a setting that is tuned for each group of cells before the cells are run
[[compare]]                          claims (ops.lab.claims)
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from broker.process import toml
from broker.process.settings import from_sources, refuse_unknown, setting
from broker.wire.errors import ConfigError
from ops.lab.cells import Cell
from ops.lab.checks import check
from ops.lab.claims import Comparison, comparison_of
from ops.lab.settings import CellSettings, cell_settings
from ops.lab.tuning import Tune

_TABLES = ("run", "grid", "variants", "tune", "compare")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The settings of an experiment that stand outside of its tables."""

    question: str = setting("", "what the runs are to answer")
    notes: str = setting("", "where we differ from what was published, and why")
    seeds: int = setting(3, "runs of every cell")
    max_seeds: int = setting(6, "runs of a cell at most, but for claims that are planned with more")
    budget_minutes: float = setting(60.0, "processor time after which no further run is started")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One experiment.

    Attributes:
        name: Of its file, without the suffix.
        path: Of its file.
        question: What the runs are to answer.
        notes: Where we differ from what was published, and why.
        seeds: Runs of every cell.
        max_seeds: Runs of a cell at most, but for claims that are planned with more.
        budget_minutes: Processor time after which no further run is started.
        base: Settings of every cell.
        grids: Axis -> values, for each grid.
        variants: Axis -> name -> settings.
        tune: What is tuned first, if anything.
        comparisons: What is claimed.
        sources: Module of a task of one's own, or path of text -> digest as it is now; empty where records alone count.
    """

    name: str
    path: Path
    question: str
    notes: str
    seeds: int
    max_seeds: int
    budget_minutes: float
    base: dict[str, Any]
    grids: tuple[Mapping[str, tuple[Any, ...]], ...]
    variants: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    tune: Tune | None = None
    comparisons: tuple[Comparison, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        most = max(self.max_seeds, *(comparison.seeds for comparison in self.comparisons), 0)
        if self.tune is not None and self.tune.seed < most:
            cure = f"must be at least {most}, the seeds that there may be: no reported run may have chosen its own rate"
            raise ConfigError("tune.seed", self.tune.seed, cure)

    def limited(self, seeds: int) -> Experiment:
        """Returns the experiment with so many seeds for every cell at most, whatever it plans."""
        return replace(
            self,
            seeds=min(self.seeds, seeds),
            max_seeds=seeds,
            comparisons=tuple(replace(each, seeds=min(each.seeds, seeds), looks=()) for each in self.comparisons),
        )

    @property
    def command(self) -> str:
        """What regenerates its records."""
        return f"python3 -m ops lab run {shlex.quote(self.path.as_posix())}"

    def cells(self) -> list[dict[str, Any]]:
        """Returns the fields of every cell, without what is tuned."""
        cells: list[dict[str, Any]] = []
        for grid in self.grids:
            for values in itertools.product(*grid.values()):
                cell = dict(zip(grid, values, strict=True))
                if cell not in cells:
                    cells.append(cell)
        return cells

    def settings_of(self, cell: Cell, more: Mapping[str, Any] | None = None) -> CellSettings:
        """Returns the settings of a cell; ``more`` wins over it, and it over ``[run]``.

        Raises:
            ConfigError: They do not fit together.
        """
        values = dict(self.base)
        for name, value in cell.items():
            values |= dict(self.variants[name][value]) if name in self.variants else {name: value}
        return cell_settings(values | dict(more or {}))


def load(path: Path) -> Experiment:
    """Reads an experiment and checks it (:mod:`ops.lab.checks`).

    Raises:
        ConfigError: The file cannot be read, or something in it is wrong: it names the field, the value and the cure.
    """
    try:
        table = toml.read(path, field="experiment", cure="there are some in examples/lab")
    except ConfigError as err:
        if "overwrite" not in err.cure:
            raise
        more = '; claims stand below [[compare]], options of a task of your own in [run], as "task.name" = 1'
        raise ConfigError(err.field, err.value, err.cure + more) from err
    try:
        experiment = _experiment(path, table)
        check(experiment)
    except ConfigError as err:
        raise ConfigError(f"{path.name}: {err.field}", err.value, err.cure) from err
    return experiment


def _experiment(path: Path, table: dict[str, Any]) -> Experiment:
    head = from_sources(_Head, {name: value for name, value in table.items() if name not in _TABLES}, where=path.stem)
    if not head.question.strip():
        raise ConfigError("question", head.question, "must say what the runs are to answer")
    if not 1 <= head.seeds <= head.max_seeds:
        raise ConfigError("seeds", head.seeds, f"must be from 1 to max_seeds = {head.max_seeds}")
    if not head.budget_minutes > 0:
        raise ConfigError("budget_minutes", head.budget_minutes, "must be above 0")
    claims = table.get("compare", [])
    if not isinstance(claims, list):
        raise ConfigError("compare", claims, "must be a list of claims: write [[compare]] above each")
    axes = _table("variants", table.get("variants", {}))
    variants = {axis: dict(_table(f"variants.{axis}", each)) for axis, each in axes.items()}
    grids = table.get("grid", {})
    grids = grids if isinstance(grids, list) else [grids]
    return Experiment(
        name=path.stem,
        path=path,
        question=" ".join(head.question.split()),
        notes=" ".join(head.notes.split()),
        seeds=head.seeds,
        max_seeds=head.max_seeds,
        budget_minutes=head.budget_minutes,
        base=_dotted(_table("run", table.get("run", {}))),
        grids=tuple(_grid(grid, variants) for grid in grids),
        variants={
            axis: {n: _dotted(_table(f"variants.{axis}.{n}", v)) for n, v in each.items()}
            for axis, each in variants.items()
        },
        tune=_tune(table["tune"]) if "tune" in table else None,
        comparisons=tuple(comparison_of(_table("compare", each)) for each in claims),
    )


def _grid(table: Any, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    grid = {}
    for name, values in _dotted(_table("grid", table)).items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"grid.{name}", values, "must be a list of values")
        if name in variants:
            for value in values:
                if not isinstance(value, str):
                    cure = f'must name a variant, as text: "{value}", under [variants.{name}] as well'
                    raise ConfigError(f"grid.{name}", value, cure)
                refuse_unknown({value: value}, variants[name], where=f"variants.{name}")
        grid[name] = tuple(tuple(v) if isinstance(v, list) else v for v in values)
    return grid


def _tune(table: Any) -> Tune:
    return from_sources(Tune, _table("tune", table), where="tune")


def _dotted(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``[run.task] model = ...`` as ``task.model``; ``task = "package.module:function"`` stays what it is."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            flat[name] = value
    return flat


def _table(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(name, value, f"must be a table: write [{name}] and the settings below it")
    return value
