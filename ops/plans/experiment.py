"""An experiment, read from a TOML file: a question, the cells that answer it, and claims.

question = "..."                     the question that the runs answer
notes = "..."                        differences from the publication, and their reasons
seeds = 3                            runs of every cell, paired by seed
first_seed = 100                     the first of them (default 0): seeds that have chosen nothing
budget_minutes = 60                  processor time after which no further run is started

[run]                                settings of every cell (ops.plans.cell)
[grid] or [[grid]]                   settings with a list of values: their product is the cells
[variants.NAME."a name"]             values of a grid's axis NAME that set several settings each
[[compare]]                          claims, which may ask for more seeds of the cells that they compare
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from broker.base.errors import ConfigError
from broker.base.settings import refuse_unknown, setting
from broker.base.sources import from_sources
from ops.plans.cell import CellSettings, cell_settings
from ops.plans.scaling import LAW, law_gap

_TABLES = ("run", "grid", "variants", "compare")

#: Dotted setting -> scalar, or list of such.
Cell = Mapping[str, Any]

#: A cell as a key of a dict.
CellKey = tuple[tuple[str, Any], ...]


# --- cells ----------------------------------------------------------------------------------------------------------


def cell_key(cell: Cell, without: Iterable[str] = ()) -> CellKey:
    """Returns a cell as a hashable value, independent of the order of its fields."""
    left_out = set(without)
    return tuple((name, _plain(cell[name])) for name in sorted(cell) if name not in left_out)


def contains(cell: Cell, part: Cell) -> bool:
    """Returns whether a cell has every field of ``part`` with the same value."""
    return all(name in cell and _plain(cell[name]) == _plain(value) for name, value in part.items())


def varying(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Returns the fields that differ between cells, in order of appearance."""
    cells = [dict(cell) for cell in cells]
    names = dict.fromkeys(name for cell in cells for name in cell)
    return tuple(name for name in names if len({str(cell.get(name, "")) for cell in cells}) > 1)


def label(cell: Cell, names: Iterable[str] | None = None) -> str:
    """Returns a short label of a cell: texts unchanged, numbers after the last part of their name."""
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
    """Returns lists as tuples, so that values from JSON, TOML and code compare and hash alike."""
    return tuple(_plain(each) for each in value) if isinstance(value, list | tuple) else value


# --- claims ----------------------------------------------------------------------------------------------------------


class Kind(StrEnum):
    """The kind of a claim on candidate / baseline - 1."""

    NOT_WORSE = "not-worse"  # at most the margin
    BETTER = "better"  # below minus the margin


class Equal(StrEnum):
    """The quantity that is equal in the runs of a pair."""

    TOKENS = "tokens"  # trained, by all islands together
    TIME = "time"  # virtual


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A claim about two kinds of cells of an experiment: a table ``[[compare]]``.

    There is a verdict for each value of a field that is neither selected nor ignored.

    Attributes:
        claim: In one sentence.
        candidate: Fields of a cell, which select it.
        baseline: The same for the cells to compare with.
        kind: The kind of claim.
        margin: For candidate / baseline - 1: a difference that counts as equal, or the least that counts as better.
        equal: The quantity that the runs of a pair must have in common for a verdict.
        ignore: Fields in which candidate and baseline may differ: rates that were chosen for each.
        published: The published value of candidate / baseline - 1.
        law: Parameters and islands of which the scaling law says what is published (:mod:`ops.plans.scaling`).
        source: Where the claim was published; empty for claims of our own.
        seeds: How many are run of both sides; 0: as many as of every cell. Those that both have judge it.
    """

    claim: str
    candidate: Mapping[str, Any]
    baseline: Mapping[str, Any]
    kind: Kind
    margin: float = 0.0
    equal: Equal = Equal.TOKENS
    ignore: tuple[str, ...] = ()
    published: float | None = None
    law: tuple[int, ...] = ()
    source: str = ""
    seeds: int = 0

    def __post_init__(self) -> None:
        if not self.claim.strip():
            raise ConfigError("claim", self.claim, "must state the claim in a sentence")
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
        if self.published is not None and not self.source:
            raise ConfigError("source", self.source, "must name the source of the published figure")
        if self.law and (len(self.law) != 2 or self.law[0] < 1 or self.law[1] not in LAW):
            raise ConfigError("law", self.law, f"must read [parameters, islands], islands one of {sorted(LAW)}")
        if self.law:  # in tenths of a percent, as gaps are published
            object.__setattr__(self, "published", round(law_gap(*self.law), 3))


def comparison_of(table: Mapping[str, Any]) -> Comparison:
    """Returns the comparison in a ``[[compare]]`` table.

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


class Pairing(NamedTuple):
    """One comparison of a claim: the fields that both sides share, and the numbers of the cells of each."""

    group: Cell
    candidates: list[int]
    baselines: list[int]


# --- experiments ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The settings of an experiment outside its tables."""

    question: str = setting("", "the question that the runs answer")
    notes: str = setting("", "differences from the publication, and their reasons")
    seeds: int = setting(3, "runs of every cell")
    first_seed: int = setting(0, "the first seed; the others follow it")
    budget_minutes: float = setting(60.0, "processor time after which no further run is started")

    def __post_init__(self) -> None:
        if not self.question.strip():
            raise ConfigError("question", self.question, "must state the question that the runs answer")
        if self.seeds < 1:
            raise ConfigError("seeds", self.seeds, "must be at least 1")
        if self.first_seed < 0:
            raise ConfigError("first_seed", self.first_seed, "must not be negative")
        if not self.budget_minutes > 0:
            raise ConfigError("budget_minutes", self.budget_minutes, "must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(_Head):
    """One experiment.

    Attributes:
        name: The name of its file, without the suffix.
        path: The path of its file.
        base: Settings of every cell.
        grids: Axis -> values, for each grid.
        variants: Axis -> name -> settings.
        comparisons: The claims.
    """

    name: str
    path: Path
    base: dict[str, Any]
    grids: tuple[Mapping[str, tuple[Any, ...]], ...]
    variants: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    comparisons: tuple[Comparison, ...] = ()

    def limited(self, seeds: int) -> Experiment:
        """Returns the experiment with at most ``seeds`` seeds for every cell."""
        claims = tuple(replace(each, seeds=min(each.seeds, seeds)) for each in self.comparisons)
        return replace(self, seeds=min(self.seeds, seeds), comparisons=claims)

    @property
    def command(self) -> str:
        """The command that makes the experiment's records."""
        return f"python3 -m ops lab run {shlex.quote(self.path.as_posix())}"

    def cells(self) -> list[dict[str, Any]]:
        """Returns the fields of every cell."""
        cells: list[dict[str, Any]] = []
        for grid in self.grids:
            for values in itertools.product(*grid.values()):
                cell = dict(zip(grid, values, strict=True))
                if cell not in cells:
                    cells.append(cell)
        return cells

    def settings_of(self, cell: Cell) -> CellSettings:
        """Returns the settings of a cell, which win over those of ``[run]``.

        Raises:
            ConfigError: They do not fit together.
        """
        values = dict(self.base)
        for name, value in cell.items():
            values |= dict(self.variants[name][value]) if name in self.variants else {name: value}
        return cell_settings(values)

    def pairings(self, comparison: Comparison) -> list[Pairing]:
        """Returns the comparisons of a claim: one for each group of values that it does not select or ignore.

        A field that only one side has is no difference: data-parallel training has no quorum, and serves for all.
        """
        cells = dict(enumerate(self.cells()))
        ours = [i for i, cell in cells.items() if contains(cell, comparison.candidate)]
        rest = [i for i, cell in cells.items() if i not in ours and contains(cell, comparison.baseline)]
        groups: dict[CellKey, list[int]] = {}
        for i in ours:
            key = cell_key(cells[i], without=(*comparison.candidate, *comparison.ignore))
            groups.setdefault(key, []).append(i)

        def fits(baseline: Cell, group: Cell) -> bool:
            shared = {name: group[name] for name in group if name in baseline and name not in comparison.baseline}
            return contains(baseline, shared)

        return [
            Pairing(dict(key), candidates, [i for i in rest if fits(cells[i], dict(key))])
            for key, candidates in groups.items()
        ]


def experiment_of(path: Path, table: dict[str, Any]) -> Experiment:
    """Returns the experiment in a file; :func:`ops.lab.schedule.load` checks that its parts fit together.

    Args:
        path: The path of the file, whose name is the experiment's.
        table: The file's content.

    Raises:
        ConfigError: A table is wrong: it names the field, the value and the cure.
    """
    head = from_sources(_Head, {name: value for name, value in table.items() if name not in _TABLES}, where=path.stem)
    claims = table.get("compare", [])
    if not isinstance(claims, list):
        raise ConfigError("compare", claims, "must be a list of claims: write [[compare]] above each")
    axes = _table("variants", table.get("variants", {}))
    variants = {axis: dict(_table(f"variants.{axis}", each)) for axis, each in axes.items()}
    grids = table.get("grid", {})
    grids = grids if isinstance(grids, list) else [grids]
    return Experiment(
        **(asdict(head) | {"question": " ".join(head.question.split())}),
        name=path.stem,
        path=path,
        base=_dotted(_table("run", table.get("run", {}))),
        grids=tuple(_grid(grid, variants) for grid in grids),
        variants={
            axis: {n: _dotted(_table(f"variants.{axis}.{n}", v)) for n, v in each.items()}
            for axis, each in variants.items()
        },
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


def _dotted(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested tables with dotted names: ``[run.task] model = ...`` as ``task.model``."""
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
