"""Closes a file of lines when it is long, compresses closed ones and drops the oldest. Shell.

The files are an event tape and a store's ledger; both are called a tape here.

Closing is two renamings by the writer; a start undoes the first where the second is missing. Compressing and
dropping are set aside (``aside``) for another thread, so that nobody waits for them. Whatever fails there is
logged when it begins and when it ends, and tried again with the next segment; until then segments stay as they are.

A crash at any moment leaves each segment plain, compressed, or both with the same lines. A compressed file is written
whole and flushed before it gets its name, and its plain one goes after that.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock

from aggregator.store.commit_file import write_all
from aggregator.store.segments import (
    UNFINISHED,
    Header,
    closed_of,
    first_digest,
    header_of,
    opened,
    packed_name,
    plain_name,
)
from broker.process import clocks, logs

log = logs.get(__name__)

#: How long the end of an aggregator compresses. What it has not got to by then, the next start does.
LAST_WAIT_S = 3.0
_CHUNK_BYTES = 1 << 20
_LIFE = b'{"tape":'

#: Has a call made, in any thread, without a wait.
Aside = Callable[[Callable[[], None]], object]


def on_the_spot(call: Callable[[], None]) -> None:
    """Sets nothing aside: makes the call at once."""
    call()


class Rotation:
    """The segments of a tape that is written.

    Args:
        path: The tape.
        segment_bytes: Length at which its file is closed; 0: never.
        keep: Closed segments to keep; 0: all.
        opening: Returns the lines that a new segment has after its header.
        aside: Where closed segments are compressed and dropped.
    """

    def __init__(
        self,
        path: Path,
        segment_bytes: int,
        keep: int,
        opening: Callable[[], bytes] = bytes,
        aside: Aside = on_the_spot,
    ) -> None:
        self._path, self._segment_bytes, self._keep, self._opening = path, segment_bytes, keep, opening
        self._due_bytes = segment_bytes
        self._header = Header(segment=1)
        self._troubles: set[str] = set()
        self._aside = aside
        self._untidy = False  # since the last look at closed segments
        self._tidying = Lock()
        self._ends_s = math.inf  # when nothing more is to be compressed

    def open(self) -> int:
        """Returns a descriptor of the file to append to, and begins to compress what an earlier life has left.

        Raises:
            OSError: It cannot be opened.
        """
        closed = closed_of(self._path)
        newest = max(closed, default=0)
        if closed and not self._path.exists() and closed[newest] == plain_name(self._path, newest):
            os.rename(closed.pop(newest), self._path)  # killed between the two renamings
            newest = max(closed, default=0)
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._header = header_of(self._path)
        if self._header.segment <= newest:  # a power failure took its header, or all of it
            os.close(fd)
            self._header = self._after(newest, closed[newest])
            fd = self._put(self._header, self._path.read_bytes())
        if closed:
            self._tidy_aside()
        return fd

    def turn(self, fd: int) -> int:
        """Closes the file under its number if it is long, and begins another.

        Returns the descriptor to append to from now on: the same where nothing was due, or where it failed.
        """
        try:
            size = os.fstat(fd).st_size
            if not self._segment_bytes or size < self._due_bytes:
                return fd
            self._due_bytes = size + self._segment_bytes  # if it fails now, so much later
            header = self._next(self._header, self._path)
            new = self._put(header, instead_of=plain_name(self._path, self._header.segment))
        except OSError as err:
            self._trouble("close", err)
            return fd
        self._trouble("close", None)
        begins_at = os.fstat(new).st_size - len(header.text())
        self._header, self._due_bytes = header, self._segment_bytes + begins_at
        self._tidy_aside()
        os.close(fd)
        return new

    def tidy(self) -> None:
        """Drops closed segments by the rule and compresses the others; then somebody else may change them."""
        with self._tidying:
            if self._untidy:
                self._untidy = False
                self._tidy()

    def close(self) -> None:
        """Does a little of what was set aside, or waits a little for it, and ends that."""
        self._ends_s = clocks.monotonic() + LAST_WAIT_S
        self.tidy()

    # --- one segment after another ------------------------------------------------------------------------------

    def _next(self, header: Header, file: Path) -> Header:
        """Returns the header of the segment after ``file``, which has ``header``."""
        lines, lives, first, life = header.lines, header.lives, header.first, header.life
        begun = b""
        with io.BufferedReader(opened(file)) as read:
            for line in read:
                lines += 1
                if line.startswith(_LIFE):
                    lives, begun = lives + 1, line
                if lines == 1:
                    with suppress(TypeError, ValueError):  # cut short
                        first = first or first_digest(json.loads(line))
        with suppress(KeyError, ValueError):  # cut short, or no aggregator wrote it
            life = {name: json.loads(begun)[name] for name in ("tape", "epoch", "config")} if begun else life
        return Header(
            segment=header.segment + 1,
            lines=lines,
            lives=lives,
            dropped=max(header.dropped, header.segment - self._keep) if self._keep else header.dropped,
            time_s=round(clocks.wall(), 3),
            first=first,
            life=life,
        )

    def _after(self, number: int, file: Path) -> Header:
        """Returns the header of the segment after a closed one, from that one alone."""
        try:
            return self._next(replace(header_of(file), segment=number), file)
        except (OSError, EOFError, zlib.error) as err:  # damaged: lines are counted anew, and that is all
            log.warning("tape.segment_damaged", path=str(self._path), segment=number, detail=str(err))
            return Header(segment=number + 1, time_s=round(clocks.wall(), 3))

    def _put(self, header: Header, content: bytes = b"", *, instead_of: Path | None = None) -> int:
        """Puts a new file with its header in the tape's place, and the one there under another name."""
        new = self._path.with_name(self._path.name + UNFINISHED)
        fd = os.open(new, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(fd, memoryview(header.text() + self._opening() + content))
            os.fsync(fd)  # before it has its name: a file by that name is whole
            if instead_of is not None:
                os.rename(self._path, instead_of)
            try:
                os.rename(new, self._path)
            except OSError:
                if instead_of is not None:
                    os.rename(instead_of, self._path)
                raise
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                new.unlink()
            raise
        return fd

    def _trouble(self, what: str, err: OSError | None) -> None:
        """Logs a failure when it begins, and when it is over."""
        if err is not None and what not in self._troubles:
            self._troubles.add(what)
            cure = f"cannot {what} a segment; training goes on, the tape stays as it is, and it is tried again"
            log.warning("tape.segments_failing", path=str(self._path), detail=err.strerror or str(err), cure=cure)
        elif err is None and what in self._troubles:
            self._troubles.discard(what)
            log.info("tape.segments_back", path=str(self._path), what=what)

    # --- closed ones, set aside ---------------------------------------------------------------------------------

    def _tidy_aside(self) -> None:
        self._untidy = True
        self._aside(self.tidy)

    def _tidy(self) -> None:
        header = self._header
        # Not the one that is being closed by now: it may get its name back.
        numbers = [number for number in closed_of(self._path) if number < header.segment]
        for what, work, of in (  # dropping first: it may be what makes room
            ("drop", self._drop, [n for n in numbers if n <= header.dropped]),
            ("compress", self._pack, [n for n in numbers if n > header.dropped]),
        ):
            try:
                for number in of:
                    work(number)
            except OSError as err:
                self._trouble(what, err)
            else:
                self._trouble(what, None)

    def _drop(self, number: int) -> None:
        for each in (packed_name(self._path, number), plain_name(self._path, number)):
            each.unlink(missing_ok=True)

    def _pack(self, number: int) -> None:
        plain, packed = plain_name(self._path, number), packed_name(self._path, number)
        if not plain.exists() or self._is_over():
            return
        if not packed.exists():
            new = packed.with_name(packed.name + UNFINISHED)
            try:
                self._write_packed(plain, new)
                if self._is_over():
                    return
                shutil.copystat(plain, new)
                os.rename(new, packed)
            finally:
                new.unlink(missing_ok=True)
        plain.unlink()

    def _write_packed(self, plain: Path, new: Path) -> None:
        with plain.open("rb") as read, new.open("wb") as written:
            with gzip.GzipFile(plain.name, "wb", fileobj=written, mtime=clocks.wall()) as packing:
                while (chunk := read.read(_CHUNK_BYTES)) and not self._is_over():
                    packing.write(chunk)
            written.flush()
            os.fsync(written.fileno())

    def _is_over(self) -> bool:
        return clocks.monotonic() >= self._ends_s
