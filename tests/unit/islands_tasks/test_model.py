"""The transformer against its definition: shapes, causality, rotary positions, experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from broker.base.errors import ConfigError
from islands.tasks import model
from islands.tasks.model import PRESETS, ModelConfig

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine

DENSE = ModelConfig(vocabulary=256, width=32, depth=1, heads=2, hidden=48)
# Room for every token at every expert, so that nothing is dropped and the slow twin is exact.
EXPERTS = ModelConfig(vocabulary=256, width=32, depth=1, heads=2, hidden=48, experts=4, top_k=2, capacity=4.0)
TOKENS = np.random.default_rng(0).integers(0, 256, (3, 12 + 1)).astype(np.uint8)
init, apply = jax.jit(model.init, static_argnums=(1, 2)), jax.jit(model.apply, static_argnums=2)


def params_of(config, dtype=jnp.float32):
    return init(jax.random.key(0), config, dtype)


def logits_of(params, tokens, config):
    return np.asarray(apply(params, tokens[:, :-1], config)[0])


@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_token_changes_no_prediction_before_it(config):
    params, changed = params_of(config), TOKENS.copy()
    changed[:, 7] += 1
    before, after = logits_of(params, TOKENS, config), logits_of(params, changed, config)
    np.testing.assert_allclose(after[:, :7], before[:, :7], atol=1e-5)  # float32 sums in another order
    assert np.abs(after[:, 7:] - before[:, 7:]).max() > 1e-3


def test_cross_entropy_is_minus_the_mean_log_probability_of_the_next_token():
    params = params_of(DENSE)
    log_probability = np.asarray(jax.nn.log_softmax(logits_of(params, TOKENS, DENSE)))
    expected = -np.mean([log_probability[b, t, TOKENS[b, t + 1]] for b in range(3) for t in range(12)])
    found = jax.jit(model.loss, static_argnums=2)(params, TOKENS, DENSE)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_the_mixture_is_the_gated_sum_of_the_chosen_experts():
    mlp = params_of(EXPERTS)["layers"][0]["mlp"]
    x = np.random.default_rng(2).normal(size=(20, EXPERTS.width)).astype(np.float32)
    update, balance = jax.jit(model._mixture, static_argnums=2)(mlp, x, EXPERTS)
    probability = np.asarray(jax.nn.softmax(x @ mlp["router"]))
    expected, choices = np.zeros((20, EXPERTS.width)), np.zeros(EXPERTS.experts)
    for token in range(20):
        top = np.argsort(-probability[token])[: EXPERTS.top_k]
        for expert in top:
            weights = {name: np.asarray(w[expert]) for name, w in mlp["experts"].items()}
            gate = probability[token, expert] / probability[token, top].sum()
            hidden = np.asarray(jax.nn.silu(x[token] @ weights["gate"])) * (x[token] @ weights["up"])
            expected[token] += gate * (hidden @ weights["down"])
            choices[expert] += 1
    np.testing.assert_allclose(update, expected, atol=1e-5)
    assert float(balance) == pytest.approx(EXPERTS.experts * np.sum(choices / 40 * probability.mean(0)), rel=1e-5)


def test_a_loss_in_bfloat16_and_its_gradients_are_those_in_float32():
    """A thousand tokens add to each row of the embeddings: added in bfloat16 their gradient is off by a quarter."""
    tokens = np.random.default_rng(0).integers(0, 4, (64, 64 + 1)).astype(np.uint8)
    loss_and_gradients = jax.jit(jax.value_and_grad(model.loss), static_argnums=2)
    params = params_of(DENSE, jnp.bfloat16)
    loss, narrow = loss_and_gradients(params, tokens, DENSE)
    exact, wide = loss_and_gradients(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), tokens, DENSE)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, narrow))} == {jnp.dtype(jnp.bfloat16)}
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(float(exact), rel=0.01)
    for ours, theirs in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        assert np.linalg.norm(ours.astype(np.float32) - theirs) < 0.02 * np.linalg.norm(theirs)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("experts", [0, 4])
def test_presets_are_valid_and_use_every_number_drawn(preset, experts):
    config = ModelConfig(**PRESETS[preset], experts=experts)
    shapes = jax.eval_shape(lambda key: model.init(key, config), jax.random.key(0))
    assert shapes["embed"].shape == (256, config.width)
    assert len(shapes["layers"]) == config.depth


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 33}, "width = 33"),
        ({"depth": 0}, "depth = 0"),
        ({"experts": -1}, "experts = -1"),
        ({"experts": 2, "top_k": 3}, "top_k = 3"),
        ({"experts": 2, "capacity": 0.5}, "capacity = 0.5"),
    ],
)
def test_a_shape_that_cannot_work_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**{"width": 32, "depth": 1, "heads": 2, "hidden": 8} | change)
