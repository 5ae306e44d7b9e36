"""Connections of a port: what each brings in against what it delivers, and which one ends."""

import pytest

from broker.chunks.receiving import CREDIT_BYTES
from broker.chunks.sending import MOST_CHUNK_BYTES
from broker.clients.connections import Connections, Ending, files_for_connections, most_unread_bytes
from broker.wire.messages import Channel


def test_a_connection_that_brings_in_more_than_a_message_and_delivers_none_is_found():
    connections, received = Connections(most_bytes=100), {}
    for fd in (3, 4, 5):
        connections.accepted(fd)
    for fd in (3, 5):
        connections.delivered(fd)
    received.update({3: 90, 4: 90, 5: 1000})
    assert connections.overfull(received.get) == []  # 5 has delivered: what came before counts no more
    received.update({3: 180, 4: 180, 5: 1101})
    assert connections.overfull(received.get) == [(4, 180), (5, 101)]
    connections.delivered(4, 180)
    assert connections.overfull(received.get) == [(5, 101)]
    assert connections.closed(5, 1101) is Ending.DELIVERED
    assert connections.overfull(received.get) == []
    connections.accepted(5)  # the number is another connection's now
    assert connections.closed(5, 7) is Ending.STRANGER
    assert connections.overfull(lambda fd: None) == []


def test_what_waits_unread_is_what_came_less_what_was_delivered_since_all_had_been_read():
    connections, received = Connections(most_bytes=1000, total_bytes=1500), {3: 50_000, 4: 0}
    for fd in (3, 4):
        connections.accepted(fd)
        connections.delivered(fd, received[fd], 1)
    assert connections.overfull(received.get) == []
    for came, read, found in [(900, 0, []), (2500, 1500, []), (3600, 1000, [(3, 1100)])]:  # always something to read
        received[3] = 50_000 + came
        connections.delivered(3, read)
        assert connections.overfull(received.get) == found
    received.update({3: 53_400, 4: 900})  # neither has too much, and both together have
    assert connections.overfull(received.get) == [(3, 900)]
    connections.drained()
    connections.delivered(3)
    assert connections.overfull(received.get) == []


def test_where_there_are_too_many_the_oldest_ends_that_has_delivered_nothing():
    connections = Connections(most_bytes=100)
    for fd in (3, 4, 5):
        connections.accepted(fd)
    connections.delivered(3)
    assert [connections.give_up(), len(connections)] == [4, 2]
    connections.closed(4, 0)
    assert len(connections) == 2
    connections.accepted(4)  # the number is another connection's now
    assert [connections.give_up(), connections.give_up(), connections.give_up(), len(connections)] == [5, 4, None, 1]


@pytest.mark.parametrize(
    ("limit", "unix", "most"), [(40, False, 9), (256, False, 171), (4096, True, 1968), (1 << 20, True, 786_411)]
)
def test_some_of_the_open_files_that_are_left_are_no_connection_s(limit, unix, most):
    assert files_for_connections(limit, 28, unix=unix) == most


@pytest.mark.parametrize(
    ("seen", "received_bytes", "ending"),
    [
        ((), 500, Ending.STRANGER),  # TLS, HTTP, an old ZeroMQ: ended by ours at the first bytes
        ((Connections.failed,), 500, Ending.FAILED),
        ((Connections.left,), 0, Ending.SILENT),  # a port scan
        ((Connections.left,), 1, Ending.SILENT),  # the kernel counts the end of it
        ((Connections.left,), None, Ending.SILENT),  # it was gone before anybody could look
        ((Connections.left,), 11, Ending.STRANGER),  # half a greeting
        ((Connections.shook_hands,), 200, Ending.SILENT),
    ],
)
def test_a_connection_that_delivered_nothing_ends_as_one_of_a_kind(seen, received_bytes, ending):
    connections = Connections(most_bytes=100)
    for fd in (3, 4, 5):
        connections.accepted(fd)
    connections.shook_hands()
    connections.delivered(3)  # whose handshake that was
    for each in seen:
        each(connections)
    assert connections.closed(4, received_bytes) is ending
    assert connections.closed(5, 500) is Ending.STRANGER  # what was seen told of one connection
    assert connections.closed(3, 500) is Ending.DELIVERED


@pytest.mark.parametrize(
    ("seen", "ending"),
    [((), Ending.STRANGER), ((Connections.failed,), Ending.FAILED), ((Connections.left,), Ending.SILENT)],
)
def test_an_end_told_before_its_beginning_is_of_its_kind_when_that_comes_or_never_if_it_was_before_the_watch(
    seen, ending
):
    connections = Connections(most_bytes=100)
    for each in seen:
        each(connections)
    assert connections.closed(4, None) is None
    assert connections.accepted(4) is ending
    assert connections.overfull(lambda fd: 1000) == []  # it is not open
    assert connections.accepted(4) is None  # the number is another connection's now
    assert connections.closed(4, 500) is Ending.STRANGER
    assert connections.closed(5, 500) is None
    connections.overfull(lambda fd: 0)
    assert connections.accepted(5) is None
    connections.delivered(5)
    assert connections.closed(5, 500) is Ending.DELIVERED


def test_a_bulk_connection_may_have_all_its_credit_waiting_and_no_more():
    """A loaded broker reads nothing of one of many islands for a second; that is no flood."""
    frame = 2 * MOST_CHUNK_BYTES
    most = most_unread_bytes(Channel.BULK, frame)
    assert most > CREDIT_BYTES + frame
    assert most_unread_bytes(Channel.CONTROL, frame) == most - CREDIT_BYTES
    connections = Connections(most_bytes=most)
    connections.accepted(7)
    assert connections.overfull({7: CREDIT_BYTES}.get) == []
    assert connections.overfull({7: 2 * CREDIT_BYTES + frame}.get) == [(7, 2 * CREDIT_BYTES + frame)]
