"""One DEALER socket and its one connection to a broker, which is made anew when it is lost. Shell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from broker.base.errors import ConfigError, Unavailable
from broker.process import clocks
from broker.transport.connection import Connection
from broker.transport.keys import ClientKeys
from broker.transport.sockets import Context, configure_socket, failure_of
from broker.wire.headers import Buffer, Limits
from broker.wire.messages import Channel


@dataclass(frozen=True, kw_only=True)
class Dial:
    """Where and how to connect, as an :class:`~broker.transport.endpoint.Endpoint` was told."""

    context: Context
    address: str  # of the channel
    channel: Channel
    keys: ClientKeys | None
    limits: Limits
    reconnect_max_s: float
    on_lookup: Callable[[str], None]


class Line(Connection):
    """A socket that connects in the background, and again after a loss; raises ConfigError."""

    def __init__(self, dial: Dial) -> None:
        self.address = dial.address
        self.socket = socket = dial.context.socket(zmq.DEALER)
        configure_socket(socket, dial.channel, dial.limits)
        socket.set(zmq.RECONNECT_IVL, 100)
        socket.set(zmq.RECONNECT_IVL_MAX, round(1000 * dial.reconnect_max_s))
        socket.set(zmq.CONNECT_TIMEOUT, 10_000)
        # Queue for a live connection only: else heartbeats pile up while the broker is away, and arrive stale.
        socket.set(zmq.IMMEDIATE, 1)
        # ZeroMQ would answer a frame above its maximum by giving the connection up; the codec refuses it with a reason.
        socket.set(zmq.MAXMSGSIZE, -1)
        if dial.keys is not None:
            dial.keys.apply(socket)
        super().__init__(dial.context, socket, dial.address, dial.on_lookup)
        self._spoken_over = 0  # the number of a connection
        try:
            self.connect(clocks.monotonic())
        except ConfigError:
            self.hang_up(at_once=True)
            raise

    def hang_up(self, *, at_once: bool = False) -> None:
        """Closes the socket; ZeroMQ still sends its queue within the linger time, unless ``at_once``."""
        self.close()
        self.socket.close(linger=0 if at_once else None)

    @property
    def connection(self) -> int:
        """The number of the connection that stands, as it was seen last, from 1; 0 for none."""
        return self.connections if self.stands else 0

    def put(self, frames: Sequence[Buffer]) -> bool:
        """Hands frames to the connection that stands, now; returns whether it did; raises Unavailable."""
        if not self.connection:
            return False  # a connection that was given up would still take them for a moment, and lose them
        if self.connection != self._spoken_over:
            self.socket.get(zmq.EVENTS)  # has ZeroMQ notice that the old one is gone: a send looks once in 1 ms
            self._spoken_over = self.connection
        return self._done(self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False), "sending to")

    def taken(self) -> list[zmq.Frame] | None:
        """Takes one message off the socket, if there is one; raises Unavailable if the socket fails."""
        taken: Any = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        frames: list[zmq.Frame] | None = taken.result() if self._done(taken, "receiving from") else None
        return frames

    def _done(self, attempt: Any, what: str) -> bool:
        # With NOBLOCK, and nobody polling for room, pyzmq has tried before it returns: the future is done.
        error = failure_of(attempt)
        if error is None or isinstance(error, zmq.Again):
            return error is None
        raise Unavailable(f"{what} {self.address} failed: {error}", definite=True) from error


class Polls:
    """Waits for the sockets of one endpoint, which several tasks read.

    ZeroMQ announces what comes to an empty queue, and nothing more before somebody has found that empty again. A task
    that takes some messages and then waits for no more leaves the others asleep beside what it has left.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting: set[asyncio.Future[Any]] = set()

    async def ready(self, sockets: Iterable[zmq.asyncio.Socket], timeout_ms: int) -> bool:
        """Waits until a socket has something, or :meth:`look_again`; returns whether that is so."""
        poller = self._context.poller()
        for socket in sockets:
            poller.register(socket, zmq.POLLIN)
        polling: Any = poller.poll(timeout_ms)
        self._waiting.add(polling)
        try:
            return bool(await polling)
        finally:
            self._waiting.discard(polling)

    def look_again(self) -> None:
        """Wakes all that wait: another task has taken something off a socket, or the sockets are to be others."""
        for polling in self._waiting:
            if not polling.done():
                polling.set_result([None])
