"""The cells of an experiment: which belong together, what to call them, which are missing, what tuning found. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ops.lab.records import Record

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


def label(cell: Cell, names: Iterable[str] | None = None, *, whole: bool = False) -> str:
    """Returns a cell in a few words: text as it is unless ``whole``, numbers after the last part of their name."""
    shown = cell if names is None else {name: cell[name] for name in names if name in cell}
    return ", ".join(_words(name, value, whole=whole) for name, value in shown.items()) or "all"


def labels(cells: Iterable[Cell], names: Iterable[str] | None = None) -> list[str]:
    """Returns a label for each of some cells; texts stand after their names if one would stand for two cells."""
    cells, names = list(cells), None if names is None else list(names)
    told = [label(cell, names) for cell in cells]
    return told if len(set(told)) == len(told) else [label(cell, names, whole=True) for cell in cells]


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


def _words(name: str, value: object, *, whole: bool) -> str:
    short = name.rpartition(".")[2].replace("_", " ")
    return value if isinstance(value, str) and not whole else f"{short} {scalar(value)}"
