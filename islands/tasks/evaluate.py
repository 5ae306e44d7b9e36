"""Gives the tensors of a global model the structure of its task, so that they can be evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from broker.wire.errors import ConfigError
from broker.wire.fragments import Kind
from islands.arrays.partition import tensor_specs
from islands.arrays.tree import flatten, unflatten
from islands.tasks.task import Params, Task


def load_file_of(task: Task, path: Path) -> Params:
    """Returns the parameters in a safetensors file, in the task's structure and dtypes.

    Raises:
        ConfigError: If the file cannot be read or is of another model than the task's.
    """
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError) as err:
        cure = f"cannot be read as safetensors ({err}): name a run's model.safetensors"
        raise ConfigError("model", str(path), cure) from err
    return place(task, arrays, source=str(path))


def place(task: Task, arrays: Mapping[str, np.ndarray[Any, Any]], *, source: str) -> Params:
    """Returns parameters of the task's structure and dtypes with the values of ``arrays``.

    Tensors of kind ``local`` never leave an island, so they are in no file: those keep their initial values.

    Args:
        task: Decides structure, shapes and dtypes.
        arrays: Flat names -> values, of any floating-point dtype.
        source: Where they came from, for messages.

    Raises:
        ConfigError: If a tensor is missing, unknown or of another shape.
    """
    initial, _ = task.init(0)
    specs = {spec.name: spec for spec in tensor_specs(initial, task.kinds, task.unit_axes)}
    unknown = sorted(arrays.keys() - specs.keys())
    missing = sorted(n for n, spec in specs.items() if n not in arrays and spec.kind is not Kind.LOCAL)
    same_task = f"use the task and the options it was trained with ({task.describe})"
    if unknown or missing:
        raise ConfigError("model", source, f"lacks {missing[:3]} and has the unknown {unknown[:3]}: {same_task}")
    placed = dict(flatten(initial))
    for name, array in arrays.items():
        if array.shape != specs[name].shape:
            raise ConfigError(f"model {name}", array.shape, f"should have the shape {specs[name].shape}: {same_task}")
        placed[name] = array.astype(placed[name].dtype)
    return unflatten(initial, placed)
