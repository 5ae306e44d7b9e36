"""The device side of a fragment: copies that outlive donation, and installation of versions.

What the training thread does between two steps is here, so it is little, and all of it is dispatched without
waiting: one jitted call for the copies of a fragment, one for an installation. Trees of numpy arrays go another way
and never import JAX.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.wire.errors import ConfigError
from broker.wire.fragments import FragmentManifest
from islands.arguments import shown
from islands.arrays import persistence
from islands.arrays.in_place import InPlacePlacement, is_in_place
from islands.arrays.reference import adopted, wide_dtype
from islands.arrays.tree import Tree, TreeNames, children_of, no_array

Array = npt.NDArray[Any]
Leaf = Any  #: an array of numpy or JAX


_SEVERAL_HOSTS = (
    "it is spread over the devices of several processes, and an island of several hosts does not work yet: let each"
    " process train an island of its own, with a mesh of jax.local_devices()"
)


@dataclass(frozen=True, slots=True)
class Site:
    """The device, sharding and dtype of one parameter.

    Attributes:
        dtype: Of its elements.
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
    """Returns where a parameter is kept."""
    if is_on_device(leaf):
        return Site(leaf.dtype, True, leaf.sharding if leaf.committed else None, weak=getattr(leaf, "weak_type", False))
    return Site(np.dtype(getattr(leaf, "dtype", None) or type(leaf)), False, scalar=isinstance(leaf, np.generic))


def is_array(leaf: Leaf) -> bool:
    """Returns whether a leaf is an array of numpy or JAX, or changes in place, and is not one of another library.

    A subclass of numpy's is none: what replaces it would be a plain array, without its mask or whatever it adds.
    """
    plain = type(leaf) in (np.ndarray, np.memmap) or isinstance(leaf, np.generic)
    return plain or is_on_device(leaf) or is_in_place(leaf)


def is_on_device(leaf: Leaf) -> bool:
    """Whether a leaf is a JAX array; without JAX nothing is."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(leaf, jax.Array)


class Parameters:
    """The caller's tree as fragments. Reading a fragment takes microseconds: ways to the leaves are settled once.

    Args:
        params: The tree as it was when the island joined.

    Raises:
        ConfigError: If a leaf is no array, or names are ambiguous (:class:`islands.arrays.tree.TreeNames`).
    """

    def __init__(self, params: Tree) -> None:
        self._names = TreeNames(params)
        leaves = self._names.leaves(params)
        for name, leaf in leaves.items():
            if not is_array(leaf):
                raise ConfigError(f"params {name}".rstrip(), type(leaf).__name__, no_array(leaf))
            if is_on_device(leaf) and not leaf.is_fully_addressable:
                raise ConfigError(f"params {name}", shown(leaf), _SEVERAL_HOSTS)
        self._specs = {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in leaves.items()}
        self._ways = _ways_to(params, self._names.name_of_leaf)
        self._fragments: tuple[tuple[str, ...], ...] = ()
        self.local: tuple[str, ...] = ()  #: names of the leaves that are in no fragment
        #: Places of what stands in the tree more than once, for :mod:`islands.arrays.ties`; in place it stays one.
        self.tied = () if any(map(is_in_place, leaves.values())) else self._names.tied

    def assign(self, manifest: FragmentManifest) -> None:
        """Notes which leaf belongs to which fragment."""
        self._fragments = tuple(tuple(t.name for t in fragment) for fragment in manifest.fragments)
        synchronised = {name for fragment in self._fragments for name in fragment}
        self.local = tuple(name for name in self._names.names if name not in synchronised)

    def check(self, params: Tree) -> None:
        """Compares every leaf with what the island joined with.

        Raises:
            ConfigError: If there are more or fewer, or one of them has another shape or dtype.
        """
        for name, leaf in self._names.leaves(params).items():
            shape, dtype = self._specs[name]
            if not is_array(leaf) or (tuple(leaf.shape), leaf.dtype) != (shape, dtype):
                cure = f"it joined as {dtype}{list(shape)}; shapes and dtypes must stay the same"
                raise ConfigError(f"params {name}", shown(leaf), cure)

    def of_fragment(self, params: Tree, fragment_id: int) -> list[Leaf]:
        """Returns the leaves of one fragment, in manifest order."""
        return self._read(params, self._fragments[fragment_id])

    def of_none(self, params: Tree) -> list[Leaf]:
        """Returns the leaves that are in no fragment, in the order of ``local``."""
        return self._read(params, self.local)

    def replace(self, params: Tree, fragments: Mapping[int, Sequence[Leaf]]) -> Tree:
        """Returns the tree with whole fragments replaced; tied leaves get the same new array."""
        changed = {
            name: leaf for p, leaves in fragments.items() for name, leaf in zip(self._fragments[p], leaves, strict=True)
        }
        return self._names.replace(params, changed)

    def replace_local(self, params: Tree, leaves: Sequence[Leaf]) -> Tree:
        """Returns the tree with the leaves that are in no fragment replaced."""
        return self._names.replace(params, dict(zip(self.local, leaves, strict=True)))

    def _read(self, params: Tree, names: Sequence[str]) -> list[Leaf]:
        if self._ways is not None:
            try:
                return [_follow(self._ways[name], params) for name in names]
            except (LookupError, AttributeError, TypeError):
                self.check(params)  # says what is missing
                raise
        leaves = self._names.leaves(params)
        return [leaves[name] for name in names]


#: From the root of a tree to a leaf: one item or attribute after the other.
Way = tuple[Callable[[Any], Any], ...]


def _follow(way: Way, node: Any) -> Any:
    for step in way:
        node = step(node)
    return node


def _ways_to(params: Tree, names: Sequence[str]) -> dict[str, Way] | None:
    """Returns the way to each leaf, or None where the tree does not show any: then it is flattened each time.

    ``names`` are those of all leaves, in the order of the tree. Following ways takes a tenth of the time of flattening
    the tree.
    """
    jax = sys.modules.get("jax")
    if jax is None:
        found = list(_plain_ways(params, ()))
    else:
        paths = jax.tree_util.tree_leaves_with_path(params)
        found = [(tuple(map(_step, path)), leaf) for path, leaf in paths]
    ways: dict[str, Way] = {}
    for name, (way, leaf) in zip(names, found, strict=True):
        try:
            there = _follow(way, params)
        except (LookupError, AttributeError, TypeError):
            return None
        if there is not leaf:
            return None
        ways.setdefault(name, way)
    return ways


def _step(key: Any) -> Callable[[Any], Any]:
    """One step of a JAX key path: an attribute where the key has a name, else an item."""
    if hasattr(key, "name"):
        return operator.attrgetter(key.name)
    return operator.itemgetter(key.key if hasattr(key, "key") else key.idx)


def _plain_ways(node: Any, way: Way) -> Iterator[tuple[Way, Leaf]]:
    """The same for a nest of plain containers, without JAX."""
    children = children_of(node)
    if children is None:
        yield way, node
        return
    get = operator.attrgetter if hasattr(node, "_fields") else operator.itemgetter
    for key, child in children:
        yield from _plain_ways(child, (*way, get(key)))


class Placement:
    """The placement of a list of leaves, with the functions that copy and replace them; settled once, for speed.

    Args:
        leaves: Whose dtypes and places count; their values do not.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.sites = tuple(map(site_of, leaves))
        groups: dict[Any, list[int]] = {}
        for i, site in enumerate(self.sites):
            groups.setdefault(_company(site), []).append(i)
        self._groups = tuple((tuple(indices), company is not None) for company, indices in groups.items())

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """Of the leaves."""
        return tuple(site.dtype for site in self.sites)

    def copy(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Returns copies that stay valid when the originals are donated or written to; JAX's are only dispatched."""
        if len(self._groups) == 1:
            return _copies(list(leaves), on_device=self._groups[0][1])
        result: list[Leaf] = [None] * len(leaves)
        for indices, on_device in self._groups:
            for i, each in zip(indices, _copies([leaves[i] for i in indices], on_device=on_device), strict=True):
                result[i] = each
        return result

    def before(self, leaves: Sequence[Leaf], placed: Sequence[Leaf]) -> Sequence[Leaf]:
        """Returns what an installation is about to replace: the leaves themselves, as nothing writes to them."""
        return leaves

    def install(self, leaves: Sequence[Leaf], placed: Sequence[Leaf], keep: float) -> list[Leaf]:
        """Returns ``keep * leaf + placed``, or ``placed`` itself with ``keep = 0``; JAX's are only dispatched.

        Args:
            leaves: The parameters; every result has the dtype and sharding of its leaf.
            placed: From :meth:`place`.
            keep: Share of the local progress that survives.
        """
        if keep == 0:
            return list(placed)
        result: list[Leaf] = [None] * len(leaves)
        for indices, on_device in self._groups:
            ours, shifts = [leaves[i] for i in indices], [placed[i] for i in indices]
            installed: Sequence[Leaf]
            if on_device:
                from islands.arrays import jax_placement

                installed = jax_placement.install(ours, shifts, keep, tuple(self.sites[i].sharding for i in indices))
            else:
                hosts = zip(ours, shifts, strict=True)
                installed = [np.asarray(adopted(np.asarray(leaf), shift, keep)) for leaf, shift in hosts]
            for i, each in zip(indices, installed, strict=True):
                result[i] = each[()] if self.sites[i].scalar else each
        return result

    def place(self, values: Sequence[Array], keep: float) -> list[Leaf]:
        """Puts what is to be installed beside the parameters; not for the training thread.

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
            movements: Of each tensor, in its shape.
        """
        sampled = self._sampled([x.shape for x in movements])
        found = {i: persistence.positions(movements[i][self._here(i, movements[i].shape)]) for i in sampled}
        return self._on_device(found)

    def _sampled(self, shapes: Sequence[tuple[int, ...]]) -> list[int]:
        """The largest tensors among those that are kept together."""
        sizes = [math.prod(shape) if shape else 0 for shape in shapes]  # a scalar has no positions
        company = max((indices for indices, _ in self._groups), key=lambda each: sum(sizes[i] for i in each))
        return sorted((i for i in company if sizes[i]), key=lambda i: -sizes[i])[: persistence.TENSORS]

    def _here(self, i: int, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Returns the part of a tensor that is sampled: what is on several devices is read from one."""
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
        """Compiles what the training thread will call, so that no step waits for it.

        Args:
            leaves: The initial parameters.
            keep: Of the run.
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


def _copies(leaves: list[Leaf], *, on_device: bool) -> list[Leaf]:
    if on_device:
        from islands.arrays import jax_placement

        return list(jax_placement.copy(leaves))
    return [np.array(leaf) if hasattr(leaf, "dtype") else leaf for leaf in leaves]


def sample(leaves: Sequence[Leaf], places: Sequence[Leaf]) -> list[Leaf]:
    """Returns copies of a few elements of each leaf; those of JAX are only dispatched.

    Args:
        leaves: Of the sorts and devices they may be; usually of one.
        places: From :meth:`Placement.places`.
    """
    if not all(map(is_on_device, leaves)):
        return [_sample_of(leaf, place) for leaf, place in zip(leaves, places, strict=True)]
    from islands.arrays import jax_placement

    return list(jax_placement.sample(list(leaves), list(places))) if leaves else []


def _sample_of(leaf: Leaf, place: Leaf) -> Leaf:
    if is_in_place(leaf):
        return leaf.sample(place)
    return sample([leaf], [place])[0] if is_on_device(leaf) else np.asarray(leaf)[tuple(np.asarray(place))]


def copy(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Returns copies of any leaves, plain numbers among them, that stay valid when the originals are donated."""
    tensors = [leaf for leaf in leaves if is_in_place(leaf)]
    if not tensors:
        return Placement(leaves).copy(leaves)
    copies = iter(tensors[0].copies(tensors))
    return [next(copies) if is_in_place(leaf) else copy([leaf])[0] for leaf in leaves]


# --- to the host, and back --------------------------------------------------------------------------------------


def to_host(leaf: Leaf) -> Array:
    """Returns a leaf as a numpy array; waits until a device has computed it. Random keys become their data.

    Raises:
        ConfigError: If it has been donated meanwhile.
    """
    if is_in_place(leaf):
        return leaf.to_host()
    if not is_on_device(leaf):
        return np.asarray(leaf)
    from islands.arrays import jax_placement

    return jax_placement.to_host(leaf)


def from_host(value: Array, like: Leaf) -> Leaf:
    """Returns ``value`` as a leaf of the same sort and place as ``like``: the way back of :func:`to_host`.

    Where ``like`` changes in place, the value is written into it.
    """
    if is_in_place(like):
        return like.written(value)
    if is_on_device(like):
        from islands.arrays import jax_placement

        return jax_placement.from_host(value, like)
    if not hasattr(like, "dtype"):
        return type(like)(value.item())
    array = value.astype(like.dtype)
    return array[()] if isinstance(like, np.generic) else array
