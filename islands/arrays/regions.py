"""The regions of tensors that each host has and hands over; checks that hosts fit together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.base.errors import ConfigError
from broker.wire.fragments import Region, TensorSpec, flaw_in

Array = npt.NDArray[Any]
#: Tensor -> its regions, each with the host that hands it over.
Owners = dict[str, dict[Region, int]]


def region_of(index: Sequence[slice], shape: tuple[int, ...]) -> Region:
    """Returns the region for slices of a sharding."""
    bounds = [each.indices(length)[:2] for each, length in zip(index, shape, strict=True)]
    return Region(tuple(a for a, _ in bounds), tuple(max(0, b - a) for a, b in bounds))


def owners(regions: Mapping[int, Iterable[Region]]) -> dict[Region, int]:
    """Returns region -> the host that hands it over: the first of those that have it.

    Args:
        regions: By host.
    """
    found: dict[Region, int] = {}
    for host in sorted(regions):
        for region in regions[host]:
            found.setdefault(region, host)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """One tensor with a host's regions of it; after the join, those that the host hands over."""

    tensor: TensorSpec
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """One host's regions of a leaf that several hosts share, as numpy arrays.

    Attributes:
        shape: The shape of the whole array.
        dtype: The dtype of its elements.
        parts: Region -> its elements.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    parts: Mapping[Region, Array]

    def at(self, region: Region) -> Array:
        """Returns the elements of one of these regions."""
        return self.parts[region]


def part_of(value: Array | Spread, region: Region) -> Array:
    """Returns the elements of a region of a whole array, or of a host's part of one."""
    return value.at(region) if isinstance(value, Spread) else value[region.slices]


# --- whether hosts make one island ---------------------------------------------------------------------------------


def check_alike(
    host: int, ours: Sequence[HeldTensor], theirs: Sequence[HeldTensor], tokens_per_step: tuple[int, int]
) -> None:
    """Checks that a host trains the same tensors as the speaker.

    Args:
        host: The number of the host.
        ours: The speaker's tensors.
        theirs: The host's.
        tokens_per_step: The speaker's value and the host's.

    Raises:
        ConfigError: It does not: names the tensor, and what both have.
    """
    one = {each.tensor.name: each.tensor for each in ours}
    other = {each.tensor.name: each.tensor for each in theirs}
    cure = "give all hosts of an island the same model"
    for name in [*one, *other]:
        if name not in one or name not in other:
            who = "the speaker" if name in one else f"host {host}"
            raise ConfigError(f"params {name}", f"only {who} has it", cure)
        if one[name] != other[name]:
            value = f"{_shown(one[name])} at the speaker, {_shown(other[name])} at host {host}"
            raise ConfigError(f"params {name}", value, cure)
    if tokens_per_step[0] != tokens_per_step[1]:
        value = f"{tokens_per_step[0]} at the speaker, {tokens_per_step[1]} at host {host}"
        raise ConfigError("tokens_per_step", value, "give all hosts that of the whole island")


def owners_of(tensors: Mapping[int, Sequence[HeldTensor]]) -> Owners:
    """Returns for each tensor region -> the host that hands it over.

    Args:
        tensors: Every host's tensors, the same ones.

    Raises:
        ConfigError: The regions are not the whole of a tensor, each element once: names it.
    """
    found: Owners = {}
    for each in tensors[0]:
        name = each.tensor.name
        by_host = {host: one.regions for host, held in tensors.items() for one in held if one.tensor.name == name}
        found[name] = owners(by_host)
        flaw = flaw_in(tuple(found[name]), each.tensor.shape)
        if flaw:
            value = f"the regions of {len(tensors)} hosts do not make it: {flaw}"
            raise ConfigError(f"params {name}", value, "give all hosts the same mesh and the same layout")
    return found


def handed_by(host: int, owned: Owners) -> dict[str, frozenset[Region]]:
    """Returns the regions of each tensor that one host hands over."""
    return {
        name: frozenset(region for region, owner in regions.items() if owner == host) for name, regions in owned.items()
    }


def _shown(tensor: TensorSpec) -> str:
    return f"{tensor.dtype}{list(tensor.shape)} ({tensor.kind}, {tensor.unit_axes} unit axes)"
