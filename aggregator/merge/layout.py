"""Describes contributions and results to compiled kernels: addresses, codecs and offsets. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.interface.events import Pieced
from aggregator.merge.fragment_state import Vector
from aggregator.merge.pieces import Pieces
from broker.wire.messages import Codec, Encoded

Longs = NDArray[np.int64]

#: Codecs, as kernels know them.
F32: Final = 0
BF16: Final = 1
INT8: Final = 2
INT4: Final = 3
NUMBERS: Final = {Codec.F32: F32, Codec.BF16: BF16, Codec.INT8: INT8, Codec.INT4: INT4}

#: Places of addresses: the vectors of a fragment before a step, after it, and the merged pseudo-gradient.
PARAMS: Final = 0
RESIDUAL: Final = 1
MOMENTUM: Final = 2
NEW_PARAMS: Final = 3
NEW_MOMENTUM: Final = 4
DELTA: Final = 5


class Source:
    """One tensor of one contribution.

    Args:
        tensor: As it came, whole or in pieces.
    """

    __slots__ = ("_bytes", "_pieces", "_row")

    def __init__(self, tensor: Encoded | Pieced) -> None:
        self._pieces: Pieces | None = None
        self._bytes: NDArray[Any] | None = None
        self._row = (0, 0, 0, 0)
        if isinstance(tensor, Pieced):
            self._pieces = Pieces(tensor)
        else:
            self._bytes = np.frombuffer(tensor.data, np.uint8)  # kept: the kernel knows its address alone
            elements = int(np.prod(tensor.shape, dtype=np.int64))
            self._row = (address_of(self._bytes), NUMBERS[tensor.codec], elements, 0)

    def row(self, first: int, count: int, kept: list[Vector]) -> tuple[int, int, int, int]:
        """Returns the line of the kernel's table: address, codec, elements, and the element at the address.

        Args:
            first: Element with which the kernel begins.
            count: Elements that it reads.
            kept: Takes what must stay until it is done: a tensor in pieces is put together, as far as it is read.
        """
        if self._pieces is None:
            return self._row
        together = self._pieces.read(first, np.empty(count, np.float32))
        kept.append(together)
        return address_of(together), F32, 0, first


def table(sources: Sequence[Source], first: int, count: int, kept: list[Vector]) -> Longs:
    """Returns the kernel's table of contributions, int64 [k, 4]."""
    rows = [source.row(first, count, kept) for source in sources]
    return np.array(rows, np.int64).reshape(len(rows), 4)


def address_of(array: NDArray[Any] | None) -> int:
    """Returns the address of an array, 0 for None. The caller must keep the array alive."""
    return 0 if array is None else int(array.__array_interface__["data"][0])
