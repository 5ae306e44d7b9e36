"""Remembers signals that ask the process to end, and lets its forked children go. Shell.

``os.fork`` copies memory and descriptors, and one thread of all. A child so has its parent's signal handlers, holds the
parent's locks of files, ports and pipes after the parent has died, and waits for threads that are not there.
``multiprocessing`` forks (its default on Linux before Python 3.14), and so do PyTorch's data loaders. Whoever has
such a thing says here how a child lets go of it.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_let_go: dict[int, Callable[[], None]] = {}
_numbers = itertools.count()
_forking = threading.local()


def in_children(let_go: Callable[[], None]) -> Callable[[], None]:
    """Has each child that this process forks call ``let_go`` first; returns what ends that."""
    number = next(_numbers)
    _let_go[number] = let_go

    def forget() -> None:
        _let_go.pop(number, None)

    return forget


def _before() -> None:
    # A child that is ended at once would remember that for its parent.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)


def _after() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_child() -> None:
    calls = list(_let_go.values())
    _let_go.clear()  # a child of the child has nothing of these any more
    try:
        for let_go in calls:
            let_go()
    finally:
        _after()


os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_child)


class Handlers:
    """Handlers of signals that stand for a while: until they are given back, and not in children."""

    def __init__(self, receive: Callable[[int, Any], None]) -> None:
        self._receive = receive
        self._previous: dict[int, Any] = {}
        self._forget: Callable[[], None] = lambda: None

    def take(self, *numbers: int) -> None:
        """Has ``receive`` called at these signals."""
        for number in numbers:
            self._previous[number] = signal.signal(number, self._receive)
        self._forget = in_children(self.give_back)

    def give_back(self) -> None:
        """Puts back what stood before, unless somebody else has put theirs there since."""
        self._forget()
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._receive and handler is not None:  # None: not of Python
                signal.signal(number, handler)
        self._previous.clear()


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
        self._handlers = Handlers(self._receive)

    def __enter__(self) -> Signals:
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._handlers.take(*(each for each in _ASKING if each != signal.SIGHUP or not ignored))
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.give_back()

    def _receive(self, number: int, frame: object) -> None:
        if self._received is None:
            self._received = number

    def check(self) -> None:
        """Raises Interrupted if one of the signals has come."""
        if self._received is not None:
            raise Interrupted(self._received)
