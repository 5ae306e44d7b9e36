"""The receiving end of a flow: joins chunks to messages, and gives the sender credit. Pure.

A frame that lies in one chunk stays where it is. A frame that was cut is copied into memory of its own, taken when its
first piece comes; or its pieces stay where they are, for a broker that passes them on (:class:`Scattered`). So a
message in chunks takes the memory of its bytes, and a whole one takes no more than before.

What a broken connection has left of a message is kept, so that the next one can resume it. A payload is known by the
checksums of its buffers, not by its sender or number. Before a sender repeats a payload of which a part was sent, it
asks how much is here. In the end the whole is checked against its checksums, like any other.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from broker.base.errors import RemoteProtocolError
from broker.chunks.chunk_heads import Ask, Chunk, Credit, Resume, packed
from broker.chunks.memory import ReusedMemory
from broker.wire import headers
from broker.wire.headers import Buffer, Limits
from broker.wire.messages import Message, Reason
from broker.wire.messages.scattered import Scattered
from broker.wire.schema import Unfit

#: Bytes that the sender may have under way: more than any known link holds.
CREDIT_BYTES = 32 << 20
#: Bytes of chunks that overtook a missing one over another connection; a sender stops at half of it.
MOST_EARLY_BYTES = 64 << 20
#: Memory of frames that is kept for the next ones, at each end and in a broker, which spent two fifths of its processor
#: time on page faults with new memory for each.
SPARE_FRAMES, SPARE_BYTES = 256, 128 << 20
#: Payloads below this are sent again as a whole: that takes no longer than asking.
LEAST_BYTES = 1 << 20
#: A part for which nobody asks is forgotten after this.
KEPT_S = 120.0


def fresh(nbytes: int) -> memoryview:
    """Returns ``nbytes`` of new, uninitialised memory."""
    return np.empty(nbytes, np.uint8).data


class Joined:
    """A frame that arrives in pieces, copied one after another into memory of its size."""

    def __init__(self, memory: Any) -> None:
        self.buffer = memoryview(memory)
        self.missing_bytes = self.buffer.nbytes

    def add(self, piece: memoryview) -> None:
        """Copies the next piece into its place."""
        at = self.buffer.nbytes - self.missing_bytes
        self.buffer[at : at + piece.nbytes] = piece
        self.missing_bytes -= piece.nbytes


#: A frame of which more is to come.
Opened = Joined | Scattered


@dataclass(slots=True)
class Partial:
    """The beginning of a payload of ``total`` bytes, of which ``nbytes`` are here."""

    frames: list[Buffer]  # its buffers, the last one maybe in part
    open: Opened | None  # that one, if more of it is to come
    nbytes: int
    total: int


def key_of(checksums: Sequence[int]) -> int:
    """Returns the name of a payload with these checksums of its buffers."""
    return xxhash.xxh3_64_intdigest(struct.pack(f">{len(checksums)}Q", *checksums))


def key_for(message: Message, nbytes: int) -> int:
    """Returns the name of a message's payload; 0 if it has none, or one too small to be resumed."""
    payload = getattr(message, "payload", ())
    return key_of([each.checksum for each in payload]) if nbytes >= LEAST_BYTES and payload else 0


def key_in(header: Buffer, limits: Limits) -> int | None:
    """Returns the name of the payload that a header announces; None if it announces none."""
    try:
        buffers = headers.read([header], limits)[0].get("buffers")
        return key_of([each["checksum"] for each in buffers]) if buffers else None
    except (Unfit, KeyError, TypeError, struct.error):
        return None


class PartialMessages:
    """Partial payloads of one peer, or of all without a key; above ``most_bytes`` the oldest are dropped."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._partial: dict[int, tuple[Partial, float]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all partial payloads."""
        return sum(partial.nbytes for partial, _ in self._partial.values())

    def keep(self, key: int, partial: Partial, now_s: float) -> None:
        """Adds a payload that a broken connection has left partial, and drops those that are too old."""
        self._partial.pop(key, None)
        self._partial[key] = partial, now_s
        for old, (_, since_s) in list(self._partial.items()):
            if now_s - since_s > KEPT_S or self.nbytes > self._most_bytes:
                del self._partial[old]

    def take(self, key: int | None, total: int) -> Partial | None:
        """Removes and returns the part of a payload of ``total`` bytes; None if there is none."""
        partial, _ = self._partial.pop(key, (None, 0.0)) if key is not None else (None, 0.0)
        return partial if partial is not None and partial.total == total else None


#: A head, the frames behind it, and their bytes.
_Piece = tuple[Chunk | Ask, Sequence[Buffer], int]


@dataclass(frozen=True, slots=True)
class Refused:
    """A refused message, and why."""

    error: RemoteProtocolError
    header: list[Buffer]  # its first frame alone, if that is here


class Inflow:
    """Joins the chunks of one connection, or of several together, to messages, one after the other.

    Args:
        limits: Limits of one message; a larger one is refused with its first chunk.
        memory: The pool for joined frames; None: frames behind the header stay in pieces (:class:`Scattered`).

    Attributes:
        broken: A missing chunk will never come; the connections must be ended.
    """

    def __init__(self, limits: Limits, memory: ReusedMemory | None) -> None:
        self.broken = False
        self._received = {0: 0}  # bytes by connection
        self._early: dict[tuple[int, int], _Piece] = {}  # by transfer and offset
        self._early_bytes = 0
        self._memory = memory
        self._limits = limits
        self._transfer = self._total = 0
        self._offset = 0  # of the next chunk
        self._whole = True  # all of it has come
        self._refused = False  # what is left of this message is thrown away
        self._frames: list[Buffer] = []
        self._open: Opened | None = None  # the last frame, if more of it is to come

    @property
    def partial_bytes(self) -> int:
        """Bytes received of a message that is not complete."""
        return self._early_bytes + (0 if self._refused else self._offset)

    def credit(self, subflow: int = 0) -> Credit:
        """Returns the credit of a connection: bytes received, and the total up to which the sender may go."""
        received = self._received[subflow]
        return Credit(received, received + CREDIT_BYTES)

    def spread(self, subflow: int) -> None:
        """Adds a connection over which chunks may come from now on."""
        self._received[subflow] = 0

    def take_in(
        self, head: Chunk | Ask, frames: Sequence[Buffer], kept: PartialMessages | None, subflow: int = 0
    ) -> tuple[list[bytes], list[list[Buffer] | Refused]]:
        """Takes in a chunk, or a question, that came over a connection; over several, whatever is due with it.

        Args:
            head: Its first frame, read.
            frames: The frames behind the head.
            kept: Partial messages of earlier connections; None: none.
            subflow: The connection.

        Returns:
            Answers to send, and messages that are whole now, or why one is not taken in. Credit is to be sent, too.
        """
        answers: list[bytes] = []
        found: list[list[Buffer] | Refused] = []
        nbytes = sum(map(len, frames))
        self._received[subflow] += nbytes
        in_order: Iterable[_Piece] = [(head, frames, nbytes)]
        if len(self._received) > 1:
            in_order = self._in_order(head, frames, nbytes)
        for due, pieces, nbytes in in_order:
            if isinstance(due, Ask):
                answers.append(packed(self._answer(due, pieces, kept)))
            elif (taken := self._take(due, pieces, nbytes)) is not None:
                found.append(taken)
        return answers, found

    def _in_order(self, head: Chunk | Ask, frames: Sequence[Buffer], nbytes: int) -> Iterator[_Piece]:
        """Yields what can be taken in now, in order; each is, before the next one is asked for."""
        self._early[head.transfer, head.offset if isinstance(head, Chunk) else 0] = head, frames, nbytes
        self._early_bytes += nbytes
        while (first := self._early.pop(self._next, None)) is not None:
            self._early_bytes -= first[2]
            yield first
        if self._early_bytes > MOST_EARLY_BYTES:
            self._early, self._early_bytes, self.broken = {}, 0, True

    @property
    def _next(self) -> tuple[int, int]:
        """Transfer and offset of the chunk that is due."""
        return (self._transfer + 1, 0) if self._whole else (self._transfer, self._offset)

    def _answer(self, ask: Ask, frames: Sequence[Buffer], kept: PartialMessages | None) -> Resume:
        """Answers how much of a message earlier connections have brought; its chunks continue from there."""
        self._begin(Chunk(ask.transfer, ask.total, 0, 0))
        header = memoryview(frames[0]).cast("B") if frames else memoryview(b"")
        if len(frames) == 1 and 0 < header.nbytes < ask.total:
            self._frames, self._offset = [frames[0]], header.nbytes
            left = None if kept is None else kept.take(key_in(frames[0], self._limits), ask.total - header.nbytes)
            if left is not None:
                self._frames += left.frames
                self._open = left.open
                self._offset += left.nbytes
        return Resume(ask.transfer, self._offset)

    def cut_off(self) -> tuple[int, Partial] | None:
        """Returns the incomplete message with its key, at the end of the connection."""
        if self._refused or len(self._frames) < 2:
            return None
        header = memoryview(self._frames[0]).nbytes
        partial = Partial(self._frames[1:], self._open, self._offset - header, self._total - header)
        key = key_in(self._frames[0], self._limits) if partial.nbytes >= LEAST_BYTES else None
        return None if key is None else (key, partial)

    def _take(self, chunk: Chunk, frames: Sequence[Buffer], nbytes: int) -> list[Buffer] | Refused | None:
        """Adds a chunk: its head and the frames behind it.

        Returns:
            The frames of the message if it is whole now. Or why it is refused: it is too large, or this chunk does not
            continue what came before; that is said once for a message.
        """
        views = [memoryview(each).cast("B") for each in frames]
        flaw = None
        if chunk.offset == 0:
            self._begin(chunk)
        elif (chunk.transfer, chunk.total, chunk.offset) != (self._transfer, self._total, self._offset):
            if not (self._refused and (chunk.transfer, chunk.total) == (self._transfer, self._total)):
                expected = f"{(self._transfer, self._total, self._offset)}"
                flaw = _malformed(f"(transfer, total, offset) = {tuple(chunk[:3])}", expected)
            self._begin(chunk)
            self._refused = True
        header = [self._frames[0] if self._frames else views[0]] if views else []
        if not self._refused:
            flaw = self._flaw(chunk, views, nbytes) or self._kept(views, chunk.rest)
        if flaw is not None:
            self._refused, self._frames, self._open = True, [], None
        self._offset += nbytes
        message = self._frames
        if self._offset >= self._total:
            self._frames, self._open, self._offset, self._whole = [], None, 0, True
            if not self._refused:
                return message
        return None if flaw is None else Refused(flaw, header)

    def give_up(self) -> None:
        """Drops the incomplete message; the rest of it is discarded as it comes."""
        self._refused, self._frames, self._open = True, [], None
        self._early, self._early_bytes = {}, 0

    def _begin(self, chunk: Chunk) -> None:
        self._transfer, self._total, self._offset = chunk.transfer, chunk.total, chunk.offset
        self._whole, self._refused, self._frames, self._open = False, False, [], None

    def _flaw(self, chunk: Chunk, views: Sequence[memoryview], nbytes: int) -> RemoteProtocolError | None:
        most_bytes = self._limits.max_message_bytes
        if chunk.total > most_bytes:
            expected = f"at most {most_bytes} bytes"
            return RemoteProtocolError(Reason.OVERSIZE, field="message", got=chunk.total, expected=expected)
        number = len(self._frames) + len(views)
        if number > self._limits.max_buffers + 1:
            expected = f"at most {self._limits.max_buffers}"
            return RemoteProtocolError(Reason.OVERSIZE, field="number of buffers", got=number - 1, expected=expected)
        left = self._total - self._offset
        if not 0 < nbytes <= left or chunk.rest > left - nbytes:
            return _malformed(f"{nbytes} bytes, {chunk.rest} left of its last frame", f"1 to {left} in all")
        if self._open is not None:
            piece, rest = views[0].nbytes, chunk.rest if len(views) == 1 else 0
            missing = self._open.missing_bytes
            if missing != piece + rest:
                return _malformed(f"{piece} bytes of a frame, {rest} to come", f"{missing} together")
        return None

    def _kept(self, views: list[memoryview], rest: int) -> RemoteProtocolError | None:
        """Adds the pieces of a chunk; returns a refusal if there is no memory for what they announce."""
        try:
            if self._open is not None:
                self._open.add(views.pop(0))
                self._open = self._open if self._open.missing_bytes else None
            last = views.pop() if rest and views else None
            self._frames += views
            if last is not None:
                self._open = opened = self._opened(last.nbytes + rest)
                opened.add(last)
                self._frames.append(opened if isinstance(opened, Scattered) else opened.buffer)
        except MemoryError:
            expected = "what the memory that is free here holds"
            return RemoteProtocolError(Reason.OVERSIZE, field="message", got=self._total, expected=expected)
        return None

    def _opened(self, nbytes: int) -> Opened:
        """Returns an empty frame, to be filled with ``nbytes``."""
        if self._memory is not None:
            return Joined(self._memory.take(nbytes))
        return Scattered(nbytes, fresh) if self._frames else Joined(fresh(nbytes))


def _malformed(got: str, expected: str) -> RemoteProtocolError:
    return RemoteProtocolError(Reason.MALFORMED, field="chunk", got=got, expected=expected)
