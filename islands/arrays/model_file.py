"""Reads an exported model back into a tree: :func:`load`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from broker.base.errors import ConfigError
from broker.base.settings import expanded
from broker.process import logs
from broker.wire.fragments import Kind
from islands.arrays import placement
from islands.arrays.partition import tensor_specs
from islands.arrays.tree import Tree, map_leaves, named_leaves
from islands.interface import arguments

log = logs.get(__name__)

Array = npt.NDArray[Any]


def load(path: str | os.PathLike[str], like: Tree, *, kinds: Mapping[str, str] | None = None) -> Tree:
    """Returns the model in a safetensors file as a tree with the structure, dtypes and places of ``like``.

        params = islands.load("runs/demo/model.safetensors", like=params)

    What never leaves an island is in no file and stays what it is in ``like``: statistics of normalisation, integers,
    random keys, what ``kinds`` calls local, and leaves that are no arrays, such as the functions of an Equinox module.

    Args:
        path: What ``atoll export`` or ``atoll up`` wrote.
        like: The tree that was given to :func:`islands.join`, or one with the same names: arrays of numpy or JAX, or
            the shapes alone (``jax.eval_shape``).
        kinds: As given to :func:`islands.join`, where it calls something local.

    Raises:
        ConfigError: The file cannot be read, lacks a tensor, has one that is not in ``like``, or has one of another
            shape; names the tensor and the cure.
    """
    file = expanded("path", Path(path))
    return filled(like, read(file), kinds, source=str(file))


def read(path: Path) -> dict[str, Array]:
    """Returns the tensors of a safetensors file.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        found: dict[str, Array] = load_file(path)
    except (OSError, SafetensorError) as err:
        cure = f"cannot be read as safetensors ({err}): name a run's model.safetensors"
        raise ConfigError("model", str(path), cure) from err
    return found


def filled(
    like: Tree,
    arrays: Mapping[str, Array],
    kinds: Mapping[str, str] | None = None,
    *,
    source: str,
    cure: str = "load it into the tree that was given to islands.join",
) -> Tree:
    """Returns ``like`` with the values of ``arrays``; see :func:`load`.

    Raises:
        ConfigError: See there.
    """
    names, leaves = _named(like)
    local = {spec.name for spec in tensor_specs(leaves, kinds) if spec.kind is Kind.LOCAL}
    unknown, missing = sorted(arrays.keys() - leaves.keys()), [n for n in leaves if n not in arrays and n not in local]
    if unknown or missing:
        if not unknown:
            cure += '; what never was synchronised, name in kinds: {"REGEX": "local"}'
        raise ConfigError("model", source, f"lacks {missing[:3]} and has the unknown {unknown[:3]}: {cure}")
    placed = {}
    for name, array in arrays.items():
        leaf = leaves[name]
        if array.shape != tuple(leaf.shape):
            raise ConfigError(f"model {name}", array.shape, f"should have the shape {tuple(leaf.shape)}: {cure}")
        if not (arguments.is_real(leaf.dtype) and arguments.is_carried(leaf.dtype)):
            raise ConfigError(f"model {name}", str(leaf.dtype), f"is no dtype that {array.dtype} fits: {cure}")
        placed[name] = _placed(array, leaf)
    kept = [name for name in leaves if name not in placed]
    for name in kept:
        if not placement.is_array(leaves[name]):
            why = "is local and so in no file, and this tree has only its shape: give a tree with its values"
            raise ConfigError(f"model {name}", arguments.shown(leaves[name]), why)
    log.info("model.loaded", source=source, tensors=len(placed), kept=", ".join(kept) or "none")
    name_of_leaf = iter(names)
    return map_leaves(lambda leaf: placed.get(next(name_of_leaf), leaf), like)


def _named(like: Tree) -> tuple[list[str], dict[str, Any]]:
    """Returns a name for each leaf, and the arrays by name; one in two places has its first name.

    The name of what is no array is empty.
    """
    names: list[str] = []
    arrays: dict[str, Any] = {}
    first: dict[int, str] = {}
    for name, leaf in named_leaves(like):
        known = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        names.append(first.setdefault(id(leaf), name) if known else "")
        if known:
            arrays.setdefault(names[-1], leaf)
    return names, arrays


def _placed(array: Array, leaf: Any) -> Any:
    if placement.is_array(leaf):
        return placement.from_host(np.asarray(array), leaf)
    import jax  # only its trees have shapes without values

    sharding = getattr(leaf, "sharding", None)
    array = array.astype(leaf.dtype)
    return jax.device_put(array) if sharding is None else jax.device_put(array, sharding)
