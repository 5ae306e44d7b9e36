"""The threads and the memory that a merge may use. Pure: whoever has threads lends them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.merge.fragment_state import Vector

#: Calls a function with 0, 1, .. and so on, in any order and in as many threads as there are, and returns the results.
Spread = Callable[[Callable[[int], int], int], Iterable[int]]


def in_turn(call: Callable[[int], int], count: int) -> Iterable[int]:
    """Spreads over no threads: one call after the other."""
    return [call(i) for i in range(count)]


def fresh(size: int) -> Vector:
    """Returns a new vector, its elements undefined."""
    return np.empty(size, np.float32)


@dataclass(frozen=True, slots=True)
class Resources:
    """The threads and memory of a merge: ``spread`` runs its pieces, ``empty`` returns vectors for its results."""

    spread: Spread = in_turn
    empty: Callable[[int], Vector] = fresh


#: One thread, and memory as it comes.
PLAIN = Resources()


class ReusedMemory:
    """Vectors whose memory has been used before, which is worth half of a merge: a new page costs more than its bytes.

    Memory comes back when nobody refers to its vector any more, views and buffers that are being sent included.

    Args:
        most: Pieces of memory that are kept for later.
    """

    def __init__(self, most: int = 3) -> None:
        self._spare: deque[NDArray[Any]] = deque(maxlen=most)

    def empty(self, size: int) -> Vector:
        """Returns a vector, its elements undefined; from any thread."""
        memory = self._taken(size)
        # By way of a buffer: a plain view's own views would refer to ``memory``, and not to the vector.
        vector = np.frombuffer(memory.data, np.float32, size)
        weakref.finalize(vector, self._spare.append, memory).atexit = False
        return vector

    def _taken(self, size: int) -> NDArray[Any]:
        for _ in range(len(self._spare)):
            try:
                memory = self._spare.popleft()
            except IndexError:  # another thread was faster
                break
            if size <= memory.size <= 2 * size:
                return memory
            self._spare.append(memory)
        return np.empty(max(size, 1), np.float32)
