"""The cells of an experiment: which belong together, what to call them, which are missing, what tuning found. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ops.lab.records import Record, Stage
from ops.lab.statistics import Tuned, interior

#: Dotted setting -> scalar, or list of such.
Cell = Mapping[str, Any]

#: A cell as a key of a dict.
CellKey = tuple[tuple[str, Any], ...]


def cell_key(cell: Cell, without: Iterable[str] = ()) -> CellKey:
    """Returns a cell as a hashable value that does not depend on the order of its fields."""
    left_out = set(without)
    return tuple((name, _plain(cell[name])) for name in sorted(cell) if name not in left_out)


def rank(cell: Cell, names: Iterable[str]) -> tuple[Any, ...]:
    """Returns what to sort cells by: some fields in turn, numbers by size, lists like words, text last."""
    return tuple(_rank(cell.get(name)) for name in names)


def _rank(value: Any) -> tuple[Any, ...]:
    match value:
        case None:
            return (0,)
        case int() | float():
            return (1, value)
        case list() | tuple():
            return (2, *map(_rank, value))
        case _:
            return (3, str(value))


def contains(cell: Cell, part: Cell) -> bool:
    """Says whether a cell has every field of ``part``, with its value."""
    return all(name in cell and _plain(cell[name]) == _plain(value) for name, value in part.items())


def grouped(records: Sequence[Record], declared: Sequence[Cell] = ()) -> dict[CellKey, tuple[Record, ...]]:
    """Returns the records of every cell by seed: cells in the order in which they are declared, then as they come."""

    def place(record: Record) -> int:
        return next((i for i, cell in enumerate(declared) if contains(record.cell, cell)), len(declared))

    cells: dict[CellKey, list[Record]] = {}
    for record in sorted(records, key=place):
        cells.setdefault(cell_key(record.cell), []).append(record)
    return {cell: tuple(sorted(each, key=lambda record: record.seed)) for cell, each in cells.items()}


def not_run(declared: Sequence[Cell], records: Sequence[Record]) -> tuple[Cell, ...]:
    """Returns the declared cells of which there is no record at all, tuning included."""
    return tuple(cell for cell in declared if not any(contains(record.cell, cell) for record in records))


def varying(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Returns the fields that do not have one and the same value in all cells, in the order in which they appear."""
    cells = [dict(cell) for cell in cells]
    names = dict.fromkeys(name for cell in cells for name in cell)
    return tuple(name for name in names if len({str(cell.get(name, "")) for cell in cells}) > 1)


def label(cell: Cell, names: Iterable[str] | None = None) -> str:
    """Returns a cell in a few words: text as it is, numbers after the last part of their name."""
    shown = cell if names is None else {name: cell[name] for name in names if name in cell}
    return ", ".join(_words(name, value) for name, value in shown.items()) or "all"


def scalar(value: object) -> str:
    """Returns a setting's value as the report shows it."""
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.6g}"
        case int():
            return f"{value:,}"
        case list() | tuple():
            return " ".join(scalar(each) for each in value) or "none"
        case _:
            return str(value)


def _plain(value: Any) -> Any:
    """A list as a tuple, which compares and hashes whether it comes from JSON, TOML or code."""
    return tuple(_plain(each) for each in value) if isinstance(value, list | tuple) else value


def _words(name: str, value: object) -> str:
    short = name.rpartition(".")[2].replace("_", " ")
    return value if isinstance(value, str) else f"{short} {scalar(value)}"


# --- tuning -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What tuning found for one field of one group of cells.

    Attributes:
        group: The fields that are not tuned.
        name: The tuned field.
        values: Those tried, in order.
        tokens: Of the last rung, on which the best was chosen.
        found: The best, and whether it is interior.
    """

    group: CellKey
    name: str
    values: tuple[float, ...]
    tokens: int
    found: Tuned


def tunings(records: Sequence[Record], names: Iterable[str]) -> tuple[Tuning, ...]:
    """Returns what tuning found, per group of cells that differ in nothing but the tuned fields.

    A value that was dropped on an early rung of successive halving, or before the last rung's other seeds, counts as
    tried and worse. With several tuned fields a value's loss is that of its best company; with several seeds it is
    their mean.

    Args:
        records: Of one experiment; those of other stages do not count.
        names: The tuned fields. Those that tuning never varied, or that are no numbers, do not count.
    """
    tuned = [record for record in records if record.stage is Stage.TUNE]
    varied = set(varying(record.cell for record in tuned))
    wanted = [name for name in dict.fromkeys(names) if name in varied]
    groups: dict[CellKey, list[Record]] = {}
    for record in tuned:
        groups.setdefault(cell_key(record.cell, without=wanted), []).append(record)
    found = []
    for group, members in groups.items():
        last_tokens = max(record.tokens for record in members)
        # Islands end within a few steps of each other, so the tokens of one rung agree only roughly.
        last = grouped([record for record in members if record.tokens > 0.75 * last_tokens])
        seeds = max(map(len, last.values()))
        last = {cell: runs for cell, runs in last.items() if len(runs) == seeds}
        for name in wanted:
            values = sorted({record.cell[name] for record in members if _is_number(record.cell.get(name))})
            if not values:
                continue
            losses = [_best_loss(last.values(), name, value) for value in values]
            found.append(
                Tuning(
                    group=group,
                    name=name,
                    values=tuple(values),
                    tokens=last_tokens,
                    found=interior(values, losses),
                )
            )
    return tuple(found)


def _best_loss(cells: Iterable[Sequence[Record]], name: str, value: float) -> float:
    """The lowest mean loss of the cells that have the value; infinite if none came this far."""
    means = [
        math.fsum(math.inf if record.diverged else record.loss for record in cell) / len(cell)
        for cell in cells
        if cell[0].cell.get(name) == value
    ]
    return min(means, default=math.inf)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
