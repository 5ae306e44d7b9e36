"""The file of a run's curve: one JSON line for each evaluation, appended by one process at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path

from aggregator.store.layout import mapped
from aggregator.store.tape import read_lines
from broker.base.errors import ConfigError
from ops.run_directory import hold
from ops.story import curve
from ops.story.curve import Point


def read_points(directory: Path) -> list[Point]:
    """Returns the evaluations of a run so far; none if there is no file, or none that can be read."""
    try:
        return curve.points_of(read_lines(directory / curve.FILE))
    except OSError:
        return []


class CurveFile:
    """The file, open for appending and locked for as long as this object lives.

    Attributes:
        path: Where it is.
        points: Every evaluation in it, in order.
    """

    def __init__(self, directory: Path) -> None:
        """Opens and locks the file, and reads what earlier processes have left.

        Raises:
            ConfigError: Another process follows this run.
            Unavailable: The file cannot be written.
        """
        self.path = directory / curve.FILE
        try:
            self._fd = hold(self.path)
        except BlockingIOError as err:
            cure = f"another process follows this run already: read {self.path}, or end that one first"
            raise ConfigError("follow", str(directory), cure) from err
        self.points = read_points(directory)
        self._torn = self._ends_within_a_line()

    def close(self) -> None:
        """Closes the file, which lets go of the lock."""
        os.close(self._fd)

    def append(self, point: Point) -> None:
        """Adds one line, with one write.

        Raises:
            Unavailable: The disk does not take it; it is remembered here all the same.
        """
        self.points.append(point)
        line = ("\n" if self._torn else "") + json.dumps(point.to_json(), allow_nan=False) + "\n"
        data = line.encode()
        self._torn = True  # unless all of it is written
        with mapped(f"cannot write {self.path}", definite=True):
            self._torn = os.write(self._fd, data) != len(data)

    def _ends_within_a_line(self) -> bool:
        """Whether a crash or a full disk cut the last line short."""
        size = os.fstat(self._fd).st_size
        return size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
