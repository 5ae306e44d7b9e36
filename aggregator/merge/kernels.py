"""Merges the contributions of one round: into one vector, or into the next version.

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

Contributions are never stacked: memory is the result, whatever the number of islands. The mean is one pass over the
encoded payloads. RDA is three: lengths, unless they were kept from inspection (:mod:`aggregator.merge.lengths`); the
length of the direction, which is not written; and the fold, by factors that hold all of it. The last pass takes the
outer step on the way (:func:`merge_and_step`), so that the merged pseudo-gradient itself need not be written either.
Codecs may differ from island to island, and the result is, to the last bit, that of the decoded tensors. Same payloads
in the same order give the same bytes, on any number of threads (:mod:`aggregator.merge.passes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from aggregator.interface.events import Part, Pieced
from aggregator.merge.fragment_state import FragmentState, Vector
from aggregator.merge.layout import Source
from aggregator.merge.lengths import known, units_of
from aggregator.merge.outer_step import OuterStep
from aggregator.merge.passes import Doubles, Target, fold
from aggregator.merge.resources import PLAIN, Resources, Spread, in_turn
from broker.base.errors import LocalProtocolError
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.number_formats import encoded_bytes

#: Elements of the units that go through all passes together: 8 MiB of float32 from each contribution, so that a pass
#: finds some of what the one before it read in the third-level cache, and there are pieces for every thread.
STRIP = 1 << 21

#: Directions that cancel to less than this share of their terms are rounding noise (float32 leaves about 1e-7).
CANCELLED = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedFragment:
    """One merged fragment and its measures; lengths are Euclidean, over all tensors not frozen.

    Attributes:
        delta: D, float32 [elements of the fragment], tensors in manifest order; zero where frozen.
        norm: Length of ``delta``.
        mean_norm: Length of the plain weighted mean, whatever the kinds.
        norms: Length of each contribution, in the order given.
        cosines: Between any two of the contributions that were compared: first and second, first and third, .. Near 0
            islands found different things, near 1 they found the same, below 0 they undo each other.
        momentum_cosine: Cosine of ``delta`` and the momentum before the outer step, which with momentum 0 is the
            ``delta`` before. None without a step, or if one of the two is zero.
    """

    delta: Vector
    norm: float
    mean_norm: float
    norms: tuple[float, ...]
    cosines: tuple[float, ...]
    momentum_cosine: float | None


@dataclass(slots=True)
class _Sums:
    """Squared lengths so far."""

    parts: Doubles
    mean: float = 0.0
    merged: float = 0.0
    of_momentum: Doubles = field(default_factory=lambda: np.zeros(2))  # its product with what was merged, its square

    def add(self, parts: Doubles, mean: float, merged: float) -> None:
        """Adds the squared lengths of one tensor."""
        self.parts += parts
        self.mean += mean
        self.merged += merged


def merge_fragment(
    tensors: Sequence[TensorSpec],
    parts: Sequence[Part],
    *,
    capped: bool = True,
    compared: Sequence[int] | None = None,
    resources: Resources = PLAIN,
) -> MergedFragment:
    """Returns the merged pseudo-gradient of one fragment.

    Args:
        tensors: The fragment, in manifest order.
        parts: At least one, in the order to fold: payloads of one buffer per tensor, in any codec, with final
            weights.
        capped: Whether the length of an RDA is capped.
        compared: Places of the contributions to compare with each other; None: all.
        resources: Threads and memory.

    Raises:
        LocalProtocolError: If a payload does not fit the tensors, or a weight is negative or not finite: such
            contributions are refused at the door.
    """
    delta = np.empty(sum(tensor.size for tensor in tensors), np.float32)
    return _merged(tensors, parts, Target(delta=delta), capped, compared, resources.spread)


def merge_and_step(
    tensors: Sequence[TensorSpec],
    parts: Sequence[Part],
    before: FragmentState,
    outer_step: OuterStep,
    *,
    capped: bool = True,
    compared: Sequence[int] | None = None,
    kept: bool = False,
    resources: Resources = PLAIN,
) -> tuple[FragmentState, MergedFragment, bool]:
    """Returns the fragment after an outer step by :func:`merge_fragment`'s result, to the last bit.

    Args:
        tensors: As there.
        parts: As there.
        before: The fragment, with a residual or without; it stays as it is.
        outer_step: Applies the merged pseudo-gradient.
        capped: As there.
        compared: As there.
        kept: Whether the merged pseudo-gradient is wanted, too; ``delta`` is empty otherwise.
        resources: Threads and memory.

    Returns:
        The fragment with its exact parameters; the merge; and whether all parameters are finite.

    Raises:
        LocalProtocolError: As there; or the fragment has another size.
    """
    size = sum(tensor.size for tensor in tensors)
    delta = np.empty(size, np.float32) if kept else None
    target = outer_step.target(before, size, resources, delta=delta)
    merged = _merged(tensors, parts, target, capped, compared, resources.spread)
    return outer_step.after(before, target), merged, target.finite


def compare(tensors: Sequence[TensorSpec], parts: Sequence[Part], spread: Spread = in_turn) -> tuple[float, ...]:
    """Returns the cosines of any two parts, which a merge of all finds on its way; none of fewer than two."""
    k, squares = len(parts), np.zeros(len(parts))
    if k < 2:
        return ()
    _check(tensors, parts)
    products = np.zeros(k * (k - 1) // 2)
    for index, tensor in enumerate(tensors):
        if tensor.size and tensor.kind is not Kind.FROZEN:
            sources = [Source(part.payload[index]) for part in parts]
            squares += fold(sources, None, 0, 1, tensor.size, Target(), spread, products=products)[:k, 0]
    return _cosines(products, np.sqrt(squares))


def _merged(
    tensors: Sequence[TensorSpec],
    parts: Sequence[Part],
    target: Target,
    capped: bool,
    compared: Sequence[int] | None,
    spread: Spread,
) -> MergedFragment:
    """Merges into a target."""
    _check(tensors, parts)
    compared = range(len(parts)) if compared is None else compared
    products = np.zeros(len(parts) * (len(parts) - 1) // 2)
    on_the_way = products if products.size and len(compared) == len(parts) else None
    total = math.fsum(part.token_weight for part in parts)
    shares = np.array([part.token_weight / total if total else 0.0 for part in parts])
    weights = shares * np.array([part.staleness_weight for part in parts])
    sums, offset = _Sums(np.zeros(len(parts))), 0
    for index, tensor in enumerate(tensors):
        frozen = tensor.kind is Kind.FROZEN
        sources = [] if frozen else [Source(part.payload[index]) for part in parts]
        if not tensor.size:
            continue
        if tensor.kind is Kind.RDA and np.count_nonzero(shares) > 1:
            units, squares = units_of(tensor), [known(part.payload[index]) for part in parts]
            for rows in _strips(units, tensor.size // units):
                strip = _Strip(sources, squares, offset, rows, tensor.size // units, target, spread)
                strip.radial_directional(shares, weights, sums, on_the_way, capped=capped)
        else:  # the direction of a single contribution is its own, and its length too: nothing to average
            squares = [known(part.payload[index]) for part in parts]
            by, counted = weights[: len(sources), None], 2 if any(each is None for each in squares) else 1
            pairs = None if frozen else on_the_way
            found = fold(sources, by, offset, 1, tensor.size, target, spread, counted=counted, products=pairs)[:, 0]
            if not frozen:
                sums.of_momentum += found[-2:]
                lengths = found[:-4] if counted == 2 else np.array([each.sum() for each in squares if each is not None])
                sums.add(lengths, float(found[-4]), float(found[-4]))
        offset += tensor.size
    norms, some = np.sqrt(sums.parts), [parts[i] for i in compared]
    return MergedFragment(
        delta=np.empty(0, np.float32) if target.delta is None else target.delta,
        norm=math.sqrt(sums.merged),
        mean_norm=math.sqrt(sums.mean),
        norms=tuple(float(n) for n in norms),
        momentum_cosine=_momentum_cosine(sums),
        cosines=_cosines(products, norms) if on_the_way is not None else compare(tensors, some, spread),
    )


@dataclass(frozen=True, slots=True)
class _Strip:
    """Some whole units of one tensor, from every contribution: rows of ``columns`` elements each.

    A stacked tensor of many small units costs no more than a plain one: they go through each pass together.
    """

    sources: list[Source]
    squares: list[Doubles | None]  #: of all units of the tensor, where they are known
    offset: int  #: element of the fragment with which the tensor begins
    rows: slice
    columns: int
    target: Target
    spread: Spread

    def radial_directional(
        self, shares: Doubles, weights: Doubles, sums: _Sums, products: Doubles | None, *, capped: bool
    ) -> None:
        """Writes the RDA of each row.

        Args:
            shares: ``w / sum(w)``, float64 [k].
            weights: ``w * lambda / sum(w)``, float64 [k].
            sums: Lengths are added to it.
            products: See :func:`aggregator.merge.passes.fold`.
            capped: Whether lengths are limited where directions oppose each other.
        """
        k = len(self.sources)
        squares = self._squares()
        lengths = np.sqrt(squares)
        radius = weights @ lengths
        # Unit vectors are scaled by the radius on the way: directions of large and of tiny units alike then stay in
        # float32's range. unit(0) = 0, and a vector 1e20 times shorter than its peers counts as 0.
        counts = lengths > 1e-20 * radius
        factors = np.divide(weights[:, None] * radius, lengths, out=np.zeros_like(lengths), where=counts)
        direction, mean = np.sqrt(
            self._pass(factors, Target(), counted=1, beside=weights, products=products)[k : k + 2]
        )
        cancelled = direction <= CANCELLED * radius * (weights[:, None] * counts).sum(axis=0)
        if capped:
            radius = np.minimum(radius, mean / math.sqrt(math.fsum(shares * shares)))
        factors *= np.divide(radius, direction, out=np.ones_like(direction), where=~cancelled)
        # The remaining direction is noise, the mean is not: equal directions of unequal length leave it behind.
        factors[:, cancelled] = weights[:, None]
        sums.of_momentum += self._pass(factors, self.target, counted=0)[k + 2 :].sum(axis=1)
        sums.add(
            squares.sum(axis=1),
            float(np.square(mean).sum()),
            float(np.square(np.where(cancelled, mean, radius)).sum()),
        )

    def _squares(self) -> Doubles:
        """Returns the squared lengths of rows, float64 [k, rows]; a pass computes the unknown ones."""
        squares = np.empty((len(self.sources), self.rows.stop - self.rows.start))
        unknown = [i for i, each in enumerate(self.squares) if each is None]
        for i, each in enumerate(self.squares):
            if each is not None:
                squares[i] = each[self.rows]
        if unknown:
            squares[unknown] = self._pass(None, Target(), sources=[self.sources[i] for i in unknown])[: len(unknown)]
        return squares

    def _pass(
        self,
        factors: Doubles | None,
        target: Target,
        *,
        counted: int = 2,
        beside: Doubles | None = None,
        products: Doubles | None = None,
        sources: list[Source] | None = None,
    ) -> Doubles:
        """Makes a pass over the strip: see :func:`aggregator.merge.passes.fold`."""
        return fold(
            self.sources if sources is None else sources,
            factors,
            self.offset,
            self.rows.stop - self.rows.start,
            self.columns,
            target,
            self.spread,
            counted=counted,
            beside=beside,
            products=products,
            first_row=self.rows.start,
        )


def _strips(rows: int, columns: int) -> Iterator[slice]:
    """Cuts units into strips: one long unit, or as many short ones as fill it."""
    height = max(1, STRIP // columns)
    return (slice(start, min(start + height, rows)) for start in range(0, rows, height))


def _cosines(products: Doubles, norms: Doubles) -> tuple[float, ...]:
    """Returns cosines by scalar products and lengths; 0 beside a contribution that is nothing but zeros."""
    first, second = np.triu_indices(norms.size, 1)
    lengths = norms[first] * norms[second]
    found = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    return tuple(float(each) for each in np.clip(np.nan_to_num(found), -1, 1))


def _momentum_cosine(sums: _Sums) -> float | None:
    product, square = sums.of_momentum
    length = math.sqrt(square * sums.merged)
    return float(product) / length if length > 0 else None


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
