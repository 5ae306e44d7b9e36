"""Which address of a name is tried next, and when."""

import pytest

from broker.transport.rotation import LONGEST_PATIENCE_S, LONGEST_PAUSE_S, PATIENCE_S, PAUSE_S, AddressRotation

PAUSES = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_PAUSE_S]
SIX, FOUR = "tcp://[::1]:7001", "tcp://127.0.0.1:7001"


@pytest.fixture
def rotation():
    made = AddressRotation()
    assert not made.due(0.0)
    assert made.next(0.0) is None, "the name is looked up first"
    made.found([SIX, FOUR], 0.0)
    return made


def test_addresses_are_tried_in_the_order_of_the_name_service(rotation):
    assert rotation.due(0.0)
    assert rotation.next(0.0) == SIX
    rotation.failed(0.1)
    assert rotation.due(0.1), "one that refuses gives way at once"
    assert rotation.next(0.1) == FOUR
    assert not rotation.due(0.1 + PATIENCE_S - 0.01)
    assert rotation.due(0.1 + PATIENCE_S), "one that does not answer, after a while"


def test_pauses_and_patience_grow_and_are_bounded(rotation):
    patience, pauses, now_s = [], [], 0.0
    for _ in range(12):
        rotation.next(now_s)
        rotation.next(now_s)
        patience.append(next(s for s in (1, 3, 6, 12, 24, LONGEST_PATIENCE_S) if rotation.due(now_s + s)))
        rotation.failed(now_s)
        pauses.append(next(s for s in PAUSES if rotation.due(now_s + s)))
        now_s += 100.0
        rotation.found([SIX, FOUR], now_s)
    assert patience == [3, 6, 12, 24, *[LONGEST_PATIENCE_S] * 8]
    assert pauses == [*PAUSES, *[LONGEST_PAUSE_S] * 5]


def test_what_worked_last_is_tried_first_when_the_connection_is_lost(rotation):
    rotation.next(0.0)
    rotation.failed(0.0)
    rotation.next(0.0)
    rotation.stood()
    assert not rotation.due(1e9)
    rotation.lost(50.0)
    assert not rotation.due(50.0 + PATIENCE_S - 0.01), "ZeroMQ tries it again by itself"
    rotation.failed(51.0)
    assert rotation.due(51.0 + PAUSE_S)
    assert rotation.next(51.1) is None
    rotation.found([SIX, FOUR], 52.0)
    assert [rotation.next(52.0), rotation.next(52.0), rotation.next(52.0)] == [FOUR, SIX, None]


def test_a_name_that_is_not_known_is_asked_for_again_and_again_ever_more_rarely():
    rotation, now_s, pauses = AddressRotation(), 0.0, []
    for _ in range(8):
        rotation.unknown(now_s)
        assert rotation.next(now_s) is None
        pauses.append(next(s for s in PAUSES if rotation.due(now_s + s)))
        now_s += 100.0
    assert pauses == [*PAUSES, LONGEST_PAUSE_S]
    rotation.found([FOUR], now_s)
    assert rotation.next(now_s) == FOUR


def test_while_the_name_service_is_away_what_it_said_last_is_tried(rotation):
    rotation.next(0.0)
    rotation.next(0.0)
    assert rotation.next(0.0) is None
    rotation.unknown(1.0)
    assert [rotation.next(1.0), rotation.next(1.0), rotation.next(1.0)] == [SIX, FOUR, None]
