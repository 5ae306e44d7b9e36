"""A queue between a simulated socket and its I/O thread: its mark, and how it announces. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

M = TypeVar("M")


class Pipe(Generic[M]):
    """One direction: whole messages, in order.

    What comes is announced once: to a reader that has found the pipe empty, and not again before it has found that
    again. A full pipe takes nothing before half of it has been read, and its writer has been told.

    Args:
        high_water_mark: Messages that it holds; 0 for any number.
        tell_writer: Called now and then with the number of messages that have been read, for :meth:`told`.
    """

    def __init__(self, high_water_mark: int, tell_writer: Callable[[int], None]) -> None:
        self._mark, self._tell_writer = high_water_mark, tell_writer
        self._low_mark = (high_water_mark + 1) // 2
        self._messages: deque[M] = deque()
        self._written = self._read = self._told = 0
        self._asleep = True

    @property
    def full(self) -> bool:
        """Whether it takes nothing, as far as its writer knows."""
        return 0 < self._mark <= self._written - self._told

    @property
    def empty(self) -> bool:
        """Whether nothing is in it; its reader has not looked."""
        return not self._messages

    def told(self, read: int) -> None:
        """Tells the writer how many messages have been read."""
        self._told = read

    def write(self, message: M) -> bool:
        """Puts a message in; returns whether the reader is to be told."""
        self._messages.append(message)
        self._written += 1
        asleep, self._asleep = self._asleep, False
        return asleep

    def clear(self) -> None:
        """Drops what is in it."""
        self._messages.clear()

    def ready(self) -> bool:
        """Whether there is a message to read; if not, the reader is told of the next one."""
        self._asleep = not self._messages
        return not self._asleep

    def read(self) -> M | None:
        """Takes a message out; None if there is none, and the reader is told of the next one."""
        if not self.ready():
            return None
        self._read += 1
        message = self._messages.popleft()
        if self._low_mark and self._read % self._low_mark == 0:
            self._tell_writer(self._read)
        return message
