"""Versions as rounded differences to the version before, and the sum that gives the version. Pure.

A version that travels as int8 or int4 would lose what rounding takes from it, and nothing would bring it back. So what
travels is the step from the version before, rounded, and *what islands hold after adding it is the version*: its bytes
have the digest, are in the store and in the exported model. What rounding left out is the aggregator's residual and
goes into the next difference (error feedback: Seide et al., 2014; Karimireddy et al., 2019, arXiv:1901.09847).

All parties must agree to the last bit, whatever the build and the processor, so the arithmetic is fixed: an element of
a difference is one float32 product, rounded, and then one float32 sum, rounded. Each is a call of its own here, through
memory, and so no compiler can fuse the two into one that rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from broker.wire.errors import LocalProtocolError
from broker.wire.messages.values import Codec, Encoded
from broker.wire.tensors import Elements, encode_tensor

Vector = npt.NDArray[np.float32]

#: Elements added together: 256 KB of float32 stay in the second-level cache.
_BLOCK = 65_536


def difference(exact: Vector, base: Vector, shapes: Sequence[tuple[int, ...]], codec: Codec) -> tuple[Encoded, ...]:
    """Returns ``exact - base``, rounded by ``codec``.

    Args:
        exact: float32 [elements of the fragment], tensors in manifest order.
        base: float32, same shape: the version that receivers have.
        shapes: Of the tensors.
        codec: Any; with ``f32`` next to nothing is rounded.
    """
    encoded, start = [], 0
    for shape in shapes:
        here = slice(start, start + int(np.prod(shape, dtype=np.int64)))
        # Two finite values may lie too far apart for float32: whoever adds what comes of it finds that out.
        with np.errstate(over="ignore", invalid="ignore"):
            step = np.subtract(exact[here], base[here])
        encoded.append(encode_tensor(step.reshape(shape), codec))
        start = here.stop
    return tuple(encoded)


def added(base: Vector, payload: Sequence[Encoded]) -> Vector:
    """Returns ``base`` plus a difference: the version itself, the same bytes wherever it is computed.

    Args:
        base: float32 [elements of the fragment]; it stays as it is.
        payload: From :func:`difference`.

    Returns:
        A new array like ``base``.

    Raises:
        LocalProtocolError: The difference has another number of elements.
    """
    parts = [Elements(encoded) for encoded in payload]
    size = sum(part.size for part in parts)
    if size != base.size:
        raise LocalProtocolError(f"a difference of {size} elements does not fit a version of {base.size}")
    out, scratch, start = np.empty(size, np.float32), np.empty(min(size, _BLOCK), np.float32), 0
    with np.errstate(over="ignore", invalid="ignore"):
        for part in parts:
            for begin in range(0, part.size, _BLOCK):
                step = part.read(begin, scratch[: part.size - begin])
                here = slice(start + begin, start + begin + step.size)
                np.add(base[here], step, out=out[here])
            start += part.size
    return out
