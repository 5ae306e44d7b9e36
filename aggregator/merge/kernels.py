"""Merges the contributions of one round into one vector, in blocks that fit the cache.

Two rules, chosen per tensor by its :class:`broker.wire.fragments.Kind`, with w the token weights and lambda the
staleness weights of the contributions (:mod:`aggregator.rules.staleness`):

    mean:  D = sum(w * lambda * Delta) / sum(w)
    RDA:   D = [sum(w * lambda * ||Delta||) / sum(w)] * unit(sum(w * lambda * unit(Delta)))        per unit

Radial-directional averaging (Decoupled DiLoCo, https://arxiv.org/abs/2604.21428, appendix D.2) averages length and
direction apart, because pseudo-gradients of different islands are nearly orthogonal: their plain mean shrinks with
the root of their number, and the right outer learning rate would drift with it. Where they are not orthogonal but
oppose each other, full length along what little is left would be a step into noise. So the length is capped:

    ||D|| <= ||mean|| / sqrt(sum of squared shares),      share = w / sum(w)

which is the RDA length itself for orthogonal contributions of one length, and falls to zero as they cancel.

Contributions are never stacked: memory is the result and a few blocks, whatever the number of islands. Each encoded
payload is read once for ``mean`` and twice for ``rda`` (lengths first, then directions), and decoded block by block on
the way; codecs may differ from island to island, and the result is, to the last bit, that of the decoded tensors.
Contributions are folded in the order given, block by block, without a threaded BLAS call, so that the same payloads in
the same order give the same bytes again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from aggregator.events import Part, Pieced
from aggregator.merge.pieces import Pieces, elements_of
from broker.wire.errors import LocalProtocolError
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.lengths import encoded_bytes
from broker.wire.tensors import Elements

Vector = NDArray[np.float32]
Doubles = NDArray[np.float64]

#: Elements per block: 512 KiB of float32. Block, scratch and one input fit a 2 MiB second-level cache; of 2^13 to
#: 2^17 the fastest measured, since each numpy call costs a microsecond.
BLOCK = 1 << 17

#: Elements per dot product. Fewer than the 10,000 from which OpenBLAS spreads one over threads: spinning threads are
#: slow beside other work, and the rounding would depend on their number. Partial sums are added in float64.
LANE = 1 << 13

#: Directions that cancel to less than this share of their terms are rounding noise (float32 leaves about 1e-7).
CANCELLED = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedFragment:
    """One merged fragment with what is worth knowing about it; lengths are Euclidean, over all tensors not frozen.

    Attributes:
        delta: D, float32 [elements of the fragment], tensors in manifest order; zero where frozen.
        norm: Of ``delta``.
        mean_norm: Of the plain weighted mean, whatever the kinds.
        norms: Of each contribution, in the order given.
        cosine: Weighted mean of the cosines between any two contributions; None if fewer than two count.
            Near 0 islands found different things, near 1 they found the same, below 0 they undo each other.
    """

    delta: Vector
    norm: float
    mean_norm: float
    norms: tuple[float, ...]
    cosine: float | None


def merge_fragment(tensors: Sequence[TensorSpec], parts: Sequence[Part], *, capped: bool = True) -> MergedFragment:
    """Returns the merged pseudo-gradient of one fragment.

    Args:
        tensors: The fragment, in manifest order.
        parts: At least one, in the order to fold: payloads of one buffer per tensor, in any codec, with final
            weights.
        capped: Whether the length of an RDA is capped.

    Raises:
        LocalProtocolError: If a payload does not fit the tensors, or a weight is negative or not finite: such
            contributions are refused at the door.
    """
    _check(tensors, parts)
    total = math.fsum(part.token_weight for part in parts)
    shares = np.array([part.token_weight / total if total else 0.0 for part in parts])
    weights = shares * np.array([part.staleness_weight for part in parts])
    delta = np.zeros(sum(tensor.size for tensor in tensors), np.float32)
    scratch = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    squares, mean_square, norm_square = np.zeros(len(parts)), 0.0, 0.0
    offset = 0
    for index, tensor in enumerate(tensors):
        region = delta[offset : offset + tensor.size]
        offset += tensor.size
        if tensor.kind is Kind.FROZEN or not tensor.size:
            continue
        units = math.prod(tensor.shape[: tensor.unit_axes]) if tensor.kind is Kind.RDA else 1
        columns = tensor.size // units
        sources = [elements_of(part.payload[index]) for part in parts]
        for rows in _strips(units, columns):
            strip = _Strip(sources, rows.start * columns, region.reshape(units, columns)[rows], scratch)
            mean, lengths = strip.weighted_mean(weights)
            out = mean
            if tensor.kind is not Kind.MEAN:
                out = strip.radial_directional(shares, weights, mean, lengths, capped=capped)
            squares += np.square(lengths).sum(axis=1)
            mean_square += float(np.square(mean).sum())
            norm_square += float(np.square(out).sum())
    norms = np.sqrt(squares)
    return MergedFragment(
        delta=delta,
        norm=math.sqrt(norm_square),
        mean_norm=math.sqrt(mean_square),
        norms=tuple(float(n) for n in norms),
        cosine=_mean_cosine(weights * norms, mean_square),
    )


class _Strip:
    """Some whole units of one tensor, from every contribution: k rows of n elements each, in blocks.

    Either one row longer than a block, or as many short rows as fill one, so that a stacked tensor of many small
    units costs no more than a plain one. Either way a block is a range of the tensor's elements without gaps, whatever
    the boundaries of units and of the blocks that share a scale.

    Args:
        sources: The tensor, as each contribution has it.
        first: Element of the tensor with which the strip begins.
        out: Where the result of the strip belongs, float32 [k, n].
        scratch: Two blocks.
    """

    def __init__(
        self, sources: list[Elements | Pieces], first: int, out: Vector, scratch: tuple[Vector, Vector]
    ) -> None:
        self._sources = sources
        self._first = first
        self._out = out
        self._tile, self._term = scratch

    def weighted_mean(self, weights: Doubles) -> tuple[Doubles, Doubles]:
        """Writes the weighted mean to the output.

        Args:
            weights: ``w * lambda / sum(w)``, float64 [contributions].

        Returns:
            The lengths of its rows, float64 [k], and of the contributions' rows, float64 [contributions, k].
        """
        squares = np.zeros((len(self._sources), len(self._out)))
        mean = self._fold(np.repeat(weights[:, None], len(self._out), axis=1), squares)
        return mean, np.sqrt(squares)

    def radial_directional(
        self,
        shares: Doubles,
        weights: Doubles,
        mean: Doubles,
        lengths: Doubles,
        *,
        capped: bool,
    ) -> Doubles:
        """Replaces the weighted mean in the output by the RDA of each row; returns its lengths, float64 [k].

        Args:
            shares: ``w / sum(w)``, float64 [contributions].
            weights: ``w * lambda / sum(w)``, float64 [contributions].
            mean: Lengths of the weighted mean, float64 [k].
            lengths: Lengths of the contributions, float64 [contributions, k].
            capped: Whether lengths are limited where directions oppose each other.
        """
        if np.count_nonzero(shares) < 2:
            return mean  # the direction of a single contribution is its own, and its length too: nothing to average
        radius = weights @ lengths
        # Unit vectors are scaled by the radius on the way: directions of large and of tiny units alike then stay in
        # float32's range. unit(0) = 0, and a vector 1e20 times shorter than its peers counts as 0.
        counts = lengths > 1e-20 * radius
        factors = np.divide(weights[:, None] * radius, lengths, out=np.zeros_like(lengths), where=counts)
        direction = self._fold(factors)
        cancelled = direction <= CANCELLED * radius * (weights[:, None] * counts).sum(axis=0)
        if capped:
            radius = np.minimum(radius, mean / math.sqrt(math.fsum(shares * shares)))
        scale = np.divide(radius, direction, out=np.ones_like(direction), where=~cancelled)
        if cancelled.any():
            # The remaining direction is noise, the mean is not: equal directions of unequal length leave it behind.
            factors[:, cancelled], scale[cancelled] = weights[:, None], 1.0
            self._fold(factors)
        for start in range(0, self._out.shape[1], BLOCK):
            block = self._out[:, start : start + BLOCK]
            np.multiply(block, scale.astype(np.float32)[:, None], out=block)
        return np.where(cancelled, mean, radius)

    def _fold(self, factors: Doubles, squares: Doubles | None = None) -> Doubles:
        """Writes ``sum(factor * Delta)`` to the output, in the order of the contributions; returns its lengths [k].

        Args:
            factors: float64 [contributions, k], applied in float32.
            squares: Where given, the squared lengths of the contributions are added to it, same shape.
        """
        columns = self._out.shape[1]
        factors32 = factors.astype(np.float32)[:, :, None]
        sums = np.zeros(len(self._out))
        for start in range(0, columns, BLOCK):
            block = self._out[:, start : start + BLOCK]
            term = self._term[: block.size].reshape(block.shape)
            for i, source in enumerate(self._sources):
                tile = source.read(self._first + start, self._tile[: block.size]).reshape(block.shape)
                if squares is not None:
                    squares[i] += _squares(tile)
                if i == 0:
                    np.multiply(tile, factors32[i], out=block)
                else:
                    np.multiply(tile, factors32[i], out=term)
                    np.add(block, term, out=block)
            sums += _squares(block)
        return cast(Doubles, np.sqrt(sums))


def _strips(rows: int, columns: int) -> Iterator[slice]:
    """Cuts units into strips: one long unit, or as many short ones as fill a block."""
    height = max(1, BLOCK // columns)
    return (slice(start, min(start + height, rows)) for start in range(0, rows, height))


def _squares(tile: Vector) -> Doubles:
    """Returns the sum of squares of each row of [k, n], float64 [k]; not finite only if an element is not."""
    rows, columns = tile.shape
    whole = columns - columns % LANE
    lanes = tile[:, :whole].reshape(rows, -1, LANE)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.vecdot(lanes, lanes).sum(axis=1, dtype=np.float64) + np.vecdot(tile[:, whole:], tile[:, whole:])
    # Squares leave float32's range long before the elements do. Rare: exact zeros, and values nobody trains with.
    for row in np.flatnonzero(~((sums > 1e-30) & (sums < np.inf))):
        sums[row] = np.square(tile[row], dtype=np.float64).sum()
    return cast(Doubles, sums)


def _mean_cosine(lengths: Doubles, square_of_sum: float) -> float | None:
    """Returns the mean cosine of vectors known by their lengths and that of their sum, weighted by length products.

    ||sum x||^2 = sum ||x||^2 + sum over pairs ||x|| ||y|| cos(x, y)
    """
    squares = float(np.square(lengths).sum())
    pairs = float(lengths.sum()) ** 2 - squares
    return (square_of_sum - squares) / pairs if np.count_nonzero(lengths) > 1 and pairs > 0 else None


def _check(tensors: Sequence[TensorSpec], parts: Sequence[Part]) -> None:
    if not parts:
        raise LocalProtocolError("a round without contributions cannot be merged: cancel it")
    for part in parts:
        weights = (part.token_weight, part.staleness_weight)
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            raise LocalProtocolError(f"weights of {part.island_id} are {weights}, must be finite and not negative")
        if len(part.payload) != len(tensors):
            raise LocalProtocolError(f"{part.island_id} sent {len(part.payload)} buffers for {len(tensors)} tensors")
        for tensor, encoded in zip(tensors, part.payload, strict=True):
            if isinstance(encoded, Pieced):
                continue  # looked at when its last piece came
            got, expected = memoryview(encoded.data).nbytes, encoded_bytes(encoded.codec, tensor.size)
            if got != expected:
                what = f"{tensor.name} from {part.island_id}"
                raise LocalProtocolError(f"{what} has {got} bytes as {encoded.codec}, its shape takes {expected}")
