"""Parameter trees as named arrays, and back.

A leaf's name is its path, joined by "/": ``layers/0/attention/query``. Dicts, lists, tuples and named tuples are
walked here, without JAX. Once JAX is loaded its own registry is asked, so that any registered node works (an
Equinox module, a Flax dataclass); for the plain containers both give the same names in the same order, so islands of
either sort agree on a manifest.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from broker.base.errors import ConfigError

#: The cure for a torch tensor or a module among the parameters.
TORCH = "PyTorch joins with islands.torch.join(address, model, optimizer)"
#: The cure for a torch tensor beside arrays.
MIXED = f"a tree has arrays of numpy and JAX, or tensors of torch, not both: {TORCH}, or give tensor.detach().numpy()"
#: Any nest of containers with arrays as leaves; None is an empty container.
Tree = Any


def loaded_jax() -> Any:
    """Returns the module jax if the program has imported it; None also while another thread imports it."""
    jax = sys.modules.get("jax")
    return None if jax is None or getattr(jax.__spec__, "_initializing", False) else jax


class TreeNames:
    """The names of a tree's leaves, taken once, to read and rebuild trees of the same structure.

    One array in two places (tied weights) has one name, that of the first; rebuilding puts the same new
    array in both. Which leaves are tied is settled by identity in the tree given here;
    :class:`islands.arrays.parameters.Ties` finds out whether they are.
    """

    __slots__ = ("_paths", "_places", "name_of_leaf", "names")

    def __init__(self, tree: Tree) -> None:
        """Names the leaves of ``tree``.

        Raises:
            ConfigError: If a leaf is no array, or two leaves get the same name.
        """
        seen: dict[int, str] = {}
        self._paths: dict[str, None] = {}
        #: The names of all leaves, in the order of the tree.
        self.name_of_leaf: list[str] = []
        for name, leaf in named_leaves(tree):
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise ConfigError(f"params {name}".rstrip(), type(leaf).__name__, no_array(leaf))
            if name in self._paths:
                cure = 'two leaves have this path; a key holds a "/", or 1 and "1" are both keys: rename one'
                raise ConfigError("params", name, cure)
            self._paths[name] = None
            # A scalar of numpy is a value: two are not tied for being one object, as all that are True are.
            self.name_of_leaf.append(name if isinstance(leaf, np.generic) else seen.setdefault(id(leaf), name))
        #: Each distinct leaf once, in the order of the tree.
        self.names = tuple(dict.fromkeys(self.name_of_leaf))
        self._places: dict[str, list[int]] = {}
        for place, name in enumerate(self.name_of_leaf):
            self._places.setdefault(name, []).append(place)

    @property
    def tied(self) -> tuple[tuple[int, ...], ...]:
        """For each array with several places in the tree: the places, as numbers of leaves."""
        return tuple(tuple(each) for each in self._places.values() if len(each) > 1)

    def leaves(self, tree: Tree) -> dict[str, Any]:
        """Returns the leaves of a tree of this structure by name, in the order of ``names``.

        Raises:
            ConfigError: If the tree has other leaves, more or fewer.
        """
        found: dict[str, Any] = {}
        leaves = list(named_leaves(tree))
        here = [name for name, _ in leaves]
        if here != list(self._paths):
            missing = [name for name in self._paths if name not in here]
            further = [name for name in here if name not in self._paths]
            flaws = [f"without {missing[0]}"] if missing else []
            flaws += [f"with {further[0]}"] if further else []
            cure = f"the island joined with {len(self._paths)} leaves; the structure must stay the same"
            raise ConfigError("params", f"{len(here)} leaves, {' and '.join(flaws) or 'in another order'}", cure)
        for name, (_, leaf) in zip(self.name_of_leaf, leaves, strict=True):
            found.setdefault(name, leaf)
        return found

    def replace(self, tree: Tree, leaves: Mapping[str, Any]) -> Tree:
        """Returns ``tree`` with the named leaves replaced; other leaves and container types stay.

        Raises:
            KeyError: If a name is not of this tree.
        """
        jax = loaded_jax()
        structure, flat = None, []
        if jax is None:
            flat = [leaf for _, leaf in named_leaves(tree)]
        else:
            flat, structure = jax.tree_util.tree_flatten(tree)
        for name, leaf in leaves.items():
            if name not in self._places:
                raise KeyError(f"no parameter is named {name}")
            for place in self._places[name]:
                flat[place] = leaf
        if structure is not None:
            return structure.unflatten(flat)
        following = iter(flat)
        return map_leaves(lambda _: next(following), tree)


def flatten(tree: Tree) -> dict[str, Any]:
    """Returns the leaves by name; a leaf with two places in the tree once.

    Raises:
        ConfigError: See :class:`TreeNames`.
    """
    return TreeNames(tree).leaves(tree)


def unflatten(like: Tree, leaves: Mapping[str, Any]) -> Tree:
    """Returns a tree with the structure of ``like`` and all its leaves from ``leaves``.

    Raises:
        KeyError: If a leaf is missing, or one is not of this tree.
    """
    names = TreeNames(like)
    missing = set(names.names) - leaves.keys()
    if missing:
        raise KeyError(f"no value is given for {', '.join(sorted(missing))}")
    return names.replace(like, leaves)


def named_leaves(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yields (name, leaf) in the order of JAX: keys of plain dicts sorted, everything else as given.

    Raises:
        ConfigError: If the keys of a dict have no order.
    """
    jax = loaded_jax()
    if jax is None:
        yield from _plain_leaves(tree, ())
        return
    try:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
    except ValueError as err:
        if "sorting pytree dictionary keys" not in str(err):
            raise
        raise _unordered(()) from err
    for path, leaf in leaves:
        yield "/".join(_key_name(key) for key in path), leaf


def _unordered(path: tuple[str, ...]) -> ConfigError:
    cure = "the keys of one dict must have an order: make all of them texts"
    return ConfigError(f"tree {'/'.join(path)}".rstrip(), "a dict with keys of several sorts", cure)


def is_of_torch(leaf: Any) -> bool:
    """Returns whether a leaf is an object of torch, such as a tensor, or a module; does not import torch."""
    return type(leaf).__module__.partition(".")[0] == "torch" or hasattr(leaf, "named_parameters")


def no_array(leaf: Any) -> str:
    """Returns the cure for a parameter that is not a numpy or JAX array."""
    if is_of_torch(leaf):
        cure = TORCH
    elif isinstance(leaf, np.ndarray):
        cure = "of a subclass, what it adds would be lost: give np.asarray(x)"
    elif isinstance(leaf, bool | int | float):
        cure = "make a number that is trained one (np.float32(x)), or leave it out"
    elif callable(leaf) or isinstance(leaf, str | bytes):
        cure = "leave it out (Equinox: eqx.filter(model, eqx.is_array))"
    else:
        cure = (
            "convert it, leave it out, or tell JAX of its class if it holds arrays (jax.tree_util.register_dataclass)"
        )
    return f"every leaf is an array of numpy or JAX: {cure}"


def form_of(tree: Tree) -> Any:
    """Returns a tree's structure as a comparable value, in microseconds.

    None: it has no form, and :func:`named_leaves` says why.
    """
    jax = loaded_jax()
    try:
        return _plain_form(tree) if jax is None else jax.tree_util.tree_structure(tree)
    except (TypeError, ValueError):
        return None


def _plain_form(node: Any) -> Any:
    children = children_of(node)
    return "leaf" if children is None else (type(node), [(key, _plain_form(child)) for key, child in children])


def map_leaves(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """Rebuilds ``tree`` with ``function`` applied to the leaves, in the order of :func:`named_leaves`."""
    jax = loaded_jax()
    return _plain_map(function, tree) if jax is None else jax.tree_util.tree_map(function, tree)


def _key_name(key: Any) -> str:
    """Returns the bare name of a step of a JAX key path: its ``.name``, ``.key`` or ``.idx``."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def children_of(node: Any) -> list[tuple[Any, Any]] | None:
    """Returns (key, child) pairs of a plain container, in order; None for a leaf."""
    if node is None:
        return []
    # Exact types, as in JAX, where a subclass that nobody registered is a leaf.
    if type(node) in (dict, defaultdict):
        return sorted(node.items(), key=lambda item: item[0])
    if type(node) is OrderedDict:
        return list(node.items())
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if type(node) in (list, tuple):
        return list(enumerate(node))
    return None


def _plain_leaves(node: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    try:
        children = children_of(node)
    except TypeError as err:
        raise _unordered(path) from err
    if children is None:
        yield "/".join(path), node
        return
    for key, child in children:
        yield from _plain_leaves(child, (*path, str(key)))


def _plain_map(function: Callable[[Any], Any], node: Any) -> Any:
    children = children_of(node)
    if children is None:
        return function(node)
    if node is None:
        return None
    values = [(key, _plain_map(function, child)) for key, child in children]
    if isinstance(node, dict):
        rebuilt = copy.copy(node)  # keeps the order of the keys, and a defaultdict's factory
        rebuilt.update(values)
        return rebuilt
    fields = [value for _, value in values]
    return type(node)(*fields) if hasattr(node, "_fields") else type(node)(fields)


def devices_of(tree: Tree) -> str:
    """Returns the devices of the leaves as text, such as ``gpu:0, gpu:1``; ``host`` for numpy arrays."""
    found = {each for _, leaf in named_leaves(tree) if hasattr(leaf, "devices") for each in leaf.devices()}
    ordered = sorted(found, key=lambda device: (device.platform, device.id))
    return ", ".join(f"{device.platform}:{device.id}" for device in ordered) or "host"
