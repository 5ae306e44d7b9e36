"""Carries a link's bytes between real sockets, at the times of :class:`~ops.links.link.Link`. Shell.

A connection of a client is two sockets here: one that it made to us, one that we made to the broker in its place. The
second is made when the first packet of the connection would have reached the broker, and the first is read when the
answer would have come back, so that a new connection takes its round trip too. A connection that one side closes is
closed at the other once everything before has arrived; one that breaks is reset there.

Bytes are read only while their lane has room, and taken from it only while the receiver's socket has: pressure passes
through from one end to the other, and memory is bounded by the windows of the lanes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from itertools import count
from typing import assert_never

from broker.process import logs
from ops.links.condition import LinkCondition, Way
from ops.links.lane import Item, Mark
from ops.links.link import Link

log = logs.get(__name__)

READ_BYTES = 64 << 10
#: Buffers of our sockets: the kernel should hold little beside the lanes.
SOCKET_BUFFER_BYTES = 64 << 10
WRITE_HIGH_WATER_BYTES = 64 << 10
CONNECT_WITHIN_S = 10.0

_OTHER = {Way.UP: Way.DOWN, Way.DOWN: Way.UP}


class Carrier:
    """All connections of one link, with their common timer."""

    def __init__(self, name: str, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.link = link
        self.loop = loop
        self.connections: dict[int, Connection] = {}
        self.scratch = memoryview(bytearray(READ_BYTES))  # a read is copied from here before the next one begins
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at_s: float | None = None
        self._closed = False

    def accept(self, host: str, port: int) -> End:
        """Returns the protocol for a client's connection, which is forwarded to ``host`` and ``port``."""
        connection = Connection(self, next(self._numbers), host, port)
        return connection.ends[Way.UP]

    def order(self, condition: LinkCondition, *, for_s: float | None) -> None:
        """Sets the link's condition, as :meth:`Link.order`."""
        self.link.order(condition, for_s=for_s, now_s=self.loop.time())
        self.pump()

    def clear(self) -> None:
        """Cancels all orders."""
        self.link.clear()
        self.pump()

    def reset(self) -> None:
        """Resets all connections, at both ends."""
        if not self._closed:
            log.info("link.reset", link=self.name, connections=len(self.connections))
        for connection in list(self.connections.values()):
            connection.abort()

    def pump(self) -> None:
        """Does everything that is due, and sets the timer."""
        if self._closed:
            return
        now_s, before = self.loop.time(), self.link.condition
        due = self.link.advance(now_s)
        if self.link.condition is not before and self.link.condition != before:
            log.info("link.changed", link=self.name, condition=json.dumps(self.link.condition.table()))
        if due:
            self.reset()
        for way, lane in self.link.lanes.items():
            for delivery in lane.take(now_s):
                connection = self.connections.get(delivery.flow)
                if connection is not None:
                    connection.arrived(way, delivery.item)
        for connection in self.connections.values():
            connection.read_where_there_is_room()
        self._wake(self.link.next_s())

    def _wake(self, at_s: float | None) -> None:
        if at_s == self._wakes_at_s and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._wakes_at_s = at_s
        self._timer = None if at_s is None else self.loop.call_at(at_s, self._ring)

    def _ring(self) -> None:
        self._timer = self._wakes_at_s = None
        self.pump()

    def close(self) -> None:
        """Ends the timer and all connections."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.reset()


class Connection:
    """One connection of a client: its two sockets, and the bytes under way between them."""

    def __init__(self, carrier: Carrier, number: int, host: str, port: int) -> None:
        self.carrier = carrier
        self.number = number
        self.ends = {way: End(self, way) for way in Way}  # the end at which the bytes of a way come in
        self._address = host, port
        self._connecting: asyncio.Task[None] | None = None
        self._ended: set[Way] = set()

    def offer(self, way: Way, item: Item) -> None:
        """Puts bytes or a mark into the link."""
        self.carrier.link.lanes[way].offer(self.number, item, self.carrier.loop.time())
        self.carrier.pump()

    def room(self, way: Way) -> int:
        """Returns the bytes that the link takes now."""
        return self.carrier.link.lanes[way].room(self.number)

    def accepted(self) -> None:
        """Starts the connection to the broker after a client has connected."""
        self.carrier.connections[self.number] = self
        self.offer(Way.UP, Mark.OPEN)

    def arrived(self, way: Way, item: Item) -> None:
        """Writes arrived bytes to the far end."""
        if not isinstance(item, Mark):
            self.ends[_OTHER[way]].write(item)
            return
        match item:
            case Mark.OPEN if way is Way.UP:
                self._connecting = self.carrier.loop.create_task(self._connect(), name=f"{self.carrier.name} connects")
            case Mark.OPEN:
                self.ends[Way.UP].resume()  # the connection is complete
            case Mark.END:
                self._ended.add(way)
                self.ends[_OTHER[way]].write_end()
                if len(self._ended) == len(Way):
                    self._forget()
                    for end in self.ends.values():
                        end.close()
            case Mark.RESET:
                self.abort()
            case _:
                assert_never(item)

    async def _connect(self) -> None:
        host, port = self._address
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                await self.carrier.loop.create_connection(lambda: self.ends[Way.DOWN], host, port)
        except OSError:  # TimeoutError is one: nobody listens there, as far as the client can tell
            self.offer(Way.DOWN, Mark.RESET)

    def read_where_there_is_room(self) -> None:
        """Resumes reading from a socket that was paused for lack of room."""
        for way, end in self.ends.items():
            if end.waits_for_room and self.room(way):
                end.resume()

    def abort(self) -> None:
        """Resets both ends; bytes under way are lost."""
        self._forget()
        if self._connecting is not None:
            self._connecting.cancel()
        for end in self.ends.values():
            end.abort()

    def _forget(self) -> None:
        self.carrier.connections.pop(self.number, None)
        for lane in self.carrier.link.lanes.values():
            lane.drop(self.number)

    @property
    def known(self) -> bool:
        """Returns whether the connection is still carried."""
        return self.number in self.carrier.connections


class End(asyncio.BufferedProtocol):
    """One socket of a connection: source of one direction's bytes, destination of the other's."""

    def __init__(self, connection: Connection, way: Way) -> None:
        self.waits_for_room = False
        self._connection = connection
        self._way = way
        self._transport: asyncio.Transport | None = None

    # --- what asyncio tells -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Notes that the socket is connected: the client's to us, or ours to the broker."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=WRITE_HIGH_WATER_BYTES)
        if self._way is Way.UP:
            transport.pause_reading()  # until the broker's answer has come back
            self._connection.accepted()
        elif self._connection.known:
            self._connection.offer(Way.DOWN, Mark.OPEN)
        else:
            self.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the buffer to read into, as large as the link has room."""
        room = max(1, min(READ_BYTES, self._connection.room(self._way)))
        return self._connection.carrier.scratch[:room]

    def buffer_updated(self, nbytes: int) -> None:
        """Puts the bytes that were read into the link."""
        if not self._connection.known:
            return
        self._connection.offer(self._way, bytes(self._connection.carrier.scratch[:nbytes]))
        if self._transport is not None and not self._connection.room(self._way):
            self.waits_for_room = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        """Sends the end of this side's bytes through the link; the other direction stays open."""
        if self._connection.known:
            self._connection.offer(self._way, Mark.END)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles a closed socket; if the peer closed it, the other side hears of it through the link."""
        self._transport = None
        self.waits_for_room = False
        if self._connection.known:
            self._connection.offer(self._way, Mark.RESET)

    def pause_writing(self) -> None:
        """Holds the link's direction while the receiver does not keep up."""
        self._hold(True)

    def resume_writing(self) -> None:
        """Releases the link's direction."""
        self._hold(False)
        self._connection.carrier.pump()

    def _hold(self, held: bool) -> None:
        self._connection.carrier.link.lanes[_OTHER[self._way]].hold(self._connection.number, held)

    # --- called by the connection -------------------------------------------------------------------------------

    def resume(self) -> None:
        """Resumes reading."""
        self.waits_for_room = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def write(self, data: bytes) -> None:
        """Writes bytes to this socket, if it is still open."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def write_end(self) -> None:
        """Closes the sending half of this socket."""
        if self._transport is not None and not self._transport.is_closing():
            with contextlib.suppress(OSError):  # it was reset, and asyncio has not yet told us
                self._transport.write_eof()

    def close(self) -> None:
        """Closes the socket after pending writes."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Closes the socket with a reset."""
        if self._transport is None or self._transport.is_closing():
            return
        linger = struct.pack("ii", 1, 0)  # on, for no time: closing sends RST in place of FIN
        with contextlib.suppress(OSError):
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._transport.abort()
