"""The training state at one boundary between inner steps: its counters, and copies for a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy.typing as npt

from broker.wire.messages import FASTEST_STEP_S, SLOWEST_STEP_S
from islands.arrays.plain_leaves import as_array, is_plain
from islands.protocol.fragment import Point

Array = npt.NDArray[Any]
Leaf = Any


#: The training thread's two counters, over all lives of the island.
Position = Point
#: Before the first step.
ORIGIN = Position(0, 0)


class Copies(NamedTuple):
    """Copies of a fragment's leaves.

    Attributes:
        step: Steps run by then.
        boundary: The number of the boundary at which they were taken, where several hosts count them.
        leaves: The copies.
    """

    step: int
    boundary: int
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Copies for a checkpoint: the caller's state, and parameters that are never synchronised."""

    state: Any  # the optimizer's tree, its leaves copied
    cursor: int | None  # None: the caller keeps none
    local: tuple[Leaf, ...]
    run_id: str = ""  # whose this is; empty: of no run


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """The required form of a state: this island's own leaves, with their names.

    Attributes:
        state: Of the fresh optimizer; what counts is names, sorts, shapes, and which values are not finite.
        local: Parameters that are never synchronised, in the same form.
    """

    state: Sequence[tuple[str, Any]]
    local: Sequence[tuple[str, Any]]

    @property
    def most_bytes(self) -> int:
        """Returns an upper bound of the size of a fitting state, in bytes."""
        leaves = [*self.state, *self.local]
        arrays = sum(int(as_array(leaf).nbytes if is_plain(leaf) else getattr(leaf, "nbytes", 8)) for _, leaf in leaves)
        return arrays + (1 << 16) + 512 * len(leaves) + 4 * sum(len(name) for name, _ in leaves)


#: Of the step times' moving average; a single one counts for at most this multiple of it.
STEP_TIME_MEMORY, MOST_OF_ONE_STEP = 0.9, 4.0


def step_time_s(average_s: float | None, recent_s: float) -> float:
    """Returns the moving average with one more step; no pause spoils it, and it is within peers' limits."""
    if average_s is not None:
        recent_s = min(recent_s, MOST_OF_ONE_STEP * average_s)
        recent_s = STEP_TIME_MEMORY * average_s + (1 - STEP_TIME_MEMORY) * recent_s
    return min(max(recent_s, FASTEST_STEP_S), SLOWEST_STEP_S)
