"""One channel of a broker, at its client: whole messages in and out of a DEALER socket.

Shell. It decides nothing: what to send, and when to send it again, is up to the cores. What it promises:

* ``send`` never blocks for ever. A message is handed to a live connection, or ``send`` says that it was not.
* ``recv`` never fails because of what a peer sent. What cannot be read is counted and given to a callback.
* Buffers are not copied on their way out, and but once on their way in.

On the bulk channel what is large goes in chunks (:mod:`broker.transport.chunked`), if asked over several connections:
the first one stands for all, and where one of them is lost all are made anew.

A routing id is left to ZeroMQ, which draws a new one per connection: an id of our own would make the broker refuse
our new connection for as long as it believes in the old one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import zmq

from broker.base.errors import LocalProtocolError, RemoteProtocolError, Unavailable, worth_repeating
from broker.chunks.receiving import Refused, key_for
from broker.chunks.sending import is_urgent
from broker.process import clocks, logs
from broker.routing.resending import Carried
from broker.transport.chunked import Chunked
from broker.transport.keys import ClientKeys
from broker.transport.line import Dial, Line
from broker.transport.sockets import IN_A_ROW, Context
from broker.wire.addresses import channel_address
from broker.wire.frames import Origin, Unreadable, decode, encode, peek
from broker.wire.headers import DEFAULT_LIMITS, Buffer, Limits
from broker.wire.messages import Channel, Envelope, kind_of

log = logs.get(__name__)

#: A connection that took nothing is tried again after this, and that a message can go on is looked for as often.
TRY_AGAIN_S, LOOK_S = 0.005, 1.0
#: While other connections are being made, whether they stand is looked at as often.
LOOK_SOON_S = 0.05
#: Chunks taken in between two turns of other tasks.
AT_A_TIME = 4

#: What is done with a message that cannot be read: its error, and what is known of its sender.
OnUnreadable = Callable[[RemoteProtocolError, Origin], None]


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Connections and bytes of an endpoint since it was opened, without ZeroMQ's own bytes."""

    renewals: int = 0  # connections made anew: ZeroMQ had given up, or they delivered nothing
    bytes_up: int = 0
    bytes_down: int = 0


class Endpoint:
    """A client's connection to one channel of a broker.

    ZeroMQ connects in the background, and again after a loss, waiting 0.1 s at first, then ever longer; where it gives
    up, the endpoint connects anew, as long as it is used. Messages that were queued in a connection when it broke
    are gone: the protocol repeats what matters.

    Any number of tasks may send; one task receives.

    Args:
        context: Of the process; it must outlive the endpoint.
        control_address: The broker's; the bulk address follows from it.
        channel: Which of the two to connect to.
        keys: What to connect with; None: without keys.
        limits: Of what is sent and received.
        bulk_wait_s: How long a message waits on the bulk channel before it is begun; on control it never does.
        reconnect_max_s: Longest pause between two attempts to connect.
        connections: That chunks are spread over; the broker is to know of it, or there is one.
        on_unreadable: Told of each message that cannot be read. By default they are counted and logged.

    Attributes:
        no_address: Why the name of the broker's host was not found when it was looked up last; empty: it was.

    Raises:
        ConfigError: If the address is malformed.
    """

    def __init__(
        self,
        context: Context,
        control_address: str,
        channel: Channel,
        *,
        keys: ClientKeys | None = None,
        limits: Limits = DEFAULT_LIMITS,
        bulk_wait_s: float = 5.0,
        reconnect_max_s: float = 5.0,
        connections: int = 1,
        on_unreadable: OnUnreadable | None = None,
    ) -> None:
        self.address = channel_address(control_address, channel)
        self.channel = channel
        self.traffic = Traffic()
        self._limits = limits
        self._wait_s = bulk_wait_s if channel is Channel.BULK else 0.0
        self._on_unreadable = on_unreadable
        self.no_address = ""
        self._unresolved = 0  # lookups of the host's name in vain, one after the other
        self._dial = Dial(
            context=context,
            address=self.address,
            channel=channel,
            keys=keys,
            limits=limits,
            reconnect_max_s=reconnect_max_s,
            on_lookup=self._looked_up,
        )
        self._lines: dict[int, Line] = {}  # by subflow: the first connection, and those that carry chunks beside it
        self._others_of = 0  # the number of the first one when the others were made
        self._connections = connections
        self._looks = 0  # for messages
        self._polls: set[asyncio.Future[Any]] = set()  # of tasks that wait for the sockets
        self._chunked = Chunked(limits, connections - 1) if channel is Channel.BULK else None
        self._full = False  # a bulk connection took nothing: to be tried again in a moment

    async def __aenter__(self) -> Self:
        """Opens the socket and starts connecting; raises ConfigError if ZeroMQ does not take the address."""
        if self._lines:
            raise LocalProtocolError(f"endpoint {self.address} is open already: close it before it is opened again")
        self._lines[0] = Line(self._dial)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the socket; ZeroMQ sends what is queued for at most the channel's linger time.

        Tasks that use the endpoint must have ended: pyzmq cancels what waits on a socket that closes.
        """
        self._end_others()
        line = self._lines.pop(0, None)
        if line is not None:
            line.hang_up()

    async def ready(self, timeout_s: float) -> bool:
        """Waits until a connection stands; returns False when the time is over."""
        return await self.line(False, timeout_s)

    async def line(self, stands: bool, timeout_s: float) -> bool:
        """Waits until the connection is not as ``stands`` says any more; returns True if one stands then.

        As long as this is awaited, a lost connection is noticed at once; otherwise with the next send or receive.
        """
        deadline_s = clocks.monotonic() + timeout_s
        while (line := self._lines.get(0)) is not None:
            connection, left_s = self._look(), deadline_s - clocks.monotonic()
            if bool(connection) != stands or left_s <= 0:
                return bool(connection)
            await line.changed(left_s)
        return False

    @property
    def connection(self) -> int:
        """The number of the connection that stands, from 1; 0 for none."""
        return self._look()

    @property
    def reached(self) -> bool:
        """Whether anything at the address takes connections, be it in vain: another protocol, or no such key."""
        self._look()
        return bool(self._lines) and self._lines[0].reached

    @property
    def carried(self) -> Carried | None:
        """Returns what the bulk connection has carried; None without one."""
        connection = self._look()
        return self._chunked.carried(connection) if connection and self._chunked is not None else None

    def renew(self) -> None:
        """Ends the connection, which may stand and yet deliver nothing, and makes another one."""
        if self._lines:
            self._lines[0].renew(clocks.monotonic())
            self.traffic.renewals += 1

    async def send(self, envelope: Envelope, *, over: int | None = None) -> bool:
        """Hands a message to the connection; returns whether one took it, which does not mean that it arrives.

        With no connection, or at the high-water mark, a control message is dropped at once. A bulk message waits: for a
        connection and its turn at most ``bulk_wait_s``; once its first chunk has gone, for the link, as long as the
        connection stands. If that is not the number ``over``, it is dropped. Buffers are sent from where they are: they
        must not be written to until the broker's or aggregator's answer shows that they have arrived.

        Raises:
            LocalProtocolError: If the message belongs on the other channel, exceeds the limits or does not encode.
            Unavailable: If the socket fails.
        """
        kind = kind_of(envelope.message)
        if envelope.message.channel is not self.channel:
            raise LocalProtocolError(f"{kind} belongs on the {envelope.message.channel} channel, not on {self.channel}")
        frames, nbytes = encode(envelope), envelope.nbytes
        if len(frames[0]) > self._limits.max_header_bytes:
            most = f"{len(frames[0])} bytes of header, at most {self._limits.max_header_bytes} are taken"
            raise LocalProtocolError(f"{kind} has {most}: a model of fewer tensors has shorter ones")
        if nbytes > self._limits.max_message_bytes:
            cure = f"raise max_message_bytes to {nbytes} at every broker, aggregator and island"
            raise LocalProtocolError(f"{kind} has {nbytes} bytes, which every peer would refuse: {cure}")
        deadline_s = clocks.monotonic() + self._wait_s
        while not (connection := self._look()) and over is None:
            left_s = deadline_s - clocks.monotonic()
            if left_s <= 0:
                return False
            await self.line(False, left_s)
        if over not in (None, connection):
            return False
        if self._chunked is None:
            return self._put(frames)
        chunked, urgent, key = self._chunked, is_urgent(envelope.message), key_for(envelope.message, nbytes)
        transfer = chunked.put(frames, urgent=urgent, key=key)
        self._send_on(chunked)
        while not transfer.done:
            now_s = clocks.monotonic()
            if self._look() != connection or (now_s >= deadline_s and chunked.flow.out.withdraw(transfer)):
                return False
            if chunked.stalled(now_s):
                self.renew()
                return False
            if self._full or not chunked.has_room:
                await asyncio.sleep(TRY_AGAIN_S)
            else:
                await self._poll(LOOK_S)
            self._take_in(chunked)
        return True

    def _send_on(self, chunked: Chunked) -> None:
        """Hands over what may go in chunks: answers, credit, messages."""
        now_s, full = clocks.monotonic(), set[int]()
        while (step := chunked.flow.out.next(full)) is not None:
            if self._put(step.frames, step.subflow):
                chunked.flow.out.sent(step, now_s)
            else:
                full.add(step.subflow)
            if not self._look():  # what belongs to one connection must not go over the next
                full.clear()  # without one there is nothing to try again
                break
        self._full = bool(full)

    def _put(self, frames: Sequence[Buffer], subflow: int = 0) -> bool:
        """Hands frames to a connection that stood just now; returns whether it took them."""
        line = self._lines.get(subflow)
        if line is None or not line.put(frames):
            return False
        self.traffic.bytes_up += sum(map(len, frames))
        if self._polls and line.readable:  # the send may have taken in what was announced to them
            self._look_again()
        return True

    async def recv(self, timeout_s: float) -> Envelope | None:
        """Returns the next message; None when the time is over, or when what came could not be read.

        Checksums are not looked at: see :func:`broker.wire.frames.verify`.

        Raises:
            Unavailable: If the socket fails.
        """
        deadline_s = clocks.monotonic() + timeout_s
        while True:
            # What is there is returned without a pause; under a steady stream nobody else would ever run.
            self._looks += 1
            if self._looks % IN_A_ROW[self.channel] == 0:
                await asyncio.sleep(0)
                self._look()
            if not self._lines:
                raise LocalProtocolError(f"endpoint {self.address} is closed: use it inside `async with`")
            chunked, more = self._chunked, False
            # Taken before it is polled: a poll takes three turns of the loop, even if it finds something.
            if chunked is None:
                frames = self._lines[0].taken()
                if frames is not None:
                    self.traffic.bytes_down += sum(map(len, frames))
                    return self._read(frames)
            else:
                more = not chunked.arrived and self._take_in(chunked)
                if chunked.stalled(clocks.monotonic()):
                    self.renew()
                if chunked.arrived:
                    return self._read(chunked.arrived.popleft())
            left_s = max(0.0, deadline_s - clocks.monotonic())
            wait_s = min(left_s, TRY_AGAIN_S) if self._full else left_s
            if not (more and left_s) and not await self._poll(wait_s) and wait_s == left_s:
                return None

    def _take_in(self, chunked: Chunked) -> bool:
        """Takes in chunks of all bulk connections, while messages find room; sends as much as may go.

        Returns:
            Whether anything was there.
        """
        now_s, taken = clocks.monotonic(), False
        self._look()
        for subflow, line in list(self._lines.items()):
            for _ in range(AT_A_TIME):  # chunks of a large message may come as fast as they are taken
                # A look may have ended this connection: when the first is lost, all end.
                here = chunked.has_room and self._lines.get(subflow) is line
                frames = line.taken() if here else None
                if frames is None:
                    break
                taken = True
                self.traffic.bytes_down += sum(map(len, frames))
                # Asked behind the message: what came over a new connection is not taken for the old one's.
                self._look()
                if self._lines.get(subflow) is line:
                    chunked.take_in(frames, now_s, subflow)
        self._send_on(chunked)
        self._look_after_others(chunked)
        if taken:
            self._look_again()
        return taken

    def _read(self, frames: Sequence[Buffer] | Refused) -> Envelope | None:
        """Returns a message; None where it cannot be read."""
        try:
            if isinstance(frames, Refused):
                raise frames.error
            return decode(frames, self._limits)
        except RemoteProtocolError as error:
            header = frames.header if isinstance(frames, Refused) else list(frames)
            origin = error.origin if isinstance(error, Unreadable) else peek(header, self._limits)
            if self._on_unreadable is not None:
                self._on_unreadable(error, origin)
            else:
                wrong = {"reason": error.reason, "field": error.field, "got": error.got}
                log.warning("message.unreadable", address=self.address, sender=origin.sender, kind=origin.kind, **wrong)
            return None

    async def _poll(self, timeout_s: float) -> bool:
        """Waits until there is something to read, and looks after the connections meanwhile.

        ZeroMQ announces what comes to an empty queue, and nothing more before somebody has found that empty again. A
        task that takes some messages and then waits for no more would leave the others asleep beside what it has left.
        """
        deadline_s = clocks.monotonic() + timeout_s
        while True:
            self._look()
            if self._chunked is not None:
                self._look_after_others(self._chunked)
            left_s, poller = deadline_s - clocks.monotonic(), self._dial.context.poller()
            for subflow, line in self._lines.items():
                left_s = min(left_s, line.look_again_s if line.connection or not subflow else LOOK_SOON_S)
                poller.register(line.socket, zmq.POLLIN)
            # Polling with a time limit, then receiving, loses nothing; cancelling a receive can lose a message.
            try:
                polling: Any = poller.poll(max(0, math.ceil(1000 * left_s)))
                self._polls.add(polling)
                try:
                    if await polling:
                        return True
                finally:
                    self._polls.discard(polling)
            except zmq.ZMQError as err:
                raise Unavailable(f"polling {self.address} failed: {err}", definite=True) from err
            if clocks.monotonic() >= deadline_s:
                return False

    def _look_again(self) -> None:
        """Wakes all that poll: another task has taken something off a socket, or the sockets are to be others."""
        for polling in self._polls:
            if not polling.done():
                polling.set_result([None])

    def _looked_up(self, flaw: str) -> None:
        self._unresolved = self._unresolved + 1 if flaw else 0
        if worth_repeating(self._unresolved):
            cure = "check the name in the address, and the name service of this machine; it is looked up again"
            log.warning("connection.no_address", address=self.address, detail=flaw, cure=cure, times=self._unresolved)
        self.no_address = flaw

    def _look(self) -> int:
        """Looks after the connections; returns the number of the one that stands, 0 for none."""
        line, now_s = self._lines.get(0), clocks.monotonic()
        if line is None:
            return 0
        if line.watch(now_s):
            self.traffic.renewals += 1
            if worth_repeating(self.traffic.renewals):
                cure = "start the broker there, or check the address, and the keys on both sides"
                event, more = ("connection.renewed", {}) if line.connections else ("connection.none", {"cure": cure})
                log.warning(event, address=self.address, **more, times=self.traffic.renewals)
        if len(self._lines) > 1 and line.connection != self._others_of:
            self._end_others()
        for subflow, other in self._lines.items():
            if subflow:
                other.watch(now_s)
        chunked = self._chunked
        if chunked is not None and line.connection and line.connection != chunked.connection:
            chunked.over(line.connection, now_s)
        return line.connection

    def _look_after_others(self, chunked: Chunked) -> None:
        """Makes the connections that carry chunks beside the first, once the broker knows of that."""
        if self._connections == 1 or not (connection := self._look()):
            return
        standing = {subflow: line.connection for subflow, line in self._lines.items()}
        for subflow, bond in chunked.due(standing):
            if self._put([bond], subflow):
                chunked.said(subflow, standing[subflow])
        if chunked.bonding.torn(standing):
            log.info("connection.torn", address=self.address, connections=self._connections)
            self.renew()
        elif chunked.bonding.wants_others and len(self._lines) == 1:
            self._lines |= {subflow: Line(self._dial) for subflow in range(1, self._connections)}
            self._others_of = connection
            self._look_again()  # those that wait are to wait for these, too

    def _end_others(self) -> None:
        self._look_again()  # a socket that closes cancels those that still poll it
        for subflow in list(self._lines)[1:]:
            self._lines.pop(subflow).hang_up(at_once=True)
