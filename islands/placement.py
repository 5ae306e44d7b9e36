"""The device's side of one fragment: copies that outlive donation, installations, and where arrays live.

What the training thread does between two steps is here, so it is little, and all of it is dispatched without
waiting: one jitted call for the copies of a fragment, one for an installation. Trees of numpy arrays go another way
and never import JAX.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.errors import ConfigError
from broker.fragments import FragmentManifest, TensorSpec
from islands.reference import adopted, wide_dtype
from islands.tree import Tree, TreeNames

Array = npt.NDArray[Any]
Leaf = Any  #: an array of numpy or JAX


@dataclass(frozen=True, slots=True)
class Site:
    """Where and how one parameter is kept.

    Attributes:
        dtype: Of its elements.
        on_device: Whether it is a JAX array.
        sharding: Its JAX sharding if it is committed to that. An uncommitted array must stay so: committing it
            would trace and compile the caller's train step once more.
    """

    dtype: np.dtype[Any]
    on_device: bool
    sharding: Any = None


def site_of(leaf: Leaf) -> Site:
    """Returns where a parameter is kept."""
    if is_on_device(leaf):
        return Site(leaf.dtype, True, leaf.sharding if leaf.committed else None)
    return Site(np.dtype(leaf.dtype), False)


def is_on_device(leaf: Leaf) -> bool:
    """Whether a leaf is a JAX array; without JAX nothing is."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(leaf, jax.Array)


class Parameters:
    """The caller's tree as fragments. Reading a fragment costs microseconds: names and places are settled once.

    Args:
        params: The tree as it was when the island joined.

    Raises:
        ConfigError: If a leaf is no array, or names are ambiguous (:class:`islands.tree.TreeNames`).
    """

    def __init__(self, params: Tree) -> None:
        self._names = TreeNames(params)
        by_name = self._names.leaves(params)
        self._shapes = [(tuple(leaf.shape), leaf.dtype) for leaf in by_name.values()]
        self._num_leaves = 0
        self._first: list[int] = []  # index of each distinct leaf in JAX's flat order
        jax = sys.modules.get("jax")
        if jax is not None:
            flat = jax.tree_util.tree_leaves(params)
            positions = {id(leaf): i for i, leaf in reversed(list(enumerate(flat)))}
            self._num_leaves = len(flat)
            self._first = [positions[id(leaf)] for leaf in by_name.values()]
        self._fragments: tuple[tuple[int, ...], ...] = ()
        self.local: tuple[int, ...] = ()  #: leaves that are in no fragment

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the leaves, in the order of :meth:`leaves`."""
        return self._names.names

    def assign(self, manifest: FragmentManifest) -> None:
        """Notes which leaf belongs to which fragment."""
        index = {name: i for i, name in enumerate(self.names)}
        self._fragments = tuple(tuple(index[t.name] for t in fragment) for fragment in manifest.fragments)
        self.local = tuple(sorted(set(range(len(index))) - {i for f in self._fragments for i in f}))

    def leaves(self, params: Tree) -> list[Leaf]:
        """Returns the distinct leaves of a tree.

        Raises:
            ConfigError: If the tree has another number of leaves than at the join.
        """
        jax = sys.modules.get("jax")
        if jax is None or not self._first:
            return list(self._names.leaves(params).values())
        flat = jax.tree_util.tree_leaves(params)
        if len(flat) != self._num_leaves:
            cure = f"it had {self._num_leaves} when the island joined; the structure must stay the same"
            raise ConfigError("params", f"{len(flat)} leaves", cure)
        return [flat[i] for i in self._first]

    def of_fragment(self, leaves: Sequence[Leaf], fragment_id: int) -> list[Leaf]:
        """Returns the leaves of one fragment, in manifest order.

        Raises:
            ConfigError: If one of them has another shape or dtype than at the join.
        """
        chosen = []
        for i in self._fragments[fragment_id]:
            leaf = leaves[i]
            if (leaf.shape, leaf.dtype) != self._shapes[i]:
                shape, dtype = self._shapes[i]
                cure = f"it joined as {dtype}{list(shape)}; shapes and dtypes must stay the same"
                raise ConfigError(f"params {self.names[i]}", f"{leaf.dtype}{list(leaf.shape)}", cure)
            chosen.append(leaf)
        return chosen

    def replace(self, params: Tree, fragments: Mapping[int, Sequence[Leaf]]) -> Tree:
        """Returns the tree with whole fragments replaced; tied leaves get the same new array."""
        changed = {
            self.names[i]: leaf
            for p, leaves in fragments.items()
            for i, leaf in zip(self._fragments[p], leaves, strict=True)
        }
        return self._names.replace(params, changed)

    def replace_local(self, params: Tree, leaves: Sequence[Leaf]) -> Tree:
        """Returns the tree with the leaves that are in no fragment replaced."""
        return self._names.replace(params, {self.names[i]: x for i, x in zip(self.local, leaves, strict=True)})


# --- what the training thread dispatches ------------------------------------------------------------------------


def copy(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Returns copies that stay valid when the originals are donated or written to; JAX's are only dispatched."""
    on_device = [is_on_device(leaf) for leaf in leaves]
    if not any(on_device):
        return [np.array(leaf) if hasattr(leaf, "dtype") else leaf for leaf in leaves]
    from islands import jax_placement

    if all(on_device):
        return jax_placement.copy(leaves)
    return _mixed(
        on_device,
        copy([x for x, d in zip(leaves, on_device, strict=True) if not d]),
        jax_placement.copy([x for x, d in zip(leaves, on_device, strict=True) if d]),
    )


def install(leaves: Sequence[Leaf], placed: Sequence[Leaf], keep: float) -> list[Leaf]:
    """Returns ``keep * leaf + placed``, or ``placed`` itself with ``keep = 0``; JAX's are only dispatched.

    Args:
        leaves: Of one fragment.
        placed: From :func:`place`.
        keep: Share of the local progress that survives.
    """
    if keep == 0:
        return list(placed)
    on_device = [is_on_device(leaf) for leaf in leaves]
    hosts = [np.asarray(adopted(x, s, keep)) for x, s, d in zip(leaves, placed, on_device, strict=True) if not d]
    if not any(on_device):
        return hosts
    from islands import jax_placement

    pairs = [(x, s) for x, s, d in zip(leaves, placed, on_device, strict=True) if d]
    return _mixed(on_device, hosts, jax_placement.install([x for x, _ in pairs], [s for _, s in pairs], keep))


def _mixed(on_device: Sequence[bool], hosts: Sequence[Leaf], devices: Sequence[Leaf]) -> list[Leaf]:
    from_host, from_device = iter(hosts), iter(devices)
    return [next(from_device if each else from_host) for each in on_device]


# --- what other threads do beforehand and afterwards ------------------------------------------------------------


def place(values: Sequence[Array], sites: Sequence[Site], keep: float) -> list[Leaf]:
    """Puts what is to be installed beside the parameters.

    Args:
        values: From :meth:`islands.reference.Reference.shift`; not written to afterwards.
        sites: Of the parameters.
        keep: 0: the values replace the parameters, and are cast to their dtype. Else they are shifts, and stay wide.
    """
    placed: list[Leaf] = []
    for value, site in zip(values, sites, strict=True):
        with np.errstate(over="ignore", invalid="ignore"):
            # A copy in any case: parameters must neither hold a received message nor be read-only.
            cast = np.array(value, site.dtype) if keep == 0 else np.asarray(value)
        if site.on_device:
            from islands import jax_placement

            placed.append(jax_placement.put(cast, site.sharding))
        else:
            placed.append(cast)
    return placed


def to_host(leaf: Leaf) -> Array:
    """Returns a leaf as a numpy array; waits until a device has computed it. Random keys become their data.

    Raises:
        ConfigError: If it has been donated meanwhile.
    """
    if not is_on_device(leaf):
        return np.asarray(leaf)
    from islands import jax_placement

    return jax_placement.to_host(leaf)


def from_host(value: Array, like: Leaf) -> Leaf:
    """Returns ``value`` as a leaf of the same sort and place as ``like``: the way back of :func:`to_host`."""
    if is_on_device(like):
        from islands import jax_placement

        return jax_placement.from_host(value, like)
    return value.astype(like.dtype) if hasattr(like, "dtype") else type(like)(value.item())


def warm_up(leaves: Sequence[Leaf], tensors: Sequence[TensorSpec], keep: float) -> None:
    """Compiles what the training thread will call for a fragment, so that no step waits for it.

    Args:
        leaves: The fragment's initial parameters.
        tensors: Its manifest entry.
        keep: Of the run.
    """
    sites = [site_of(leaf) for leaf in leaves]
    copy(leaves)
    if keep > 0:
        zeros = [np.zeros(t.shape, wide_dtype(site.dtype)) for t, site in zip(tensors, sites, strict=True)]
        install(leaves, place(zeros, sites, keep), keep)
