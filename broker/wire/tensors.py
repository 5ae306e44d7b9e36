"""Tensors as bytes: encoding, decoding, and checks without a full-size temporary.

Pure, and careful with memory: every needless pass or copy of a model costs as much as a network hop. Elements are
little-endian on the wire, as they are in the memory of every host JAX runs on.

Whatever the codec, everything here reads tensors through :class:`Elements`, a range at a time: merging, norms and
decoding then see the same float32 values, to the last bit. Block-wise integers are :mod:`broker.wire.blockwise`.

*Differences.* A version that travels as int8 or int4 would lose what rounding takes from it, and nothing would bring it
back. So what travels is the step from the version before, rounded, and *what islands hold after adding it is the
version*: its bytes have the digest, are in the store and in the exported model. What rounding left out is the
aggregator's residual and goes into the next difference (error feedback: Seide et al., 2014; Karimireddy et al., 2019,
arXiv:1901.09847). All parties must agree to the last bit, whatever the build and the processor, so the arithmetic is
fixed: an element of a difference is one float32 product, rounded, and then comes one float32 sum, rounded. Each is a
call of its own, through memory, and so no compiler can fuse the two into one that rounds once. The aggregator computes
the same bytes by a kernel of its own (:mod:`aggregator.merge.versions`), which tests hold against these functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import xxhash

from broker.base.errors import LocalProtocolError, RemoteProtocolError
from broker.wire.blockwise import Quantised, quantise
from broker.wire.fragments import TensorSpec
from broker.wire.messages.values import Encoded, Reason
from broker.wire.number_formats import Codec, encoded_bytes

Float32Array = npt.NDArray[np.float32]

#: The element type of a codec's bytes, where elements have some of their own.
_WIRE_DTYPE: dict[Codec, np.dtype[Any]] = {
    Codec.F32: np.dtype(np.float32),
    Codec.BF16: np.dtype(ml_dtypes.bfloat16),
}
#: Elements looked at together: 256 KB of float32 stay in the second-level cache and amortise the call.
_BLOCK = 65_536


def encode_tensor(array: Float32Array, codec: Codec) -> Encoded:
    """Returns a float32 array of any shape as bytes with their checksum.

    With ``f32`` and contiguous memory the bytes are a view of the array: it must not be written to while the result
    is in use. bf16 rounds to nearest, ties to even; infinities and NaN stay what they are, and what exceeds the
    largest bf16 (by rounding, above 3.3961e38) becomes infinite. Block-wise integers are rounded as
    :mod:`broker.wire.blockwise` says; one value that is not finite takes its block of 256 with it.

    Raises:
        LocalProtocolError: If ``array`` is not float32.
    """
    if array.dtype != np.float32:
        raise LocalProtocolError(f"array has dtype {array.dtype}, must be float32: convert it before it is encoded")
    if codec.blockwise:
        data = quantise(np.asarray(array, order="C").reshape(-1), codec).data
    else:
        # The receiver finds and refuses values that are not finite: no reason for a warning.
        with np.errstate(over="ignore", invalid="ignore"):
            written = np.asarray(array, dtype=_WIRE_DTYPE[codec], order="C")  # ascontiguousarray would reshape scalars
        data = _bytes_of(written)
    return Encoded(codec=codec, shape=array.shape, checksum=xxhash.xxh3_64_intdigest(data), data=data)


def encode_vector(vector: Float32Array, shapes: Sequence[tuple[int, ...]], codec: Codec) -> tuple[Encoded, ...]:
    """Returns the encoded tensors of a contiguous vector; ``f32`` buffers are views of it."""
    encoded, start = [], 0
    for shape in shapes:
        stop = start + math.prod(shape)
        encoded.append(encode_tensor(vector[start:stop].reshape(shape), codec))
        start = stop
    return tuple(encoded)


class Elements:
    """The elements of an encoded tensor as float32, decoded a range at a time without a copy of the bytes.

    Raises:
        LocalProtocolError: If the bytes are not as many as the shape takes; the codec refuses such buffers.
    """

    __slots__ = ("_plain", "_quantised", "size")

    def __init__(self, encoded: Encoded) -> None:
        self.size = math.prod(encoded.shape)
        got, expected = memoryview(encoded.data).nbytes, encoded_bytes(encoded.codec, self.size)
        if got != expected:
            have = f"{got} bytes as {encoded.codec}"
            raise LocalProtocolError(f"a tensor has {have}, its shape {list(encoded.shape)} takes {expected}")
        self._quantised: Quantised | None = None
        if encoded.codec.blockwise:
            self._quantised = Quantised(np.frombuffer(encoded.data, np.uint8), encoded.codec, self.size)
            self._plain = np.empty(0, np.float32)
        else:
            self._plain = np.frombuffer(encoded.data, _WIRE_DTYPE[encoded.codec])

    def read(self, start: int, scratch: Float32Array) -> Float32Array:
        """Returns the elements from ``start`` on, as many as fit into ``scratch``, flat float32.

        Returns:
            With ``f32`` a read-only view of the bytes, perhaps unaligned; otherwise ``scratch``, filled.
        """
        if self._quantised is not None:
            self._quantised.read(start, scratch)
            return scratch
        plain = self._plain[start : start + scratch.size]
        if plain.dtype == np.float32:
            return plain
        # A bf16 is the upper half of a float32: shifting is exact, and twice as fast as converting.
        np.left_shift(plain.view(np.uint16), 16, out=scratch.view(np.uint32), dtype=np.uint32)
        return scratch


def decode_tensor(encoded: Encoded) -> Float32Array:
    """Returns the tensor as float32 in its own shape.

    With ``f32`` it is a read-only view of the received bytes where their alignment allows it; otherwise a new array.
    """
    if encoded.codec is Codec.F32:
        elements = np.frombuffer(encoded.data, np.float32)
        if elements.flags.aligned:
            view = elements.reshape(encoded.shape)
            view.flags.writeable = False
            return view
    out = np.empty(encoded.shape, np.float32)
    decode_into(encoded, out)
    return out


def decode_into(encoded: Encoded, out: Float32Array) -> None:
    """Writes the tensor into ``out``, contiguous float32, flat or in the tensor's shape.

    Raises:
        LocalProtocolError: If ``out`` has another dtype or size, or is not contiguous.
    """
    size = math.prod(encoded.shape)
    if out.dtype != np.float32 or out.size != size or not out.flags.c_contiguous:
        have = f"{out.dtype} of shape {out.shape}{'' if out.flags.c_contiguous else ', not contiguous'}"
        raise LocalProtocolError(f"out is {have}, must be contiguous float32 of {size} elements")
    flat, elements = out.reshape(-1), Elements(encoded)
    for start in range(0, size, _BLOCK):
        block = flat[start : start + _BLOCK]
        values = elements.read(start, block)
        if values is not block:
            block[:] = values


def squared_norm(encoded: Encoded) -> float:
    """Returns the sum of the squares of all elements; infinite or NaN if, and only if, an element is.

    One pass over blocks: float32 products, summed in float64 over blocks. Where those overflow or vanish (elements
    beyond 1e19 or all below 1e-19), the block is taken again in float64, which holds the square of every float32.
    """
    total = 0.0
    elements = Elements(encoded)
    scratch = np.empty(min(elements.size, _BLOCK), np.float32)
    # An element that is not finite is what we are looking for, no reason for a warning.
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for start in range(0, elements.size, _BLOCK):
            values = elements.read(start, scratch[: elements.size - start])
            squares = float(np.dot(values, values))
            if not 1e-30 < squares < math.inf:
                exact = values.astype(np.float64)
                squares = float(np.dot(exact, exact))
            total += squares
    return total


def norm(encoded: Encoded) -> float:
    """Returns the Euclidean norm of all elements; infinite or NaN if, and only if, an element is."""
    return math.sqrt(squared_norm(encoded))


def payload_bytes(payload: Sequence[Encoded]) -> int:
    """Returns the bytes of all buffers together, without headers."""
    return sum(memoryview(encoded.data).nbytes for encoded in payload)


def check_payload(
    payload: Sequence[Encoded], specs: Sequence[TensorSpec], *, codecs: frozenset[Codec] = frozenset(Codec)
) -> None:
    """Checks that a payload holds the tensors of a fragment, in its order, in one of the allowed codecs.

    Seeds and whole versions must be float32, contributions and differences may be in any codec.

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


def difference(
    exact: Float32Array, base: Float32Array, shapes: Sequence[tuple[int, ...]], codec: Codec
) -> tuple[Encoded, ...]:
    """Returns ``exact - base``, rounded by ``codec``; ``base`` is the receivers' version.

    Both are float32 [elements of the fragment], tensors of these shapes in manifest order.
    """
    # The difference of two finite values may exceed float32; the sum with the base shows it.
    with np.errstate(over="ignore", invalid="ignore"):
        return encode_vector(np.subtract(exact, base), shapes, codec)


def added(base: Float32Array, payload: Sequence[Encoded]) -> Float32Array:
    """Returns ``base`` plus a :func:`difference`, the same bytes everywhere; raises LocalProtocolError."""
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


def fragment_digest(*parts: Float32Array) -> str:
    """Returns the digest of a fragment's content: xxh3_128 of its float32 bytes, 32 hex digits.

    It is the same for the fragment as one vector, and for its tensors one by one in manifest order.

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
    """Returns the memory of a contiguous array, viewed as uint8, since bf16 has no buffer format."""
    return array.reshape(-1).view(np.uint8).data
