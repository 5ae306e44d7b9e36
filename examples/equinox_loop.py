"""Bring your own loop, with Equinox: the four lines marked ``# atoll`` are what a user adds.

    .venv/bin/python -m examples.equinox_loop                        # a hub and one island
    .venv/bin/python -m examples.equinox_loop tcp://127.0.0.1:7001   # another island, or any run that is there

A module mixes arrays with functions. :func:`equinox.partition` splits it once; the arrays are what is trained and
merged, and the step puts the two together again. The network and its data are those of :mod:`examples.equinox_task`.
"""

from __future__ import annotations

import logging
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
_, static = eqx.partition(PitchNetwork(32, key=jax.random.key(0)), eqx.is_array)


def loss(params: Any, batch: Any) -> jax.Array:
    """Returns the mean loss in nats of a batch of waves and their pitches."""
    logits = jax.vmap(eqx.combine(params, static))(batch[0])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]))


@partial(jax.jit, donate_argnums=(0, 1))
def train(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
    """One step of Adam."""
    value, gradients = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state)
    return optax.apply_updates(params, updates), opt_state, value


def main(address: str) -> None:
    """Trains until the run ends."""
    waves = list(zip(*make_waves(0, EXAMPLES, noise=1.0, seed=0), strict=True))
    held_out = make_waves(1, 512, noise=1.0, seed=0)
    params, _ = eqx.partition(PitchNetwork(32, key=jax.random.key(1)), eqx.is_array)
    opt_state = optimizer.init(params)
    before = float(loss(params, held_out))

    island, params, opt_state = islands.begin(address, params, opt_state, tokens_per_step=BATCH)  # atoll
    for batch in islands.batches(waves, island, batch=BATCH):  # atoll: in place of its own data
        params, opt_state, value = train(params, opt_state, batch)
        params = island.step(params, opt_state, loss=value)  # atoll
    params = island.close(params)  # atoll
    print(f"loss on held-out waves: {before:.3f} before, {float(loss(params, held_out)):.3f} after")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with local_hub.at(local_hub.parser(__doc__).parse_args().address, tokens=120 * BATCH) as found:
        main(found)
