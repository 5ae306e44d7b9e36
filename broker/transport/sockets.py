"""A process's sockets, and their options on both channels, at either side of a connection.

The reasons behind the numbers are in PROTOCOL.md, section 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from broker.chunks.sending import MOST_CHUNK_BYTES
from broker.wire.headers import DEFAULT_LIMITS, Limits
from broker.wire.messages import Channel

#: Flags of a call that does not wait, and what says that there is something to take: pyzmq's own are enums, and to
#: combine two of these takes as long as to send a small frame.
NOW, READABLE = int(zmq.NOBLOCK), int(zmq.POLLIN)
_MORE = int(zmq.SNDMORE)


class Direct(zmq.Socket[bytes]):
    """A socket for calls that do not wait: no future is made for each."""

    def send_multipart(self, frames: Sequence[Any], flags: int = 0, copy: bool = True, **_: Any) -> None:  # type: ignore[override]
        """Sends a message, or raises zmq.Again before its first frame."""
        *others, last = frames
        for frame in others:
            self.send(frame, flags | _MORE, copy)
        self.send(last, flags, copy)


class Context(zmq.asyncio.Context):
    """Makes the sockets of a process. In virtual time another one with these methods stands for it."""

    def poller(self) -> zmq.asyncio.Poller:
        """Returns what waits for several of these sockets."""
        return zmq.asyncio.Poller()

    def direct(self, socket: zmq.asyncio.Socket) -> zmq.Socket[bytes]:
        """Returns one of these sockets for calls that do not wait."""
        return Direct.shadow(socket.underlying)


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketOptions:
    """The socket options of one channel, at brokers and at their clients."""

    high_water_mark: int  # messages queued per connection and direction
    linger_s: float  # how long closing waits for what is queued
    ping_every_s: float  # interval of ZeroMQ's own heartbeats
    #: Silence after which ZeroMQ gives a connection up. An answer waits behind the frame that is being sent, so this
    #: must exceed the time of the largest frame on the slowest link, or that frame never arrives.
    ping_timeout_s: float

    def apply(self, socket: zmq.Socket[Any], max_frame_bytes: int) -> None:
        """Sets the options; to be called before the socket is bound or connected."""
        socket.set_hwm(self.high_water_mark)
        socket.linger = round(1000 * self.linger_s)
        socket.set(zmq.HEARTBEAT_IVL, round(1000 * self.ping_every_s))
        socket.set(zmq.HEARTBEAT_TIMEOUT, round(1000 * self.ping_timeout_s))
        ttl_ms = round(1000 * self.ping_timeout_s)
        # The other end counts the milliseconds in 16 bits (libzmq issue 4226): 600 s became ten, and a connection that
        # was idle, or carried a frame for so long, was ended. It has the kernel's probes to find out about dead hosts.
        socket.set(zmq.HEARTBEAT_TTL, ttl_ms if ttl_ms < 1 << 16 else 0)
        socket.set(zmq.HANDSHAKE_IVL, 10_000)
        socket.set(zmq.MAXMSGSIZE, max_frame_bytes)
        socket.set(zmq.IPV6, 1)
        # Below ZeroMQ's pings, the kernel's: they work beside a frame that takes minutes, and keep a NAT's entry alive.
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.set(zmq.TCP_KEEPALIVE_IDLE, 15)
        socket.set(zmq.TCP_KEEPALIVE_INTVL, 5)
        socket.set(zmq.TCP_KEEPALIVE_CNT, 4)
        socket.set(zmq.TCP_MAXRT, 60_000)


def failure_of(done: Any) -> BaseException | None:
    """Returns why a send or receive that did not wait has failed; None if it has not.

    The error comes without its traceback, whose frames refer to the future, and that to the error. Such a cycle stays
    until Python's collector comes, which in a daemon is hardly ever; and with it stays all that the callers of those
    frames have, such as the version that they send.
    """
    try:
        done.result()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the caller's to raise
        return error.with_traceback(None)
    return None


CONTROL_OPTIONS = SocketOptions(high_water_mark=1000, linger_s=1.0, ping_every_s=2.0, ping_timeout_s=6.0)
BULK_OPTIONS = SocketOptions(high_water_mark=64, linger_s=0.0, ping_every_s=15.0, ping_timeout_s=600.0)
#: Messages that are taken in before the other channel's turn. A version that is delivered brings an answer on both, and
#: heartbeats come on one of them as well, a thousand islands' while they hand over: none may wait for a payload each.
IN_A_ROW = {Channel.CONTROL: 8, Channel.BULK: 1}


def tcp_buffer_bytes() -> int:
    """Returns the most bytes Linux lets a TCP connection send ahead (``tcp_wmem``); 0 if not known."""
    try:
        return int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text(encoding="utf-8").split()[2])
    except (OSError, ValueError, IndexError):
        return 0


def configure_socket(socket: zmq.Socket[Any], channel: Channel, limits: Limits = DEFAULT_LIMITS) -> None:
    """Sets the options of a channel on a socket, at either side, before it is bound or connected."""
    if channel is Channel.BULK:
        BULK_OPTIONS.apply(socket, 2 * MOST_CHUNK_BYTES)
    else:
        # ZeroMQ ends the connection over a frame that exceeds its maximum. The room between the limit and the maximum
        # is for what is merely too large: it is read, and refused with a reason.
        CONTROL_OPTIONS.apply(socket, 4 * limits.max_header_bytes)
