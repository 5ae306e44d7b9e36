"""Closes a file of lines when it is long, compresses closed ones and drops the oldest. Shell.

The files are an event tape and a store's ledger; both are called a tape here.

Closing is two renamings, by whoever writes. Compressing and dropping are for a thread of their own with a low priority,
so that nobody waits for them. Whatever fails there is logged when it begins and when it ends, and tried again with the
next segment; until then segments stay as they are.

A crash at any moment leaves each segment plain, compressed, or both with the same lines. A compressed file is written
whole and flushed before it gets its name, and its plain one goes after that.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from aggregator.store.segments import UNFINISHED, Header, first_digest, numbers_in, opened, packed_name, plain_name
from broker.process import logs

log = logs.get(__name__)

#: Of the thread that compresses: training goes first.
NICE = 10
#: How long the end of an aggregator waits for it. What it has not compressed by then, the next start does.
LAST_WAIT_S = 3.0
_CHUNK_BYTES = 1 << 20
_LIFE = b'{"tape":'


class Rotation:
    """The segments of a tape that is written.

    Args:
        path: The tape.
        segment_bytes: Length at which its file is closed; 0: never.
        keep: Closed segments to keep; 0: all.
        opening: Returns the lines that a new segment has after its header.
    """

    def __init__(self, path: Path, segment_bytes: int, keep: int, opening: Callable[[], bytes] = bytes) -> None:
        self._path, self._segment_bytes, self._keep, self._opening = path, segment_bytes, keep, opening
        self._due_bytes = segment_bytes
        self._header = Header(segment=1)
        self._troubles: set[str] = set()
        self._tidier = _Tidier(path, self._trouble)

    def open(self) -> int:
        """Returns a descriptor of the file to append to, and begins to compress what an earlier life has left.

        Raises:
            OSError: It cannot be opened.
        """
        closed = numbers_in(self._path)
        if closed and (not self._path.exists() or self._path.stat().st_size == 0):  # killed between the two renamings
            self._header = self._after(closed[-1])
            fd = self._found(self._header.segment) or self._put(self._header)
        else:
            fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            found = Header.of(os.pread(fd, 1 << 16, 0).partition(b"\n")[0])
            if found is not None:
                self._header = found
            elif closed:  # a power failure took it
                self._header = self._after(closed[-1])
                os.write(fd, b"\n" + self._header.text())
        if closed:
            self._tidier.wake(self._header.dropped)
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
            with open(fd, "rb", closefd=False) as file:
                header = self._next(self._header, file)
            new = self._put(header, instead_of=plain_name(self._path, self._header.segment))
        except OSError as err:
            self._trouble("close", err)
            return fd
        self._trouble("close", None)
        os.close(fd)
        begins_at = os.fstat(new).st_size - len(header.text())
        self._header, self._due_bytes = header, self._segment_bytes + begins_at
        self._tidier.wake(header.dropped)
        return new

    def wait(self) -> None:
        """Returns when the thread has nothing to do: only then may somebody else change closed segments."""
        self._tidier.wait()

    def close(self) -> None:
        """Waits a little for the thread, and ends it."""
        self._tidier.close(LAST_WAIT_S)

    # --- one segment after another ------------------------------------------------------------------------------

    def _next(self, header: Header, file: BinaryIO) -> Header:
        """Returns the header of the segment after ``file``, which has ``header``."""
        lines, lives, life = _counted(file)
        return Header(
            segment=header.segment + 1,
            lines=header.lines + lines,
            lives=header.lives + lives,
            dropped=max(header.dropped, header.segment - self._keep) if self._keep else header.dropped,
            time_s=round(time.time(), 3),
            first=header.first or (_first_digest(file) if header.segment == 1 else ""),
            life=life or header.life,
        )

    def _after(self, number: int) -> Header:
        """Returns the header of the segment after a closed one, from that one alone."""
        plain = plain_name(self._path, number)
        try:
            with opened(plain if plain.exists() else packed_name(self._path, number)) as file:
                header = Header.of(file.readline()) or Header(segment=number)
                return self._next(header, file)
        except (OSError, EOFError, zlib.error) as err:  # damaged: lines are counted anew, and that is all
            log.warning("tape.segment_damaged", path=str(self._path), segment=number, detail=str(err))
            return Header(segment=number + 1, time_s=round(time.time(), 3))

    def _found(self, number: int) -> int:
        """Returns a descriptor of the next file if it was finished, and only not renamed; else 0."""
        new = self._path.with_name(self._path.name + UNFINISHED)
        try:
            fd = os.open(new, os.O_RDWR | os.O_APPEND)
        except FileNotFoundError:
            return 0
        header = Header.of(os.pread(fd, 1 << 16, 0).partition(b"\n")[0])
        if header is None or header.segment != number:
            os.close(fd)
            return 0
        os.rename(new, self._path)
        self._header = header
        return fd

    def _put(self, header: Header, instead_of: Path | None = None) -> int:
        """Puts a new file with its header in the tape's place, and the one there under another name."""
        new = self._path.with_name(self._path.name + UNFINISHED)
        fd = os.open(new, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            data = memoryview(header.text() + self._opening())
            while data:
                data = data[os.write(fd, data) :]
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


def _counted(file: BinaryIO) -> tuple[int, int, Mapping[str, Any] | None]:
    """Returns how many lines a file has, how many lives begin in it, and the newest of them for a header."""
    file.seek(0)
    at = lines = lives = 0
    begun: int | None = None
    before = b"\n"  # as much of the chunk before as the mark of a life may have begun in
    while chunk := file.read(_CHUNK_BYTES):
        lines += chunk.count(b"\n")
        text, text_at = before + chunk, at - len(before)
        if found := text.count(b"\n" + _LIFE):
            lives, begun = lives + found, text_at + text.rindex(b"\n" + _LIFE) + 1
        before = text[-len(_LIFE) :]
        at += len(chunk)
    if begun is None:
        return lines, lives, None
    file.seek(begun)
    try:
        line = json.loads(file.readline())
        return lines, lives, {name: line[name] for name in ("tape", "epoch", "config")}
    except (KeyError, ValueError):  # cut short, or no aggregator wrote it
        return lines, lives, None


def _first_digest(file: BinaryIO) -> str:
    file.seek(0)
    try:
        return first_digest(json.loads(file.readline()))
    except (TypeError, ValueError):  # cut short
        return ""


class _Tidier:
    """A thread that drops and compresses, while there is something to do."""

    def __init__(self, path: Path, trouble: Callable[[str, OSError | None], None]) -> None:
        self._path, self._trouble = path, trouble
        self._dropped = 0
        self._lock = threading.Lock()
        self._due = False
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    def wake(self, dropped: int) -> None:
        """Has segments dropped up to a number, and the others compressed."""
        with self._lock:
            self._due, self._dropped = True, dropped
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="atoll-tape-segments", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Returns when there is nothing to do."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def close(self, wait_s: float) -> None:
        """Ends it, within ``wait_s`` and a moment."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(wait_s)
            self._ending.set()
            thread.join(wait_s)

    def _main(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while True:
            with self._lock:
                if not self._due or self._ending.is_set():
                    self._thread = None
                    return
                self._due, dropped = False, self._dropped
            self._tidy(dropped)

    def _tidy(self, dropped: int) -> None:
        numbers = numbers_in(self._path)
        for what, work, of in (  # dropping first: it may be what makes room
            ("drop", self._drop, [n for n in numbers if n <= dropped]),
            ("compress", self._pack, [n for n in numbers if n > dropped]),
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
        if not plain.exists() or self._ending.is_set():
            return
        if not packed.exists():
            new = packed.with_name(packed.name + UNFINISHED)
            try:
                self._write_packed(plain, new)
                if self._ending.is_set():
                    return
                shutil.copystat(plain, new)
                os.rename(new, packed)
            finally:
                new.unlink(missing_ok=True)
        plain.unlink()

    def _write_packed(self, plain: Path, new: Path) -> None:
        with plain.open("rb") as read, new.open("wb") as written:
            with gzip.GzipFile(plain.name, "wb", fileobj=written) as packing:
                while (chunk := read.read(_CHUNK_BYTES)) and not self._ending.is_set():
                    packing.write(chunk)
            written.flush()
            os.fsync(written.fileno())
