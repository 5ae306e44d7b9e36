"""When an island takes its bulk connection for one that delivers nothing, and what it does then."""

import pytest

from broker.routing.deafness import (
    LONGEST_PATIENCE_S,
    PATIENCE_S,
    Hearing,
)
from broker.wire import messages as m
from islands.protocol.events import RenewBulk, Send
from tests.aggregator_hand import notes, of
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


def test_patience_doubles_while_renewing_helps_nothing_and_is_bounded(hearing):
    moments = renewals(hearing, 0.0, 4000.0)
    pauses = [b - a for a, b in zip([0.0, *moments], moments, strict=False)]
    assert pauses[:4] == [PATIENCE_S, 2 * PATIENCE_S, 4 * PATIENCE_S, 8 * PATIENCE_S]
    assert pauses[-1] == LONGEST_PATIENCE_S


# --- where the kernel says what it carries ------------------------------------------------------------------------

MEGABYTE = 1_000_000


@pytest.mark.parametrize("bytes_per_s", [5_000, 25_000, 1_000_000])
def test_a_link_that_is_slow_is_not_taken_for_a_deaf_connection(hearing, bytes_per_s):
    hearing.expect(MEGABYTE)
    assert renewals(hearing, 0.0, MEGABYTE / bytes_per_s, lambda now_s: round(bytes_per_s * now_s)) == []


def test_silence_begins_when_nothing_passes_any_more(hearing):
    """A deaf connection takes what it is sent at once, and delivers none of it."""
    hearing.expect(MEGABYTE)
    assert renewals(hearing, 0.0, 13.0, lambda now_s: MEGABYTE if now_s >= 3 else 0) == [12.0]  # 3 + 8 and the first 1


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
