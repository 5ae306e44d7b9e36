"""A name that survives a restart: the same process on the same host gets its island's id again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import IO


class Seat:
    """A name that survives a restart, and that no other process of this host has meanwhile: host name and number.

    The lowest number whose lock file is free. Where there is no place for a lock, there is no such name. A host of the
    same name, or another temporary directory of this one, may give it away as well: the run decides what it is worth.
    """

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name = name
        self._file = file

    @classmethod
    def take(cls, run: str) -> Seat | None:
        """Returns a free seat, or None if locks cannot be taken here."""
        host, directory = socket.gethostname(), Path(tempfile.gettempdir())
        for number in range(1000):
            try:
                file = open(directory / f"atoll-{os.getuid()}-{run}-{number}.lock", "wb")  # noqa: SIM115
            except OSError:
                return None
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return cls(f"{host}/{number}", file)
            file.close()
        return None

    def release(self) -> None:
        """Lets another process have it."""
        self._file.close()
