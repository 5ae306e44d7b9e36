"""The outer step, against plain optax and against the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from aggregator.merge.fragment_state import FragmentState, seeded
from aggregator.merge.outer_step import make_outer_step
from aggregator.merge.passes import PIECE
from broker.base.errors import ConfigError, LocalProtocolError
from tests.unit.aggregator_merge.test_merge import random

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine

#: XLA fuses multiply-adds, which round once where the plain formula rounds twice: an ulp or two on values around 1.
TOLERANCE = {"rtol": 3e-6, "atol": 3e-6}
STEP = make_outer_step(0.7, 0.5)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def nesterov(params, trace, merged, eta, mu):
    trace = merged + mu * trace
    return params - eta * (merged + mu * trace), trace


def test_ten_steps_equal_plain_optax_on_the_tree():
    tree = {"a": jnp.asarray(random((7, 5), 1)), "b": {"c": jnp.asarray(random(11, 2))}}
    optimizer = optax.sgd(0.7, momentum=0.5, nesterov=True)
    opt_state = optimizer.init(tree)
    state = seeded(flat(tree))
    for seed in range(10):
        merged = jax.tree.map(lambda leaf, s=seed: jnp.asarray(random(leaf.shape, 100 + s)), tree)
        state = STEP(state, flat(merged))
        updates, opt_state = optimizer.update(merged, opt_state, tree)
        tree = optax.apply_updates(tree, updates)
        np.testing.assert_allclose(state.params, flat(tree), **TOLERANCE)
    assert state.version == 10


@pytest.mark.parametrize(("eta", "mu"), [(0.7, 0.9), (1.0, 0.0)])
def test_any_size_equals_the_formula(eta, mu):
    step = make_outer_step(eta, mu)
    for size in (1, 2, 100, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 17):
        params, trace, merged = (random(size, seed) for seed in (1, 2, 3))
        state = step(FragmentState(params=params, momentum=trace, version=4), merged)
        expected_params, expected_trace = nesterov(params, trace, merged, np.float32(eta), np.float32(mu))
        np.testing.assert_allclose(state.params, expected_params, **TOLERANCE)
        np.testing.assert_allclose(state.momentum, expected_trace, **TOLERANCE)
        assert state.version == 5


def test_the_old_state_stays_as_it_was_since_its_bytes_may_be_on_their_way():
    old = FragmentState(params=random(PIECE + 5, 1), momentum=random(PIECE + 5, 2), version=0)
    copies = old.params.copy(), old.momentum.copy()
    new = STEP(old, random(PIECE + 5, 3))
    STEP(new, random(PIECE + 5, 4))
    assert np.array_equal(old.params, copies[0])
    assert np.array_equal(old.momentum, copies[1])
    assert not np.shares_memory(new.params, old.params)


@pytest.mark.parametrize("merged", [np.zeros(3, np.float32), np.zeros((2, 2), np.float32), np.zeros(4)])
def test_arrays_that_do_not_fit_are_refused_by_name(merged):
    with pytest.raises(LocalProtocolError, match=r"merged of an outer step is .*, must be float32 of shape \(4,\)"):
        STEP(seeded(np.zeros(4, np.float32)), merged)


@pytest.mark.parametrize(
    ("eta", "mu", "field"),
    [(0.0, 0.5, "outer_learning_rate"), (0.7, 1.0, "outer_momentum"), (0.7, -0.1, "outer_momentum")],
)
def test_settings_that_cannot_work_are_refused(eta, mu, field):
    with pytest.raises(ConfigError, match=field):
        make_outer_step(eta, mu)
