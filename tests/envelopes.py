"""Envelopes for tests of the codec: examples, any that the annotations allow, and damaged ones."""

import dataclasses
import math
import typing
from enum import StrEnum

import msgpack
import numpy as np
import pytest
from hypothesis import strategies as st

from broker.base.errors import RemoteProtocolError
from broker.wire import messages
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.frames import decode, encode
from broker.wire.headers import DEFAULT_LIMITS, seal
from broker.wire.messages import (
    MESSAGE_TYPES,
    Codec,
    Contribution,
    DataRange,
    Encoded,
    Envelope,
    FleetState,
    Heartbeat,
    Join,
    Outstanding,
    Phase,
    Reason,
    Resolution,
    Share,
    TrainedOn,
)
from broker.wire.number_formats import encoded_bytes
from broker.wire.ranges import StepRange
from broker.wire.schema import INT_MAX
from broker.wire.tensors import encode_tensor

# --- examples ---------------------------------------------------------------------------------------------------


def envelope(message, **changes):
    addresses = {"run_id": "demo", "sender": "island-0", "incarnation": 1, "sequence": 17, "to": "aggregator"}
    return Envelope(**(addresses | changes), message=message)


def heartbeat(**changes):
    fields = {
        "inner_step": 40,
        "tokens": 20_480,
        "loss": 5.25,
        "step_time_s": 0.1,
        "sync_share": 0.0,
        "bytes_up": 1,
        "bytes_down": 2,
        "versions": (2, -1),
        "overwritten_tokens": (0, 0),
        "outstanding": (Outstanding(fragment_id=0, from_step=24, to_step=40),),
        "stopped": False,
    }
    return Heartbeat(**(fields | changes))


def contribution(**changes):
    tensors = np.array([[1.0, -2.5]], np.float32), np.array([3.0, 4.0, 5.0], np.float32)
    fields = {
        "round_id": 5,
        "fragment_id": 0,
        "steps": StepRange(from_step=24, to_step=40, from_tokens=12_288, to_tokens=20_480),
        "trained_on": (TrainedOn(fragment_version=1, steps=16),),
        "payload": (encode_tensor(tensors[0], Codec.BF16), encode_tensor(tensors[1], Codec.F32)),
    }
    return Contribution(**(fields | changes))


EXAMPLES = (
    envelope(heartbeat()),
    envelope(contribution()),
    envelope(
        Join(
            nonce="n0",
            island_id="",
            hint="host-1",
            tensors=(TensorSpec(name="w", shape=(3, 4), dtype="float32", kind=Kind.RDA, unit_axes=1),),
            tokens_per_step=512,
        ),
        sender="join:n0",
    ),
    envelope(
        FleetState(
            epoch=1,
            phase=Phase.RUNNING,
            rounds=(),
            due_soon=(0,),
            versions=(3,),
            resolutions=(
                Resolution(fragment_id=0, from_step=1, to_step=2, fate=messages.Fate.REFUSED, reason=Reason.STALE),
            ),
            seed=(),
            trained_tokens=7,
            fleet_ratio=4.0,
            share=Share(index=0, count=4, share_epoch=0),
        ),
        sender="aggregator",
        to="island-0",
    ),
)


def raw(example=EXAMPLES[0]):
    """The header of a valid message as a dict, to be damaged."""
    return msgpack.unpackb(bytes(encode(example)[0]))


def packed(header):
    """A header, given as a dict, as whoever means it would write it: with the checksum of what it says."""
    content = {key: value for key, value in header.items() if key != "checksum"}
    return seal(msgpack.packb(content | {"checksum": 2**64 - 1}))


def refusal(header, *buffers, limits=DEFAULT_LIMITS):
    """What decoding a header (a dict, or bytes that get a checksum of their own) with these buffers raises."""
    written = seal(header + bytes(8)) if isinstance(header, bytes) else packed(header)
    with pytest.raises(RemoteProtocolError) as caught:
        decode([written, *buffers], limits)
    return caught.value


def refusal_of_body(example=EXAMPLES[0], **changes):
    header = raw(example)
    header["body"] |= changes
    return refusal(header, *encode(example)[1:])


# --- strategies: an independent reading of the annotations --------------------------------------------------------

NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
COUNTERS = st.integers(0, INT_MAX)
PRINTABLE = st.text(max_size=40).filter(str.isprintable)


@st.composite
def step_ranges(draw):
    steps, tokens = sorted(draw(st.tuples(COUNTERS, COUNTERS))), sorted(draw(st.tuples(COUNTERS, COUNTERS)))
    if steps[0] == steps[1]:
        steps = [0, 1]
    return StepRange(from_step=steps[0], to_step=steps[1], from_tokens=tokens[0], to_tokens=tokens[1])


@st.composite
def buffers(draw):
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    wire = draw(st.sampled_from(list(Codec)))
    nbytes = encoded_bytes(wire, math.prod(shape))
    data = draw(st.binary(min_size=nbytes, max_size=nbytes))
    return Encoded(codec=wire, shape=shape, checksum=draw(st.integers(0, 2**64 - 1)), data=data)


def values(hint, field):
    if hint is StepRange:
        return step_ranges()
    if hint is DataRange:
        counters = dict.fromkeys(("share", "share_epoch"), COUNTERS)
        return st.builds(DataRange, **counters, from_batch=st.integers(0, 9), to_batch=st.integers(10, INT_MAX))
    if hint is messages.Block:
        return st.builds(messages.Block, number=COUNTERS, from_batch=st.just(3), to_batch=st.integers(4, INT_MAX))
    if hint is TensorSpec:
        shapes = st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple)
        return st.builds(
            TensorSpec, name=PRINTABLE, shape=shapes, dtype=PRINTABLE, kind=st.sampled_from(Kind), unit_axes=st.just(1)
        )
    if hint is messages.Recipe:
        shares = st.floats(0, 1)
        return st.builds(
            messages.Recipe,
            merge=st.none() | st.sampled_from(["rda", "mean", "mean+a.b:C#0123456789abcdef"]),
            keep=shares,
            grace_factor=shares,
            quorum=st.integers(1, INT_MAX),
            codec=st.sampled_from(Codec),
        )
    if hint in (Outstanding, Resolution, messages.HostPart):
        rest = {f.name: values(typing.get_type_hints(hint)[f.name], f.name) for f in dataclasses.fields(hint)}
        return st.builds(hint, **(rest | {"from_step": st.just(3), "to_step": st.integers(4, 9)}))
    if field == "base":
        return st.none() | st.just(0)
    if field == "fragment_version":
        return st.integers(1, INT_MAX)  # above its base
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{f.name: values(hints[f.name], f.name) for f in dataclasses.fields(hint)})
    if field == "payload":
        return st.lists(buffers(), max_size=3).map(tuple)
    if field in ("host", "hosts"):
        return st.integers(1, 99) if field == "host" else st.integers(100, 4096)
    if field == "answer_buffers":
        return st.integers(0, messages.MAX_PROBE_BUFFERS)
    if hint is int:
        return st.integers(-1 if field in ("versions", "sequence") else 0, INT_MAX)
    if hint is float:
        return st.floats(None if field == "loss" else 0.0, allow_nan=False, allow_infinity=False)
    if hint is bool:
        return st.booleans()
    if hint is bytes:
        return st.binary(max_size=64)
    if hint is str:
        return NAMES if field in ("nonce", "island_id", "resumes") else PRINTABLE
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    if typing.get_origin(hint) is tuple:
        return st.lists(values(typing.get_args(hint)[0], field), max_size=4).map(tuple)
    inner, none = typing.get_args(hint)
    assert none is type(None)
    return st.none() | values(inner, field)


ENVELOPES = st.builds(
    Envelope,
    run_id=NAMES,
    sender=NAMES | NAMES.map("join:{}".format) | NAMES.map("observer:{}".format),
    incarnation=COUNTERS,
    sequence=COUNTERS,
    to=NAMES,
    message=st.sampled_from(MESSAGE_TYPES).flatmap(lambda cls: values(cls, "")),
)
