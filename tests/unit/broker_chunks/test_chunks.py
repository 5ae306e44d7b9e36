"""Messages in chunks: cut at one end, put together at the other, whatever their frames and whenever credit comes."""

import itertools

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.base.errors import RemoteProtocolError
from broker.chunks import chunk_heads
from broker.chunks.chunk_heads import Chunk, Credit, Resume, packed
from broker.chunks.memory import ReusedMemory
from broker.chunks.receiving import (
    CREDIT_BYTES,
    KEPT_S,
    Inflow,
    Partial,
    PartialMessages,
    Refused,
    fresh,
    key_in,
    key_of,
)
from broker.chunks.sending import (
    FIRST_BYTES,
    LEAST_CHUNK_BYTES,
    MOST_CHUNK_BYTES,
    MOST_UNDER_WAY_BYTES,
    STALLED_S,
    WHOLE_BYTES,
    Outflow,
)
from broker.wire import headers
from broker.wire.headers import Limits
from broker.wire.messages.scattered import BLOCK_BYTES, LEAST_PIECE_BYTES, Scattered
from tests.profiles import examples

MOST = 1 << 30
SIZES = [0, 1, 300, 4096, WHOLE_BYTES, WHOLE_BYTES + 1, 300_000, 700_000]


def inflow(most_bytes=MOST, most_frames=1000, *, in_pieces=False):
    limits = Limits(max_header_bytes=1, max_message_bytes=most_bytes, max_buffers=most_frames - 1)
    return Inflow(limits, None if in_pieces else ReusedMemory(0))


def taken(into, head, frames, kept=None):
    """What becomes of what came over the one connection."""
    answers, found = into.take_in(head, frames, kept)
    return next(iter([*map(chunk_heads.read, answers), *found]), None)


def cut(*sizes, seed=0):
    """A message of frames of these sizes."""
    pattern = bytes(k % 251 for k in range(502))
    return [(pattern[(seed + i) % 251 :][:251] * (size // 251 + 1))[:size] for i, size in enumerate(sizes)]


def same(frames, expected):
    came = [each if isinstance(each, Scattered) else (each,) for each in frames]
    return [b"".join(map(bytes, each)) for each in came] == [bytes(each) for each in expected]


def carried(out, into, now_s=0.0):
    """Carries over what may go now; returns the messages that came of it, and the chunks."""
    arrived, chunks = [], []
    while (step := out.next()) is not None:
        frames = [bytes(memoryview(each)) for each in step.frames]
        out.sent(step, now_s)
        head = chunk_heads.read(frames[0])
        if head is None:
            arrived.append(frames)
            continue
        chunks.append(head)
        found = taken(into, head, frames[1:])
        if found is not None:
            arrived.append(found)
    return arrived, chunks


def test_heads_are_told_from_messages_and_read_back():
    for head in (Chunk(3, 1 << 40, 7 << 30, 5), Credit(1 << 40, 2 << 40), chunk_heads.Ask(1, 2), Resume(3, 1 << 40)):
        assert chunk_heads.read(packed(head)) == head
    assert chunk_heads.read(b"\x8a") is None
    assert chunk_heads.read(b"") is None


@pytest.mark.parametrize(
    "frame", [b"\xc1", b"\xc1D", b"\xc1X" + bytes(32), b"\xc1C" + bytes(32), packed(Credit(1, 2)) + b"x"]
)
def test_a_head_that_is_none_is_malformed(frame):
    with pytest.raises(RemoteProtocolError, match="malformed"):
        chunk_heads.read(frame)


def window_bytes(out):
    """What may be under way at a time."""
    return sum(each.window_bytes for each in out._subflows.values())


@examples(60)
@given(
    st.lists(st.lists(st.sampled_from(SIZES), min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.floats(0, 3), min_size=60, max_size=60),
)
def test_every_message_arrives_once_in_order_and_whole_and_in_pieces_where_it_goes_on(messages, delays):
    sent = on = [cut(9, *sizes, seed=i) for i, sizes in enumerate(messages)]
    for in_pieces in (True, False):  # to a broker, and from it
        out, into, arrived, now_s = Outflow(), inflow(in_pieces=in_pieces), [], 0.0
        for frames in on:
            out.put(frames)
        for delay_s in delays:
            arrived += carried(out, into, now_s)[0]
            assert out.given_bytes - out.received_bytes <= max(FIRST_BYTES, window_bytes(out)) * 2
            now_s += delay_s
            out.credited(into.credit(), now_s)
        assert len(arrived) == len(sent)
        assert len(out) == 0
        assert all(same(*pair) for pair in zip(arrived, sent, strict=True))
        assert into.partial_bytes == 0
        on = arrived


def test_small_messages_without_buffers_and_urgent_ones_travel_whole_and_all_others_in_chunks():
    out, into = Outflow(), inflow()
    out.put(cut(WHOLE_BYTES))
    out.put(cut(100, WHOLE_BYTES - 100), urgent=True)
    assert carried(out, into)[1] == []
    out.put(cut(100, 10))  # it has a buffer
    assert [chunk.total for chunk in carried(out, into)[1]] == [110]
    out.put(cut(100, WHOLE_BYTES - 99))
    arrived, chunks = carried(out, into)
    assert [chunk.offset for chunk in chunks] == [0, LEAST_CHUNK_BYTES]
    assert len(arrived) == 1


def test_what_is_urgent_passes_between_two_chunks():
    out, into = Outflow(), inflow()
    big, small = cut(100, 3 * FIRST_BYTES), cut(50)
    out.put(big)
    assert carried(out, into)[0] == []  # the window is full
    out.put(small, urgent=True)
    assert same(carried(out, into)[0][0], small)
    out.credited(into.credit(), 0.01)
    while len(out):
        arrived, _ = carried(out, into)
        out.credited(into.credit(), 0.01)
    assert same(arrived[0], big)


def test_a_message_that_is_begun_is_not_withdrawn():
    out, into = Outflow(), inflow()
    first, second = out.put(cut(100, 3 * FIRST_BYTES)), out.put(cut(10, 10))
    carried(out, into)
    assert not out.withdraw(first)
    assert out.withdraw(second)
    assert out.unsent() == [first]


# --- credit and pace ---


@pytest.mark.parametrize("delay_s", [0.08, 5.0])
def test_a_fast_link_gets_more_and_larger_chunks_and_a_slow_one_less_under_way(delay_s):
    """Each credit comes back after so long."""
    out, into, now_s, sizes = Outflow(), inflow(), 0.0, []
    out.put(cut(10, 200_000_000 if delay_s < 1 else 40 * FIRST_BYTES))
    for _ in range(40):
        _, chunks = carried(out, into, now_s)
        sizes += [b.offset - a.offset for a, b in itertools.pairwise(chunks)]
        now_s += delay_s
        out.credited(into.credit(), now_s)
    if delay_s < 1:
        assert window_bytes(out) > 20e6  # 2 Gbit/s times 80 ms
        assert max(sizes) == MOST_CHUNK_BYTES
    else:
        assert window_bytes(out) <= 2 * LEAST_CHUNK_BYTES
        assert min(sizes) == LEAST_CHUNK_BYTES


def test_nothing_goes_beyond_the_credit_of_the_other_end_which_has_no_more_than_was_sent():
    out, into = Outflow(), inflow()
    out.put(cut(10, 4 * FIRST_BYTES))
    carried(out, into)
    given = out.given_bytes
    assert into.credit() == Credit(given, given + CREDIT_BYTES)
    for claim in (Credit(given, given), Credit(0, 0)):  # all is received, and no more is taken
        out.credited(claim, 0.0)
        assert out.next() is None
    out.credited(Credit(1 << 50, given + MOST_UNDER_WAY_BYTES), 0.0)
    assert out.received_bytes == out.given_bytes == given
    assert out.next() is not None


def test_a_message_is_delivered_when_the_other_end_has_all_of_it():
    out, into = Outflow(), inflow()
    out.put(cut(100, 10), "small")
    large = out.put(cut(100, 2 * FIRST_BYTES), "large")
    carried(out, into)
    assert out.delivered() == []
    assert out.waiting_bytes == 110 + large.nbytes
    out.credited(Credit(110, FIRST_BYTES), 0.1)
    assert [each.what for each in out.delivered()] == ["small"]
    while len(out):
        out.credited(into.credit(), 0.2)
        carried(out, into, 0.2)
    assert out.delivered() == []
    out.credited(into.credit(), 0.3)
    assert [each.what for each in out.delivered()] == ["large"]
    assert out.waiting_bytes == 0


def test_silence_begins_with_what_is_under_way_and_ends_with_what_is_noted():
    out, into = Outflow(), inflow()
    assert out.silent_s(100.0) == 0.0
    out.put(cut(100, 2 * FIRST_BYTES))
    carried(out, into, 100.0)
    assert out.silent_s(107.0) == 7.0
    out.credited(into.credit(), 108.0)
    assert out.silent_s(109.0) == 0.0  # nothing is under way
    carried(out, into, 110.0)
    assert out.silent_s(111.0) == 1.0
    assert out.patience_s == max(STALLED_S, 4 * 8.0)


# --- what is passed on as it came ---


@given(
    st.lists(st.sampled_from([1, 1000, LEAST_PIECE_BYTES - 1, LEAST_PIECE_BYTES, MOST_CHUNK_BYTES]), min_size=1),
    st.integers(0, 1 << 40),
)
def test_pieces_are_their_buffer_and_large_ones_stay_where_they_are(sizes, at):
    came = [memoryview(each) for each in cut(*sizes)]
    buffer = Scattered(sum(sizes), fresh)
    for each in came:
        assert buffer.missing_bytes > 0
        buffer.add(each)
    whole, at = b"".join(came), at % (sum(sizes) + 1)
    assert buffer.missing_bytes == 0
    assert buffer.nbytes == len(whole)
    assert b"".join(buffer) == whole
    for wanted in (1, 1000, len(whole) + 1):
        found = buffer[at : at + wanted]
        assert whole.startswith(bytes(found), at)
        assert (0 < found.nbytes <= wanted) or at == len(whole)
    ours = {id(each.obj) for each in buffer}
    assert {id(each.obj) for each in came if each.nbytes >= LEAST_PIECE_BYTES} <= ours
    assert all(each.nbytes <= BLOCK_BYTES for each in buffer)


# --- what a broken connection has cut off ---


def header(checksums, sequence):
    """A header that announces buffers with these checksums, sealed as ours are."""
    entries = [{"checksum": each} for each in checksums]
    return headers.seal(msgpack.packb({"seq": sequence, "buffers": entries, "checksum": 2**64 - 1}))


@given(
    st.lists(st.sampled_from([0, 1, 4096, 700_000, 1_500_000]), min_size=1, max_size=4),
    st.integers(0, 3_000_000),
    st.booleans(),
)
@examples(40)
def test_what_was_cut_off_anywhere_goes_on_and_arrives_whole(sizes, until_bytes, in_pieces):
    buffers, kept, sums = cut(*sizes), PartialMessages(MOST), [7 + i for i in range(len(sizes))]
    total = sum(sizes)
    out, into = Outflow(), inflow(in_pieces=in_pieces)
    out.put([header(sums, 1), *buffers], key=key_of(sums))
    while (step := out.next()) is not None and into.credit().received < until_bytes:
        taken(into, chunk_heads.read(step.frames[0]), [bytes(memoryview(each)) for each in step.frames[1:]])
        out.sent(step, 0.0)
        out.credited(into.credit(), 0.1)
    if into.credit().received == 0 or into.partial_bytes == 0:
        return  # none of it has gone, or all
    assert out.cut_off() == [key_of(sums)]
    if (cut_off := into.cut_off()) is not None:
        kept.keep(*cut_off, 0.0)
    had = 0 if cut_off is None else cut_off[1].nbytes
    again, into = Outflow(), inflow(in_pieces=in_pieces)
    again.put([header(sums, 2), *buffers], key=key_of(sums), asks=True)
    arrived = None
    while (step := again.next()) is not None:
        head, frames = chunk_heads.read(step.frames[0]), [bytes(memoryview(each)) for each in step.frames[1:]]
        again.sent(step, 0.0)
        if isinstance(head, chunk_heads.Ask):
            again.resume(taken(into, head, frames, kept))
        else:
            arrived = taken(into, head, frames) or arrived
        again.credited(into.credit(), 0.1)
    assert same(arrived, [header(sums, 2), *buffers])
    assert into.credit().received == len(header(sums, 2)) + total - had
    assert kept.nbytes == 0


def test_what_is_kept_is_bounded_and_forgotten():
    kept = PartialMessages(100)
    for key in range(3):
        kept.keep(key, Partial([b""], None, 40, 50), float(key))
    assert kept.nbytes == 80
    assert kept.take(0, 50) is None
    assert kept.take(1, 51) is None  # of another size
    kept.keep(9, Partial([b""], None, 40, 50), 3.0 + KEPT_S)
    assert kept.nbytes == 40


def test_an_answer_that_makes_no_sense_goes_on_from_the_header():
    out = Outflow()
    frames = [header([5], 1), *cut(2_000_000)]
    transfer = out.put(frames, key=5, asks=True)
    out.sent(out.next(), 0.0)
    for answer in (Resume(2, 100), Resume(1, 5_000_000)):
        out.resume(answer)
    assert chunk_heads.read(out.next().frames[0]).offset == len(frames[0])
    assert transfer.sent_bytes == len(frames[0])


@pytest.mark.parametrize(
    "header", [b"", b"no header", headers.seal(msgpack.packb({"buffers": [1], "checksum": 2**64 - 1}))]
)
def test_of_what_is_no_header_nothing_is_kept(header):
    assert key_in(header, Limits()) is None


# --- what is refused ---


def test_a_message_that_is_too_large_is_refused_once_with_its_header_and_swallowed():
    into = inflow(most_bytes=1000, most_frames=3)
    found = taken(into, Chunk(1, 2000, 0, 0), [b"h" * 10, b"x" * 990])
    assert isinstance(found, Refused)
    assert (found.error.reason, found.header) == ("oversize", [b"h" * 10])
    assert taken(into, Chunk(1, 2000, 1000, 0), [b"x" * 1000]) is None
    assert into.credit().received == 2000
    found = taken(into, Chunk(2, 4, 0, 0), [b"x"] * 4)
    assert found.error.reason == "oversize"
    assert "buffers" in found.error.field
    assert same(taken(into, Chunk(3, 900, 0, 0), [b"y" * 900]), [b"y" * 900])


@pytest.mark.parametrize(
    "second",
    [
        (Chunk(1, 300, 200, 0), [b"x" * 100]),  # a hole
        (Chunk(2, 300, 100, 0), [b"x" * 200]),  # another message
        (Chunk(1, 301, 100, 0), [b"x" * 200]),  # of another size
        (Chunk(1, 300, 100, 0), [b"x" * 201]),  # more than there is
        (Chunk(1, 300, 100, 101), [b"x" * 100]),  # a frame that is longer than the message
        (Chunk(1, 300, 100, 0), [b"x" * 50]),  # less than the frame that is open
        (Chunk(1, 300, 100, 0), []),
    ],
)
def test_what_does_not_continue_is_refused_once(second):
    into = inflow()
    assert taken(into, Chunk(1, 300, 0, 200), [b"x" * 100]) is None
    found = taken(into, *second)
    assert isinstance(found, Refused)
    assert found.error.reason == "malformed"
    head = second[0]
    assert taken(into, head._replace(offset=head.offset + sum(map(len, second[1])), rest=0), [b"x"]) is None
    assert same(taken(into, Chunk(9, 5, 0, 0), [b"hello"]), [b"hello"])


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 4, st.lists(st.integers(0, 4), max_size=3)), max_size=12))
def test_no_chunks_do_any_harm(claims):
    into = inflow(most_bytes=10)
    for transfer, total, offset, rest, sizes in claims:
        taken(into, Chunk(transfer, total, offset, rest), [b"x" * size for size in sizes])
        assert into.partial_bytes <= 10
    assert same(taken(into, Chunk(9, 5, 0, 0), [b"hello"]), [b"hello"])
