"""The training state at one boundary between inner steps: its counters, and copies for a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
Leaf = Any


@dataclass(frozen=True, slots=True)
class Position:
    """The training thread's two counters, over all lives of the island."""

    step: int
    tokens: int


#: Before the first step.
ORIGIN = Position(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Copies for a checkpoint: the caller's state, and parameters that are never synchronised."""

    state: Any  # the optimizer's tree, its leaves copied
    cursor: int | None  # None: the caller keeps none
    local: tuple[Leaf, ...]
    run_id: str = ""  # whose this is; empty: of no run
