"""The adaptive gain of the laboratory, against the formula."""

import numpy as np
import pytest

from aggregator.merge.outer_step import seeded
from broker.wire.errors import ConfigError
from ops.lab.gain import cosine, outer_step_of
from ops.lab.settings import cell_settings


def test_each_step_is_lengthened_by_the_cosine_with_the_one_before():
    rng = np.random.default_rng(3)
    start, *deltas = rng.normal(size=(5, 70)).astype(np.float32)
    deltas[2] = -deltas[1]  # turns back: with c = 1 no step at all
    state, expected, last = seeded(start), start.astype(np.float64), None
    outer_step = outer_step_of(0.5, 0.0, 1.0)
    for delta in deltas:
        gain = 1.0 if last is None else 1 + float(delta @ last / np.linalg.norm(delta) / np.linalg.norm(last))
        expected -= 0.5 * gain * delta
        before, state, last = state, outer_step(state, delta), delta
        assert np.allclose(state.params, expected, atol=1e-5)
        if delta is deltas[2]:
            assert np.allclose(state.params, before.params, atol=1e-6)
            break
    assert state.version == 3


def test_without_adaptation_it_is_the_outer_step_of_production_bit_for_bit():
    rng = np.random.default_rng(4)
    one = two = seeded(rng.normal(size=50).astype(np.float32))
    for delta in rng.normal(size=(3, 50)).astype(np.float32):
        one, two = outer_step_of(1.0, 0.0, 0.0)(one, delta), outer_step_of(1.0, 0.0, 1e-30)(two, delta)
    assert np.array_equal(one.params, two.params)


def test_the_cosine_of_nothing_is_nothing():
    assert cosine(np.zeros(3, np.float32), np.ones(3, np.float32)) == 0.0
    assert cosine(np.full(3, 2, np.float32), np.ones(3, np.float32)) == pytest.approx(1.0)


def test_a_gain_beside_a_momentum_is_refused():
    with pytest.raises(ConfigError, match="needs outer_momentum = 0"):
        cell_settings({"outer_adaptation": 0.5, "outer_momentum": 0.5})
    with pytest.raises(ConfigError, match="between 0 and 1"):
        cell_settings({"outer_adaptation": 1.5})
