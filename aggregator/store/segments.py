"""The files of an event tape, read as one: numbered closed segments, and the one being written.

::

    events.000001.jsonl.gz     the first segment, closed and compressed
    events.000002.jsonl        closed, not compressed yet
    events.jsonl               the newest: lines are appended here

Each segment but the first begins with a line of its own, the :class:`Header`. It says how many lines and lives stand
before it, so lines keep their numbers where older segments are gone, and which life goes on in it. Segments end with
whole lines, except where a power failure took something.

:class:`TapeReader` reads while an aggregator writes, closes, compresses and drops; no line twice, none left out.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
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
        """Returns it as it stands on the tape."""
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
        if not text.startswith(_BEGIN):
            return None
        try:
            return cls.read(json.loads(text))
        except (TypeError, ValueError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """The files of a tape, the oldest first.

    Attributes:
        numbers: Of each.
    """

    files: tuple[Path, ...]
    numbers: tuple[int, ...]

    @property
    def first(self) -> int:
        """The number of the first one that is there; 0: there is none."""
        return min(self.numbers, default=0)


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


def numbers_in(path: Path) -> list[int]:
    """Returns the numbers of the closed segments of a tape that are there, in order."""
    name = re.compile(rf"{re.escape(path.stem)}\.(\d{{6,}}){re.escape(path.suffix)}(?:{re.escape(PACKED)})?")
    with suppress(OSError):
        return sorted({int(found[1]) for each in os.listdir(path.parent) if (found := name.fullmatch(each))})
    return []


def is_tape(path: Path) -> bool:
    """Whether any part of a tape is there. Between two segments ``path`` itself is missing for a moment."""
    return path.is_file() or bool(numbers_in(path))


def segments_of(path: Path) -> Segments:
    """Returns a tape's files in order, ``path`` itself last. Raises OSError if that cannot be read."""
    numbers = numbers_in(path)
    files = [plain if (plain := plain_name(path, n)).exists() else packed_name(path, n) for n in numbers]
    if path.is_file():
        files.append(path)
        with path.open("rb", buffering=0) as file:
            numbers.append(number_of(file, numbers))
    return Segments(files=tuple(files), numbers=tuple(numbers))


def header_of(file: Path) -> Header | None:
    """Returns the header of one file of a tape; None if it has none. Raises OSError."""
    with opened(file) as read, _damage_named(file):
        return Header.of(read.readline(_HEADER_BYTES))


def number_of(file: io.FileIO, closed: list[int]) -> int:
    """Returns the number of the segment that is written.

    Args:
        file: It, opened.
        closed: Numbers of the closed ones, looked up before it was opened.
    """
    header = Header.of(os.pread(file.fileno(), _HEADER_BYTES, 0).partition(b"\n")[0])
    return header.segment if header is not None else max(closed, default=0) + 1


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
        self._file: io.RawIOBase | gzip.GzipFile | None = None
        self.segment, self.rest, self.missed = 0, b"", 0
        self._path = path
        self._name = path  # of the file that is read
        self._grows = False  # it is the one that is written
        self._read_to, self._at_end = 0, False
        self._line, self._begins = 0, True

    def read(self, most: int = CHUNK_BYTES) -> list[tuple[int, bytes]]:
        """Returns lines that are new, with their numbers on the whole tape, from 1.

        An empty list says that there is no whole line more; with :attr:`behind`, only that none was whole yet.

        Args:
            most: Bytes to read.

        Raises:
            OSError: A file cannot be read, or is damaged.
        """
        while self._file is not None or self._open():
            if data := self._chunk(most):
                return self._split(data)
            if self._grows and not self._was_closed():
                return []
            if data := self._chunk(most):  # written after we had looked, and before it was closed
                return self._split(data)
            left = self._split(b"\n") if self.rest else []  # a power failure cut it short; the next is no part of it
            self.skip()
            if left:
                return left
        return []

    def skip(self) -> None:
        """Goes on with the next segment, whatever is left of this one."""
        self.close()
        self.segment, self.rest, self._begins = self.segment + 1, b"", True

    def close(self) -> None:
        """Closes the file that is read."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def __del__(self) -> None:
        self.close()

    @property
    def behind(self) -> bool:
        """Whether there are bytes that were not read yet."""
        if self._file is None:
            goes_on = self.segment == 0 or self._path.suffix != PACKED
            return any(n >= self.segment for n in numbers_in(self._path)) or (goes_on and self._path.is_file())
        if not self._grows or self._was_closed():
            return True
        with suppress(OSError):
            return os.fstat(self._file.fileno()).st_size > self._read_to
        return False

    # --- files --------------------------------------------------------------------------------------------------

    def _open(self) -> bool:
        """Opens the next segment that is there; returns whether there is one.

        Meanwhile the one that is written may be closed, and a closed one compressed or dropped: then one looks again.
        """
        for _ in range(3):
            before = numbers_in(self._path)
            try:
                growing = io.FileIO(self._path) if self._path.suffix != PACKED else None
            except FileNotFoundError:
                growing = None
            newest = None if growing is None else number_of(growing, before)
            closed = numbers_in(self._path)  # all that were closed before the one that is open now began
            ahead = min((each for each in closed if each >= self.segment), default=None)
            found = ahead if newest is None or (ahead is not None and ahead < newest) else newest
            if found is not None and found == newest:
                self._begin(growing, self._path, newest, grows=True)
                return True
            _close(growing)
            if found is not None:
                for name in (plain_name(self._path, found), packed_name(self._path, found)):
                    with suppress(FileNotFoundError):
                        self._begin(opened(name), name, found, grows=False)
                        return True
            elif self._path.suffix == PACKED and self.segment == 0:
                self._begin(opened(self._path), self._path, 1, grows=False)
                return True
        return False

    def _begin(self, file: Any, name: Path, number: int, *, grows: bool) -> None:
        self.missed += max(0, number - max(self.segment, 1))
        self._file, self._name, self.segment, self._grows = file, name, number, grows
        self._read_to, self._at_end = 0, False

    def _was_closed(self) -> bool:
        """Whether the file that was written has got a number since it was opened."""
        assert self._file is not None
        mine = os.fstat(self._file.fileno())
        try:
            now = self._path.stat()
        except FileNotFoundError:
            return plain_name(self._path, self.segment).exists() or packed_name(self._path, self.segment).exists()
        return (now.st_dev, now.st_ino) != (mine.st_dev, mine.st_ino)

    def _chunk(self, most: int) -> bytes:
        assert self._file is not None
        if self._grows:
            size = os.fstat(self._file.fileno()).st_size
            if self._at_end and size != self._read_to:  # on a full disk, what was written in part is taken back
                self._read_to, self.rest = min(size, self._read_to - len(self.rest)), b""
                self._file.seek(self._read_to)
            self._at_end = self._read_to + most >= size
        with _damage_named(self._name):
            data = self._file.read(most) or b""
        self._read_to += len(data)
        return data

    def _split(self, data: bytes) -> list[tuple[int, bytes]]:
        *whole, self.rest = (self.rest + data).split(b"\n")
        if whole and self._begins:
            header, self._begins = Header.of(whole[0]), False
            self._line = self._line if header is None else header.lines
        first, self._line = self._line + 1, self._line + len(whole)
        return list(enumerate(whole, start=first))


def _close(file: io.FileIO | None) -> None:
    if file is not None:
        file.close()


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
