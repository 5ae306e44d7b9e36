"""One region of the base: synchronous data-parallel training; JAX averages gradients at every step.

The model, its loss, the inner optimizer, its rate and the data are those of ``islands.language:task``. All gradients
are one vector, so a step has one all-reduce: tensor by tensor would pay the round trips some forty times. JAX's
collectives on CPUs are gloo's, a ring over TCP between the processes. Evaluations are off the clock.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.regions.meeting import meet
from islands.tasks import model as transformer
from islands.tasks.corpus import load_corpus
from islands.tasks.inner_optimizer import adamw, warm_up_cosine
from islands.tasks.task import DataShare, Schedule, load_task

SAY_EVERY_S = 5.0


def train(
    options: dict[str, Any], *, rank: int, count: int, loss: float, seconds: float, every: int, wire: str, meeting: Path
) -> None:
    """Trains until the held-out loss is reached or the time is over; the first process prints JSON lines.

    Args:
        options: Of the language task.
        rank: Number of this process.
        count: Processes.
        loss: To be reached.
        seconds: At most, without compiling and evaluating.
        every: Steps between two evaluations.
        wire: Number format of gradients in the all-reduce: ``float32`` or ``bfloat16``.
        meeting: Directory in which processes say that they have compiled.
    """
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
        mean = jax.lax.pmean(flat.astype(wire), "regions").astype(jnp.float32)  # type: ignore[no-untyped-call]
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
    meet(meeting, rank, count)
    # Connections between all pairs, which the first step would otherwise make, stand when the clock begins.
    multihost_utils.sync_global_devices("begin")
    compiled(shared(initial), shared(optimizer.init(initial)), split(next(data)), jnp.float32(0))[2].block_until_ready()
    multihost_utils.sync_global_devices("clock")
    began_s = said_s = time.monotonic()
    off_s, number = 0.0, 0
    while True:
        params, state, value = compiled(params, state, split(next(data)), jnp.float32(number))
        value.block_until_ready()
        number += 1
        now_s = time.monotonic() - off_s
        if rank == 0 and now_s - said_s > SAY_EVERY_S:
            said_s = now_s
            print(json.dumps({"s": now_s - began_s, "steps": number}), flush=True)
        if number % every:
            continue
        off_began_s = time.monotonic()
        found = task.evaluate(here(params)) if rank == 0 else 0.0
        spent_s = now_s - began_s
        done = rank == 0 and (float(found) <= loss or spent_s > seconds)  # type: ignore[arg-type]
        if rank == 0:
            tokens = number * count * task.tokens_per_step
            print(json.dumps({"s": spent_s, "steps": number, "tokens": tokens, "loss": found}), flush=True)
        if bool(multihost_utils.broadcast_one_to_all(np.int32(done))):
            return
        off_s += time.monotonic() - off_began_s


def main() -> None:
    """Runs one region."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, kind in (("rank", int), ("count", int), ("loss", float), ("seconds", float), ("every", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--wire", default="float32")
    parser.add_argument("--meeting", type=Path, required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--options", type=json.loads, required=True)
    args = parser.parse_args()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # type: ignore[no-untyped-call]
    jax.distributed.initialize(args.coordinator, args.count, args.rank)
    train(
        args.options,
        rank=args.rank,
        count=args.count,
        loss=args.loss,
        seconds=args.seconds,
        every=args.every,
        wire=args.wire,
        meeting=args.meeting,
    )
    jax.distributed.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
