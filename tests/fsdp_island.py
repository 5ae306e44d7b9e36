"""An island of one or several processes of a jax.distributed job, as a program of its own.

    python -m tests.fsdp_island '{"address": ..., "island": "a", "processes": 2, "process": 0, "port": 4321, ...}'

It trains a small transformer whose parameters are spread over all devices of the job (FSDP), and prints a line of JSON
for each step. ``processes`` = 0: arrays on one device, without jax.distributed.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main(spec: dict) -> None:
    if spec["devices"] > 1:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={spec['devices']}"
    import jax

    if spec["processes"] > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{spec['port']}", num_processes=spec["processes"], process_id=spec["process"]
        )
    train(spec)


def train(spec: dict) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import islands
    from broker.process import logs
    from islands.tasks import model
    from islands.tasks.corpus import load_corpus
    from islands.tasks.data import Windows, batches

    logs.configure(f"{spec['island']}.{spec['process']}")
    config = model.ModelConfig(width=32, depth=1, heads=2, hidden=64)
    mesh = Mesh(np.array(jax.devices()), ("shard",))
    batch, context = 8, 32

    def layout(shape: tuple[int, ...]) -> NamedSharding:
        axis = next((i for i, n in enumerate(shape) if n % mesh.size == 0 and n > 1), None)
        return NamedSharding(mesh, PartitionSpec(*(None,) * (axis or 0), "shard" if axis is not None else None))

    def spread(value, sharding=None):
        value = np.asarray(value)
        place = sharding or (layout(value.shape) if value.ndim else NamedSharding(mesh, PartitionSpec()))
        return jax.make_array_from_callback(value.shape, place, lambda at: value[at])

    params = jax.tree.map(spread, model.init(jax.random.key(0), config))
    optimizer = optax.adamw(3e-3, b2=0.95)
    opt_state = jax.tree.map(spread, optimizer.init(jax.tree.map(np.asarray, model.init(jax.random.key(0), config))))
    places = jax.tree.map(lambda x: x.sharding, (params, opt_state))

    @jax.jit
    def train_step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(model.loss)(params, tokens, config)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    train_step = jax.jit(train_step, out_shardings=(*places, NamedSharding(mesh, PartitionSpec())))
    corpus = load_corpus(["python:json"])
    windows = Windows(corpus.train, context, vocabulary=256, sources=corpus.sources)
    rows = NamedSharding(mesh, PartitionSpec("shard"))

    island = islands.join(
        spec["address"],
        params,
        run=spec["run"],
        island_id=spec["island"],
        tokens_per_step=batch * context,
        inner_optimizer="adamw",
        state_dir=spec.get("state_dir"),
        checkpoint_interval_s=spec.get("checkpoint_interval_s", 60.0),
        donor_wait_s=spec.get("donor_wait_s", 0.0),
        timeout_s=60.0,
        recipe=spec.get("recipe"),
    )
    params, opt_state = island.restore(params, opt_state)
    say(event="restored", source=island.restored, step=island.inner_step, cursor=island.restored_cursor)
    for number, tokens in enumerate(batches(windows, island.share, batch=batch), 1):
        at_s = time.perf_counter()
        params, opt_state, loss = train_step(params, opt_state, spread(tokens, rows))
        jax.block_until_ready(params)
        time.sleep(max(0.0, spec.get("pace_s", 0.0) - (time.perf_counter() - at_s)))
        lost = number >= 3 and spec.get("loses_a_leaf") == spec["process"]
        handed = dict(list(params.items())[1:]) if lost else params
        params |= island.step(handed, tokens=batch * context, loss=loss, state=(opt_state, island.share.cursor))
        say(
            event="step",
            step=island.inner_step,
            loss=float(loss),
            versions=island.versions,
            done=island.done,
            cursor=island.share.cursor,
            schedule=island.schedule_step,
            sync=island.sync_share,
        )
        if island.done:
            break
    params = island.close(params)
    total = float(sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(params)))
    say(
        event="ended",
        step=island.inner_step,
        versions=island.versions,
        sum=total,
        sync=island.sync_share,
    )


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
