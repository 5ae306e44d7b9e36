"""The terminal of a command: a screen that is drawn again, or lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ops.text import PLAIN_WIDTH

_GAP = 2  # blanks between two columns


class Screen(Console):
    """A console for people and for ``grep``: where it is no terminal a line stays one line, however long.

    It says so when its reader went away: rich's ends the process, whatever that was at.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(highlight=False, **settings)
        if not self.file.isatty():
            self.width = PLAIN_WIDTH

    def on_broken_pipe(self) -> None:
        """Called while that error is handled."""
        raise

    @property
    def can_redraw(self) -> bool:
        """Whether it can be drawn over: a file cannot, FORCE_COLOR or not, nor can a dumb terminal."""
        return self.is_terminal and self.file.isatty() and not self.is_dumb_terminal


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a :class:`Fitted` table.

    Attributes:
        title: Above it.
        number: Whether it is set to the right.
        wraps: Whether its cells may take several lines.
        rank: The highest are left out first where there is no room; 0 never is.
    """

    title: str
    number: bool = True
    wraps: bool = False
    rank: int = 0


class Fitted:
    """A table that leaves out empty columns, and columns without room."""

    def __init__(self, columns: Sequence[Column], rows: Iterable[Sequence[str | Text]]) -> None:
        """Takes a cell of each row for each column."""
        self._columns, self._rows = columns, [[Text(c) if isinstance(c, str) else c for c in row] for row in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the table, for ``options.max_width``."""
        kept = [n for n in range(len(self._columns)) if any(row[n].plain for row in self._rows)]
        while sum(map(self._width, kept)) + _GAP * (len(kept) - 1) > options.max_width:
            least = max(kept, key=lambda n: self._columns[n].rank)
            if self._columns[least].rank == 0:
                break
            kept.remove(least)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
        for n in kept:
            column = self._columns[n]
            table.add_column(column.title, justify="right" if column.number else "left", no_wrap=not column.wraps)
        for row in self._rows:
            table.add_row(*(row[n] for n in kept))
        yield table

    def _width(self, n: int) -> int:
        """The least that a column takes: its longest cell, or where it wraps, its longest word."""
        cells = [self._columns[n].title, *(row[n].plain for row in self._rows)]
        if self._columns[n].wraps:
            cells = [word for cell in cells for word in cell.split()]
        return max(map(cell_len, cells), default=0)
