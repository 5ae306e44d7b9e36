"""The default task: the transformer of :mod:`islands.tasks.model` on text, as bytes or byte pairs.

Measured on one core of a 2-core machine without other work, 512 tokens (8 x 64) per inner step, float32:

    model              parameters    inner step    compiles in
    tiny                  123,200         10 ms          2.4 s
    small                 885,888         42 ms          2.6 s
    small, 4 experts    2,657,408        125 ms          3.7 s
    medium              5,180,672        245 ms          3.3 s
    large              20,584,960        890 ms          9.0 s

``large`` was measured beside ``medium`` at another time, and is given by their ratio. It is meant for GPUs.

With ``bpe = 4096`` a step of ``tiny`` takes 2.5 times as long and one of ``small`` 1.5 times, for three times as many
bytes: 368,960 and 1,377,408 parameters. Evaluating ``tiny`` over 4,096 sequences of 64 takes 1.3 s, 3.3 s with pieces.

Defaults are for four islands on two cores. Four windows of 128 tokens cost half as much again as eight of 64, and
after equal time left the loss higher (1.53 against 1.45 nats). Merged synchronously every 24 steps (outer rate 0.7,
momentum 0.5), four islands of ``small`` go from 5.58 nats to 2.13 in 240 inner steps each and to 1.7 in 600; a
learning rate of 0.001 or 0.002 makes no difference there. One island alone, after 2,500 steps, held-out: 1.43 nats at
0.001, 1.45 at 0.002, 1.55 at 0.004.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from broker.base.errors import ConfigError
from islands.tasks import model as transformer
from islands.tasks.corpus import load_corpus
from islands.tasks.data import Windows, batches, evenly
from islands.tasks.inner_optimizer import adamw, jax_task, muon, warm_up_cosine
from islands.tasks.task import Params, Task

_DTYPES: Final[dict[str, Any]] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
_EMBEDDINGS: Final = {"mean": "mean", "rows": "rda"}
_OPTIMIZERS: Final = {"adamw": adamw, "muon": muon}


def task(
    *,
    model: str = "small",
    data: Sequence[str] = (),
    batch: int = 8,
    context: int = 64,
    learning_rate: float = 1e-3,
    warm_up_steps: int = 50,
    ramp_steps: int = 20,
    weight_decay: float = 0.1,
    b2: float = 0.95,
    experts: int = 0,
    top_k: int = 2,
    vocabulary: int = 0,
    bpe: int = 0,
    dtype: str = "float32",
    compute: str = "",
    embeddings: str = "mean",
    optimizer: str = "adamw",
    momentum: float | None = None,
    held_out_tokens: int = 32_768,
) -> Task:
    """Returns the task that trains a language model.

    Args:
        model: ``tiny``, ``small``, ``medium`` or ``large``, or a width and a depth such as ``384x5``.
        data: Text files, folders, token arrays, ``python:PACKAGE`` for the sources of an installed package and
            ``python:stdlib``, also when none is named, for those that came with the interpreter.
        batch: Windows per inner step.
        context: Tokens per window.
        learning_rate: Peak of the inner optimizer.
        warm_up_steps: Inner steps to the peak.
        ramp_steps: Inner steps to the full rate of an optimizer that starts afresh in the middle of a run.
        weight_decay: Decoupled, of matrices.
        b2: ``b2`` of AdamW. The mean of squared gradients averages over about 1 / (1 - b2) steps: small batches and
            rare tokens need more.
        experts: 0 for a dense model, else feed-forward networks per layer.
        top_k: Experts that a token visits.
        vocabulary: Number of token ids; 0 finds out from the data.
        bpe: 0: a token is a byte. Otherwise the number of pieces of a vocabulary trained on the data, 512 or more; 4096
            suits these models. The loss stays in nats per token, and a token is longer: see ``Task.describe``.
            All islands must name the same text, or their tokens mean different things.
        dtype: The dtype of the parameters: ``float32`` or ``bfloat16``.
        compute: The dtype in which losses and gradients are computed; empty: that of the parameters. On GPUs
            ``bfloat16`` is quick, and parameters in float32 keep what small steps add.
        embeddings: How islands' embeddings are merged: ``mean``, as published, or ``rows``: as matrices are, as if each
            row were a layer of its own.
        optimizer: The inner one: ``adamw``, as published, or ``muon`` for matrices with AdamW for the rest.
        momentum: Momentum of Muon, by default 0.95 as published; small models with small batches do better with 0.9.
        held_out_tokens: About this many held-out tokens are evaluated, in evenly spaced sequences of ``context``; all
            of them if there are fewer.

    Raises:
        ConfigError: If an option cannot work; it names the option and the cure.
    """
    shape, compute = transformer.shape_of(model), compute or dtype
    for name, value in (("dtype", dtype), ("compute", compute)):
        if value not in _DTYPES:
            raise ConfigError(name, value, f"must be one of {', '.join(_DTYPES)}")
    if embeddings not in _EMBEDDINGS:
        raise ConfigError("embeddings", embeddings, f"must be one of {', '.join(_EMBEDDINGS)}")
    if optimizer not in _OPTIMIZERS:
        raise ConfigError("optimizer", optimizer, f"must be one of {', '.join(_OPTIMIZERS)}")
    if not 0 <= b2 < 1:
        raise ConfigError("b2", b2, "must be from 0 to below 1, such as 0.95 or 0.99")
    if momentum is not None and optimizer != "muon":
        raise ConfigError("momentum", momentum, "is that of Muon: add optimizer = muon, or leave it out")
    if momentum is not None and not 0 <= momentum < 1:
        raise ConfigError("momentum", momentum, "must be from 0 to below 1, such as 0.9 or 0.95")
    for name, count in (("batch", batch), ("context", context), ("held_out_tokens", held_out_tokens)):
        if count < 1:
            raise ConfigError(name, count, "must be at least 1")
    constants = {"weight_decay": weight_decay, "b2": b2} | ({} if momentum is None else {"beta": momentum})
    corpus = load_corpus(data, vocabulary=vocabulary, bpe=bpe)
    config = transformer.ModelConfig(vocabulary=corpus.vocabulary, experts=experts, top_k=top_k, **shape)
    train_windows = Windows(corpus.train, context, vocabulary=corpus.vocabulary, sources=corpus.sources)
    held_out = Windows(
        corpus.held_out, context, vocabulary=corpus.vocabulary, sources=f"the held-out twentieth of {corpus.sources}"
    )
    losses = _held_out_losses(held_out, config, rows=batch, most=max(1, held_out_tokens // context))

    def computed(params: Params) -> Params:
        return jax.tree.map(lambda leaf: leaf.astype(_DTYPES[compute]), params)

    size = f", {corpus.bytes_per_token:.2f} bytes per token" if bpe else ""
    return jax_task(
        init=lambda key: transformer.init(key, config, _DTYPES[dtype]),
        loss=lambda params, tokens: transformer.loss(computed(params), tokens, config),
        data=lambda share: batches(train_windows, share, batch=batch),
        evaluate=lambda params: float(np.mean(losses(computed(params)), dtype=np.float64)),
        corpus=corpus.digest,
        tokens_per_step=batch * context,
        optimizer=_OPTIMIZERS[optimizer](**constants),
        inner_optimizer=optimizer,
        learning_rate=warm_up_cosine(learning_rate, warm_up_steps=warm_up_steps, ramp_steps=ramp_steps),
        kinds={"^embed$": _EMBEDDINGS[embeddings]},
        unit_axes={"^embed$": 1 if embeddings == "rows" else 0},
        describe=f"{batch * context} tokens per step, vocabulary {corpus.vocabulary}{size}",
    )


def _held_out_losses(
    windows: Windows, config: transformer.ModelConfig, *, rows: int, most: int
) -> Callable[[Params], npt.NDArray[np.float32]]:
    """Returns a function: params -> mean loss of each of at most ``most`` windows, in nats per token.

    Windows are of one length, so each token weighs the same in their mean. They go through the model ``rows`` at a
    time, as in training: experts have places by the batch, and larger batches are no faster on one core (``tiny``,
    4,096 windows of 64 bytes: 1.3 s with 8 or 64 rows, 2.3 s with 512; with 4,096 pieces 3.3 s and 7 s). The last
    batch is filled up, which changes nothing: what a token gets depends on none that comes after it.
    """

    @jax.jit
    def by_window(params: Params, tokens: jax.Array) -> jax.Array:
        logits, _ = transformer.apply(params, tokens[:, :-1], config)
        targets = tokens[:, 1:].astype(jnp.int32)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets), axis=-1)

    numbers = evenly(windows, most)
    filled = np.pad(numbers, (0, -len(numbers) % rows), mode="edge").reshape(-1, rows)

    def losses(params: Params) -> npt.NDArray[np.float32]:
        # The device works on one batch while the host reads the next; results are fetched at the end.
        found = [by_window(params, windows.take(some)) for some in filled]
        return np.concatenate(found).astype(np.float32, copy=False)[: len(numbers)]

    return losses
