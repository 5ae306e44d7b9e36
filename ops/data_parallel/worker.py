"""A process of a data-parallel run: the same task; JAX collectives average gradients at every step.

The processes form one mesh. Parameters and optimizer state are the same everywhere. Each process brings the batch of
its own part of the data, or of several, as its part of one large batch. The task's jitted step runs on that, so XLA
reduces the gradients over the devices before the update (between processes by gloo on CPU). Nobody goes on without the
slowest.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from aggregator.interface.config import AggregatorConfig
from broker.base import sources
from broker.base.errors import AtollError, ConfigError
from broker.process import logs
from islands.arrays.tree import flatten
from islands.tasks.task import DataShare, Schedule, Task, endless_batches, load_task
from ops import run_directory
from ops.launcher import find_modules_here

log = logs.get(__name__)

SAY_EVERY_S = 5.0
#: Steps that this process first takes alone, to know how long its own part of one is; the first of them compiles.
ALONE = 6


def train(
    task: Task, *, rank: int, count: int, seed: int, tokens: int, pace_s: float, out: Path, parts: int = 1
) -> dict[str, Any]:
    """Trains until all processes together have trained so many tokens; returns what this one has counted.

    The first process leaves the model before and after as ``seed.safetensors`` and ``model.safetensors``.

    Args:
        task: One whose step is a jitted function of JAX arrays.
        rank: Number of this process.
        count: Processes.
        seed: Of parameters and data order.
        tokens: Of the run.
        pace_s: Least seconds for a step.
        out: Directory.
        parts: Parts of the data for each process; its devices divide their number.

    Raises:
        ConfigError: The task's parameters or batches are no arrays of JAX or numpy.
    """
    mesh = Mesh(np.array(jax.devices()), ("islands",))
    everywhere, by_island = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("islands"))  # type: ignore[no-untyped-call]

    def shared(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(everywhere, np.asarray(x)), tree)  # type: ignore[no-untyped-call]

    def split(batch: Any) -> Any:
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(by_island, np.asarray(x)), batch)  # type: ignore[no-untyped-call]

    initial, state = task.init(seed)
    if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(initial)):
        cure = "must be one of jax_task: data-parallel training averages gradients inside its jitted step"
        raise ConfigError("task", task.describe, cure)
    elements = sum(np.asarray(leaf).size for leaf in flatten(initial).values())
    _save(initial, out / "seed.safetensors", rank)
    params, opt_state = shared(initial), shared(state)
    shares = [DataShare(index=rank * parts + i, count=count * parts, seed=seed) for i in range(parts)]
    data = [endless_batches(task, share) for share in shares]
    steps = max(1, -(-tokens // (count * parts * task.tokens_per_step)))
    alone_s = _alone_s(task, seed, rank, count) if count > 1 else 0.0  # else it waits for nobody
    own_s = max(pace_s, alone_s)
    took_s: list[float] = []
    loss: Any = None
    multihost_utils.sync_global_devices("begin")
    began_s = said_s = time.monotonic()
    for step in range(steps):
        step_began_s = time.monotonic()
        time.sleep(own_s - alone_s)  # plays slower hardware
        params, opt_state, loss = task.train(
            params, opt_state, split(_joined([next(each) for each in data])), Schedule(step, steps)
        )
        jax.block_until_ready(loss)  # type: ignore[no-untyped-call]
        took_s.append(time.monotonic() - step_began_s)
        if time.monotonic() >= said_s + SAY_EVERY_S:
            said_s = time.monotonic()
            log.info("island.progress", step=step + 1, loss=round(float(loss), 4), steps=steps)
    _save(params, out / "model.safetensors", rank)
    multihost_utils.sync_global_devices("end")
    usual_s = took_s[1:] or took_s  # the first one compiles
    ring_bytes = round(steps * 2 * (1 - 1 / count) * 4 * elements)
    return {
        "inner_steps": steps,
        "tokens": steps * parts * task.tokens_per_step,
        "sync_share": max(0.0, 1 - own_s * len(usual_s) / sum(usual_s)) if count > 1 else 0.0,
        "bytes_up": ring_bytes,
        "bytes_down": ring_bytes,
        "incarnations": 1,
        "train_s": time.monotonic() - began_s,
        "loss": float(loss),
    }


def _joined(batches: list[Any]) -> Any:
    """Returns the batches side by side, along their first axes."""
    return batches[0] if len(batches) == 1 else jax.tree.map(lambda *each: np.concatenate(each), *batches)


def _alone_s(task: Task, seed: int, rank: int, count: int) -> float:
    """Returns the seconds of a step of this process by itself: the shortest of a few."""
    params, opt_state = task.init(seed)
    data = endless_batches(task, DataShare(index=rank, count=count, seed=seed))
    took_s = []
    for step in range(ALONE):
        began_s = time.monotonic()
        params, opt_state, loss = task.train(params, opt_state, next(data), Schedule(step, 0))
        jax.block_until_ready(loss)  # type: ignore[no-untyped-call]
        took_s.append(time.monotonic() - began_s)
    return min(took_s)


def _save(params: Any, path: Path, rank: int) -> None:
    if rank == 0:
        save_file({name: np.asarray(leaf, np.float32) for name, leaf in flatten(params).items()}, path)


def main(arguments: list[str]) -> int:
    """Runs one process by the run's ``config.toml``; its count is written to ``rank-N.json`` beside that."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("rank", int), ("count", int), ("pace", float), ("config", Path)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    args = parser.parse_args(arguments)
    logs.configure(f"island-{args.rank}")
    tables, out = sources.read_file(args.config), args.config.parent
    run = sources.load(AggregatorConfig, args, "aggregator")
    if args.count > 1:  # the first process listens where a broker would
        jax.distributed.initialize(f"127.0.0.1:{tables['broker']['port']}", args.count, args.rank)
    try:
        counted = train(
            load_task(tables["island"]["task"], tables.get("task", {})),
            rank=args.rank,
            count=args.count,
            parts=run.islands // args.count,
            seed=run.seed,
            tokens=run.total_tokens,
            pace_s=args.pace,
            out=out,
        )
    except AtollError as err:
        print(err, file=sys.stderr, flush=True)
        return 2 if isinstance(err, ConfigError) else 1
    run_directory.write(out / f"rank-{args.rank}.json", json.dumps(counted))
    if args.count > 1:
        jax.distributed.shutdown()  # type: ignore[no-untyped-call]
    return 0


if __name__ == "__main__":
    find_modules_here()
    sys.exit(main(sys.argv[1:]))
