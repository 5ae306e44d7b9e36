"""Who trains which part of the data: takeover, hand-back, and what is refused meanwhile; the test plays the core."""

import copy
import math

import pytest

from aggregator.ledger.batch_books import MOST_INTERVALS
from aggregator.ledger.data_shares import MOST_OWNED, DataShares
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


def refusal(shares, *ranges, island_id="a", most_batches=100):
    steps = sum(d.to_batch - d.from_batch for d in ranges)
    home = "abcd".index(island_id)
    found = shares.refusal(island_id, home, 0, ranges, steps=steps, most_batches=most_batches)
    return found[0] if found is not None else None


def keep(shares, serial):
    """What has moved is durable, and where there are other shards, all have agreed."""
    shares.saving(serial)
    shares.saved(serial)


def fleet(*island_ids, alone=True):
    """Shares in the hands of these islands; durable."""
    made = DataShares(len(island_ids), TAKEOVER_S, 0.0, alone=alone)
    for home, island_id in enumerate(island_ids):
        made.join(island_id, home)
    keep(made, 1)
    return made


@pytest.fixture
def shares():
    return fleet("a", "b")


@pytest.fixture
def three():
    return fleet("a", "b", "c")


@pytest.fixture
def apart():
    """Three shares, where other shards of the run must know of each step."""
    return fleet("a", "b", "c", alone=False)


def owners(moved):
    return [(each.share, each.tenure.owner) for each in moved]


def test_an_island_trains_its_home_from_the_beginning(shares):
    home, others, _ = shares.told("a", 0)
    assert (home.index, home.count, home.share_epoch, home.cursor, others) == (0, 2, 0, 0, ())
    assert refusal(shares, data(0, 4)) is None


def test_a_share_is_left_to_its_owner_until_it_was_away_for_long_or_has_left(shares):
    assert shares.settle(presence(9.9, 0.0), 9.9) == []
    (moved,) = copy.deepcopy(shares).settle(presence(10.0, 0.0), 10.0)
    assert (moved.share, moved.before, moved.tenure.owner) == (0, "a", "b")
    (moved,) = shares.settle(presence(math.inf, 0.0), 9.9)
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
    assert refusal(shares, data(0, 4, share_epoch=1), island_id="b") is None
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


def test_batches_that_were_refused_after_all_may_come_again_but_not_twice_in_one_contribution(shares):
    shares.books.wait(0, [data(0, 4)])
    shares.books.refuse(0, [data(0, 4)])
    assert refusal(shares, data(0, 4)) is None
    assert refusal(shares, data(0, 4), data(3, 5)) is Reason.OVERLAP


def test_batches_must_be_as_many_as_steps_and_within_what_was_possible(shares):
    found = shares.refusal("a", 0, 0, [data(0, 4)], steps=5, most_batches=100)
    assert found == (Reason.IMPLAUSIBLE, "it names 4 batches for 5 steps")
    assert refusal(shares, data(0, 4), most_batches=3) is Reason.IMPLAUSIBLE
    shares.books.merge(0, [data(0, 4)])
    shares.settle(presence(12.0, 0.0), 12.0)
    assert refusal(shares, data(3, 5, share_epoch=1), island_id="b") is Reason.IMPLAUSIBLE


def test_a_new_life_has_its_home_from_the_furthest_batch_on_and_what_it_had_besides_goes_to_nobody(shares):
    shares.books.merge(0, [data(0, 8, share=1)])
    shares.settle(presence(12.0, 0.0), 12.0)
    shares.join("b", 1)
    keep(shares, 2)
    home, others, _ = shares.told("b", 1)
    assert (home.index, home.share_epoch, home.cursor, others) == (1, 1, 8, ())
    assert refusal(shares, data(8, 9, share=1), island_id="b") is Reason.SHARE_MOVED
    assert refusal(shares, data(0, 4, share_epoch=1), island_id="b") is Reason.SHARE_MOVED
    assert refusal(shares, data(8, 12, share=1, share_epoch=1), island_id="b") is None


def test_of_several_the_one_with_the_fewest_shares_takes_over(three):
    assert owners(three.settle(presence(20.0, 20.0, 0.0), 20.0)) == [(0, "c"), (1, "c")]
    assert owners(three.settle(presence(20.0, 0.0, 0.0), 21.0)) == [(1, "b")]


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


# --- by how far they were trained -----------------------------------------------------------------------------

AWAY = presence(0.0, TAKEOVER_S, 0.0)


def merge(shares, *ranges, fragment=0):
    shares.books.wait(fragment, ranges)
    shares.books.merge(fragment, ranges)


def told(shares, name, home):
    own, others, _ = shares.told(name, home)
    return [(s.lane * s.count + s.index, s.share_epoch, s.cursor) for s in (own, *others)]


def test_the_share_of_an_absent_island_goes_on_with_another_from_the_furthest_batch_known(three):
    merge(three, data(0, 8, share=1), fragment=0)
    merge(three, data(0, 5, share=1), fragment=1)
    three.books.wait(1, [data(5, 11, share=1)])
    (moved,) = three.settle(AWAY, 100.0)
    assert (moved.share, moved.before, moved.tenure.owner, moved.tenure.cursor) == (1, "b", "a", 11)
    assert three.settle(AWAY, 101.0) == []


def test_an_island_beyond_the_expected_number_makes_a_further_pass_that_nobody_takes_over(three):
    three.join("d", 3)
    keep(three, 2)
    own, *_ = three.told("d", 3)
    assert (own.index, own.count, own.lane) == (0, 3, 1)
    assert three.settle(presence(0.0, 0.0, 0.0, math.inf), 100.0) == []


# --- in two steps, where there are several shards ----------------------------------------------------------------


def test_a_share_of_an_absent_island_is_nobodys_until_every_shard_knows_and_has_said_how_far_it_was_trained(apart):
    merge(apart, data(0, 8, share=1))
    (taken,) = apart.settle(AWAY, 100.0)
    assert (taken.before, taken.tenure.owner, taken.tenure.share_epoch) == ("b", "", 1)
    assert apart.nobodys() == [1]
    assert refusal(apart, data(8, 9, share=1), island_id="b") is Reason.SHARE_MOVED
    apart.saving(2)
    assert apart.settle(AWAY, 101.0) == [], "on record here, and nobody else has said that it knows"
    apart.reached_elsewhere(1, 11)
    apart.reached_elsewhere(1, 9)  # an earlier answer, which came late
    apart.saved(2)
    (given,) = apart.settle(AWAY, 102.0)
    assert (given.before, given.tenure.owner, given.tenure.share_epoch, given.tenure.cursor) == ("", "a", 2, 11)
    assert told(apart, "a", 0) == [(0, 0, 0)], "nobody hears of it before it is agreed"
    keep(apart, 3)
    assert told(apart, "a", 0) == [(0, 0, 0), (1, 2, 11)]
    assert apart.nobodys() == []


def test_an_agreement_on_an_earlier_record_gives_no_share_away(apart):
    apart.saving(2)
    apart.settle(AWAY, 100.0)
    apart.saving(3)
    apart.saved(2)
    assert apart.settle(AWAY, 101.0) == []
    apart.saved(3)
    assert [m.tenure.owner for m in apart.settle(AWAY, 102.0)] == ["a"]


def test_an_island_that_joins_again_gives_up_all_that_it_has_and_gets_its_home_when_all_know(apart):
    for serial in (2, 3):
        apart.settle(AWAY, 100.0)
        keep(apart, serial)
    merge(apart, data(0, 5), data(0, 4, share=1, share_epoch=2))
    apart.leave("a", 0)
    assert apart.nobodys() == [0, 1]
    assert refusal(apart, data(5, 6)) is Reason.SHARE_MOVED
    apart.reached_elsewhere(0, 7)
    keep(apart, 4)
    apart.join("a", 0)
    keep(apart, 5)
    assert told(apart, "a", 0) == [(0, 2, 7)]
    (moved,) = apart.settle(AWAY, 103.0)
    assert (moved.share, moved.tenure.owner, moved.tenure.cursor) == (1, "a", 4)


def test_after_a_restart_a_share_of_nobody_waits_for_an_agreement_of_the_new_life(apart):
    apart.settle(AWAY, 100.0)
    again = DataShares(3, TAKEOVER_S, 200.0, alone=False)
    again.restore(apart.saving(2), {})
    assert again.settle(AWAY, 200.0) == []
    again.saving(1)
    assert again.settle(AWAY, 200.0) == []
    again.reached_elsewhere(1, 6)
    again.saved(1)
    (moved,) = again.settle(AWAY, 201.0)
    assert (moved.tenure.owner, moved.tenure.cursor) == ("a", 6)


def test_other_shards_have_what_they_are_told_and_say_how_far_shares_of_nobody_were_trained():
    shares, other = (fleet("a", "b", "c", alone=False) for _ in range(2))
    merge(other, data(0, 8, share=1), fragment=1)
    shares.settle(AWAY, 100.0)
    other.adopt(shares.tenures())
    assert other.tenures() == shares.tenures()
    assert [(n, other.books.reached(n)) for n in other.nobodys()] == [(1, 8)]
    assert refusal(other, data(8, 9, share=1), island_id="b") is Reason.SHARE_MOVED


def test_shares_survive_a_restart_with_what_was_merged_of_them(three):
    merge(three, data(0, 8, share=1), fragment=0)
    merge(three, data(0, 5, share=1), fragment=1)
    three.settle(AWAY, 100.0)
    record = three.saving(2)
    again = DataShares(3, TAKEOVER_S, 200.0)
    again.restore(record, {p: three.books.slice(p) for p in (0, 1)})
    assert told(again, "a", 0) == [(0, 0, 0), (1, 1, 8)]
    assert again.books.reached(1) == 8
    assert again.saving(1) == record
    assert refusal(again, data(8, 9, share=1), island_id="b") is Reason.SHARE_MOVED
    assert refusal(again, data(7, 9, share=1, share_epoch=1)) is Reason.IMPLAUSIBLE


# --- bounds ---------------------------------------------------------------------------------------------------


def test_one_heir_has_no_more_shares_than_a_contribution_can_name():
    shares = DataShares(3 * MOST_OWNED, TAKEOVER_S, 0.0)
    shares.join("a", 0)
    here = presence(0.0)
    assert len(shares.settle(here, TAKEOVER_S)) == MOST_OWNED - 1
    assert shares.settle(here, TAKEOVER_S + 1) == []
    assert [moved.tenure.owner for moved in shares.settle(presence(0.0, 0.0), TAKEOVER_S + 2)][:2] == ["b", "b"]


def test_an_island_that_leaves_gaps_does_not_make_every_commit_longer(three):
    three.books.wait(0, [data(1, 2)])  # arrived, and waits
    for n in range(MOST_INTERVALS + 10):
        merge(three, data(4 * n + 2, 4 * n + 3), data(4 * n + 4, 4 * n + 5))
    assert len(three.books.slice(0)["0"]) <= MOST_INTERVALS
    assert three.books.slice(0)["0"][0][0] == 2
    assert refusal(three, data(3, 4), most_batches=10**6) is Reason.OVERLAP, "a gap that was given up"
    newest = 4 * (MOST_INTERVALS + 9) + 4
    assert refusal(three, data(newest - 1, newest), most_batches=10**6) is None, "a young one"
    three.books.merge(0, [data(1, 2)])


def test_a_gap_in_which_something_waits_is_not_given_up(three):
    late = data(1, 2)
    merge(three, data(0, 1))
    three.books.wait(0, [late])
    for n in range(1, MOST_INTERVALS + 10):
        merge(three, data(2 * n, 2 * n + 1))
    three.books.merge(0, [late])
    assert three.books.slice(0)["0"][0][0] == 0
