"""A tensor in pieces, one or more from each host of an island, read as if it were whole. Pure.

Pieces are never put together: merging reads a range of the tensor, and that meets one range of each piece
(:class:`broker.wire.fragments.Region`). So a contribution of many hosts takes the memory of its bytes, like any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aggregator.interface.events import Pieced
from broker.wire.fragments import Region
from broker.wire.messages import Encoded
from broker.wire.tensors import Elements, Float32Array, decode_into

#: Elements that are filled in at a time.
BLOCK = 1 << 17


def fill(tensor: Encoded | Pieced, out: Float32Array) -> None:
    """Writes a tensor into ``out``, which is float32, flat and contiguous."""
    if not isinstance(tensor, Pieced):
        decode_into(tensor, out)
        return
    elements = Pieces(tensor)
    for start in range(0, out.size, BLOCK):
        elements.read(start, out[start : start + BLOCK])


def vector(payload: Sequence[Encoded | Pieced]) -> Float32Array:
    """Returns the tensors of a payload side by side in one new vector."""
    sizes = [math.prod(tensor.shape) for tensor in payload]
    out, start = np.empty(sum(sizes), np.float32), 0
    for tensor, size in zip(payload, sizes, strict=True):
        fill(tensor, out[start : start + size])
        start += size
    return out


class Pieces:
    """A tensor's elements in pieces as float32, by range; like :class:`broker.wire.tensors.Elements`.

    Args:
        tensor: Its pieces have each element once (:func:`broker.wire.fragments.flaw_in`).
    """

    __slots__ = ("_parts",)

    def __init__(self, tensor: Pieced) -> None:
        self._parts = [
            (Rows(piece.region, tensor.shape), Elements(piece.encoded)) for piece in tensor.pieces if piece.region.size
        ]

    def read(self, start: int, scratch: Float32Array) -> Float32Array:
        """Returns the elements from ``start`` on, as many as ``scratch`` holds, in it."""
        stop = start + scratch.size
        for rows, elements in self._parts:
            runs = rows.overlap(start, stop) if rows.first < stop and rows.last > start else []
            if not runs:
                continue
            first, end = runs[0][0], runs[-1][0] + runs[-1][2]
            values = elements.read(first, np.empty(end - first, np.float32))
            for here, there, length in runs:
                scratch[there - start : there - start + length] = values[here - first : here - first + length]
        return scratch


class Rows:
    """The place of a region's elements in the whole tensor, as flat numbers.

    Args:
        region: The region of the tensor.
        shape: Shape of the whole tensor.
    """

    __slots__ = ("_length", "_places", "first", "last")

    def __init__(self, region: Region, shape: tuple[int, ...]) -> None:
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        # The longest run of elements that lie side by side in the tensor: trailing dimensions that are whole, and one.
        inner = len(shape)
        while inner and region.shape[inner - 1] == shape[inner - 1]:
            inner -= 1
        inner = max(0, inner - 1)
        self._length = math.prod(region.shape[inner:])
        offset = sum(a * s for a, s in zip(region.start, strides, strict=True))
        places = np.array([offset], np.int64)
        for n, s in zip(region.shape[:inner], strides[:inner], strict=True):
            places = (places[:, None] + np.arange(n, dtype=np.int64) * s).reshape(-1)
        self._places = places if self._length else places[:0]
        self.first = int(self._places[0]) if self._places.size else 0
        self.last = int(self._places[-1]) + self._length if self._places.size else 0

    def overlap(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Returns the part of a flat range of the tensor that is in the region.

        Returns:
            Runs (first element in the region, first element in the tensor, elements), in order.
        """
        places, length = self._places, self._length
        begin = max(0, int(np.searchsorted(places, start, "right")) - 1)
        end = int(np.searchsorted(places, stop, "left"))
        runs = []
        for row in range(begin, end):
            place = int(places[row])
            lo, hi = max(start, place), min(stop, place + length)
            if lo < hi:
                runs.append((row * length + lo - place, lo, hi - lo))
        return runs
