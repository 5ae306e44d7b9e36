"""Computes versions from payloads, and payloads from versions, in worker threads. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aggregator.events import Merge, Plant
from aggregator.merge.kernels import MergedFragment, merge_fragment
from aggregator.merge.outer_step import FragmentState, OuterStep, seeded
from aggregator.merge.pieces import vector
from broker.wire.errors import LocalProtocolError
from broker.wire.fragments import TensorSpec
from broker.wire.messages import Codec, Encoded
from broker.wire.tensors import encode_tensor, fragment_digest


class Made(NamedTuple):
    """A version that exists in memory only, and the name of its bytes."""

    state: FragmentState
    digest: str


def plant(tensors: Sequence[TensorSpec], action: Plant) -> Made:
    """Returns version 0: the tensors of a seed side by side in one float32 vector.

    Args:
        tensors: The fragment, in manifest order.
        action: Its payload has been checked against ``tensors``.
    """
    params = vector(action.payload)
    return Made(seeded(params), fragment_digest(params))


def merge(
    tensors: Sequence[TensorSpec], action: Merge, before: FragmentState, outer_step: OuterStep
) -> tuple[Made, MergedFragment]:
    """Returns the next version of a fragment, and the merged pseudo-gradient that led to it.

    Args:
        tensors: The fragment, in manifest order.
        action: Contributions with their final weights, in the order to fold.
        before: The newest durable version; it stays as it is.
        outer_step: From :func:`aggregator.merge.outer_step.make_outer_step`.

    Raises:
        LocalProtocolError: The outcome is not finite, though every contribution was: ``before`` cannot be right. The
            process ends; a standby may have better.
    """
    merged = merge_fragment(tensors, action.parts, capped=action.capped)
    after = outer_step(before, merged.delta)
    if not math.isfinite(float(np.sum(after.params, dtype=np.float64))):  # which no sum of finite float32 leaves
        what = f"version {after.version} of fragment {action.fragment_id}"
        raise LocalProtocolError(f"{what} would hold values that are not finite: nothing is made of them")
    return Made(after, fragment_digest(after.params)), merged


def payload_of(tensors: Sequence[TensorSpec], state: FragmentState, codec: Codec) -> tuple[Encoded, ...]:
    """Returns a version's parameters as they are published; in float32 the buffers are views of the state."""
    encoded = []
    start = 0
    for tensor in tensors:
        part = state.params[start : start + tensor.size].reshape(tensor.shape)
        encoded.append(encode_tensor(part, codec))
        start += tensor.size
    return tuple(encoded)
