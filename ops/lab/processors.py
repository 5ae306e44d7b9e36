"""Which processor a run has to itself, among all laboratories of a user on this machine. Shell.

Two of them side by side would otherwise both begin with the first one, and train at half their speed beside one that
does nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from broker.process import user_files


@dataclass(slots=True)
class Processor:
    """A processor, held until it is freed or this process ends.

    Attributes:
        number: As the kernel counts; None for any.
    """

    number: int | None
    _lock: int | None = None

    @property
    def cpus(self) -> tuple[int, ...]:
        """What a process is to be pinned to."""
        return () if self.number is None else (self.number,)

    def free(self) -> None:
        """Leaves it to others."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def take(turn: int) -> Processor:
    """Returns a processor that no other run of this user has; if all are taken, or it cannot be told, one by turns."""
    allowed = sorted(os.sched_getaffinity(0))
    for number in allowed:
        try:
            lock = user_files.lock(f"lab-processor-{number}")
        except BlockingIOError:
            continue
        if lock is None:
            break
        return Processor(number, lock)
    return Processor(allowed[turn % len(allowed)])
