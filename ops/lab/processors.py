"""Which processor a run has to itself, among all laboratories of a user on this machine. Shell.

Two of them side by side would otherwise both begin with the first one, and train at half their speed beside one that
does nothing.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path


@dataclass(slots=True)
class Processor:
    """A processor, held until it is freed or this process ends.

    Attributes:
        number: As the kernel counts; None for any.
    """

    number: int | None
    _lock: TextIOWrapper | None = None

    @property
    def cpus(self) -> tuple[int, ...]:
        """What a process is to be pinned to."""
        return () if self.number is None else (self.number,)

    def free(self) -> None:
        """Leaves it to others."""
        if self._lock is not None:
            self._lock.close()


def take(turn: int) -> Processor:
    """Returns a processor that no other run of this user has; if all are taken, or it cannot be told, one by turns."""
    allowed = sorted(os.sched_getaffinity(0))
    for number in allowed:
        path = Path(tempfile.gettempdir(), f"atoll-lab-{os.getuid()}-processor-{number}.lock")
        with suppress(OSError):
            lock = path.open(
                "a", encoding="utf-8"
            )  # stays there: whoever removed it would let two others lock two files of that name
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                continue
            return Processor(number, lock)
    return Processor(allowed[turn % len(allowed)])
