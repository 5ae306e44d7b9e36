"""The bulk connections of a broker: sends messages in chunks, takes in chunks. Pure.

A connection has an entry here from its first large message on. What is put into it waits for the credit of the other
end, a few messages at most; beyond that the relay keeps them (:class:`~broker.routing.events.Blocked`), and hears when
there is room again.

Several connections may carry the chunks of one flow (:class:`Bonds`). For everybody else they are one,
the first of them, and they end together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

from broker.base.errors import RemoteProtocolError
from broker.chunks import chunk_heads
from broker.chunks.chunk_heads import Bond
from broker.chunks.flow import Flow
from broker.chunks.receiving import PartialMessages, Refused, key_for
from broker.chunks.sending import MOST_SUBFLOWS, Next, is_urgent
from broker.routing.events import Blocked, Delivered, Room, Send, Unreachable
from broker.wire.frames import encode
from broker.wire.headers import Buffer, Limits
from broker.wire.messages import Channel

T = TypeVar("T", Blocked, Unreachable)
Outcome = Unreachable | Delivered | Room

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


@dataclass(slots=True, eq=False)
class _Client:
    """A client's flow, and what the broker knows of it."""

    flow: Flow
    key: str = ""  # the public key that it came under
    heard_s: float = 0.0  # its latest chunk
    counted_bytes: int = 0  # what is here of its message that is not whole, as counted for all flows
    given_up: bool = False  # that message was; the connection is to be ended, so that it is sent again
    blocked: bool = False  # the relay waits for room


class Bonds:
    """The flows of several connections at a broker, by routing id of the first."""

    def __init__(self) -> None:
        self._firsts: dict[tuple[str, int], bytes] = {}  # by key and number
        self._places: dict[bytes, tuple[bytes, int]] = {}  # of each connection: its first, and its subflow
        self._routes: dict[tuple[bytes, int], bytes] = {}  # the other way round

    def place_of(self, peer: bytes) -> tuple[bytes, int]:
        """Returns the first connection of a flow, and which of its connections this one is; 0 is the first."""
        return self._places.get(peer, (peer, 0))

    def route(self, first: bytes, subflow: int) -> bytes:
        """Returns a connection of a flow."""
        return self._routes[first, subflow] if subflow else first

    def bind(self, peer: bytes, bond: Bond, key: str) -> bool:
        """Handles a connection's introduction, under a public key; returns whether it is accepted."""
        known = self._firsts.get((key, bond.nonce))
        first = known if bond.subflow else peer
        if first is None or peer in self._places or (bond.subflow == 0 and known is not None):
            return False
        if bond.subflow >= MOST_SUBFLOWS or (first, bond.subflow) in self._routes:
            return False
        self._firsts[key, bond.nonce] = first
        self._places[peer], self._routes[first, bond.subflow] = (first, bond.subflow), peer
        return True

    def end(self, first: bytes) -> list[bytes]:
        """Forgets a flow; returns its connections, the first among them."""
        if (first, 0) not in self._routes:
            return [first]
        self._firsts = {name: each for name, each in self._firsts.items() if each != first}
        ended = [self._routes.pop((first, n)) for n in range(MOST_SUBFLOWS) if (first, n) in self._routes]
        for each in ended:
            del self._places[each]
        return ended


class Flows:
    """All bulk connections, by routing id.

    After :meth:`take` or :meth:`send`, and again for those in ``full``, the shell hands over the :meth:`steps` of the
    flow, and asks for the :meth:`outcome`.

    Args:
        limits: Of what comes.
        most_bytes: Of all messages that are not whole, or 0: what the largest takes. Beyond that, what connections have
            left that ended is forgotten, and then the message that has been silent the longest.

    Attributes:
        full: By first connection of a flow, its subflows that took nothing: to be tried again in a moment.
    """

    def __init__(self, limits: Limits, most_bytes: int = 0) -> None:
        self._limits = limits
        self._most_bytes = max(most_bytes, limits.max_message_bytes)
        self._partial_bytes = self._kept_bytes = 0
        self._clients = defaultdict[bytes, _Client](lambda: _Client(Flow(limits, None)))  # by first connection
        self._bonds = Bonds()
        self._behind: dict[int, bytes] = {}  # routing id by descriptor
        self._overtaken: Counter[int] = Counter()  # descriptors that others have, while an end is yet to be told
        self._gone: dict[bytes, None] = {}  # routing ids of connections that have ended, the latest last
        self._kept: dict[str, PartialMessages] = {}  # by public key
        self._begun: dict[int, None] = {}  # payloads that connections which ended have sent in part, the latest last
        self._untold: list[Outcome] = []  # what the relay is yet to hear
        self.full: dict[bytes, set[int]] = {}

    def first_of(self, peer: bytes) -> bytes:
        """Returns the connection that stands for a flow, by any of its connections."""
        return self._bonds.place_of(peer)[0]

    def take(
        self, peer: bytes, fd: int | None, frames: list[Buffer], now_s: float, key: str = ""
    ) -> list[list[Buffer] | Refused]:
        """Handles frames from a connection, under a public key.

        Returns:
            The messages that are whole now, and why something is not taken in.
        """
        head: chunk_heads.Head | Refused | None
        try:
            head = chunk_heads.read(memoryview(frames[0]) if frames else b"")
        except RemoteProtocolError as err:
            head = Refused(err, [])
        if peer in self._gone:  # what was still to be read of a connection when its end was told
            return [frames] if head is None else []
        if fd is not None and (known := self._behind.get(fd)) != peer:
            if known is not None:  # its end has not been told yet
                self._overtaken[fd] += 1
                self._untold += self._lost(known, now_s)
            self._behind[fd] = peer
        if head is None:
            return [frames]
        if isinstance(head, Refused):
            return [head]
        if isinstance(head, Bond):
            self._bind(peer, head, key)
            return []
        main, subflow = self._bonds.place_of(peer)
        client, kept = self._clients[main], self._kept.get(key)
        client.key = key
        before = kept.nbytes if kept is not None else 0
        found = client.flow.take_in(head, frames[1:], kept, now_s, subflow)
        self._kept_bytes += kept.nbytes - before if kept is not None else 0
        if isinstance(head, chunk_heads.Ask | chunk_heads.Chunk):
            client.heard_s = now_s
            self._count(client, client.flow.incoming.partial_bytes)
            if self._partial_bytes + self._kept_bytes > self._most_bytes:
                self._free()
        return found

    def _bind(self, peer: bytes, bond: Bond, key: str) -> None:
        """A connection says that it is one of several; it is told so where it is from now on."""
        has_carried = bond.subflow > 0 and peer in self._clients  # a flow of its own, which would be left behind
        if has_carried or not self._bonds.bind(peer, bond, key):
            return
        flow = self._clients[self.first_of(peer)].flow
        if bond.subflow:
            flow.incoming.spread(bond.subflow)
        flow.out.answer(bond.subflow, chunk_heads.packed(bond))

    @property
    def partial_bytes(self) -> int:
        """Bytes of messages that are not whole, also of those that connections have left which ended."""
        return self._partial_bytes + self._kept_bytes

    def _free(self) -> None:
        """Frees memory of messages that are not whole, until they are no more than may be."""
        self._kept, self._kept_bytes = {}, 0
        while self._partial_bytes > self._most_bytes:
            silent = min((each for each in self._clients.values() if each.counted_bytes), key=lambda each: each.heard_s)
            silent.flow.incoming.give_up()
            silent.given_up = True
            self._count(silent, 0)

    def _count(self, client: _Client, nbytes: int) -> None:
        self._partial_bytes += nbytes - client.counted_bytes
        client.counted_bytes = nbytes

    def ended(self, fd: int, now_s: float) -> list[Unreachable]:
        """Handles the end of a connection: messages under way are lost; received chunks stay for the next one."""
        if self._overtaken[fd]:
            self._overtaken[fd] -= 1
            return []
        peer = self._behind.pop(fd, None)
        return [] if peer is None or peer in self._gone else self._lost(peer, now_s)

    def send(self, send: Send) -> Blocked | Unreachable | None:
        """Queues a message; returns what has become of it if it cannot be."""
        if send.peer in self._gone:
            return _failed(Unreachable, send)
        client, urgent = self._clients[send.peer], is_urgent(send.envelope.message)
        if len(client.flow.out) >= (2 * MOST_WAITING if urgent else MOST_WAITING):
            client.blocked = True
            return _failed(Blocked, send)
        key = key_for(send.envelope.message, send.size_bytes)
        client.flow.out.put(encode(send.envelope), send, urgent=urgent, key=key, asks=key in self._begun)
        return None

    def steps(self, first: bytes) -> Iterator[tuple[bytes, Next]]:
        """Yields what may go of a flow, and over which connection; :meth:`sent` is to be called after each."""
        self.full.pop(first, None)  # all its connections are tried again
        while (client := self._clients.get(first)) is not None:
            step = client.flow.out.next(self.full.get(first, ()))
            if step is None:
                return
            yield self._bonds.route(first, step.subflow), step

    def sent(self, first: bytes, step: Next, put: Put, now_s: float) -> None:
        """Notes what has become of what :meth:`steps` yielded last."""
        client = self._clients[first]
        if put is Put.FULL:
            self.full.setdefault(first, set()).add(step.subflow)
        elif put is Put.GONE and step.transfer is not None:
            self._untold += self._lost(first, now_s)
        else:
            client.flow.out.sent(step, now_s)

    def outcome(self, first: bytes) -> list[Outcome]:
        """Returns what has become of messages of a flow, and whether it takes more."""
        events, self._untold = self._untold, []
        client = self._clients.get(first)
        if client is None:
            return events
        for each in client.flow.out.delivered():
            if isinstance(each.what, Send):
                events.append(Delivered(channel=Channel.BULK, peer=first, envelope=each.what.envelope))
        if client.blocked and len(client.flow.out) < MOST_WAITING:
            client.blocked = False
            events.append(Room(channel=Channel.BULK, peer=first))
        return events

    def stalled(self, now_s: float) -> list[int]:
        """Returns the descriptors of connections over which nothing is noted any more: they are to be ended.

        A byte that was damaged on the way may have the other end wait for a frame that nobody sends. So are those of
        which a message was given up: their other end sends it again. And those of a flow that another one has ended.
        """
        return [fd for fd, peer in self._behind.items() if peer in self._gone or self._stalls(peer, now_s)]

    def _stalls(self, peer: bytes, now_s: float) -> bool:
        client = self._clients.get(self.first_of(peer))
        if client is None:
            return False
        flow = client.flow
        return client.given_up or flow.incoming.broken or flow.out.silent_s(now_s) > flow.out.patience_s

    def _lost(self, peer: bytes, now_s: float) -> list[Unreachable]:
        peer = self.first_of(peer)
        client = self._clients.pop(peer, None)
        self.full.pop(peer, None)
        self._gone.update(dict.fromkeys(self._bonds.end(peer)))
        while len(self._gone) > MOST_GONE:
            del self._gone[next(iter(self._gone))]
        if client is None:
            return []
        flow = client.flow
        self._count(client, 0)
        for key in flow.out.cut_off():
            self._begun[key] = None
        while len(self._begun) > MOST_BEGUN:
            del self._begun[next(iter(self._begun))]
        cut_off = flow.incoming.cut_off()
        if cut_off is not None:
            kept = self._kept.setdefault(client.key, PartialMessages(self._limits.max_message_bytes))
            before = kept.nbytes
            kept.keep(*cut_off, now_s)
            self._kept_bytes += kept.nbytes - before
        return [_failed(Unreachable, each.what) for each in flow.out.unsent() if isinstance(each.what, Send)]


def _failed(event: type[T], send: Send) -> T:
    return event(channel=send.channel, peer=send.peer, envelope=send.envelope, size_bytes=send.size_bytes)
