"""Trains a cell of the laboratory with its islands side by side on one device, such as a GPU that is lent for minutes.

It is what :mod:`ops.lab.lockstep` does with data-parallel and DiLoCo cells: the same batches, inner steps, merge and
outer step. What differs is how the device gets its work. Islands are one more axis of every array (``jax.vmap``), and
an interval of H steps is one call (``lax.scan``). The next interval's batches are made while that one is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from broker.wire.fragments import merged_by, partition
from islands.arrays.jax_placement import to_host
from islands.arrays.partition import tensor_specs
from islands.arrays.tree import flatten, unflatten
from islands.tasks import model as transformer
from islands.tasks.corpus import Corpus, load_corpus
from islands.tasks.data import Windows, batches, evenly
from islands.tasks.inner_optimizer import adamw, jax_task, warm_up_cosine
from islands.tasks.task import DataShare, Params, Schedule, Task, endless_batches
from ops.lab.lockstep import Outer, values_of
from ops.lab.records import Judge, Outcome, Point
from ops.plans.cell import CellSettings, Mode

HELD_OUT_WINDOWS, HELD_OUT_ROWS = 4096, 64  #: that judge a model, at most, and as many at a time
#: Steps done, and the mean loss of the last ones: called for each interval once it is computed; may raise.
Told = Callable[[int, float], None]


@functools.cache
def corpus_of(data: tuple[str, ...]) -> Corpus:
    """Returns the language task's corpus, opened once."""
    return load_corpus(data)


def parameters_of(width: int, depth: int, vocabulary: int) -> int:
    """Returns the number of parameters of such a model, embeddings included."""
    return width * (vocabulary + 1) + depth * width * (13 * width + 2)


def task(
    *,
    width: int,
    depth: int,
    batch: int,
    context: int,
    learning_rate: float,
    warm_up_steps: int,
    b2: float,
    compute: str = "float32",
    data: Sequence[str] = (),
) -> Task:
    """Returns the language task with a model of any size, computed in any dtype.

    Args:
        width: Of the residual stream; heads have 64 of it, and feed-forward networks three times as much.
        depth: Layers.
        batch: Windows per inner step of one island.
        context: Tokens per window.
        learning_rate: Peak; then a cosine to a tenth of it.
        warm_up_steps: Inner steps to the peak.
        b2: Of AdamW.
        compute: The dtype of products; parameters and the optimizer are float32.
        data: As the language task's.

    Raises:
        ConfigError: An option cannot work.
    """
    corpus = corpus_of(tuple(data))
    config, loss, evaluate = model_of(width, depth, context, compute, tuple(data))
    train = Windows(corpus.train, context, vocabulary=corpus.vocabulary, sources=corpus.sources)
    return jax_task(
        init=lambda key: transformer.init(key, config),
        loss=loss,
        data=lambda share: batches(train, share, batch=batch),
        evaluate=evaluate,
        tokens_per_step=batch * context,
        corpus=corpus.digest,
        optimizer=adamw(b2=b2),
        learning_rate=warm_up_cosine(learning_rate, warm_up_steps=warm_up_steps),
        kinds={"^embed$": "mean"},
        inner_optimizer="adamw",
    )


@dataclass(frozen=True, slots=True)
class _Embeddings:
    """Embeddings that are read in a narrow dtype.

    The gradients of thousands of tokens are added in the table's own: in bfloat16 their sum was 34 % off.
    """

    table: jax.Array
    compute: str

    def __getitem__(self, tokens: Any) -> jax.Array:
        return self.table[tokens].astype(self.compute)

    @property
    def T(self) -> jax.Array:
        return self.table.astype(self.compute).T


@functools.cache  # the modes of one size share what is compiled
def model_of(width: int, depth: int, context: int, compute: str, data: tuple[str, ...]) -> tuple[Any, Any, Any]:
    """Returns a model's shape, its loss of a batch, and its held-out loss as a number."""
    corpus = corpus_of(data)
    heads = max(1, width // 64)
    config = transformer.ModelConfig(
        vocabulary=corpus.vocabulary, width=width, depth=depth, heads=heads, hidden=3 * width
    )
    held_out = Windows(corpus.held_out, context, vocabulary=corpus.vocabulary, sources=corpus.sources)
    rows = min(HELD_OUT_ROWS, len(held_out))
    most = min(HELD_OUT_WINDOWS, len(held_out)) // rows * rows
    judged = held_out.take(evenly(held_out, most)).reshape(-1, rows, context + 1)

    def loss(params: Params, tokens: jax.Array) -> jax.Array:
        narrow = jax.tree.map(lambda leaf: leaf.astype(compute), params)
        return transformer.loss(narrow | {"embed": _Embeddings(params["embed"], compute)}, tokens, config)

    @jax.jit
    def held_out_loss(params: Params, windows: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.map(lambda tokens: loss(params, tokens), windows))

    return config, loss, lambda params: float(held_out_loss(params, judged))


class SideBySide:
    """Runs of one cell, data-parallel or DiLoCo, that share what is compiled."""

    def __init__(self, task: Task, cell: CellSettings) -> None:
        """Takes the task, and a cell whose steps are whole intervals. A data-parallel one has one island."""
        self._task, self._cell = task, cell
        params = jax.eval_shape(lambda: task.init(0)[0])
        specs = merged_by(tensor_specs(params, task.kinds, task.unit_axes), cell.merge)
        self._manifest = partition(specs, 1)
        (self._tensors,) = self._manifest.fragments
        self._interval = jax.jit(self._traced_interval, donate_argnums=0)
        self._deltas = jax.jit(self._traced_deltas)
        self._placed = jax.jit(self._traced_placed, donate_argnums=0)
        self._first = jax.jit(functools.partial(jax.tree.map, lambda leaf: leaf[0]))
        self._spread = jax.jit(functools.partial(jax.tree.map, self._for_all))

    def run(self, seed: int, judge: Judge, told: Told) -> Outcome:
        """Returns the outcome of one run, as :func:`ops.lab.lockstep.run` does, without virtual time.

        Args:
            seed: The seed of parameters and data order.
            judge: Called for every point of the loss curve but the last.
            told: Called for each interval.
        """
        task, cell = self._task, self._cell
        every, count = cell.sync_interval, cell.islands
        initial, state = task.init(seed)
        outer = None if cell.mode is Mode.DATA_PARALLEL else Outer(cell, self._manifest, initial)
        theta = None if outer is None else jax.device_put(outer.vector(0))
        sources = [endless_batches(task, DataShare(index=i, count=count, seed=seed)) for i in range(count)]

        def drawn() -> Any:  # [H, islands, windows, context + 1]
            return jax.device_put(np.stack([np.stack([next(each) for each in sources]) for _ in range(every)]))

        def whole() -> Params:
            return self._first(carry[0])  # after a sync all islands are alike

        carry, following = self._spread((initial, state)), drawn()
        curve, losses = list[Point](), list[jax.Array]()
        tokens_per_step = count * task.tokens_per_step
        for t in range(every, cell.steps + 1, every):
            carry, loss = self._interval(carry, following, t - every)
            losses.append(loss)
            following = drawn() if t < cell.steps else None
            if outer is not None:
                outer.merge(0, list(to_host(self._deltas(theta, carry[0]))))
                theta = jax.device_put(outer.vector(0))
                carry = self._placed(carry[0], theta), carry[1]
            if t > every:  # the interval before: the device has the next one to compute while that is read
                told(t - every, float(losses[-2]))
            if t < cell.steps and t * cell.evaluations // cell.steps > (t - every) * cell.evaluations // cell.steps:
                curve.append(Point(t * tokens_per_step, 0.0, judge(whole())))
        told(cell.steps, float(losses[-1]))
        tokens = cell.steps * tokens_per_step
        rounds = 0 if outer is None else outer.rounds()
        return Outcome(params=whole(), curve=curve, tokens=tokens, merged_tokens=tokens, virtual_s=0.0, rounds=rounds)

    # --- on the device: every leaf has the islands as its first axis ---

    def _for_all(self, leaf: jax.Array) -> jax.Array:
        return jnp.broadcast_to(leaf, (self._cell.islands, *leaf.shape))

    def _traced_interval(self, carry: Any, batches: jax.Array, first: jax.Array) -> tuple[Any, jax.Array]:
        """Takes H inner steps of every island; returns the mean loss of them."""

        def step(carry: Any, each: Any) -> tuple[Any, jax.Array]:
            params, state = carry
            batch, k = each
            schedule = Schedule(first + k, self._cell.steps)

            def one(params: Params, state: Any, batch: jax.Array) -> Any:
                return self._task.train(params, state, batch, schedule)

            params, state, loss = jax.vmap(one)(params, state, batch)
            return (params, state), jnp.mean(loss)

        carry, losses = jax.lax.scan(step, carry, (batches, jnp.arange(len(batches))))
        return carry, jnp.mean(losses)

    def _traced_deltas(self, theta: jax.Array, params: Params) -> jax.Array:
        """Returns the islands' pseudo-gradients: [islands, elements], tensors in manifest order."""
        leaves = flatten(params)
        rows = [leaves[tensor.name].reshape(self._cell.islands, -1) for tensor in self._tensors]
        return theta - jnp.concatenate(rows, axis=1)

    def _traced_placed(self, params: Params, theta: jax.Array) -> Params:
        """Returns the global parameters as those of every island; the old ones lend their memory."""
        values: Any = values_of(self._tensors, theta)  # type: ignore[arg-type]
        return unflatten(params, {name: self._for_all(value) for name, value in values})
