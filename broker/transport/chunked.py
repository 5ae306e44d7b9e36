"""Messages in chunks at a client's end: both directions, over its present connections. Pure.

What was on its way over a connection that broke is sent again by the cores' rules, and goes on where it was. One over
which nothing is noted as received any more is to be made anew: a byte that was damaged on the way may have the other
end wait for a frame that nobody sends.

Where several connections carry chunks together, the first stands for all, and says so under a number that is drawn for
it. Once the broker has said that back, the client makes the others, and they say the same. One carries chunks from its
answer on; until then, and with a broker that never answers, the first carries all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from broker.base.errors import RemoteProtocolError
from broker.chunks import chunk_heads, sending
from broker.chunks.chunk_heads import Bond
from broker.chunks.flow import Flow
from broker.chunks.memory import ReusedMemory
from broker.chunks.meter import Link, ReceivingMeter, SendingMeter
from broker.chunks.receiving import SPARE_BYTES, SPARE_FRAMES, PartialMessages, Refused
from broker.chunks.sending import LONGEST_STALL_S, Transfer
from broker.process import chance
from broker.routing.resending import Carried
from broker.wire.headers import Buffer, Limits

#: Messages that wait to be received; more are not taken off the socket, and so give no credit.
MOST_ARRIVED = 4


class Bonding:
    """Decides when a client announces a connection as part of a flow, and when that one may carry chunks.

    There are ``others`` beside the first; ``draw`` returns a random number of 64 bits.
    """

    def __init__(self, others: int, draw: Callable[[], int]) -> None:
        self._others = others
        self._nonce = draw() if others else 0
        self._said: dict[int, int] = {}  # subflow -> the number of the connection over which it was
        self._joined: set[int] = set()

    @property
    def wants_others(self) -> bool:
        """Returns True if the other connections are due: the broker has answered over the first."""
        return 0 in self._joined

    def due(self, standing: Mapping[int, int]) -> dict[int, Bond]:
        """Returns what is to be said, by subflow; :meth:`said` is to follow.

        Args:
            standing: Subflow -> number of the connection that stands, 0 for none.
        """
        if not self._others:
            return {}
        return {
            subflow: Bond(self._nonce, subflow)
            for subflow, connection in standing.items()
            if connection and self._said.get(subflow) != connection and (subflow == 0 or self.wants_others)
        }

    def said(self, subflow: int, connection: int) -> None:
        """Notes that a bond went out over a connection of this number."""
        self._said[subflow] = connection

    def heard(self, bond: Bond, subflow: int) -> bool:
        """The broker has answered over a connection; returns whether another one carries chunks from now on."""
        if bond != Bond(self._nonce, subflow) or subflow not in self._said or subflow in self._joined:
            return False
        self._joined.add(subflow)
        return subflow != 0

    def carries(self, subflow: int) -> bool:
        """Returns True if a connection may carry chunks: the first, or one over which the broker answered."""
        return subflow == 0 or subflow in self._joined

    def torn(self, standing: Mapping[int, int]) -> bool:
        """Returns True if a connection beside the first that carried chunks has ended.

        Its chunks are lost, and all connections must be made anew.
        """
        return any(each and standing.get(each) != self._said[each] for each in self._joined)


class Chunked:
    """Both ways of a client's bulk connection, and of others beside it that carry chunks, too.

    The endpoint says over which connection they go (:meth:`over`), gives what comes to :meth:`take_in`, and hands over
    what ``flow.out.next`` returns.

    Args:
        limits: Of messages that come.
        others: How many connections there are beside the first.

    Attributes:
        flow: Of the present connection.
        bonding: Of its connections.
        connection: Its number.
        arrived: What has come, and what of that is refused.
    """

    def __init__(self, limits: Limits, others: int = 0) -> None:
        self._limits, self._others = limits, others
        self._memory = ReusedMemory(SPARE_FRAMES, SPARE_BYTES)
        self._kept = PartialMessages(limits.max_message_bytes)
        self._begun: set[int] = set()  # payloads that other connections have sent in part
        self._stalls = 0  # connections over which nothing came to be noted, one after the other
        self._up, self._down = SendingMeter(), ReceivingMeter()  # of whatever connection there is
        self.connection = 0
        self.flow, self.bonding = self._begin()
        self.arrived: deque[list[Buffer] | Refused] = deque()

    def _begin(self) -> tuple[Flow, Bonding]:
        return Flow(self._limits, self._memory, self._up), Bonding(self._others, lambda: chance.bits(64))

    def over(self, connection: int, now_s: float) -> None:
        """Begins anew over a connection of another number; what was begun over the one before goes on there."""
        self.connection = connection
        self._begun.update(self.flow.out.cut_off())
        cut_off = self.flow.incoming.cut_off()
        if cut_off is not None:
            self._kept.keep(*cut_off, now_s)
        self.flow, self.bonding = self._begin()

    def carried(self, connection: int) -> Carried:
        """Returns what the present connection has carried up."""
        link = Link(self._up.bytes_per_s, self._down.bytes_per_s, self._up.round_trip_s)
        if connection != self.connection:
            return Carried(0, 0, connection, link)
        return Carried(self.flow.out.received_bytes, self.flow.out.waiting_bytes, connection, link)

    @property
    def has_room(self) -> bool:
        """Whether more may be taken off the socket."""
        return len(self.arrived) < MOST_ARRIVED

    def put(self, frames: Sequence[Buffer], *, urgent: bool = False, key: int = 0) -> Transfer:
        """Takes in a message to be sent; ``key`` is that of its payload, if it is large."""
        transfer = self.flow.out.put(frames, urgent=urgent, key=key, asks=key in self._begun)
        self._begun.discard(key)
        return transfer

    def stalled(self, now_s: float) -> bool:
        """Whether the connection is to be made anew; said once for each."""
        incoming, out = self.flow.incoming, self.flow.out
        if incoming.broken:
            incoming.broken = False
            return True
        silent_s = out.silent_s(now_s)
        if silent_s <= sending.STALLED_S:
            return False
        if silent_s <= min(LONGEST_STALL_S, out.patience_s * 2.0 ** min(self._stalls, 16)):
            return False
        self._stalls += 1
        return True

    def due(self, standing: Mapping[int, int]) -> list[tuple[int, bytes]]:
        """Returns the bonds to be sent now, by subflow; :meth:`said` is to follow for each."""
        return [(subflow, chunk_heads.packed(bond)) for subflow, bond in self.bonding.due(standing).items()]

    def said(self, subflow: int, connection: int) -> None:
        """Notes that a bond went out over a connection of this number."""
        self.bonding.said(subflow, connection)
        if subflow:  # from its answer on; what the broker sends over the first behind that may come before it
            self.flow.incoming.spread(subflow)

    def take_in(self, frames: Sequence[Buffer], now_s: float, subflow: int = 0) -> None:
        """Takes in what has come over a connection: a message, a chunk of one, or what is said about chunks."""
        try:
            head = chunk_heads.read(memoryview(frames[0]))
        except RemoteProtocolError as err:
            self.arrived.append(Refused(err, []))
            return
        if head is None:
            self.arrived.append(list(frames))
        elif isinstance(head, Bond):
            if self.bonding.heard(head, subflow):
                self.flow.out.spread(subflow)
        elif self.bonding.carries(subflow):
            if isinstance(head, chunk_heads.Chunk):
                self._down.arrived(sum(map(len, frames[1:])), now_s, goes_on=head.offset > 0)
            self.arrived += self.flow.take_in(head, frames[1:], self._kept, now_s, subflow)
            if isinstance(head, chunk_heads.Credit):
                self._stalls = 0
