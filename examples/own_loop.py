"""Bring your own loop: a JAX training loop joins a run by the four lines marked ``# atoll``.

    .venv/bin/python -m examples.own_loop                        # a hub and one island
    .venv/bin/python -m examples.own_loop tcp://127.0.0.1:7001   # another island, or any run that is there

Everything else is what the loop would be without Atoll. The model is a neural probabilistic language model (Bengio et
al., 2003): it embeds the last bytes of a text and predicts the next. Parameters may be float32 or bfloat16
(``--dtype bf16``); the step is jitted and donates what it is given. A rate that follows the progress of the whole run,
and not that of this island's optimizer, asks ``island.schedule_step``.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import islands  # atoll
from examples import local_hub

HISTORY, BATCH = 16, 256
Params = dict[str, jax.Array]

optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam())


def init(key: jax.Array, dtype: Any) -> Params:
    """Returns the parameters: an embedding of 32 numbers per byte, one hidden layer of 256."""
    keys = jax.random.split(key, 3)
    params = {
        "embed": 0.1 * jax.random.normal(keys[0], (256, 32)),
        "hidden": jax.random.normal(keys[1], (HISTORY * 32, 256)) / (HISTORY * 32) ** 0.5,
        "head": 0.1 * jax.random.normal(keys[2], (256, 256)) / 256**0.5,
    }
    return {name: x.astype(dtype) for name, x in params.items()}


def loss(params: Params, batch: Any) -> jax.Array:
    """Returns the mean loss in nats per byte; ``batch``: (BATCH, HISTORY + 1) bytes, the last predicted."""
    history = params["embed"][batch[:, :-1].astype(jnp.int32)].reshape(len(batch), -1)
    logits = (jnp.tanh(history @ params["hidden"]) @ params["head"]).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1].astype(jnp.int32)))


@partial(jax.jit, donate_argnums=(0, 1))
def train(params: Params, opt_state: Any, batch: Any) -> tuple[Params, Any, jax.Array]:
    """One step of Adam; the rate warms up and then falls with the steps that the optimizer has counted."""
    value, gradients = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = optimizer.update(float32(gradients), opt_state)
    step = opt_state[1].count
    rate = 3e-3 * jnp.minimum((step + 1) / 50, jax.lax.rsqrt(1 + step / 500))
    params = jax.tree.map(lambda p, w, u: (w - rate * u).astype(p.dtype), params, float32(params), updates)
    return params, opt_state, value


def float32(tree: Params) -> Params:
    """Returns the tree in float32: bfloat16 parameters are stored short, but stepped and averaged in full."""
    return {name: x.astype(jnp.float32) for name, x in tree.items()}


def windows() -> np.ndarray[Any, Any]:
    """Returns the examples, (N, HISTORY + 1) bytes each: every place in the sources of Python's library."""
    sources = sorted(Path(logging.__file__).parents[1].glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in sources)[:2_000_000], np.uint8)
    return np.lib.stride_tricks.sliding_window_view(text, HISTORY + 1)


def main(address: str, run: str, dtype: Any) -> None:
    """Trains until the run ends."""
    params = init(jax.random.key(0), dtype)
    opt_state = optimizer.init(float32(params))
    examples = windows()
    sample = examples[:: len(examples) // 2000]
    before = float(loss(params, sample))

    island, params, opt_state = islands.begin(address, params, opt_state, run=run, tokens_per_step=BATCH)  # atoll
    for batch in islands.batches(examples, island, batch=BATCH):  # atoll: in place of its own data
        params, opt_state, value = train(params, opt_state, batch)
        params = island.step(params, opt_state, loss=value)  # atoll
    params = island.close(params)  # atoll
    print(f"loss on a sample: {before:.3f} before, {float(loss(params, sample)):.3f} after")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = local_hub.parser(__doc__)
    parser.add_argument("--run", default="atoll", help="the run's name (default: %(default)s)")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="of the parameters (default: f32)")
    args = parser.parse_args()
    with local_hub.at(args.address, run=args.run, tokens=200 * BATCH) as found:
        main(found, args.run, {"f32": jnp.float32, "bf16": jnp.bfloat16}[args.dtype])
