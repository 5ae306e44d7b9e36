"""What is found wrong in a payload before the core hears of it."""

from dataclasses import replace

import numpy as np
import pytest

from aggregator.merge.payload_checks import inspect
from broker.wire import messages as m
from broker.wire.fragments import FragmentManifest, Kind, TensorSpec
from broker.wire.messages import Codec, Reason
from broker.wire.ranges import StepRange
from broker.wire.tensors import decode_tensor, encode_tensor

SPECS = tuple(TensorSpec(name=f"w{i}", shape=(3, i + 1), dtype="float32", kind=Kind.RDA) for i in range(2))
MANIFEST = FragmentManifest((SPECS,))


def arrays():
    return [np.full(spec.shape, 1.5, np.float32) for spec in SPECS]


def contribution(tensors=None, codec=Codec.F32, fragment_id=0):
    return m.Contribution(
        round_id=1,
        fragment_id=fragment_id,
        steps=StepRange(from_step=0, to_step=1, from_tokens=0, to_tokens=1),
        trained_on=(m.TrainedOn(fragment_version=0, steps=1),),
        payload=tuple(encode_tensor(array, codec) for array in (arrays() if tensors is None else tensors)),
    )


def inspected(message, manifest=MANIFEST):
    envelope = m.Envelope(run_id="r", sender="a", incarnation=1, sequence=1, to="aggregator", message=message)
    return inspect(envelope, manifest)


def flaw(message, manifest=MANIFEST):
    return inspected(message, manifest).flaw


@pytest.mark.parametrize(("codec", "reason"), [(Codec.F32, None), (Codec.BF16, Reason.WRONG_DTYPE)])
def test_a_seed_must_be_float32(codec, reason):
    found = flaw(m.Seed(fragment_id=0, payload=contribution(codec=codec).payload))
    assert (found and found.reason) == reason


@pytest.mark.parametrize(("manifest", "fragment_id"), [(MANIFEST, 1), (None, 0)])
def test_nothing_passes_uninspected_for_want_of_a_fragment(manifest, fragment_id):
    assert flaw(contribution(fragment_id=fragment_id), manifest).reason is Reason.UNKNOWN_FRAGMENT


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", Codec)
def test_one_element_that_is_not_finite_is_found_and_its_tensor_named(value, codec):
    tensors = arrays()
    tensors[1][2, 1] = value
    found = flaw(contribution(tensors, codec))
    assert found.reason is Reason.NOT_FINITE
    assert "w1" in found.detail


def test_a_damaged_byte_is_told_from_a_wrong_shape():
    good = contribution()
    damaged = bytearray(good.payload[0].data)
    damaged[0] ^= 1
    bad = replace(good, payload=(replace(good.payload[0], data=bytes(damaged)), good.payload[1]))
    assert flaw(bad).reason is Reason.CHECKSUM
    assert flaw(contribution(arrays()[:1])).reason is Reason.WRONG_SHAPE
    assert flaw(contribution(arrays()[::-1])).reason is Reason.WRONG_SHAPE


@pytest.mark.parametrize("codec", Codec)
def test_a_good_contribution_has_no_flaw_and_the_norm_of_all_tensors_together_as_they_will_be_merged(codec):
    message = contribution([np.float32(3) * array for array in arrays()], codec)
    merged = np.concatenate([decode_tensor(each).reshape(-1) for each in message.payload])
    assert flaw(message) is None
    assert inspected(message).norm == pytest.approx(float(np.linalg.norm(merged)), rel=1e-6)
