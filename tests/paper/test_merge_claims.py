"""What the papers say about merging, a test per claim."""

import math

import numpy as np
import pytest

from aggregator.interface.events import Part
from aggregator.merge.fragment_state import seeded
from aggregator.merge.kernels import merge_fragment
from aggregator.merge.outer_step import make_outer_step
from aggregator.rules.staleness import weighed
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.messages import Codec
from broker.wire.ranges import StepRange
from broker.wire.tensors import encode_tensor
from tests.aggregator_hand import NEWEST, offer

ELEMENTS = 100_000
STEPS = StepRange(from_step=0, to_step=24, from_tokens=0, to_tokens=24_000)


def merged(deltas, kind):
    parts = [
        Part(
            island_id=f"island-{i}",
            steps=STEPS,
            payload=(encode_tensor(delta, Codec.F32),),
            token_weight=1.0,
            staleness_weight=1.0,
        )
        for i, delta in enumerate(deltas)
    ]
    return merge_fragment([TensorSpec(name="x", shape=(ELEMENTS,), dtype="float32", kind=kind)], parts)


def independent(count, length=316.0):
    rng = np.random.default_rng(0)
    deltas = [rng.standard_normal(ELEMENTS, dtype=np.float32) for _ in range(count)]
    return [d * np.float32(length / np.linalg.norm(d)) for d in deltas]


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_rda_keeps_the_length_of_independent_pseudo_gradients_and_the_plain_mean_shrinks_it(count):
    """Decoupled DiLoCo, appendix D.2: the reason for RDA. Of eight of length 316 the mean has 111."""
    deltas = independent(count)
    assert merged(deltas, Kind.RDA).norm == pytest.approx(316, rel=0.02)
    assert merged(deltas, Kind.MEAN).norm == pytest.approx(316 / math.sqrt(count), rel=0.02)


def test_rda_of_equal_pseudo_gradients_is_that_pseudo_gradient():
    """Decoupled DiLoCo, appendix D.2: agreement is not amplified."""
    (delta,) = independent(1)
    np.testing.assert_allclose(merged([delta] * 4, Kind.RDA).delta, delta, rtol=1e-5)


def test_merge_weight_is_tokens_times_tokens_per_step():
    """Decoupled DiLoCo, algorithm 2, line 7: w = n * (n / s), without any discount for staleness (exponent 0)."""
    weights = weighed([offer("fast", 4_800, 24), offer("slow", 1_200, 6, staleness=5)], NEWEST, exponent=0)
    assert [w.token_weight for w in weights] == [4_800 * 200, 1_200 * 200]
    assert [w.merge_weight for w in weights] == pytest.approx([0.8, 0.2])


def test_the_first_outer_step_moves_by_eta_times_one_plus_mu():
    """DiLoCo, algorithm 1, with Nesterov momentum from rest: b = Delta, Theta <- Theta - eta * (Delta + mu * b)."""
    delta = np.full(8, 2.0, np.float32)
    state = make_outer_step(0.7, 0.9)(seeded(np.zeros(8, np.float32)), delta)
    np.testing.assert_allclose(state.params, -0.7 * (2.0 + 0.9 * 2.0), rtol=1e-6)


def test_with_one_island_eta_one_and_no_momentum_the_global_model_is_the_islands():
    """DiLoCo, section 2: the outer gradient is the difference, so plain SGD at rate 1 replaces the parameters."""
    theta, local = independent(2)
    delta = merged([theta - local], Kind.RDA).delta
    state = make_outer_step(1.0, 0.0)(seeded(theta), delta)
    np.testing.assert_allclose(state.params, local, rtol=1e-5, atol=1e-5)
