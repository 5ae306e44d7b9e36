"""Computes the bytes of a tensor on the wire, without numpy. Pure.

    f32     4 bytes an element
    bf16    2 bytes an element
    int8    4 bytes a block, 1 byte an element:       8.125 bits an element
    int4    4 bytes a block, half a byte an element:  4.125 bits an element

A block is 256 consecutive elements of the tensor in row-major order, the last one as short as it comes. Its 4 bytes
are the scale that its elements share (:mod:`broker.wire.blockwise`).
"""

from __future__ import annotations

from typing import Final

from broker.wire.messages.values import Codec

#: Approximate bytes of one contribution in a version's header (benchmarks/wire_bytes.py).
MERGED_BYTES: Final = 200

#: Elements that share a scale: few enough that one large value spoils the resolution of few others, and enough that
#: scales cost an eighth of a bit an element.
BLOCK_ELEMENTS: Final = 256

#: A scale is a little-endian IEEE 754 binary32.
SCALE_BYTES: Final = 4

#: Bits of an element, without scales.
_ELEMENT_BITS: Final = {Codec.F32: 32, Codec.BF16: 16, Codec.INT8: 8, Codec.INT4: 4}


def encoded_bytes(codec: Codec, elements: int) -> int:
    """Returns the exact bytes of a tensor on the wire, without its entry in the header.

    Exact for whatever is asked, in integers that do not overflow: a length that a stranger claims is compared with it
    before anything is allocated. Each tensor is encoded by itself, so the bytes of several are the sum of theirs.
    """
    scales = block_count(elements) * SCALE_BYTES if codec.blockwise else 0
    return scales + -(-elements * _ELEMENT_BITS[codec] // 8)


def block_count(elements: int) -> int:
    """Returns the number of blocks of a tensor with ``elements`` elements."""
    return -(-elements // BLOCK_ELEMENTS)
