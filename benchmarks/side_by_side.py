"""Trains a cell of the laboratory with its islands side by side on one device, such as a GPU that is lent for minutes.

It is what :mod:`ops.lab.lockstep` does with data-parallel and DiLoCo cells: the same batches, inner steps, merge and
outer step. What differs is how the device gets its work. Islands are one more axis of every array (``jax.vmap``), and
an interval of H steps is one call (``lax.scan``). The next interval's batches are made while that one is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from broker.wire.fragments import merged_by, partition
from islands.arrays.jax_placement import to_host
from islands.arrays.partition import tensor_specs
from islands.arrays.tree import flatten, unflatten
from islands.tasks.task import DataShare, Params, Schedule, Task, endless_batches
from ops.lab.lockstep import Outer, values_of
from ops.lab.records import Judge, Outcome, Point
from ops.plans.cell import CellSettings, Mode

#: Steps done, and the mean loss of the last ones: called for each interval once it is computed; may raise.
Told = Callable[[int, float], None]


def run(task: Task, cell: CellSettings, seed: int, judge: Judge, told: Told) -> Outcome:
    """Returns the outcome of one run, as :func:`ops.lab.lockstep.run` does, without virtual time.

    Args:
        task: The task to train.
        cell: Its steps are whole intervals. A data-parallel one has one island.
        seed: The seed of parameters and data order.
        judge: Called for every point of the loss curve but the last.
        told: Called for each interval.
    """
    every, count = cell.sync_interval, cell.islands
    initial, state = task.init(seed)
    manifest = partition(merged_by(tensor_specs(initial, task.kinds, task.unit_axes), cell.merge), 1)
    (tensors,) = manifest.fragments
    outer = None if cell.mode is Mode.DATA_PARALLEL else Outer(cell, manifest, initial)
    sources = [endless_batches(task, DataShare(index=i, count=count, seed=seed)) for i in range(count)]

    def drawn() -> Any:  # [H, islands, windows, context + 1]
        return jax.device_put(np.stack([np.stack([next(each) for each in sources]) for _ in range(every)]))

    # On the device every leaf has the islands as its first axis.

    def for_all(leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (count, *leaf.shape))

    @partial(jax.jit, donate_argnums=0)
    def interval(carry: Any, batches: jax.Array, first: jax.Array) -> tuple[Any, jax.Array]:
        """Takes H inner steps of every island; returns the mean loss of them."""

        def step(carry: Any, each: Any) -> tuple[Any, jax.Array]:
            (params, state), (batch, k) = carry, each
            schedule = Schedule(first + k, cell.steps)
            params, state, loss = jax.vmap(task.train, in_axes=(0, 0, 0, None))(params, state, batch, schedule)
            return (params, state), jnp.mean(loss)

        carry, losses = jax.lax.scan(step, carry, (batches, jnp.arange(every)))
        return carry, jnp.mean(losses)

    @jax.jit
    def deltas(theta: jax.Array, params: Params) -> jax.Array:
        """Returns the islands' pseudo-gradients: [islands, elements], tensors in manifest order."""
        leaves = flatten(params)
        return theta - jnp.concatenate([leaves[tensor.name].reshape(count, -1) for tensor in tensors], axis=1)

    @partial(jax.jit, donate_argnums=0)
    def placed(params: Params, theta: jax.Array) -> Params:
        """Returns the global parameters as those of every island; the old ones lend their memory."""
        values: Any = values_of(tensors, theta)  # type: ignore[arg-type]
        return unflatten(params, {name: for_all(value) for name, value in values})

    first_of = jax.jit(partial(jax.tree.map, lambda leaf: leaf[0]))  # after a sync all islands are alike
    carry = jax.jit(partial(jax.tree.map, for_all))((initial, state))
    theta = None if outer is None else jax.device_put(outer.vector(0))
    following = drawn()
    curve, losses = list[Point](), list[jax.Array]()
    tokens_per_step = count * task.tokens_per_step
    for t in range(every, cell.steps + 1, every):
        carry, loss = interval(carry, following, t - every)
        losses.append(loss)
        following = drawn() if t < cell.steps else None
        if outer is not None:
            outer.merge(0, list(to_host(deltas(theta, carry[0]))))
            theta = jax.device_put(outer.vector(0))
            carry = placed(carry[0], theta), carry[1]
        if t > every:  # the interval before: the device has the next one to compute while that is read
            told(t - every, float(losses[-2]))
        if t < cell.steps and t * cell.evaluations // cell.steps > (t - every) * cell.evaluations // cell.steps:
            curve.append(Point(t * tokens_per_step, 0.0, judge(first_of(carry[0]))))
    told(cell.steps, float(losses[-1]))
    tokens = cell.steps * tokens_per_step
    return Outcome(
        params=first_of(carry[0]),
        curve=curve,
        tokens=tokens,
        merged_tokens=tokens,
        virtual_s=0.0,
        rounds=0 if outer is None else outer.rounds(),
    )
