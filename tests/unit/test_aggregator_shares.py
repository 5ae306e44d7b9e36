"""Takeover and hand-back of data shares, and what a contribution may say it was trained on."""

import math

from aggregator.ledger.batch_books import MOST_INTERVALS
from aggregator.ledger.data_shares import MOST_OWNED, DataShares
from aggregator.ledger.presence import Presence
from broker.wire.messages import DataRange, Reason

TAKEOVER_S = 60.0


def island(name, home, away_s=0.0, *, able=True):
    return Presence(island_id=name, home=home, away_s=away_s, able=able and away_s < 6)


def data(share, from_batch, to_batch, epoch=0):
    return DataRange(share=share, share_epoch=epoch, from_batch=from_batch, to_batch=to_batch)


def fleet(takeover_s=TAKEOVER_S):
    """Islands a, b and c at home in shares 0, 1 and 2; all of it durable."""
    shares = DataShares(3, takeover_s, 0.0)
    for home, name in enumerate("abc"):
        shares.join(name, home)
    keep(shares, 1)
    return shares


def keep(shares, serial):
    shares.saving(serial)
    shares.saved(serial)


def merge(shares, *ranges, fragment=0):
    shares.books.wait(fragment, ranges)
    shares.books.merge(fragment, ranges)


def refusal(shares, name, home, *ranges, fragment=0, most=1000):
    steps = sum(d.to_batch - d.from_batch for d in ranges)
    found = shares.refusal(name, home, fragment, ranges, steps, most)
    return found and found[0]


AWAY = [island("a", 0), island("b", 1, TAKEOVER_S), island("c", 2)]


def told(shares, name, home):
    own, others, _ = shares.told(name, home)
    return [(s.lane * s.count + s.index, s.share_epoch, s.cursor) for s in (own, *others)]


def test_the_share_of_an_absent_island_goes_on_with_another_from_the_furthest_batch_known():
    shares = fleet()
    merge(shares, data(1, 0, 8), fragment=0)
    merge(shares, data(1, 0, 5), fragment=1)
    shares.books.wait(1, [data(1, 5, 11)])
    (moved,) = shares.settle(AWAY, 100.0)
    assert (moved.share, moved.before, moved.tenure.owner, moved.tenure.cursor) == (1, "b", "a", 11)
    assert shares.settle(AWAY, 101.0) == []


def test_a_new_life_starts_at_the_furthest_batch_and_its_earlier_one_is_refused():
    shares = fleet()
    merge(shares, data(1, 0, 8))
    shares.join("b", 1)
    keep(shares, 2)
    assert told(shares, "b", 1) == [(1, 1, 8)]
    assert refusal(shares, "b", 1, data(1, 8, 9)) is Reason.SHARE_MOVED


def test_an_island_beyond_the_expected_number_makes_a_further_pass_that_nobody_takes_over():
    shares = fleet()
    shares.join("d", 3)
    keep(shares, 2)
    own, *_ = shares.told("d", 3)
    assert (own.index, own.count, own.lane) == (0, 3, 1)
    assert shares.settle([*AWAY[:1], island("b", 1), island("c", 2), island("d", 3, math.inf)], 100.0) == []


# --- in two steps, where there are several shards ----------------------------------------------------------------


def several(takeover_s=TAKEOVER_S):
    """The same fleet where other shards must know of each step; they agree to nothing before :func:`keep`."""
    shares = DataShares(3, takeover_s, 0.0, alone=False)
    for home, name in enumerate("abc"):
        shares.join(name, home)
    keep(shares, 1)
    return shares


def test_a_share_of_an_absent_island_is_nobodys_until_every_shard_knows_and_has_said_how_far_it_was_trained():
    shares = several()
    merge(shares, data(1, 0, 8))
    (taken,) = shares.settle(AWAY, 100.0)
    assert (taken.before, taken.tenure.owner, taken.tenure.share_epoch) == ("b", "", 1)
    assert shares.nobodys() == [1]
    assert refusal(shares, "b", 1, data(1, 8, 9)) is Reason.SHARE_MOVED, "from now on nothing more is taken"
    shares.saving(2)
    assert shares.settle(AWAY, 101.0) == [], "on record here, and nobody else has said that it knows"
    shares.reached_elsewhere(1, 11)
    shares.reached_elsewhere(1, 9)  # an earlier answer, which came late
    shares.saved(2)
    (given,) = shares.settle(AWAY, 102.0)
    assert (given.before, given.tenure.owner, given.tenure.share_epoch, given.tenure.cursor) == ("", "a", 2, 11)
    assert told(shares, "a", 0) == [(0, 0, 0)], "nobody hears of it before it is agreed"
    keep(shares, 3)
    assert told(shares, "a", 0) == [(0, 0, 0), (1, 2, 11)]
    assert shares.nobodys() == []


def test_an_agreement_on_an_earlier_record_gives_no_share_away():
    shares = several()
    shares.saving(2)
    shares.settle(AWAY, 100.0)
    shares.saving(3)
    shares.saved(2)
    assert shares.settle(AWAY, 101.0) == []
    shares.saved(3)
    assert [m.tenure.owner for m in shares.settle(AWAY, 102.0)] == ["a"]


def test_an_island_that_joins_again_gives_up_all_that_it_has_and_gets_its_home_when_all_know():
    shares = several()
    for serial in (2, 3):
        shares.settle(AWAY, 100.0)
        keep(shares, serial)
    merge(shares, data(0, 0, 5), data(1, 0, 4, epoch=2))
    shares.leave("a", 0)
    assert shares.nobodys() == [0, 1]
    assert refusal(shares, "a", 0, data(0, 5, 6)) is Reason.SHARE_MOVED
    shares.reached_elsewhere(0, 7)
    keep(shares, 4)
    shares.join("a", 0)
    keep(shares, 5)
    assert told(shares, "a", 0) == [(0, 2, 7)]
    (moved,) = shares.settle(AWAY, 103.0)
    assert (moved.share, moved.tenure.owner, moved.tenure.cursor) == (1, "a", 4)


def test_after_a_restart_a_share_of_nobody_waits_for_an_agreement_of_the_new_life():
    shares = several()
    shares.settle(AWAY, 100.0)
    again = DataShares(3, TAKEOVER_S, 200.0, alone=False)
    again.restore(shares.saving(2), {})
    assert again.settle(AWAY, 200.0) == []
    again.saving(1)
    assert again.settle(AWAY, 200.0) == []
    again.reached_elsewhere(1, 6)
    again.saved(1)
    (moved,) = again.settle(AWAY, 201.0)
    assert (moved.tenure.owner, moved.tenure.cursor) == ("a", 6)


def test_other_shards_have_what_they_are_told_and_say_how_far_shares_of_nobody_were_trained():
    shares, other = several(), several()
    merge(other, data(1, 0, 8), fragment=1)
    shares.settle(AWAY, 100.0)
    other.adopt(shares.tenures())
    assert other.tenures() == shares.tenures()
    assert [(n, other.books.reached(n)) for n in other.nobodys()] == [(1, 8)]
    assert refusal(other, "b", 1, data(1, 8, 9)) is Reason.SHARE_MOVED


# --- what a contribution may say --------------------------------------------------------------------------------


def test_batches_and_steps_must_be_as_many():
    reason, detail = fleet().refusal("a", 0, 0, [data(0, 0, 4)], 5, 100)
    assert (reason, detail) == (Reason.IMPLAUSIBLE, "it names 4 batches for 5 steps")


def test_shares_survive_a_restart_with_what_was_merged_of_them():
    shares = fleet()
    merge(shares, data(1, 0, 8), fragment=0)
    merge(shares, data(1, 0, 5), fragment=1)
    shares.settle(AWAY, 100.0)
    record = shares.saving(2)
    again = DataShares(3, TAKEOVER_S, 200.0)
    again.restore(record, {p: shares.books.slice(p) for p in (0, 1)})
    assert told(again, "a", 0) == [(0, 0, 0), (1, 1, 8)]
    assert again.saving(1) == record
    assert refusal(again, "b", 1, data(1, 8, 9)) is Reason.SHARE_MOVED
    assert refusal(again, "a", 0, data(1, 7, 9, epoch=1)) is Reason.IMPLAUSIBLE


# --- bounds ---------------------------------------------------------------------------------------------------


def test_one_heir_has_no_more_shares_than_a_contribution_can_name():
    shares = DataShares(3 * MOST_OWNED, TAKEOVER_S, 0.0)
    shares.join("a", 0)
    here = [island("a", 0)]
    assert len(shares.settle(here, TAKEOVER_S)) == MOST_OWNED - 1
    assert shares.settle(here, TAKEOVER_S + 1) == []
    assert [moved.tenure.owner for moved in shares.settle([*here, island("b", 1)], TAKEOVER_S + 2)][:2] == ["b", "b"]


def test_an_island_that_leaves_gaps_does_not_make_every_commit_longer():
    shares = fleet()
    shares.books.wait(0, [data(0, 1, 2)])  # arrived, and waits
    for n in range(MOST_INTERVALS + 10):
        merge(shares, data(0, 4 * n + 2, 4 * n + 3), data(0, 4 * n + 4, 4 * n + 5))
    assert len(shares.books.slice(0)["0"]) <= MOST_INTERVALS
    assert shares.books.slice(0)["0"][0][0] == 2
    assert refusal(shares, "a", 0, data(0, 3, 4), most=10**6) is Reason.OVERLAP, "a gap that was given up"
    newest = 4 * (MOST_INTERVALS + 9) + 4
    assert refusal(shares, "a", 0, data(0, newest - 1, newest), most=10**6) is None, "a young one"
    shares.books.merge(0, [data(0, 1, 2)])


def test_a_gap_in_which_something_waits_is_not_given_up():
    shares = fleet()
    late = data(0, 1, 2)
    merge(shares, data(0, 0, 1))
    shares.books.wait(0, [late])
    for n in range(1, MOST_INTERVALS + 10):
        merge(shares, data(0, 2 * n, 2 * n + 1))
    shares.books.merge(0, [late])
    assert shares.books.slice(0)["0"][0][0] == 0
