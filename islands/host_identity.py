"""A hint of the host's name, so that a restarted process gets its island's id again."""

from __future__ import annotations

import os
import socket

from broker.process import user_files
from broker.process.signals import in_children


class HostIdentity:
    """A name of host and number that survives a restart, and is no other process's here meanwhile.

    The number is the lowest whose lock file is free. Where there is no place for a lock, there is no such name. A host
    of the same name, or another temporary directory of this one, may give it away as well: the run decides what it is
    worth.
    """

    def __init__(self, name: str, lock: int) -> None:
        self.name = name
        self._lock = lock
        # Else the workers of a killed process, if they live on, would hold its name against the next one.
        self._forget = in_children(self.release)

    @classmethod
    def take(cls, run: str) -> HostIdentity | None:
        """Returns a free name of this host, or None if locks cannot be taken here."""
        for number in range(1000):
            try:
                lock = user_files.lock(f"seat-{run}-{number}")
            except BlockingIOError:
                continue
            return None if lock is None else cls(f"{socket.gethostname()}/{number}", lock)
        return None

    def release(self) -> None:
        """Lets another process have it; a forked child lets its parent have it alone."""
        self._forget()
        os.close(self._lock)
