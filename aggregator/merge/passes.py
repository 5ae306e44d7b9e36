"""Passes over one tensor of every contribution, in pieces that may be computed side by side.

How a tensor is cut follows from its shape alone, and what pieces find out is added in their order: so the bytes do not
depend on the number of threads. :mod:`aggregator.merge.compiled` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aggregator.merge.fragment_state import Vector
from aggregator.merge.layout import (
    DELTA,
    MOMENTUM,
    NEW_MOMENTUM,
    NEW_PARAMS,
    PARAMS,
    RESIDUAL,
    Longs,
    Source,
    address_of,
    table,
)
from aggregator.merge.resources import Spread, in_turn

Doubles = NDArray[np.float64]

#: Elements of a piece: half a millisecond of work for four contributions, fifty times what calling for it takes.
PIECE = 1 << 18

_NONE, _NO_PAIRS = np.zeros((0, 0), np.float32), np.zeros((0, 0, 0))
#: The largest float32 that is finite, as its bits: kernels return the largest magnitude that they wrote.
LARGEST_FINITE = 0x7F7FFFFF
_loaded: list[Kernels] = []


class Kernels(NamedTuple):
    """The compiled kernels, and the elements of their scratch memory and of a block."""

    folded: Callable[..., int]
    rounded: Callable[..., int]
    scratch: int
    block: int


@dataclass(slots=True)
class Target:
    """Vectors of a fragment that passes read and write: float32, contiguous; None: absent or unwanted.

    Attributes:
        params: Parameters before the outer step.
        residual: Added to them.
        momentum: Momentum before the outer step.
        new_params: Parameters after it.
        new_momentum: Momentum after it.
        delta: The merged pseudo-gradient.
        rate: Learning rate and momentum of the outer step.
        finite: Whether all parameters so far are.
    """

    params: Vector | None = None
    residual: Vector | None = None
    momentum: Vector | None = None
    new_params: Vector | None = None
    new_momentum: Vector | None = None
    delta: Vector | None = None
    rate: tuple[float, float] = (0.0, 0.0)
    finite: bool = True

    def places(self) -> Longs:
        """Returns their addresses."""
        places = np.zeros(6, np.int64)
        places[PARAMS], places[RESIDUAL] = address_of(self.params), address_of(self.residual)
        places[MOMENTUM], places[DELTA] = address_of(self.momentum), address_of(self.delta)
        places[NEW_PARAMS], places[NEW_MOMENTUM] = address_of(self.new_params), address_of(self.new_momentum)
        return places


class _Piece(NamedTuple):
    """Whole rows, or the ``chunk``-th part of one row."""

    row: int
    rows: int
    start: int
    columns: int
    chunk: int


def fold(
    sources: Sequence[Source],
    factors: Doubles | None,
    offset: int,
    rows: int,
    columns: int,
    target: Target,
    spread: Spread,
    *,
    counted: int = 2,
    beside: Doubles | None = None,
    products: Doubles | None = None,
    first_row: int = 0,
) -> Doubles:
    """Makes one pass over rows of a tensor; returns sums of squares, float64 [k + 4, rows].

    These are of each contribution, of what was folded, and of what was folded ``beside``; 0 if not ``counted``. Where
    the pass takes the outer step: the product of what was folded and the momentum before, and the latter's square.

    Args:
        sources: The tensor, as each of k contributions has it.
        factors: float64 [k, rows] or [k, 1], by which they are folded, applied in float32; None: not at all.
        offset: Element of the fragment with which the tensor begins.
        rows: The rows to work on.
        columns: Elements of a row.
        target: Takes what is folded: the merged pseudo-gradient, or the parameters after the outer step, or both.
        spread: Spreads the pieces over threads.
        counted: Which lengths are wanted: 0 none, 1 those of folds, 2 those of contributions, too.
        beside: float64 [k]: factors of a second fold; then only the lengths of both folds are wanted.
        products: float64 [k * (k - 1) / 2]: scalar products of any two contributions are added to it.
        first_row: First row of the tensor in this pass.
    """
    kernel, size = kernels().folded, kernels().scratch
    k = len(sources)
    if products is not None and k > 4:
        size += k * kernels().block
    cut = _pieces(rows, columns)
    sums = np.zeros((k + 4, rows, -(-columns // PIECE)))
    pairs = _NO_PAIRS if products is None else np.zeros((products.size, *sums.shape[1:]))
    by32 = _NONE if factors is None else np.array(np.broadcast_to(factors, (k, rows)), np.float32)
    beside32 = _NONE if beside is None else beside.astype(np.float32).reshape(k, 1)
    places, rate = target.places(), np.array(target.rate, np.float32)

    def one(i: int) -> int:
        piece = cut[i]
        first, kept = (first_row + piece.row) * columns + piece.start, list[Vector]()
        lines = table(sources, first, piece.rows * piece.columns, kept)
        of = slice(piece.row, piece.row + piece.rows)
        here = np.where(places, places + 4 * (offset + first), 0)
        by = by32 if by32 is _NONE else np.ascontiguousarray(by32[:, of])
        into, compared, scratch = sums[:, of], pairs[:, of], np.empty(size, np.float32)
        at = address_of(scratch)
        found = kernel(
            lines, first, piece.rows, piece.columns, by, beside32, counted, here, rate, into, compared, piece.chunk, at
        )
        del scratch, kept  # until here they were at work
        return int(found)

    largest = max(spread(one, len(cut)))
    if products is not None:
        products += pairs.sum(axis=(1, 2))
    target.finite = target.finite and largest <= LARGEST_FINITE
    return sums.sum(axis=2) if sums.shape[2] > 1 else sums[:, :, 0]


def warm_up() -> None:
    """Compiles the kernels, or loads them: the first merge would wait for it otherwise."""
    fold([], np.zeros((0, 1)), 0, 1, 1, Target(delta=np.empty(1, np.float32)), in_turn)


def is_warm() -> bool:
    """Returns True once the compiled kernels are loaded in this process; the first merge needs them."""
    return bool(_loaded)


def kernels() -> Kernels:
    """Returns the compiled kernels, imported here: it takes seconds, and only an aggregator merges."""
    if not _loaded:
        from aggregator.merge import compiled, compiled_rounding

        _loaded.append(Kernels(compiled.folded, compiled_rounding.rounded, compiled.SCRATCH, compiled.BLOCK))
    return _loaded[0]


def _pieces(rows: int, columns: int) -> list[_Piece]:
    """Cuts rows into pieces of one size or less."""
    if columns >= PIECE:
        return [
            _Piece(row, 1, start, min(PIECE, columns - start), start // PIECE)
            for row in range(rows)
            for start in range(0, columns, PIECE)
        ]
    height = PIECE // columns
    return [_Piece(row, min(height, rows - row), 0, columns, 0) for row in range(0, rows, height)]
