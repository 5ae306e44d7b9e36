"""One region of the base: synchronous data-parallel training; JAX averages gradients at every step.

The model, its loss, the inner optimizer, its rate and the data are those of ``islands.language:task``. All gradients
are one vector, so a step has one all-reduce: tensor by tensor would pay the round trips some forty times. JAX's
collectives on CPUs are gloo's, a ring over TCP between the processes. Evaluations are off the clock.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.regions.fleet import meet
from islands.tasks import model as transformer
from islands.tasks.corpus import load_corpus
from islands.tasks.inner_optimizer import adamw, warm_up_cosine
from islands.tasks.task import DataShare, Schedule, load_task


def train(spec: dict[str, Any]) -> None:
    """Trains until the held-out loss is reached or the time is over; the first process prints JSON lines.

    Args:
        spec: ``options`` of the language task; ``rank`` of this process, of ``count``; ``loss`` to be reached;
            ``seconds`` at most, without compiling and evaluating; ``every`` so many steps an evaluation; ``meeting``,
            the directory in which processes say that they have compiled.
    """
    options, rank, count = spec["options"], spec["rank"], spec["count"]
    mesh = Mesh(np.array(jax.devices()), ("regions",))
    everywhere, by_region = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("regions"))  # type: ignore[no-untyped-call]
    task = load_task("islands.language:task", options)
    corpus = load_corpus(options.get("data", ()))
    config = transformer.ModelConfig(vocabulary=corpus.vocabulary, **transformer.PRESETS[options["model"]])
    optimizer = adamw(weight_decay=options.get("weight_decay", 0.1), b2=options.get("b2", 0.95))
    rate = warm_up_cosine(options["learning_rate"], warm_up_steps=options.get("warm_up_steps", 50), ramp_steps=20)

    def averaged(params: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        value, gradients = jax.value_and_grad(transformer.loss)(params, tokens, config)
        flat, unravel = ravel_pytree(gradients)
        mean = jax.lax.pmean(flat, "regions")  # type: ignore[no-untyped-call]
        return value[None], unravel(mean)

    # What comes out is the same everywhere; that the checker cannot see, which knows parameters as replicated.
    reduce_gradients = jax.shard_map(
        averaged,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("regions")),  # type: ignore[no-untyped-call]
        out_specs=(PartitionSpec("regions"), PartitionSpec()),  # type: ignore[no-untyped-call]
        check_vma=False,
    )

    def step(params: Any, state: Any, tokens: jax.Array, now: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = reduce_gradients(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        scale = -rate(Schedule(now, 0), now)  # type: ignore[arg-type]
        return jax.tree.map(lambda p, u: p + scale * u, params, updates), state, value

    jitted = jax.jit(step, donate_argnums=(0, 1))

    def shared(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(everywhere, np.asarray(x)), tree)  # type: ignore[no-untyped-call]

    def here(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.addressable_data(0), tree)

    initial, _ = task.init(0)
    params, state = shared(initial), shared(optimizer.init(initial))
    data = task.data(DataShare(index=rank, count=count, seed=0))

    def split(tokens: Any) -> Any:
        return jax.make_array_from_process_local_data(by_region, tokens)  # type: ignore[no-untyped-call]

    compiled = jitted.lower(params, state, split(next(data)), jnp.float32(0)).compile()
    task.evaluate(initial)  # compiles
    meet(Path(spec["meeting"]), rank, count)
    # Connections between all pairs, which the first step would otherwise make, stand when the clock begins.
    multihost_utils.sync_global_devices("begin")
    compiled(shared(initial), shared(optimizer.init(initial)), split(next(data)), jnp.float32(0))[2].block_until_ready()
    multihost_utils.sync_global_devices("clock")
    began_s = time.monotonic()
    off_s, number = 0.0, 0
    while True:
        params, state, value = compiled(params, state, split(next(data)), jnp.float32(number))
        value.block_until_ready()
        number += 1
        now_s = time.monotonic() - off_s
        if number % spec["every"]:
            continue
        off_began_s = time.monotonic()
        found = task.evaluate(here(params)) if rank == 0 else 0.0
        spent_s = now_s - began_s
        done = rank == 0 and (float(found) <= spec["loss"] or spent_s > spec["seconds"])  # type: ignore[arg-type]
        if rank == 0:
            tokens = number * count * task.tokens_per_step
            print(json.dumps({"s": spent_s, "steps": number, "tokens": tokens, "loss": found}), flush=True)
        if bool(multihost_utils.broadcast_one_to_all(np.int32(done))):
            return
        off_s += time.monotonic() - off_began_s


def main() -> None:
    """Runs one region."""
    spec = json.loads(sys.argv[1])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]
    jax.distributed.initialize(spec["coordinator"], spec["count"], spec["rank"])
    train(spec)
    jax.distributed.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
