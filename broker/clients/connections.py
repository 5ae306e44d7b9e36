"""Compares the bytes that each connection brings in with the messages that it delivers. Pure.

ZeroMQ bounds a frame (MAXMSGSIZE), not a message: a message is handed over when its last frame has come, and until then
its frames lie in memory that nobody counts. A peer that never sends the last frame would fill the machine, and so would
one that sends messages faster than they are read: up to 1,000 wait for each connection. The kernel does count the bytes
of each TCP connection, so one that has brought in far more than was read of it is ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from broker.chunks.receiving import CREDIT_BYTES
from broker.wire.messages import Channel

#: The kernel counts the end of a connection as a byte of it.
END_BYTES = 1
#: ZeroMQ accepts so many connections at two ports before it waits for their monitors to be read: 1,001 at each.
UNTOLD_FILES = 2_100
#: A process that may have fewer open files listens on no Unix socket.
LEAST_FILES_FOR_UNIX = 4_096
#: A frame's own bytes on the wire: its length and flags, and with CurveZMQ a nonce and a checksum.
FRAME_BYTES = 64


def most_unread_bytes(channel: Channel, most_frame_bytes: int) -> int:
    """Returns how many bytes a connection may bring in unread; more is a flood.

    That is the largest frame that ZeroMQ takes, and some for frames' own headers; on bulk also all that a peer has
    credit for.
    """
    return most_frame_bytes * 9 // 8 + (CREDIT_BYTES if channel is Channel.BULK else 0)


def files_for_connections(limit: int, in_use: int, *, unix: bool) -> int:
    """Returns how many of a process's open files its connections and their copies may be.

    A quarter of those that are left is a reserve for Redis, for files, and for a burst of connections. ZeroMQ accepts
    them in threads of its own, before anybody is told. Where no open file is left it does without TCP connections, but
    libzmq 4.3.5 ends the process (an assertion in ``ipc_listener.cpp``) when somebody connects to a Unix socket.
    """
    left = limit - in_use
    return max(0, left - max(left // 4, UNTOLD_FILES if unix else 0))


class Ending(Enum):
    """The last step of a connection before it ended."""

    DELIVERED = auto()  #: a message came over it
    SILENT = auto()  #: nothing came at all, or a handshake and no message
    FAILED = auto()  #: its handshake had failed, which was seen
    STRANGER = auto()  #: none of these: what came was half a handshake, or none


@dataclass(slots=True)
class _Connection:
    """One accepted connection: bytes received when all had been read, and those delivered since."""

    received_bytes: int = 0
    read_bytes: int = 0
    messages: int = 0
    messages_seen: int = 0


class Connections:
    """The connections of one port, by file descriptor.

    ZeroMQ does not say whose handshake has succeeded or failed; how many have is enough to count the ends of each kind.
    Of one ``most_bytes`` may wait unread, of all together ``total_bytes``.
    """

    def __init__(self, *, most_bytes: int, total_bytes: float = math.inf) -> None:
        self._most_bytes, self._total_bytes = most_bytes, total_bytes
        self._drained = True  # since the last look nothing was left to read
        self._open: dict[int, _Connection] = {}
        self._unheard: dict[int, None] = {}  # those that have not delivered, the oldest first
        self._given_up: set[int] = set()  # those that are to end for want of room, and have not ended
        self._ended_early: set[int] = set()  # those whose end was told before their beginning
        self._failed = 0  # handshakes that failed, of connections that have not ended
        self._left = 0  # likewise: given up by the peer, or not over in time
        self._silent = 0  # those that succeeded, of connections that have not delivered or ended

    def __len__(self) -> int:
        """Returns how many are open, without those that were given up."""
        return len(self._open) - len(self._given_up)

    def give_up(self) -> int | None:
        """Returns the connection to end where there are too many: the oldest that has delivered nothing."""
        fd = next(iter(self._unheard), None)
        if fd is not None:
            del self._unheard[fd]
            self._given_up.add(fd)
        return fd

    def accepted(self, fd: int) -> Ending | None:
        """A connection was accepted; returns how it ended if that was told before, None if it is open.

        ZeroMQ may refuse the first bytes in one thread before another has told of the connection.
        """
        if fd in self._ended_early:
            self._ended_early.remove(fd)
            return self._ending(None)
        self._forget(fd)
        self._open[fd], self._unheard[fd] = _Connection(), None
        return None

    def _forget(self, fd: int) -> _Connection | None:
        self._unheard.pop(fd, None)
        self._given_up.discard(fd)
        return self._open.pop(fd, None)

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
        """A connection has ended; returns how far it had come; None if it is not known (yet)."""
        connection = self._forget(fd)
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

    def drained(self) -> None:
        """Notes that all messages have been read: what still waits is of messages that are not whole."""
        self._drained = True

    def delivered(self, fd: int, nbytes: int = 0, frames: int = 0) -> None:
        """Notes a whole message over a connection, with its bytes and frames."""
        connection = self._open.get(fd)
        if connection is not None:
            connection.read_bytes += nbytes + FRAME_BYTES * frames
            self._silent -= connection.messages == 0
            connection.messages += 1
            self._unheard.pop(fd, None)

    def overfull(self, received_bytes: Callable[[int], int | None]) -> list[tuple[int, int]]:
        """Returns descriptor and unread bytes of each connection that is to end for them; asked once a second.

        Where all connections together have too much, those with most of it end. ``received_bytes`` is what the kernel
        has received for a descriptor, None if it does not say.
        """
        self._ended_early.clear()  # a beginning that did not come by now was before the watch
        drained, self._drained = self._drained, False
        unread: dict[int, int] = {}
        for fd, connection in self._open.items():
            total = received_bytes(fd)
            if total is None:
                continue
            if drained and connection.messages != connection.messages_seen:
                connection.received_bytes, connection.read_bytes = total, 0
            connection.messages_seen = connection.messages
            unread[fd] = total - connection.received_bytes - connection.read_bytes
        waiting, found = sum(unread.values()), []
        for fd, nbytes in sorted(unread.items(), key=lambda each: -each[1]):
            if nbytes <= self._most_bytes and waiting <= self._total_bytes:
                break
            found.append((fd, nbytes))
            waiting -= nbytes
        return found
