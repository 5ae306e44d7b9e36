"""The device side of a fragment: copies that outlive donation, and installation of versions.

What the training thread does between two steps is here, so it is little, and all of it is dispatched without
waiting: one jitted call for the copies of a fragment, one for an installation. Trees of numpy arrays go another way
and never import JAX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.wire.fragments import Region
from islands.arrays import persistence
from islands.arrays.in_place import InPlacePlacement, is_in_place, region_here
from islands.arrays.reference import Parts, adopted, wide_dtype
from islands.arrays.regions import Spread
from islands.arrays.tree import loaded_jax

Array = npt.NDArray[Any]
Leaf = Any  #: an array of numpy or JAX


@dataclass(frozen=True, slots=True)
class Site:
    """The device, sharding and dtype of one parameter.

    Attributes:
        dtype: The dtype of its elements.
        on_device: Whether it is a JAX array.
        sharding: Its JAX sharding if it is committed to that. An uncommitted array must stay so: committing it
            would trace and compile the caller's train step once more.
        weak: Whether it is a JAX array of a weak type, which gives way to the dtype of whatever it meets. One that
            ceased to be would make float32 of bfloat16 in the caller's train step.
        scalar: Whether it is a scalar of numpy, and no array.
    """

    dtype: np.dtype[Any]
    on_device: bool
    sharding: Any = None
    weak: bool = False
    scalar: bool = False


def site_of(leaf: Leaf) -> Site:
    """Returns the device, sharding and dtype of a parameter."""
    if is_on_device(leaf):
        return Site(leaf.dtype, True, leaf.sharding if leaf.committed else None, weak=getattr(leaf, "weak_type", False))
    return Site(np.dtype(getattr(leaf, "dtype", None) or type(leaf)), False, scalar=isinstance(leaf, np.generic))


def is_array(leaf: Leaf) -> bool:
    """Returns True if a leaf is an array of numpy or JAX, or changes in place.

    A subclass of numpy's is none: what replaces it would be a plain array, without its mask or whatever it adds.
    """
    plain = type(leaf) in (np.ndarray, np.memmap) or isinstance(leaf, np.generic)
    return plain or is_on_device(leaf) or is_in_place(leaf)


def is_on_device(leaf: Leaf) -> bool:
    """Returns whether a leaf is a JAX array; always False without JAX."""
    jax = loaded_jax()
    return jax is not None and isinstance(leaf, jax.Array)


class Placement:
    """The placement of a list of leaves, with functions to copy and replace them; settled once for speed.

    Args:
        leaves: Whose dtypes and places count; their values do not.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.parts = Parts()
        self.sites = tuple(map(site_of, leaves))
        groups: dict[Any, list[int]] = {}
        for i, site in enumerate(self.sites):
            groups.setdefault(_company(site), []).append(i)
        self._groups = tuple(
            (tuple(indices), _OnHost() if company is None else _together([self.sites[i].sharding for i in indices]))
            for company, indices in groups.items()
        )

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """The dtypes of the leaves."""
        return tuple(site.dtype for site in self.sites)

    def values(self, leaves: Sequence[Leaf]) -> list[Array]:
        """Returns this host's part of the leaves as numpy arrays; waits for devices."""
        return [to_host(leaf) for leaf in leaves]

    # --- what the training thread calls -----------------------------------------------------------------------------

    def copy(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Returns copies that stay valid when originals are donated or written to; dispatched only under JAX."""
        if len(self._groups) == 1:
            return self._groups[0][1].copy(list(leaves))
        result: list[Leaf] = [None] * len(leaves)
        for indices, group in self._groups:
            for i, each in zip(indices, group.copy([leaves[i] for i in indices]), strict=True):
                result[i] = each
        return result

    def before(self, leaves: Sequence[Leaf], placed: Sequence[Leaf]) -> Sequence[Leaf]:
        """Returns the leaves that an installation is about to replace; no copy, since nothing writes to them."""
        return leaves

    def install(self, leaves: Sequence[Leaf], placed: Sequence[Leaf], keep: float) -> list[Leaf]:
        """Returns ``keep * leaf + placed``, or ``placed`` itself with ``keep = 0``; dispatched only under JAX.

        Args:
            leaves: The parameters; every result has the dtype and sharding of its leaf.
            placed: From :meth:`place`.
            keep: Share of the local progress that survives.
        """
        if keep == 0:
            return list(placed)
        result: list[Leaf] = [None] * len(leaves)
        for indices, group in self._groups:
            installed = group.install([leaves[i] for i in indices], [placed[i] for i in indices], keep)
            for i, each in zip(indices, installed, strict=True):
                result[i] = each[()] if self.sites[i].scalar else each
        return result

    def place(self, values: Sequence[Array], keep: float) -> list[Leaf]:
        """Puts the values to install beside the parameters; not for the training thread.

        Args:
            values: From :meth:`islands.arrays.reference.Reference.shift`; not written to afterwards.
            keep: 0: the values replace the parameters, and are cast to their dtype. Else they are shifts, kept wide.
        """
        placed: list[Leaf] = []
        for value, site in zip(values, self.sites, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                # A copy in any case: parameters must neither hold a received message nor be read-only.
                cast = np.array(value, site.dtype) if keep == 0 else np.asarray(value)
            if site.on_device:
                from islands.arrays import jax_placement

                placed.append(jax_placement.put(cast, site.sharding, weak=site.weak and keep == 0))
            else:
                placed.append(cast[()] if site.scalar else cast)
        return placed

    def places(self, movements: Sequence[Array]) -> dict[int, Leaf]:
        """Returns which tensors to sample, by number, and where: the elements that move most.

        Args:
            movements: The movements of each tensor, in its shape.
        """
        sampled = self._sampled([x.shape for x in movements])
        found = {i: persistence.positions(movements[i][self._here(i, movements[i].shape)]) for i in sampled}
        return self._on_device(found)

    def _sampled(self, shapes: Sequence[tuple[int, ...]]) -> list[int]:
        """Returns the largest tensors among those on the same devices."""
        sizes = [math.prod(shape) if shape else 0 for shape in shapes]  # a scalar has no positions
        company = max((indices for indices, _ in self._groups), key=lambda each: sum(sizes[i] for i in each))
        return sorted((i for i in company if sizes[i]), key=lambda i: -sizes[i])[: persistence.TENSORS]

    def _here(self, i: int, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Returns the part of a tensor to sample: on several devices, the first one's."""
        if not self.sites[i].on_device:
            return (slice(None),) * len(shape)
        from islands.arrays import jax_placement

        return jax_placement.sampled_region(self.sites[i].sharding, shape)

    def _on_device(self, places: Mapping[int, Array]) -> dict[int, Leaf]:
        if not any(self.sites[i].on_device for i in places):
            return dict(places)
        from islands.arrays import jax_placement

        return {i: jax_placement.put(place, None) for i, place in places.items()}

    def warm_up(self, leaves: Sequence[Leaf], keep: float) -> None:
        """Compiles the computations of the training thread in advance, so that no step waits for them.

        Args:
            leaves: The initial parameters.
            keep: ``keep`` of the run.
        """
        self.copy(leaves)
        shapes = [tuple(x.shape) for x in leaves]
        where = {i: np.broadcast_to(np.float32(0), shapes[i])[self._here(i, shapes[i])] for i in self._sampled(shapes)}
        counts = {i: (x.ndim, persistence.num_positions(x.size)) for i, x in where.items()}
        places = self._on_device({i: np.zeros(count, np.int32) for i, count in counts.items()})
        sample([leaves[i] for i in places], list(places.values()))
        if keep > 0:
            zeros = [np.zeros(x.shape, wide_dtype(site.dtype)) for x, site in zip(leaves, self.sites, strict=True)]
            self.install(leaves, self.place(zeros, keep), keep)


def placement_of(leaves: Sequence[Leaf]) -> Placement | InPlacePlacement:
    """Returns the placement of leaves, of which either all or none change in place."""
    return InPlacePlacement(leaves) if leaves and all(map(is_in_place, leaves)) else Placement(leaves)


def _company(site: Site) -> Any:
    """Returns the property that leaves of one computation must share; None for numpy."""
    if not site.on_device:
        return None
    # Outputs of a computation are committed if one of its inputs is.
    return "uncommitted" if site.sharding is None else frozenset(site.sharding.device_set)


def _together(shardings: Sequence[Any]) -> Any:
    from islands.arrays import jax_placement

    return jax_placement.Together(shardings)


class _OnHost:
    """Copies and replaces numpy leaves and plain numbers, as :class:`.jax_placement.Together` does JAX's."""

    def copy(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        return [np.array(leaf) if hasattr(leaf, "dtype") else leaf for leaf in leaves]

    def install(self, leaves: Sequence[Leaf], shifts: Sequence[Leaf], keep: float) -> list[Leaf]:
        pairs = zip(leaves, shifts, strict=True)
        return [np.asarray(adopted(np.asarray(leaf), shift, keep)) for leaf, shift in pairs]


def sample(leaves: Sequence[Leaf], places: Sequence[Leaf]) -> list[Leaf]:
    """Returns copies of a few elements of each leaf; dispatched only under JAX.

    Args:
        leaves: Of any types and devices, usually of one.
        places: From :meth:`Placement.places`.
    """
    if not all(map(is_on_device, leaves)):
        return [_sample_of(leaf, place) for leaf, place in zip(leaves, places, strict=True)]
    from islands.arrays import jax_placement

    return list(jax_placement.sample(list(leaves), list(places))) if leaves else []


def sampled_shape(leaf: Leaf) -> tuple[int, ...]:
    """Returns the shape of the sampled part of a leaf: this host's part, or its first device's."""
    if is_in_place(leaf):
        return region_here(leaf).shape
    if not is_on_device(leaf):
        return tuple(leaf.shape)
    from islands.arrays import jax_placement

    return jax_placement.first_shard(leaf).shape


def placed_positions(leaf: Leaf, positions: npt.NDArray[np.int32]) -> Leaf:
    """Returns positions within :func:`sampled_shape` where :func:`sample` takes them."""
    if is_in_place(leaf):
        return leaf.place_positions(positions)
    if not is_on_device(leaf):
        return positions
    from islands.arrays import jax_placement

    return jax_placement.put(positions, None)


def _sample_of(leaf: Leaf, place: Leaf) -> Leaf:
    if is_in_place(leaf):
        return leaf.sample(place)
    return sample([leaf], [place])[0] if is_on_device(leaf) else np.asarray(leaf)[tuple(np.asarray(place))]


def copy(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Returns copies of leaves or plain numbers that stay valid when the originals are donated."""
    tensors = [leaf for leaf in leaves if is_in_place(leaf)]
    if not tensors:
        return Placement(leaves).copy(leaves)
    copies = iter(tensors[0].copies(tensors))
    return [next(copies) if is_in_place(leaf) else copy([leaf])[0] for leaf in leaves]


# --- to the host, and back --------------------------------------------------------------------------------------


def to_host(leaf: Leaf) -> Array:
    """Returns a leaf as a numpy array, once a device has computed it; random keys become their data.

    Raises:
        ConfigError: If it has been donated meanwhile.
    """
    if is_in_place(leaf):
        return leaf.to_host()
    if not is_on_device(leaf):
        return np.asarray(leaf)
    from islands.arrays import jax_placement

    return jax_placement.to_host(leaf)


def here(leaf: Leaf) -> Array | Spread:
    """Returns this host's part of a leaf: all of it, or some regions if several hosts share it."""
    if is_in_place(leaf):
        part = leaf.part
        return leaf.to_host() if part is None else Spread(part.shape, leaf.dtype, {part.region: leaf.to_host()})
    if not is_on_device(leaf):
        return np.asarray(leaf)
    from islands.arrays import jax_placement

    return jax_placement.here(leaf)


def owned(leaf: Leaf) -> tuple[Region, ...] | None:
    """Returns the regions of a shared leaf that this host hands over; None if all of it is here."""
    if is_in_place(leaf):
        return None if leaf.part is None else (leaf.part.region,) if leaf.part.owned else ()
    if not is_on_device(leaf):
        return None
    from islands.arrays import jax_placement

    return jax_placement.owned(leaf)


def from_host(value: Array | Spread, like: Leaf) -> Leaf:
    """Returns ``value`` as a leaf with the type and place of ``like``: the inverse of :func:`here`.

    Where ``like`` changes in place, the value is written into it.
    """
    if is_in_place(like):
        return like.written(value)
    if is_on_device(like):
        from islands.arrays import jax_placement

        return jax_placement.from_host(value, like)
    assert not isinstance(value, Spread), "only arrays on devices are spread over hosts"
    if not hasattr(like, "dtype"):
        return type(like)(value.item())
    array = value.astype(like.dtype)
    return array[()] if isinstance(like, np.generic) else array


# --- rows of numpy arrays: sections of a tensor cut by the run (:func:`broker.wire.fragments.cut`) -------------------


def rows_of(leaf: Array, start: int, stop: int) -> Array:
    """Returns a view of some rows of the first axis."""
    return leaf[start:stop]


def with_rows(leaf: Array, sections: Sequence[tuple[int, Array]]) -> Array:
    """Returns a copy of ``leaf`` with some rows replaced.

    Args:
        leaf: The leaf before.
        sections: Each with the number of its first row; no two have a row in common.
    """
    replaced = sum(len(section) for _, section in sections)
    new = np.empty(leaf.shape, leaf.dtype) if replaced == len(leaf) else np.array(leaf)
    for start, section in sections:
        new[start : start + len(section)] = section
    return new
