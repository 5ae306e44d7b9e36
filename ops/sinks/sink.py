"""The interface of sinks, and the filter that gives each only new rows.

The library is the memory: a sink that is opened again asks it which steps it has, and :class:`NewRows` leaves them out.
So the writing process may be killed at any time, and may start again with rows from as far back as it likes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ops.story.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The run or island that rows belong to, as a library knows it.

    Attributes:
        key: Unique to the run or island, and the same after any restart.
        name: Its name for people.
        group: The run's name, which groups its islands.
        folder: Where a library may leave files of its own.
    """

    key: str
    name: str
    group: str
    folder: Path


class Sink(Protocol):
    """One run in a library. Any method may raise whatever the library raises."""

    def written(self, stream: str) -> int:
        """Returns the last step of a stream that the library had when this sink was opened; -1: none."""
        ...

    def write(self, row: Row) -> None:
        """Takes a row that is later than all of its stream."""
        ...

    def flush(self) -> None:
        """Hands over what was taken, as far as the library can be told to."""
        ...

    def close(self) -> None:
        """Hands over what was taken, and ends; the same run may be opened again."""
        ...


class NewRows:
    """Hands a sink the rows that its library does not have.

    Attributes:
        last: Stream -> last step that the library has.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.last: dict[str, int] = {}

    def write(self, row: Row) -> bool:
        """Writes a row if it is new; returns whether it was."""
        if row.stream not in self.last:
            self.last[row.stream] = self._sink.written(row.stream)
        if row.step <= self.last[row.stream]:
            return False
        self._sink.write(row)
        self.last[row.stream] = row.step
        return True


def reason(err: BaseException) -> str:
    """Returns what a library raised, as one line of a log."""
    said = " ".join(str(err).split())
    return f"{type(err).__name__}: {said}"[:300]
