"""The shards of JAX arrays that live on one host, of an island that may have several: copied, installed, placed.

What :class:`islands.arrays.placement.Placement` does for whole leaves, this does for the part of them that is here.
Every call is for single devices: no other host takes part, so it does not matter in which order hosts make them. A
region that lies on several devices of this host (a replica) is read from the first, and installed on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from broker.wire.fragments import Region
from islands.arrays.jax_placement import copy_here, installer, on_each_device
from islands.hosts.regions import owners, region_of

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Held:
    """One region of one leaf on this host.

    Attributes:
        leaf: Its number.
        region: Of the global array.
        devices: That have it; the first is read.
        own: Whether this host hands it over, or an earlier one that has it, too.
    """

    leaf: int
    region: Region
    devices: tuple[jax.Device, ...]
    own: bool


class HostShards:
    """The regions of a list of leaves that are on one host.

    Args:
        leaves: JAX arrays; their shardings, shapes and dtypes count, their values do not.
        host: Which host this is.
        host_of: Device -> the host that it belongs to.
    """

    def __init__(
        self,
        leaves: Sequence[jax.Array],
        host: int,
        host_of: Callable[[jax.Device], int] = lambda device: device.process_index,
    ) -> None:
        self._shapes = [tuple(leaf.shape) for leaf in leaves]
        self._shardings = [leaf.sharding for leaf in leaves]
        held: list[Held] = []
        for i, leaf in enumerate(leaves):
            by_host: dict[int, dict[Region, list[jax.Device]]] = {}
            for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
                region = region_of(index, tuple(leaf.shape))
                by_host.setdefault(host_of(device), {}).setdefault(region, []).append(device)
            owner = owners(by_host)
            held += [
                Held(i, region, tuple(devices), owner[region] == host)
                for region, devices in sorted(by_host.get(host, {}).items())
            ]
        self.held = tuple(held)  #: in the order of the leaves, and of their regions

    def copy(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Dispatches copies of all regions, in the order of :attr:`held`; they outlive donation of the leaves."""
        on = self._on(leaves)
        shards = [on[each.leaf, each.devices[0]] for each in self.held]
        return on_each_device(copy_here, shards)

    def place(self, values: Sequence[Array], keep: float, dtypes: Sequence[np.dtype[Any]]) -> list[list[jax.Array]]:
        """Puts what is to be installed beside the shards; not for the training thread.

        Args:
            values: Of each region.
            keep: 0: they replace the shards, and are cast to their dtype; else they are added, and kept wide.
            dtypes: Of the leaves.

        Returns:
            Of each region, one array for each device that has it.
        """
        placed = []
        for value, each in zip(values, self.held, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                cast = np.array(value, dtypes[each.leaf]) if keep == 0 else np.asarray(value)
            placed.append([jax.device_put(cast, device) for device in each.devices])
        return placed

    def install(
        self, leaves: Sequence[jax.Array], placed: Sequence[Sequence[jax.Array]], keep: float
    ) -> dict[tuple[int, jax.Device], jax.Array]:
        """Dispatches ``keep * shard + placed`` for every shard of this host, or takes ``placed`` itself with 0.

        Returns:
            The new shards, by number of the leaf and device; :meth:`joined` makes leaves of them.
        """
        where = [(each.leaf, device) for each in self.held for device in each.devices]
        shifts = [array for arrays in placed for array in arrays]
        if keep == 0:
            return dict(zip(where, shifts, strict=True))
        on = self._on(leaves)
        results = on_each_device(installer(keep, (None,)), [on[at] for at in where], shifts)
        return dict(zip(where, results, strict=True))

    def joined(self, shards: dict[tuple[int, jax.Device], jax.Array]) -> list[jax.Array]:
        """Returns the leaves that have these shards, in the places that they had."""
        by_leaf: dict[int, list[jax.Array]] = {}
        for (leaf, _), shard in shards.items():
            by_leaf.setdefault(leaf, []).append(shard)
        return [
            jax.make_array_from_single_device_arrays(shape, sharding, by_leaf[i])
            for i, (shape, sharding) in enumerate(zip(self._shapes, self._shardings, strict=True))
        ]

    def _on(self, leaves: Sequence[jax.Array]) -> dict[tuple[int, jax.Device], jax.Array]:
        return {(i, shard.device): shard.data for i, leaf in enumerate(leaves) for shard in leaf.addressable_shards}
