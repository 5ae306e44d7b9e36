"""Versions as rounded differences: what is added is the version, and what rounding left out is never lost."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from aggregator.interface.events import Merge, Part
from aggregator.merge import versions
from aggregator.merge.fragment_state import seeded
from broker.base.errors import LocalProtocolError
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.messages import Codec
from broker.wire.ranges import StepRange
from broker.wire.tensors import added, decode_tensor, difference, encode_tensor, fragment_digest
from tests.profiles import examples

ROUNDING = [Codec.BF16, Codec.INT8, Codec.INT4]
SHAPES = [(300,), (7, 40), ()]
SIZE = 581
TENSORS = tuple(TensorSpec(name=f"t{n}", shape=s, dtype="float32", kind=Kind.MEAN) for n, s in enumerate(SHAPES))

vectors = hnp.arrays(np.float32, SIZE, elements=st.floats(-1e3, 1e3, width=32))


@examples(30)
@given(exact=vectors, base=vectors, codec=st.sampled_from(list(Codec)))
def test_the_sum_is_one_product_and_one_float32_sum_for_each_element(exact, base, codec):
    payload = difference(exact, base, SHAPES, codec)
    assert [encoded.shape for encoded in payload] == SHAPES
    slow, start = base.copy(), 0
    for encoded in payload:
        for value in decode_tensor(encoded).reshape(-1):
            slow[start] = np.float32(slow[start] + value)
            start += 1
    assert np.array_equal(added(base, payload), slow)


def test_a_difference_of_another_size_is_refused():
    payload = difference(np.ones(SIZE, np.float32), np.zeros(SIZE, np.float32), SHAPES, Codec.INT8)
    with pytest.raises(LocalProtocolError, match="of 581 elements does not fit a version of 580"):
        added(np.zeros(SIZE - 1, np.float32), payload)


def merge_of(number, codec, values, outer_rule=(1.0, 0.0)):
    part = Part(
        island_id="a",
        steps=StepRange(from_step=0, to_step=1, from_tokens=0, to_tokens=1),
        payload=tuple(encode_tensor(np.asarray(each, np.float32), Codec.F32) for each in values),
        token_weight=1.0,
        staleness_weight=1.0,
    )
    return Merge(
        round_id=number,
        fragment_id=0,
        fragment_version=number,
        parts=(part,),
        outer_rule=outer_rule,
        version_codec=codec,
    )


def drawn(rng):
    return [rng.normal(scale=0.01, size=shape) for shape in SHAPES]


@pytest.mark.parametrize("codec", ROUNDING)
def test_receivers_agree_bit_for_bit_and_stay_as_close_to_the_exact_parameters_as_one_rounding(codec):
    """Over 30 versions: without the residual, errors of rounding would add up; with it, only the last one is left."""
    rng = np.random.default_rng(0)
    begun = seeded(rng.normal(size=SIZE).astype(np.float32))
    rounded, exact, receiver = begun, begun, begun.params
    for number in range(1, 31):
        action = merge_of(number, codec, drawn(rng), outer_rule=(0.7, 0.9))
        (rounded, digest, step, *_), _ = versions.merge(TENSORS, action, rounded)
        whole = dataclasses.replace(action, version_codec=Codec.F32)
        (exact, _, none, *_), _ = versions.merge(TENSORS, whole, exact)
        assert none is None
        receiver = added(receiver, step)
        assert np.array_equal(receiver, rounded.params)
        assert fragment_digest(receiver) == digest
    assert np.array_equal(rounded.momentum, exact.momentum)
    # What is exact here has gone through one more float32 sum a version.
    np.testing.assert_allclose(rounded.exact, exact.params, rtol=0, atol=1e-5)
    last_step = np.abs(np.concatenate([decode_tensor(encoded).reshape(-1) for encoded in step])).max()
    # int4 clips to 13/16 of the largest element, at the least, and that is what is decoded here.
    error = {Codec.BF16: 2.0**-8, Codec.INT8: 0.5 / 127, Codec.INT4: 3 / 13}[codec] * last_step
    assert np.abs(rounded.params - exact.params).max() <= 1.01 * error + 1e-5


def test_a_run_that_goes_back_to_whole_versions_gets_the_residual_in_the_next_one():
    rng = np.random.default_rng(1)
    begun = seeded(rng.normal(size=SIZE).astype(np.float32))
    (rounded, *_), _ = versions.merge(TENSORS, merge_of(1, Codec.INT4, drawn(rng)), begun)
    assert np.any(rounded.residual)
    action = merge_of(2, Codec.F32, drawn(rng))
    (after, _, step, *_), _ = versions.merge(TENSORS, action, rounded)
    assert step is None
    assert after.residual is None
    np.testing.assert_allclose(after.params, rounded.exact - versions.vector(action.parts[0].payload), rtol=1e-6)


def test_a_difference_that_float32_cannot_hold_makes_no_version():
    begun = seeded(np.full(SIZE, 3e38, np.float32))
    far = begun._replace(residual=np.full(SIZE, -3e38, np.float32))
    action = merge_of(1, Codec.INT8, [np.full(shape, 3.4e38) for shape in SHAPES])
    with pytest.raises(LocalProtocolError, match="not finite"):
        versions.merge(TENSORS, action, far)


@pytest.mark.parametrize("damage", [np.inf, -np.inf, np.nan])
def test_a_version_that_is_not_finite_ends_the_process_and_is_never_committed(damage):
    begun, action = (
        seeded(np.zeros(SIZE, np.float32)),
        merge_of(1, Codec.F32, [np.ones(shape) for shape in SHAPES], (1.0, 0.5)),
    )
    begun.momentum[5] = damage
    with pytest.raises(LocalProtocolError, match="version 1 of fragment 0"):
        versions.merge(TENSORS, action, begun)
