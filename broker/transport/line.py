"""One connection of a client to a broker, replaced when it is lost. Shell."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from broker.base.errors import ConfigError, Unavailable
from broker.process import clocks, logs
from broker.transport.descriptors import forget_unsent
from broker.transport.keys import ClientKeys
from broker.transport.rotation import AddressRotation, addresses_of, host_and_port, is_name, same
from broker.transport.sockets import NOW, READABLE, Context, configure_socket
from broker.wire.headers import Buffer, Limits
from broker.wire.messages import Channel

log = logs.get(__name__)

#: What helps where a broker does not know a key, or not any more.
_NOT_ALLOWED_CURE = (
    "its key was revoked, or never allowed: on the hub `keys list` shows who is let in, `keys allow` adds"
)
#: How long there may be no connection before it is made anew; longer than a handshake takes.
RENEW_AFTER_S = 30.0
#: ZeroMQ says within a moment of a loss that it tries again. If it has not after this long, it never will.
FORGOTTEN_AFTER_S = 1.0
#: While a name's addresses are tried, whoever waits looks this often whether it is the next one's turn.
LOOK_EVERY_S = 0.1

_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


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


class Line:
    """A DEALER socket and its one connection, made anew when ZeroMQ has given it up; raises ConfigError.

    ZeroMQ reconnects after a loss, but not after what it takes for a violation of its own protocol: another security
    mechanism, a stranger on the broker's port, bytes that were damaged on the way. Then it forgets the connection
    without a word. Only its monitor tells such a socket from one that is still trying, which says so at once.

    Of a host's name ZeroMQ would try one address only, and look it up in its own thread. So it is given addresses: the
    name is looked up here, in a thread, and each of its addresses is tried in turn
    (:class:`~broker.transport.rotation.AddressRotation`); ``on_lookup`` is told each time why in vain, or nothing.

    Attributes:
        connections: How many there were, up to now.
        connection: The number of the one that stands, as :meth:`watch` saw it last, from 1; 0 for none.
        reached: Something at the address has taken a connection since the last one that stood, be it in vain.
    """

    def __init__(self, dial: Dial) -> None:
        self.address, self._on_lookup = dial.address, dial.on_lookup
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
        self._direct = dial.context.direct(socket)  # for calls that do not wait
        self._watcher = socket.get_monitor_socket(_WATCHED)
        self._monitor = dial.context.direct(self._watcher)  # it is asked, never waited for
        self._host, self._port = host_and_port(self.address)
        self._rotation = AddressRotation() if is_name(self._host) else None
        self._at = ""  # what ZeroMQ is told to connect to
        self._looking_up = self._closed = self._shut_out = self.reached = False
        self._trying = True
        self._down_since_s = 0.0  # without a connection
        self._fd: int | None = None  # the descriptor of the connection
        self.connections = self.connection = 0
        self._spoken_over = 0  # the number of a connection
        try:
            self.connect(clocks.monotonic())
        except ConfigError:
            self.hang_up(at_once=True)
            raise

    def hang_up(self, *, at_once: bool = False) -> None:
        """Closes the socket; ZeroMQ still sends its queue within the linger time, unless ``at_once``."""
        self._closed = True
        self.socket.disable_monitor()
        self._watcher.close(linger=0)
        self.socket.close(linger=0 if at_once else None)

    def connect(self, now_s: float) -> None:
        """Starts connecting; raises ConfigError if ZeroMQ does not take the address."""
        self._down(now_s)
        self._trying = True
        self._go_on(now_s)

    def _down(self, now_s: float) -> None:
        self.connection, self._down_since_s = 0, now_s

    def watch(self, now_s: float) -> bool:
        """Takes in the monitor's news; makes the connection anew when due, and returns True if it did."""
        self._take_in(now_s)
        if self.connection:
            return False
        if self._rotation is not None and self._rotation.due(now_s):
            self._go_on(now_s)
        patience_s = RENEW_AFTER_S if self._trying else min(RENEW_AFTER_S, FORGOTTEN_AFTER_S)
        if now_s - self._down_since_s < patience_s:
            return False
        self.renew(now_s)
        return True

    def _take_in(self, now_s: float) -> None:
        rotation = self._rotation
        while True:
            try:
                told = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            seen = parse_monitor_message(told)
            if rotation is not None and not same(seen["endpoint"].decode(), self._at):
                continue  # an attempt at another address, which is being given up
            match seen["event"]:
                case zmq.EVENT_CONNECTED:
                    self._fd, self.reached = seen["value"], True
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._shut_out = False
                    self.connections += 1
                    self.connection = self.connections
                    if rotation is not None:
                        rotation.stood()
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # the end of the connection is told besides
                    if not self._shut_out:
                        log.warning("connection.not_allowed", address=self.address, cure=_NOT_ALLOWED_CURE)
                    self._shut_out = True
                case zmq.EVENT_CONNECT_RETRIED:
                    if rotation is not None and self._trying:  # the first after a loss says that ZeroMQ begins to try
                        rotation.failed(now_s)
                    self._trying = True
                case _:
                    if self.connection:
                        self.reached = False
                    if rotation is not None:
                        (rotation.lost if self.connection else rotation.failed)(now_s)
                    self._down(now_s)
                    self._trying, self._fd = False, None

    def renew(self, now_s: float) -> None:
        """Makes the connection anew, whatever has become of the old one and of what was on its way there.

        Until another one stands, the socket would take messages for the old one.
        """
        self._take_in(now_s)  # of the old one: the new one begins with what is seen from now on
        self._give_up()
        self.connect(now_s)

    def _give_up(self) -> None:
        """Has ZeroMQ end the connection, or its attempts at one."""
        if self._fd is not None and self._port:
            forget_unsent(self._fd, self._port)
        self._fd = None
        at, self._at = self._at, ""
        if not at:
            return
        try:
            self.socket.disconnect(at)
        except zmq.ZMQError as err:
            if err.errno != errno.ENOENT:  # which says that ZeroMQ has forgotten it: our very case
                raise

    def _go_on(self, now_s: float) -> None:
        """Tries the next address; where the name is to be looked up first, that begins."""
        if self._rotation is None:
            self._dial(self.address)
            return
        address = self._rotation.next(now_s)
        if address is not None:
            self._dial(address)
        elif not self._looking_up:
            self._looking_up = True
            loop = asyncio.get_running_loop()
            # Not of the loop's own threads: it would wait for them when it ends.
            threading.Thread(target=self._look_up, args=(loop,), name="atoll-name", daemon=True).start()

    def _dial(self, address: str) -> None:
        if address == self._at:
            return  # ZeroMQ is at it
        self._give_up()
        try:
            self.socket.connect(address)
        except zmq.ZMQError as err:
            raise ConfigError("broker", self.address, f"ZeroMQ cannot connect to it: {err}") from err
        self._at, self._trying = address, True

    def _look_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Looks the host's name up; in a thread of its own, where it may take seconds."""
        found, flaw = [], ""
        try:
            found = addresses_of(self._host, self._port)
        except OSError as err:
            flaw = err.strerror or str(err)
        except UnicodeError as err:
            flaw = str(err)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._found, found, flaw)

    def _found(self, addresses: list[str], flaw: str) -> None:
        self._looking_up = False
        if self._closed:
            return
        self._on_lookup(flaw)
        now_s = clocks.monotonic()
        self._take_in(now_s)
        assert self._rotation is not None
        if self.connection:
            return  # meanwhile the address that was tried has answered
        if addresses:
            self._rotation.found(addresses, now_s)
        else:
            self._rotation.unknown(now_s)
        if self._rotation.due(now_s):
            self._go_on(now_s)

    async def changed(self, timeout_s: float) -> None:
        """Returns when :meth:`watch` has something to take in, or to do, or when the time is over."""
        timeout_s = min(timeout_s, self.look_again_s)
        await self._watcher.poll(math.ceil(1000 * timeout_s), zmq.POLLIN)  # type: ignore[call-arg]

    @property
    def look_again_s(self) -> float:
        """Seconds after which :meth:`watch` is to be called again at the latest."""
        return RENEW_AFTER_S if self._rotation is None or self.connection else LOOK_EVERY_S

    # --- messages ---

    def put(self, frames: Sequence[Buffer]) -> bool:
        """Hands frames to the connection that stands, now; returns whether it did; raises Unavailable."""
        if not self.connection:
            return False  # a connection that was given up would still take them for a moment, and lose them
        if self.connection != self._spoken_over:
            self.socket.get(zmq.EVENTS)  # has ZeroMQ notice that the old one is gone: a send looks once in 1 ms
            self._spoken_over = self.connection
        try:
            self._direct.send_multipart(frames, NOW, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as err:
            raise Unavailable(f"sending to {self.address} failed: {err}", definite=True) from err
        return True

    def taken(self) -> list[Any] | None:
        """Takes one message off the socket, if there is one; raises Unavailable if the socket fails."""
        try:
            return self._direct.recv_multipart(NOW, copy=False)
        except zmq.Again:
            return None
        except zmq.ZMQError as err:
            raise Unavailable(f"receiving from {self.address} failed: {err}", definite=True) from err

    @property
    def readable(self) -> bool:
        """Returns True if a message has come."""
        return bool(int(self._direct.get(zmq.EVENTS)) & READABLE)
