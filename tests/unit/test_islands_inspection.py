"""A version is looked at before it is used; every flaw has words."""

from dataclasses import replace

import numpy as np
import pytest

from broker.wire.fragments import FragmentManifest, Kind, TensorSpec
from broker.wire.messages import AGGREGATOR, BROKER, Codec, Envelope, Version
from broker.wire.tensors import encode_tensor, fragment_digest
from islands.arrays.inspection import flaw_in

TENSORS = (
    TensorSpec(name="a", shape=(4, 3), dtype="float32", kind=Kind.MEAN),
    TensorSpec(name="b", shape=(5,), dtype="float32", kind=Kind.MEAN),
)
MANIFEST = FragmentManifest((TENSORS,))
VALUES = [np.ones((4, 3), np.float32), np.zeros(5, np.float32)]


def envelope(codec=Codec.F32, **changes):
    payload = tuple(encode_tensor(v, codec) for v in VALUES)
    fields = {"fragment_id": 0, "fragment_version": 3, "digest": fragment_digest(*VALUES), "payload": payload} | changes
    version = Version(epoch=1, contributions=(), **fields)
    return Envelope(run_id="demo", sender=AGGREGATOR, incarnation=0, sequence=1, to=BROKER, message=version)


@pytest.mark.parametrize("codec", [Codec.F32, Codec.BF16])
def test_a_whole_version_has_no_flaw(codec):
    assert flaw_in(envelope(codec), MANIFEST) == ""


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
def test_a_version_in_a_codec_of_contributions_is_not_adopted(codec):
    says = f"wrong_dtype: buffers[0].codec is {codec}, expected one of bf16, f32"
    assert flaw_in(envelope(codec), MANIFEST) == says


def damaged():
    good = encode_tensor(VALUES[0], Codec.F32)
    data = bytearray(good.data)
    data[7] ^= 1
    return replace(good, data=bytes(data))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"payload": (damaged(), encode_tensor(VALUES[1], Codec.F32))}, "checksum: buffers"),
        ({"payload": (encode_tensor(VALUES[0], Codec.F32),)}, "wrong_shape: buffers is 1 tensors, expected 2 tensors"),
        ({"payload": tuple(encode_tensor(VALUES[1], Codec.F32) for _ in TENSORS)}, r"expected \[4, 3\] for a"),
        ({"digest": "0" * 32}, "the version is named 000"),
        ({"fragment_id": 1}, "unknown_fragment: fragment 1 of 1"),
    ],
)
def test_a_flaw_is_said_in_words(changes, says):
    import re

    assert re.search(says, flaw_in(envelope(**changes), MANIFEST))
