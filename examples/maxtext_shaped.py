"""Bring your own loop, like MaxText's: ``state, metrics = train_step(state, batch)``, a sharded state.

    .venv/bin/python -m examples.maxtext_shaped                        # a hub and one island
    .venv/bin/python -m examples.maxtext_shaped tcp://127.0.0.1:7001   # another island, or any run that is there

The lines marked ``# atoll`` are what a user adds. The state is one tree, laid over the local devices by
``NamedSharding``: matrices are cut along their last axis, as are Adam's moments of them, and batches along their first.
What comes back from the run lies where it lay. To see it on a CPU with two devices:
``XLA_FLAGS=--xla_force_host_platform_device_count=2``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import islands  # atoll
from examples import local_hub
from examples.equinox_task import PITCHES, SAMPLES, make_waves

BATCH, EXAMPLES, WIDTH = 32, 2048, 256
mesh = Mesh(jax.devices(), ("fsdp",))
optimizer = optax.adam(1e-3)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step changes."""

    step: jax.Array
    params: dict[str, jax.Array]
    opt_state: Any


def init(key: jax.Array) -> TrainState:
    """Returns the state before the first step."""
    first, second = jax.random.split(key)
    params = {
        "hidden": jax.random.normal(first, (SAMPLES, WIDTH)) / SAMPLES**0.5,
        "bias": jnp.zeros(WIDTH),
        "head": jax.random.normal(second, (WIDTH, PITCHES)) / WIDTH**0.5,
    }
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def over(*axes: str | None) -> NamedSharding:
    """Returns the sharding that cuts these axes over the devices of the mesh."""
    return NamedSharding(mesh, PartitionSpec(*axes))  # type: ignore[no-untyped-call]


def sharding_of(leaf: Any) -> NamedSharding:
    """Returns the place of a leaf of the state: matrices of equal parts are cut, others on each device."""
    cut = leaf.ndim == 2 and leaf.shape[-1] % mesh.size == 0
    return over(None, "fsdp") if cut else over()


def loss(params: dict[str, jax.Array], batch: Any) -> jax.Array:
    """Returns the mean loss in nats of a batch of waves and their pitches."""
    spectrum = jnp.abs(jnp.fft.rfft(batch[0], n=2 * SAMPLES))[:, :SAMPLES] / SAMPLES**0.5
    logits = jax.nn.gelu(spectrum @ params["hidden"] + params["bias"]) @ params["head"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]))


@partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
    """One step of Adam; the new state lies as the old one did."""
    value, gradients = jax.value_and_grad(loss)(state.params, batch)
    updates, opt_state = optimizer.update(gradients, state.opt_state)
    new = TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)
    new = jax.lax.with_sharding_constraint(new, jax.tree.map(sharding_of, new))  # type: ignore[no-untyped-call]
    return new, {"loss": value}


def main(address: str) -> None:
    """Trains until the run ends."""
    waves = list(zip(*make_waves(0, EXAMPLES, noise=1.0, seed=0), strict=True))
    held_out = make_waves(1, 512, noise=1.0, seed=0)
    shapes = jax.eval_shape(init, jax.random.key(0))
    state = jax.jit(init, out_shardings=jax.tree.map(sharding_of, shapes))(jax.random.key(0))
    before = float(loss(state.params, held_out))

    with islands.Hook(address, tokens_per_step=BATCH) as hook:  # atoll
        state = TrainState(state.step, *hook.start(state.params, state.opt_state))  # atoll
        for batch in islands.batches(waves, hook.island, batch=BATCH):  # atoll: in place of its own data
            state, metrics = train_step(state, jax.device_put(batch, over("fsdp")))
            state = TrainState(state.step, *hook.step(state.params, state.opt_state, loss=metrics["loss"]))  # atoll
        state = replace(state, params=hook.finish())  # atoll
    print(f"on {jax.device_count()} devices: {state.params['hidden'].sharding}")
    print(f"loss on held-out waves: {before:.3f} before, {float(loss(state.params, held_out)):.3f} after")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with local_hub.at(local_hub.parser(__doc__).parse_args().address, tokens=300 * BATCH) as found:
        main(found)
