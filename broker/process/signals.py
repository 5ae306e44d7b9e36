"""Remembers signals that ask the process to end."""

from __future__ import annotations

import signal
from typing import Any


class Interrupted(Exception):
    """A signal asked for the end; ``number`` says which."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"interrupted by {signal.Signals(number).name}")


class Signals:
    """Remembers the first of SIGINT, SIGTERM and SIGHUP; a context manager.

    Nothing is raised where the signal arrives, which may be anywhere, even inside an event loop that swallows
    exceptions: :meth:`check` raises where it is asked to. Whoever uses it asks several times a second.
    A hang-up that is ignored stays so: that is what ``nohup`` is for.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        if self._received is None:
            self._received = number

    def check(self) -> None:
        """Raises Interrupted if one of the signals has come."""
        if self._received is not None:
            raise Interrupted(self._received)
