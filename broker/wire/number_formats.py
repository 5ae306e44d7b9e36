"""Number formats of tensors on the wire, and the bytes that they take; without numpy. Pure.

    f32     4 bytes an element
    bf16    2 bytes an element
    int8    4 bytes a block, 1 byte an element:       8.125 bits an element
    int4    4 bytes a block, half a byte an element:  4.125 bits an element

A block is 256 consecutive elements of the tensor in row-major order, the last one as short as it comes. Its 4 bytes
are the scale that its elements share (:mod:`broker.wire.blockwise`).

A new format gets a member and its bits here, then elements in :mod:`broker.wire.tensors` or ``blockwise``, a number in
:mod:`aggregator.merge.layout` and a kernel. Members go from wide to narrow: so a poor link takes them
(:mod:`broker.chunks.choices`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

#: Approximate bytes of one contribution in a version's header (benchmarks/wire_bytes.py).
MERGED_BYTES: Final = 200

#: Elements that share a scale: few enough that one large value spoils the resolution of few others, and enough that
#: scales cost an eighth of a bit an element.
BLOCK_ELEMENTS: Final = 256

#: A scale is a little-endian IEEE 754 binary32.
SCALE_BYTES: Final = 4


class Codec(StrEnum):
    """The number format of a tensor's elements on the wire."""

    F32 = "f32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        """Bits of an element, without scales."""
        return _BITS[self]

    @property
    def blockwise(self) -> bool:
        """True if elements are small integers in blocks of 256 that share a scale.

        For contributions only: what is rounded away from one is handed over with the next. From a version it would be
        lost, and the islands would train on other parameters than the aggregator steps from.
        """
        return self in (Codec.INT8, Codec.INT4)


_BITS: Final = {Codec.F32: 32, Codec.BF16: 16, Codec.INT8: 8, Codec.INT4: 4}
#: Bits of an element, and bytes of a block's scale.
_SIZES: Final = {codec: (bits, SCALE_BYTES if codec.blockwise else 0) for codec, bits in _BITS.items()}


def encoded_bytes(codec: Codec, elements: int) -> int:
    """Returns the exact bytes of a tensor on the wire, without its entry in the header.

    Exact for whatever is asked, in integers that do not overflow: a length that a stranger claims is compared with it
    before anything is allocated. Each tensor is encoded by itself, so the bytes of several are the sum of theirs.
    """
    bits, scale_bytes = _SIZES[codec]
    scales_bytes = scale_bytes * block_count(elements) if scale_bytes else 0
    return scales_bytes + -(-elements * bits // 8)


def block_count(elements: int) -> int:
    """Returns the number of blocks of a tensor with ``elements`` elements."""
    return -(-elements // BLOCK_ELEMENTS)
