"""Reads a trained model into a parameter tree: :func:`load`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.base.errors import ConfigError
from broker.base.settings import expanded
from broker.process import logs
from broker.wire.fragments import Kind
from islands.arrays import placement
from islands.arrays.partition import tensor_specs
from islands.arrays.tree import Tree, map_leaves, named_leaves
from islands.interface import arguments
from islands.weights.files import Weights, open_weights
from islands.weights.fitting import fit

log = logs.get(__name__)

Array = npt.NDArray[Any]


def load(
    path: str | os.PathLike[str],
    like: Tree,
    *,
    kinds: Mapping[str, str] | None = None,
    names: Callable[[str], str] | None = None,
    partial: bool = False,
) -> Tree:
    """Returns a trained model as a tree with the structure, dtypes and devices of ``like``.

        params = islands.load("runs/demo/model.safetensors", like=params)

    What never leaves an island is in no export and stays what it is in ``like`` where the file lacks it: statistics of
    normalisation, integers, random keys, what ``kinds`` calls local, and leaves that are no arrays, such as the
    functions of an Equinox module.

    Args:
        path: What ``atoll export`` or ``atoll up`` wrote, or another model (:mod:`islands.weights.files`):
            a directory of Hugging Face with its shards, an Orbax or a torch distributed checkpoint.
        like: The tree that was given to :func:`islands.join`, or one with the same names: arrays of numpy or JAX, or
            the shapes alone (``jax.eval_shape``).
        kinds: As given to :func:`islands.join`, where it calls something local.
        names: Name in the tree, such as ``layers/0/kernel`` -> name in the file. Without it names must be the same, but
            for dots in place of slashes, and for one part in front of them all, such as ``params``.
        partial: Take the tensors that fit, and log the others; else all must fit.

    Raises:
        ConfigError: The file cannot be read, lacks a tensor, has one that is not in ``like``, or has one of another
            shape; names the tensors and the cure.
    """
    weights = open_weights(expanded("path", Path(path)), field="model")
    return filled(like, weights, kinds, source=str(weights.path), names=names, partial=partial)


def filled(
    like: Tree,
    arrays: Mapping[str, Array],
    kinds: Mapping[str, str] | None = None,
    *,
    source: str,
    cure: str = "load it into the tree that was given to islands.join",
    names: Callable[[str], str] | None = None,
    partial: bool = False,
    field: str = "model",
) -> Tree:
    """Returns ``like`` with the values of ``arrays``; see :func:`load`.

    Raises:
        ConfigError: See there.
    """
    paths, leaves, aliases = _named(like)
    local = {spec.name for spec in tensor_specs(leaves, kinds) if spec.kind is Kind.LOCAL}
    wanted = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
    has = {name: _shape(arrays, name) for name in arrays}
    fits = fit(wanted, has, names=names, optional=local, aliases=aliases)
    if not (fits.whole or partial):
        if fits.missing and not fits.unexpected:
            cure += '; what never was synchronised, name in kinds: {"REGEX": "local"}'
        raise ConfigError(field, source, f"does not fit: {fits}: {cure}")
    placed = {}
    for name, theirs in fits.found.items():
        leaf = leaves[name]
        if not (arguments.is_real(leaf.dtype) and arguments.is_carried(leaf.dtype)):
            raise ConfigError(
                f"{field} {name}", str(leaf.dtype), f"is no dtype that {arrays[theirs].dtype} fits: {cure}"
            )
        placed[name] = _placed(arrays[theirs], leaf)
    kept = [name for name in leaves if name not in placed]
    for name in kept:
        if not placement.is_array(leaves[name]):
            why = "is local and so in no file, and this tree has only its shape: give a tree with its values"
            raise ConfigError(f"{field} {name}", arguments.shown(leaves[name]), why)
    if not fits.whole:
        log.warning("model.partial", source=source, detail=f"the rest keeps its values: {fits}")
    log.info("model.loaded", source=source, tensors=len(placed), kept=", ".join(kept) or "none")
    path_of_leaf = iter(paths)
    return map_leaves(lambda leaf: placed.get(next(path_of_leaf), leaf), like)


def _shape(arrays: Mapping[str, Array], name: str) -> tuple[int, ...]:
    return arrays.shape(name) if isinstance(arrays, Weights) else arrays[name].shape


def _named(like: Tree) -> tuple[list[str], dict[str, Any], dict[str, list[str]]]:
    """Returns each leaf's name, arrays by name, and further names of the same arrays.

    A leaf that is no array has an empty name.
    """
    names: list[str] = []
    arrays: dict[str, Any] = {}
    first: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, leaf in named_leaves(like):
        known = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        names.append(first.setdefault(id(leaf), name) if known else "")
        if known:
            arrays.setdefault(names[-1], leaf)
            if names[-1] != name:
                aliases.setdefault(names[-1], []).append(name)
    return names, arrays, aliases


def _placed(array: Array, leaf: Any) -> Any:
    if placement.is_array(leaf):
        return placement.from_host(np.asarray(array), leaf)
    import jax  # only its trees have shapes without values

    sharding = getattr(leaf, "sharding", None)
    array = array.astype(leaf.dtype)
    return jax.device_put(array) if sharding is None else jax.device_put(array, sharding)
