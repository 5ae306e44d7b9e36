"""The codec: every message survives the wire, and no input whatever raises anything but RemoteProtocolError."""

import dataclasses
import math
import os

import numpy as np
import pytest
from hypothesis import given

from benchmarks.hostile.__main__ import fuzz
from broker.base.errors import LocalProtocolError
from broker.wire import messages
from broker.wire.frames import Origin, decode, encode, peek, verify
from broker.wire.headers import Limits
from broker.wire.messages import Codec, Encoded, Leave, Reason, Refused, Want
from broker.wire.schema import MAX_TEXT
from tests import envelopes
from tests.envelopes import contribution, envelope, heartbeat, packed, raw, refusal, refusal_of_body

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine

FUZZ_INPUTS = int(os.environ.get("ATOLL_FUZZ_INPUTS", "5000"))


def buffer_of(**changes):
    fields = {"codec": Codec.F32, "shape": (1,), "checksum": 0, "data": b"1234"}
    return contribution(payload=(Encoded(**(fields | changes)),))


@given(envelopes.ENVELOPES)
def test_every_message_comes_back_from_the_wire_as_it_was(sent):
    assert decode([bytes(frame) for frame in encode(sent)]) == sent


def test_a_probe_asks_for_no_more_buffers_than_an_answer_may_have_and_these_take_the_memory_of_one():
    most = messages.MAX_PROBE_BUFFERS
    example = envelope(messages.Probe(answer_buffers=most, payload=()), sender="join:n", to="broker")
    assert decode(encode(example)) == example
    error = refusal_of_body(example, answer_buffers=most + 1)
    assert (error.reason, error.field) == (Reason.MALFORMED, "body.answer_buffers")
    payload = messages.probe_payload(most)
    answer = messages.Probed(answers=1, release="", clock_s=0.0, payload=payload)
    verify(decode(encode(envelope(answer, sender="broker", to="join:n"))))
    assert {len(each.data) for each in payload} == {messages.PROBE_BUFFER_BYTES}
    assert len({id(each.data) for each in payload}) == 1


def test_payload_buffers_are_passed_through_without_a_copy():
    data = bytes(4096)
    frames = encode(envelope(buffer_of(shape=(1024,), data=data)))
    received = decode(frames)
    forwarded = encode(received)
    assert received.message.payload[0].data.obj is data
    assert forwarded[1].obj is data
    assert bytes(forwarded[0]) == bytes(frames[0])


def test_what_is_passed_on_goes_as_it_came_and_what_is_changed_is_encoded_anew():
    backwards = packed(dict(reversed(raw().items())))  # a peer of another language may order its keys so
    received = decode([backwards])
    assert bytes(encode(received)[0]) == backwards
    assert bytes(encode(dataclasses.replace(received))[0]) == packed(raw())
    sent = envelope(buffer_of(data=np.zeros(1, np.float32)))
    first = encode(sent)
    assert encode(sent)[0] is first[0]
    other = encode(dataclasses.replace(sent, sequence=99))
    assert decode(other) == dataclasses.replace(sent, sequence=99)
    with pytest.raises(LocalProtocolError, match="seq"):
        encode(dataclasses.replace(sent, sequence=-1))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (heartbeat(inner_step=np.int64(3)), "body.inner_step"),
        (heartbeat(tokens=-1), "body.tokens"),
        (heartbeat(loss=math.nan), "body.loss"),
        (heartbeat(versions=[1, 2]), "body.versions"),
        (Want(versions=(0, "1")), r"body.versions\[1\]"),
        (contribution(payload=None), "payload"),
        (contribution(payload=(b"raw",)), r"buffers\[0\]"),
        (buffer_of(shape=(3,)), "nbytes"),
        (buffer_of(checksum=-1), "checksum"),
        (buffer_of(data="1234"), "frame"),
        (buffer_of(data=memoryview(b"12345678")[::2]), "contiguous"),
    ],
)
def test_what_a_peer_would_refuse_is_our_own_error_before_it_is_sent(message, field):
    with pytest.raises(LocalProtocolError, match=field):
        encode(envelope(message))


def test_a_bad_address_is_our_own_error():
    with pytest.raises(LocalProtocolError, match="sender"):
        encode(envelope(heartbeat(), sender="island 0"))


def test_a_remark_is_cleaned_and_cut_rather_than_refused():
    detail = "line 1\nline 2 \x1b[31m" + "x" * 5000
    received = decode(encode(envelope(Refused(kind="join", sequence=-1, reason=Reason.MANIFEST, detail=detail))))
    assert received.message.detail.startswith("line 1 line 2  [31mxxx")
    assert len(received.message.detail) == MAX_TEXT
    assert decode(encode(envelope(Leave(inner_step=1, tokens=2, reason="a\tb")))).message.reason == "a b"


def test_every_refusal_can_be_told_to_the_peer_in_a_refusal():
    ugly = refusal(raw() | {"sender": "\x00\n" * 600})
    answer = Refused(kind="", sequence=-1, reason=Reason(ugly.reason), detail=str(ugly))
    assert decode(encode(envelope(answer))).message.detail == str(ugly)


def test_peek_tells_whose_a_refused_message_is_and_believes_only_what_could_stand_in_a_refusal():
    header = raw() | {"body": {"mood": "good"}}
    assert peek([packed(header)]) == Origin(kind="heartbeat", sender="island-0", sequence=17)
    assert peek([packed(header | {"kind": "x\n", "sender": "a b", "seq": -5})]) == Origin()
    assert peek([]) == peek([b"\xff"]) == peek([b""]) == Origin()
    assert peek([bytes(100)], Limits(max_header_bytes=99, max_message_bytes=99)) == Origin()


def test_broken_copies_of_messages_of_every_kind_are_read_or_refused():
    found = fuzz(FUZZ_INPUTS, seed=20260728)
    assert found.failures == []
    # Some mutations yield another valid message: the fuzzer reaches beyond the first check.
    assert 0.01 < found.outcomes["read"] / FUZZ_INPUTS < 0.5
    assert found.outcomes.keys() >= {"malformed", "oversize", "unknown_kind", "protocol_version", "implausible"}
    assert found.peak_ratio <= 1
