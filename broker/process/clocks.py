"""The clocks of a daemon: monotonic seconds, and those since 1970. Chaos can make the first jump.

A core takes the time as it is told. A clock that went back, by a fault of the machine or of a drill, would make every
"since" negative: one such jump had an aggregator refuse all heartbeats as impossible for as long as the jump was wide.
So the clock that daemons read stands still for one reading instead, and goes on from there. A jump forward is time
that has passed.

:data:`VARIABLE` may name a file of 8 bytes, a little-endian double: seconds that are added to the machine's clock, and
that ``atoll chaos`` changes while the process runs.

In virtual time (:mod:`ops.virtual.loop`) both are those of the simulated process that runs: :func:`use`.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from broker.base.errors import ConfigError

VARIABLE = "ATOLL_CLOCK_OFFSET"
_OFFSET = struct.Struct("<d")


class SteadyClock:
    """Makes a clock that may go back one that does not; may be read by any thread."""

    def __init__(self, source: Callable[[], float]) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._last_s = source()
        self._skipped_s = 0.0
        self._told_s = self._last_s

    def __call__(self) -> float:
        """Returns seconds, never less than before."""
        with self._lock:
            now_s = self._source()
            if now_s < self._last_s:
                self._skipped_s += self._last_s - now_s
            self._last_s = now_s
            self._told_s = max(self._told_s, now_s + self._skipped_s)  # the sum may be rounded down
            return self._told_s

    def unlock(self) -> None:
        """Makes it free in a child that was forked while another thread of the parent read it."""
        self._lock = threading.Lock()


def shifted(offset_file: str | None, source: Callable[[], float] = time.monotonic) -> Callable[[], float]:
    """Returns ``source`` shifted by the number in a file, read at each call; ``source`` without a file.

    Raises:
        ConfigError: The file cannot be read, or does not hold a double.
    """
    if not offset_file:
        return source
    try:
        fd = os.open(offset_file, os.O_RDONLY)
        try:
            held = mmap.mmap(fd, _OFFSET.size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
    except (OSError, ValueError) as err:
        raise ConfigError(VARIABLE, offset_file, "must name a file of 8 bytes, or not be set") from err
    return lambda: source() + float(_OFFSET.unpack_from(held)[0])


def write_offset(path: Path, offset_s: float) -> None:
    """Makes the clocks that look at ``path`` jump; creates the file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(fd, _OFFSET.pack(offset_s), 0)
    finally:
        os.close(fd)


class Source(Protocol):
    """Where this module's clocks come from."""

    def monotonic(self) -> float:
        """Returns seconds, never less than before."""
        ...

    def wall(self) -> float:
        """Returns seconds since 1970; may go back."""
        ...


class _Machine:
    """The clocks of this machine."""

    def __init__(self) -> None:
        self.monotonic = SteadyClock(shifted(os.environ.get(VARIABLE)))
        self.wall = time.time
        os.register_at_fork(after_in_child=self.monotonic.unlock)


_source: Source = _Machine()


def monotonic() -> float:
    """Returns the clock of this process, in seconds: never less than before."""
    return _source.monotonic()


def wall() -> float:
    """Returns the time that people read, in seconds since 1970; it may go back."""
    return _source.wall()


def use(source: Source) -> Source:
    """Has the clocks come from ``source``; returns where they came from before."""
    global _source
    before, _source = _source, source
    return before
