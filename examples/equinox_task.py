"""Bring your own model: an Equinox convolutional network that names the pitch of a noisy wave.

    python3 -m ops up --task examples.equinox_task:task --tokens 400000

What is special to Equinox is four lines: a module mixes arrays with functions and sizes, so :func:`equinox.partition`
splits it, the arrays are what is trained and synchronised, and the loss puts the two together again. The rest is a
loss, a data generator that asks its share for each batch, and one call of
:func:`islands.jax_task`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from broker.base.errors import ConfigError
from islands import DataShare, Schedule, Task, jax_task
from islands.tasks.task import Params

SAMPLES, PITCHES = 128, 12
#: Stream of random numbers of the held-out waves; batches use the numbers from 0 on.
HELD_OUT = 2**63
Waves = tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.int32]]]


class PitchNetwork(eqx.Module):
    """Two convolutions, a mean over time, one linear layer."""

    first: eqx.nn.Conv1d
    second: eqx.nn.Conv1d
    head: eqx.nn.Linear

    def __init__(self, channels: int, *, key: jax.Array) -> None:
        """Draws the weights."""
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Conv1d(1, channels, kernel_size=9, stride=2, padding=4, key=keys[0])
        self.second = eqx.nn.Conv1d(channels, channels, kernel_size=9, stride=2, padding=4, key=keys[1])
        self.head = eqx.nn.Linear(channels, PITCHES, key=keys[2])

    def __call__(self, wave: jax.Array) -> jax.Array:
        """Returns the logits (PITCHES,) of one wave (SAMPLES,)."""
        hidden = jax.nn.gelu(self.first(wave[None, :]))
        hidden = jax.nn.gelu(self.second(hidden))
        return self.head(jnp.mean(hidden, axis=1))


def task(*, batch: int = 32, channels: int = 32, learning_rate: float = 3e-3, noise: float = 1.5) -> Task:
    """Returns the task.

    Args:
        batch: Waves per inner step; one wave is one token.
        channels: Width of the network.
        learning_rate: Of Adam, after a short warm-up.
        noise: Standard deviation of the noise; the waves have an amplitude of 1.

    Raises:
        ConfigError: If an option is not positive.
    """
    for name, value in (("batch", batch), ("channels", channels), ("learning_rate", learning_rate)):
        if value <= 0:
            raise ConfigError(name, value, "must be positive")
    _, static = eqx.partition(PitchNetwork(channels, key=jax.random.key(0)), eqx.is_array)

    def init(key: jax.Array) -> Params:
        return eqx.filter(PitchNetwork(channels, key=key), eqx.is_array)

    def loss(params: Params, waves: Waves) -> jax.Array:
        network = eqx.combine(params, static)
        logits = jax.vmap(network)(waves[0])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, waves[1]))

    def data(share: DataShare) -> Iterator[Waves]:
        while True:
            index, count, cursor, seed = share.take()
            yield make_waves(cursor * count + index, batch, noise, seed=seed)

    def learning_rate_at(schedule: Schedule, num_steps: jax.Array) -> jax.Array:
        return learning_rate * jnp.minimum(1.0, (jnp.minimum(schedule.step, num_steps) + 1) / 20)

    held_out = make_waves(HELD_OUT, 1024, noise, seed=0)
    held_out_loss = jax.jit(loss)
    return jax_task(
        init=init,
        loss=loss,
        data=data,
        evaluate=lambda params: float(held_out_loss(params, held_out)),
        tokens_per_step=batch,
        optimizer=optax.scale_by_adam(),
        learning_rate=learning_rate_at,
        describe=f"{batch} tokens per step, vocabulary {PITCHES}",
    )


def make_waves(stream: int, how_many: int, noise: float, *, seed: int) -> Waves:
    """Returns waves (how_many, SAMPLES) and pitches (how_many,), purely from ``stream`` and ``seed``."""
    random = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, stream]))
    pitches = random.integers(0, PITCHES, how_many, dtype=np.int32)
    phases = random.uniform(0, 2 * np.pi, how_many)
    time = np.arange(SAMPLES) / SAMPLES
    waves = np.sin(2 * np.pi * (4 + 2 * pitches)[:, None] * time + phases[:, None])
    return (waves + noise * random.standard_normal(waves.shape)).astype(np.float32), pitches
