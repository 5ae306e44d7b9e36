"""Counts what each connection of a port brings in against what it delivers. Pure.

ZeroMQ bounds a frame (MAXMSGSIZE), not a message: a message is handed over when its last frame has come, and until then
its frames lie in memory that nobody counts. A peer that never sends the last frame would fill the machine. The kernel
does count the bytes of each TCP connection, so a connection that has brought in more than the largest message since it
last delivered one is ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from broker.chunks.receiving import CREDIT_BYTES
from broker.wire.messages import Channel

#: The kernel counts the end of a connection as a byte of it.
END_BYTES = 1


def most_unread_bytes(channel: Channel, most_frame_bytes: int) -> int:
    """Returns how many bytes a connection may bring in unread; more is a flood.

    That is the largest frame that ZeroMQ takes, and some for frames' own headers. On bulk it is also all that a peer
    has credit for: its chunks may wait while others are served.
    """
    return most_frame_bytes * 9 // 8 + (CREDIT_BYTES if channel is Channel.BULK else 0)


class Ending(Enum):
    """The last step of a connection before it ended."""

    DELIVERED = auto()  #: a message came over it
    SILENT = auto()  #: nothing came at all, or a handshake and no message
    FAILED = auto()  #: its handshake had failed, which was seen
    STRANGER = auto()  #: none of these: what came was half a handshake, or none


@dataclass(slots=True)
class _Connection:
    """One accepted connection: bytes received when it last showed that it delivers, and messages since."""

    received_bytes: int = 0
    messages: int = 0
    messages_seen: int = 0


class Connections:
    """The connections of one port, by file descriptor.

    ZeroMQ does not say whose handshake has succeeded or failed; how many have is enough to count the ends of each kind.

    Args:
        most_bytes: What one of them may bring in without delivering a message.
    """

    def __init__(self, *, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._open: dict[int, _Connection] = {}
        self._ended_early: set[int] = set()  # those whose end was told before their beginning
        self._failed = 0  # handshakes that failed, of connections that have not ended
        self._left = 0  # likewise: given up by the peer, or not over in time
        self._silent = 0  # those that succeeded, of connections that have not delivered or ended

    def accepted(self, fd: int) -> Ending | None:
        """A connection was accepted; returns how it ended if that was told before, None if it is open.

        ZeroMQ may refuse the first bytes in one thread before another has told of the connection.
        """
        if fd in self._ended_early:
            self._ended_early.remove(fd)
            return self._ending(None)
        self._open[fd] = _Connection()
        return None

    def shook_hands(self) -> None:
        """The handshake of some connection has succeeded."""
        self._silent += 1

    def failed(self) -> None:
        """The handshake of some connection has failed; its end follows."""
        self._failed += 1

    def left(self) -> None:
        """Counts a peer that left in the handshake or ran out of time; the end of its connection follows."""
        self._left += 1

    def closed(self, fd: int, received_bytes: int | None) -> Ending | None:
        """A connection has ended; returns how far it had come, with what came over it if that is known.

        None if nothing is known of it: it began before the watch, or :meth:`accepted` is yet to be told of it.
        """
        connection = self._open.pop(fd, None)
        if connection is None:
            self._ended_early.add(fd)
            return None
        return Ending.DELIVERED if connection.messages > 0 else self._ending(received_bytes)

    def _ending(self, received_bytes: int | None) -> Ending:
        """Returns the end of a connection that delivered nothing."""
        if self._failed > 0:
            self._failed -= 1
            return Ending.FAILED
        if self._left > 0:
            self._left -= 1
            return Ending.STRANGER if (received_bytes or 0) > END_BYTES else Ending.SILENT
        if self._silent > 0:
            self._silent -= 1
            return Ending.SILENT
        return Ending.STRANGER

    def delivered(self, fd: int) -> None:
        """A whole message came over a connection."""
        connection = self._open.get(fd)
        if connection is not None:
            self._silent -= connection.messages == 0
            connection.messages += 1

    def overfull(self, received_bytes: Callable[[int], int | None]) -> list[tuple[int, int]]:
        """Returns descriptor and bytes of each connection that brings in bytes but delivers no message.

        It is to be asked about once a second.

        Args:
            received_bytes: What the kernel has received for a descriptor; None if it does not say.
        """
        self._ended_early.clear()  # a beginning that did not come by now was before the watch
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
