"""Event tapes that are read while they grow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Read at a time, so that a long tape does not keep others waiting.
CHUNK_BYTES = 4 << 20


class FollowedTape:
    """The lines of one tape, each once, as they come."""

    def __init__(self, path: Path) -> None:
        self._path, self._read_to, self._rest = path, 0, b""

    def lines(self) -> Iterator[dict[str, Any]]:
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
                yield line

    @property
    def behind(self) -> bool:
        """Whether the file has bytes that were not read yet."""
        try:
            return self._path.stat().st_size > self._read_to
        except OSError:
            return False
