"""The pulse file: times of an island's latest steps, for observers.

``atoll chaos`` judges by it whether training ever stood still. It works with everything else gone: no socket, no
Redis, no answer is needed. A step costs one write into mapped memory, less than a microsecond.

Layout, little-endian: 8 bytes of magic, then the number of steps ever written (uint64), then a ring of
:data:`CAPACITY` entries, each the monotonic time in seconds (double) and the process id of the life that ran it
(uint64). A new life goes on where the last one ended.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from broker.base.errors import ConfigError, cure_of

MAGIC = b"atollpul"
CAPACITY = 8192
_COUNT = struct.Struct("<Q")
_ENTRY = struct.Struct("<dQ")
_COUNT_AT = len(MAGIC)
_RING_AT = _COUNT_AT + _COUNT.size
_SIZE = _RING_AT + CAPACITY * _ENTRY.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One step: its end in monotonic seconds, and the process that ran it."""

    at_s: float
    pid: int


class Pulse:
    """The writing end; belongs to the training thread."""

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it.

        Raises:
            ConfigError: It cannot be written, or is something else.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if os.fstat(fd).st_size == 0:
                    os.posix_fallocate(fd, 0, _SIZE)  # a full disk must fail here, not in the middle of training
                    os.pwrite(fd, MAGIC, 0)
                self._memory = mmap.mmap(fd, _SIZE)
            finally:
                os.close(fd)
        except ValueError as err:  # it is too short to be mapped
            raise ConfigError("pulse", str(path), "is another file; give a new one") from err
        except OSError as err:
            raise ConfigError("pulse", str(path), f"cannot be written ({err.strerror}): {cure_of(err)}") from err
        if self._memory[:_COUNT_AT] != MAGIC:
            raise ConfigError("pulse", str(path), "is another file; give a new one")
        self._count = int(_COUNT.unpack_from(self._memory, _COUNT_AT)[0])
        self._pid = os.getpid()

    def beat(self) -> None:
        """Writes down that a step has ended now: first the entry, then the count that shows it.

        By the machine's clock, as observers have it: that of :mod:`broker.process.clocks` may be made to jump.
        """
        _ENTRY.pack_into(self._memory, _RING_AT + (self._count % CAPACITY) * _ENTRY.size, time.monotonic(), self._pid)
        self._count += 1
        _COUNT.pack_into(self._memory, _COUNT_AT, self._count)


def read_pulse(path: Path, after: int = 0) -> tuple[int, list[Beat]]:
    """Returns the number of steps ever written, and those after the first ``after`` still in the ring.

    A file that is not there yet, or not whole, has none.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return after, []
    if len(content) != _SIZE or content[:_COUNT_AT] != MAGIC:
        return after, []
    count = int(_COUNT.unpack_from(content, _COUNT_AT)[0])
    # One less than fits: the oldest entry may be the one that is being written.
    numbers = range(max(after, count - CAPACITY + 1), count)
    entries = (_ENTRY.unpack_from(content, _RING_AT + (n % CAPACITY) * _ENTRY.size) for n in numbers)
    return max(after, count), [Beat(at_s=at_s, pid=pid) for at_s, pid in entries]
