"""A model of Hugging Face in Flax NNX: Llama's architecture, filled from its directory by ``islands.load``.

    .venv/bin/python -m examples.nnx_llama models/smollm

Modules have the names that the file has, so that :func:`name_in_file` is short. A loop trains it as any module of NNX
(``examples/flax_nnx.py``); the mapping is all that differs. The file has the matrix of a linear layer as (out, in).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import islands


class Attention(nnx.Module):
    """Causal attention over rotated queries and keys; groups of heads share keys and values."""

    def __init__(self, config: dict[str, Any], rngs: nnx.Rngs) -> None:
        width, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.size, self.groups = config.get("head_dim") or width // self.heads, config["num_key_value_heads"]
        self.theta = (config.get("rope_parameters") or config)["rope_theta"]
        outs = (heads * self.size for heads in (self.heads, self.groups, self.groups))
        self.q_proj, self.k_proj, self.v_proj = (nnx.Linear(width, n, use_bias=False, rngs=rngs) for n in outs)
        self.o_proj = nnx.Linear(self.heads * self.size, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Attends over ``x``: float (batch, tokens, width)."""
        q, k, v = (each(x).reshape(*x.shape[:2], -1, self.size) for each in (self.q_proj, self.k_proj, self.v_proj))
        angles = jnp.arange(x.shape[1])[:, None] * self.theta ** (-jnp.arange(0, self.size, 2) / self.size)
        cos, sin = (jnp.tile(f(angles), 2)[:, None] for f in (jnp.cos, jnp.sin))
        q, k = (each * cos + jnp.roll(each, self.size // 2, -1) * sin * self._signs() for each in (q, k))
        return self.o_proj(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*x.shape[:2], -1))

    def _signs(self) -> jax.Array:
        return jnp.where(jnp.arange(self.size) < self.size // 2, -1.0, 1.0)


class Mlp(nnx.Module):
    """A gated layer."""

    def __init__(self, config: dict[str, Any], rngs: nnx.Rngs) -> None:
        width, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = (nnx.Linear(width, inner, use_bias=False, rngs=rngs) for _ in range(2))
        self.down_proj = nnx.Linear(inner, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Attention and a gated layer, each behind a norm and around it."""

    def __init__(self, config: dict[str, Any], rngs: nnx.Rngs) -> None:
        norms = (nnx.RMSNorm(config["hidden_size"], epsilon=config["rms_norm_eps"], rngs=rngs) for _ in range(2))
        self.input_layernorm, self.post_attention_layernorm = norms
        self.self_attn, self.mlp = Attention(config, rngs), Mlp(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    """Embeddings, which are the head, too, and layers between; as SmolLM and small models of Llama 3 are."""

    def __init__(self, config: dict[str, Any], rngs: nnx.Rngs) -> None:
        width = config["hidden_size"]
        self.embed_tokens = nnx.Embed(config["vocab_size"], width, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config["num_hidden_layers"])])
        self.norm = nnx.RMSNorm(width, epsilon=config["rms_norm_eps"], rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Returns logits, float (batch, tokens, vocabulary), of token ids (batch, tokens)."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.embed_tokens.attend(self.norm(x))


def name_in_file(name: str) -> str:
    """Returns the name in the file: ``layers/0/mlp/up_proj/kernel`` is ``model.layers.0.mlp.up_proj.weight``."""
    module = name.removesuffix("/value").rpartition("/")[0]
    return f"model.{module.replace('/', '.')}.weight"


def turned(path: Any, leaf: Any) -> Any:
    """Turns the matrix of a linear layer between (in, out) here and (out, in) in the file."""
    return leaf.T if "kernel" in jax.tree_util.keystr(path) else leaf


def loaded(directory: Path) -> Llama:
    """Returns the model of a directory of Hugging Face."""
    config = json.loads((directory / "config.json").read_text())
    model = Llama(config, nnx.Rngs(0))
    like = jax.tree_util.tree_map_with_path(turned, nnx.state(model, nnx.Param))
    params = islands.load(directory, like=like, names=name_in_file)
    nnx.update(model, jax.tree_util.tree_map_with_path(turned, params))
    return model


if __name__ == "__main__":
    logits = nnx.jit(Llama.__call__)(loaded(Path(sys.argv[1])), jnp.arange(8)[None])
    print(f"logits {logits.shape}, the next token is {int(logits[0, -1].argmax())}")
