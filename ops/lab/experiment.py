"""An experiment: a question, the cells that answer it, and what is claimed. Read from a TOML file.

question = "..."                     what the runs are to answer
notes = "..."                        where we differ from what was published, and why
seeds = 3                            runs of every cell, paired by seed
budget_minutes = 60                  processor time after which no further run is started

[run]                                settings of every cell (ops.lab.settings)
[grid] or [[grid]]                   settings with a list of values: their product is the cells
[variants.NAME."a name"]             values of a grid's axis NAME that stand for several settings each
[tune]                               a setting that is tuned for each group of cells before the cells are run
[[compare]]                          claims, which may ask for more seeds of the cells that they compare
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from broker.process import toml
from broker.process.settings import from_sources, refuse_unknown, setting
from broker.wire.errors import ConfigError
from ops.lab.settings import CellSettings, cell_settings

_TABLES = ("run", "grid", "variants", "tune", "compare")

#: Dotted setting -> scalar, or list of such.
Cell = Mapping[str, Any]

#: A cell as a key of a dict.
CellKey = tuple[tuple[str, Any], ...]


# --- cells ----------------------------------------------------------------------------------------------------------


def cell_key(cell: Cell, without: Iterable[str] = ()) -> CellKey:
    """Returns a cell as a hashable value that does not depend on the order of its fields."""
    left_out = set(without)
    return tuple((name, _plain(cell[name])) for name in sorted(cell) if name not in left_out)


def contains(cell: Cell, part: Cell) -> bool:
    """Says whether a cell has every field of ``part``, with its value."""
    return all(name in cell and _plain(cell[name]) == _plain(value) for name, value in part.items())


def varying(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Returns the fields that do not have one and the same value in all cells, in the order in which they appear."""
    cells = [dict(cell) for cell in cells]
    names = dict.fromkeys(name for cell in cells for name in cell)
    return tuple(name for name in names if len({str(cell.get(name, "")) for cell in cells}) > 1)


def label(cell: Cell, names: Iterable[str] | None = None) -> str:
    """Returns a cell in a few words: text as it is, numbers after the last part of their name."""
    shown = cell if names is None else {name: cell[name] for name in names if name in cell}
    return ", ".join(_words(name, value) for name, value in shown.items()) or "all"


def _words(name: str, value: object) -> str:
    return value if isinstance(value, str) else f"{name.rpartition('.')[2].replace('_', ' ')} {_scalar(value)}"


def _scalar(value: object) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_scalar, value)) or "none"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if not number else f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def _plain(value: Any) -> Any:
    """A list as a tuple, which compares and hashes whether it comes from JSON, TOML or code."""
    return tuple(_plain(each) for each in value) if isinstance(value, list | tuple) else value


# --- claims and tuning ----------------------------------------------------------------------------------------------


class Kind(StrEnum):
    """What a comparison claims about candidate / baseline - 1."""

    NOT_WORSE = "not-worse"  # at most the margin
    BETTER = "better"  # below minus the margin
    EQUAL = "equal"  # between minus and plus the margin


class Equal(StrEnum):
    """What the runs of a pair have in common."""

    TOKENS = "tokens"  # trained, by all islands together
    TIME = "time"  # virtual


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A claim about two kinds of cells of an experiment: a table ``[[compare]]``.

    Attributes:
        claim: In one sentence.
        candidate: Fields of a cell, which select it.
        baseline: The same of what it is compared with.
        kind: What is claimed.
        margin: Of candidate / baseline - 1: what still counts as equal, or has to be gained to count as better.
        by: Fields to list verdicts by. There is a verdict for each of their values, and for each value of any other
            field in which cells of the candidate differ.
        equal: What runs of a pair must have in common for a verdict.
        ignore: Fields in which candidate and baseline may differ: rates that were tuned for each.
        published: What was published for candidate / baseline - 1.
        source: Where the claim was published; empty for claims of our own.
        seeds: How many are run of both sides; 0: as many as of every cell. It is judged by all that both have.
    """

    claim: str
    candidate: Mapping[str, Any]
    baseline: Mapping[str, Any]
    kind: Kind
    margin: float = 0.0
    equal: Equal = Equal.TOKENS
    by: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    published: float | None = None
    source: str = ""
    seeds: int = 0

    def __post_init__(self) -> None:
        if not self.claim.strip():
            raise ConfigError("claim", self.claim, "must say in a sentence what is claimed")
        for name in ("candidate", "baseline"):
            selection = getattr(self, name)
            if not selection:
                raise ConfigError(name, dict(selection), 'must select cells, as in { mode = "decoupled" }')
            for key, value in selection.items():
                if not isinstance(value, str | int | float | list):
                    raise ConfigError(f"{name}.{key}", value, "must be text, a number, true, false, or a list of these")
        if dict(self.candidate) == dict(self.baseline):
            raise ConfigError("baseline", dict(self.baseline), "selects the same cells as candidate; change one")
        if not 0 <= self.margin < 1:
            raise ConfigError("margin", self.margin, "is relative and must be from 0 to below 1; 0.01 is one percent")
        if self.kind is Kind.EQUAL and self.margin == 0:
            raise ConfigError("margin", self.margin, "must be above 0: no two runs are exactly equal")
        for name in self.by:
            if name in self.ignore or name in self.candidate:
                raise ConfigError("by", name, "is fixed or ignored by the same comparison; leave it out of one of them")
        if self.published is not None and not self.source:
            raise ConfigError("source", self.source, "must say where the published figure stands")


def comparison_of(table: Mapping[str, Any]) -> Comparison:
    """Reads one ``[[compare]]`` table.

    Raises:
        ConfigError: An unknown key, a wrong type or value, or a missing key; it names the key, the value, the cure.
    """
    try:
        return from_sources(Comparison, table, where="compare")
    except ConfigError as err:
        claim = table.get("claim")
        of = f" (of the claim {claim!r})" if isinstance(claim, str) and err.field != "claim" else ""
        name = err.field if err.field.startswith("[compare]") else f"compare.{err.field}"
        raise ConfigError(name, err.value, f"{err.cure}{of}") from err


@dataclass(frozen=True, slots=True, kw_only=True)
class Tune:
    """How a setting is tuned.

    Attributes:
        name: Dotted name of the setting.
        values: Those of the first rung, growing.
        by: Fields of the cells, of one grid at least; there is one best value for each combination of theirs.
        rungs: Shares of the full number of steps, growing; a run on a shorter rung has its whole schedule in it.
        keep: How many values go on from one rung to the next, and from the last rung to its other seeds.
        extend: How many values are tried beyond an edge of the last rung.
        seed: Of tuning runs, the first one of the last rung's: none of those that are reported.
        seeds: Of the last rung.
    """

    name: str
    values: tuple[Any, ...]
    by: tuple[str, ...] = ("mode",)
    rungs: tuple[float, ...] = (1.0,)
    keep: int = 3
    extend: int = 2
    seed: int = 1000
    seeds: int = 1

    def __post_init__(self) -> None:
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in self.values)
        if not numbers or len(self.values) < 2 or list(self.values) != sorted(set(self.values)):
            raise ConfigError("tune.values", self.values, "must be two or more growing numbers")
        if not self.rungs or list(self.rungs) != sorted(set(self.rungs)) or not self.rungs[0] > 0 or self.rungs[-1] > 1:
            raise ConfigError("tune.rungs", self.rungs, "must be growing shares of the steps, such as [0.25, 1.0]")
        if self.keep < 2:
            raise ConfigError("tune.keep", self.keep, "must be at least 2: the best of one has no neighbours")
        if self.seeds < 1:
            raise ConfigError("tune.seeds", self.seeds, "must be at least 1")
        if self.extend < 0:
            raise ConfigError("tune.extend", self.extend, "must be 0 or more values beyond an edge")
        if not self.by:
            raise ConfigError("tune.by", self.by, 'must name the fields that a rate is tuned for, such as ["mode"]')


# --- experiments ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The settings of an experiment that stand outside of its tables."""

    question: str = setting("", "what the runs are to answer")
    notes: str = setting("", "where we differ from what was published, and why")
    seeds: int = setting(3, "runs of every cell")
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
    budget_minutes: float
    base: dict[str, Any]
    grids: tuple[Mapping[str, tuple[Any, ...]], ...]
    variants: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    tune: Tune | None = None
    comparisons: tuple[Comparison, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        most = max(self.seeds, *(comparison.seeds for comparison in self.comparisons), 0)
        if self.tune is not None and self.tune.seed < most:
            cure = f"must be at least {most}, the seeds that there may be: no reported run may have chosen its own rate"
            raise ConfigError("tune.seed", self.tune.seed, cure)

    def limited(self, seeds: int) -> Experiment:
        """Returns the experiment with so many seeds for every cell at most, whatever it plans."""
        claims = tuple(replace(each, seeds=min(each.seeds, seeds)) for each in self.comparisons)
        return replace(self, seeds=min(self.seeds, seeds), comparisons=claims)

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


def read(path: Path) -> Experiment:
    """Reads an experiment; :func:`ops.lab.schedule.load` also checks that its parts fit together.

    Raises:
        ConfigError: The file cannot be read, or a table is wrong: it names the field, the value and the cure.
    """
    try:
        table = toml.read(path, field="experiment", cure="there are some in examples/lab")
    except ConfigError as err:
        if "overwrite" not in err.cure:
            raise
        more = '; claims stand below [[compare]], options of a task of your own in [run], as "task.name" = 1'
        raise ConfigError(err.field, err.value, err.cure + more) from err
    return _experiment(path, table)


def _experiment(path: Path, table: dict[str, Any]) -> Experiment:
    head = from_sources(_Head, {name: value for name, value in table.items() if name not in _TABLES}, where=path.stem)
    if not head.question.strip():
        raise ConfigError("question", head.question, "must say what the runs are to answer")
    if head.seeds < 1:
        raise ConfigError("seeds", head.seeds, "must be at least 1")
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
