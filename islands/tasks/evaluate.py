"""Puts the tensors of a global model into the structure of its task, for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from islands.tasks.model_file import filled
from islands.tasks.task import Params, Task
from islands.weights.files import open_weights


def load_file_of(task: Task, path: Path) -> Params:
    """Returns the parameters in a safetensors file, in the task's structure and dtypes.

    Raises:
        ConfigError: If the file cannot be read or is of another model than the task's.
    """
    return place(task, open_weights(path, field="model"), source=str(path))


def place(task: Task, arrays: Mapping[str, np.ndarray[Any, Any]], *, source: str) -> Params:
    """Returns the values of ``arrays`` in the task's structure and dtypes.

    Tensors of kind ``local`` never leave an island, so they are in no file: those keep their initial values.

    Args:
        task: Decides structure, shapes and dtypes.
        arrays: Flat names -> values, of any floating-point dtype.
        source: Where they came from, for messages.

    Raises:
        ConfigError: If a tensor is missing, unknown or of another shape.
    """
    initial, _ = task.init(0)
    cure = f"use the task and the options it was trained with ({task.describe})"
    return filled(initial, arrays, task.kinds, source=source, cure=cure)
