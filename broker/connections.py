"""What comes in over each connection of a port, counted against what was delivered. Pure.

ZeroMQ bounds a frame (MAXMSGSIZE), not a message: a message is handed over when its last frame has come, and until then
its frames lie in memory that nobody counts. A peer that never sends the last frame would fill the machine. The kernel
does count the bytes of each TCP connection, so a connection that has brought in more than the largest message since it
last delivered one is ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Connection:
    """One accepted connection: bytes received when it last showed that it delivers, and messages since."""

    received_bytes: int = 0
    messages: int = 0
    messages_seen: int = 0


class Connections:
    """The connections of one port, by file descriptor.

    Args:
        most_bytes: What one of them may bring in without delivering a message.
    """

    def __init__(self, *, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._open: dict[int, _Connection] = {}

    def accepted(self, fd: int) -> None:
        """A connection was accepted."""
        self._open[fd] = _Connection()

    def closed(self, fd: int) -> bool:
        """A connection has ended; returns whether it ever delivered a message."""
        connection = self._open.pop(fd, None)
        return connection is None or connection.messages > 0

    def delivered(self, fd: int) -> None:
        """A whole message came over a connection."""
        connection = self._open.get(fd)
        if connection is not None:
            connection.messages += 1

    def overfull(self, received_bytes: Callable[[int], int | None]) -> list[tuple[int, int]]:
        """Returns those that bring in and do not deliver, with the bytes of it; to be asked about once a second.

        Args:
            received_bytes: What the kernel has received for a descriptor; None if it does not say.
        """
        found = []
        for fd, connection in self._open.items():
            total = received_bytes(fd)
            if total is None:
                continue
            if connection.messages != connection.messages_seen:
                connection.messages_seen = connection.messages
                connection.received_bytes = total
            elif total - connection.received_bytes > self._most_bytes:
                found.append((fd, total - connection.received_bytes))
        return found
