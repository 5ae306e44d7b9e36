"""Simulated connections of ZeroMQ: dialling, the handshake, messages over a stream, the end.

Each :class:`End` is what libzmq's engine and session are. It takes messages out of its socket's pipe as fast as the
link carries them, and puts what arrives into the other pipe while that has room: what has no room stays in the stream,
so the sender's queue fills in the end. Frames are copied as they leave, not before.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import zmq

from ops.virtual.zeromq.network import Network, Stream
from ops.virtual.zeromq.pipe import Pipe

#: The socket, of :mod:`ops.virtual.zeromq.core`.
Core = Any
#: Bytes of what TCP and ZeroMQ say to each other beside messages.
CONTROL_BYTES = 64
#: Wrong keys end a connection for good, as ZeroMQ has it; a key that is not allowed is tried again.
NULL, CURVE = b"NULL", b"CURVE"


class Frame(bytes):
    """A frame that has been received, with what is known of its connection."""

    more = False
    said: dict[Any, Any]

    @property
    def bytes(self) -> bytes:
        """The frame itself."""
        return self

    def get(self, name: int | str) -> Any:
        """Returns a property of the connection; raises ZMQError for an unknown one."""
        if name not in self.said:
            raise zmq.ZMQError(errno.EINVAL)
        return self.said[name]


class Inlet:
    """A pipe that a socket reads, and what is known of where its messages come from."""

    routing_id = b""

    def __init__(self, inbox: Pipe[list[Frame]]) -> None:
        self.inbox = inbox
        self.said: dict[Any, Any] = {}


class End(Inlet):
    """One end of a connection."""

    def __init__(self, core: Core, stream: Stream, dialer: Dialer | None, port: int) -> None:
        self.network: Network = core.context.network
        super().__init__(Pipe(core.option(zmq.RCVHWM), self._has_room))
        self.core, self.stream, self.dialer, self.port = core, stream, dialer, port
        self.host: str = core.context.host
        self.outbox: Pipe[Sequence[Any]] = Pipe(core.option(zmq.SNDHWM), self._was_read)
        self.peer: End
        self.fd = self.network.descriptor(self)
        self.said[zmq.SRCFD] = self.fd
        self.received_bytes = 0
        #: It stands; the server has taken it; the client knows; the handshake is done.
        self.alive, self.met, self.connected, self.shaken = True, False, False, False
        self.deaf = False  # what arrives is swallowed
        self._finishing = self._woken = False
        self._unread: deque[tuple[list[Frame], int] | None] = deque()  # None for the end
        self._under_way_bytes = 0
        core.ends[self.fd] = self

    @property
    def peer_host(self) -> str:
        """The host of the other end."""
        return self.peer.host

    # --- messages ---

    @property
    def full(self) -> bool:
        """Whether the socket may put nothing."""
        return self.outbox.full

    def put(self, frames: Sequence[Any]) -> None:
        """Takes a message of the socket; it is lost if the connection has ended without the socket's notice."""
        if self.outbox.write(frames) and not self._woken:
            self._woken = True
            virtual = self.network.virtual
            virtual.after(virtual.between(self.host, "io", *self.network.io_s), self._pump)

    def _pump(self) -> None:
        self._woken = False
        window = self.stream.link.window_bytes
        while self.alive and self._under_way_bytes < window and (frames := self.outbox.read()) is not None:
            copies = [Frame(each) for each in frames]
            nbytes = sum(map(len, copies))
            self._under_way_bytes += nbytes
            self.stream.send(nbytes + CONTROL_BYTES, partial(self.peer.arrived, copies, nbytes))
        if self._finishing and self.alive and self.outbox.empty:
            self.hang_up()

    def arrived(self, frames: list[Frame], nbytes: int) -> None:
        """A message has come over the stream."""
        if not self.alive:
            self.stream.send(CONTROL_BYTES, self.peer.ended)
        elif not self.deaf:
            self._unread.append((frames, nbytes))
            self._take()

    def _take(self) -> None:
        """Reads from the stream while the socket's pipe has room."""
        while self._unread and self.alive and not (self.inbox.full and not self._finishing):
            message = self._unread.popleft()
            if message is None:
                self.lose()
                return
            frames, nbytes = message
            if self.core.most_bytes and max(map(len, frames)) > self.core.most_bytes:
                self.lose()
                return
            self.received_bytes += nbytes
            if not self._finishing and self.inbox.write(frames):
                self.core.command(partial(self.core.activate, self))
            self.stream.send(0, partial(self.peer.noted, nbytes))

    def noted(self, nbytes: int) -> None:
        """The other end has read so much."""
        self._under_way_bytes -= nbytes
        self._pump()

    def _has_room(self, read: int) -> None:
        self.inbox.told(read)
        self._take()

    def _was_read(self, read: int) -> None:
        self.core.command(partial(self.outbox.told, read))

    # --- handshake ---

    def hello(self) -> None:
        """The client has introduced itself, at the server."""
        client, server = self.peer.core.curve, self.core.curve
        if bool(client.get("serverkey")) != bool(server.get("server")) or (
            server and client.get("serverkey") != server.get("publickey")
        ):
            self.stream.send(CONTROL_BYTES, self.peer.misunderstood)
            self.core.tell(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0)
            self.lose()
        elif self.core.asks:
            self.core.context.ask_zap(client.get("publickey") if server else None, self._answered)
        else:
            self._answered(b"200", b"")

    def _answered(self, status: bytes, user: bytes) -> None:
        if not self.alive:
            return
        if status == b"200":
            self.said["User-Id"] = user.decode()
            self.shake()
            self.stream.send(CONTROL_BYTES, self.peer.shake)
        else:
            self.core.tell(zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400)
            self.stream.send(CONTROL_BYTES, self.peer.refused)
            self.lose()

    def shake(self) -> None:
        """The handshake is done: the socket may send, once it has noticed."""
        if self.alive:
            self.shaken = True
            self.core.command(partial(self.core.attach, self))
            self.core.tell(zmq.EVENT_HANDSHAKE_SUCCEEDED, 0, self)

    def refused(self) -> None:
        """The key is not allowed."""
        if self.alive:
            self.core.tell(zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400, self)

    def misunderstood(self) -> None:
        """The other end speaks something else: ZeroMQ ends this, and does not try again."""
        if self.alive and self.dialer is not None:
            self.dialer.forget()
        self.lose()

    def expire(self) -> None:
        """Gives up a handshake that takes too long."""
        if not self.shaken:
            self.lose()

    # --- end ---

    def hears_nothing(self) -> None:
        """The link carries nothing from now on: that is noticed by silence."""
        core, peer = self.core, self.peer.core
        waits_s = [core.option(zmq.TCP_KEEPALIVE_IDLE, 60) + core.option(zmq.TCP_KEEPALIVE_CNT, 9) * 5.0]
        if core.option(zmq.HEARTBEAT_IVL):
            waits_s.append((core.option(zmq.HEARTBEAT_IVL) + core.option(zmq.HEARTBEAT_TIMEOUT)) / 1000)
        if peer.option(zmq.HEARTBEAT_IVL) and peer.option(zmq.HEARTBEAT_TTL):
            waits_s.append(peer.option(zmq.HEARTBEAT_TTL) / 1000)
        virtual = self.network.virtual
        wait_s = min(waits_s) * virtual.between(self.host, "silence", 0.75, 1.0)
        links = [link for link in (self.stream.link, self.peer.stream.link) if link.cuts]
        since_s = [link.cut_s for link in links]

        def look() -> None:
            if any(link.cuts and link.cut_s == at_s for link, at_s in zip(links, since_s, strict=True)):
                self.lose()

        virtual.after(wait_s, look)

    def ended(self) -> None:
        """The other end has ended the connection: it is noticed behind what came before."""
        self._unread.append(None)
        self._take()

    def lose(self) -> None:
        """The connection is lost, which the socket and its monitor notice."""
        if not self.alive:
            return
        self.hang_up()
        if not self.shaken:
            self.core.tell(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 0, self)
        self.core.tell(zmq.EVENT_DISCONNECTED, self.fd, self)
        self.core.command(partial(self.core.lose, self))
        if self.dialer is not None:
            self.dialer.lost(self)

    def finish(self, linger_ms: int) -> None:
        """The socket is done with it: what is queued is sent for a while."""
        self._finishing = True
        self.core.command(partial(self.core.detach, self))
        if not self.shaken or self.outbox.empty or not linger_ms:
            self.hang_up()
        else:
            self._take()
            self._pump()
            self.network.virtual.after(linger_ms / 1000, self.hang_up)

    def hang_up(self) -> None:
        """Ends the connection; the other end is told behind what is on its way."""
        if self.alive:
            self.alive = False
            self.core.ends.pop(self.fd, None)
            self.network.close(self.fd)
            if self.met:
                self.stream.send(CONTROL_BYTES, self.peer.ended)


class Listener:
    """A bound port."""

    def __init__(self, core: Core, port: int) -> None:
        self._core, self._port = core, port

    def accept(self, client: End, stream: Stream) -> End:
        """Returns the server's end of a new connection."""
        end = End(self._core, stream, None, self._port)
        end.peer, client.peer = client, end
        end.met = client.met = True
        network = end.network
        network.connections[client.fd] = client, end
        self._core.tell(zmq.EVENT_ACCEPTED, end.fd)
        network.virtual.after(self._core.option(zmq.HANDSHAKE_IVL, 30_000) / 1000, end.expire)
        return end


class Dialer:
    """Connects a socket to an address, again and again, until it is stopped."""

    def __init__(self, core: Core, address: str) -> None:
        self._core, self.address = core, address
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._network: Network = core.context.network
        self._end: End | None = None
        self._pause_ms = 0
        self._stopped = False
        self._attempt()

    def _attempt(self) -> None:
        if self._stopped:
            return
        here, network = self._core.context.host, self._network
        up, down = Stream(network, here, self._host), Stream(network, self._host, here)
        end = self._end = End(self._core, up, self, network.virtual.bits(15))
        up.send(CONTROL_BYTES, partial(self._knock, end, down))
        network.virtual.after(self._core.option(zmq.CONNECT_TIMEOUT, 30_000) / 1000, partial(self._refused, end))

    def _knock(self, end: End, down: Stream) -> None:
        listener = self._network.listeners.get((self._host, self._port))
        if listener is None:
            down.send(CONTROL_BYTES, partial(self._refused, end))
        elif end.alive:
            listener.accept(end, down)
            down.send(CONTROL_BYTES, partial(self._connected, end))

    def _refused(self, end: End) -> None:
        if end is self._end and end.alive and not end.shaken and not end.connected:
            end.hang_up()
            self._retry()

    def _connected(self, end: End) -> None:
        if end.alive:
            end.connected = True
            self._pause_ms = 0
            self._core.tell(zmq.EVENT_CONNECTED, end.fd, end)
            end.stream.send(CONTROL_BYTES, end.peer.hello)
            wait_s = self._core.option(zmq.HANDSHAKE_IVL, 30_000) / 1000
            self._network.virtual.after(wait_s, end.expire)

    def lost(self, end: End) -> None:
        """An attempt that got through, or a connection, has ended."""
        if end is self._end and not self._stopped:
            self._retry()

    def _retry(self) -> None:
        self._pause_ms = max(self._core.option(zmq.RECONNECT_IVL, 100), 2 * self._pause_ms)
        self._pause_ms = min(self._pause_ms, self._core.option(zmq.RECONNECT_IVL_MAX, 0) or self._pause_ms)
        self._core.tell(zmq.EVENT_CONNECT_RETRIED, self._pause_ms, self._end)
        self._network.virtual.after(self._pause_ms / 1000, self._attempt)

    def forget(self) -> None:
        """Gives up for good without a word."""
        self._stopped = True
        self._core.dialers.pop(self.address, None)

    def stop(self, linger_ms: int) -> None:
        """Ends the connection or the attempts at one."""
        self._stopped = True
        if self._end is not None and self._end.alive:
            self._end.finish(linger_ms)
