"""Rounds a version's step for the wire in one pass: the difference, its result and the residual.

The bytes are those that :func:`broker.wire.tensors.difference` and :func:`broker.wire.tensors.added` give: islands use
these, and tests hold this against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from aggregator.merge.fragment_state import Vector
from aggregator.merge.layout import NUMBERS, address_of
from aggregator.merge.passes import LARGEST_FINITE, PIECE, kernels
from aggregator.merge.resources import Resources
from broker.wire.blockwise import scale_limits
from broker.wire.fragments import TensorSpec
from broker.wire.lengths import BLOCK_ELEMENTS, SCALE_BYTES, block_count, encoded_bytes
from broker.wire.messages import Codec, Encoded


class Rounded(NamedTuple):
    """A version as receivers of the one before get it."""

    params: Vector
    residual: Vector  # what rounding has left out
    difference: tuple[Encoded, ...]
    finite: bool  # whether all parameters are


def round_step(
    tensors: Sequence[TensorSpec], exact: Vector, base: Vector, codec: Codec, resources: Resources
) -> Rounded:
    """Returns the version that comes of ``base`` plus the rounded difference to ``exact``.

    Args:
        tensors: The fragment, in manifest order.
        exact: float32 [elements of the fragment]; it becomes the residual.
        base: float32, same shape: the version before.
        codec: Any but f32.
        resources: Threads and memory.
    """
    params, offset, largest, encoded = resources.empty(exact.size), 0, 0, []
    limits = np.array(scale_limits(codec) if codec.blockwise else [], np.float32)
    base, kernel, number, room = np.ascontiguousarray(base), kernels().rounded, NUMBERS[codec], kernels().SCRATCH
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
