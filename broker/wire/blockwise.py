"""Block-wise integers, int8 and int4: each 256 elements of a tensor share one float32 scale. Pure.

    scale = max|x| / 127  (int8)  or  / 7  (int4)        code = round(x / scale)        x' = code * scale

Rounded to nearest, ties to even, and symmetric: the codes reach from -127 to 127, or from -7 to 7, so that what is
rounded has no bias. The error of an element that is not clipped is at most half a scale of its block; with int8, on
values that are normally distributed, it comes to 0.7 % of their length.

*Clipping.* Fifteen codes are few: a block's largest elements make the steps between all others wide. So int4 tries a
second scale, 13/16 of the first, with which elements beyond the codes become the largest code, and takes it where the
squared errors of the block add up to less. On values that are normally distributed 11 % of their length is lost then,
in place of 13 %. Both sums are of integers, in 1024ths of the first scale: the choice is the same in whatever order.

What is rounded or clipped away is not lost, only late (:meth:`islands.arrays.reference.Reference.capture`).

On the wire all scales come first, then all codes, two int4 in a byte (PROTOCOL.md, section 2):

    [scale 0] [scale 1] ... [codes of block 0] [codes of block 1] ...

*The edges.* A block of zeros has the scale 0. Any other scale is at least the smallest normal float32, since below
it the quotient would lose the bits that the bound of half a scale needs; and at most what the largest code can be
multiplied with. A block that holds an infinity or a NaN has a scale that is infinite or NaN and codes of 0: all of it
decodes to NaN, which the receiver's check finds: a code by itself cannot express it.

*Decoding is total.* Every scale and every code has a meaning, those included that no encoder writes: code -128, or
-8, is multiplied like the others.

Unpacking is arithmetic on whole bytes, without tables and branches: about a nanosecond an element.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from broker.wire.number_formats import BLOCK_ELEMENTS, SCALE_BYTES, Codec, block_count, encoded_bytes

Float32Array = npt.NDArray[np.float32]
Int8Array = npt.NDArray[np.int8]
Int32Array = npt.NDArray[np.int32]
ByteArray = npt.NDArray[np.uint8]

#: Elements quantised together: 256 KB of float32 stay in the second-level cache. Whole blocks, and whole bytes of int4.
_CHUNK: Final = 65_536

#: The smaller scale that int4 may use, as a share of the largest element's. Errors are compared in 1024ths of that.
CLIPPED: Final = np.float32(13 / 16)
ERROR_UNITS: Final = 1024
_LARGEST_CODE: Final = {Codec.INT8: np.float32(127), Codec.INT4: np.float32(7)}
_SMALLEST_SCALE: Final = np.finfo(np.float32).smallest_normal
#: The float32 below the quotient, which may be rounded up so far that the largest code decodes to infinity.
_LARGEST_SCALE: Final = {
    codec: np.nextafter(np.finfo(np.float32).max / code, np.float32(0)) for codec, code in _LARGEST_CODE.items()
}


def quantise(flat: Float32Array, codec: Codec) -> ByteArray:
    """Returns scales and codes of a contiguous float32 [elements], as uint8 [encoded_bytes]."""
    data = np.empty(encoded_bytes(codec, flat.size), np.uint8)
    scales, written = _parts(data, flat.size)
    scratch = np.empty(min(flat.size, _CHUNK), np.float32)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        first = start // BLOCK_ELEMENTS
        codes = _codes(chunk, codec, scales[first : first + block_count(chunk.size)], scratch)
        if codec is Codec.INT4:
            written[start // 2 : start // 2 + (chunk.size + 1) // 2] = _packed(codes)
        else:
            written[start : start + chunk.size] = codes.view(np.uint8)
    return data


def scale_limits(codec: Codec) -> tuple[np.float32, np.float32, np.float32]:
    """Returns the largest code of int8 or int4, and the smallest and largest scale of a non-empty block."""
    return _LARGEST_CODE[codec], np.float32(_SMALLEST_SCALE), np.float32(_LARGEST_SCALE[codec])


class Quantised:
    """Received scales and codes, uint8 [encoded_bytes], that are decoded a range at a time."""

    __slots__ = ("_codec", "_codes", "_scales")

    def __init__(self, data: ByteArray, codec: Codec, elements: int) -> None:
        self._codec = codec
        self._scales, self._codes = _parts(data, elements)

    def read(self, start: int, out: Float32Array) -> None:
        """Fills ``out``, flat float32, with the elements from ``start`` on; each is one float32 product.

        Allocates a byte an element for int4: ``out`` should be a piece that fits the cache.
        """
        stop = start + out.size
        first = start // BLOCK_ELEMENTS
        scales = self._scales[first : block_count(stop)].copy()  # received bytes may be unaligned: slow to compute on
        if self._codec is Codec.INT4:
            begin = start // 2
            out[:] = _unpacked(self._codes[begin : (stop + 1) // 2])[start - 2 * begin : stop - 2 * begin]
        else:
            out[:] = self._codes[start:stop].view(np.int8)
        # A scale that makes elements infinite or NaN is for the receiver to find, no reason for a warning.
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for here, of in _pieces(start, stop):
                rows = out[here].reshape(of.stop - of.start, -1)
                np.multiply(rows, scales[of.start - first : of.stop - first, None], out=rows)


def _parts(data: ByteArray, elements: int) -> tuple[Float32Array, ByteArray]:
    """Returns views of the scales and of the bytes of the codes."""
    end = block_count(elements) * SCALE_BYTES
    return data[:end].view(np.float32), data[end:]


def _pieces(start: int, stop: int) -> Iterator[tuple[slice, slice]]:
    """Cuts a range of elements at block boundaries: a partial block, whole blocks, a partial block.

    Yields:
        Elements, counted from ``start``; and the blocks that they are in.
    """
    first_whole = min(block_count(start) * BLOCK_ELEMENTS, stop)
    last_whole = max(stop // BLOCK_ELEMENTS * BLOCK_ELEMENTS, first_whole)
    for begin, end in ((start, first_whole), (first_whole, last_whole), (last_whole, stop)):
        if begin < end:
            yield slice(begin - start, end - start), slice(begin // BLOCK_ELEMENTS, block_count(end))


def _codes(chunk: Float32Array, codec: Codec, scales: Float32Array, scratch: Float32Array) -> Int8Array:
    """Returns the codes of blocks, of which the last may be short, and writes their scales."""
    quotients = scratch[: chunk.size]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for here, of in _pieces(0, chunk.size):
            shape = (of.stop - of.start, -1)
            values, rows, scale = chunk[here].reshape(shape), quotients[here].reshape(shape), scales[of]
            np.abs(values, out=rows)
            np.max(rows, axis=1, out=scale)
            sound = np.isfinite(scale)
            empty = scale == 0
            scale /= _LARGEST_CODE[codec]
            np.clip(scale, _SMALLEST_SCALE, _LARGEST_SCALE[codec], out=scale, where=sound & ~empty)
            np.divide(values, np.where(empty, np.float32(1), scale)[:, None], out=rows)
            if not sound.all():
                rows[~sound] = 0  # what NaN is as an integer differs between machines
            if codec is Codec.INT4:
                _clip(values, rows, scale)
        np.rint(quotients, out=quotients)
    return quotients.astype(np.int8)


def _clip(values: Float32Array, quotients: Float32Array, scales: Float32Array) -> None:
    """Writes scales and quotients, with a smaller scale for blocks that lose less by clipping."""
    smaller = scales * CLIPPED
    candidates = np.flatnonzero((smaller >= _SMALLEST_SCALE) & (smaller <= _LARGEST_SCALE[Codec.INT4]))
    exact = np.rint(quotients[candidates] * np.float32(ERROR_UNITS)).astype(np.int32)
    clipped = values[candidates] / smaller[candidates, None]
    np.clip(clipped, -_LARGEST_CODE[Codec.INT4], _LARGEST_CODE[Codec.INT4], out=clipped)

    def errors(codes: Float32Array, unit: int) -> Int32Array:
        lost = exact - np.rint(codes).astype(np.int32) * np.int32(unit)
        squares: Int32Array = np.multiply(lost, lost, out=lost).sum(axis=1, dtype=np.int32)
        return squares

    better = errors(clipped, int(ERROR_UNITS * CLIPPED)) < errors(quotients[candidates], ERROR_UNITS)
    taken = candidates[better]
    quotients[taken], scales[taken] = clipped[better], smaller[taken]


def _packed(codes: Int8Array) -> ByteArray:
    """Returns int4 codes packed two in a byte, the first in the lower half; an odd last one is padded."""
    if codes.size % 2:
        codes = np.append(codes, np.int8(0))
    # Two bytes, 0a 0b, are the 16-bit number 0x0b0a: shifting the upper one down by four puts it beside the lower one.
    pairs = (codes & 0x0F).view(np.uint16)
    pairs |= pairs >> 4
    return pairs.astype(np.uint8)


def _unpacked(packed: ByteArray) -> Int8Array:
    """Returns the int4 codes of some bytes, int8 [2 * bytes]."""
    pairs = packed.astype(np.uint16)
    pairs |= pairs << 4  # the other way: of 0x00ba | 0x0ba0, 0x0b0a is kept
    pairs &= 0x0F0F
    codes = pairs.view(np.int8)
    codes ^= 8  # from two's complement of four bits: 0..7 to 8..15, and 8..15 (-8..-1) to 0..7
    codes -= 8
    return codes
