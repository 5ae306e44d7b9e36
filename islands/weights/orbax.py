"""Reads an Orbax checkpoint as tensors by name, and writes one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.base.errors import ConfigError, Unavailable
from broker.process.release import install

Array = npt.NDArray[Any]


def read(folder: Path, field: str) -> dict[str, Array]:
    """Returns the arrays of a checkpoint by name: the keys of the path, joined by dots.

    They are in memory.

    Raises:
        ConfigError: Orbax is not installed, or cannot read it.
    """
    tree = _checkpointer(field, folder).restore(folder.absolute())
    found: dict[str, Array] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, Mapping):
            for key, value in node.items():
                walk(value, (*path, str(key)))
        elif isinstance(node, list | tuple):
            for number, value in enumerate(node):
                walk(value, (*path, str(number)))
        elif hasattr(node, "dtype"):
            found[".".join(path)] = np.asarray(node)

    walk(tree, ())
    return found


def write(tensors: Mapping[str, Array], folder: Path) -> None:
    """Writes tensors as a checkpoint of one flat mapping; the folder must not exist yet.

    Raises:
        ConfigError: Orbax is not installed.
        Unavailable: It cannot be written.
    """
    checkpointer = _checkpointer("orbax", folder)
    try:
        checkpointer.save(folder.absolute(), dict(tensors))
    except (OSError, ValueError) as err:
        raise Unavailable(f"cannot write {folder}: {err}", definite=True) from err


def _checkpointer(field: str, folder: Path) -> Any:
    try:
        import orbax.checkpoint as ocp
    except ModuleNotFoundError as err:
        raise ConfigError(
            field, str(folder), f"is for Orbax, which is not installed: {install('orbax-checkpoint')}"
        ) from err
    return ocp.PyTreeCheckpointer()
