"""Regions: which part of each tensor a host has. Pure.

A region is a box of a tensor, in global coordinates: where it starts and how long it is, per dimension. A host hands
over and adopts the regions that live on its devices. One that several hosts have (a replica) is handed over by the
first of them. The elements of a region, row by row, keep the order that they have in the whole tensor: so any range of the
tensor meets one range of the region.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A box of a tensor: its first element and its lengths, per dimension."""

    start: Shape
    shape: Shape

    @property
    def size(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Returns the index of the box in the whole array."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.shape, strict=True))


def whole(shape: Shape) -> Region:
    """Returns the region that is all of a tensor."""
    return Region((0,) * len(shape), shape)


def region_of(index: Sequence[slice], shape: Shape) -> Region:
    """Returns a region from the slices that a sharding gives for it."""
    bounds = [each.indices(length)[:2] for each, length in zip(index, shape, strict=True)]
    return Region(tuple(a for a, _ in bounds), tuple(max(0, b - a) for a, b in bounds))


def owners(regions: Mapping[int, Iterable[Region]]) -> dict[Region, int]:
    """Returns the host that hands each region of one tensor over: the first of those that have it.

    Args:
        regions: By host.
    """
    found: dict[Region, int] = {}
    for host in sorted(regions):
        for region in regions[host]:
            found.setdefault(region, host)
    return found


def flaw_in(regions: Sequence[Region], shape: Shape) -> str:
    """Says why these regions are not the whole tensor, each element once; empty if they are."""
    for region in regions:
        if len(region.start) != len(shape) or len(region.shape) != len(shape):
            return f"a part has {len(region.shape)} dimensions, the tensor has {len(shape)}"
        if any(a + n > length for a, n, length in zip(region.start, region.shape, shape, strict=True)):
            return f"a part at {list(region.start)} of shape {list(region.shape)} reaches beyond {list(shape)}"
    filled = [region for region in regions if region.size]
    if sum(region.size for region in filled) != math.prod(shape):
        held = sum(region.size for region in filled)
        return f"the parts have {held} elements, the tensor has {math.prod(shape)}"
    # As many elements as the tensor has: they are all of it just if no two parts meet.
    ordered = sorted(filled)
    for i, one in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if one.start and other.start[0] >= one.start[0] + one.shape[0]:
                break  # sorted by their first row: nobody further on meets this one
            if _meet(one, other):
                return f"the parts at {list(one.start)} and {list(other.start)} have elements in common"
    return ""


def _meet(one: Region, other: Region) -> bool:
    sides = zip(one.start, one.shape, other.start, other.shape, strict=True)
    return all(a < c + m and c < a + n for a, n, c, m in sides)


class Rows:
    """The place of a region's elements in the whole tensor, as flat numbers.

    Args:
        region: Of the tensor.
        shape: Of the tensor.
    """

    __slots__ = ("_length", "_places", "first", "last")

    def __init__(self, region: Region, shape: Shape) -> None:
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
        """Returns what of a flat range of the tensor is in the region.

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


def cut(array: npt.NDArray[np.generic], region: Region) -> npt.NDArray[np.generic]:
    """Returns a region of an array, as a view."""
    return array[region.slices]
