"""The regions of a host: its devices' part of each tensor, and the part it hands over. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.wire.fragments import Region

Array = npt.NDArray[Any]


def region_of(index: Sequence[slice], shape: tuple[int, ...]) -> Region:
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


@dataclass(frozen=True, slots=True)
class Spread:
    """A leaf that several hosts share, as one of them has it: the regions here, as arrays of numpy.

    Attributes:
        shape: Of the whole array.
        dtype: Of its elements.
        parts: Region -> its elements.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: Mapping[Region, Array]

    def at(self, region: Region) -> Array:
        """Returns the elements of one region that is here."""
        return self.parts[region]


def part_of(value: Array | Spread, region: Region) -> Array:
    """Returns the elements of a region, of a whole array or of what this host has of one."""
    return value.at(region) if isinstance(value, Spread) else value[region.slices]
