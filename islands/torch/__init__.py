"""PyTorch: :func:`join` takes module and optimizer into a run, :func:`task` makes a task. Not pure.

    import islands.torch

Needs the extra ``atoll[torch]``. Of all packages only this one imports torch.
"""

from __future__ import annotations

try:
    import torch as _torch
except ModuleNotFoundError as err:
    raise ModuleNotFoundError("islands.torch needs PyTorch: pip install 'atoll[torch]'", name=err.name) from err

from islands.torch.island import TorchIsland
from islands.torch.joining import join
from islands.torch.tasks import task

del _torch

__all__ = ["TorchIsland", "join", "task"]
