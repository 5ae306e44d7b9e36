"""Cuts messages into chunks, and says which goes next: one end of one connection. Pure.

What has tensors goes in chunks, of which the receiver takes note one by one; so many bytes may be under way as it has
given credit for, and as the link empties in a moment. A slow link thus has little waiting in it, and a message that is
urgent passes between two chunks. A fast one is kept full, however long it is: what is under way doubles while it comes
back at once. What is small and has no tensors travels whole, and nobody takes note.

Messages keep their order, but for urgent ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from broker.chunks.heads import Ask, Chunk, Credit, Resume
from broker.chunks.meter import SendingMeter
from broker.wire.headers import Buffer
from broker.wire.messages import AttachBulk, FollowBulk, Message, Observe, Observed, Probe, Probed, Want

#: Messages without tensors of at most so many bytes travel whole, as do urgent ones: none is long in another's way.
WHOLE_BYTES = 32 << 10
#: Sizes of a chunk: on a link of 33 kbit/s the smallest takes 8 s.
LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES = 32 << 10, 2 << 20
#: Chunks under way at a time, once there is no more to find out.
CHUNKS_UNDER_WAY = 4
#: Bytes that may be under way at first, without any credit; and at most.
FIRST_BYTES, MOST_UNDER_WAY_BYTES = 128 << 10, 32 << 20
#: A chunk that is not noted as received for so long has been swallowed, or so many times what others took; after each
#: connection that helped nothing twice as long, but never longer than the last.
STALLED_S, STALLED_TIMES, LONGEST_STALL_S = 10.0, 4.0, 600.0
#: Chunks that are noted as received within this time go through a link that takes more; after that, one that is slow.
SOON_S, LATE_S = 0.25, 1.0


def is_urgent(message: Message) -> bool:
    """Whether a message may pass by others: it is small, and says nothing about those before it."""
    return isinstance(message, AttachBulk | FollowBulk | Observe | Observed | Probe | Probed | Want)


@dataclass(slots=True, eq=False)
class Transfer:
    """A message on its way out.

    Attributes:
        frames: Of the message; they must not change until it has arrived.
        nbytes: Of all of them.
        whole: It travels in one piece, and is not noted.
        what: Whatever its sender knows it by.
        key: Of its payload; 0: it is sent again as a whole, if ever.
        asks: How much of it is there of an earlier connection; it waits for the answer once it has asked.
        sent_bytes: Handed to the connection by now, or there before.
        done: All of them are.
    """

    frames: Sequence[Buffer]
    nbytes: int
    whole: bool
    what: object = None
    key: int = 0
    asks: bool = False
    asked: bool = False
    sent_bytes: int = 0
    done: bool = False
    number: int = 0
    frame: int = 0  # the next chunk begins in this one,
    at: int = 0  # behind so many bytes of it


class Next(NamedTuple):
    """What is to be handed to the connection now; :meth:`Outflow.sent` is to follow if it took it."""

    transfer: Transfer
    frames: list[Buffer]
    nbytes: int  #: of the message
    chunked: bool
    frame: int = 0
    at: int = 0


@dataclass(slots=True)
class _Pace:
    """How many bytes may be under way, by how soon chunks are noted as received."""

    window_bytes: int = FIRST_BYTES
    under_way: deque[tuple[int, float]] = field(default_factory=deque)  # (sent by then, when)
    held_up: bool = False  # something waited for the window
    judged_from: int = 0  # what was given before says nothing of this window
    noted_s: float = 0.0  # when anything was noted last
    slowest_s: float = 0.0  # of what took longest lately

    @property
    def chunk_bytes(self) -> int:
        return min(MOST_CHUNK_BYTES, max(LEAST_CHUNK_BYTES, self.window_bytes // CHUNKS_UNDER_WAY))

    def first_sent_s(self, received: int) -> float | None:
        """Returns when the first chunk was sent of those that come to be noted with so many bytes; None: none does."""
        return self.under_way[0][1] if self.under_way and self.under_way[0][0] <= received else None

    def noted(self, received: int, given: int, now_s: float) -> None:
        """The other end has so many bytes, of so many that were given to the connection."""
        took_s = None
        while self.under_way and self.under_way[0][0] <= received:
            took_s = now_s - self.under_way.popleft()[1]
        if took_s is None:
            return
        self.noted_s, self.slowest_s = now_s, max(took_s, 0.9 * self.slowest_s)
        if received < self.judged_from:
            return  # it was sent under another window
        before = self.window_bytes
        if took_s > LATE_S:
            self.window_bytes = max(CHUNKS_UNDER_WAY // 2 * LEAST_CHUNK_BYTES, before // 2)
        elif took_s < SOON_S and self.held_up:
            self.window_bytes = min(MOST_UNDER_WAY_BYTES, 2 * before)
        if self.window_bytes != before:
            self.judged_from, self.held_up = given, False


class Outflow:
    """The messages that go out over one connection.

    Args:
        meter: Is told what is noted as received, if somebody wants to know the link.

    Attributes:
        given_bytes: Handed to the connection in chunks.
        received_bytes: Of these, noted by the other end.
    """

    def __init__(self, meter: SendingMeter | None = None) -> None:
        self.given_bytes = self.received_bytes = 0
        self._meter = meter
        self._delivered: list[Transfer] = []
        self._limit_bytes = FIRST_BYTES
        self._number = 0
        self._urgent: deque[Transfer] = deque()
        self._waiting: deque[Transfer] = deque()
        self._handed_over: deque[tuple[int, Transfer]] = deque()  # in chunks, with the bytes given by then
        self._pace = _Pace()

    def __len__(self) -> int:
        """Returns how many messages are not handed to the connection yet."""
        return len(self._urgent) + len(self._waiting)

    @property
    def window_bytes(self) -> int:
        """What may be under way at a time, as far as the link is known."""
        return self._pace.window_bytes

    def silent_s(self, now_s: float) -> float:
        """Returns for how long nothing has been noted as received while something is under way; 0.0: nothing is."""
        if not self._pace.under_way:
            return 0.0
        return now_s - max(self._pace.noted_s, self._pace.under_way[0][1])

    @property
    def patience_s(self) -> float:
        """Silence after which what is under way has been swallowed."""
        return max(STALLED_S, STALLED_TIMES * self._pace.slowest_s)

    def put(
        self, frames: Sequence[Buffer], what: object = None, *, urgent: bool = False, key: int = 0, asks: bool = False
    ) -> Transfer:
        """Takes a message in.

        Args:
            frames: Header and buffers.
            what: Returned with it.
            urgent: It may overtake others; small ones do.
            key: Of its payload (:mod:`broker.chunks.kept`), if it is worth going on with.
            asks: A part of it has gone over an earlier connection.
        """
        nbytes = sum(memoryview(each).nbytes for each in frames)
        whole = nbytes <= WHOLE_BYTES and (urgent or len(frames) == 1)
        transfer = Transfer(frames=frames, nbytes=nbytes, whole=whole, what=what, key=key, asks=asks)
        (self._urgent if urgent and whole else self._waiting).append(transfer)
        return transfer

    def withdraw(self, transfer: Transfer) -> bool:
        """Takes a message out again; returns whether none of it had been sent."""
        if transfer.sent_bytes or transfer.done:
            return False
        for queue in (self._urgent, self._waiting):
            if transfer in queue:
                queue.remove(transfer)
        return True

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are to go out in chunks, or to be noted by the other end."""
        unsent = sum(each.nbytes - each.sent_bytes for each in self._waiting if not each.whole)
        return self.given_bytes - self.received_bytes + unsent

    def unsent(self) -> list[Transfer]:
        """Returns what has not been handed over wholly: the connection has ended."""
        return [*self._urgent, *self._waiting]

    def cut_off(self) -> list[int]:
        """Returns the keys of the payloads that were begun, and are not known to be there."""
        begun = [*(each for _, each in self._handed_over), *(each for each in self._waiting if each.sent_bytes)]
        return [each.key for each in begun if each.key]

    def next(self) -> Next | None:
        """Returns what can go now; None: nothing waits, or the receiver is to say first that it takes more."""
        if self._urgent:
            return _whole(self._urgent[0])
        if not self._waiting:
            return None
        transfer = self._waiting[0]
        if transfer.whole:
            return _whole(transfer)
        if transfer.asked:
            return None
        if transfer.asks:
            header = transfer.frames[0]
            head = Ask(self._number_of(transfer), transfer.nbytes)
            return Next(transfer, [head.packed(), header], memoryview(header).nbytes, True, 1, 0)
        size = min(self._pace.chunk_bytes, transfer.nbytes - transfer.sent_bytes)
        if self.given_bytes - self.received_bytes + size > self._pace.window_bytes:
            self._pace.held_up = True
            return None
        if self.given_bytes + size > self._limit_bytes:
            return None
        return self._cut(transfer, size)

    def sent(self, step: Next, now_s: float) -> None:
        """The connection has taken what :meth:`next` returned last."""
        transfer = step.transfer
        transfer.sent_bytes += step.nbytes
        if step.chunked:
            transfer.number, transfer.frame, transfer.at = self._number_of(transfer), step.frame, step.at
            self._number = transfer.number
            transfer.asks, transfer.asked = False, transfer.asks
            self.given_bytes += step.nbytes
            self._pace.under_way.append((self.given_bytes, now_s))
        if transfer.sent_bytes == transfer.nbytes:
            transfer.done = True
            (self._urgent if self._urgent and self._urgent[0] is transfer else self._waiting).popleft()
            if step.chunked:
                self._handed_over.append((self.given_bytes, transfer))

    def credited(self, credit: Credit, now_s: float) -> None:
        """The other end has said what it has, and how much more it takes; nobody has more than was sent."""
        before = self.received_bytes
        self.received_bytes = max(before, min(credit.received, self.given_bytes))
        sent_s = self._pace.first_sent_s(self.received_bytes)
        if self._meter is not None and sent_s is not None:
            self._meter.noted(self.received_bytes - before, sent_s, now_s)
        self._limit_bytes = max(self._limit_bytes, credit.limit)
        self._pace.noted(self.received_bytes, self.given_bytes, now_s)
        while self._handed_over and self._handed_over[0][0] <= self.received_bytes:
            self._delivered.append(self._handed_over.popleft()[1])

    def delivered(self) -> list[Transfer]:
        """Returns the messages that the other end has wholly since this was asked last."""
        found, self._delivered = self._delivered, []
        return found

    def resume(self, answer: Resume) -> None:
        """The other end has said where a message is to go on; what cannot be is where it was."""
        transfer = self._waiting[0] if self._waiting else None
        if transfer is None or not transfer.asked or answer.transfer != transfer.number:
            return
        transfer.asked = False
        if not transfer.sent_bytes < answer.offset < transfer.nbytes:
            return
        transfer.sent_bytes, at = answer.offset, answer.offset
        for place, frame in enumerate(transfer.frames):
            nbytes = memoryview(frame).nbytes
            if at < nbytes:
                transfer.frame, transfer.at = place, at
                return
            at -= nbytes

    def _number_of(self, transfer: Transfer) -> int:
        return transfer.number or self._number + 1

    def _cut(self, transfer: Transfer, size: int) -> Next:
        """Returns the next bytes of a message as a chunk, whose frames are views of those of the message."""
        frames: list[Buffer] = []
        frame, at, left = transfer.frame, transfer.at, size
        while True:
            view = memoryview(transfer.frames[frame]).cast("B")
            piece = view[at : at + left]
            frames.append(piece)
            left -= piece.nbytes
            at += piece.nbytes
            rest = view.nbytes - at
            if rest == 0:
                frame, at = frame + 1, 0
            if left == 0 and (rest or frame == len(transfer.frames) or memoryview(transfer.frames[frame]).nbytes):
                break
        head = Chunk(self._number_of(transfer), transfer.nbytes, transfer.sent_bytes, rest)
        return Next(transfer, [head.packed(), *frames], size, True, frame, at)


def _whole(transfer: Transfer) -> Next:
    return Next(transfer, list(transfer.frames), transfer.nbytes, False)
