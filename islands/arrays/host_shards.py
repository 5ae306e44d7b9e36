"""The regions of JAX arrays on one host of an island of several: copied, installed, placed.

What :class:`islands.arrays.placement.Placement` does for whole leaves, this does for the part of them that is here.
Every call is for single devices: no other host takes part, so it does not matter in which order hosts make them. A
region that lies on several devices of this host (a replica) is read from the first, and installed on all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from broker.base.errors import ConfigError
from broker.wire.fragments import Region, TensorSpec
from islands.arrays import persistence
from islands.arrays.jax_placement import copy_here, installer, on_each_device, part_to_host, put, sample
from islands.arrays.reference import Parts, wide_dtype
from islands.arrays.regions import HeldTensor, region_of
from islands.interface.arguments import shown

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Held:
    """One region of one leaf on this host.

    Attributes:
        leaf: Its number.
        region: The region of the global array.
        devices: That have it; the first is read.
    """

    leaf: int
    region: Region
    devices: tuple[jax.Device, ...]


def devices_by_region(leaf: jax.Array) -> dict[Region, tuple[jax.Device, ...]]:
    """Returns this host's regions of an array, in order, each with the devices that hold it."""
    shape = tuple(leaf.shape)
    found: dict[Region, list[jax.Device]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(shape).items():
        found.setdefault(region_of(index or (), shape), []).append(device)
    return {region: tuple(sorted(found[region], key=lambda device: device.id)) for region in sorted(found)}


def held_tensors(tensors: Sequence[TensorSpec], leaves: Mapping[str, Any]) -> tuple[HeldTensor, ...]:
    """Returns tensors, each with this host's regions of its leaf.

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
    """This host's regions of a list of leaves, with the functions that copy and replace them.

    Args:
        leaves: JAX arrays; their shardings, shapes and dtypes count, their values do not.
        handed: For each leaf, the regions that this host hands over.
        names: The names of the leaves, for errors.
    """

    def __init__(
        self, leaves: Sequence[jax.Array], handed: Sequence[frozenset[Region]], names: Sequence[str] = ()
    ) -> None:
        self._names = names or [str(i) for i in range(len(leaves))]
        self._shapes = [tuple(leaf.shape) for leaf in leaves]
        self._shardings = [leaf.sharding for leaf in leaves]
        self.regions = tuple(
            Held(i, region, devices)
            for i, leaf in enumerate(leaves)
            for region, devices in devices_by_region(leaf).items()
        )  #: in the order of the leaves, and of their regions
        self.dtypes = tuple(np.dtype(leaves[each.leaf].dtype) for each in self.regions)  #: of each region
        ours = [each.region in handed[each.leaf] for each in self.regions]
        self.parts = Parts([(each.leaf, each.region) for each in self.regions], ours)

    def check(self, leaves: Sequence[Any]) -> None:
        """Compares shardings with those of the join, which fix for the whole run the regions of each host.

        Raises:
            ConfigError: A leaf has another one: other regions of it are on this host, or on other devices.
        """
        for name, leaf, sharding in zip(self._names, leaves, self._shardings, strict=True):
            now = getattr(leaf, "sharding", None)
            if now is sharding or (now is not None and now.is_equivalent_to(sharding, leaf.ndim)):
                continue
            cure = f"it joined as {_spec(sharding)}, and hosts keep their parts for the whole run: say so where it is "
            cure += "made, jax.jit(step, out_shardings=...) with the sharding of each leaf that join was given"
            raise ConfigError(f"params {name}", f"an array that is spread as {_spec(now)}", cure)

    def before(self, leaves: Sequence[jax.Array], placed: object = ()) -> tuple[jax.Array, ...]:
        """Returns each region's array on its first device; an installation replaces these arrays.

        Raises:
            ConfigError: See :meth:`check`.
        """
        del placed
        self.check(leaves)
        on = self._on(leaves)
        return tuple(on[each.leaf, each.devices[0]] for each in self.regions)

    def values(self, leaves: Sequence[Any]) -> list[Array]:
        """Returns the elements of each region as numpy arrays; leaves may be whole; waits for devices."""
        if not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
            self.check(leaves)
        return [part_to_host(leaves[each.leaf], each.region, each.devices[0]) for each in self.regions]

    # --- as in islands.arrays.placement.Placement, by regions -----------------------------------------------------

    def copy(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Dispatches copies of all regions; they outlive donation of the leaves."""
        return on_each_device(copy_here, self.before(leaves))

    def place(self, values: Sequence[Array], keep: float) -> list[tuple[jax.Array, ...]]:
        """Puts the values to install beside the shards; not for the training thread.

        Args:
            values: The values of each region.
            keep: 0: they replace the shards, and are cast to their dtype; else they are added, and kept wide.

        Returns:
            For each region, one array for each device that has it.
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
            self.check(leaves)
            on = self._on(leaves)
            shifts = on_each_device(installer(keep, (None,)), [on[at] for at in where], shifts)
        by_leaf: dict[int, list[jax.Array]] = {}
        for (leaf, _), shard in zip(where, shifts, strict=True):
            by_leaf.setdefault(leaf, []).append(shard)
        return [
            jax.make_array_from_single_device_arrays(shape, sharding, by_leaf[i])
            for i, (shape, sharding) in enumerate(zip(self._shapes, self._shardings, strict=True))
        ]

    def places(self, movements: Sequence[Array]) -> dict[int, Any]:
        """Returns which leaves to sample, by number, and where: elements of one device that move most.

        Args:
            movements: The movements of each region, in its shape.
        """
        return {leaf: put(persistence.positions(movements[i]), None) for leaf, i in self._sampled().items()}

    def _sampled(self) -> dict[int, int]:
        """Returns leaf -> number of its region, for the largest regions on this host's first device."""
        first = min((device for each in self.regions for device in each.devices), key=lambda device: device.id)
        here = [i for i, each in enumerate(self.regions) if first in each.devices and each.region.shape]
        largest = sorted((i for i in here if self.regions[i].region.size), key=lambda i: -self.regions[i].region.size)
        return {self.regions[i].leaf: i for i in sorted(largest[: persistence.TENSORS])}

    def warm_up(self, leaves: Sequence[jax.Array], keep: float) -> None:
        """Compiles the computations of the training thread in advance, so that no step waits for them."""
        self.copy(leaves)
        regions = {leaf: self.regions[i].region for leaf, i in self._sampled().items()}
        counts = [(len(each.shape), persistence.num_positions(each.size)) for each in regions.values()]
        sample([leaves[i] for i in regions], [put(np.zeros(count, np.int32), None) for count in counts])
        if keep > 0:
            zeros = [np.zeros(x.region.shape, wide_dtype(t)) for x, t in zip(self.regions, self.dtypes, strict=True)]
            self.install(leaves, self.place(zeros, keep), keep)

    def _on(self, leaves: Sequence[jax.Array]) -> dict[tuple[int, jax.Device], jax.Array]:
        return {(i, shard.device): shard.data for i, leaf in enumerate(leaves) for shard in leaf.addressable_shards}


def _spec(sharding: Any) -> str:
    """Returns a sharding in words: its partition and its mesh."""
    spec, mesh = getattr(sharding, "spec", None), getattr(sharding, "mesh", None)
    return str(sharding) if spec is None else f"{spec} on {dict(mesh.shape) if mesh is not None else sharding}"
