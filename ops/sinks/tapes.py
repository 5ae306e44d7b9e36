"""The tapes of a run as one: the lines of all aggregators in the order of their clock, as they come.

A run has several where it has shards or standbys. They share the clock of the machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ops.dashboard.followed_tape import FollowedTape
from ops.inspect.explain import tapes_in

#: Without a whole line: of a file that is no tape, or that cannot be read.
MOST_CHUNKS = 16


class Tapes:
    """The event tapes in a run directory.

    Args:
        run_dir: Of a run of ``up``, or wherever an aggregator writes its ``events.jsonl``.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._tapes: dict[Path, FollowedTape] = {}
        self._lines: dict[Path, deque[dict[str, Any]]] = {}

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yields what is new, to the end of each tape as it is now."""
        for path in tapes_in(self._run_dir):
            self._tapes.setdefault(path, FollowedTape(path))
            self._lines.setdefault(path, deque())
        while True:
            for path, tape in self._tapes.items():
                for _ in range(MOST_CHUNKS):
                    if self._lines[path] or not tape.behind:
                        break
                    self._lines[path].extend(tape.lines())
            waiting = (lines for lines in self._lines.values() if lines)
            first = min(waiting, key=lambda each: each[0]["now_s"], default=None)
            if first is None:
                return
            yield first.popleft()

    def written_at(self) -> float | None:
        """Returns when the last line was written, in seconds since 1970; None while there is no tape."""
        times = []
        for path in self._tapes:
            try:
                times.append(path.stat().st_mtime)
            except OSError:  # taken away
                continue
        return max(times, default=None)
