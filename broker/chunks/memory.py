"""Reuses memory: a new page costs the kernel more than the bytes that are written to it. Pure.

Frames that came in pieces are copied together there, where somebody reads them (:class:`Joined`).
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from broker.wire.messages.scattered import Scattered

Octets = NDArray[np.uint8]


class ReusedMemory:
    """Pieces of memory that come back once nothing refers to them, not even a view or a buffer.

    At most ``most`` pieces of ``most_bytes`` together are kept for later; beyond that the oldest go to the system.
    """

    def __init__(self, most: int, most_bytes: float = math.inf) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._spare: deque[NDArray[Any]] = deque()

    def take(self, nbytes: int) -> Octets:
        """Returns memory of so many bytes, not initialised; from any thread."""
        memory = self._fitting(nbytes)
        if memory is None:
            memory = np.empty(max(nbytes, 1), np.uint8)
        # By way of a buffer: a plain view's own views would refer to ``memory``, and not to what is returned.
        taken = np.frombuffer(memory.data, np.uint8, nbytes)
        weakref.finalize(taken, self._back, memory).atexit = False
        return taken

    def floats(self, size: int) -> NDArray[np.float32]:
        """Returns memory of so many float32, likewise."""
        return np.frombuffer(self.take(4 * size).data, np.float32, size)

    def _fitting(self, nbytes: int) -> NDArray[Any] | None:
        for _ in range(len(self._spare)):
            try:
                memory = self._spare.pop()  # what came back last may still be in a cache
            except IndexError:  # another thread was faster
                break
            if nbytes <= memory.nbytes <= 2 * nbytes:
                return memory
            self._spare.appendleft(memory)
        return None

    def _back(self, memory: NDArray[Any]) -> None:
        self._spare.append(memory)
        kept = tuple(self._spare)
        excess = len(kept) - self._most
        nbytes = sum(each.nbytes for each in kept)
        while excess > 0 or nbytes > self._most_bytes:
            try:
                nbytes -= self._spare.popleft().nbytes
            except IndexError:
                break
            excess -= 1


def fresh(nbytes: int) -> memoryview:
    """Returns new memory of so many bytes, not initialised."""
    return np.empty(nbytes, np.uint8).data


class Joined:
    """A frame that is copied together, into memory of its size."""

    def __init__(self, memory: Any) -> None:
        self.buffer = memoryview(memory)
        self._missing = self.buffer

    @property
    def missing_bytes(self) -> int:
        """Bytes of the frame that have not come yet."""
        return self._missing.nbytes

    def add(self, piece: memoryview) -> None:
        """Copies the next bytes."""
        self._missing[: piece.nbytes] = piece
        self._missing = self._missing[piece.nbytes :]


#: A frame of which more is to come.
Opened = Joined | Scattered
