"""The kernel's view of a TCP connection that ZeroMQ holds: byte counts, keepalive, reset. Shell.

A descriptor may have been closed meanwhile, and given to something else, so a copy of it is looked at before anything
is believed of it or done to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios

from broker.routing.deafness import Carried

#: Where ``struct tcp_info`` has ``tcpi_bytes_acked`` and ``tcpi_bytes_received``, unsigned 64-bit numbers (Linux 4.1).
_CARRIED_AT = 120
_CARRIED = struct.Struct("=QQ")
_WAITING = struct.Struct("i")


def _copy(fd: int) -> socket.socket:
    """Returns a socket of its own for a descriptor; OSError if that is closed, or no socket."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def carried(fd: int, *, to_port: int = 0) -> Carried | None:
    """Returns what a connection has carried; None if it is none, or leads elsewhere, or the kernel does not say."""
    try:
        with _copy(fd) as sock:
            if to_port and sock.getpeername()[1] != to_port:
                return None
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _CARRIED_AT + _CARRIED.size)
            (waiting,) = _WAITING.unpack(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(_WAITING.size)))
    except (OSError, IndexError):
        return None
    if len(info) < _CARRIED_AT + _CARRIED.size:
        return None
    up, down = _CARRIED.unpack_from(info, _CARRIED_AT)
    return Carried(up, down, waiting)


def peer_port(fd: int) -> int | None:
    """Returns the port at the other end of a connection; None as :func:`carried`."""
    try:
        with _copy(fd) as sock:
            return int(sock.getpeername()[1]) if sock.family in (socket.AF_INET, socket.AF_INET6) else None
    except OSError:
        return None


def received_bytes(fd: int) -> int | None:
    """Returns what has come in over a connection; None as :func:`carried`."""
    found = carried(fd)
    return None if found is None else found.down


def hold(fd: int, port: int) -> socket.socket | None:
    """Returns a copy of a connection of our port; None if it is gone.

    It can be asked when ZeroMQ has closed its own. The connection ends when both are closed.
    """
    try:
        copy = _copy(fd)
    except OSError:
        return None
    with contextlib.suppress(OSError, IndexError):
        if copy.getsockname()[1] == port:
            return copy
    copy.close()
    return None


def hang_up(fd: int, port: int) -> bool:
    """Ends a connection of our port and says whether there was one.

    Another peer that has come to have this descriptor connects again.
    """
    try:
        with _copy(fd) as sock:
            if sock.getsockname()[1] != port:
                return False
            sock.getpeername()
            sock.shutdown(socket.SHUT_RDWR)
    except (OSError, IndexError):
        return False
    return True


def forget_unsent(fd: int, port: int) -> bool:
    """Has the kernel throw away what a connection to that port has not sent yet, once it is closed.

    It would go on sending that for as long as it takes, before all that is sent over the next connection.
    """
    try:
        with _copy(fd) as sock:
            if sock.getpeername()[1] != port:
                return False
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except (OSError, IndexError):
        return False
    return True
