"""The regions of a host: which part of each tensor lives on its devices, and which of these it hands over. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from broker.wire.fragments import Region


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
