"""A version is looked at before it is used, and a difference added to its base; every flaw has words."""

import re
from dataclasses import replace

import numpy as np
import pytest

from broker.wire.fragments import FragmentManifest, Kind, TensorSpec
from broker.wire.messages import AGGREGATOR, BROKER, Codec, Envelope, Version
from broker.wire.tensors import added, decode_tensor, difference, encode_tensor, fragment_digest
from islands.arrays.reference import HeldVersions

TENSORS = (
    TensorSpec(name="a", shape=(4, 3), dtype="float32", kind=Kind.MEAN),
    TensorSpec(name="b", shape=(5,), dtype="float32", kind=Kind.MEAN),
)
MANIFEST = FragmentManifest((TENSORS,))
SHAPES = [tensor.shape for tensor in TENSORS]
VALUES = [np.ones((4, 3), np.float32), np.zeros(5, np.float32)]
BASE = np.concatenate([value.reshape(-1) for value in VALUES])


def envelope(codec=Codec.F32, **changes):
    payload = tuple(encode_tensor(v, codec) for v in VALUES)
    fields = {"fragment_id": 0, "fragment_version": 3, "digest": fragment_digest(*VALUES), "payload": payload} | changes
    version = Version(epoch=1, contributions=(), **fields)
    return Envelope(run_id="demo", sender=AGGREGATOR, incarnation=0, sequence=1, to=BROKER, message=version)


def step(number, base, codec):
    """A difference from one version to the next, and the version that comes of it."""
    rng = np.random.default_rng(number)
    exact = base + rng.normal(size=base.size).astype(np.float32)
    payload = difference(exact, base, SHAPES, codec)
    after = added(base, payload)
    changes = {"fragment_version": number, "base": number - 1, "digest": fragment_digest(after), "payload": payload}
    return envelope(**changes), after


def vector_of(taken):
    assert taken.message.base is None
    return np.concatenate([decode_tensor(encoded).reshape(-1) for encoded in taken.message.payload])


@pytest.fixture(params=[False, True])
def held(request):
    return HeldVersions(MANIFEST, differences=request.param)


@pytest.fixture
def expecting():
    """Expects differences, and holds version 3."""
    held = HeldVersions(MANIFEST, differences=True)
    held.take(envelope())
    return held


def flaw_of(held, received):
    return held.take(received)[1]


def test_a_whole_version_has_no_flaw(held):
    assert held.take(envelope()) == (envelope(), "")


@pytest.mark.parametrize("codec", [Codec.BF16, Codec.INT8, Codec.INT4])
def test_a_whole_version_comes_in_float32(held, codec):
    says = f"wrong_dtype: buffers[0].codec is {codec}, expected one of f32"
    assert flaw_of(held, envelope(codec)) == says


def test_where_differences_are_expected_a_version_is_here_once_and_not_as_it_was_received_too():
    held, received = HeldVersions(MANIFEST, differences=True), envelope()
    taken, _ = held.take(received)
    views = [decode_tensor(encoded) for encoded in taken.message.payload]
    as_received = [decode_tensor(encoded) for encoded in received.message.payload]
    assert np.shares_memory(views[0], held._held[received.message.fragment_id][1])
    assert not any(map(np.shares_memory, views, as_received))


@pytest.mark.parametrize("codec", list(Codec))
def test_differences_are_added_one_after_the_other(expecting, codec):
    base = BASE
    for number in (4, 5, 6):
        received, base = step(number, base, codec)
        taken, flaw = expecting.take(received)
        assert flaw == ""
        assert np.array_equal(vector_of(taken), base)
        assert [encoded.shape for encoded in taken.message.payload] == SHAPES


def test_a_difference_to_what_is_not_here_is_refused_and_what_is_here_stays(expecting):
    fourth, after = step(4, BASE, Codec.INT8)
    fifth, _ = step(5, after, Codec.INT8)
    assert flaw_of(expecting, fifth) == "it is the difference to version 4, and version 3 is here"
    assert [flaw_of(expecting, each) for each in (fourth, fifth)] == ["", ""]


def test_where_differences_come_unexpectedly_a_whole_version_is_kept_from_then_on():
    held = HeldVersions(MANIFEST, differences=False)
    held.take(envelope())
    fourth, _ = step(4, BASE, Codec.INT8)
    assert flaw_of(held, fourth) == "it is the difference to version 3, and none is here"
    held.take(envelope())
    assert flaw_of(held, fourth) == ""


def test_a_difference_to_other_bytes_is_refused_and_so_is_what_follows_until_a_whole_version_comes(
    expecting,
):
    fourth, after = step(4, BASE, Codec.INT8)
    wrong = replace(fourth, message=replace(fourth.message, digest="0" * 32))
    assert "the version is named 000" in flaw_of(expecting, wrong)
    assert flaw_of(expecting, fourth) == "it is the difference to version 3, and none is here"
    whole = envelope(
        fragment_version=4,
        digest=fragment_digest(after),
        payload=tuple(encode_tensor(part, Codec.F32) for part in (after[:12].reshape(4, 3), after[12:])),
    )
    assert flaw_of(expecting, whole) == ""
    assert flaw_of(expecting, step(5, after, Codec.INT8)[0]) == ""


def test_an_island_may_go_back_to_a_whole_version_that_differences_lead_on_from(expecting):
    """The way to the newest version begins with the whole one that the broker has, which may be older than ours."""
    fourth, after = step(4, BASE, Codec.INT4)
    for received in (fourth, envelope(), fourth, step(5, after, Codec.INT4)[0]):
        assert flaw_of(expecting, received) == ""


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
def test_a_flaw_is_said_in_words(held, changes, says):
    assert re.search(says, flaw_of(held, envelope(**changes)))
