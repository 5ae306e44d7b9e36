"""Bring your own task, without JAX: a small classifier in plain numpy.

    python3 -m ops up --task examples.numpy_task:task --islands 32

A step takes about 0.13 ms and a process some 60 MB, so a laptop holds a large fleet: most of Atoll's
own tests of many islands run this. The problem is made up as it goes: points in 32 dimensions, labelled by a fixed
random network ("teacher") that the task has to find again from examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.base.errors import ConfigError
from islands import DataShare, Schedule, Task

Array = npt.NDArray[np.float32]
Params = dict[str, dict[str, Array]]

INPUTS, CLASSES = 32, 16
#: Stream of random numbers of the held-out examples; batches use the numbers from 0 on.
HELD_OUT = 2**63


def task(*, batch: int = 64, hidden: int = 64, learning_rate: float = 0.1, problem: int = 0) -> Task:
    """Returns the task: a network of one hidden layer, trained by gradient descent with momentum.

    Args:
        batch: Examples per inner step; one example is one token.
        hidden: Units of the hidden layer.
        learning_rate: Of the inner optimizer, at its highest.
        problem: Which teacher; the same on all islands.

    Raises:
        ConfigError: If an option is not positive.
    """
    for name, value in (("batch", batch), ("hidden", hidden), ("learning_rate", learning_rate)):
        if value <= 0:
            raise ConfigError(name, value, "must be positive")
    # A stream of its own: a student whose seed is the problem's number must not begin with its teacher's weights.
    teacher = _network(np.random.default_rng(np.random.SeedSequence(problem, spawn_key=(1,))), hidden=32, gain=3.0)

    def examples(stream: int, how_many: int) -> tuple[Array, npt.NDArray[np.int64]]:
        random = np.random.Generator(np.random.Philox(key=problem + 1, counter=[0, 0, 0, stream]))
        inputs = random.standard_normal((how_many, INPUTS), dtype=np.float32)
        return inputs, np.argmax(_forward(teacher, inputs)[1], axis=1)

    def init(seed: int) -> tuple[Params, Params]:
        params = _network(np.random.default_rng(seed), hidden=hidden, gain=1.0)
        return params, fresh_optimizer(params)

    def fresh_optimizer(params: Params) -> Params:
        return {layer: {name: np.zeros_like(x) for name, x in tensors.items()} for layer, tensors in params.items()}

    def train(
        params: Params, velocity: Params, batch: tuple[Array, npt.NDArray[np.int64]], schedule: Schedule
    ) -> tuple[Params, Params, float]:
        loss, gradients = _loss_and_gradients(params, *batch)
        left = max(0.0, 1 - schedule.step / schedule.total_steps) if schedule.total_steps else 1.0
        rate = np.float32(learning_rate * (0.1 + 0.9 * left))
        new_params: Params = {}
        new_velocity: Params = {}
        for layer, tensors in params.items():
            new_velocity[layer] = {n: np.float32(0.9) * velocity[layer][n] + gradients[layer][n] for n in tensors}
            new_params[layer] = {n: x - rate * new_velocity[layer][n] for n, x in tensors.items()}
        return new_params, new_velocity, loss

    def data(share: DataShare) -> Iterator[tuple[Array, npt.NDArray[np.int64]]]:
        while True:
            index, count, cursor, _ = share.take()
            yield examples(cursor * count + index, batch)

    def evaluate(params: Params) -> float:
        return _loss_and_gradients(params, *examples(HELD_OUT, 4096))[0]

    num_parameters = sum(x.size for tensors in init(0)[0].values() for x in tensors.values())
    return Task(
        init=init,
        train=train,
        data=data,
        evaluate=evaluate,
        tokens_per_step=batch,
        fresh_optimizer=fresh_optimizer,
        kinds={"^output/weight$": "mean"},
        describe=f"{num_parameters:,} parameters, {batch} tokens per step, vocabulary {CLASSES}",
    )


def _network(random: np.random.Generator, *, hidden: int, gain: float) -> Params:
    """Random weights of variance gain^2 / fan-in, biases of 0."""

    def layer(fan_in: int, fan_out: int) -> dict[str, Array]:
        weight = gain / np.sqrt(fan_in) * random.standard_normal((fan_in, fan_out), dtype=np.float32)
        return {"weight": weight.astype(np.float32), "bias": np.zeros(fan_out, np.float32)}

    return {"hidden": layer(INPUTS, hidden), "output": layer(hidden, CLASSES)}


def _forward(params: Params, inputs: Array) -> tuple[Array, Array]:
    """Returns the hidden activations (batch, hidden) and the logits (batch, CLASSES)."""
    hidden = np.tanh(inputs @ params["hidden"]["weight"] + params["hidden"]["bias"])
    return hidden, hidden @ params["output"]["weight"] + params["output"]["bias"]


def _loss_and_gradients(params: Params, inputs: Array, labels: npt.NDArray[np.int64]) -> tuple[float, Params]:
    """Mean cross-entropy in nats, and its gradient by hand: d logits = softmax - one hot."""
    hidden, logits = _forward(params, inputs)
    logits = logits - logits.max(axis=1, keepdims=True)
    log_probability = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    loss = -float(log_probability[rows, labels].mean())
    d_logits = np.exp(log_probability)
    d_logits[rows, labels] -= 1
    d_logits /= len(labels)
    d_hidden = (d_logits @ params["output"]["weight"].T) * (1 - hidden * hidden)

    def gradient(activations: Array, d_outputs: Array) -> dict[str, Any]:
        return {"weight": activations.T @ d_outputs, "bias": d_outputs.sum(axis=0)}

    return loss, {"hidden": gradient(inputs, d_hidden), "output": gradient(hidden, d_logits)}
