"""The default task: the transformer of :mod:`islands.model` on bytes of text.

Measured on one core of a 2-core machine without other work, 512 tokens (8 x 64) per inner step, float32:

    model              parameters    inner step    compiles in
    tiny                  123,200         10 ms          2.4 s
    small                 885,888         42 ms          2.6 s
    small, 4 experts    2,657,408        125 ms          3.7 s
    medium              5,180,672        245 ms          3.3 s

Defaults are for four islands on two cores. Four windows of 128 tokens cost half as much again as eight of 64, and
after equal time left the loss higher (1.53 against 1.45 nats). Merged synchronously every 24 steps (outer rate 0.7,
momentum 0.5), four islands of ``small`` go from 5.58 nats to 2.13 in 240 inner steps each and to 1.7 in 600; a
learning rate of 0.001 or 0.002 makes no difference there. One island alone, after 2,500 steps, held-out: 1.43 nats at
0.001, 1.45 at 0.002, 1.55 at 0.004.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from broker.errors import ConfigError
from islands import model as transformer
from islands.corpus import load_corpus
from islands.data import Windows, batches, evenly
from islands.inner import adamw, jax_task, warm_up_cosine
from islands.task import Params, Task

_DTYPES: Final[dict[str, Any]] = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


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
    experts: int = 0,
    top_k: int = 2,
    vocabulary: int = 0,
    dtype: str = "float32",
    held_out_tokens: int = 32_768,
) -> Task:
    """Returns the task that trains a language model.

    Args:
        model: ``tiny``, ``small`` or ``medium``: the shape of the transformer.
        data: Text files, folders and token arrays; none: the Python sources that came with the interpreter.
        batch: Windows per inner step.
        context: Tokens per window.
        learning_rate: Peak of the inner optimizer.
        warm_up_steps: Inner steps to the peak.
        ramp_steps: Inner steps to the full rate of an optimizer that starts afresh in the middle of a run.
        weight_decay: Decoupled, of matrices.
        experts: 0 for a dense model, else feed-forward networks per layer.
        top_k: Experts that a token visits.
        vocabulary: Number of token ids; 0 finds out from the data.
        dtype: Of the parameters: ``float32`` or ``bfloat16``.
        held_out_tokens: About so many tokens are evaluated, evenly spaced over what is held out.

    Raises:
        ConfigError: If an option cannot work; it names the option and the cure.
    """
    if model not in transformer.PRESETS:
        raise ConfigError("model", model, f"must be one of {', '.join(transformer.PRESETS)}")
    if dtype not in _DTYPES:
        raise ConfigError("dtype", dtype, f"must be one of {', '.join(_DTYPES)}")
    for name, value in (("batch", batch), ("context", context), ("held_out_tokens", held_out_tokens)):
        if value < 1:
            raise ConfigError(name, value, "must be at least 1")
    corpus = load_corpus(data, vocabulary=vocabulary)
    config = transformer.ModelConfig(
        vocabulary=corpus.vocabulary, experts=experts, top_k=top_k, **transformer.PRESETS[model]
    )
    train_windows = Windows(corpus.train, context, vocabulary=corpus.vocabulary, sources=corpus.sources)
    held_out = Windows(
        corpus.held_out, context, vocabulary=corpus.vocabulary, sources=f"the held-out twentieth of {corpus.sources}"
    )
    held_out_loss = jax.jit(lambda params, tokens: transformer.cross_entropy(params, tokens, config))

    def evaluate(params: Params) -> float:
        # Whole batches only, of the shape that is trained: one compilation, and each token weighs the same.
        rows = min(batch, len(held_out))
        numbers = evenly(held_out, max(1, held_out_tokens // (rows * context)) * rows)
        pieces = numbers[: len(numbers) // rows * rows].reshape(-1, rows)
        return float(np.mean([float(held_out_loss(params, held_out.take(piece))) for piece in pieces]))

    return jax_task(
        init=lambda key: transformer.init(key, config, _DTYPES[dtype]),
        loss=lambda params, tokens: transformer.loss(params, tokens, config),
        data=lambda share: batches(train_windows, share, batch=batch),
        evaluate=evaluate,
        tokens_per_step=batch * context,
        optimizer=adamw(weight_decay=weight_decay),
        learning_rate=warm_up_cosine(learning_rate, warm_up_steps=warm_up_steps, ramp_steps=ramp_steps),
        describe=f"{batch * context} tokens per step, vocabulary {corpus.vocabulary}",
    )
