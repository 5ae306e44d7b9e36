"""TCP connections that ZeroMQ holds: what has come in over one, and how it is ended. Shell.

A descriptor may have been closed meanwhile, and given to something else, so a copy of it is looked at before anything
is believed of it or done to it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

#: Where ``struct tcp_info`` has ``tcpi_bytes_received``, an unsigned 64-bit number (Linux 4.1).
_RECEIVED_AT = 128
_RECEIVED = struct.Struct("=Q")


def _copy(fd: int) -> socket.socket:
    """Returns a socket of its own for a descriptor; OSError if that is closed, or no socket."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def received_bytes(fd: int) -> int | None:
    """Returns what has come in over a connection; None if it is none, or the kernel does not say."""
    try:
        with _copy(fd) as sock:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
    except (OSError, IndexError):
        return None
    return _RECEIVED.unpack_from(info, _RECEIVED_AT)[0] if len(info) >= _RECEIVED_AT + _RECEIVED.size else None


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
