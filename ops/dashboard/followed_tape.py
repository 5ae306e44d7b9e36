"""Event tapes that are read while they grow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]

#: Read at a time, so that a long tape does not keep others waiting.
CHUNK_BYTES = 4 << 20
#: A clock that goes back by more is that of another boot of the machine.
BACK_S = 1.0


class FollowedTape:
    """The lines of one tape, each once, as they come.

    Attributes:
        at: Of the newest line: how often the clock had started anew before it, and its time.
    """

    def __init__(self, path: Path) -> None:
        self.at = (0, 0.0)
        self._path, self._read_to, self._rest = path, 0, b""

    def lines(self) -> Iterator[Line]:
        """Yields the lines that are new, of one chunk of the file at most; one that cannot be read is passed over."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_to)
                data = file.read(CHUNK_BYTES)
        except OSError:  # it is being made, or was taken away
            return
        self._read_to += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        for text in whole:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and "now_s" in line:
                boots, before_s = self.at
                self.at = (boots + (line["now_s"] < before_s - BACK_S), line["now_s"])
                yield line

    @property
    def behind(self) -> bool:
        """Whether the file has bytes that were not read yet."""
        try:
            return self._path.stat().st_size > self._read_to
        except OSError:
            return False


class FollowedTapes:
    """The lines of several tapes in the order of their times: those of shards and standbys go side by side.

    Attributes:
        behind: Whether there is more to read.
    """

    def __init__(self) -> None:
        self.behind = False
        self._tapes: dict[Path, FollowedTape] = {}
        self._ahead: list[tuple[tuple[int, float], Line]] = []  # read, and later than what another tape will bring

    def lines(self, paths: Iterable[Path]) -> list[Line]:
        """Returns what is new.

        Args:
            paths: Of all tapes, new ones among them.
        """
        found = self._ahead
        for path in paths:
            tape = self._tapes.setdefault(path, FollowedTape(path))
            found += [(tape.at, line) for line in tape.lines()]
        late = [tape.at for tape in self._tapes.values() if tape.behind]
        self.behind = bool(late)
        found.sort(key=lambda each: each[0])
        now = [line for at, line in found if not late or at <= min(late)]
        self._ahead = found[len(now) :]
        return now
