"""Messages in chunks at a client's end: what waits to go out and what has come in, over the connection of now.

A new connection begins anew: what was on its way over the old one is lost, and is sent again by the cores' rules. One
over which nothing is noted as received any more is to be made anew: a byte that was damaged on the way may have the
other end wait for a frame that nobody sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from broker.chunks import heads
from broker.chunks.receiving import Inflow, Refused
from broker.chunks.sending import LONGEST_STALL_S, Outflow, Transfer
from broker.routing.resending import Carried
from broker.wire.errors import RemoteProtocolError
from broker.wire.headers import Buffer, Limits

#: Messages that wait to be received; more are not taken off the socket, and so give no credit.
MOST_ARRIVED = 4


class Chunked:
    """Both ways of a client's bulk connection.

    Args:
        put: Hands frames to the connection of now, and returns whether it took them.
        limits: Of messages that come.

    Attributes:
        arrived: What has come, and what of that is refused.
        full: The connection took nothing: to be tried again in a moment.
    """

    def __init__(self, put: Callable[[Sequence[Buffer]], bool], limits: Limits) -> None:
        self._put, self._limits = put, limits
        self._connection = 0
        self._stalls = 0  # connections over which nothing came to be noted, one after the other
        self._begin()
        self.arrived: deque[list[Buffer] | Refused] = deque()
        self.full = False
        self._owes_credit = False

    def carried(self, connection: int) -> Carried:
        """Returns what the connection of now has carried up."""
        self._over(connection)
        return Carried(self._out.received_bytes, self._out.waiting_bytes, connection)

    @property
    def has_room(self) -> bool:
        """Whether more may be taken off the socket."""
        return len(self.arrived) < MOST_ARRIVED

    def put(self, frames: Sequence[Buffer], connection: int, now_s: float, *, urgent: bool) -> Transfer:
        """Takes in a message to be sent, and sends what may go."""
        self._over(connection)
        transfer = self._out.put(frames, urgent=urgent)
        self.go_on(connection, now_s)
        return transfer

    def withdraw(self, transfer: Transfer) -> bool:
        """Takes a message out again; returns whether none of it had been sent."""
        return self._out.withdraw(transfer)

    def stalled(self, now_s: float) -> bool:
        """Whether the connection is to be made anew; said once for each."""
        patience_s = min(LONGEST_STALL_S, self._out.patience_s * 2.0 ** min(self._stalls, 16))
        if self._out.silent_s(now_s) <= patience_s:
            return False
        self._stalls += 1
        return True

    def take_in(self, frames: Sequence[Buffer], connection: int, now_s: float) -> None:
        """Takes in what has come: a message, a chunk of one, or credit."""
        self._over(connection)
        first = memoryview(frames[0]).cast("B")
        if not heads.is_head(first):
            self.arrived.append(list(frames))
            return
        try:
            head = heads.read(first)
        except RemoteProtocolError as err:
            self.arrived.append(Refused(err, []))
            return
        if isinstance(head, heads.Credit):
            self._out.credited(head, now_s)
            self._out.delivered()
            self._stalls = 0
            return
        found = self._in.take(head, frames[1:])
        if found is not None:
            self.arrived.append(found)
        self._owes_credit = True

    def go_on(self, connection: int, now_s: float) -> None:
        """Sends what may go: credit, then messages."""
        self._over(connection)
        self.full = False
        if self._owes_credit:
            self._owes_credit = not self._put([self._in.credit.packed()])
        while (step := self._out.next()) is not None:
            if not self._put(step.frames):
                self.full = True
                return
            self._out.sent(step, now_s)

    def _over(self, connection: int) -> None:
        if connection != self._connection:
            self._connection = connection
            self._begin()

    def _begin(self) -> None:
        self._out = Outflow()
        self._in = Inflow(most_bytes=self._limits.max_message_bytes, most_frames=self._limits.max_buffers + 1)
        self._owes_credit = False
