"""Messages in chunks at a client's end: both directions, over its present connections.

What was on its way over a connection that broke is sent again by the cores' rules, and goes on where it was. One over
which nothing is noted as received any more is to be made anew: a byte that was damaged on the way may have the other
end wait for a frame that nobody sends.

A flow may go over several connections. The first stands for it, and says so under a number that is drawn for it. Once
the broker has said that back, the others are made, and say the same. One carries chunks from the answer on; until then,
and with a broker that never answers, the first carries all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from broker.base.errors import RemoteProtocolError
from broker.chunks import chunk_heads
from broker.chunks.chunk_heads import Bond, packed
from broker.chunks.memory import ReusedMemory
from broker.chunks.meter import Link, ReceivingMeter, SendingMeter
from broker.chunks.partial_messages import PartialMessages
from broker.chunks.receiving import SPARE_BYTES, SPARE_FRAMES, Inflow, Refused
from broker.chunks.sending import Outflow, Transfer
from broker.chunks.subflow import LONGEST_STALL_S
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
        """It went out over a connection of this number."""
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

    Args:
        put: Hands frames to the connection of a subflow (0 is the one that always is), and returns whether it took
            them.
        limits: Of messages that come.
        others: How many connections there are beside the first.

    Attributes:
        arrived: What has come, and what of that is refused.
        full: A connection took nothing: to be tried again with :meth:`go_on` in a moment.
    """

    def __init__(self, put: Callable[[Sequence[Buffer], int], bool], limits: Limits, others: int = 0) -> None:
        self._put, self._limits, self._others = put, limits, others
        self._memory = ReusedMemory(SPARE_FRAMES, SPARE_BYTES)
        self._connection = 0
        self._kept = PartialMessages(limits.max_message_bytes)
        self._begun: set[int] = set()  # payloads that other connections have sent in part
        self._stalls = 0  # connections over which nothing came to be noted, one after the other
        self._up, self._down = SendingMeter(), ReceivingMeter()  # of whatever connection there is
        self._begin()
        self.arrived: deque[list[Buffer] | Refused] = deque()
        self.full = False

    def carried(self, connection: int) -> Carried:
        """Returns what the connection of now has carried up."""
        link = Link(self._up.bytes_per_s, self._down.bytes_per_s, self._up.round_trip_s)
        if connection != self._connection:
            return Carried(0, 0, connection, link)
        return Carried(self._out.received_bytes, self._out.waiting_bytes, connection, link)

    @property
    def has_room(self) -> bool:
        """Whether more may be taken off the socket."""
        return len(self.arrived) < MOST_ARRIVED

    def put(
        self, frames: Sequence[Buffer], connection: int, now_s: float, *, urgent: bool = False, key: int = 0
    ) -> Transfer:
        """Takes in a message, and sends as much as may go; ``key`` is that of its payload, if it is large."""
        self._over(connection, now_s)
        transfer = self._out.put(frames, urgent=urgent, key=key, asks=key in self._begun)
        self._begun.discard(key)
        self.go_on(connection, now_s)
        return transfer

    def withdraw(self, transfer: Transfer) -> bool:
        """Takes a message out again; returns whether none of it had been sent."""
        return self._out.withdraw(transfer)

    def stalled(self, now_s: float) -> bool:
        """Whether the connection is to be made anew; said once for each."""
        if self._in.broken:
            self._in.broken = False
            return True
        patience_s = min(LONGEST_STALL_S, self._out.patience_s * 2.0 ** min(self._stalls, 16))
        if self._out.silent_s(now_s) <= patience_s:
            return False
        self._stalls += 1
        return True

    def torn(self, standing: Mapping[int, int]) -> bool:
        """Whether another connection has ended that carried chunks: then all are to be made anew."""
        return self._bonding.torn(standing)

    def bind(self, connection: int, standing: Mapping[int, int], now_s: float) -> bool:
        """Says over connections that they belong together; returns True if the others are to be made now.

        Args:
            connection: The number of the first connection.
            standing: The numbers of all, by subflow.
            now_s: Now.
        """
        self._over(connection, now_s)
        for subflow, bond in self._bonding.due(standing).items():
            if self._put([packed(bond)], subflow):
                self._bonding.said(subflow, standing[subflow])
                if subflow:  # from its answer on; what the broker sends over the first behind that may come before it
                    self._in.spread(subflow)
        return self._bonding.wants_others

    def take_in(self, frames: Sequence[Buffer], connection: int, now_s: float, subflow: int = 0) -> None:
        """Takes in what has come: a message, a chunk of one, or what is said about chunks.

        Args:
            frames: What has come.
            connection: The number of the first connection, which stands for all of them.
            now_s: The time.
            subflow: Over which connection it came.
        """
        self._over(connection, now_s)
        first = memoryview(frames[0]).cast("B")
        if not chunk_heads.is_head(first):
            self.arrived.append(list(frames))
            return
        try:
            head = chunk_heads.read(first)
        except RemoteProtocolError as err:
            self.arrived.append(Refused(err, []))
            return
        if not isinstance(head, chunk_heads.Bond) and not self._bonding.carries(subflow):
            return
        match head:
            case chunk_heads.Credit():
                self._out.credited(head, now_s, subflow)
                self._out.delivered()
                self._stalls = 0
            case chunk_heads.Resume():
                self._out.resume(head)
            case chunk_heads.Bond():
                if self._bonding.heard(head, subflow):
                    self._out.spread(subflow)
            case chunk_heads.Ask() | chunk_heads.Chunk():
                self._owes_credit.add(subflow)
                if isinstance(head, chunk_heads.Chunk):
                    nbytes = sum(memoryview(each).nbytes for each in frames[1:])
                    self._down.arrived(nbytes, now_s, goes_on=head.offset > 0)
                answers, found = self._in.take_in(head, frames[1:], self._kept, subflow)
                self._owed += answers
                self.arrived += found

    def go_on(self, connection: int, now_s: float) -> None:
        """Sends what may go: answers and credit, then messages."""
        self._over(connection, now_s)
        while self._owed and self._put([self._owed[0]], 0):
            del self._owed[0]
        for subflow in tuple(self._owes_credit):
            if self._put([packed(self._in.credit(subflow))], subflow):
                self._owes_credit.discard(subflow)
        self.full = bool(connection and (self._owed or self._owes_credit))
        while (step := self._out.next()) is not None:
            if not self._put(step.frames, step.subflow):
                self.full = True
                return
            self._out.sent(step, now_s)

    def _over(self, connection: int, now_s: float) -> None:
        if connection == self._connection or not connection:
            return
        self._connection = connection
        self._begun.update(self._out.cut_off())
        cut_off = self._in.cut_off()
        if cut_off is not None:
            self._kept.keep(*cut_off, now_s)
        self._begin()

    def _begin(self) -> None:
        self._out, self._in = Outflow(self._up), Inflow(self._limits, self._memory)
        self._owed: list[bytes] = []  # answers
        self._owes_credit: set[int] = set()  # subflows
        self._bonding = Bonding(self._others, lambda: chance.bits(64))
