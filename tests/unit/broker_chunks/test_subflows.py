"""A flow of chunks over several connections: who belongs together, what goes where, and in which order it is read."""

import random
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from broker.chunks import chunk_heads
from broker.chunks.chunk_heads import Bond, Chunk, Credit, packed
from broker.chunks.memory import ReusedMemory
from broker.chunks.receiving import CREDIT_BYTES, MOST_EARLY_BYTES, Inflow
from broker.chunks.sending import MOST_SUBFLOWS, MOST_UNDER_WAY_BYTES, Outflow
from broker.clients.flows import Bonds, Put
from broker.transport.chunked import Bonding, Chunked
from broker.wire.headers import DEFAULT_LIMITS, Limits
from tests.profiles import examples
from tests.unit.broker_clients.test_flows import Driven, version


def test_the_first_connection_is_bound_before_the_others_and_each_once():
    bonding = Bonding(2, lambda: 7)
    assert bonding.due({0: 0}) == {}  # none stands
    assert bonding.due({0: 1, 1: 1}) == {0: Bond(7, 0)}
    for bond in (Bond(8, 1), Bond(7, 2), Bond(7, 1)):  # which nobody asked for
        assert not bonding.heard(bond, 1)
        assert not bonding.carries(1)
    bonding.said(0, 1)
    assert bonding.due({0: 1, 1: 1}) == {}  # until the broker has answered
    assert not bonding.wants_others
    assert not bonding.heard(Bond(7, 0), 0)  # which carries chunks already
    assert bonding.wants_others
    assert bonding.due({0: 1, 1: 0, 2: 1}) == {2: Bond(7, 2)}
    bonding.said(2, 1)
    assert not bonding.carries(2)
    assert bonding.due({0: 1, 2: 2}) == {2: Bond(7, 2)}, "it broke before it carried anything"
    assert not bonding.torn({0: 1, 2: 2})
    bonding.said(2, 2)
    assert bonding.heard(Bond(7, 2), 2)
    assert bonding.carries(2)
    assert not bonding.heard(Bond(7, 2), 2)  # once
    assert not bonding.torn({0: 1, 2: 2})
    assert bonding.torn({0: 1, 2: 0})
    assert bonding.torn({0: 1, 2: 3})
    assert Bonding(0, lambda: 7).due({0: 1}) == {}  # one connection says nothing


def test_a_broker_binds_what_came_under_the_same_key_and_number():
    bonds = Bonds()
    assert bonds.bind(b"a", Bond(7, 0), "key")
    assert not bonds.bind(b"x", Bond(7, 0), "key")  # there is a first one
    assert not bonds.bind(b"x", Bond(7, 1), "another key")
    assert not bonds.bind(b"x", Bond(8, 1), "key")
    assert not bonds.bind(b"x", Bond(7, MOST_SUBFLOWS), "key")
    assert bonds.bind(b"b", Bond(7, 1), "key")
    assert not bonds.bind(b"c", Bond(7, 1), "key")  # that place is taken
    assert not bonds.bind(b"b", Bond(7, 2), "key")  # it has one
    assert bonds.place_of(b"b") == (b"a", 1)
    assert bonds.place_of(b"x") == (b"x", 0)
    assert bonds.route(b"a", 1) == b"b"
    assert bonds.route(b"a", 0) == b"a"
    assert bonds.end(b"a") == [b"a", b"b"]
    assert bonds.place_of(b"b") == (b"b", 0)
    assert bonds.bind(b"b", Bond(7, 0), "key")


class Ways:
    """The connections, on which chunks are under way."""

    def __init__(self, connections):
        limits = Limits(max_header_bytes=1, max_message_bytes=1 << 40)
        self.out, self.into = Outflow(), Inflow(limits, ReusedMemory(0))
        for subflow in range(1, connections):
            self.out.spread(subflow)
            self.into.spread(subflow)
        self.steps, self.arrived, self.now_s = [deque() for _ in range(connections)], [], 0.0

    def give(self):
        """All goes that may."""
        while (step := self.out.next()) is not None:
            self.steps[step.subflow].append([bytes(memoryview(each)) for each in step.frames])
            self.out.sent(step, self.now_s)

    def take(self, subflow):
        """One chunk arrives and is noted; returns its bytes."""
        first, *frames = self.steps[subflow].popleft()
        _, found = self.into.take_in(chunk_heads.read(first), frames, None, subflow)
        self.arrived += [[bytes(memoryview(each)) for each in message] for message in found]
        self.now_s += 0.01
        self.out.credited(self.into.credit(subflow), self.now_s, subflow)
        return sum(map(len, frames))


@given(
    st.integers(2, 5),
    st.lists(
        st.lists(st.sampled_from([0, 1, 4096, 300_000, 1_000_000]), min_size=1, max_size=3), min_size=1, max_size=4
    ),
    st.integers(0, 2**32),
)
@examples(60)
def test_whatever_way_chunks_take_messages_arrive_once_in_order_and_whole(connections, sizes, seed):
    """Each connection keeps its order, and is as slow as it likes."""
    drawn, ways, delivered = random.Random(seed), Ways(connections), []
    sent = [[drawn.randbytes(size) for size in (100, *each)] for each in sizes]
    for frames in sent:
        ways.out.put(frames, len(frames))
    while ways.out or ways.out.waiting_bytes:
        ways.give()
        ways.take(drawn.choice([each for each in range(connections) if ways.steps[each]]))
        delivered += ways.out.delivered()
        assert len(delivered) <= len(ways.arrived)
    assert ways.arrived == sent
    assert [each.what for each in delivered] == list(map(len, sent))
    assert ways.into.partial_bytes == 0
    assert ways.out.cut_off() == []


def test_a_slower_connection_takes_fewer_chunks():
    ways, took = Ways(2), [0, 0]
    ways.out.put([bytes(100), *[bytes(1 << 20)] * 40])
    while ways.out or ways.out.waiting_bytes:
        ways.give()
        for subflow, rate in enumerate((3, 1)):  # chunks at a time
            for _ in range(min(rate, len(ways.steps[subflow]))):
                took[subflow] += ways.take(subflow)
    assert took[0] > 2 * took[1] > 0


def test_a_sender_does_not_run_ahead_of_a_chunk_that_is_late():
    out = Ways(2).out
    out.put([bytes(100), *[bytes(1 << 20)] * 200])
    given, now_s = 0, 0.0
    for _ in range(400):  # the first connection delivers nothing
        while (step := out.next()) is not None:
            out.sent(step, now_s)
            given += step.nbytes * (step.subflow == 1)
        now_s += 0.01
        out.credited(Credit(given, given + CREDIT_BYTES), now_s, 1)
    assert MOST_UNDER_WAY_BYTES <= out.given_bytes < MOST_UNDER_WAY_BYTES + (4 << 20)
    assert out.delivered() == []


def test_chunks_that_nobody_can_use_are_not_kept_for_ever():
    into = Ways(2).into
    piece, number = bytes(1 << 20), 0
    while not into.broken:
        number += 1  # never the chunk that is due
        assert into.take_in(Chunk(2, 1 << 30, number << 20, 0), [piece], None, 1) == ([], [])
        assert into.partial_bytes <= MOST_EARLY_BYTES
    assert number == (MOST_EARLY_BYTES >> 20) + 1
    assert into.partial_bytes == 0


def test_a_flow_ends_with_any_of_its_connections():
    put = []
    flows = Driven(lambda peer, frames: put.append((peer, bytes(frames[0]))) or Put.TAKEN, Limits())
    for fd, peer in enumerate((b"a", b"b")):
        assert flows.take(peer, fd, [packed(Bond(7, fd))], 0.0, "key") == []
        assert flows.go_on(peer, 0.0) == []
    assert put == [(b"a", packed(Bond(7, 0))), (b"b", packed(Bond(7, 1)))]
    assert flows.first_of(b"b") == b"a"
    head = Chunk(1, 2000, 1000, 0)
    assert flows.take(b"b", 1, [packed(head), bytes(1000)], 0.1, "key") == []
    assert flows.take(b"a", 0, [packed(Chunk(1, 2000, 0, 0)), bytes(1000)], 0.1, "key") != []
    assert flows.stalled(1.0) == []
    assert flows.ended(1, 1.0) == []
    assert flows.stalled(1.0) == [0]  # its client is to make both anew
    assert flows.take(b"a", 0, [packed(head), bytes(1000)], 1.1, "key") == []
    assert flows.partial_bytes == 0
    assert flows.ended(0, 2.0) == []
    assert flows.stalled(2.0) == []


def test_nothing_goes_over_a_connection_before_it_is_told_that_it_is_one_of_the_flow():
    outcome, put = {b"b": Put.FULL}, []

    def hand_over(peer, frames):
        put.append((peer, chunk_heads.read(bytes(frames[0]))))
        return outcome.get(peer, Put.TAKEN)

    flows = Driven(hand_over, Limits())
    for fd, peer in enumerate((b"a", b"b")):
        flows.take(peer, fd, [packed(Bond(7, fd))], 0.0)
        flows.go_on(peer, 0.0)
    assert flows.full == {b"a": {1}}
    flows.take(b"b", 1, [packed(Credit(1 << 40, 1 << 41))], 0.1)  # of nothing
    flows.send(version(1, 4 << 20, peer=b"a"), 0.2)
    assert {peer for peer, head in put if isinstance(head, Chunk)} == {b"a"}
    outcome.clear()
    flows.go_on(b"a", 0.3)
    flows.take(b"a", 0, [packed(Credit(1 << 40, 1 << 41))], 0.4)
    flows.go_on(b"a", 0.4)
    assert {peer for peer, head in put if isinstance(head, Chunk)} == {b"a", b"b"}
    assert [head for peer, head in put if peer == b"b" and not isinstance(head, Chunk)] == [Bond(7, 1)] * 3


few = st.integers(0, 3)
anything = st.one_of(
    st.builds(Bond, few, few),
    st.builds(Credit, st.integers(0, 3000), st.integers(0, 1 << 20)),
    st.builds(Chunk, few, st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 1000)),
    st.builds(chunk_heads.Ask, few, st.integers(0, 3000)),
    st.builds(chunk_heads.Resume, few, st.integers(0, 3000)),
)


@given(st.lists(st.tuples(few, st.one_of(anything, st.sampled_from(["end", "send", "full"])), st.integers(0, 1000))))
def test_whatever_peers_say_over_several_connections_does_no_harm(said):
    """Whoever they are, in whatever order; also where a connection takes nothing."""
    full = set()
    limits = Limits(max_message_bytes=1 << 24)
    flows = Driven(lambda peer, frames: Put.FULL if peer in full else Put.TAKEN, limits, 4000)
    for number, (fd, what, nbytes) in enumerate(said):
        peer = bytes([fd])
        if what == "end":
            flows.ended(fd, float(number))
        elif what == "full":
            full ^= {peer}
        elif what == "send":
            flows.send(version(number, 4 * nbytes, peer=flows.first_of(peer)), float(number))
        else:
            flows.take(peer, fd, [packed(what), bytes(nbytes)], float(number))
        flows.go_on(peer, float(number))
        flows.stalled(float(number))
        assert 0 <= flows.partial_bytes <= flows._most_bytes + (1 << 24)
    for fd in range(4):
        flows.ended(fd, 1e3)
    assert flows._partial_bytes == 0


def test_a_chunk_that_overtakes_the_answer_over_another_connection_waits_for_those_before_it():
    """The broker spreads chunks as soon as it has answered, and the answer is still on its way."""
    chunked = Chunked(DEFAULT_LIMITS, others=1)
    chunked.over(1, 0.0)
    ((_, bond),) = chunked.due({0: 1})
    chunked.said(0, 1)
    chunked.take_in([bond], 0.0)
    assert chunked.bonding.wants_others
    ((_, bond),) = chunked.due({0: 1, 1: 1})
    chunked.said(1, 1)
    sent = [bytes(100), bytes(range(256)) * 400]
    early, late = (slice(0, 51_200), slice(51_200, None))
    chunked.take_in([packed(Chunk(1, 102_500, 0, 0)), sent[0]], 0.0)
    chunked.take_in([packed(Chunk(1, 102_500, 51_300, 0)), sent[1][late]], 0.0)
    assert not chunked.arrived
    chunked.take_in([bond], 0.0, 1)
    chunked.take_in([packed(Chunk(1, 102_500, 100, 51_200)), sent[1][early]], 0.0, 1)
    (arrived,) = chunked.arrived
    assert [bytes(memoryview(each)) for each in arrived] == sent
