"""The threads and memory that a merge may use, handed in by the caller. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from aggregator.merge.fragment_state import Vector

#: Calls a function with 0, 1, .. and so on, in any order and in as many threads as there are, and returns the results.
Spread = Callable[[Callable[[int], int], int], Iterable[int]]


def in_turn(call: Callable[[int], int], count: int) -> Iterable[int]:
    """Makes the calls one after another, without threads."""
    return [call(i) for i in range(count)]


def fresh(size: int) -> Vector:
    """Returns a new vector, its elements undefined."""
    return np.empty(size, np.float32)


@dataclass(frozen=True, slots=True)
class Resources:
    """A merge's threads and memory: ``spread`` runs its pieces, ``empty`` makes vectors for results."""

    spread: Spread = in_turn
    empty: Callable[[int], Vector] = fresh


#: One thread, and memory as it comes.
PLAIN = Resources()
