"""A pool of buffers: fresh pages cost more than writing to them. Pure."""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

Octets = NDArray[np.uint8]


class ReusedMemory:
    """A pool of buffers, each returned once nothing refers to it, not even a view.

    At most ``most`` buffers of ``most_bytes`` together are kept; beyond that the oldest go back to the system.
    """

    def __init__(self, most: int, most_bytes: float = math.inf) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._spare: deque[NDArray[Any]] = deque()

    def take(self, nbytes: int) -> Octets:
        """Returns ``nbytes`` of uninitialised memory; may be called from any thread."""
        memory = self._fitting(nbytes)
        if memory is None:
            memory = np.empty(max(nbytes, 1), np.uint8)
        # By way of a buffer: a plain view's own views would refer to ``memory``, and not to what is returned.
        taken = np.frombuffer(memory.data, np.uint8, nbytes)
        weakref.finalize(taken, self._back, memory).atexit = False
        return taken

    def floats(self, size: int) -> NDArray[np.float32]:
        """Returns uninitialised memory for ``size`` float32 numbers; may be called from any thread."""
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
