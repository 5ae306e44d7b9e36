"""Bring your own loop, with Flax NNX: the lines marked ``# atoll`` are what a user adds.

    .venv/bin/python -m examples.flax_nnx                        # a hub and one island
    .venv/bin/python -m examples.flax_nnx tcp://127.0.0.1:7001   # another island, or any run that is there

:func:`flax.nnx.state` sorts what the module and its optimizer hold. ``nnx.Param`` is what the run merges. All else is
the state of this island, which its checkpoint brings back: Adam's moments, BatchNorm's statistics, Dropout's random
key and count. The train step changes the module in place, as those of NNX do.
"""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import islands  # atoll
from examples import local_hub
from examples.equinox_task import PITCHES, make_waves

BATCH, EXAMPLES = 32, 2048


class PitchNetwork(nnx.Module):
    """Two convolutions with BatchNorm, a mean over time, Dropout, one linear layer."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs) -> None:
        """Draws the weights."""
        self.first = nnx.Conv(1, channels, kernel_size=(9,), strides=2, use_bias=False, rngs=rngs)
        self.first_norm = nnx.BatchNorm(channels, momentum=0.9, rngs=rngs)
        self.second = nnx.Conv(channels, channels, kernel_size=(9,), strides=2, use_bias=False, rngs=rngs)
        self.second_norm = nnx.BatchNorm(channels, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(channels, PITCHES, rngs=rngs)

    def __call__(self, waves: jax.Array) -> jax.Array:
        """Returns the logits (batch, PITCHES) of waves (batch, SAMPLES)."""
        hidden = nnx.gelu(self.first_norm(self.first(waves[..., None])))
        hidden = nnx.gelu(self.second_norm(self.second(hidden)))
        logits: jax.Array = self.head(self.dropout(jnp.mean(hidden, axis=1)))
        return logits


def loss(model: PitchNetwork, batch: Any) -> jax.Array:
    """Returns the mean loss in nats of a batch of waves and their pitches."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(batch[0]), batch[1]))


@nnx.jit(donate_argnums=(0, 1))
def train(model: PitchNetwork, optimizer: nnx.Optimizer[Any], batch: Any) -> jax.Array:
    """One step of Adam, in place."""
    value: jax.Array
    value, gradients = nnx.value_and_grad(loss)(model, batch)
    optimizer.update(model, gradients)
    return value


def held_out_loss(model: PitchNetwork, batch: Any) -> float:
    """Returns the loss as after training: without Dropout, by the running statistics of BatchNorm."""
    model.eval()  # type: ignore[no-untyped-call]
    value = float(loss(model, batch))
    model.train()  # type: ignore[no-untyped-call]
    return value


def main(address: str) -> None:
    """Trains until the run ends."""
    waves = list(zip(*make_waves(0, EXAMPLES, noise=1.0, seed=0), strict=True))
    held_out = make_waves(1, 512, noise=1.0, seed=0)
    model = PitchNetwork(32, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    both = (model, optimizer)
    before = held_out_loss(model, held_out)

    with islands.Hook(address, tokens_per_step=BATCH) as hook:  # atoll
        nnx.update(both, *hook.start(*nnx.state(both, nnx.Param, ...)))  # atoll
        for batch in islands.batches(waves, hook.island, batch=BATCH):  # atoll: in place of its own data
            value = train(model, optimizer, batch)
            nnx.update(both, *hook.step(*nnx.state(both, nnx.Param, ...), loss=value))  # atoll
        nnx.update(both, hook.finish())  # atoll
    print(f"loss on held-out waves: {before:.3f} before, {held_out_loss(model, held_out):.3f} after")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with local_hub.at(local_hub.parser(__doc__).parse_args().address, tokens=120 * BATCH) as found:
        main(found)
