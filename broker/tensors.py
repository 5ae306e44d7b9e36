"""Tensors as bytes: encoding, decoding, and what can be checked without a full-size temporary.

Pure, and careful with memory: a model of 100 M parameters is 400 MB in float32, and every needless pass or copy costs
as much as a network hop. Elements are little-endian on the wire, as they are in the memory of every host JAX runs on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt
import xxhash

from broker.errors import LocalProtocolError, RemoteProtocolError
from broker.fragments import TensorSpec
from broker.messages import Codec, Encoded, Reason

Float32Array = npt.NDArray[np.float32]

#: The element type of a codec's bytes.
_WIRE_DTYPE: dict[Codec, np.dtype[Any]] = {
    Codec.F32: np.dtype(np.float32),
    Codec.BF16: np.dtype(ml_dtypes.bfloat16),
}
#: Elements looked at together: 256 KB of float32 stay in the second-level cache and amortise the call.
_BLOCK = 65_536


def encode_tensor(array: Float32Array, codec: Codec) -> Encoded:
    """Returns ``array`` as bytes with their checksum.

    With ``f32`` and contiguous memory the bytes are a view of the array: it must not be written to while the result
    is in use. bf16 rounds to nearest, ties to even; infinities and NaN stay what they are, and what exceeds the
    largest bf16 (by rounding, above 3.3961e38) becomes infinite.

    Args:
        array: float32, of any shape.
        codec: How to write the elements.

    Raises:
        LocalProtocolError: If ``array`` is not float32.
    """
    if array.dtype != np.float32:
        raise LocalProtocolError(f"array has dtype {array.dtype}, must be float32: convert it before it is encoded")
    # What is not finite is for the receiver to find and refuse, no reason for a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        written = np.asarray(array, dtype=_WIRE_DTYPE[codec], order="C")  # ascontiguousarray would reshape scalars
    data = _bytes_of(written)
    return Encoded(codec=codec, shape=array.shape, checksum=xxhash.xxh3_64_intdigest(data), data=data)


def decode_tensor(encoded: Encoded) -> Float32Array:
    """Returns the tensor as float32 in its own shape.

    With ``f32`` it is a read-only view of the received bytes where their alignment allows it; otherwise a new array.
    """
    elements = _elements(encoded)
    if encoded.codec is Codec.F32 and elements.flags.aligned:
        view = cast(Float32Array, elements.reshape(encoded.shape))
        view.flags.writeable = False
        return view
    out = np.empty(encoded.shape, np.float32)
    decode_into(encoded, out)
    return out


def decode_into(encoded: Encoded, out: Float32Array) -> None:
    """Writes the tensor into ``out``.

    Args:
        encoded: What was received.
        out: float32, contiguous, in the tensor's shape or flat: usually a slice of a fragment's vector.

    Raises:
        LocalProtocolError: If ``out`` has another dtype or size, or is not contiguous.
    """
    size = math.prod(encoded.shape)
    if out.dtype != np.float32 or out.size != size or not out.flags.c_contiguous:
        have = f"{out.dtype} of shape {out.shape}{'' if out.flags.c_contiguous else ', not contiguous'}"
        raise LocalProtocolError(f"out is {have}, must be contiguous float32 of {size} elements")
    flat = out.reshape(-1)
    for start, block in _blocks(encoded):
        _widen(block, flat[start : start + block.size])


def squared_norm(encoded: Encoded) -> float:
    """Returns the sum of the squares of all elements; infinite or NaN if, and only if, an element is.

    One pass over blocks: float32 products, summed in float64 over blocks. Where those overflow or vanish (elements
    beyond 1e19 or all below 1e-19), the block is taken again in float64, which holds the square of every float32.
    """
    total = 0.0
    scratch = np.empty(_BLOCK, np.float32)
    # An element that is not finite is what we are looking for, no reason for a warning.
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for _, block in _blocks(encoded):
            values = block
            if encoded.codec is not Codec.F32:
                values = scratch[: block.size]
                _widen(block, values)
            squares = float(np.dot(values, values))
            if not 1e-30 < squares < math.inf:
                exact = values.astype(np.float64)
                squares = float(np.dot(exact, exact))
            total += squares
    return total


def norm(encoded: Encoded) -> float:
    """Returns the Euclidean norm of all elements; infinite or NaN if, and only if, an element is."""
    return math.sqrt(squared_norm(encoded))


def is_finite(encoded: Encoded) -> bool:
    """Whether no element is infinite or NaN."""
    return math.isfinite(squared_norm(encoded))


def payload_bytes(payload: Sequence[Encoded]) -> int:
    """Returns the bytes of all buffers together, without headers."""
    return sum(memoryview(encoded.data).nbytes for encoded in payload)


def check_payload(
    payload: Sequence[Encoded], specs: Sequence[TensorSpec], *, codecs: frozenset[Codec] = frozenset(Codec)
) -> None:
    """Checks that a payload holds the tensors of a fragment, in its order, in one of the allowed codecs.

    Args:
        payload: As received; the codec has checked that lengths fit shapes.
        specs: ``manifest.fragments[fragment_id]``.
        codecs: Versions and seeds must be float32, contributions may be in any.

    Raises:
        RemoteProtocolError: With reason ``wrong_shape`` (also for too many or too few tensors) or ``wrong_dtype``.
    """
    if len(payload) != len(specs):
        got, expected = f"{len(payload)} tensors", f"{len(specs)} tensors"
        raise RemoteProtocolError(Reason.WRONG_SHAPE, field="buffers", got=got, expected=expected)
    for index, (encoded, spec) in enumerate(zip(payload, specs, strict=True)):
        if encoded.shape != spec.shape:
            field = f"buffers[{index}].shape"
            expected = f"{list(spec.shape)} for {spec.name}"
            raise RemoteProtocolError(Reason.WRONG_SHAPE, field=field, got=list(encoded.shape), expected=expected)
        if encoded.codec not in codecs:
            field = f"buffers[{index}].codec"
            expected = "one of " + ", ".join(sorted(codecs))
            raise RemoteProtocolError(Reason.WRONG_DTYPE, field=field, got=str(encoded.codec), expected=expected)


def fragment_digest(*parts: Float32Array) -> str:
    """Returns the name of a fragment's content: xxh3_128 of its float32 bytes, 32 hex digits.

    Args:
        parts: The fragment as one vector, or its tensors one by one in manifest order; the digest is the same.

    Raises:
        LocalProtocolError: If a part is not float32.
    """
    digest = xxhash.xxh3_128()
    for part in parts:
        if part.dtype != np.float32:
            raise LocalProtocolError(f"a part has dtype {part.dtype}, must be float32: digests are of float32 bytes")
        digest.update(_bytes_of(np.asarray(part, order="C")))
    return digest.hexdigest()


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """Returns the memory of a contiguous array; by way of uint8, as bf16 has no buffer format of its own."""
    return array.reshape(-1).view(np.uint8).data


def _elements(encoded: Encoded) -> npt.NDArray[Any]:
    return np.frombuffer(encoded.data, dtype=_WIRE_DTYPE[encoded.codec])


def _blocks(encoded: Encoded) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yields the elements as written, a block at a time, each with the index of its first element."""
    elements = _elements(encoded)
    for start in range(0, elements.size, _BLOCK):
        yield start, elements[start : start + _BLOCK]


def _widen(block: npt.NDArray[Any], out: Float32Array) -> None:
    if block.dtype == ml_dtypes.bfloat16:
        # A bf16 is the upper half of a float32: shifting is exact, and twice as fast as converting.
        np.left_shift(block.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[:] = block
