"""What every benchmark prints: progress on stderr, then a table or JSON lines on stdout."""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.base.errors import ConfigError, Unavailable

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table: the row's ``key`` under ``title``, in ``form`` (a format specification)."""

    key: str
    title: str
    form: str = ""


def parser_of(name: str, doc: str | None, example: str) -> argparse.ArgumentParser:
    """Returns a parser with the flags of all benchmarks, whose help is the module's own text, with an example."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=doc,
        epilog=f"example:\n  python -m benchmarks.{name} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="the smallest case only, in seconds: a smoke run")
    parser.add_argument("--json", action="store_true", help="one JSON object per row in place of the table")
    return parser


def guarded(measure: Callable[..., int | None], args: argparse.Namespace, *tables: Sequence[Column]) -> int:
    """Runs a benchmark; returns its exit status: 2 for a wrong setting, 1 if it could not be carried out.

    Args:
        measure: Takes the arguments and a printer for each table, which is printed when it returns; None is success.
        args: Of the command.
        tables: Columns of each.
    """
    printers = [Printer(columns, as_json=args.json) for columns in tables]
    try:
        status = measure(args, *printers)
        for printer in printers:
            printer.close()
        return status or 0
    except KeyboardInterrupt:
        return 130
    except (ConfigError, Unavailable) as err:
        cause: BaseException = err
    except BaseExceptionGroup as group:
        # A task of the scripted fleet met something: that is what is to be said, not which task it was.
        if group.subgroup((ConfigError, Unavailable)) is None:
            raise
        cause = group
        while isinstance(cause, BaseExceptionGroup):
            cause = (cause.subgroup((ConfigError, Unavailable)) or cause).exceptions[0]
    print(f"error: {cause}", file=sys.stderr)
    return 2 if isinstance(cause, ConfigError) else 1


class Printer:
    """Collects rows: with ``--json`` each is printed at once, otherwise all as one table at the end."""

    def __init__(self, columns: Sequence[Column], *, as_json: bool) -> None:
        self._columns = columns
        self._as_json = as_json
        self._rows: list[Row] = []
        self._began_s = time.monotonic()

    def say(self, text: str) -> None:
        """Reports progress."""
        print(f"[{time.monotonic() - self._began_s:6.1f} s] {text}", file=sys.stderr, flush=True)

    def add(self, row: Row) -> None:
        """Takes a finished row."""
        self._rows.append(row)
        if self._as_json:
            print(json.dumps(row), flush=True)

    def close(self) -> None:
        """Prints the table, unless rows went out as JSON."""
        if not self._as_json:
            print(table(self._rows, self._columns), flush=True)


def table(rows: Iterable[Row], columns: Sequence[Column]) -> str:
    """Returns a Markdown table, aligned for people; a value that is None shows as a dash."""
    cells = [[column.title for column in columns]]
    cells += [[_cell(row.get(column.key), column.form) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def keep(path: Path, lines: Iterable[Row]) -> None:
    """Writes JSON lines, compressed where the name ends in ``.gz``; the same lines give the same bytes."""
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def median(values: Iterable[float]) -> float:
    """Returns the median; NaN of nothing, which shows rather than fails."""
    collected = list(values)
    return statistics.median(collected) if collected else float("nan")


def numbers(text: str) -> tuple[int, ...]:
    """Reads a flag such as ``1M,10M,100000``; k, M and B are thousands, millions and billions.

    Raises:
        argparse.ArgumentTypeError: Something else stands there.
    """
    factors = {"k": 10**3, "M": 10**6, "B": 10**9}
    try:
        found = tuple(
            round(float(word.rstrip("kMB")) * factors.get(word[-1:], 1)) for word in text.split(",") if word.strip()
        )
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be positive numbers such as 1M,10M or 1,4,16")
    return found


def _cell(value: object, form: str) -> str:
    return "-" if value is None else format(value, form)
