"""The files of an event tape, read as one: numbered closed segments, and the one being written.

::

    events.000001.jsonl.gz     the first segment, closed and compressed
    events.000002.jsonl        closed, not compressed yet
    events.jsonl               the newest: lines are appended here

Each segment stands by itself: its first line is a :class:`Header`, which says its number, how many lines and lives are
before it, and which life goes on in it. The first segment of a tape needs none: a life begins there. Segments end with
whole lines, except where a power failure took something.

:class:`TapeReader` reads while an aggregator writes, closes, compresses and drops; no line twice, none left out.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: Of a file that is not whole yet; what a crash leaves of it counts for nothing.
UNFINISHED = ".new"
PACKED = ".gz"
#: Read at a time.
CHUNK_BYTES = 1 << 18
#: A header is shorter.
_HEADER_BYTES = 1 << 16
_BEGIN = b'{"segment":'


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line of a segment; the first segment of a tape has none.

    Attributes:
        segment: Its number; that of the first segment is 1.
        lines: That stand before this one on the whole tape.
        lives: That began before.
        dropped: Up to this segment all were dropped by the rule when this one began; 0: none.
        time_s: When it began, in seconds since 1970.
        first: :func:`first_digest` of the tape: it stays, whatever is dropped.
        life: Format, epoch and settings of the life that goes on in it; None before the first.
    """

    segment: int
    lines: int = 0
    lives: int = 0
    dropped: int = 0
    time_s: float = 0.0
    first: str = ""
    life: Mapping[str, Any] | None = field(default=None)

    def text(self) -> bytes:
        """Returns the line of the tape."""
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> Header:
        """Returns what a line with ``segment`` says; raises TypeError or ValueError if it is no header."""
        numbers = {name: int(line[name]) for name in ("segment", "lines", "lives", "dropped") if name in line}
        first = str(line.get("first", ""))
        return cls(**numbers, time_s=float(line.get("time_s", 0.0)), first=first, life=line.get("life"))

    @classmethod
    def of(cls, text: bytes) -> Header | None:
        """Returns the header that the text of a line is, if it is one."""
        with suppress(TypeError, ValueError):
            return cls.read(json.loads(text)) if text.startswith(_BEGIN) else None
        return None


def first_digest(line: Mapping[str, Any]) -> str:
    """Returns the digest of a tape's very first line, by the first ``line`` that is still there."""
    if "segment" in line:
        return str(line.get("first", ""))
    return hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()


def plain_name(path: Path, number: int) -> Path:
    """Returns the name of a closed segment of the tape ``path``."""
    return path.with_name(f"{path.stem}.{number:06d}{path.suffix}")


def packed_name(path: Path, number: int) -> Path:
    """Returns the name of a closed segment that was compressed."""
    plain = plain_name(path, number)
    return plain.with_name(plain.name + PACKED)


def closed_of(path: Path) -> dict[int, Path]:
    """Returns number -> file of the closed segments that are there, in order; of two files the plain one."""
    name = re.compile(rf"{re.escape(path.stem)}\.(\d{{6,}}){re.escape(path.suffix)}(?:{re.escape(PACKED)})?")
    closed: dict[int, Path] = {}
    with suppress(OSError):
        for each in sorted(os.listdir(path.parent), reverse=True):
            if found := name.fullmatch(each):
                closed[int(found[1])] = path.with_name(each)
    return dict(sorted(closed.items()))


def is_tape(path: Path) -> bool:
    """Returns whether there is a tape; between two segments ``path`` itself is missing for a moment."""
    return path.is_file() or bool(closed_of(path))


def segments_of(path: Path) -> dict[int, Path]:
    """Returns number -> file of the segments of a tape, the oldest first; raises OSError.

    The one that is written is looked at first. If it is closed in this moment, it is found under its number.
    """
    newest = 0
    if path.is_file():
        with suppress(FileNotFoundError):
            newest = header_of(path).segment
    found = closed_of(path)
    return found | ({newest: path} if newest > max(found, default=0) else {})


def header_of(file: Path) -> Header:
    """Returns the header of one file of a tape; one without is the first. Raises OSError."""
    with opened(file) as read, _damage_named(file):
        return _header_in(read)


def _header_in(file: Any) -> Header:
    header = Header.of(file.read(_HEADER_BYTES).partition(b"\n")[0])
    file.seek(0)
    return header or Header(segment=1)


def opened(file: Path) -> Any:
    """Opens one file of a tape to read its bytes; raises OSError."""
    return gzip.open(file, "rb") if file.suffix == PACKED else file.open("rb", buffering=0)


@contextmanager
def _damage_named(file: Path) -> Iterator[None]:
    """Raises OSError with the file's name where a compressed file is damaged."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as err:
        raise OSError(errno.EIO, f"it is damaged ({err})", str(file)) from err


class TapeReader:
    """Reads the lines of a tape from its first segment on, and goes on where it ended when there is more.

    Args:
        path: The tape. A file of lines that has no segments is read as well, and so is one segment by itself.

    Attributes:
        segment: Number of the one that is read; 0 before the first.
        rest: What stands behind the last whole line.
        missed: How many segments were gone before they could be read.
    """

    def __init__(self, path: Path) -> None:
        self._file: Any = None
        self.segment, self.rest, self.missed = 0, b"", 0
        self._path = self._name = path  # of the tape, and of the file that is read
        self._line = self._at = 0  # whole lines so far, and where the rest begins in the file

    def read(self, most: int = CHUNK_BYTES) -> list[tuple[int, bytes]]:
        """Returns lines of one segment that are new, with their numbers on the whole tape, from 1.

        An empty list says that there is no whole line more.

        Args:
            most: Bytes to read.

        Raises:
            OSError: A file cannot be read, or is damaged.
        """
        while self._file is not None or self._open():
            if lines := self._lines(most):
                return lines
            if not self._is_closed():
                return []
            if lines := self._lines(most):  # written after we had looked, and before it was closed
                return lines
            left = [(self._line + 1, self.rest)] if self.rest else []  # a power failure cut it short
            self.skip()
            if left:
                return left
        return []

    def skip(self) -> None:
        """Goes on with the next segment, whatever is left of this one."""
        self.close()
        self.segment, self.rest = self.segment + 1, b""

    def close(self) -> None:
        """Closes the file that is read."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def __del__(self) -> None:
        self.close()

    @property
    def behind(self) -> bool:
        """True while there are bytes that can be read and were not."""
        with suppress(OSError):
            if self._file is None or self._is_closed():
                return any(number >= self.segment for number in segments_of(self._path))
            return self._name.suffix != PACKED and os.fstat(self._file.fileno()).st_size > self._at + len(self.rest)
        return False

    def _is_closed(self) -> bool:
        """Returns True once another segment has begun after the one that is read."""
        return any(number > self.segment for number in segments_of(self._path))

    def _open(self) -> bool:
        """Opens the next segment that is there; returns whether there is one."""
        for _ in range(5):  # closed, compressed or dropped in this moment, it is looked for again
            ahead = [each for each in segments_of(self._path).items() if each[0] >= self.segment]
            if not ahead:
                return False
            number, self._name = ahead[0]
            with suppress(FileNotFoundError):
                self._file, self._at = opened(self._name), 0
                self.missed += max(0, number - max(self.segment, 1))
                self.segment = number
                with _damage_named(self._name):
                    header = _header_in(self._file)
                self._line = header.lines
                if self._name != self._path or header.segment == number:
                    return True
                self.close()  # another one has its name by now
        return False

    def _lines(self, most: int) -> list[tuple[int, bytes]]:
        """Returns the next whole lines of the file; what it had begun of one is read again.

        On a full disk, that may be taken back.
        """
        whole: list[bytes] = []
        while not whole:
            with _damage_named(self._name):
                if self._name.suffix == PACKED:
                    data = self.rest + self._file.read(most)
                else:
                    self._file.seek(self._at)
                    data = self._file.read(len(self.rest) + most)
            if data == self.rest:
                return []
            *whole, self.rest = data.split(b"\n")
            self._at += len(data) - len(self.rest)
        first, self._line = self._line + 1, self._line + len(whole)
        return list(enumerate(whole, start=first))
