"""Takes messages off the broker's sockets as events of the relay, and sends them in their turn. Shell."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from broker.base.errors import RemoteProtocolError
from broker.chunks.receiving import Refused
from broker.process import clocks
from broker.process.release import refusal_detail
from broker.routing.events import Received, Rejected, Send
from broker.transport.sockets import Context
from broker.wire.frames import Origin, Unreadable, decode, peek, verify
from broker.wire.headers import Limits
from broker.wire.messages import Channel, Probe, Reason, Version, kind_of

#: A message with so many frames too many is no mistake: its connection is ended.
FLOOD_FRAMES = 1_000
#: Frames thrown away between two pauses.
_SLICE = 2_000
#: The checksums of versions below this are looked at on the spot: it takes less than 1 ms, at 5 to 15 GB/s.
VERIFY_HERE_BYTES = 4 << 20
#: So many bulk messages of one event go at once.
AT_ONCE = 8


def said_of(frame: zmq.Frame, name: int | str) -> Any:
    """Returns ZeroMQ's value for the connection of a frame, such as its descriptor; None if it has none.

    Of a peer that speaks ZMTP 1.0 or 2.0 it says nothing at all, and asking it is an error.
    """
    try:
        return frame.get(name)
    except zmq.ZMQError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One message off a ROUTER.

    Attributes:
        peer: Routing id of its connection.
        frames: The first ones, as many as a message may have; of one in chunks all, once it is whole.
        surplus: How many more there were.
        fd: Descriptor of its connection, if ZeroMQ says it.
    """

    peer: bytes
    frames: list[Any]
    surplus: int = 0
    fd: int | None = None


class Intake:
    """Takes messages off one ROUTER, with a limit on frames.

    pyzmq's own ``recv_multipart`` takes whatever a peer puts into one message: a million empty frames, two megabytes on
    the wire, held the broker up for 24 s. Here the surplus is thrown away as it comes, with pauses in which others are
    served: beside a million frames the slowest heartbeat took 0.12 s.

    Args:
        context: Of the socket.
        socket: Nobody else may receive from it.
        most_frames: Of a message, behind the routing id.
        in_a_row: After so many messages others have their turn.
        drained: Called when there is no message to take.
        flooded: Called with the descriptor by which a message with far too many frames is still coming.
    """

    def __init__(
        self,
        context: Context,
        socket: zmq.asyncio.Socket,
        *,
        most_frames: int,
        flooded: Callable[[int | None], None],
        drained: Callable[[], None] = lambda: None,
        in_a_row: int = 1,
    ) -> None:
        self._socket = socket
        # Behind the first frame the others are there already: they are taken without a future for each.
        self._direct: zmq.Socket[Any] = context.direct(socket)
        self._most_frames = most_frames
        self._flooded, self._drained = flooded, drained
        self._in_a_row, self._taken = in_a_row, 0

    async def take(self) -> Taken:
        """Returns the next message."""
        # One that is there already is returned without a pause; without one here, the busier socket would keep the
        # other from being read.
        self._taken += 1
        if self._taken % self._in_a_row == 0:
            await asyncio.sleep(0)
        try:
            route: zmq.Frame = self._direct.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._drained()
            route = await self._socket.recv(copy=False)
        frames: list[zmq.Frame] = []
        more = route.more
        while more and len(frames) < self._most_frames:
            frame = self._direct.recv(zmq.NOBLOCK, copy=False)
            frames.append(frame)
            more = frame.more
        fd = said_of(frames[0], zmq.SRCFD) if frames else None
        surplus = await self._throw_away(fd) if more else 0
        return Taken(peer=route.bytes, frames=frames, surplus=surplus, fd=fd)

    async def _throw_away(self, fd: int | None) -> int:
        surplus = 0
        while True:
            self._direct.recv(zmq.NOBLOCK)
            surplus += 1
            if surplus == FLOOD_FRAMES:
                self._flooded(fd)
            if not self._direct.get(zmq.RCVMORE):
                return surplus
            if surplus % _SLICE == 0:
                await asyncio.sleep(0)


async def event_of(channel: Channel, taken: Taken, limits: Limits, key: str) -> Received | Rejected:
    """Decodes what came, as far as the header; buffers stay the views of frames that they are.

    Those of a version are checked, too: what a broker keeps is served again and again, and must not be what a line has
    damaged. Its aggregator publishes a version that is rejected again. A probe comes with the time.
    """
    frames, origin = taken.frames, None
    try:
        if taken.surplus:
            got, most = len(frames) - 1 + taken.surplus, f"at most {limits.max_buffers}"
            raise RemoteProtocolError(Reason.OVERSIZE, field="number of buffers", got=got, expected=most)
        envelope = decode(frames, limits)
        origin = Origin(kind=kind_of(envelope.message), sender=envelope.sender, sequence=envelope.sequence)
        if isinstance(envelope.message, Version):
            if envelope.nbytes < VERIFY_HERE_BYTES:
                verify(envelope)
            else:
                await asyncio.to_thread(verify, envelope)  # which lets go of the interpreter meanwhile
    except RemoteProtocolError as err:
        origin = err.origin if isinstance(err, Unreadable) else origin or peek(frames, limits)
        return _rejected(channel, taken.peer, key, err, origin)
    wall_s = clocks.wall() if isinstance(envelope.message, Probe) else 0.0
    return Received(
        channel=channel, peer=taken.peer, envelope=envelope, size_bytes=envelope.nbytes, key=key, wall_s=wall_s
    )


def refused(channel: Channel, taken: Taken, what: Refused, limits: Limits, key: str) -> Rejected:
    """Turns chunks that are not taken in into an event."""
    return _rejected(channel, taken.peer, key, what.error, peek(what.header, limits))


def _rejected(channel: Channel, peer: bytes, key: str, err: RemoteProtocolError, origin: Origin) -> Rejected:
    return Rejected(
        channel=channel,
        peer=peer,
        key=key,
        reason=Reason(err.reason),
        detail=refusal_detail(err),
        kind=origin.kind,
        sequence=origin.sequence,
        sender=origin.sender,
    )


class Outbox:
    """Bulk messages that one event makes by the hundred: most wait for their turn, in order for each peer.

    A version goes to every island of a fleet. To hand a thousand over at once held up the broker for 0.2 to 0.5 s, and
    what the islands answered, all at the same time, for another second. A few go at once; of the rest one goes in each
    turn of the event loop, in which a message of each channel is taken in too. So answers are read as they come.
    """

    def __init__(self) -> None:
        self._waiting: deque[Send] = deque()
        self._peers: Counter[bytes] = Counter()
        self._some = asyncio.Event()

    def keeps(self, send: Send, number: int) -> bool:
        """Returns whether a message waits here: the first of an event do not, unless others to their peer do.

        Those that one event has made are numbered from 1.
        """
        if number <= AT_ONCE and not self._peers[send.peer]:
            return False
        self._waiting.append(send)
        self._peers[send.peer] += 1
        self._some.set()
        return True

    async def run(self, send: Callable[[Send], None]) -> None:
        """Sends one message in each turn of the loop, until cancelled."""
        while True:
            await self._some.wait()
            while self._waiting:
                next_ = self._waiting.popleft()
                self._peers[next_.peer] -= 1
                send(next_)
                await asyncio.sleep(0)
            self._peers.clear()
            self._some.clear()
