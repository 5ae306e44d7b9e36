"""The inner optimizers: AdamW against optax, Muon against a slow twin, the rate against its formula, and jit."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.base.errors import ConfigError
from islands.tasks.inner_optimizer import adamw, jax_task, muon, warm_up_cosine
from islands.tasks.task import Schedule

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine


def init(key):
    return {"w": jax.random.normal(key, (4, 3)), "b": jnp.ones((3,))}


def loss(params, batch):
    inputs, outputs = batch
    return jnp.mean((inputs @ params["w"] + params["b"] - outputs) ** 2)


def a_batch(seed=0):
    random = np.random.default_rng(seed)
    return random.standard_normal((8, 4), np.float32), random.standard_normal((8, 3), np.float32)


def a_task(**options):
    settings = {"init": init, "loss": loss, "learning_rate": warm_up_cosine(0.01, warm_up_steps=0)}
    rest = {"data": lambda share: iter(()), "evaluate": lambda params: 0.0, "tokens_per_step": 8}
    return jax_task(**settings | rest | options)


def one_step(**options):
    task = a_task(**options)
    params, opt_state = task.init(0)
    return task.train(params, opt_state, a_batch(), Schedule(0, 10))


def rate_at(step, total, warm_up_steps):
    rate = warm_up_cosine(0.5, warm_up_steps=warm_up_steps)
    return float(rate(Schedule(step, total), jnp.int32(10**6)))


@given(step=st.integers(0, 2000), warm_up=st.integers(0, 200), total=st.integers(1, 1500))
def test_the_rate_is_the_formula(step, warm_up, total):
    progress = min(1.0, max(0.0, (step - warm_up) / max(total - warm_up, 1)))
    cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
    expected = 0.5 * min(1.0, (step + 1) / max(warm_up, 1)) * cosine
    assert rate_at(step, total, warm_up) == pytest.approx(expected, rel=1e-4)


def test_without_a_known_end_the_rate_stays_after_warm_up():
    assert [rate_at(step, 0, 10) for step in (0, 9, 10**6)] == pytest.approx([0.05, 0.5, 0.5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peak": 0.0}, "learning_rate = 0.0"),
        ({"peak": math.nan}, "learning_rate = nan"),
        ({"warm_up_steps": -1}, "warm_up_steps = -1"),
        ({"ramp_steps": -2}, "ramp_steps = -2"),
        ({"final": 1.5}, "final = 1.5"),
    ],
)
def test_a_rate_that_cannot_work_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        warm_up_cosine(**{"peak": 0.1, "warm_up_steps": 0} | change)


def test_steps_are_those_of_optax_adamw_behind_clipping():
    rate = 0.01
    task = a_task(optimizer=adamw(weight_decay=0.1, clip_norm=0.5), learning_rate=lambda schedule, count: rate)
    reference = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask={"w": True, "b": False}),
    )
    params, state = task.init(3)
    expected = jax.tree.map(jnp.array, params)
    expected_state, update = reference.init(expected), jax.jit(reference.update)
    for step in range(5):
        expected_loss, gradients = jax.value_and_grad(loss)(expected, a_batch(step))
        updates, expected_state = update(gradients, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        params, state, value = task.train(params, state, a_batch(step), Schedule(step, 5))
        assert float(value) == pytest.approx(float(expected_loss), rel=1e-5)
    for name in ("w", "b"):
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-5)
    assert int(state.num_steps) == 5


def some_weights(seed):
    random = np.random.default_rng(seed)
    shapes = {"up": (6, 10), "experts": (3, 8, 4), "embed": (12, 6), "norm": (6,)}
    return {name: jnp.asarray(random.standard_normal(shape, np.float32)) for name, shape in shapes.items()}


def orthogonalised(matrix):
    """Newton and Schulz's iteration as Jordan et al. (2024) write it down, one matrix, float64."""
    x = matrix / np.linalg.norm(matrix)
    x = x if x.shape[0] <= x.shape[1] else x.T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x if x.shape == matrix.shape else x.T


def test_muon_moves_every_matrix_along_its_orthogonalised_momentum_and_leaves_all_else_to_adamw():
    options, beta, params = {"weight_decay": 0.1, "clip_norm": math.inf}, 0.95, some_weights(0)
    by_muon, by_adamw = muon(**options), adamw(**options)
    state, adam_state = by_muon.init(params), by_adamw.init(params)
    update, adam_update = jax.jit(by_muon.update), jax.jit(by_adamw.update)
    momentum = {name: np.zeros(params[name].shape) for name in ("up", "experts")}
    for step in range(1, 4):
        gradients = some_weights(step)
        updates, state = update(gradients, state, params)
        others, adam_state = adam_update(gradients, adam_state, params)
        for name, m in momentum.items():
            gradient = np.asarray(gradients[name], np.float64)
            m[...] = beta * m + (1 - beta) * gradient
            ahead = beta * m / (1 - beta ** (step + 1)) + (1 - beta) * gradient / (1 - beta**step)
            each = ahead.reshape(-1, *ahead.shape[-2:])
            moved = 0.2 * math.sqrt(max(ahead.shape[-2:])) * np.stack([orthogonalised(x) for x in each])
            expected = moved.reshape(ahead.shape) + 0.1 * np.asarray(params[name])
            np.testing.assert_allclose(updates[name], expected, rtol=2e-3, atol=2e-4)
        for name in ("embed", "norm"):
            np.testing.assert_allclose(updates[name], others[name], rtol=1e-6)


def test_a_name_keeps_a_matrix_with_adam():
    params, gradients = some_weights(0), some_weights(1)
    updates, expected = (
        jax.jit(each.update)(gradients, each.init(params), params)[0] for each in (muon(adam="up|embed"), adamw())
    )
    np.testing.assert_allclose(updates["up"], expected["up"], rtol=1e-6)
    assert float(jnp.abs(updates["experts"] - expected["experts"]).max()) > 0.1


def test_without_a_rate_the_updates_of_the_optimizer_are_added_as_they_are():
    task = a_task(optimizer=optax.sgd(0.1), learning_rate=None)
    params, state = task.init(0)
    gradients = jax.grad(loss)(params, a_batch())
    expected = {name: np.asarray(params[name] - 0.1 * gradients[name]) for name in params}
    params, _, _ = task.train(params, state, a_batch(), Schedule(0, 0))
    for name in expected:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-6)


def test_progress_is_dynamic_and_the_step_compiles_once_and_donates_what_it_is_given():
    traces = []

    def counting_loss(params, batch):
        traces.append(1)
        return loss(params, batch)

    task = a_task(loss=counting_loss)
    given, given_state = task.init(0)
    for schedule in (Schedule(0, 0), Schedule(1, 100), Schedule(2.5, 90.0), Schedule(np.int64(3), 80)):
        params, state, _ = task.train(given, given_state, a_batch(), schedule)
        assert given["w"].is_deleted()
        assert jax.tree.structure(state) == jax.tree.structure(given_state)
        given, given_state = params, state
    assert not params["w"].is_deleted()
    assert len(traces) == 1


def test_bfloat16_parameters_keep_their_dtype_and_float32_moments():
    params, state, _ = one_step(init=lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), init(key)))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {jnp.dtype(jnp.float32)}


def test_integer_parameters_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"params\['steps'\] = 'int32': jax_task trains floating-point leaves only"):
        a_task(init=lambda key: init(key) | {"steps": jnp.zeros((), jnp.int32)})


def test_the_default_optimizer_needs_a_rate():
    with pytest.raises(ConfigError, match="the default optimizer needs one"):
        a_task(learning_rate=None)


def test_a_loss_with_aux_trains_as_without():
    plain, _, value = one_step()
    with_aux, _, other = one_step(loss=lambda *of: (loss(*of), {"accuracy": jnp.ones((3,))}), has_aux=True)
    assert value.shape == ()
    assert float(value) == float(other)
    assert all(np.array_equal(plain[name], with_aux[name]) for name in plain)


@pytest.mark.parametrize(
    ("returned", "has_aux", "told"),
    [
        (lambda x: (x, {"seen": 1}), False, r"tuple of 2: float32 array of shape \(\), dict'.*has_aux=True where it"),
        (lambda x: x[None] * jnp.ones(3), False, r"float32 array of shape \(3,\)': must return a scalar, the mean"),
        (lambda x: None, False, "NoneType': must return a scalar"),
        (lambda x: {"loss": x}, False, "dict': must return a scalar"),
        (lambda x: jnp.int32(3), False, r"int32 array of shape \(\)': must return a scalar"),
        (lambda x: x, True, r"float32 array of shape \(\)': must return \(loss, aux\) with has_aux=True"),
        (lambda x: (x, 1, 2), True, "tuple of 3: .*must return"),
        (lambda x: (x[None], 1), True, r"float32 array of shape \(1,\)': must return a scalar"),
    ],
)
def test_a_loss_that_returns_something_else_is_refused_with_what_it_returned_and_the_cure(returned, has_aux, told):
    with pytest.raises(ConfigError, match=f"^loss = '{told}"):
        one_step(loss=lambda *of: returned(loss(*of)), has_aux=has_aux)


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ({"accuracy": "up"}, "must be 'max' where more of accuracy is better"),
        ({"loss": "max"}, "must have another name"),
    ],
)
def test_metrics_that_cannot_be_are_refused(metrics, told):
    with pytest.raises(ConfigError, match=f"metrics = {metrics}: {told}"):
        a_task(metrics=metrics)
