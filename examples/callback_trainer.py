"""Bring your own trainer with callbacks: the lines marked ``# atoll`` are what a user adds.

    .venv/bin/python -m examples.callback_trainer                        # a hub and one island
    .venv/bin/python -m examples.callback_trainer tcp://127.0.0.1:7001   # another island, or any run that is there

The trainer owns the loop and calls functions when training begins, after each step and when it ends. The three of
:class:`islands.Hook` are given to it as they are. Network and data are those of :mod:`examples.equinox_task`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import islands  # atoll
from examples import local_hub
from examples.equinox_task import PitchNetwork, make_waves

BATCH, EXAMPLES = 32, 2048
optimizer = optax.adam(3e-3)


@dataclass
class Trainer:
    """Somebody's trainer: it knows nothing of islands."""

    network: PitchNetwork
    data: Callable[[], Iterable[Any]]
    on_begin: Callable[..., tuple[Any, Any]] = lambda params, opt_state: (params, opt_state)
    on_step: Callable[..., tuple[Any, Any]] = lambda params, opt_state, loss: (params, opt_state)
    on_end: Callable[[Any], Any] = lambda params: params

    def fit(self) -> PitchNetwork:
        """Trains on all data; returns the trained network."""
        params, static = eqx.partition(self.network, eqx.is_array)
        params, opt_state = self.on_begin(params, optimizer.init(params))
        for batch in self.data():
            params, opt_state, value = train(params, opt_state, batch, static)
            params, opt_state = self.on_step(params, opt_state, loss=value)
        network: PitchNetwork = eqx.combine(self.on_end(params), static)
        return network


def loss(network: PitchNetwork, batch: Any) -> jax.Array:
    """Returns the mean loss in nats of a batch of waves and their pitches."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jax.vmap(network)(batch[0]), batch[1]))


@partial(jax.jit, donate_argnums=(0, 1), static_argnums=3)
def train(params: Any, opt_state: Any, batch: Any, static: Any) -> tuple[Any, Any, jax.Array]:
    """One step of Adam."""
    value, gradients = jax.value_and_grad(lambda arrays: loss(eqx.combine(arrays, static), batch))(params)
    updates, opt_state = optimizer.update(gradients, opt_state)
    return optax.apply_updates(params, updates), opt_state, value


def main(address: str) -> None:
    """Trains until the run ends."""
    waves = list(zip(*make_waves(0, EXAMPLES, noise=1.0, seed=0), strict=True))
    held_out = make_waves(1, 512, noise=1.0, seed=0)
    network = PitchNetwork(32, key=jax.random.key(0))
    before = float(loss(network, held_out))

    with islands.Hook(address, tokens_per_step=BATCH) as hook:  # atoll
        trainer = Trainer(
            network,
            data=lambda: islands.batches(waves, hook.island, batch=BATCH),  # atoll: in place of its own data
            on_begin=hook.start,  # atoll
            on_step=hook.step,  # atoll
            on_end=hook.finish,  # atoll
        )
        network = trainer.fit()
    print(f"loss on held-out waves: {before:.3f} before, {float(loss(network, held_out)):.3f} after")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with local_hub.at(local_hub.parser(__doc__).parse_args().address, tokens=120 * BATCH) as found:
        main(found)
