"""Rows of numpy arrays: sections of a tensor cut by the run (:func:`broker.wire.fragments.cut`). Pure.

Those of JAX are in :mod:`islands.arrays.jax_placement`, under the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def rows_of(leaf: Array, start: int, stop: int) -> Array:
    """Returns a view of some rows of the first axis."""
    return leaf[start:stop]


def with_rows(leaf: Array, sections: Sequence[tuple[int, Array]]) -> Array:
    """Returns a new array, that of ``leaf`` with some rows replaced.

    Args:
        leaf: As it was.
        sections: Each with the number of its first row; no two have a row in common.
    """
    replaced = sum(len(section) for _, section in sections)
    new = np.empty(leaf.shape, leaf.dtype) if replaced == len(leaf) else np.array(leaf)
    for start, section in sections:
        new[start : start + len(section)] = section
    return new
