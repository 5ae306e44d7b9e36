"""Bring your own loop: a JAX training loop of your own joins a run with one object and one call per inner step.

    python3 -m ops broker & python3 -m ops aggregator &            # or any run that is already there
    .venv/bin/python -m examples.own_loop tcp://127.0.0.1:7001 &   # one island
    .venv/bin/python -m examples.own_loop tcp://127.0.0.1:7001     # and another

Everything here but the lines marked (0) to (6) is what the loop would be without Atoll. The model is a neural
probabilistic language model (Bengio et al., 2003): it embeds the last bytes of a text and predicts the next.
Parameters may be float32 or bfloat16 (``--dtype bf16``); the step is jitted and donates what it is given.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import islands
from islands import DataShare

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
    """Returns the mean loss in nats per byte; ``batch`` is (BATCH, HISTORY + 1) bytes, the last one to be predicted."""
    history = params["embed"][batch[:, :-1].astype(jnp.int32)].reshape(len(batch), -1)
    logits = (jnp.tanh(history @ params["hidden"]) @ params["head"]).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1].astype(jnp.int32)))


@partial(jax.jit, donate_argnums=(0, 1))
def train(params: Params, opt_state: Any, batch: Any, step: Any) -> tuple[Params, Any, jax.Array]:
    """One step of Adam; the rate warms up and then falls with ``step``, the progress of the whole run."""
    value, gradients = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = optimizer.update(float32(gradients), opt_state)
    rate = 3e-3 * jnp.minimum((step + 1) / 50, jax.lax.rsqrt(1 + step / 500))
    params = jax.tree.map(lambda p, w, u: (w - rate * u).astype(p.dtype), params, float32(params), updates)
    return params, opt_state, value


def float32(tree: Params) -> Params:
    """Returns the tree in float32: bfloat16 parameters are stored short, but stepped and averaged in full."""
    return {name: x.astype(jnp.float32) for name, x in tree.items()}


def data(share: DataShare) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the batches that are this island's: of every ``count`` examples, number ``index``, from ``cursor`` on."""
    sources = sorted(Path(argparse.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in sources)[:2_000_000], np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(text, HISTORY + 1)
    order = np.random.default_rng(share.seed).permutation(len(windows))
    while True:
        index, count, cursor, _ = share.take()  # anew for each batch: data go out in blocks
        numbers = (cursor * BATCH + np.arange(BATCH)) * count + index
        yield windows[order[numbers % len(order)]]


def main() -> None:
    """Trains until the run ends."""
    parser = argparse.ArgumentParser(description="A training loop of one's own as an island.")
    parser.add_argument("address", help="the broker, such as tcp://127.0.0.1:7001")
    parser.add_argument("--run", default="atoll", help="the run's name (default: %(default)s)")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="of the parameters (default: f32)")
    args = parser.parse_args()

    params = init(jax.random.key(0), {"f32": jnp.float32, "bf16": jnp.bfloat16}[args.dtype])
    opt_state = optimizer.init(float32(params))

    kinds = {"embed|head": "mean"}
    islands.log_to_stderr()  # (0) what the island does and waits for; or logging.basicConfig(level=logging.INFO)
    island = islands.join(args.address, params, run=args.run, kinds=kinds, tokens_per_step=BATCH)  # (1)
    params, opt_state = island.restore(params, opt_state)  # (2) the run's parameters; our optimizer state, if there is
    for step, batch in enumerate(data(island.share), start=island.share.cursor):  # (3) our part of the data
        params, opt_state, value = train(params, opt_state, batch, island.schedule_step)  # (4) the run's progress
        params = island.step(params, tokens=BATCH, loss=value, state=(opt_state, step + 1))  # (5) never waits
        if island.done:
            params = island.close(params)  # (6) the run's final parameters
            break
    print(f"done: loss {float(loss(params, batch)):.3f} nats per byte")


if __name__ == "__main__":
    main()
