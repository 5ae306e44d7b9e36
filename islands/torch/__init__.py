"""PyTorch: :func:`join` takes module and optimizer into a run, :func:`task` makes a task. Not pure.

    import islands.torch

Needs PyTorch. Of all packages only this one imports torch.
"""

from __future__ import annotations

from islands.interface.installation import explained

try:
    import torch as _torch
except ModuleNotFoundError as err:
    from broker.process.release import install

    raise ModuleNotFoundError(f"islands.torch needs PyTorch: {install('torch')}", name=err.name) from err

with explained():
    from islands.torch.island import TorchIsland
    from islands.torch.joining import join
    from islands.torch.tasks import task

del _torch

__all__ = ["TorchIsland", "join", "task"]
