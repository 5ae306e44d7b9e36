"""When an island takes its bulk connection for one that delivers nothing, and what it does then."""

import pytest

from broker.routing.deafness import (
    LEAST_BYTES,
    LEAST_BYTES_PER_S,
    LONGEST_PATIENCE_S,
    MOST_BYTES,
    MOST_MESSAGES,
    PATIENCE_S,
    PINGS_BYTES_PER_S,
    Carried,
    Hearing,
)
from broker.wire import messages as m
from islands.protocol.events import RenewBulk, Send
from tests.helpers import notes, of
from tests.island_hand import Hand


@pytest.fixture
def hearing():
    return Hearing()


def renewals(hearing, from_s, to_s, carried=lambda now_s: None, waiting=lambda now_s: False):
    """Asks every half second, as heartbeats are answered; returns when the connection is made anew."""
    moments = [from_s + i / 2 for i in range(int(2 * (to_s - from_s)) + 1)]
    return [now_s for now_s in moments if hearing.missing(True, now_s, carried(now_s), waiting=waiting(now_s))]


def test_who_misses_nothing_may_hear_nothing_for_ever(hearing):
    assert not any(hearing.missing(False, float(now_s)) for now_s in range(10_000))


def test_a_version_that_does_not_come_costs_the_connection_after_the_patience(hearing):
    assert renewals(hearing, 100.0, 100.0 + PATIENCE_S) == [100.0 + PATIENCE_S]


def test_whatever_comes_shows_that_the_connection_delivers(hearing):
    for second in range(100):
        assert not hearing.missing(True, float(second))
        if second % 5 == 0:
            hearing.heard(second + 0.5)


def test_patience_doubles_while_renewing_helps_nothing_and_is_bounded(hearing):
    moments = renewals(hearing, 0.0, 4000.0)
    pauses = [b - a for a, b in zip([0.0, *moments], moments, strict=False)]
    assert pauses[:4] == [PATIENCE_S, 2 * PATIENCE_S, 4 * PATIENCE_S, 8 * PATIENCE_S]
    assert pauses[-1] == LONGEST_PATIENCE_S


def test_the_largest_version_may_take_as_long_as_on_a_poor_link(hearing):
    hearing.expect(int(100 * LEAST_BYTES_PER_S))
    assert renewals(hearing, 0.0, 120.0) == [PATIENCE_S + 100.0]


def test_a_link_that_was_slow_before_may_be_slow_again(hearing):
    assert renewals(hearing, 0.0, 20.0) == [8.0]  # in vain: it was merely slow
    hearing.heard(23.0)  # 15 s after the new connection
    assert renewals(hearing, 100.0, 144.0) == []
    assert renewals(hearing, 144.5, 145.0) == [145.0]


def test_what_keeps_silent_for_a_while_before_it_delivers_may_do_so_again(hearing):
    """A tunnel or proxy that takes everything at once, and passes it on slowly."""
    hearing.expect(MEGABYTE)
    taken = [0, *[MEGABYTE] * 1000]
    assert renewals(hearing, 0.0, 9.0, lambda now_s: taken[int(now_s)]) == []
    hearing.heard(9.5, MEGABYTE)
    assert renewals(hearing, 100.0, 124.0, lambda now_s: MEGABYTE + taken[int(now_s) - 100]) == []
    assert renewals(hearing, 124.5, 127.0, lambda now_s: 2 * MEGABYTE) == [126.5]


def test_a_new_connection_begins_with_all_the_patience_there_is(hearing):
    assert renewals(hearing, 0.0, 7.5) == []
    hearing.begin()
    assert renewals(hearing, 8.0, 15.5) == []
    assert renewals(hearing, 16.0, 16.0) == [16.0]


# --- where the kernel says what it carries ------------------------------------------------------------------------

MEGABYTE = 1_000_000


@pytest.mark.parametrize("bytes_per_s", [5_000, 25_000, 1_000_000])
def test_a_link_that_is_slow_is_not_taken_for_a_deaf_connection(hearing, bytes_per_s):
    hearing.expect(MEGABYTE)
    assert renewals(hearing, 0.0, MEGABYTE / bytes_per_s, lambda now_s: round(bytes_per_s * now_s)) == []


def test_a_link_that_moves_in_bursts_is_slow_and_not_deaf(hearing):
    hearing.expect(MEGABYTE)
    assert renewals(hearing, 0.0, 80.0, lambda now_s: MOST_BYTES * int(now_s / 8)) == []


def test_silence_begins_when_nothing_passes_any_more(hearing):
    """A deaf connection takes what it is sent at once, and delivers none of it."""
    hearing.expect(MEGABYTE)
    assert renewals(hearing, 0.0, 13.0, lambda now_s: MEGABYTE if now_s >= 3 else 0) == [12.0]  # 3 + 8 and the first 1


def test_pings_and_small_answers_are_silence(hearing):
    hearing.expect(MEGABYTE)
    assert renewals(hearing, 0.0, 10.0, lambda now_s: round(500 * now_s)) == [9.5]


def test_what_passes_and_is_too_much_for_what_is_missing_is_swallowed(hearing):
    """Versions that are published all the time, and disappear in a frame that never ends."""
    hearing.expect(MEGABYTE)
    bytes_per_s = 2 * MEGABYTE
    (renewed_at_s,) = renewals(hearing, 0.0, 16.0, lambda now_s: round(bytes_per_s * now_s))
    assert renewed_at_s == pytest.approx(MOST_MESSAGES * MEGABYTE / bytes_per_s + 1.0 + PATIENCE_S, abs=1.0)


def test_what_waits_to_be_carried_passes_however_slowly(hearing):
    hearing.expect(MEGABYTE)
    assert renewals(hearing, 0.0, 500.0, lambda now_s: round(100 * now_s), lambda now_s: True) == []


def test_a_deaf_connection_that_is_sent_more_and_more_is_found_out_all_the_same(hearing):
    hearing.expect(MEGABYTE)
    found = renewals(hearing, 0.0, 60.0, lambda now_s: round(MEGABYTE * now_s), lambda now_s: True)
    assert found[0] <= MOST_MESSAGES + 2 + 1 + PATIENCE_S


def test_a_new_connection_counts_from_zero(hearing):
    hearing.expect(MEGABYTE)
    assert renewals(hearing, 0.0, 9.5, lambda now_s: 400 * (now_s >= 1) if now_s else 5 * MEGABYTE) == [9.5]
    assert renewals(hearing, 10.0, 40.0, lambda now_s: round(25_000 * (now_s - 9.5))) == []


@pytest.mark.parametrize("bytes_per_s", [0.0, PINGS_BYTES_PER_S])
def test_where_nothing_passes_nothing_is_swallowed(hearing, bytes_per_s):
    """What is missing waits at another process, on a slow link of its own."""
    assert renewals(hearing, 0.0, 900.0, lambda now_s: 10_000 + round(bytes_per_s * now_s)) == []


def test_a_small_message_that_was_swallowed_is_noticed(hearing):
    assert renewals(hearing, 0.0, 29.0, lambda now_s: 600 * (now_s > 20)) == [20.0 + PATIENCE_S]


# --- in the island's core ---------------------------------------------------------------------------------------


def wait(hand, until_s, versions):
    """Fleet states that list ``versions``, twice a second."""
    said = []
    while hand.now_s < until_s:
        hand.now_s += 0.5
        said += hand.state(versions=versions)
    return said


def test_an_island_that_no_version_reaches_renews_its_bulk_connection_and_asks_again():
    hand = Hand()
    hand.version(1)
    hand.boundary(1, installed=(0,))
    said = wait(hand, PATIENCE_S + 1.0, versions=(2,))
    assert of(said, RenewBulk) == [RenewBulk()]
    (note,) = notes(said, "bulk.renewed")
    assert note == {"next_patience_s": pytest.approx(2 * PATIENCE_S, abs=0.1)}
    behind = said[said.index(RenewBulk()) :]
    assert [each.message.versions for each in of(behind, Send) if isinstance(each.message, m.Want)] == [(1,)]
    hand.version(2)
    assert not of(wait(hand, 100.0, versions=(2,)), RenewBulk)


def test_contributions_that_may_have_been_swallowed_on_their_way_are_due_again():
    hand = Hand()
    contribution = hand.hand_over(4, round_id=1)
    wait(hand, PATIENCE_S + 0.5, versions=(1,))
    steps = contribution.steps
    unknown = m.Resolution(fragment_id=0, from_step=steps.from_step, to_step=steps.to_step, fate=m.Fate.UNKNOWN)
    assert hand.state(versions=(1,), resolutions=[unknown])  # sent again for the first time, due again in 4 s or more
    hand.now_s += 0.5
    assert of(hand.state(versions=(1,)), RenewBulk)
    assert Send(to=m.AGGREGATOR, message=contribution) in hand.state(versions=(1,), resolutions=[unknown])


@pytest.mark.parametrize(("came_bytes", "patience_s"), [(0, PATIENCE_S), (LEAST_BYTES, PATIENCE_S + 5.0)])
def test_an_island_waits_from_when_bytes_came_last(came_bytes, patience_s):
    hand = Hand()
    hand.version(1)
    hand.boundary(1, installed=(0,))
    hand.state(versions=(2,), carried=Carried(0, 7))
    began_s = hand.now_s

    def carried():
        waited_s = hand.now_s - began_s
        return Carried(0, 7 + 600 * (waited_s >= 0.5) + came_bytes * (waited_s >= 5))

    while not of(hand.state(versions=(2,), carried=carried()), RenewBulk):
        hand.now_s += 0.5
        assert hand.now_s < began_s + 60.0
    assert hand.now_s - began_s == pytest.approx(patience_s, abs=0.51)


def test_a_damaged_version_is_a_sign_of_life():
    hand = Hand()
    for _ in range(10):
        assert not of(wait(hand, hand.now_s + 5.0, versions=(1,)), RenewBulk)
        hand.version(1, flaw="checksum")


def test_an_island_that_is_up_to_date_renews_nothing():
    hand = Hand()
    assert not of(wait(hand, 1000.0, versions=(0,)), RenewBulk)
