"""The codec refuses what is damaged, too large, or not as PROTOCOL.md says, and names the field."""

import math
import tracemalloc

import msgpack
import numpy as np
import pytest

from broker.base.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from broker.chunks.receiving import fresh
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.frames import Origin, decode, encode, peek, verify
from broker.wire.headers import Limits
from broker.wire.messages import PROTOCOL_VERSION, Codec, DataRange, Join, Outstanding, Reason, kind_of
from broker.wire.messages.scattered import Scattered
from broker.wire.schema import MAX_DATA_RANGES, MAX_OUTSTANDING, MAX_TEXT
from broker.wire.tensors import encode_tensor
from tests.envelopes import EXAMPLES, contribution, envelope, heartbeat, packed, raw, refusal, refusal_of_body

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine


def test_another_protocol_version_is_refused_before_anything_else_is_looked_at():
    error = refusal({"v": PROTOCOL_VERSION + 1, "something": "new"})
    assert (error.reason, error.field, error.expected) == (Reason.PROTOCOL_VERSION, "v", str(PROTOCOL_VERSION))
    assert refusal({"v": True}).reason == Reason.PROTOCOL_VERSION
    assert refusal({}).reason == Reason.PROTOCOL_VERSION


@pytest.mark.parametrize("kind", ["update", "", 3, None, ["join"], {"join": 1}])
def test_an_unknown_kind_is_refused(kind):
    assert refusal(raw() | {"kind": kind}).reason == Reason.UNKNOWN_KIND


def test_a_header_without_one_of_its_keys_or_with_another_one_is_refused():
    for key in ("run", "sender", "inc", "seq", "to", "body"):
        header = raw()
        del header[key]
        assert refusal(header).field == "header", key
    assert refusal(raw() | {"priority": 1}).reason == Reason.MALFORMED
    assert refusal(raw() | {"buffers": []}).reason == Reason.MALFORMED  # a heartbeat has no payload


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("run", ["", "a b", "x" * 65]),
        ("sender", ["join:", "join:join:a", "a\n", "æ"]),
        ("to", [None, 1]),
        ("inc", [-1, True, 1.0]),
        ("seq", [2**63]),
        ("body", [[], None]),
    ],
)
def test_a_header_value_out_of_range_is_refused_and_named(key, values):
    for value in values:
        error = refusal(raw() | {key: value})
        assert (error.reason, error.field) == (Reason.MALFORMED, key), value


@pytest.mark.parametrize(
    "header",
    [
        *(b"", b"\x80", b"\xc1", b"\x93\x01\x02", b"not msgpack at all", b"\xcf", b"\x92\x01\xcf"),
        msgpack.packb(raw()) + b"\x00",  # something behind the map
        {"kind": "x" * 5000},
        {"body": list(range(65_537))},
        {"body": bytes((2 << 20) + 1)},  # a record above its limit
        {"body": msgpack.ExtType(5, b"abc")},
        {"body": msgpack.Timestamp(1, 2)},
        {1: 1},
        b"\x81\xa1\xff\x01",  # a key that is not UTF-8
        b"\x81\x90\x01",  # a key that is an array
        b"\x82\xa1v\x01\xa1v\x01",  # a key that stands twice
        b"\x91" * 3000 + b"\xc0",  # nested beyond reason
        b"\xdd\xff\xff\xff\xff",  # an array that claims four billion items
    ],
)
def test_what_is_no_header_is_refused_as_malformed_even_with_a_checksum(header):
    error = refusal(header)
    assert (error.reason, error.field) == (Reason.MALFORMED, "header")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: kind_of(each.message))
def test_no_changed_byte_of_a_header_passes_and_nothing_of_a_damaged_one_is_believed(example):
    """Without the checksum 6 to 14 % of these headers were read, and said something else."""
    header, *buffers = encode(example)
    for at in range(len(header)):
        for flip in (0x01, 0x10, 0x80, 0xFF):
            damaged = bytearray(header)
            damaged[at] ^= flip
            with pytest.raises(RemoteProtocolError) as caught:
                decode([damaged, *buffers])
            assert (caught.value.reason, caught.value.field) == (Reason.CHECKSUM, "checksum")
            assert caught.value.origin == peek([damaged, *buffers]) == Origin()


HEARTBEAT, CONTRIBUTION, JOIN, FLEET_STATE = EXAMPLES


@pytest.mark.parametrize(
    ("example", "field", "values"),
    [
        (HEARTBEAT, "inner_step", [-1, True, 1.0, "1", None, 2**63]),
        (HEARTBEAT, "loss", [math.nan, math.inf, 3]),  # an integer is no float
        (HEARTBEAT, "step_time_s", [-0.5]),
        (HEARTBEAT, "sync_share", [math.nan, None]),
        (HEARTBEAT, "stopped", [1]),
        (HEARTBEAT, "versions", [3, {"0": 1}, "12"]),
        (JOIN, "hint", ["two\nlines", "\x1b[31mred", "x" * (MAX_TEXT + 1), 5, None]),
        (JOIN, "island_id", ["aggregator", "broker", "join:a", "a b", 3]),  # an address of others, or none
        (FLEET_STATE, "phase", ["paused", ["running"]]),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_value_of_the_wrong_type_or_range_is_refused_and_named(example, field, values):
    for value in values:
        error = refusal_of_body(example, **{field: value})
        assert (error.reason, error.field) == (Reason.MALFORMED, f"body.{field}"), value


def outstanding(step):
    return Outstanding(fragment_id=0, from_step=step, to_step=step + 1)


def batches(number):
    return DataRange(share=0, share_epoch=0, from_batch=2 * number, to_batch=2 * number + 1)


@pytest.mark.parametrize(
    ("message", "field", "item", "most"),
    [(heartbeat, "outstanding", outstanding, MAX_OUTSTANDING), (contribution, "data", batches, MAX_DATA_RANGES)],
)
def test_a_message_has_no_more_items_than_what_answers_or_repeats_them_can_hold(message, field, item, most):
    items = tuple(map(item, range(most + 1)))
    sent = envelope(message(**{field: items[1:]}))
    assert decode(encode(sent)) == sent
    with pytest.raises(LocalProtocolError, match=f"at most {most} items"):
        encode(envelope(message(**{field: items})))


def test_a_missing_and_an_unknown_field_are_refused_and_named():
    header = raw()
    del header["body"]["tokens"]
    error = refusal(header)
    assert (error.reason, error.field, error.got) == (Reason.MALFORMED, "body.tokens", "'missing'")
    error = refusal_of_body(mood="good")
    assert (error.reason, error.got) == (Reason.MALFORMED, "'mood'")
    assert refusal_of_body(CONTRIBUTION, payload=[]).got == "'payload'"


@pytest.mark.parametrize(
    ("steps", "tokens", "field"),
    [((4, 4), (0, 1), "to_step"), ((5, 4), (0, 1), "to_step"), ((0, 1), (9, 8), "to_tokens")],
)
def test_steps_or_tokens_that_do_not_go_forward_are_implausible(steps, tokens, field):
    steps = {"from_step": steps[0], "to_step": steps[1]}
    error = refusal_of_body(CONTRIBUTION, steps=steps | {"from_tokens": tokens[0], "to_tokens": tokens[1]})
    assert (error.reason, error.field) == (Reason.IMPLAUSIBLE, f"body.steps.{field}")
    if field == "to_step":
        assert refusal_of_body(outstanding=[{"fragment_id": 0} | steps]).reason == Reason.IMPLAUSIBLE


@pytest.mark.parametrize(
    ("field", "value"), [("unit_axes", 3), ("shape", [2**40, 2**40]), ("shape", [1] * 33), ("shape", [-1])]
)
def test_an_impossible_tensor_is_malformed(field, value):
    tensor = {"name": "w", "shape": [3, 4], "dtype": "float32", "kind": "rda", "unit_axes": 1} | {field: value}
    assert refusal_of_body(JOIN, tensors=[tensor]).field.startswith(f"body.tensors[0].{field}")


def refusal_of_buffer(**changes):
    header = raw(CONTRIBUTION)
    header["buffers"][0] |= changes
    return refusal(header, *encode(CONTRIBUTION)[1:])


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("codec", ["f64", 4]),
        ("shape", [[-1, -2], [1.0, 2], 2, [1] * 33]),
        ("nbytes", [-4, 4.0, True]),
        ("checksum", [-1, "abc", None]),
    ],
)
def test_a_bad_entry_for_a_buffer_is_malformed(field, values):
    for value in values:
        error = refusal_of_buffer(**{field: value})
        assert (error.reason, error.field) == (Reason.MALFORMED, f"buffers[0].{field}"), value


@pytest.mark.parametrize("shape", [[1, 3], [2**62, 2**62], [2**63 - 1] * 32, [0], [2**33, 2**31]])
def test_a_shape_that_does_not_fit_the_bytes_is_malformed_and_allocates_nothing(shape):
    assert refusal_of_buffer(shape=shape).field == "buffers[0].nbytes"


@pytest.mark.parametrize(("codec", "right"), [("f32", 8), ("bf16", 4), ("int8", 6), ("int4", 5)])
@pytest.mark.parametrize("claimed", [0, 1, 4, 5, 6, 7, 8, 9, 2**63 - 1])
def test_a_buffer_is_read_only_at_the_exact_length_that_its_codec_takes(codec, right, claimed):
    header = raw(envelope(contribution(payload=(encode_tensor(np.zeros((1, 2), np.float32), Codec.F32),))))
    header["buffers"][0] |= {"codec": codec, "nbytes": claimed}
    if claimed == right:
        received = decode([packed(header), bytes(right)])
        assert received.message.payload[0].codec == codec
        assert refusal(header, bytes(right + 1)).field == "buffers[0]"
    else:
        assert refusal(header, bytes(min(claimed, 16))).field == "buffers[0].nbytes"


def test_frames_must_be_as_many_as_the_header_says():
    _, first, second = encode(CONTRIBUTION)
    assert refusal(raw(CONTRIBUTION), first).field == "number of buffers"
    assert refusal(raw(CONTRIBUTION), first, second, b"").field == "number of buffers"
    assert refusal(raw(), b"").field == "number of buffers"  # a heartbeat with one
    assert refusal(raw(CONTRIBUTION) | {"buffers": 2}, first, second).field == "buffers"
    with pytest.raises(RemoteProtocolError, match="number of frames"):
        decode([])


def in_pieces(data):
    pieces = Scattered(len(data), fresh)
    pieces.add(memoryview(data))
    return pieces


@pytest.mark.parametrize("form", [bytes, in_pieces])
def test_verify_finds_a_damaged_buffer_and_decode_does_not_look(form):
    header, first, second = encode(CONTRIBUTION)
    damaged = bytearray(second)
    damaged[5] ^= 1
    verify(decode([header, first, form(second)]))
    received = decode([header, first, form(damaged)])
    with pytest.raises(RemoteProtocolError) as caught:
        verify(received)
    assert (caught.value.reason, caught.value.field) == (Reason.CHECKSUM, "buffers[1].checksum")


@pytest.mark.parametrize(
    ("field", "got", "header", "buffers", "limits"),
    [
        ("header", "65", b"\xff" * 57, [], Limits(max_header_bytes=64, max_message_bytes=64)),
        ("message", "2057", b"\xff", [bytes(1024)] * 2, Limits(max_header_bytes=1024, max_message_bytes=2048)),
        ("number of buffers", "3", b"\xff", [b""] * 3, Limits(max_buffers=2)),
    ],
)
def test_a_message_above_its_limit_is_refused_unread(field, got, header, buffers, limits):
    error = refusal(header, *buffers, limits=limits)
    assert (error.reason, error.field, error.got) == (Reason.OVERSIZE, field, got)


@pytest.mark.parametrize("small", [b"\x80", b"\x90", b"\x81\xa1a\x01", b"\x81\xa1a" * 20 + b"\x01"])
def test_a_header_that_is_mostly_maps_and_arrays_is_refused_before_it_is_unpacked(small):
    """4 MiB of them took the broker up to 6 s, twice, and 280 MiB."""
    items = small * 10_000
    header = b"\x81\xa1a\xdd" + (100).to_bytes(4, "big") + (b"\xdd" + (10_000).to_bytes(4, "big") + items) * 100
    tracemalloc.start()
    try:
        error = refusal(header[: 4 << 20])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (error.reason, error.field) == (Reason.OVERSIZE, "header")
    assert peak < 3 * len(header) + (1 << 20)


def test_an_array_that_claims_more_items_than_its_header_has_bytes_takes_no_memory_for_them():
    """One in another took half a megabyte for each three bytes."""
    tracemalloc.start()
    try:
        error = refusal(b"\x81\xa1a" + b"\xdc\xff\xff" * 100)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (error.reason, error.field) == (Reason.MALFORMED, "header")
    assert peak < 1 << 20


def test_a_manifest_of_many_tensors_is_not_mistaken_for_a_bomb():
    spec = {"shape": (256, 128, 4), "dtype": "float32", "kind": Kind.RDA, "unit_axes": 1}
    tensors = tuple(TensorSpec(name=f"layers/{i}/слой/{i}", **spec) for i in range(20_000))
    sent = envelope(Join(nonce="n", island_id="", hint="", tensors=tensors, tokens_per_step=1), sender="join:n")
    assert decode(encode(sent)) == sent


def test_limits_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="max_message_bytes"):
        Limits(max_header_bytes=10, max_message_bytes=9)
    with pytest.raises(ConfigError, match="max_buffers"):
        Limits(max_buffers=0)
