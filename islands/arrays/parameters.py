"""The caller's tree as fragments: the leaves of each, and quick ways to read and replace them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import xxhash

from broker.base.errors import ConfigError
from broker.wire.fragments import FragmentManifest, Kind, Section
from islands.arrays import in_place, placement
from islands.arrays.in_place import is_in_place
from islands.arrays.placement import Leaf, is_array, is_on_device
from islands.arrays.regions import Spread
from islands.arrays.tree import Tree, TreeNames, children_of, form_of, loaded_jax, named_leaves, no_array
from islands.interface.arguments import shown

#: Steps after which tied leaves that do not move are left alone: a learning rate begins at zero, some never move.
MOST_LOOKS = 16


class Parameters:
    """The caller's tree as fragments, read in microseconds: the path to each leaf is found once.

    A leaf that the run has cut has some rows in each fragment. They are views in numpy, and small copies under JAX;
    they go back into a new leaf. Nothing else in an island knows of it.

    Args:
        params: The tree as it was when the island joined.
        base: Names of leaves that are on every island's disk: they are in no fragment and no checkpoint.

    Raises:
        ConfigError: If a leaf is no array, or names are ambiguous (:class:`islands.arrays.tree.TreeNames`).
    """

    def __init__(self, params: Tree, base: Sequence[str] = ()) -> None:
        self._names, self.base = TreeNames(params), tuple(base)
        leaves = self._names.leaves(params)
        for name, leaf in leaves.items():
            if not is_array(leaf):
                raise ConfigError(f"params {name}".rstrip(), type(leaf).__name__, no_array(leaf))
        self._specs = {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in leaves.items()}
        self._in_place = all(map(is_in_place, leaves.values()))
        self._form, self._ways = form_of(params), _ways_to(params, self._names.name_of_leaf)
        self._fragments: tuple[tuple[str, ...], ...] = ()
        self._rows: Mapping[str, Section] = {}  # of each section of a leaf that was cut
        self.local: tuple[str, ...] = ()  #: names of the leaves that are the island's own
        self.frozen: tuple[str, ...] = ()  #: that training must not move: in a fragment, or of the base
        #: Places of tied leaves, for :class:`Ties`; leaves that change in place stay tied.
        self.tied = () if any(map(is_in_place, leaves.values())) else self._names.tied

    def assign(self, manifest: FragmentManifest) -> None:
        """Notes which leaf belongs to which fragment."""
        self._fragments = tuple(tuple(t.name for t in fragment) for fragment in manifest.fragments)
        self._rows = manifest.sections
        kept = {*manifest.whole, *self.base}
        self.local = tuple(name for name in self._names.names if name not in kept)
        self.frozen = (*(n for n, tensor in manifest.whole.items() if tensor.kind is Kind.FROZEN), *self.base)

    def check(self, params: Tree) -> None:
        """Compares every leaf with the join; containers may differ.

        Raises:
            ConfigError: If there are more or fewer, or one of them has another shape or dtype.
        """
        for name, leaf in self._names.leaves(params).items():
            self._check(name, leaf)
            if not is_array(leaf):
                raise ConfigError(f"params {name}", shown(leaf), no_array(leaf))
        form = form_of(params)
        if form != self._form:
            self._form, self._ways = form, _ways_to(params, self._names.name_of_leaf)

    def check_form(self, params: Tree) -> None:
        """Compares the tree's structure with the join, at each boundary that reads or replaces something.

        Raises:
            ConfigError: If there are leaves more or fewer.
        """
        if not self._in_place and form_of(params) != self._form:
            self.check(params)

    def _check(self, name: str, leaf: Leaf) -> None:
        shape, dtype = self._specs[name]
        if getattr(leaf, "shape", None) != shape or leaf.dtype != dtype:
            cure = f"it joined as {dtype}{list(shape)}; shapes and dtypes must stay the same"
            raise ConfigError(f"params {name}", shown(leaf), cure)

    def of_fragment(self, params: Tree, fragment_id: int) -> list[Leaf]:
        """Returns the leaves of one fragment, in manifest order."""
        return self._read(params, self._fragments[fragment_id])

    def are_computed_now(self, params: Tree) -> bool:
        """Returns whether a device still computes the parameters: JAX returns arrays before they are ready."""
        if self._in_place:
            return False
        first = self._found(params, [self._whole(names[0]) for names in self._fragments])
        return any(not leaf.is_deleted() and not leaf.is_ready() for leaf in first if is_on_device(leaf))

    def names(self, fragment_id: int, numbers: Iterable[int]) -> tuple[str, ...]:
        """Returns the names of some leaves of one fragment, by their numbers in the manifest."""
        return tuple(self._whole(self._fragments[fragment_id][i]) for i in numbers)

    def _whole(self, name: str) -> str:
        """Returns the name of the leaf that a section belongs to; a whole leaf's name stays."""
        return self._rows[name].tensor if name in self._rows else name

    def of_none(self, params: Tree) -> list[Leaf]:
        """Returns the leaves outside all fragments, in the order of ``local``."""
        return self.of_names(params, self.local)

    def replace(self, params: Tree, fragments: Mapping[int, Sequence[Leaf]]) -> Tree:
        """Returns the tree with whole fragments replaced; tied leaves get the same new array.

        Leaves that change in place have been written to: then it is the tree itself.
        """
        if self._in_place:
            return params
        changed: dict[str, Leaf] = {}
        sections: dict[str, list[tuple[int, Leaf]]] = {}
        for p, leaves in fragments.items():
            for name, leaf in zip(self._fragments[p], leaves, strict=True):
                here = self._rows.get(name)
                if here is None:
                    changed[name] = leaf
                else:
                    sections.setdefault(here.tensor, []).append((here.start, leaf))
        for (name, found), leaf in zip(sections.items(), self.of_names(params, list(sections)), strict=True):
            changed[name] = _rows(leaf).with_rows(leaf, found)
        return self._names.replace(params, changed)

    def warm_up(self, params: Tree, fragment_id: int, leaves: Sequence[Leaf]) -> None:
        """Compiles the replacement of a fragment's sections; does nothing if none of its leaves was cut."""
        if not self._rows.keys().isdisjoint(self._fragments[fragment_id]):
            self.replace(params, {fragment_id: leaves})

    def replace_local(self, params: Tree, leaves: Sequence[Leaf]) -> Tree:
        """Returns the tree with the leaves outside all fragments replaced."""
        return self._names.replace(params, dict(zip(self.local, leaves, strict=True)))

    def _read(self, params: Tree, names: Sequence[str]) -> list[Leaf]:
        """Returns leaves, or sections of them, by name."""
        if not self._rows:
            return self.of_names(params, names)
        here = [self._rows.get(name) for name in names]
        tensors = [name if place is None else place.tensor for name, place in zip(names, here, strict=True)]
        found = zip(self.of_names(params, tensors), here, strict=True)
        return [leaf if place is None else _rows(leaf).rows_of(leaf, place.start, place.stop) for leaf, place in found]

    def of_names(self, params: Tree, names: Sequence[str]) -> list[Leaf]:
        """Returns whole leaves by name."""
        found = self._found(params, names)
        if not self._in_place:  # those are asked for what they are now as they are read
            for name, leaf in zip(names, found, strict=True):
                self._check(name, leaf)
        return found

    def _found(self, params: Tree, names: Sequence[str]) -> list[Leaf]:
        if self._ways is not None:
            try:
                return [_follow(self._ways[name], params) for name in names]
            except (LookupError, AttributeError, TypeError):
                self.check(params)  # says what is missing
        leaves = self._names.leaves(params)
        return [leaves[name] for name in names]


def _rows(leaf: Leaf) -> ModuleType:
    """Returns the module for rows of such leaves."""
    if is_in_place(leaf):
        return in_place
    if not is_on_device(leaf):
        return placement
    from islands.arrays import jax_placement

    return jax_placement


#: From the root of a tree to a leaf: one item or attribute after the other.
Way = tuple[Callable[[Any], Any], ...]


def _follow(way: Way, node: Any) -> Any:
    for step in way:
        node = step(node)
    return node


def _ways_to(params: Tree, names: Sequence[str]) -> dict[str, Way] | None:
    """Returns name -> path of each leaf; None if a path does not lead back to its leaf.

    ``names`` are those of all leaves, in the order of the tree. Following ways takes a tenth of the time of flattening
    the tree.
    """
    jax = loaded_jax()
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
    """Returns the path to each leaf of nested plain containers, without JAX."""
    children = children_of(node)
    if children is None:
        yield way, node
        return
    get = operator.attrgetter if hasattr(node, "_fields") else operator.itemgetter
    for key, child in children:
        yield from _plain_ways(child, (*way, get(key)))


class Ties:
    """Checks in the first steps of a loop that tied leaves stay one array.

    The run has such leaves once (:class:`islands.arrays.tree.TreeNames`), and reads the first place. That is right for
    weights that a loop ties, and wrong where one array was used twice in making a tree, such as one of zeros for every
    bias: the first step makes two parameters of them, every version that is installed would overwrite what the second
    one has learnt, and nobody would be told. By identity alone the two cases cannot be told apart once a step is
    jitted: it returns an array for every place. So their bits are compared, until a step has moved them.

    Args:
        places: For each tied array, its two or more places, as numbers of leaves in the tree's order.

    Attributes:
        looks: How many further steps are to be looked at.
    """

    def __init__(self, places: Sequence[tuple[int, ...]]) -> None:
        self.looks = MOST_LOOKS if places else 0
        self._places = dict.fromkeys(places, 0)  # those that nothing has moved yet -> digest of their bits

    def begin(self, params: Tree) -> None:
        """Notes the tied leaves before training; waits for a device."""
        if self._places:
            leaves = [leaf for _, leaf in named_leaves(params)]
            self._places = {places: _digest(leaves[places[0]]) for places in self._places}

    def look(self, params: Tree) -> None:
        """Compares the tied leaves after a step; waits for a device.

        Raises:
            ConfigError: They are two parameters; names both.
        """
        self.looks -= 1
        leaves = list(named_leaves(params))
        for places, began in list(self._places.items()):
            name, first = leaves[places[0]]
            digest = _digest(first)
            for other, leaf in (leaves[place] for place in places[1:]):
                if leaf is not first and _digest(leaf) != digest:
                    cure = "they were one array when the island joined, and training makes them differ"
                    cure += ": give each an array of its own before the join, or tie them in the loss"
                    raise ConfigError("params", f"{name} and {other}", cure)
            if digest != began:
                del self._places[places]
        if not self._places:
            self.looks = 0


def _digest(leaf: Any) -> int:
    """Returns a digest of this host's bits of an array."""
    value = placement.here(leaf)
    digest = xxhash.xxh3_64()
    for part in value.parts.values() if isinstance(value, Spread) else [value]:
        digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.intdigest()
