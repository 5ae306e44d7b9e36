"""The sending end of a flow: cuts messages into chunks, and decides which goes next, and where. Pure.

Messages with tensors go in chunks, which the receiver notes one by one. Bytes under way are limited by its credit, and
by what the link empties in a moment: a slow link has little waiting in it, so an urgent message passes between two
chunks. A fast link is kept full, however long it is: the bytes under way double while notes come back at once. Small
messages without tensors travel whole, and are not noted.

Messages keep their order, but for urgent ones. A flow begins with one connection, and has more ("subflows", as in
Multipath TCP, RFC 8684) where one cannot fill a long link: each has its own credit, and finds out how much it takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from broker.chunks.chunk_heads import Ask, Chunk, Credit, Resume, packed
from broker.chunks.meter import SendingMeter
from broker.wire.headers import NBYTES, Buffer
from broker.wire.messages import AttachBulk, FollowBulk, Message, Observe, Observed, Probe, Probed, Want
from broker.wire.messages.scattered import Scattered

#: Messages without tensors up to this size travel whole, as do urgent ones: none holds up another for long.
WHOLE_BYTES = 32 << 10
#: Connections of one flow at most.
MOST_SUBFLOWS = 16
#: Sizes of a chunk: on a link of 33 kbit/s the smallest takes 8 s.
LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES = 32 << 10, 2 << 20
#: Chunks under way at a time, once there is no more to find out.
CHUNKS_UNDER_WAY = 4
#: Bytes that may be under way at first, without any credit; and at most.
FIRST_BYTES, MOST_UNDER_WAY_BYTES = 128 << 10, 32 << 20
#: A chunk counts as lost if it is not noted within the first, or within the second times what others took. The time
#: doubles after each connection that did not help, up to the last.
STALLED_S, STALLED_TIMES, LONGEST_STALL_S = 10.0, 4.0, 600.0
#: Chunks that are noted as received within this time go through a link that takes more; after that, one that is slow.
SOON_S, LATE_S = 0.25, 1.0


def is_urgent(message: Message) -> bool:
    """Returns True if a message may overtake others: it is small and independent of those before it."""
    return isinstance(message, AttachBulk | FollowBulk | Observe | Observed | Probe | Probed | Want)


@dataclass(slots=True, eq=False)
class Transfer:
    """A message on its way out; its frames must not change until it has arrived."""

    frames: Sequence[Buffer]
    sizes: list[int]  # of each of them, in bytes
    nbytes: int  # of all frames
    whole: bool  # it travels in one piece, and is not noted
    what: object = None  # whatever its sender knows it by
    key: int = 0  # of its payload; 0: it is sent again as a whole, if ever
    asks: bool = False  # how much of it is there of an earlier connection,
    asked: bool = False  # and waits for the answer
    sent_bytes: int = 0  # handed to the connection by now, or there before
    done: bool = False  # all of them are
    number: int = 0
    frame: int = 0  # the next chunk begins in this one,
    at: int = 0  # at this byte of it
    pieces: int = 0  # under way


class Next(NamedTuple):
    """The frames to hand to a connection now; once it has taken them, call :meth:`Outflow.sent`."""

    transfer: Transfer | None  #: None: they are no part of a message
    frames: list[Buffer]
    nbytes: int  #: of the message
    chunked: bool
    subflow: int = 0  #: the connection that is to take it
    frame: int = 0
    at: int = 0


@dataclass(slots=True, eq=False)
class _Piece:
    """A chunk handed over to a connection, and whether the receiver noted it."""

    transfer: Transfer
    begin: int  # of all bytes handed over
    end: int  # of those of its connection
    sent_s: float
    noted: bool = False


@dataclass(slots=True)
class _Subflow:
    """The sender's state of one connection: bytes under way, their window and the receiver's credit."""

    given_bytes: int = 0  # handed to the connection in chunks
    received_bytes: int = 0  # of these, noted by the other end
    window_bytes: int = FIRST_BYTES  # what may be under way at a time, as far as the connection is known
    under_way: deque[_Piece] = field(default_factory=deque)
    _limit_bytes: int = FIRST_BYTES
    _held_up: bool = False  # something waited for the window
    _judged_from: int = 0  # what was given before says nothing of this window
    _noted_s: float = 0.0  # when anything was noted last
    _slowest_s: float = 0.0  # of what took longest lately

    def chunk_bytes(self, left: int) -> int:
        """Returns the bytes of the next chunk of a message with ``left`` bytes to go; 0: none may go now."""
        size = min(left, MOST_CHUNK_BYTES, max(LEAST_CHUNK_BYTES, self.window_bytes // CHUNKS_UNDER_WAY))
        if self.given_bytes - self.received_bytes + size > self.window_bytes:
            self._held_up = True
            return 0
        return size if self.given_bytes + size <= self._limit_bytes else 0

    def credited(self, credit: Credit, now_s: float) -> tuple[int, list[_Piece]]:
        """Takes the receiver's credit, of which no more than was sent is believed.

        Returns:
            The bytes that are newly noted as received, and the chunks of which all are.
        """
        before, noted = self.received_bytes, list[_Piece]()
        self.received_bytes = max(before, min(credit.received, self.given_bytes))
        self._limit_bytes = max(self._limit_bytes, credit.limit)
        while self.under_way and self.under_way[0].end <= self.received_bytes:
            noted.append(self.under_way.popleft())
        if noted:
            self._judge(now_s - noted[-1].sent_s, now_s)
        return self.received_bytes - before, noted

    def _judge(self, took_s: float, now_s: float) -> None:
        """Widens or narrows the window by the time that a chunk took."""
        self._noted_s, self._slowest_s = now_s, max(took_s, 0.9 * self._slowest_s)
        if self.received_bytes < self._judged_from:
            return  # it was sent under another window
        before = self.window_bytes
        if took_s > LATE_S:
            self.window_bytes = max(CHUNKS_UNDER_WAY // 2 * LEAST_CHUNK_BYTES, before // 2)
        elif took_s < SOON_S and self._held_up:
            self.window_bytes = min(MOST_UNDER_WAY_BYTES, 2 * before)
        if self.window_bytes != before:
            self._judged_from, self._held_up = self.given_bytes, False

    def silent_s(self, now_s: float) -> float:
        """Returns seconds since the receiver last noted bytes while some are under way; 0.0 if none are."""
        return now_s - max(self._noted_s, self.under_way[0].sent_s) if self.under_way else 0.0

    @property
    def patience_s(self) -> float:
        """Seconds of silence after which the bytes under way count as lost."""
        return max(STALLED_S, STALLED_TIMES * self._slowest_s)


class Outflow:
    """Queues messages to go out over one connection, or in chunks over several.

    A chunk goes where the least is under way, so a connection that is slower takes fewer. ``meter`` is told what is
    noted as received.

    Attributes:
        given_bytes: Handed to the connections in chunks.
        owed: By subflow, the credit that its other end is to be given.
    """

    def __init__(self, meter: SendingMeter | None = None) -> None:
        self.given_bytes = 0
        self.owed: dict[int, Buffer] = {}
        self._meter = meter
        self._delivered: list[Transfer] = []
        self._number = 0
        self._answers: list[tuple[int, Buffer]] = []  # by subflow
        self._urgent: deque[Transfer] = deque()
        self._waiting: deque[Transfer] = deque()
        self._handed_over: deque[Transfer] = deque()  # in chunks, and not known to be there
        self._subflows: dict[int, _Subflow] = {0: _Subflow()}
        self._under_way: deque[_Piece] = deque()  # the first of them is not noted

    def spread(self, subflow: int) -> None:
        """Adds a connection over which chunks may go from now on."""
        self._subflows[subflow] = _Subflow()

    def __len__(self) -> int:
        """Returns the number of messages that are not wholly handed to a connection yet."""
        return len(self._urgent) + len(self._waiting)

    @property
    def received_bytes(self) -> int:
        """Bytes sent in chunks that the receiver has noted."""
        return sum(each.received_bytes for each in self._subflows.values())

    def silent_s(self, now_s: float) -> float:
        """Returns seconds since the receiver last noted bytes while some are under way; 0.0 if none are."""
        return max(each.silent_s(now_s) for each in self._subflows.values()) if self._under_way else 0.0

    @property
    def patience_s(self) -> float:
        """Seconds of silence after which the bytes under way count as lost."""
        return max(each.patience_s for each in self._subflows.values())

    def put(
        self, frames: Sequence[Buffer], what: object = None, *, urgent: bool = False, key: int = 0, asks: bool = False
    ) -> Transfer:
        """Takes a message in, with what :class:`Transfer` says of it; an urgent one overtakes, if small."""
        views = [each if isinstance(each, Scattered) else memoryview(each).cast("B") for each in frames]
        sizes = list(map(NBYTES, views))
        nbytes = sum(sizes)
        whole = nbytes <= WHOLE_BYTES and (urgent or len(frames) == 1)
        transfer = Transfer(frames=views, sizes=sizes, nbytes=nbytes, whole=whole, what=what, key=key, asks=asks)
        (self._urgent if urgent and whole else self._waiting).append(transfer)
        return transfer

    def withdraw(self, transfer: Transfer) -> bool:
        """Removes a message; returns False if part of it was sent, and keeps it then."""
        if transfer.sent_bytes or transfer.done:
            return False
        for queue in (self._urgent, self._waiting):
            if transfer in queue:
                queue.remove(transfer)
        return True

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait to be sent in chunks, or to be noted by the receiver."""
        unsent = sum(each.nbytes - each.sent_bytes for each in self._waiting if not each.whole)
        return self.given_bytes - self.received_bytes + unsent

    def unsent(self) -> list[Transfer]:
        """Returns the messages not wholly handed over, at the end of the connection."""
        return [*self._urgent, *self._waiting]

    def cut_off(self) -> list[int]:
        """Returns the keys of the payloads that were begun, and not wholly noted by the receiver."""
        begun = [*self._handed_over, *(each for each in self._waiting if each.sent_bytes)]
        return [each.key for each in begun if each.key]

    def answer(self, subflow: int, frame: bytes) -> None:
        """Adds an answer, which goes before all else.

        Over a connection beside the first it is that of its bond.
        """
        self._answers.append((subflow, frame))

    def next(self, full: Container[int] = ()) -> Next | None:
        """Returns what may go now: answers, then credit, then messages; None if nothing may.

        Once a connection has taken it, call :meth:`sent`. Nothing is returned for those in ``full``, which took
        nothing; a message waits for the connection that is its turn, and for the receiver's credit.
        """
        for subflow, frame in (*self._answers, *self.owed.items()):
            if subflow not in full:
                return Next(None, [frame], 0, False, subflow)
        queue = self._urgent or self._waiting
        if not queue or queue[0].asked:
            return None
        transfer = queue[0]
        if (transfer.whole or transfer.asks) and 0 in full:
            return None
        if transfer.whole:
            return Next(transfer, list(transfer.frames), transfer.nbytes, False)
        transfer.number = transfer.number or self._number + 1
        if transfer.asks:
            head = Ask(transfer.number, transfer.nbytes)
            return Next(transfer, [packed(head), transfer.frames[0]], transfer.sizes[0], True, 0, 1, 0)
        left = transfer.nbytes - transfer.sent_bytes
        if self._under_way and self.given_bytes - self._under_way[0].begin >= MOST_UNDER_WAY_BYTES:
            return None  # the receiver keeps what comes behind a chunk that is late
        ways: Iterable[tuple[int, _Subflow]] = self._subflows.items()
        if len(self._subflows) > 1:
            ways = sorted(ways, key=lambda each: each[1].given_bytes - each[1].received_bytes)
        for subflow, way in ways:
            size = way.chunk_bytes(left)
            if size:
                return None if subflow in full else self._cut(transfer, size, subflow)
        return None

    def sent(self, step: Next, now_s: float) -> None:
        """Notes that the connection has taken what :meth:`next` returned last."""
        transfer = step.transfer
        if transfer is None:
            if (answer := (step.subflow, step.frames[0])) not in self._answers:
                del self.owed[step.subflow]
                return
            self._answers.remove(answer)
            if step.subflow:  # whose other end knows now that chunks may come over it
                self.spread(step.subflow)
            return
        transfer.sent_bytes += step.nbytes
        if step.chunked:
            self._number, transfer.frame, transfer.at = transfer.number, step.frame, step.at
            transfer.asks, transfer.asked = False, transfer.asks
            transfer.pieces += 1
            way = self._subflows[step.subflow]
            way.given_bytes += step.nbytes
            piece = _Piece(transfer, self.given_bytes, way.given_bytes, now_s)
            self.given_bytes += step.nbytes
            self._under_way.append(piece)
            way.under_way.append(piece)
        if transfer.sent_bytes == transfer.nbytes:
            transfer.done = True
            (self._urgent if self._urgent and self._urgent[0] is transfer else self._waiting).popleft()
            if step.chunked:
                self._handed_over.append(transfer)

    def credited(self, credit: Credit, now_s: float, subflow: int = 0) -> None:
        """Takes the receiver's credit for a connection."""
        if subflow not in self._subflows:
            return  # nothing was sent over it
        nbytes, noted = self._subflows[subflow].credited(credit, now_s)
        if noted and self._meter is not None:
            self._meter.noted(nbytes, noted[0].sent_s, now_s)
        for piece in noted:
            piece.noted = True
            piece.transfer.pieces -= 1
        while self._under_way and self._under_way[0].noted:
            self._under_way.popleft()
        while self._handed_over and not self._handed_over[0].pieces:
            transfer = self._handed_over.popleft()
            if transfer.what is not None:
                self._delivered.append(transfer)

    def delivered(self) -> list[Transfer]:
        """Returns the messages with a ``what`` that were wholly received since the last call."""
        found, self._delivered = self._delivered, []
        return found

    def resume(self, answer: Resume) -> None:
        """Continues a message where the receiver asks for it; an impossible offset changes nothing."""
        transfer = self._waiting[0] if self._waiting else None
        if transfer is None or not transfer.asked or answer.transfer != transfer.number:
            return
        transfer.asked = False
        if not transfer.sent_bytes < answer.offset < transfer.nbytes:
            return
        transfer.sent_bytes, at = answer.offset, answer.offset
        for place, nbytes in enumerate(transfer.sizes):
            if at < nbytes:
                transfer.frame, transfer.at = place, at
                return
            at -= nbytes

    def _cut(self, transfer: Transfer, size: int, subflow: int) -> Next:
        """Returns the next bytes of a message as a chunk, whose frames are views of those of the message.

        It ends early where a frame goes on in another place.
        """
        frames: list[Buffer] = []
        frame, at, left = transfer.frame, transfer.at, size
        while True:
            piece = transfer.frames[frame][at : at + left]
            frames.append(piece)
            left -= piece.nbytes
            at += piece.nbytes
            rest = transfer.sizes[frame] - at
            if rest:
                break
            frame, at = frame + 1, 0
            if left == 0 and (frame == len(transfer.frames) or transfer.sizes[frame]):
                break
        head = Chunk(transfer.number, transfer.nbytes, transfer.sent_bytes, rest)
        return Next(transfer, [packed(head), *frames], size - left, True, subflow, frame, at)
