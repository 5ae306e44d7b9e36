"""What goes over each bulk connection of a broker: messages out in chunks, and chunks in. Pure but for ``put``.

A connection has an entry here from its first large message on. What is put into it waits for the credit of the other
end, a few messages at most; beyond that the relay keeps them (:class:`~broker.routing.events.Blocked`), and hears when
there is room again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

from broker.chunks import heads
from broker.chunks.receiving import Inflow, Refused
from broker.chunks.sending import Outflow, is_urgent
from broker.routing.events import Blocked, Delivered, Room, Send, Unreachable
from broker.wire.codec import encode
from broker.wire.errors import RemoteProtocolError
from broker.wire.headers import Buffer, Limits
from broker.wire.messages import Channel

T = TypeVar("T", Blocked, Unreachable)

#: Messages that may wait in a connection; the relay knows better what is worth sending.
MOST_WAITING = 4


class Put(Enum):
    """What has become of frames that were to be handed to a connection."""

    TAKEN = auto()
    FULL = auto()  #: it takes none now: to be tried again in a moment
    GONE = auto()  #: there is no such connection


@dataclass(slots=True)
class _Flow:
    incoming: Inflow
    out: Outflow = field(default_factory=Outflow)
    blocked: bool = False  # the relay waits for room
    owes_credit: bool = False


class Flows:
    """All bulk connections, by routing id.

    Args:
        put: Hands frames to a connection.
        limits: Of what comes.

    Attributes:
        full: Connections that took nothing: to be tried again with :meth:`go_on` in a moment.
    """

    def __init__(self, put: Callable[[bytes, Sequence[Buffer]], Put], limits: Limits) -> None:
        self._put, self._limits = put, limits
        self._flows: dict[bytes, _Flow] = {}
        self._behind: dict[int, bytes] = {}  # routing id by descriptor
        self.full: set[bytes] = set()

    # --- in ---

    def take(self, peer: bytes, fd: int | None, frames: list[Buffer], now_s: float) -> list[Buffer] | Refused | None:
        """Takes in what came over a connection; :meth:`go_on` is to follow.

        Returns:
            A message that is whole, or why what came is not taken in; None for what is no message yet, or none.
        """
        if fd is not None and self._behind.get(fd) != peer:
            self.ended(fd)
            self._behind[fd] = peer
        first = memoryview(frames[0]).cast("B") if frames else memoryview(b"")
        if not heads.is_head(first):
            return frames
        try:
            head = heads.read(first)
        except RemoteProtocolError as err:
            return Refused(err, [])
        flow = self._of(peer)
        if isinstance(head, heads.Credit):
            flow.out.credited(head, now_s)
            return None
        flow.owes_credit = True
        return flow.incoming.take(head, frames[1:])

    def ended(self, fd: int) -> list[Unreachable]:
        """A connection has ended: what was on its way over it is lost."""
        peer = self._behind.pop(fd, None)
        return [] if peer is None else self._lost(peer)

    # --- out ---

    def send(self, send: Send, now_s: float) -> list[Blocked | Unreachable]:
        """Takes a message in, and sends what may go; returns what could not be."""
        flow, urgent = self._of(send.peer), is_urgent(send.envelope.message)
        if len(flow.out) >= MOST_WAITING and not urgent:
            flow.blocked = True
            return [_failed(Blocked, send)]
        flow.out.put(encode(send.envelope), send, urgent=urgent)
        return [event for event in self.go_on(send.peer, now_s) if isinstance(event, Blocked | Unreachable)]

    def go_on(self, peer: bytes, now_s: float) -> list[Blocked | Unreachable | Delivered | Room]:
        """Sends what may go over a connection: credit, then messages; returns what has become of messages."""
        flow = self._flows.get(peer)
        self.full.discard(peer)
        if flow is None:
            return []
        if flow.owes_credit:
            outcome = self._put(peer, [flow.incoming.credit.packed()])
            flow.owes_credit = outcome is Put.FULL
        while (step := flow.out.next()) is not None:
            outcome = self._put(peer, step.frames)
            if outcome is Put.GONE:
                return list(self._lost(peer))
            if outcome is Put.FULL:
                self.full.add(peer)
                break
            flow.out.sent(step, now_s)
        if flow.owes_credit:
            self.full.add(peer)
        sent = [each.what for each in flow.out.delivered()]
        events: list[Blocked | Unreachable | Delivered | Room] = [
            Delivered(channel=Channel.BULK, peer=peer, envelope=each.envelope)
            for each in sent
            if isinstance(each, Send)
        ]
        if flow.blocked and len(flow.out) < MOST_WAITING:
            flow.blocked = False
            events.append(Room(channel=Channel.BULK, peer=peer))
        return events

    def stalled(self, now_s: float) -> list[int]:
        """Returns the descriptors of connections over which nothing is noted any more: they are to be ended.

        A byte that was damaged on the way may have the other end wait for a frame that nobody sends.
        """
        return [
            fd
            for fd, peer in self._behind.items()
            if peer in self._flows and self._flows[peer].out.silent_s(now_s) > self._flows[peer].out.patience_s
        ]

    def _of(self, peer: bytes) -> _Flow:
        flow = self._flows.get(peer)
        if flow is None:
            incoming = Inflow(most_bytes=self._limits.max_message_bytes, most_frames=self._limits.max_buffers + 1)
            flow = self._flows[peer] = _Flow(incoming)
        return flow

    def _lost(self, peer: bytes) -> list[Unreachable]:
        flow = self._flows.pop(peer, None)
        self.full.discard(peer)
        waiting = [] if flow is None else [each.what for each in flow.out.unsent()]
        return [_failed(Unreachable, send) for send in waiting if isinstance(send, Send)]


def _failed(event: type[T], send: Send) -> T:
    return event(channel=send.channel, peer=send.peer, envelope=send.envelope, size_bytes=send.size_bytes)
