"""The codec refuses what is damaged, too large, or not as PROTOCOL.md says, and names the field."""

import math
import tracemalloc

import msgpack
import numpy as np
import pytest

from broker.chunks.memory import fresh
from broker.wire.codec import Origin, decode, encode, peek, verify
from broker.wire.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from broker.wire.fragments import Kind, TensorSpec
from broker.wire.headers import Limits
from broker.wire.messages import (
    PROTOCOL_VERSION,
    Codec,
    DataRange,
    Join,
    Outstanding,
    Reason,
    kind_of,
)
from broker.wire.messages.scattered import Scattered
from broker.wire.schema import MAX_DATA_RANGES, MAX_OUTSTANDING, MAX_TEXT
from broker.wire.tensors import encode_tensor
from tests.envelopes import EXAMPLES, contribution, envelope, heartbeat, packed, raw, refusal, refusal_of_body

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine


# --- bad headers ------------------------------------------------------------------------------------------------


def test_another_protocol_version_is_refused_before_anything_else_is_looked_at():
    error = refusal({"v": PROTOCOL_VERSION + 1, "something": "new"})
    assert (error.reason, error.field, error.expected) == (Reason.PROTOCOL_VERSION, "v", str(PROTOCOL_VERSION))
    assert refusal({"v": True}).reason == Reason.PROTOCOL_VERSION
    assert refusal({}).reason == Reason.PROTOCOL_VERSION


@pytest.mark.parametrize("kind", ["update", "", 3, None, ["join"], {"join": 1}])
def test_an_unknown_kind_is_refused(kind):
    assert refusal(raw() | {"kind": kind}).reason == Reason.UNKNOWN_KIND


@pytest.mark.parametrize("key", ["run", "sender", "inc", "seq", "to", "body"])
def test_a_header_without_one_of_its_keys_is_refused(key):
    header = raw()
    del header[key]
    assert refusal(header).field == "header"


def test_a_header_with_a_key_of_its_own_is_refused():
    assert refusal(raw() | {"priority": 1}).reason == Reason.MALFORMED
    assert refusal(raw() | {"buffers": []}).reason == Reason.MALFORMED  # a heartbeat has no payload


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run", ""),
        ("run", "a b"),
        ("run", "x" * 65),
        ("sender", "join:"),
        ("sender", "join:join:a"),
        ("sender", "a\n"),
        ("sender", "æ"),
        ("to", None),
        ("to", 1),
        ("inc", -1),
        ("inc", True),
        ("inc", 1.0),
        ("seq", 2**63),
        ("body", []),
        ("body", None),
    ],
)
def test_a_header_value_out_of_range_is_refused_and_named(key, value):
    error = refusal(raw() | {key: value})
    assert (error.reason, error.field) == (Reason.MALFORMED, key)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x80",
        b"\xc1",
        b"\x93\x01\x02",
        b"not msgpack at all",
        b"\xcf",
        msgpack.packb(raw()) + b"\x00",  # something behind the map
        b"\x92\x01\xcf",
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


def test_no_frames_at_all_are_refused():
    with pytest.raises(RemoteProtocolError, match="number of frames"):
        decode([])


# --- bad bodies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("inner_step", -1),
        ("inner_step", True),
        ("inner_step", 1.0),
        ("inner_step", "1"),
        ("inner_step", None),
        ("inner_step", 2**63),
        ("loss", math.nan),
        ("loss", math.inf),
        ("loss", 3),  # an integer is no float
        ("step_time_s", -0.5),
        ("sync_share", math.nan),
        ("sync_share", None),
        ("stopped", 1),
        ("versions", 3),
        ("versions", {"0": 1}),
        ("versions", "12"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_and_named(field, value):
    error = refusal_of_body(**{field: value})
    assert (error.reason, error.field) == (Reason.MALFORMED, f"body.{field}")


def test_a_heartbeat_asks_about_no_more_than_one_answer_can_tell():
    """Each is answered with a resolution, which is longer than the question."""
    every = tuple(Outstanding(fragment_id=0, from_step=i, to_step=i + 1) for i in range(MAX_OUTSTANDING + 1))
    sent = envelope(heartbeat(outstanding=every[1:]))
    assert decode(encode(sent)) == sent
    with pytest.raises(LocalProtocolError, match="at most 1024 items"):
        encode(envelope(heartbeat(outstanding=every)))


def test_a_contribution_names_no_more_ranges_than_its_version_can_repeat():
    every = tuple(
        DataRange(share=0, share_epoch=0, from_batch=2 * i, to_batch=2 * i + 1) for i in range(MAX_DATA_RANGES + 1)
    )
    decode(encode(envelope(contribution(data=every[1:]))))
    with pytest.raises(LocalProtocolError, match="at most 256 items"):
        encode(envelope(contribution(data=every)))


def test_a_missing_field_is_refused_and_named():
    header = raw()
    del header["body"]["tokens"]
    error = refusal(header)
    assert (error.reason, error.field, error.got) == (Reason.MALFORMED, "body.tokens", "'missing'")


def test_an_unknown_field_is_refused_and_named():
    error = refusal_of_body(mood="good")
    assert (error.reason, error.got) == (Reason.MALFORMED, "'mood'")


def test_a_payload_in_the_body_is_an_unknown_field():
    assert refusal_of_body(EXAMPLES[1], payload=[]).got == "'payload'"


@pytest.mark.parametrize("text", ["two\nlines", "\x1b[31mred", "x" * (MAX_TEXT + 1), 5, None])
def test_text_must_be_short_and_printable(text):
    assert refusal_of_body(EXAMPLES[2], hint=text).reason == Reason.MALFORMED


@pytest.mark.parametrize("island_id", ["aggregator", "broker", "join:a", "a b", 3])
def test_an_island_cannot_take_an_id_that_is_an_address_of_others(island_id):
    assert refusal_of_body(EXAMPLES[2], island_id=island_id).field == "body.island_id"


def test_a_word_outside_its_enum_is_refused():
    assert refusal_of_body(EXAMPLES[3], phase="paused").field == "body.phase"
    assert refusal_of_body(EXAMPLES[3], phase=["running"]).field == "body.phase"


@pytest.mark.parametrize(("start", "end"), [(4, 4), (5, 4)])
def test_an_empty_or_backward_range_of_steps_is_implausible(start, end):
    steps = {"from_step": start, "to_step": end, "from_tokens": 0, "to_tokens": 1}
    error = refusal_of_body(EXAMPLES[1], steps=steps)
    assert (error.reason, error.field) == (Reason.IMPLAUSIBLE, "body.steps.to_step")
    outstanding = [{"fragment_id": 0, "from_step": start, "to_step": end}]
    assert refusal_of_body(outstanding=outstanding).reason == Reason.IMPLAUSIBLE


def test_tokens_that_run_backwards_are_implausible():
    steps = {"from_step": 0, "to_step": 1, "from_tokens": 9, "to_tokens": 8}
    error = refusal_of_body(EXAMPLES[1], steps=steps)
    assert (error.reason, error.field) == (Reason.IMPLAUSIBLE, "body.steps.to_tokens")


@pytest.mark.parametrize(
    ("field", "value"), [("unit_axes", 3), ("shape", [2**40, 2**40]), ("shape", [1] * 33), ("shape", [-1])]
)
def test_an_impossible_tensor_is_malformed(field, value):
    tensor = {"name": "w", "shape": [3, 4], "dtype": "float32", "kind": "rda", "unit_axes": 1} | {field: value}
    assert refusal_of_body(EXAMPLES[2], tensors=[tensor]).field.startswith(f"body.tensors[0].{field}")


# --- bad buffers ------------------------------------------------------------------------------------------------


def refusal_of_buffer(index=0, **changes):
    header, *frames = encode(EXAMPLES[1])
    header = msgpack.unpackb(bytes(header))
    header["buffers"][index] |= changes
    return refusal(header, *frames)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("codec", "f64"),
        ("codec", 4),
        ("shape", [-1, -2]),
        ("shape", [1.0, 2]),
        ("shape", 2),
        ("shape", [1] * 33),
        ("nbytes", -4),
        ("nbytes", 4.0),
        ("nbytes", True),
        ("checksum", -1),
        ("checksum", "abc"),
        ("checksum", None),
    ],
)
def test_a_bad_entry_for_a_buffer_is_malformed(field, value):
    error = refusal_of_buffer(**{field: value})
    assert error.reason == Reason.MALFORMED
    assert error.field == f"buffers[0].{field}"


@pytest.mark.parametrize("shape", [[1, 3], [2**62, 2**62], [2**63 - 1] * 32, [0], [2**33, 2**31]])
def test_a_shape_that_does_not_fit_the_bytes_is_malformed_and_allocates_nothing(shape):
    assert refusal_of_buffer(shape=shape).field == "buffers[0].nbytes"


@pytest.mark.parametrize(("codec", "right"), [("f32", 8), ("bf16", 4), ("int8", 6), ("int4", 5)])
@pytest.mark.parametrize("claimed", [0, 1, 4, 5, 6, 7, 8, 9, 2**63 - 1])
def test_a_buffer_is_read_only_at_the_exact_length_that_its_codec_takes(codec, right, claimed):
    header, *_ = encode(envelope(contribution(payload=(encode_tensor(np.zeros((1, 2), np.float32), Codec.F32),))))
    header = msgpack.unpackb(bytes(header))
    header["buffers"][0] |= {"codec": codec, "nbytes": claimed}
    if claimed == right:
        received = decode([packed(header), bytes(right)])
        assert received.message.payload[0].codec == codec
        assert refusal(header, bytes(right + 1)).field == "buffers[0]"
    else:
        assert refusal(header, bytes(min(claimed, 16))).field == "buffers[0].nbytes"


def test_frames_must_be_as_many_as_the_header_says():
    _, first, second = encode(EXAMPLES[1])
    assert refusal(raw(EXAMPLES[1]), first).field == "number of buffers"
    assert refusal(raw(EXAMPLES[1]), first, second, b"").field == "number of buffers"
    assert refusal(raw(), b"").field == "number of buffers"  # a heartbeat with one
    assert refusal(raw(EXAMPLES[1]) | {"buffers": 2}, first, second).field == "buffers"


def in_pieces(data):
    pieces = Scattered(len(data), fresh)
    pieces.add(memoryview(data))
    return pieces


@pytest.mark.parametrize("form", [bytes, in_pieces])
def test_verify_finds_a_damaged_buffer_and_decode_does_not_look(form):
    header, first, second = encode(EXAMPLES[1])
    damaged = bytearray(second)
    damaged[5] ^= 1
    verify(decode([header, first, form(second)]))
    received = decode([header, first, form(damaged)])
    with pytest.raises(RemoteProtocolError) as caught:
        verify(received)
    assert (caught.value.reason, caught.value.field) == (Reason.CHECKSUM, "buffers[1].checksum")


# --- sizes ------------------------------------------------------------------------------------------------------


def test_a_header_above_its_limit_is_refused_unread():
    limits = Limits(max_header_bytes=64, max_message_bytes=64)
    error = refusal(b"\xff" * 57, limits=limits)
    assert (error.reason, error.field, error.got) == (Reason.OVERSIZE, "header", "65")


def test_a_message_above_its_limit_is_refused_unread():
    limits = Limits(max_header_bytes=1024, max_message_bytes=2048)
    error = refusal(b"\xff", bytes(1024), bytes(1024), limits=limits)
    assert (error.reason, error.field) == (Reason.OVERSIZE, "message")


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


def test_a_manifest_of_many_tensors_is_not_mistaken_for_a_bomb():
    spec = {"shape": (256, 128, 4), "dtype": "float32", "kind": Kind.RDA, "unit_axes": 1}
    tensors = tuple(TensorSpec(name=f"layers/{i}/слой/{i}", **spec) for i in range(20_000))
    sent = envelope(Join(nonce="n", island_id="", hint="", tensors=tensors, tokens_per_step=1), sender="join:n")
    assert decode(encode(sent)) == sent


def test_more_buffers_than_the_limit_are_refused_unread():
    error = refusal(b"\xff", b"", b"", b"", limits=Limits(max_buffers=2))
    assert (error.reason, error.field) == (Reason.OVERSIZE, "number of buffers")


def test_limits_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="max_message_bytes"):
        Limits(max_header_bytes=10, max_message_bytes=9)
    with pytest.raises(ConfigError, match="max_buffers"):
        Limits(max_buffers=0)
