"""The tapes and ledgers of a run, also while they grow and their segments are closed and dropped."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from aggregator.store.segments import TapeReader, is_tape

Line = dict[str, Any]

#: Read at a time, so that a long tape does not keep others waiting.
CHUNK_BYTES = 4 << 20
#: A clock that goes back by more is that of another boot of the machine.
BACK_S = 1.0


def tapes_in(run_dir: Path) -> list[Path]:
    """Returns the event tapes in a run directory: the aggregator's, and those of standbys that led."""
    folders = sorted({found.parent for found in run_dir.glob("*/events*.jsonl*")})
    return [each for each in (folder / "events.jsonl" for folder in (run_dir, *folders)) if is_tape(each)]


def ledgers_in(directory: Path) -> list[Path]:
    """Returns the ledgers in a run directory, or the one of a store."""
    folders = (directory, directory / "store", *sorted(directory.glob("*/store")))
    return [each for each in (folder / "ledger.jsonl" for folder in folders) if is_tape(each)]


class FollowedTape:
    """The lines of one tape or ledger, each once, as they come.

    Attributes:
        at: Restarts of the clock before the newest line, and its time.
    """

    def __init__(self, path: Path) -> None:
        self.at = (0, 0.0)
        self._reader, self._failed = TapeReader(path), False

    def rows(self) -> Iterator[Line]:
        """Yields the new lines of at most one chunk of the file; one that cannot be read is passed over."""
        try:
            found, self._failed = self._reader.read(CHUNK_BYTES), False
        except OSError as err:
            self._failed = err.errno != errno.EIO  # it may not be read
            if not self._failed:
                self._reader.skip()  # it is damaged
            return
        for _, text in found:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line

    def lines(self) -> Iterator[Line]:
        """Yields the lines with a time, and the beginnings of segments with the time before them."""
        for line in self.rows():
            if "segment" in line:
                yield {**line, "now_s": self.at[1]}
            elif "now_s" in line:
                boots, before_s = self.at
                self.at = (boots + (line["now_s"] < before_s - BACK_S), line["now_s"])
                yield line

    def news(self) -> Iterator[Line]:
        """Yields the new lines to the end of the file as it is now."""
        yield from self.rows()
        while self.behind:
            yield from self.rows()

    @property
    def missed(self) -> int:
        """The number of segments that were gone before they could be read."""
        return self._reader.missed

    @property
    def behind(self) -> bool:
        """True if the tape has bytes that were not read yet, and can be."""
        return not self._failed and self._reader.behind


class FollowedTapes:
    """The lines of several tapes in order of time: those of shards and standbys go side by side.

    Attributes:
        behind: Whether there is more to read.
    """

    def __init__(self) -> None:
        self.behind = False
        self._tapes: dict[Path, FollowedTape] = {}
        self._ahead: list[tuple[tuple[int, float], Line]] = []  # read, and later than what another tape will bring

    def missed(self) -> dict[Path, int]:
        """Returns the tapes of which segments were gone before they could be read -> how many."""
        return {path: tape.missed for path, tape in self._tapes.items() if tape.missed}

    def lines(self, paths: Iterable[Path]) -> list[Line]:
        """Returns the new lines.

        Args:
            paths: Paths of all tapes, new ones among them.
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

    def to_end(self, run_dir: Path) -> Iterator[Line]:
        """Yields the new lines of the tapes in a directory, to the end of each as it is now."""
        yield from self.lines(tapes_in(run_dir))
        while self.behind:
            yield from self.lines(tapes_in(run_dir))
