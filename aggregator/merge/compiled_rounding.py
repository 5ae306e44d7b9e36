"""The kernel that rounds a version's step for the wire, compiled by numba.

The rules for kernels in :mod:`aggregator.merge.compiled` hold here, too. A few functions are in both files: numba's
cache knows a kernel by its file (:mod:`.compiling`).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from aggregator.merge.compiling import compile_kernel
from aggregator.merge.layout import BF16, INT4, INT8
from broker.wire.blockwise import CLIPPED, ERROR_UNITS
from broker.wire.number_formats import BLOCK_ELEMENTS

_MAGNITUDE: Final = 0x7FFFFFFF


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """Returns an address as a pointer to anything."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@register_jitable
def _floats(address: Any, count: Any) -> Any:
    return carray(_pointer(address), count, np.float32)


@register_jitable
def _bytes(address: Any, count: Any) -> Any:
    return carray(_pointer(address), count, np.uint8)


def _rounded(  # noqa: D417  an entry describes two addresses that belong together
    codec: Any, exact: Any, base: Any, params: Any, scales: Any, codes: Any, count: Any, limits: Any, scratch: Any
) -> Any:
    """Rounds a piece's step from ``base`` to ``exact``; writes codes, new parameters and the rest.

    Parameters are ``base`` plus one float32 product, a sum of its own, as islands compute it: nothing may fuse the two.

    Args:
        codec: Any but f32.
        exact: Address of the exact parameters; then of what rounding has left out of them.
        base: Address of the version before; ``params``: of the version to be made; all float32 [count].
        scales: Address of the scales of the piece, where it has some; ``codes``: of its elements.
        count: Elements of the piece, which begins at the beginning of a block that shares a scale.
        limits: float32 [3]: the largest code, the smallest and the largest scale.
        scratch: Address of float32 [SCRATCH].

    Returns:
        The largest magnitude of a parameter, as the bits of a float32.
    """
    largest = np.int64(0)
    for start in range(0, count, BLOCK_ELEMENTS):
        n = min(BLOCK_ELEMENTS, count - start)
        x, v, step = _floats(exact + 4 * start, n), _floats(base + 4 * start, n), _floats(scratch, n)
        for i in range(n):
            step[i] = x[i] - v[i]
        if codec == BF16:
            _to_bf16(scratch, codes + 2 * start, n)
        else:
            scale = _to_integers(codec, scratch, codes + (start if codec == INT8 else start // 2), n, limits)
            _floats(scales + start // BLOCK_ELEMENTS * 4, 1)[0] = scale
        new = _floats(params + 4 * start, n)
        for i in range(n):
            new[i] = v[i] + step[i]
        for i in range(n):
            x[i] = x[i] - new[i]
        largest = max(largest, _largest(params + 4 * start, n))
    return largest


@register_jitable
def _to_bf16(scratch: Any, codes: Any, n: Any) -> None:
    """Rounds to bf16, ties to even; keeps NaN and infinity. Leaves the decoded values in ``scratch``."""
    words, halves = carray(_pointer(scratch), n, np.uint32), carray(_pointer(codes), n, np.uint16)
    for i in range(n):
        word = words[i]
        upper = np.uint32((word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
        if (word & np.uint32(_MAGNITUDE)) > np.uint32(0x7F800000):
            upper = np.uint32((word >> np.uint32(16)) | np.uint32(0x40))
        halves[i] = np.uint16(upper)
        words[i] = np.uint32(upper << np.uint32(16))


@register_jitable
def _to_integers(codec: Any, scratch: Any, codes: Any, n: Any, limits: Any) -> Any:
    """Writes codes as :func:`broker.wire.blockwise.quantise`; returns the scale, decodes ``scratch``."""
    step, scale, divisor = _floats(scratch, n), np.float32(0), np.float32(1)
    bits = _largest(scratch, n)
    sound = bits < 0x7F800000
    largest = _as_float(np.int32(bits))
    if not sound:
        scale = largest
        for i in range(n):
            step[i] = 0
    elif bits:
        scale = divisor = min(max(np.float32(largest / limits[0]), limits[1]), limits[2])
        if codec == INT4 and _loses_less_clipped(step, scale, limits):
            scale = divisor = np.float32(scale * CLIPPED)
    for i in range(n):
        step[i] = min(max(_nearest(step[i] / divisor), -limits[0]), limits[0])
    if codec == INT8:
        written = carray(_pointer(codes), n, np.int8)
        for i in range(n):
            written[i] = np.int8(np.int32(step[i]))
    else:
        octets = _bytes(codes, (n + 1) // 2)
        for i in range(n // 2):
            octets[i] = np.uint8((np.int32(step[2 * i]) & 15) | ((np.int32(step[2 * i + 1]) & 15) << 4))
        if n % 2:
            octets[n // 2] = np.uint8(np.int32(step[n - 1]) & 15)
    for i in range(n):
        step[i] *= scale
    return scale


@register_jitable
def _loses_less_clipped(step: Any, scale: Any, limits: Any) -> Any:
    """Returns True if int4 loses less by the smaller scale, as :mod:`broker.wire.blockwise` adds it up."""
    smaller, top, wide, clipped = np.float32(scale * CLIPPED), limits[0], np.int32(0), np.int32(0)
    for i in range(step.size):
        quotient, code = step[i] / scale, min(max(step[i] / smaller, -top), top)
        exact = np.int32(_nearest(quotient * np.float32(ERROR_UNITS)))
        lost = np.int32(exact - np.int32(_nearest(quotient)) * np.int32(ERROR_UNITS))
        cut = np.int32(exact - np.int32(_nearest(code)) * np.int32(ERROR_UNITS * CLIPPED))
        wide, clipped = np.int32(wide + lost * lost), np.int32(clipped + cut * cut)
    return smaller >= limits[1] and clipped < wide


@register_jitable
def _nearest(x: Any) -> Any:
    """Rounds to the nearest integer, ties to even, below 2^22: larger sums have no fraction. Never -0."""
    return (x + np.float32(12582912)) - np.float32(12582912)


@intrinsic
def _as_float(typing_context: Any, bits: Any) -> Any:
    """Returns the float32 that has these bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@register_jitable
def _largest(address: Any, n: Any) -> Any:
    """Returns the bits of the largest magnitude of float32 numbers; NaN and infinity rank above all."""
    bits, largest = carray(_pointer(address), n, np.int32), np.int32(0)
    for i in range(n):
        largest = max(largest, np.int32(bits[i] & np.int32(_MAGNITUDE)))
    return np.int64(largest)


rounded = compile_kernel(_rounded, "int64(int64, int64, int64, int64, int64, int64, int64, float32[::1], int64)")
