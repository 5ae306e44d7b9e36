"""Tensors spread over the processes of a job: DTensor, as made by FSDP2 and tensor parallelism."""

from __future__ import annotations

import torch
import torch.distributed

from broker.wire.fragments import Region
from islands.arrays.in_place import Part

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor
else:  # a build of torch without it: no tensor is one
    DTensor = type("DTensor", (), {})


def is_spread(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is spread over processes."""
    return isinstance(tensor, DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's local shard, which shares its memory; a plain tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
        return local


def part_of_dtensor(tensor: torch.Tensor) -> Part | None:
    """Returns this process's part of a tensor; None for a plain one.

    If several processes have the same part, the first along each replicated dimension of the mesh owns it.
    """
    if not isinstance(tensor, DTensor):
        return None
    shape, local = tuple(tensor.shape), tuple(local_of(tensor).shape)
    chunks = tensor.__create_chunk_list__()  # as torch.distributed.checkpoint finds out where shards belong
    start = tuple(int(n) for n in chunks[0].offsets) if chunks and all(local) else (0,) * len(shape)
    coordinate = tensor.device_mesh.get_coordinate() or []
    replicated = [at for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()]
    return Part(shape, Region(start, local), owned=not any(replicated))


def spread_like(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns a local shard as part of a tensor that is spread like ``like``."""
    assert isinstance(like, DTensor)
    spread: torch.Tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return spread
