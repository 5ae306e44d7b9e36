"""Computes versions from payloads, and payloads from versions, in worker threads. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aggregator.events import Merge, Plant
from aggregator.merge.fragment_state import FragmentState, seeded
from aggregator.merge.kernels import MergedFragment, merge_and_step
from aggregator.merge.outer_step import OuterStep
from aggregator.merge.pieces import vector
from aggregator.merge.resources import PLAIN, Resources
from aggregator.merge.rounding import round_step
from broker.wire.errors import LocalProtocolError
from broker.wire.fragments import TensorSpec
from broker.wire.messages import Codec, Encoded
from broker.wire.tensors import encode_vector, fragment_digest


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
    tensors: Sequence[TensorSpec],
    action: Merge,
    before: FragmentState,
    outer_step: OuterStep,
    *,
    kept: bool = True,
    resources: Resources = PLAIN,
) -> tuple[Made, MergedFragment]:
    """Returns the next version of a fragment, and the merged pseudo-gradient that led to it.

    Args:
        tensors: The fragment, in manifest order.
        action: Contributions with their final weights, in the order to fold.
        before: The newest durable version; it stays as it is.
        outer_step: From :func:`aggregator.merge.outer_step.make_outer_step`.
        kept: Whether the merged pseudo-gradient itself is wanted; its ``delta`` is empty otherwise, which is faster.
        resources: Threads and memory.

    Raises:
        LocalProtocolError: The outcome is not finite, though every contribution was: ``before`` cannot be right. The
            process ends; a standby may have better.
    """
    after, merged, finite = merge_and_step(
        tensors, action.parts, before, outer_step, capped=action.capped, kept=kept, resources=resources
    )
    made = Made(after, "")
    if action.version_codec is not Codec.F32:
        # Receivers of the version before get this one by adding a rounded difference. What rounding leaves out stays.
        step = round_step(tensors, after.params, before.params, action.version_codec, resources)
        finite = step.finite
        made = Made(after._replace(params=step.params, residual=step.residual), "", step.difference)
    if not finite:
        what = f"version {after.version} of fragment {action.fragment_id}"
        raise LocalProtocolError(f"{what} would hold values that are not finite: nothing is made of them")
    return made._replace(digest=fragment_digest(made.state.params)), merged


def payload_of(tensors: Sequence[TensorSpec], state: FragmentState) -> tuple[Encoded, ...]:
    """Returns a whole version's parameters in float32; the buffers are views of the state."""
    return encode_vector(state.params, [tensor.shape for tensor in tensors], Codec.F32)
