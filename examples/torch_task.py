"""Bring your own task, in PyTorch: a small classifier of points.

    .venv-torch/bin/python -m ops up --task examples.torch_task:task --islands 2

The problem is made up as it goes, as in ``examples/numpy_task.py``: points in 32 dimensions, labelled by a fixed random
network that the task has to find again from examples.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

import islands.torch
from broker.base.errors import ConfigError
from islands import DataShare, Schedule, Task

INPUTS, CLASSES = 32, 16
#: Stream of random numbers of the held-out examples; batches use the numbers from 0 on.
HELD_OUT = 2**63
Examples = tuple[torch.Tensor, torch.Tensor]


def task(*, batch: int = 64, hidden: int = 64, learning_rate: float = 3e-3) -> Task:
    """Returns the task: a network of one hidden layer, trained by AdamW.

    Args:
        batch: Examples per inner step; one example is one token.
        hidden: Units of the hidden layer.
        learning_rate: Of the inner optimizer, at its highest.

    Raises:
        ConfigError: If an option is not positive.
    """
    for name, value in (("batch", batch), ("hidden", hidden), ("learning_rate", learning_rate)):
        if value <= 0:
            raise ConfigError(name, value, "must be positive")
    teacher = np.random.default_rng(1).standard_normal((INPUTS, CLASSES)).astype(np.float32)

    def examples(stream: int, how_many: int) -> Examples:
        random = np.random.Generator(np.random.Philox(key=1, counter=[0, 0, 0, stream]))
        inputs = random.standard_normal((how_many, INPUTS), dtype=np.float32)
        return torch.from_numpy(inputs), torch.from_numpy(np.argmax(np.tanh(inputs @ teacher / 3), axis=1))

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, CLASSES))

    def loss(module: nn.Module, batch: Examples) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(module(inputs), labels)

    def data(share: DataShare) -> Iterator[Examples]:
        while True:
            index, count, cursor, _ = share.take()
            yield examples(cursor * count + index, batch)

    def evaluate(module: nn.Module) -> float:
        inputs, labels = examples(HELD_OUT, 4096)
        device = next(module.parameters()).device
        return float(loss(module, (inputs.to(device), labels.to(device))))

    def rate(schedule: Schedule) -> float:
        left = max(0.0, 1 - schedule.step / schedule.total_steps) if schedule.total_steps else 1.0
        return learning_rate * (0.1 + 0.9 * left)

    return islands.torch.task(
        model=model,
        loss=loss,
        optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=learning_rate),
        data=data,
        evaluate=evaluate,
        tokens_per_step=batch,
        learning_rate=rate,
    )
