"""A buffer of a message in several pieces, as it was received. Pure.

A broker passes tensors on without looking into them. To copy their chunks together first took it a quarter of its time
and as much new memory again. It need not, as they leave it in chunks, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

#: A smaller piece is copied behind others: what came over a slow link in thousands of chunks leaves in few.
LEAST_PIECE_BYTES = 512 << 10
#: What such pieces are copied to.
BLOCK_BYTES = 2 << 20


class Scattered:
    """One buffer of ``nbytes`` in pieces; small pieces are copied into ``fresh`` memory.

    Attributes:
        missing_bytes: Those that have not arrived yet.
    """

    __slots__ = ("_begins", "_fresh", "_pieces", "_room", "missing_bytes", "nbytes")

    def __init__(self, nbytes: int, fresh: Callable[[int], memoryview]) -> None:
        self.nbytes, self._fresh = nbytes, fresh
        self.missing_bytes = nbytes
        self._pieces: list[memoryview] = []
        self._begins: list[int] = []
        self._room = memoryview(b"")  # what is free of the last one

    def add(self, piece: memoryview) -> None:
        """Appends the next bytes; raises MemoryError if there is no room for them."""
        if piece.nbytes >= LEAST_PIECE_BYTES:
            self._close()
            self._append(piece)
            self.missing_bytes -= piece.nbytes
            return
        while piece.nbytes:
            if not self._room.nbytes:
                self._room = self._fresh(min(BLOCK_BYTES, self.missing_bytes))
                self._append(self._room)
            taken = min(self._room.nbytes, piece.nbytes)
            self._room[:taken] = piece[:taken]
            self._room, piece = self._room[taken:], piece[taken:]
            self.missing_bytes -= taken

    def _close(self) -> None:
        """Trims the last piece to its content."""
        if self._room.nbytes:
            self._pieces[-1] = self._pieces[-1][: -self._room.nbytes]
            self._room = memoryview(b"")

    def _append(self, piece: memoryview) -> None:
        self._begins.append(self.nbytes - self.missing_bytes)
        self._pieces.append(piece)

    def __iter__(self) -> Iterator[memoryview]:
        """Yields the pieces, in order."""
        return iter(self._pieces)

    def __getitem__(self, part: slice) -> memoryview:
        """Returns the bytes of ``part`` that lie in one place: at least one, unless it begins at the end."""
        if part.start >= self.nbytes:
            return memoryview(b"")
        place = bisect_right(self._begins, part.start) - 1
        begin = self._begins[place]
        return self._pieces[place][part.start - begin : part.stop - begin]
