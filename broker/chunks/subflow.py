"""Limits the bytes under way over one connection, by the receiver's credit and by the speed. Pure.

The word is that of Multipath TCP (RFC 8684). A flow begins with one, and has more where one TCP connection cannot fill
a long link; each has its own credit, and finds out by itself how much its connection takes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from broker.chunks.chunk_heads import Credit

Piece = TypeVar("Piece")

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


@dataclass(slots=True)
class Noted(Generic[Piece]):
    """Newly noted as received: whole pieces, bytes in all, and the time when the first was sent.

    ``sent_s`` is None if no piece is complete.
    """

    pieces: list[Piece]
    nbytes: int
    sent_s: float | None


@dataclass(slots=True)
class Subflow(Generic[Piece]):
    """The sender's state of one connection: bytes under way, their window and the receiver's credit."""

    given_bytes: int = 0  # handed to the connection in chunks
    received_bytes: int = 0  # of these, noted by the other end
    window_bytes: int = FIRST_BYTES  # what may be under way at a time, as far as the connection is known
    _limit_bytes: int = FIRST_BYTES
    _under_way: deque[tuple[int, float, Piece]] = field(default_factory=deque)  # (given by then, when, what)
    _held_up: bool = False  # something waited for the window
    _judged_from: int = 0  # what was given before says nothing of this window
    _noted_s: float = 0.0  # when anything was noted last
    _slowest_s: float = 0.0  # of what took longest lately

    @property
    def under_way_bytes(self) -> int:
        """Bytes handed to the connection that the receiver has not noted."""
        return self.given_bytes - self.received_bytes

    @property
    def chunk_bytes(self) -> int:
        """Most bytes of a chunk over this connection."""
        return min(MOST_CHUNK_BYTES, max(LEAST_CHUNK_BYTES, self.window_bytes // CHUNKS_UNDER_WAY))

    def takes(self, nbytes: int) -> bool:
        """Returns True if a chunk of ``nbytes`` may go now."""
        if self.under_way_bytes + nbytes > self.window_bytes:
            self._held_up = True
            return False
        return self.given_bytes + nbytes <= self._limit_bytes

    def sent(self, piece: Piece, nbytes: int, now_s: float) -> None:
        """Notes that the connection has taken a chunk."""
        self.given_bytes += nbytes
        self._under_way.append((self.given_bytes, now_s, piece))

    def credited(self, credit: Credit, now_s: float) -> Noted[Piece]:
        """Takes the receiver's credit, of which no more than was sent is believed."""
        before = self.received_bytes
        self.received_bytes = max(before, min(credit.received, self.given_bytes))
        self._limit_bytes = max(self._limit_bytes, credit.limit)
        noted: Noted[Piece] = Noted([], self.received_bytes - before, None)
        sent_s = now_s
        while self._under_way and self._under_way[0][0] <= self.received_bytes:
            _, sent_s, piece = self._under_way.popleft()
            noted.pieces.append(piece)
            noted.sent_s = sent_s if noted.sent_s is None else noted.sent_s
        if noted.pieces:
            self._judge(now_s - sent_s, now_s)
        return noted

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
        if not self._under_way:
            return 0.0
        return now_s - max(self._noted_s, self._under_way[0][1])

    @property
    def patience_s(self) -> float:
        """Seconds of silence after which the bytes under way count as lost."""
        return max(STALLED_S, STALLED_TIMES * self._slowest_s)
