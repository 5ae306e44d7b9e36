"""The regions of JAX arrays on one host of an island of several: copied, installed, placed.

What :class:`islands.arrays.placement.Placement` does for whole leaves, this does for the part of them that is here.
Every call is for single devices: no other host takes part, so it does not matter in which order hosts make them. A
region that lies on several devices of this host (a replica) is read from the first, and installed on all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from broker.wire.errors import ConfigError
from broker.wire.fragments import Region, TensorSpec
from broker.wire.messages import Encoded, Place
from islands.arguments import shown
from islands.arrays.jax_placement import copy_here, installer, on_each_device, part_to_host
from islands.arrays.reference import cut, wide_dtype
from islands.hosts.messages import HeldTensor
from islands.hosts.regions import region_of

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Held:
    """One region of one leaf on this host.

    Attributes:
        leaf: Its number.
        region: Of the global array.
        devices: That have it; the first is read.
    """

    leaf: int
    region: Region
    devices: tuple[jax.Device, ...]


def devices_by_region(leaf: jax.Array) -> dict[Region, tuple[jax.Device, ...]]:
    """Returns the regions of an array that are on this host, in order, each with the devices that have it."""
    shape = tuple(leaf.shape)
    found: dict[Region, list[jax.Device]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(shape).items():
        found.setdefault(region_of(index or (), shape), []).append(device)
    return {region: tuple(sorted(found[region], key=lambda device: device.id)) for region in sorted(found)}


def held_tensors(tensors: Sequence[TensorSpec], leaves: Mapping[str, Any]) -> tuple[HeldTensor, ...]:
    """Returns tensors, each with the regions of its leaf that are on this host.

    Raises:
        ConfigError: A leaf is no JAX array.
    """
    found = []
    for tensor in tensors:
        leaf = leaves[tensor.name]
        if not isinstance(leaf, jax.Array):
            cure = "an island of several hosts has arrays of JAX alone: place it on the mesh that the others are on"
            raise ConfigError(f"params {tensor.name}", shown(leaf), cure)
        found.append(HeldTensor(tensor=tensor, regions=tuple(devices_by_region(leaf))))
    return tuple(found)


class HostPlacement:
    """The regions of a list of leaves that are on one host, with the functions that copy and replace them.

    Args:
        leaves: JAX arrays; their shardings, shapes and dtypes count, their values do not.
        handed: Of each leaf, the regions that this host hands over, where several have them.
    """

    def __init__(self, leaves: Sequence[jax.Array], handed: Sequence[frozenset[Region]]) -> None:
        self._shapes = [tuple(leaf.shape) for leaf in leaves]
        self._shardings = [leaf.sharding for leaf in leaves]
        self.regions = tuple(
            Held(i, region, devices)
            for i, leaf in enumerate(leaves)
            for region, devices in devices_by_region(leaf).items()
        )  #: in the order of the leaves, and of their regions
        self.dtypes = tuple(np.dtype(leaves[each.leaf].dtype) for each in self.regions)  #: of each region
        self._handed = tuple(each.region in handed[each.leaf] for each in self.regions)

    # --- what is here of whole leaves ---------------------------------------------------------------------------

    def tensors(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Returns one entry per region, from those of the leaves."""
        return tuple(replace(specs[each.leaf], shape=each.region.shape) for each in self.regions)

    def before(self, leaves: Sequence[jax.Array], placed: object = ()) -> tuple[jax.Array, ...]:
        """Returns the array of each region, as it is on its first device: an installation replaces it."""
        del placed
        on = self._on(leaves)
        return tuple(on[each.leaf, each.devices[0]] for each in self.regions)

    def values(self, leaves: Sequence[Any]) -> list[Array]:
        """Returns the elements of each region on the host, of leaves that may be whole; waits for devices."""
        return [part_to_host(leaves[each.leaf], each.region, each.devices[0]) for each in self.regions]

    def cut(self, payload: Sequence[Encoded]) -> tuple[Encoded, ...]:
        """Returns a fragment's regions, in float32, from its whole tensors."""
        return cut(payload, [(each.leaf, each.region) for each in self.regions])

    def handed(self, payload: Sequence[Encoded]) -> tuple[tuple[Encoded, ...], tuple[Place, ...]]:
        """Returns what this host hands over of the regions it has, and where that belongs."""
        own = [(each, encoded) for each, encoded, ours in zip(self.regions, payload, self._handed, strict=True) if ours]
        places = tuple(Place(tensor=each.leaf, start=each.region.start) for each, _ in own)
        return tuple(encoded for _, encoded in own), places

    # --- as in islands.arrays.placement.Placement, by regions -----------------------------------------------------

    def copy(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Dispatches copies of all regions; they outlive donation of the leaves."""
        return on_each_device(copy_here, self.before(leaves))

    def place(self, values: Sequence[Array], keep: float) -> list[tuple[jax.Array, ...]]:
        """Puts what is to be installed beside the shards; not for the training thread.

        Args:
            values: Of each region.
            keep: 0: they replace the shards, and are cast to their dtype; else they are added, and kept wide.

        Returns:
            Of each region, one array for each device that has it.
        """
        placed = []
        for value, each, dtype in zip(values, self.regions, self.dtypes, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                cast = np.array(value, dtype) if keep == 0 else np.asarray(value)
            placed.append(tuple(jax.device_put(cast, device) for device in each.devices))
        return placed

    def install(
        self, leaves: Sequence[jax.Array], placed: Sequence[tuple[jax.Array, ...]], keep: float
    ) -> list[jax.Array]:
        """Dispatches ``keep * shard + placed`` for every shard of this host, or ``placed`` itself with 0.

        Returns:
            The leaves that have the new shards, in the places that they had.
        """
        where = [(each.leaf, device) for each in self.regions for device in each.devices]
        shifts = [array for arrays in placed for array in arrays]
        if keep != 0:
            on = self._on(leaves)
            shifts = on_each_device(installer(keep, (None,)), [on[at] for at in where], shifts)
        by_leaf: dict[int, list[jax.Array]] = {}
        for (leaf, _), shard in zip(where, shifts, strict=True):
            by_leaf.setdefault(leaf, []).append(shard)
        return [
            jax.make_array_from_single_device_arrays(shape, sharding, by_leaf[i])
            for i, (shape, sharding) in enumerate(zip(self._shapes, self._shardings, strict=True))
        ]

    def places(self, movements: Sequence[Array]) -> Mapping[int, Any]:
        """Returns nothing to sample: whether adoptions stay is looked at on islands of one host."""
        del movements
        return {}

    def warm_up(self, leaves: Sequence[jax.Array], keep: float) -> None:
        """Compiles what the training thread will call, so that no step waits for it."""
        self.copy(leaves)
        if keep > 0:
            zeros = [np.zeros(x.region.shape, wide_dtype(t)) for x, t in zip(self.regions, self.dtypes, strict=True)]
            self.install(leaves, self.place(zeros, keep), keep)

    def _on(self, leaves: Sequence[jax.Array]) -> dict[tuple[int, jax.Device], jax.Array]:
        return {(i, shard.device): shard.data for i, leaf in enumerate(leaves) for shard in leaf.addressable_shards}
