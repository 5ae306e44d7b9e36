"""A decoder-only transformer in plain JAX, dense or mixture-of-experts.

    h    = embed[tokens]
    h    = h + attention(rms_norm(h))        for each layer: causal, rotary positions
    h    = h + feed_forward(rms_norm(h))                     SwiGLU, or top-k of ``experts`` of them
    logits = rms_norm(h) @ embed.T           tied embeddings

Parameters are nested dicts of float arrays; ``layers`` is a list, one dict per layer, and the loop over it is
unrolled. Measured on one CPU core with the preset ``small``, against stacked layers under ``lax.scan``: a step takes
42 ms, not 65, and compiles in 2.6 s, not 4.0; and fragments of even size are easier to cut from more tensors.

Nothing here knows of islands, shares or fragments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp

from broker.base.errors import ConfigError

#: A nested dict of arrays, as :func:`init` returns it.
Params = dict[str, Any]

_NORM_EPSILON: Final = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one model.

    Attributes:
        vocabulary: Number of token ids.
        width: Size of the residual stream (d_model).
        depth: Number of layers.
        heads: Attention heads; each is ``width / heads`` wide, an even number for the rotary pairs.
        hidden: Width of the gated feed-forward network, or of each expert.
        experts: 0 for a dense model; otherwise feed-forward networks per layer.
        top_k: Experts that each token visits.
        capacity: Places per expert, as a multiple of an even split; a token beyond them skips that expert.
        balance: Weight of the load-balancing loss.
        rotary_base: Longest wavelength of the rotary positions, in tokens over 2 pi.
    """

    vocabulary: int = 256
    width: int
    depth: int
    heads: int
    hidden: int
    experts: int = 0
    top_k: int = 2
    capacity: float = 1.5
    balance: float = 0.01
    rotary_base: float = 10_000.0

    def __post_init__(self) -> None:
        """Checks the relations between the fields.

        Raises:
            ConfigError: If no such model can be built.
        """
        for name in ("vocabulary", "width", "depth", "heads", "hidden"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(name, value, "must be at least 1")
        if self.width % (2 * self.heads):
            raise ConfigError("width", self.width, f"must be a multiple of 2 x heads = {2 * self.heads} (rotary pairs)")
        if self.experts < 0:
            raise ConfigError("experts", self.experts, "0 for a dense model, or the number of experts per layer")
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ConfigError("top_k", self.top_k, f"must be from 1 to experts = {self.experts}")
        if self.experts and self.capacity < 1.0:
            raise ConfigError("capacity", self.capacity, "must be at least 1: every token needs a place on average")


#: Sizes by name; :mod:`islands.tasks.language` has their speed on two cores.
PRESETS: Final[dict[str, dict[str, int]]] = {
    "tiny": {"width": 64, "depth": 2, "heads": 2, "hidden": 192},
    "small": {"width": 128, "depth": 4, "heads": 4, "hidden": 384},
    "medium": {"width": 256, "depth": 6, "heads": 4, "hidden": 768},
    "large": {"width": 512, "depth": 6, "heads": 8, "hidden": 1536},
}


def shape_of(model: str) -> dict[str, int]:
    """Returns the shape of a preset, or of ``WIDTHxDEPTH``.

    Heads of the latter are 64 wide, and feed-forward networks three times as wide as the model.

    Raises:
        ConfigError: It is neither.
    """
    if model in PRESETS:
        return PRESETS[model]
    width, _, depth = model.partition("x")
    if not (width.isdecimal() and depth.isdecimal()):
        raise ConfigError("model", model, f"must be one of {', '.join(PRESETS)}, or WIDTHxDEPTH such as 384x5")
    return {"width": int(width), "depth": int(depth), "heads": max(1, int(width) // 64), "hidden": 3 * int(width)}


def init(key: jax.Array, config: ModelConfig, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
    """Returns fresh parameters, all of ``dtype``.

    Weights are normal with variance 1 / fan-in; the two projections that write into the residual stream are scaled
    down by sqrt(2 * depth), so that its variance does not grow with depth (GPT-2). Embeddings have a standard
    deviation of 0.02, small enough that the first loss is ln(vocabulary).
    """
    into_residual = 1 / math.sqrt(2 * config.depth)
    width, hidden, copies = config.width, config.hidden, max(config.experts, 1)
    per_layer = 4 * width**2 + 3 * copies * width * hidden + width * config.experts
    # One draw for all weights, cut into pieces: a draw per tensor takes five times as long to compile.
    noise = jax.random.normal(key, (config.vocabulary * width + config.depth * per_layer,), jnp.float32)
    drawn = 0

    def normal(*shape: int, deviation: float | None = None) -> jax.Array:
        nonlocal drawn
        piece = noise[drawn : drawn + math.prod(shape)].reshape(shape)
        drawn += math.prod(shape)
        return (piece * (1 / math.sqrt(shape[-2]) if deviation is None else deviation)).astype(dtype)

    def feed_forward(*lead: int) -> Params:
        return {
            "gate": normal(*lead, width, hidden),
            "up": normal(*lead, width, hidden),
            "down": normal(*lead, hidden, width, deviation=into_residual / math.sqrt(hidden)),
        }

    def layer() -> Params:
        params: Params = {
            "attention": {
                "norm": jnp.ones((width,), dtype),
                "query": normal(width, width),
                "key": normal(width, width),
                "value": normal(width, width),
                "output": normal(width, width, deviation=into_residual / math.sqrt(width)),
            },
            "mlp": {"norm": jnp.ones((width,), dtype)},
        }
        if config.experts:
            params["mlp"] |= {"router": normal(width, config.experts), "experts": feed_forward(config.experts)}
        else:
            params["mlp"] |= feed_forward()
        return params

    return {
        "embed": normal(config.vocabulary, width, deviation=0.02),
        "layers": [layer() for _ in range(config.depth)],
        "norm": jnp.ones((width,), dtype),
    }


def loss(params: Params, tokens: jax.Array, config: ModelConfig) -> jax.Array:
    """Returns the mean nats per predicted token, plus the balance term of a mixture of experts.

    Args:
        params: Parameters as from :func:`init`.
        tokens: Integers, shape (batch, context + 1).
        config: The model's shape.
    """
    logits, balance = apply(params, tokens[:, :-1], config)
    return _cross_entropy(logits, tokens[:, 1:]) + config.balance * balance


def apply(params: Params, tokens: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Returns float32 logits (batch, context, vocabulary), and the layers' mean balance loss (0: dense)."""
    rotation = _rotary(tokens.shape[1], config)
    # One row per token throughout, and (batch, context) apart only inside attention: with a matrix on either side the
    # weight gradients are plain matrix products, which halved the backward pass of the feed-forward part on CPU.
    # Looked up in float32, since the gradient adds up all tokens in the dtype of the table: of 16,384 tokens it was off
    # by a third in bfloat16.
    embed = params["embed"]
    hidden = embed.astype(jnp.float32)[tokens.reshape(-1).astype(jnp.int32)].astype(embed.dtype)
    balance = jnp.zeros((), jnp.float32)
    for layer in params["layers"]:
        hidden = hidden + _attention(layer["attention"], hidden, rotation, tokens.shape, config)
        update, layer_balance = _feed_forward(layer["mlp"], hidden, config)
        hidden = hidden + update
        balance = balance + layer_balance / config.depth
    hidden = _rms_norm(hidden, params["norm"])
    logits = jnp.dot(hidden, embed.T, preferred_element_type=jnp.float32)
    return logits.reshape(*tokens.shape, config.vocabulary), balance


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean of -log softmax(logits)[target]; picks the logit before, which saves a pass."""
    chosen = jnp.take_along_axis(logits, targets[..., None].astype(jnp.int32), axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Divides by the root mean square over the last axis in float32, rescales (Zhang and Sennrich, 2019)."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _NORM_EPSILON)
    normed: jax.Array = wide.astype(x.dtype) * scale
    return normed


def _rotary(context: int, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of position times frequency, float32 (context, 1, head width / 2) (Su et al., 2021)."""
    half = config.width // config.heads // 2
    frequency = config.rotary_base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(context, dtype=jnp.float32)[:, None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (x[i], x[i + half]) of each head; ``x`` is (batch, context, heads, head width)."""
    cosine, sine = rotation
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cosine - right * sine, left * sine + right * cosine], axis=-1).astype(x.dtype)


def _attention(
    params: Params,
    hidden: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    shape: tuple[int, ...],
    config: ModelConfig,
) -> jax.Array:
    """Causal multi-head self-attention; ``hidden``: (batch * context, width), ``shape``: (batch, context)."""
    batch, context = shape
    head_width = config.width // config.heads
    x = _rms_norm(hidden, params["norm"])

    def project(name: str) -> jax.Array:
        return jnp.dot(x, params[name]).reshape(batch, context, config.heads, head_width)

    query, key, value = _rotate(project("query"), rotation), _rotate(project("key"), rotation), project("value")
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) / math.sqrt(head_width)
    causal = jnp.tril(jnp.ones((context, context), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(hidden.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch * context, config.width)
    return jnp.dot(mixed, params["output"])


def _feed_forward(params: Params, hidden: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Returns the update of the residual stream and the balance loss of this layer."""
    x = _rms_norm(hidden, params["norm"])
    if not config.experts:
        return _swiglu(params, x), jnp.zeros((), jnp.float32)
    return _mixture(params, x, config)


def _swiglu(params: Params, x: jax.Array) -> jax.Array:
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020); any leading axes of the weights match those of ``x``."""
    return jnp.matmul(jax.nn.silu(x @ params["gate"]) * (x @ params["up"]), params["down"])


def _mixture(params: Params, x: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Sends each token through its ``top_k`` experts; ``x``: (tokens, width).

    Shapes are fixed: an expert has ``places`` for tokens, filled in order; later tokens skip it. Gathering
    each expert's tokens and adding the results back costs O(tokens * top_k), where the dispatch tensors of GShard
    (Lepikhin et al., 2020) cost O(tokens * experts * places).

    The balance loss is that of Switch Transformers (Fedus et al., 2021), eq. 4: experts * sum(share of the choices *
    mean probability); 1 when even. It sees the tokens of this island alone.
    """
    count = x.shape[0]
    places = math.ceil(config.capacity * config.top_k * count / config.experts)
    probability = jax.nn.softmax((x @ params["router"]).astype(jnp.float32), axis=-1)
    top, chosen = jax.lax.top_k(probability, config.top_k)
    gates = (top / jnp.sum(top, axis=-1, keepdims=True)).astype(x.dtype)

    # Places are given out in the order of the tokens, so what a token gets depends on none that comes after it.
    expert = chosen.reshape(-1)
    token = jnp.repeat(jnp.arange(count), config.top_k)
    one_hot = jax.nn.one_hot(expert, config.experts, dtype=jnp.int32)
    place = jnp.sum((jnp.cumsum(one_hot, axis=0) - 1) * one_hot, axis=-1)
    # An index out of bounds is dropped by scatter and read as zero by gather: full experts need no mask.
    slot = jnp.where(place < places, expert * places + place, config.experts * places)
    occupant = jnp.full((config.experts * places,), count).at[slot].set(token, mode="drop")
    gathered = x.at[occupant].get(mode="fill", fill_value=0).reshape(config.experts, places, -1)
    results = _swiglu(params["experts"], gathered).reshape(config.experts * places, -1)
    returned = results.at[slot].get(mode="fill", fill_value=0) * gates.reshape(-1, 1)
    update = jnp.sum(returned.reshape(count, config.top_k, -1), axis=1)

    share = jnp.mean(one_hot.astype(jnp.float32), axis=0)
    return update, config.experts * jnp.sum(share * jnp.mean(probability, axis=0))
