"""Who trains which part of the data: takeover, hand-back, and what is refused meanwhile; the test plays the core."""

import math

import pytest

from aggregator.ledger.data_shares import DataShares
from aggregator.ledger.presence import Presence
from broker.wire.messages import DataRange, Reason

TAKEOVER_S = 10.0


def data(from_batch, to_batch, *, share=0, share_epoch=0):
    return DataRange(share=share, share_epoch=share_epoch, from_batch=from_batch, to_batch=to_batch)


def presence(*away_s, out=""):
    """Islands a, b, .. that were last heard so long ago; those of no silence are able, unless they are kept out."""
    return [
        Presence(
            island_id="abcd"[home],
            home=home,
            away_s=away,
            able=away == 0.0 and "abcd"[home] not in out,
            quarantined="abcd"[home] in out,
        )
        for home, away in enumerate(away_s)
    ]


def refusal(shares, *ranges, island_id="a", home=0, most_batches=100):
    steps = sum(d.to_batch - d.from_batch for d in ranges)
    found = shares.refusal(island_id, home, 0, ranges, steps=steps, most_batches=most_batches)
    return found[0] if found is not None else None


@pytest.fixture
def shares():
    """Two shares, in the hands of a and b."""
    made = DataShares(2, TAKEOVER_S, 0.0)
    for home, island_id in enumerate("ab"):
        made.join(island_id, home)
    made.saving(1)
    made.saved(1)
    return made


def test_an_island_trains_its_home_from_the_beginning(shares):
    home, others, _ = shares.told("a", 0)
    assert (home.index, home.count, home.share_epoch, home.cursor, others) == (0, 2, 0, 0, ())
    assert refusal(shares, data(0, 4)) is None


def test_a_share_is_left_to_its_owner_until_it_was_away_for_long(shares):
    assert shares.settle(presence(9.9, 0.0), 9.9) == []
    (moved,) = shares.settle(presence(10.0, 0.0), 10.0)
    assert (moved.share, moved.before, moved.tenure.owner) == (0, "a", "b")


def test_who_has_left_is_not_waited_for(shares):
    (moved,) = shares.settle(presence(math.inf, 0.0), 1.0)
    assert (moved.share, moved.tenure.owner, moved.because) == (0, "b", "its island has left")


def test_a_share_goes_to_another_under_the_next_epoch_and_comes_back_under_the_one_after(shares):
    (taken,) = shares.settle(presence(12.0, 0.0), 12.0)
    assert (taken.tenure.owner, taken.tenure.share_epoch) == ("b", 1)
    (back,) = shares.settle(presence(0.0, 0.0), 14.0)
    assert (back.tenure.owner, back.tenure.share_epoch) == ("a", 2)
    assert shares.settle(presence(0.0, 0.0), 15.0) == []


def test_a_move_is_told_once_it_is_durable(shares):
    shares.settle(presence(12.0, 0.0), 12.0)
    assert shares.told("b", 1)[1] == ()
    shares.saving(2)
    shares.settle(presence(0.0, 0.0), 13.0)  # back already; what is durable next is what was asked for then
    shares.saved(2)
    (other,) = shares.told("b", 1)[1]
    assert (other.index, other.share_epoch) == (0, 1)


def test_what_is_trained_under_an_earlier_epoch_is_refused(shares):
    shares.settle(presence(12.0, 0.0), 12.0)
    assert refusal(shares, data(0, 4)) is Reason.SHARE_MOVED
    assert refusal(shares, data(0, 4, share_epoch=1)) is Reason.SHARE_MOVED  # the epoch of another
    assert refusal(shares, data(0, 4, share_epoch=1), island_id="b", home=1) is None
    shares.settle(presence(0.0, 0.0), 14.0)
    assert refusal(shares, data(0, 4)) is Reason.SHARE_MOVED  # its own again, under the epoch of before
    assert refusal(shares, data(0, 4, share_epoch=2)) is None


def test_a_contribution_that_does_not_say_its_data_counts_as_of_its_home(shares):
    assert refusal(shares) is None
    shares.settle(presence(12.0, 0.0), 12.0)
    assert refusal(shares) is Reason.SHARE_MOVED


def test_batches_that_were_merged_or_wait_are_not_taken_again(shares):
    shares.books.wait(0, [data(0, 4)])
    assert refusal(shares, data(2, 6)) is Reason.OVERLAP
    shares.books.merge(0, [data(0, 4)])
    assert refusal(shares, data(3, 5)) is Reason.OVERLAP
    assert refusal(shares, data(4, 6)) is None


def test_batches_that_were_refused_after_all_may_come_again(shares):
    shares.books.wait(0, [data(0, 4)])
    shares.books.refuse(0, [data(0, 4)])
    assert refusal(shares, data(0, 4)) is None


def test_batches_named_twice_in_one_contribution_are_an_overlap(shares):
    assert refusal(shares, data(0, 4), data(3, 5)) is Reason.OVERLAP


def test_batches_must_be_as_many_as_steps_and_within_what_was_possible(shares):
    assert shares.refusal("a", 0, 0, [data(0, 4)], steps=3, most_batches=100) is not None
    assert refusal(shares, data(0, 4), most_batches=3) is Reason.IMPLAUSIBLE
    shares.books.merge(0, [data(0, 4)])
    shares.settle(presence(12.0, 0.0), 12.0)
    assert refusal(shares, data(3, 5, share_epoch=1), island_id="b", home=1) is Reason.IMPLAUSIBLE


def test_an_heir_begins_behind_everything_that_arrived(shares):
    shares.books.merge(0, [data(0, 4)])
    shares.books.wait(1, [data(4, 7)])
    (moved,) = shares.settle(presence(12.0, 0.0), 12.0)
    assert moved.tenure.cursor == 7


def test_a_new_life_has_its_home_and_what_it_had_besides_goes_to_nobody(shares):
    shares.settle(presence(12.0, 0.0), 12.0)
    shares.join("b", 1)
    assert refusal(shares, data(0, 4, share_epoch=1), island_id="b", home=1) is Reason.SHARE_MOVED
    assert refusal(shares, data(0, 4, share=1, share_epoch=1), island_id="b", home=1) is None


def test_of_several_the_one_with_the_fewest_shares_takes_over():
    shares = DataShares(3, TAKEOVER_S, 0.0)
    for home, island_id in enumerate("abc"):
        shares.join(island_id, home)
    moved = shares.settle(presence(20.0, 20.0, 0.0), 20.0)
    assert [m.tenure.owner for m in moved] == ["c", "c"]
    back = shares.settle([*presence(20.0, 0.0, 0.0)], 21.0)
    assert [(m.share, m.tenure.owner) for m in back] == [(1, "b")]


@pytest.fixture
def three():
    """Three shares, in the hands of a, b and c."""
    made = DataShares(3, TAKEOVER_S, 0.0)
    for home, island_id in enumerate("abc"):
        made.join(island_id, home)
    return made


def owners(moved):
    return [(each.share, each.tenure.owner) for each in moved]


def test_what_an_heir_took_over_goes_on_to_another_when_it_is_quarantined_and_its_home_stays(three):
    assert owners(three.settle(presence(20.0, 0.0, 0.0), 20.0)) == [(0, "b")]
    assert owners(three.settle(presence(20.0, 0.0, 0.0, out="b"), 21.0)) == [(0, "c")]
    assert three.settle(presence(20.0, 0.0, 0.0, out="b"), 22.0) == []
    assert three.settle(presence(20.0, 0.0, 0.0), 23.0) == []  # released: what moved has moved


def test_a_share_does_not_go_back_to_an_island_that_returns_into_quarantine(three):
    three.settle(presence(20.0, 0.0, 0.0), 20.0)
    assert three.settle(presence(0.0, 0.0, 0.0, out="a"), 21.0) == []
    (moved,) = three.settle(presence(0.0, 20.0, 0.0, out="a"), 40.0)[:1]  # its heir is away now
    assert (moved.share, moved.tenure.owner, moved.because) == (0, "c", "its island is quarantined")
    assert owners(three.settle(presence(0.0, 20.0, 0.0), 41.0)) == [(0, "a")]


def test_what_is_read_back_says_the_same(shares):
    shares.books.merge(0, [data(0, 4)])
    shares.settle(presence(12.0, 0.0), 12.0)
    record, slices = shares.saving(2), {0: shares.books.slice(0)}
    again = DataShares(2, TAKEOVER_S, 0.0)
    again.restore(record, slices)
    shares.saved(2)
    assert again.told("b", 1) == shares.told("b", 1)
    assert refusal(again, data(3, 5, share_epoch=1), island_id="b", home=1) is Reason.IMPLAUSIBLE
    assert again.books.reached(0) == 4
