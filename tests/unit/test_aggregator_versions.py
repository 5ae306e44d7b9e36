"""Versions made from payloads: what must never become durable."""

import numpy as np
import pytest

from aggregator.events import Merge, Part
from aggregator.merge import versions
from aggregator.merge.fragment_state import FragmentState
from aggregator.merge.outer_step import make_outer_step
from broker.wire.errors import LocalProtocolError
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.messages import Codec
from broker.wire.ranges import StepRange
from broker.wire.tensors import encode_tensor

TENSORS = (TensorSpec(name="w", shape=(8,), dtype="float32", kind=Kind.MEAN),)


def merged(momentum):
    """The version that follows one with this momentum, by a contribution of ones."""
    steps = StepRange(from_step=0, to_step=2, from_tokens=0, to_tokens=20)
    payload = (encode_tensor(np.ones(8, np.float32), Codec.F32),)
    part = Part(island_id="a", steps=steps, payload=payload, token_weight=1.0, staleness_weight=1.0)
    merge = Merge(round_id=1, fragment_id=3, fragment_version=5, parts=(part,))
    before = FragmentState(params=np.zeros(8, np.float32), momentum=momentum, version=4)
    return versions.merge(TENSORS, merge, before, make_outer_step(1.0, 0.5))[0]


@pytest.mark.parametrize("damage", [np.inf, -np.inf, np.nan])
def test_a_version_that_is_not_finite_ends_the_process_and_is_never_committed(damage):
    momentum = np.zeros(8, np.float32)
    made = merged(momentum)
    assert made.state.version == 5
    assert np.isfinite(made.state.params).all()
    momentum[5] = damage
    with pytest.raises(LocalProtocolError, match="version 5 of fragment 3"):
        merged(momentum)
