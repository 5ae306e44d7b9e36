"""Reads and writes torch distributed checkpoints as arrays by name, in one process.

The format of :mod:`torch.distributed.checkpoint`, which FSDP, torchtitan and Accelerate write.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from broker.base.errors import ConfigError, Unavailable
from islands.torch.conversion import Array, as_array, as_tensor


def read(folder: Path, field: str) -> dict[str, Array]:
    """Returns the tensors of a checkpoint, in memory; other values are left out.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        state: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with _alone():
            dcp.load(state, checkpoint_id=folder, no_dist=True)
    except (Exception, CheckpointException) as err:
        # The library raises what its reader, planner and pickle raise.
        raise ConfigError(field, str(folder), f"is no whole torch distributed checkpoint ({err!r})") from err
    return {name: as_array(tensor) for name, tensor in state.items()}


def write(tensors: Mapping[str, Array], folder: Path) -> None:
    """Writes arrays as a checkpoint.

    Raises:
        Unavailable: It cannot be written.
    """
    try:
        with _alone():
            dcp.save({name: as_tensor(array) for name, array in tensors.items()}, checkpoint_id=folder, no_dist=True)
    except (Exception, CheckpointException) as err:
        raise Unavailable(f"cannot write {folder}: {err}", definite=True) from err


@contextmanager
def _alone() -> Iterator[None]:
    """Silences the library's warning about a single process, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
