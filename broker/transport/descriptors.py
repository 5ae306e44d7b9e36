"""Connections of ZeroMQ, by file descriptor: counts the bytes received over one, and ends it. Shell.

A descriptor may have been closed meanwhile, and given to something else, so a copy of it is looked at before anything
is believed of it or done to it: whether its own end has a name that is ours.

In virtual time the copies are those of simulated connections: :func:`use`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Container

#: What the kernel calls our end of a connection: a TCP port, or the path of a Unix socket; one in Linux' abstract
#: namespace begins with a zero byte.
Name = int | bytes

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


_copied: Callable[[int], socket.socket] = _copy


def use(source: Callable[[int], socket.socket]) -> Callable[[int], socket.socket]:
    """Has the copies of descriptors come from ``source``; returns where they came from before."""
    global _copied
    before, _copied = _copied, source
    return before


def _name(sock: socket.socket) -> Name | None:
    """Returns the name of our end of a connection, None if it has none; raises OSError if that is closed."""
    name = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return os.fsencode(name) or None
    return int(name[1]) if sock.family in (socket.AF_INET, socket.AF_INET6) else None


def received_bytes(fd: int) -> int | None:
    """Returns what has come in over a TCP connection; None if it is none, or the kernel does not say."""
    try:
        with _copied(fd) as sock:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
    except OSError:
        return None
    return _RECEIVED.unpack_from(info, _RECEIVED_AT)[0] if len(info) >= _RECEIVED_AT + _RECEIVED.size else None


def hold(fd: int, ours: Container[Name | None]) -> socket.socket | None:
    """Returns a copy of a connection to one of our names; None if it is gone.

    It can be asked when ZeroMQ has closed its own. The connection ends when both are closed.
    """
    try:
        copy = _copied(fd)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if _name(copy) in ours:
            return copy
    copy.close()
    return None


def hang_up(fd: int, ours: Container[Name | None]) -> bool:
    """Ends a connection to one of our names and says whether there was one.

    Another peer that has come to have this descriptor connects again.
    """
    try:
        with _copied(fd) as sock:
            if _name(sock) not in ours:
                return False
            sock.getpeername()
            sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


def forget_unsent(fd: int, port: int) -> bool:
    """Has the kernel throw away what a TCP connection to that port has not sent yet, once it is closed.

    It would go on sending that for as long as it takes, before all that is sent over the next connection.
    """
    try:
        with _copied(fd) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getpeername()[1] != port:
                return False
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        return False
    return True
