"""What goes over a broker's bulk connections, in chunks, a few messages at a time, and what their other end notes."""

import dataclasses

import pytest

from broker.chunks import chunk_heads
from broker.chunks.chunk_heads import Bond, packed
from broker.chunks.flow import Flow
from broker.chunks.memory import ReusedMemory
from broker.chunks.receiving import Inflow, Refused
from broker.chunks.sending import FIRST_BYTES, STALLED_S, Outflow
from broker.clients.flows import MOST_WAITING, Flows, Put
from broker.routing.events import Blocked, Delivered, Room, Send, Unreachable
from broker.wire import messages as m
from broker.wire.frames import decode, encode
from broker.wire.headers import Limits
from broker.wire.messages import Channel, Envelope
from broker.wire.messages.scattered import LEAST_PIECE_BYTES
from tests import relay_bench

PEER = b"peer"
LARGE = 2 * FIRST_BYTES


class Driven(Flows):
    """Flows whose connections take what ``put`` says, as in a broker."""

    def __init__(self, put, limits, most_bytes=0):
        super().__init__(limits, most_bytes)
        self.put = put

    def go_on(self, peer, now_s):
        first = self.first_of(peer)
        for route, step in self.steps(first):
            self.sent(first, step, self.put(route, step.frames), now_s)
        return self.outcome(first)

    def send(self, send, now_s):
        failed = super().send(send)
        return self.go_on(send.peer, now_s) if failed is None else [failed]


class Line:
    """One connection, and the client at its other end."""

    def __init__(self):
        self.outcome, self.frames = Put.TAKEN, []
        self.flows = Driven(self._put, Limits())
        self.into = Inflow(Limits(), ReusedMemory(0))
        self.came = []

    def _put(self, peer, frames):
        if self.outcome is Put.TAKEN:
            self.frames.append([bytes(memoryview(each)) for each in frames])
        return self.outcome

    def read(self):
        """The client takes in what has come."""
        while self.frames:
            first, *frames = self.frames.pop(0)
            found = [[first, *frames]]
            head = chunk_heads.read(first)
            if head is not None:
                found = self.into.take_in(head, frames, None)[1] if isinstance(head, chunk_heads.Chunk) else []
            self.came += [decode(each).sequence for each in found]

    def credit(self, now_s=0.1):
        """It says what it has; returns what becomes of that."""
        assert self.flows.take(PEER, 7, [chunk_heads.packed(self.into.credit())], now_s) == []
        return self.flows.go_on(PEER, now_s)


def envelope(sequence, message):
    return Envelope(run_id="demo", sender="broker", incarnation=0, sequence=sequence, to="a", message=message)


def version(sequence, nbytes=LARGE, peer=PEER):
    payload = (m.Encoded(codec=m.Codec.F32, shape=(nbytes // 4,), checksum=0, data=memoryview(bytes(nbytes))),)
    message = dataclasses.replace(relay_bench.version(), payload=payload)
    return Send(channel=Channel.BULK, peer=peer, envelope=envelope(sequence, message), size_bytes=nbytes)


def chunks(number=1):
    """Those of a message, as far as they go without credit."""
    out = Outflow()
    out.put(encode(version(number, FIRST_BYTES // 2).envelope))
    return list(steps(out, 0.0))


def steps(out, now_s):
    """The frames of each step that may go."""
    while (step := out.next()) is not None:
        out.sent(step, now_s)
        yield [bytes(memoryview(each)) for each in step.frames]


@pytest.fixture
def line():
    line = Line()
    line.flows.take(PEER, 7, [b"\x80"], 0.0)  # something came over its descriptor
    return line


def test_a_message_goes_in_chunks_as_credit_comes_and_is_delivered_when_it_is_noted(line):
    sent = version(1)
    assert line.flows.send(sent, 0.0) == []
    line.read()
    assert line.came == []
    assert line.credit() == []
    line.read()
    assert line.came == [1]
    assert line.credit() == [Delivered(channel=Channel.BULK, peer=PEER, envelope=sent.envelope)]


def test_few_messages_wait_and_the_relay_hears_of_room(line):
    sends = [version(number) for number in range(1, MOST_WAITING + 2)]
    (blocked,) = (event for send in sends for event in line.flows.send(send, 0.0))
    assert isinstance(blocked, Blocked)
    assert blocked.envelope.sequence == MOST_WAITING + 1
    events = []
    while not any(isinstance(event, Room) for event in events):
        line.read()
        events += line.credit()
    line.read()
    assert line.came[0] == 1


def test_a_connection_that_takes_nothing_is_tried_again(line):
    line.outcome = Put.FULL
    assert line.flows.send(version(1, 4096), 0.0) == []
    assert line.flows.full == {PEER: {0}}
    line.outcome = Put.TAKEN
    assert line.flows.go_on(PEER, 0.1) == []
    line.read()
    assert line.came == [1]
    assert not line.flows.full


@pytest.mark.parametrize("how", ["found gone", "seen to end"])
def test_what_waits_for_a_connection_that_ends_is_given_back(line, how):
    line.flows.send(version(1), 0.0)
    line.flows.send(version(2), 0.0)
    line.read()
    line.outcome = Put.GONE
    gone = line.flows.ended(7, 1.0) if how == "seen to end" else line.credit()
    assert [type(event) for event in gone] == [Unreachable] * 2
    assert [event.envelope.sequence for event in gone] == [1, 2]


def test_a_tensor_in_chunks_is_passed_on_where_its_pieces_lie(line):
    out, came, found = Outflow(), [], []
    out.put(encode(version(5, 16 << 20).envelope))
    while not found:
        for frames in steps(out, 0.0):
            came += frames[1:]
            found += line.flows.take(PEER, 7, frames, 0.0)
            line.flows.go_on(PEER, 0.0)
        for first, *_ in line.frames:  # only then: what is held up by the window widens it
            out.credited(chunk_heads.read(first), 0.0)
        line.frames.clear()
    ((_, tensor),) = found
    large = {id(each) for each in came if len(each) >= LEAST_PIECE_BYTES}
    assert large
    assert large <= {id(piece.obj) for piece in tensor}


def test_what_a_connection_cut_off_on_its_way_in_is_asked_for_and_goes_on(line):
    """Under the same key: another one has nothing of it."""
    out = Outflow()
    out.put(encode(version(5, 8 << 20).envelope), key=1)
    for frames in steps(out, 0.0):
        line.flows.take(PEER, 7, frames, 0.0, "hers")
        for first, *_ in line.frames:
            out.credited(chunk_heads.read(first), 0.0)
        line.flows.go_on(PEER, 0.0)
        if out.given_bytes > 4 << 20:
            break
    assert out.cut_off() == [1]
    line.flows.ended(7, 1.0)
    for key, there in (("his", False), ("hers", True)):
        peer = key.encode()
        line.frames.clear()
        out = Outflow()
        out.put(encode(version(6, 8 << 20).envelope), key=1, asks=True)
        (question,) = steps(out, 2.0)  # no more until it is answered
        line.flows.take(peer, 8, question, 2.0, key)
        line.flows.go_on(peer, 2.0)
        answer = chunk_heads.read(line.frames[0][0])
        assert (answer.offset > 4 << 20) == there
        out.resume(answer)
        assert chunk_heads.read(out.next().frames[0]).offset == answer.offset
        line.flows.ended(8, 2.0)


def test_what_a_connection_cut_off_on_its_way_out_asks_over_the_next_one(line):
    line.flows.send(version(1, 8 << 20), 0.0)
    line.flows.ended(7, 1.0)
    line.frames.clear()
    line.flows.send(version(2, 8 << 20, peer=b"next"), 1.0)
    assert isinstance(chunk_heads.read(line.frames[0][0]), chunk_heads.Ask)


def test_a_descriptor_may_be_anothers_before_an_end_is_told_and_that_is_not_the_others_end(line):
    line.flows.send(version(1), 0.0)
    first, *rest = chunks()
    line.flows.take(b"next", 7, first, 1.0)  # the one behind 7 has ended, then
    assert line.flows.stalled(1000.0) == []
    (gone,) = (event for event in line.flows.go_on(b"next", 1.0) if isinstance(event, Unreachable))
    assert gone.envelope.sequence == 1
    assert line.flows.go_on(b"next", 1.0) == line.flows.ended(7, 1.1) == []
    found = [line.flows.take(b"next", 7, each, 1.2) for each in rest]
    assert [decode(each).sequence for each in found[-1]] == [1]
    line.flows.take(b"next", 7, chunks(2)[0], 1.3)
    assert line.flows.partial_bytes > 0
    line.flows.ended(7, 1.4)
    assert line.flows.take(b"next", 7, chunks(3)[0], 1.5) == []


def test_chunks_that_are_wrong_are_refused_and_say_whose_they_were(line):
    head = chunk_heads.Chunk(1, 1 << 40, 0, 0)
    for frames in ([chunk_heads.packed(head), b"x"], [b"\xc1?"]):
        (found,) = line.flows.take(PEER, 7, frames, 0.0)
        assert isinstance(found, Refused)


def test_a_connection_that_notes_nothing_is_to_be_ended(line):
    line.flows.send(version(1), 0.0)
    assert line.flows.stalled(STALLED_S - 1.0) == []
    assert line.flows.stalled(STALLED_S + 1.0) == [7]
    line.read()
    line.credit(STALLED_S + 2.0)
    assert line.flows.stalled(2 * STALLED_S) == []


def test_what_is_urgent_does_not_pile_up_for_who_reads_nothing(line):
    line.outcome = Put.FULL
    probed = m.Probed(answers=1, release="0.1.0", clock_s=0.0, payload=())
    sends = [Send(channel=Channel.BULK, peer=PEER, envelope=envelope(number, probed)) for number in range(100)]
    failures = [event for send in sends for event in line.flows.send(send, 0.0)]
    assert len(failures) == 100 - 2 * MOST_WAITING


def test_what_a_connection_did_not_take_is_given_again_and_holds_up_no_other():
    flow, (first, *_) = Flow(Limits(), None), chunks()
    flow.out.answer(1, packed(Bond(7, 1)))
    flow.take_in(chunk_heads.read(first[0]), first[1:], None, 0.0)
    assert flow.out.next({0, 1}) is None
    credit, bond = flow.out.next({1}), flow.out.next({0})
    assert chunk_heads.read(credit.frames[0]) == flow.incoming.credit()
    assert (bond.subflow, chunk_heads.read(bond.frames[0])) == (1, Bond(7, 1))
    for step in (bond, credit):
        flow.out.sent(step, 0.0)
    assert flow.out.next() is None
