"""Lies on real payloads: as long as they should be, in the direction they should have, and only when they should."""

import random
from dataclasses import replace

import numpy as np
import pytest

from broker.wire.messages import Codec, Contribution, TrainedOn
from broker.wire.ranges import StepRange
from broker.wire.tensors import decode_tensor, encode_tensor
from islands.tasks.task import load_task
from ops.chaos.rogue import claiming
from ops.faults.kinds import LIES, FaultKind, Rogue, TamperedTensors

SHAPES = ((40, 30), (50,), ())


def contribution(fragment_id=3, seed=0, codec=Codec.F32):
    values = np.random.default_rng(seed)
    payload = [encode_tensor(np.asarray(values.normal(size=shape), np.float32), codec) for shape in SHAPES]
    return Contribution(
        round_id=1,
        fragment_id=fragment_id,
        steps=StepRange(from_step=0, to_step=4, from_tokens=0, to_tokens=256),
        trained_on=(TrainedOn(fragment_version=0, steps=4),),
        payload=tuple(payload),
    )


def sent(manner, message, rng_seed=0, **options):
    (one,) = Rogue(manner, 1.0, TamperedTensors(), random.Random(rng_seed), **options).outgoing(message)
    return [decode_tensor(each) for each in one.payload]


def tensors(message):
    return [decode_tensor(each) for each in message.payload]


def cosine(a, b):
    return float(np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("codec", [Codec.F32, Codec.BF16, Codec.INT8])
@pytest.mark.parametrize("manner", LIES)
def test_a_lie_is_as_long_as_its_manner_says_and_keeps_form_and_format(manner, codec):
    message = contribution(codec=codec)
    (one,) = Rogue(manner, 1.0, TamperedTensors(), random.Random(0)).outgoing(message)
    assert [(each.shape, each.codec) for each in one.payload] == [(each.shape, each.codec) for each in message.payload]
    for lie, honest in zip(map(decode_tensor, one.payload[:2]), tensors(message), strict=False):
        assert np.linalg.norm(lie) / np.linalg.norm(honest) == pytest.approx(LIES[manner].length, rel=0.1)


@pytest.mark.parametrize(
    ("manner", "expected"),
    [("sign-flip", -1), ("sign-flip-3", -1), ("scale-8", 1), ("constant", 0), ("drift", 0.5**0.5), ("claims", 1)],
)
def test_the_direction_of_a_lie(manner, expected):
    message = contribution()
    for lie, honest in zip(sent(FaultKind(manner), message)[:2], tensors(message), strict=False):
        assert cosine(lie, honest) == pytest.approx(expected, abs=1e-5 if expected else 0.3)


def test_liars_have_one_direction_for_each_fragment_and_noise_of_their_own():
    first, later, other = contribution(seed=0), contribution(seed=1), contribution(4, seed=0)
    constant = sent(FaultKind.CONSTANT, first)[0]
    assert cosine(constant, sent(FaultKind.CONSTANT_3, later, 1)[0]) == pytest.approx(1)
    assert cosine(constant, sent(FaultKind.CONSTANT, other)[0]) == pytest.approx(0, abs=0.1)
    noisy = [sent(FaultKind.CONSTANT_NOISE, first, rng_seed)[0] for rng_seed in (0, 1)]
    assert cosine(*noisy) == pytest.approx(0.8, abs=0.1)


def test_a_liar_that_is_honest_for_a_while_changes_nothing_in_it():
    honest = [True]
    rogue = Rogue(FaultKind.SIGN_FLIP_3, 1.0, TamperedTensors(), random.Random(0), honest=lambda: honest[0])
    message = contribution()
    assert rogue.outgoing(message) == (message,)
    honest[0] = False
    assert np.array_equal(decode_tensor(rogue.outgoing(message)[0].payload[0]), -3 * tensors(message)[0])


def test_what_has_no_length_stays_nothing():
    message = contribution()
    zeros = tuple(encode_tensor(np.zeros(shape, np.float32), Codec.F32) for shape in SHAPES)
    assert not any(lie.any() for lie in sent(FaultKind.DRIFT, replace(message, payload=zeros)))


def test_an_island_that_claims_tokens_says_so_of_each_step():
    task = load_task("examples.numpy_task:task", {})
    assert claiming(4)("examples.numpy_task:task", {}).tokens_per_step == 4 * task.tokens_per_step
