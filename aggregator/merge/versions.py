"""Computes versions from payloads in worker threads. Pure.

A version's step is rounded for the wire in one pass: the difference, its result and the residual. The bytes are those
that :func:`broker.wire.tensors.difference` and :func:`broker.wire.tensors.added` give: islands use these, and tests
hold this against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from aggregator.interface.events import Merge, Plant
from aggregator.merge.fragment_state import DIGITS, FragmentState, Made, Vector, seeded
from aggregator.merge.kernels import MergedFragment, compare, merge_and_step
from aggregator.merge.layout import NUMBERS, address_of
from aggregator.merge.outer_step import make_outer_step
from aggregator.merge.passes import LARGEST_FINITE, PIECE, kernels
from aggregator.merge.pieces import vector
from aggregator.merge.resources import PLAIN, Resources
from broker.base.errors import LocalProtocolError
from broker.wire.blockwise import scale_limits
from broker.wire.fragments import TensorSpec
from broker.wire.messages import Codec, Encoded
from broker.wire.number_formats import BLOCK_ELEMENTS, SCALE_BYTES, block_count, encoded_bytes
from broker.wire.tensors import fragment_digest


class Rounded(NamedTuple):
    """A version as receivers of the one before get it."""

    params: Vector
    residual: Vector  # what rounding has left out
    difference: tuple[Encoded, ...]
    finite: bool  # whether all parameters are


def round_step(
    tensors: Sequence[TensorSpec], exact: Vector, base: Vector, codec: Codec, resources: Resources
) -> Rounded:
    """Returns the version ``base`` plus the rounded difference to ``exact``.

    Args:
        tensors: The fragment, in manifest order.
        exact: float32 [elements of the fragment]; it becomes the residual.
        base: float32, same shape: the version before.
        codec: Any but f32.
        resources: Threads and memory.
    """
    params, offset, largest, encoded = resources.empty(exact.size), 0, 0, []
    limits = np.array(scale_limits(codec) if codec.blockwise else [], np.float32)
    base, kernel, number, room = np.ascontiguousarray(base), kernels().rounded, NUMBERS[codec], kernels().scratch
    starts = [address_of(vector) for vector in (exact, base, params)]
    for tensor in tensors:
        data = np.empty(encoded_bytes(codec, tensor.size), np.uint8)
        scales = address_of(data)
        codes = scales + (block_count(tensor.size) * SCALE_BYTES if codec.blockwise else 0)
        here = [start + 4 * offset for start in starts]

        def one(
            i: int, here: list[int] = here, scales: int = scales, codes: int = codes, size: int = tensor.size
        ) -> int:
            at, count = i * PIECE, min(PIECE, size - i * PIECE)
            exact_at, base_at, params_at = (address + 4 * at for address in here)
            scales_at = scales + at // BLOCK_ELEMENTS * SCALE_BYTES
            codes_at = codes + encoded_bytes(codec, at) - (block_count(at) * SCALE_BYTES if codec.blockwise else 0)
            scratch = np.empty(room, np.float32)
            places = exact_at, base_at, params_at, scales_at, codes_at
            found = kernel(number, *places, count, limits, address_of(scratch))
            del scratch  # until here it was at work
            return int(found)

        largest = max(largest, *resources.spread(one, -(-tensor.size // PIECE)), 0)
        checksum = xxhash.xxh3_64_intdigest(data.data)
        encoded.append(Encoded(codec=codec, shape=tensor.shape, checksum=checksum, data=data.data))
        offset += tensor.size
    return Rounded(params, exact, tuple(encoded), largest <= LARGEST_FINITE)


def plant(tensors: Sequence[TensorSpec], action: Plant) -> Made:
    """Returns version 0: the tensors of a seed side by side in one float32 vector.

    Args:
        tensors: The fragment, in manifest order.
        action: Its payload has been checked against ``tensors``.
    """
    params = vector(action.payload)
    return Made(seeded(params), fragment_digest(params))


def merge(
    tensors: Sequence[TensorSpec],
    action: Merge,
    before: FragmentState,
    *,
    kept: bool = True,
    resources: Resources = PLAIN,
) -> tuple[Made, MergedFragment]:
    """Returns the next version of a fragment, and the merged pseudo-gradient that led to it.

    Args:
        tensors: The fragment, in manifest order.
        action: Contributions with their final weights, in the order to fold.
        before: The newest durable version; it stays as it is.
        kept: Whether the merged pseudo-gradient itself is wanted; its ``delta`` is empty otherwise, which is faster.
        resources: Threads and memory.

    Raises:
        ConfigError: A rule of one's own fails.
        LocalProtocolError: The outcome is not finite, though every contribution was: ``before`` cannot be right. The
            process ends; a standby may have better.
    """
    known = _rounded(compare(tensors, action.parts, resources.spread)) if action.compares else ()
    after, merged, finite = merge_and_step(
        tensors,
        action.final_parts(known),
        before,
        make_outer_step(*action.outer_rule),
        capped=action.capped,
        compared=() if action.compares else action.compared,
        kept=kept,
        resources=resources,
    )
    made = Made(after, "")
    if action.version_codec is not Codec.F32:
        # Receivers of the version before get this one by adding a rounded difference. What rounding leaves out stays.
        step = round_step(tensors, after.params, before.params, action.version_codec, resources)
        finite = step.finite
        made = Made(after._replace(params=step.params, residual=step.residual), "", step.difference)
    if not finite:
        what = f"version {after.version} of fragment {action.fragment_id}"
        raise LocalProtocolError(f"{what} would hold values that are not finite: nothing is made of them")
    digest = fragment_digest(made.state.params)
    cosines = known if action.compares else _rounded(merged.cosines)
    return made._replace(digest=digest, cosines=cosines, momentum_cosine=merged.momentum_cosine), merged


def _rounded(cosines: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(cosine, DIGITS) for cosine in cosines)
