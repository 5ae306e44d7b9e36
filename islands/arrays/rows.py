"""Rows of a leaf: what a fragment has of a tensor that the run has cut (:func:`broker.wire.fragments.cut`).

Views in numpy, and small copies under JAX, which are only dispatched. They go back into a new leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from islands import arguments

Leaf = Any  #: an array of numpy or JAX


def rows_of(leaf: Leaf, start: int, stop: int) -> Leaf:
    """Returns some rows of a leaf's first axis: a view of numpy's, or an array of JAX that is only dispatched."""
    if not arguments.on_device(leaf):
        return leaf[start:stop]
    from islands.arrays import jax_placement

    return jax_placement.rows_of(leaf, start, stop)


def with_rows(leaf: Leaf, pieces: Sequence[tuple[int, Leaf]]) -> Leaf:
    """Returns a new leaf with some of its rows replaced; that of JAX is only dispatched.

    Args:
        leaf: As it was.
        pieces: Each with the number of its first row, and of the sort and place that :func:`rows_of` gives.
    """
    if arguments.on_device(leaf):
        from islands.arrays import jax_placement

        return jax_placement.with_rows(leaf, pieces)
    covered = sum(len(piece) for _, piece in pieces) == len(leaf)
    new = np.empty(leaf.shape, leaf.dtype) if covered else np.array(leaf)
    for start, piece in pieces:
        new[start : start + len(piece)] = piece
    return new
