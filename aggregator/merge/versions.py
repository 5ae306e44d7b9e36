"""Computes versions from payloads, and payloads from versions, in worker threads. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aggregator.events import Merge, Plant
from aggregator.merge.kernels import MergedFragment, merge_fragment
from aggregator.merge.outer_step import FragmentState, OuterStep, Vector, seeded
from aggregator.merge.pieces import vector
from broker.wire.errors import LocalProtocolError
from broker.wire.fragments import TensorSpec
from broker.wire.messages import Codec, Encoded
from broker.wire.tensors import added, difference, encode_vector, fragment_digest


class Made(NamedTuple):
    """A version that exists in memory only, and the name of its bytes.

    ``difference`` is what is to be added to the version before; None for one that travels whole.
    """

    state: FragmentState
    digest: str
    difference: tuple[Encoded, ...] | None = None


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
    after = outer_step(before._replace(params=before.exact, residual=None), merged.delta)
    made = Made(after, "")
    if action.version_codec is not Codec.F32:
        made = _rounded(tensors, after, before.params, action.version_codec)
    if not math.isfinite(float(np.sum(made.state.params, dtype=np.float64))):  # which no sum of finite float32 leaves
        what = f"version {after.version} of fragment {action.fragment_id}"
        raise LocalProtocolError(f"{what} would hold values that are not finite: nothing is made of them")
    return made._replace(digest=fragment_digest(made.state.params)), merged


def _rounded(tensors: Sequence[TensorSpec], after: FragmentState, base: Vector, codec: Codec) -> Made:
    """Returns the version that receivers of ``base`` get by adding a rounded difference, and that difference.

    ``after`` has the exact parameters; what rounding leaves out of them stays, as the residual.
    """
    step = difference(after.params, base, [tensor.shape for tensor in tensors], codec)
    params = added(base, step)
    with np.errstate(over="ignore", invalid="ignore"):
        residual = np.subtract(after.params, params, out=after.params)
    return Made(after._replace(params=params, residual=residual), "", step)


def payload_of(tensors: Sequence[TensorSpec], state: FragmentState) -> tuple[Encoded, ...]:
    """Returns a whole version's parameters in float32; the buffers are views of the state."""
    return encode_vector(state.params, [tensor.shape for tensor in tensors], Codec.F32)
