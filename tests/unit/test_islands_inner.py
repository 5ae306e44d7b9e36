"""The inner optimizer: one AdamW step against optax, the rate against its formula, and what jit must not do."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import ConfigError
from islands.inner import adamw, jax_task, warm_up_cosine
from islands.task import Schedule


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


def rate_at(step, total, num_steps=10**6, **options):
    rate = warm_up_cosine(0.5, **{"warm_up_steps": 0} | options)
    return float(rate(Schedule(step, total), jnp.int32(num_steps)))


# --- the rate -------------------------------------------------------------------------------------------------


@settings(deadline=None)  # the first example compiles
@given(step=st.integers(0, 2000), warm_up=st.integers(0, 200), total=st.integers(1, 1500))
def test_the_rate_is_the_formula(step, warm_up, total):
    progress = min(1.0, max(0.0, (step - warm_up) / max(total - warm_up, 1)))
    cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
    expected = 0.5 * min(1.0, (step + 1) / max(warm_up, 1)) * cosine
    assert rate_at(step, total, warm_up_steps=warm_up) == pytest.approx(expected, rel=1e-4)


def test_without_a_known_end_the_rate_stays_after_warm_up():
    assert rate_at(0, 0, warm_up_steps=10) == pytest.approx(0.05)
    assert rate_at(9, 0, warm_up_steps=10) == pytest.approx(0.5)
    assert rate_at(10**6, 0, warm_up_steps=10) == pytest.approx(0.5)


def test_past_the_end_the_rate_stays_at_its_final_share():
    assert rate_at(100, 100) == pytest.approx(0.05)
    assert rate_at(5000, 100, final=0.0) == pytest.approx(0.0, abs=1e-7)


def test_a_fresh_optimizer_ramps_up_in_the_middle_of_a_run():
    rates = [rate_at(500, 0, num_steps=n, ramp_steps=4) for n in range(6)]
    assert rates == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5])


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


# --- the step -------------------------------------------------------------------------------------------------


def test_steps_are_those_of_optax_adamw_behind_clipping():
    rate = 0.01
    task = a_task(optimizer=adamw(weight_decay=0.1, clip_norm=0.5), learning_rate=lambda schedule, count: rate)
    reference = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask={"w": True, "b": False}),
    )
    params, state = task.init(3)
    expected = jax.tree.map(jnp.array, params)
    expected_state = reference.init(expected)
    for step in range(5):
        expected_loss, gradients = jax.value_and_grad(loss)(expected, a_batch(step))
        updates, expected_state = reference.update(gradients, expected_state, expected)
        expected = optax.apply_updates(expected, updates)
        params, state, value = task.train(params, state, a_batch(step), Schedule(step, 5))
        assert float(value) == pytest.approx(float(expected_loss), rel=1e-5)
    for name in ("w", "b"):
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-5)
    assert int(state.num_steps) == 5


def test_without_a_rate_the_updates_of_the_optimizer_are_added_as_they_are():
    task = a_task(optimizer=optax.sgd(0.1), learning_rate=None)
    params, state = task.init(0)
    gradients = jax.grad(loss)(params, a_batch())
    expected = {name: np.asarray(params[name] - 0.1 * gradients[name]) for name in params}
    params, state, _ = task.train(params, state, a_batch(), Schedule(0, 0))
    for name in expected:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-6)


def test_progress_is_dynamic_and_the_step_compiles_once():
    traces = []

    def counting_loss(params, batch):
        traces.append(1)
        return loss(params, batch)

    task = a_task(loss=counting_loss)
    params, state = task.init(0)
    for schedule in (Schedule(0, 0), Schedule(1, 100), Schedule(2.5, 90.0), Schedule(np.int64(3), 80)):
        params, state, _ = task.train(params, state, a_batch(), schedule)
    assert len(traces) == 1


def test_the_step_donates_what_it_is_given():
    task = a_task()
    params, state = task.init(0)
    new_params, new_state, _ = task.train(params, state, a_batch(), Schedule(0, 0))
    assert params["w"].is_deleted()
    assert not new_params["w"].is_deleted()
    assert jax.tree.structure(new_state) == jax.tree.structure(state)


def test_bfloat16_parameters_keep_their_dtype_and_float32_moments():
    def init_bfloat16(key):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), init(key))

    task = a_task(init=init_bfloat16)
    params, state = task.init(0)
    params, state, _ = task.train(params, state, a_batch(), Schedule(0, 0))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    moments = [x for x in jax.tree.leaves(state) if x.ndim]
    assert moments
    assert {x.dtype for x in moments} == {jnp.dtype(jnp.float32)}


def test_the_same_seed_gives_the_same_parameters_and_others_others():
    first, second, other = (a_task().init(seed)[0] for seed in (7, 7, 8))
    assert np.array_equal(first["w"], second["w"])
    assert not np.array_equal(first["w"], other["w"])


def test_a_fresh_optimizer_has_seen_no_step():
    task = a_task()
    params, state = task.init(0)
    params, state, _ = task.train(params, state, a_batch(), Schedule(0, 0))
    fresh = task.fresh_optimizer(params)
    assert jax.tree.structure(fresh) == jax.tree.structure(state)
    assert all(float(jnp.abs(x).max()) == 0 for x in jax.tree.leaves(fresh))
    task.train(params, fresh, a_batch(), Schedule(1, 0))  # shares no buffer with the parameters: both are donated


def test_integer_parameters_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"params\['steps'\] = 'int32': jax_task trains floating-point leaves only"):
        a_task(init=lambda key: init(key) | {"steps": jnp.zeros((), jnp.int32)})


def test_the_default_optimizer_needs_a_rate():
    with pytest.raises(ConfigError, match="the default optimizer needs one"):
        a_task(learning_rate=None)
