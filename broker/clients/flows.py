"""The bulk connections of a broker: sends messages in chunks, takes in chunks. Pure but for ``put``.

A connection has an entry here from its first large message on. What is put into it waits for the credit of the other
end, a few messages at most; beyond that the relay keeps them (:class:`~broker.routing.events.Blocked`), and hears when
there is room again.

Several connections may carry the chunks of one flow. The first stands for it, under a number that its client has drawn;
one that names the number later, and came under the same key, belongs to it. For everybody else they are one, the first
of them, and they end together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeVar

from broker.base.errors import RemoteProtocolError
from broker.chunks import chunk_heads
from broker.chunks.partial_messages import PartialMessages, key_for
from broker.chunks.receiving import Inflow, Refused
from broker.chunks.sending import Outflow, is_urgent
from broker.chunks.subflow import MOST_SUBFLOWS
from broker.routing.events import Blocked, Delivered, Room, Send, Unreachable
from broker.wire.frames import encode
from broker.wire.headers import Buffer, Limits
from broker.wire.messages import Channel

T = TypeVar("T", Blocked, Unreachable)

#: Messages that may wait in a connection; the relay knows better what is worth sending.
MOST_WAITING = 4
#: Payloads that are remembered to have been begun: one is asked about in vain where it is another connection's.
MOST_BEGUN = 256
#: Connections that have ended are remembered, so many: what ZeroMQ had taken in of one may be read after its end.
MOST_GONE = 4096


class Put(Enum):
    """The outcome of handing frames to a connection."""

    TAKEN = auto()
    FULL = auto()  #: it takes none now: to be tried again in a moment
    GONE = auto()  #: there is no such connection


@dataclass(slots=True)
class _Flow:
    incoming: Inflow
    out: Outflow = field(default_factory=Outflow)
    key: str = ""  # the public key that it came under
    heard_s: float = 0.0  # its latest chunk
    counted_bytes: int = 0  # what is here of its message that is not whole, as counted for all flows
    given_up: bool = False  # that message was; the connection is to be ended, so that it is sent again
    blocked: bool = False  # the relay waits for room
    owes_credit: set[int] = field(default_factory=set)  # by subflow
    owed: list[tuple[int, bytes]] = field(default_factory=list)  # answers, by subflow: of others that of a bond alone


class Bonds:
    """The flows of several connections, by routing id of the first."""

    def __init__(self) -> None:
        self._firsts: dict[tuple[str, int], bytes] = {}  # by key and number
        self._names: dict[bytes, tuple[str, int]] = {}  # the other way round
        self._others: dict[bytes, dict[int, bytes]] = {}  # by first and subflow
        self._part_of: dict[bytes, tuple[bytes, int]] = {}  # by other

    def place_of(self, peer: bytes) -> tuple[bytes, int]:
        """Returns the first connection of a flow, and which of its connections this one is; 0 is the first."""
        return self._part_of.get(peer, (peer, 0))

    def route(self, first: bytes, subflow: int) -> bytes:
        """Returns a connection of a flow."""
        return self._others[first][subflow] if subflow else first

    def bind(self, peer: bytes, bond: chunk_heads.Bond, key: str) -> bool:
        """Handles a connection's introduction, under a public key; returns whether it is accepted."""
        name = key, bond.nonce
        if bond.subflow == 0:
            if name in self._firsts or peer in self._names or peer in self._part_of:
                return False
            self._firsts[name], self._names[peer], self._others[peer] = peer, name, {}
            return True
        first = self._firsts.get(name)
        if first is None or peer in self._names or peer in self._part_of:
            return False
        if bond.subflow >= MOST_SUBFLOWS or bond.subflow in self._others[first]:
            return False
        self._others[first][bond.subflow] = peer
        self._part_of[peer] = first, bond.subflow
        return True

    def end(self, first: bytes) -> list[bytes]:
        """Forgets a flow; returns its connections, the first among them."""
        name = self._names.pop(first, None)
        if name is not None:
            del self._firsts[name]
        others = list(self._others.pop(first, {}).values())
        for each in others:
            del self._part_of[each]
        return [first, *others]


class Flows:
    """All bulk connections, by routing id.

    Args:
        put: Hands frames to a connection.
        limits: Of what comes.
        most_bytes: Of all messages that are not whole, or 0: what the largest takes. Beyond that, what connections have
            left that ended is forgotten, and then the message that has been silent the longest.

    Attributes:
        full: Connections that took nothing: to be tried again with :meth:`go_on` in a moment.
    """

    def __init__(self, put: Callable[[bytes, Sequence[Buffer]], Put], limits: Limits, most_bytes: int = 0) -> None:
        self._put, self._limits = put, limits
        self._most_bytes = max(most_bytes, limits.max_message_bytes)
        self._partial_bytes = self._kept_bytes = 0
        self._flows: dict[bytes, _Flow] = {}
        self._bonds = Bonds()
        self._behind: dict[int, bytes] = {}  # routing id by descriptor
        self._overtaken: Counter[int] = Counter()  # descriptors that others have, while an end is yet to be told
        self._gone: dict[bytes, None] = {}  # routing ids of connections that have ended, the latest last
        self._kept: dict[str, PartialMessages] = {}  # by public key
        self._begun: dict[int, None] = {}  # payloads that connections which ended have sent in part, the latest last
        self._untold: list[Unreachable] = []  # what the relay is yet to hear
        self.full: set[bytes] = set()

    def first_of(self, peer: bytes) -> bytes:
        """Returns the connection that stands for a flow, by any of its connections."""
        return self._bonds.place_of(peer)[0]

    def take(
        self, peer: bytes, fd: int | None, frames: list[Buffer], now_s: float, key: str = ""
    ) -> list[list[Buffer] | Refused]:
        """Handles frames from a connection, under a public key; call :meth:`go_on` after it.

        Returns:
            The messages that are whole now, and why something is not taken in.
        """
        first = memoryview(frames[0]).cast("B") if frames else memoryview(b"")
        chunked = chunk_heads.is_head(first)
        if peer in self._gone:  # what was still to be read of a connection when its end was told
            return [] if chunked else [frames]
        if fd is not None and (known := self._behind.get(fd)) != peer:
            if known is not None:  # its end has not been told yet
                self._overtaken[fd] += 1
                self._untold += self._lost(known, now_s)
            self._behind[fd] = peer
        if not chunked:
            return [frames]
        try:
            head = chunk_heads.read(first)
        except RemoteProtocolError as err:
            return [Refused(err, [])]
        if isinstance(head, chunk_heads.Bond):
            self._bind(peer, head, key)
            return []
        main, subflow = self._bonds.place_of(peer)
        flow = self._of(main)
        flow.key = key
        match head:
            case chunk_heads.Credit():
                flow.out.credited(head, now_s, subflow)
            case chunk_heads.Resume():
                flow.out.resume(head)
            case chunk_heads.Ask() | chunk_heads.Chunk():
                flow.owes_credit.add(subflow)
                kept = self._kept.get(key)
                before = kept.nbytes if kept is not None else 0
                answers, found = flow.incoming.take_in(head, frames[1:], kept, subflow)
                self._kept_bytes += kept.nbytes - before if kept is not None else 0
                flow.owed += [(0, each) for each in answers]
                self._count(flow, now_s)
                return found
        return []

    def _bind(self, peer: bytes, bond: chunk_heads.Bond, key: str) -> None:
        """A connection says that it is one of several; it is told so where it is from now on."""
        has_carried = bond.subflow > 0 and peer in self._flows  # a flow of its own, which would be left behind
        if has_carried or not self._bonds.bind(peer, bond, key):
            return
        flow = self._of(self.first_of(peer))
        if bond.subflow:
            flow.incoming.spread(bond.subflow)
        flow.owed.append((bond.subflow, chunk_heads.packed(bond)))

    @property
    def partial_bytes(self) -> int:
        """Bytes of messages that are not whole, also of those that connections have left which ended."""
        return self._partial_bytes + self._kept_bytes

    def _count(self, flow: _Flow, now_s: float) -> None:
        """Counts bytes from a connection, and frees memory if they are too many."""
        flow.heard_s = now_s
        self._recount(flow, flow.incoming.partial_bytes)
        if self.partial_bytes > self._most_bytes:
            self._kept, self._kept_bytes = {}, 0
        while self._partial_bytes > self._most_bytes:
            silent = min((each for each in self._flows.values() if each.counted_bytes), key=lambda each: each.heard_s)
            silent.incoming.give_up()
            silent.given_up = True
            self._recount(silent, 0)

    def _recount(self, flow: _Flow, nbytes: int) -> None:
        self._partial_bytes += nbytes - flow.counted_bytes
        flow.counted_bytes = nbytes

    def ended(self, fd: int, now_s: float) -> list[Unreachable]:
        """Handles the end of a connection: messages under way are lost; received chunks stay for the next one."""
        if self._overtaken[fd]:
            self._overtaken[fd] -= 1
            return []
        peer = self._behind.pop(fd, None)
        return [] if peer is None or peer in self._gone else self._lost(peer, now_s)

    def send(self, send: Send, now_s: float) -> list[Blocked | Unreachable | Delivered | Room]:
        """Queues a message and sends what credit allows; returns the outcomes of messages."""
        if send.peer in self._gone:
            return [_failed(Unreachable, send)]
        flow, urgent = self._of(send.peer), is_urgent(send.envelope.message)
        if len(flow.out) >= (2 * MOST_WAITING if urgent else MOST_WAITING):
            flow.blocked = True
            return [_failed(Blocked, send)]
        key = key_for(send.envelope.message, send.size_bytes)
        flow.out.put(encode(send.envelope), send, urgent=urgent, key=key, asks=key in self._begun)
        return self.go_on(send.peer, now_s)

    def go_on(self, peer: bytes, now_s: float) -> list[Blocked | Unreachable | Delivered | Room]:
        """Sends a flow's credit, then its messages, as far as they may go; returns the events that result."""
        peer = self.first_of(peer)
        flow = self._flows.get(peer)
        self.full.discard(peer)
        events: list[Blocked | Unreachable | Delivered | Room] = [*self._untold]
        self._untold = []
        if flow is None:
            return events
        while flow.owed:
            subflow, answer = flow.owed[0]
            if self._put(self._bonds.route(peer, subflow), [answer]) is Put.FULL:
                break
            del flow.owed[0]
            if subflow:  # it knows now that chunks may come over it
                flow.out.spread(subflow)
        for subflow in tuple(flow.owes_credit):
            credit = chunk_heads.packed(flow.incoming.credit(subflow))
            if self._put(self._bonds.route(peer, subflow), [credit]) is not Put.FULL:
                flow.owes_credit.discard(subflow)
        while (step := flow.out.next()) is not None:
            outcome = self._put(self._bonds.route(peer, step.subflow), step.frames)
            if outcome is Put.GONE:
                return [*events, *self._lost(peer, now_s)]
            if outcome is Put.FULL:
                self.full.add(peer)
                break
            flow.out.sent(step, now_s)
        if flow.owes_credit or flow.owed:
            self.full.add(peer)
        sent = [each.what for each in flow.out.delivered() if isinstance(each.what, Send)]
        events += [Delivered(channel=Channel.BULK, peer=peer, envelope=each.envelope) for each in sent]
        if flow.blocked and len(flow.out) < MOST_WAITING:
            flow.blocked = False
            events.append(Room(channel=Channel.BULK, peer=peer))
        return events

    def stalled(self, now_s: float) -> list[int]:
        """Returns the descriptors of connections over which nothing is noted any more: they are to be ended.

        A byte that was damaged on the way may have the other end wait for a frame that nobody sends. So are those of
        which a message was given up: their other end sends it again. And those of a flow that another one has ended.
        """
        return [fd for fd, peer in self._behind.items() if peer in self._gone or self._stalls(peer, now_s)]

    def _stalls(self, peer: bytes, now_s: float) -> bool:
        flow = self._flows.get(self.first_of(peer))
        if flow is None:
            return False
        return flow.given_up or flow.incoming.broken or flow.out.silent_s(now_s) > flow.out.patience_s

    def _of(self, peer: bytes) -> _Flow:
        flow = self._flows.get(peer)
        if flow is None:
            flow = self._flows[peer] = _Flow(Inflow(self._limits, None))
        return flow

    def _lost(self, peer: bytes, now_s: float) -> list[Unreachable]:
        peer = self.first_of(peer)
        flow = self._flows.pop(peer, None)
        self.full.discard(peer)
        self._gone.update(dict.fromkeys(self._bonds.end(peer)))
        while len(self._gone) > MOST_GONE:
            del self._gone[next(iter(self._gone))]
        if flow is None:
            return []
        self._recount(flow, 0)
        for key in flow.out.cut_off():
            self._begun[key] = None
        while len(self._begun) > MOST_BEGUN:
            del self._begun[next(iter(self._begun))]
        cut_off = flow.incoming.cut_off()
        if cut_off is not None:
            kept = self._kept.setdefault(flow.key, PartialMessages(self._limits.max_message_bytes))
            before = kept.nbytes
            kept.keep(*cut_off, now_s)
            self._kept_bytes += kept.nbytes - before
        return [_failed(Unreachable, each.what) for each in flow.out.unsent() if isinstance(each.what, Send)]


def _failed(event: type[T], send: Send) -> T:
    return event(channel=send.channel, peer=send.peer, envelope=send.envelope, size_bytes=send.size_bytes)
