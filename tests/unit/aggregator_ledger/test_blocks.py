"""Blocks of data: who is given which, what becomes of lost ones, and what is refused; the test plays the core."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.ledger.batch_books import MOST_INTERVALS
from aggregator.ledger.data_blocks import MOST_BATCHES, DataBlocks, Presence
from broker.wire.messages import OWN_PASS, DataRange, Reason
from ops.faults.invariants import InOrder

TAKEOVER_S = 10.0
AHEAD_S, INTERVAL = 20.0, 16


def presence(island_id, *, batch_tokens=10, **what):
    known = {"away_s": 0.0, "able": True, "step_time_s": None, "block": 0, "released": ()}
    return Presence(island_id=island_id, batch_tokens=batch_tokens, **known | what)


def data(block, from_batch, to_batch):
    return DataRange(share=block, share_epoch=0, from_batch=from_batch, to_batch=to_batch)


def refusal(blocks, *ranges, island_id="a", fragment=0):
    steps = sum(d.to_batch - d.from_batch for d in ranges)
    found = blocks.refusal(island_id, fragment, ranges, steps)
    return found and found[0]


def restarted(record, slices):
    made = DataBlocks(AHEAD_S, INTERVAL, TAKEOVER_S)
    made.restore(record, slices, 2)
    return made


def told(blocks, island_id):
    return [(b.number, b.from_batch, b.to_batch) for b in blocks.told(island_id)]


def save(blocks, serial):
    record = blocks.saving(serial)
    blocks.saved(serial)
    return record


def of_two(takeover_s=TAKEOVER_S, batch_tokens=(10, 10), *, alone=True):
    """Islands a and b have joined, and have a block each of one interval: their pace is not known."""
    made = DataBlocks(AHEAD_S, INTERVAL, takeover_s, alone=alone)
    for island_id, tokens in zip("ab", batch_tokens, strict=True):
        made.join(island_id, tokens)
    save(made, 1)
    return made


@pytest.fixture
def blocks():
    return of_two()


def test_islands_begin_with_batches_of_one_interval_each_its_own(blocks):
    assert (told(blocks, "a"), told(blocks, "b")) == ([(1, 0, 16)], [(2, 16, 32)])


def test_who_begins_its_last_block_is_given_another_of_as_many_seconds_whatever_its_pace(blocks):
    present = [presence("a", block=1, step_time_s=0.5), presence("b", block=2, step_time_s=2.0)]
    assert len(blocks.settle(present)) == 2
    save(blocks, 2)
    assert told(blocks, "a")[-1] == (3, 32, 52)  # 10 s of training
    assert told(blocks, "b")[-1] == (4, 52, 57)
    assert blocks.settle(present) == [], "one in reserve is enough"
    blocks.join("c", 10)
    save(blocks, 3)
    assert told(blocks, "c") == [(5, 57, 73)], "of what nobody had"
    unable = [presence("a", block=3, able=False), presence("b"), presence("c")]
    assert blocks.settle(unable) == [], "nothing for one that is not able"


@pytest.mark.parametrize(("step_time_s", "batches"), [(1000.0, 1), (1e-9, MOST_BATCHES), (None, 16), (0.0, 16)])
def test_a_block_is_neither_so_short_that_no_contribution_could_name_all_nor_endless(blocks, step_time_s, batches):
    blocks.settle([presence("a", block=1, step_time_s=step_time_s), presence("b")])
    save(blocks, 2)
    _, from_batch, to_batch = told(blocks, "a")[-1]
    assert to_batch - from_batch == batches


def test_nobody_is_told_of_a_block_before_it_is_durable(blocks):
    blocks.settle([presence("a", block=1), presence("b")])
    assert len(told(blocks, "a")) == 1
    blocks.saving(2)
    assert len(told(blocks, "a")) == 1
    blocks.saved(2)
    assert len(told(blocks, "a")) == 2


def test_a_block_that_is_trained_and_needed_no_more_ends_and_leaves_nothing(blocks):
    blocks.batches.merge(0, [data(1, 0, 16)])
    present = [presence("a", block=3, released=(1,)), presence("b")]
    ended = blocks.settle(present)[0]
    assert ended.note().reached == 16
    assert blocks.left == []
    assert refusal(blocks, data(1, 0, 1)) is Reason.SHARE_MOVED


@pytest.mark.parametrize(("away_s", "ends"), [(9.9, False), (10.0, True), (math.inf, True)])
def test_what_an_absent_island_has_not_trained_goes_out_again_before_anything_new(blocks, away_s, ends):
    blocks.batches.merge(0, [data(1, 0, 5)])
    blocks.batches.wait(1, [data(1, 5, 7)])
    blocks.settle([presence("a", away_s=away_s, able=False), presence("b", block=2, step_time_s=2.5)])
    save(blocks, 2)
    # Four batches are 10 s of b. What was merged, or waits to be, on any fragment is not trained again.
    assert told(blocks, "b")[-1] == ((3, 7, 11) if ends else (3, 32, 36))
    assert blocks.left == ([(110, 160)] if ends else [])


def test_without_takeover_an_absent_island_keeps_its_block():
    assert of_two(takeover_s=0.0).settle([presence("a", away_s=math.inf, able=False), presence("b")]) == []


def test_a_new_life_goes_on_with_what_the_last_one_left_under_another_number(blocks):
    blocks.batches.merge(0, [data(1, 0, 5)])
    ended, given_ = blocks.join("a", 10)
    save(blocks, 2)
    assert (ended.note().name, given_.note().name) == ("block.ended", "block.given")
    assert told(blocks, "a") == [(3, 5, 16)]
    assert refusal(blocks, data(1, 5, 6)) is Reason.SHARE_MOVED
    assert refusal(blocks, data(3, 5, 6)) is None


def test_the_books_of_a_block_stay_until_its_end_is_durable(blocks):
    """Else a crash between a commit without them and the record could give the same batches out again."""
    blocks.batches.merge(0, [data(1, 0, 9)])
    blocks.settle([presence("a", block=3, released=(1,)), presence("b")])
    blocks.saving(2)
    blocks.saved(1)
    assert blocks.batches.slice(0) == {"1": [[0, 9]]}
    blocks.saved(2)
    assert blocks.batches.slice(0) == {}


def test_with_several_shards_a_block_ends_when_all_have_said_how_far_it_was_trained():
    made = of_two(alone=False)
    made.batches.merge(0, [data(1, 0, 4)])
    away = [presence("a", away_s=math.inf, able=False), presence("b")]
    made.settle(away)
    assert made.nobodys() == [1]
    made.saving(2)
    assert made.settle(away) == []
    made.reached_elsewhere(1, 9)
    made.saved(2)
    (ended,) = made.settle(away)
    assert (ended.reached, made.left, made.nobodys()) == (9, [(90, 160)], [])


def test_an_agreement_on_an_earlier_record_ends_no_block():
    made = of_two(alone=False)
    made.saving(2)
    made.leave("a")
    made.saving(3)
    made.saved(2)
    assert made.settle([presence("b")]) == []
    made.saved(3)
    assert [each.because for each in made.settle([presence("b")])] == ["every shard knows"]


def test_after_a_restart_a_block_of_nobody_waits_for_an_agreement_of_the_new_life():
    made = of_two(alone=False)
    made.leave("a")
    later = DataBlocks(AHEAD_S, INTERVAL, TAKEOVER_S, alone=False)
    later.restore(made.saving(2), {}, 2)
    later.saving(1)
    assert later.settle([presence("b")]) == []
    later.reached_elsewhere(1, 6)
    later.reached_elsewhere(1, 4)  # an earlier answer, which came late
    later.saved(1)
    (ended,) = later.settle([presence("b")])
    assert ended.reached == 6


def test_other_shards_refuse_what_shard_0_has_given_to_somebody_else(blocks):
    other = DataBlocks(AHEAD_S, INTERVAL, TAKEOVER_S, alone=False)
    other.adopt(blocks.tenures())
    assert other.tenures() == blocks.tenures()
    assert refusal(other, data(1, 0, 16)) is None
    assert refusal(other, data(1, 0, 16), island_id="b") is Reason.SHARE_MOVED


def test_what_is_not_in_the_block_or_was_handed_over_before_is_refused(blocks):
    assert refusal(blocks, data(1, 10, 17)) is Reason.IMPLAUSIBLE
    assert refusal(blocks, data(2, 0, 4), island_id="b") is Reason.IMPLAUSIBLE
    assert refusal(blocks, data(7, 0, 4)) is Reason.SHARE_MOVED
    blocks.batches.merge(0, [data(1, 0, 4)])
    assert refusal(blocks, data(1, 3, 6)) is Reason.OVERLAP
    assert refusal(blocks, data(1, 3, 6), fragment=1) is None


def test_batches_must_be_as_many_as_steps(blocks):
    found = blocks.refusal("a", 0, [data(1, 0, 4)], 5)
    assert found == (Reason.IMPLAUSIBLE, "it names 4 batches for 5 steps")


def test_batches_that_were_merged_or_wait_are_not_taken_again(blocks):
    blocks.batches.wait(0, [data(1, 0, 4)])
    assert refusal(blocks, data(1, 2, 6)) is Reason.OVERLAP
    blocks.batches.merge(0, [data(1, 0, 4)])
    assert refusal(blocks, data(1, 3, 5)) is Reason.OVERLAP
    assert refusal(blocks, data(1, 4, 6)) is None


def test_batches_that_were_refused_after_all_may_come_again_but_not_twice_in_one_contribution(blocks):
    blocks.batches.wait(0, [data(1, 0, 4)])
    blocks.batches.refuse(0, [data(1, 0, 4)])
    assert refusal(blocks, data(1, 0, 4)) is None
    assert refusal(blocks, data(1, 0, 4), data(1, 3, 5)) is Reason.OVERLAP


def long_block():
    """A block of one island that is long enough for many gaps."""
    made = DataBlocks(AHEAD_S, 16 * MOST_INTERVALS, TAKEOVER_S)
    made.join("a", 10)
    return made


def test_an_island_that_leaves_gaps_does_not_make_every_commit_longer():
    made = long_block()
    made.batches.wait(0, [data(1, 1, 2)])  # arrived, and waits
    for n in range(MOST_INTERVALS + 10):
        made.batches.merge(0, [data(1, 4 * n + 2, 4 * n + 3), data(1, 4 * n + 4, 4 * n + 5)])
    assert len(made.batches.slice(0)["1"]) <= MOST_INTERVALS
    assert made.batches.slice(0)["1"][0][0] == 2
    assert refusal(made, data(1, 3, 4)) is Reason.OVERLAP, "a gap that was given up"
    newest = 4 * (MOST_INTERVALS + 9) + 4
    assert refusal(made, data(1, newest - 1, newest)) is None, "a young one"
    made.batches.merge(0, [data(1, 1, 2)])


def test_a_gap_in_which_something_waits_is_not_given_up():
    made, late = long_block(), data(1, 1, 2)
    made.batches.merge(0, [data(1, 0, 1)])
    made.batches.wait(0, [late])
    for n in range(1, MOST_INTERVALS + 10):
        made.batches.merge(0, [data(1, 2 * n, 2 * n + 1)])
    made.batches.merge(0, [late])
    assert made.batches.slice(0)["1"][0][0] == 0


def test_batches_of_a_pass_of_ones_own_are_taken_and_in_no_books(blocks):
    own = data(1, OWN_PASS, OWN_PASS + 8)
    assert refusal(blocks, own) is None
    blocks.batches.wait(0, [own])
    blocks.batches.merge(0, [own])
    assert blocks.batches.reached(1) == 0
    assert refusal(blocks, own, island_id="b") is Reason.SHARE_MOVED


def test_who_does_not_say_what_it_was_trained_on_must_have_a_block(blocks):
    assert refusal(blocks) is None
    assert refusal(blocks, island_id="c") is Reason.SHARE_MOVED


def test_an_island_with_other_batches_counts_in_its_own_and_shares_no_place_with_anybody(blocks):
    blocks.join("c", 24)  # tokens a batch, where a and b have 10
    blocks.join("d")  # which does not say: as the first island
    save(blocks, 2)
    ((_, first, last),) = told(blocks, "c")
    assert first * 24 >= 320 > (first - 1) * 24
    ((_, after, _),) = told(blocks, "d")
    assert after * 10 >= last * 24 > (after - 1) * 10


def test_where_the_first_island_does_not_say_places_are_batches():
    made = of_two(batch_tokens=(0, 512))
    assert (told(made, "a"), told(made, "b")) == ([(1, 0, 16)], [(2, 16, 32)])


def test_a_restart_goes_on_with_numbers_that_nobody_was_given(blocks):
    blocks.batches.merge(0, [data(1, 0, 4)])
    later = restarted(save(blocks, 2), {0: blocks.batches.slice(0)})
    assert told(later, "a") == told(blocks, "a")
    assert refusal(later, data(1, 3, 6)) is Reason.OVERLAP
    later.settle([presence("a", block=1), presence("b")])
    save(later, 1)
    number, from_batch, _ = told(later, "a")[-1]
    assert number > 2**20
    assert from_batch == 32


def test_of_blocks_that_ended_a_restart_remembers_nothing(blocks):
    blocks.batches.merge(0, [data(1, 0, 16)])
    slices = {0: blocks.batches.slice(0)}
    blocks.settle([presence("a", block=3, released=(1,)), presence("b")])
    assert restarted(save(blocks, 2), slices).batches.slice(0) == {}


class Fleet:
    """Four islands that train, release, die and come back; what they train is handed over at once, on one fragment."""

    def __init__(self, alone):
        self.blocks = DataBlocks(4.0, 8, TAKEOVER_S, alone=alone)
        self.order, self.serial, self.merged = InOrder(), 0, []
        self.at = {}  # island -> (block, its next batch)
        self.away = set()

    def take(self, dealt):
        for each in dealt:
            name, facts = each.note().name, each.note().fields
            if name == "block.given":
                wrong = self.order.give(facts["from_batch"], facts["to_batch"], facts["batch_tokens"])
                assert not wrong
            else:
                self.order.end_block(facts["reached"], facts["to_batch"], facts["batch_tokens"])

    def settle(self):
        present = []
        for island_id, (block, _) in sorted(self.at.items()):
            older = tuple(n for n, *_ in told(self.blocks, island_id) if n < block)
            able = island_id not in self.away
            what = {"step_time_s": 0.5, "away_s": 0.0 if able else math.inf, "able": able, "batch_tokens": 1}
            present.append(presence(island_id, block=block, released=older, **what))
        self.take(self.blocks.settle(present))
        self.serial += 1
        save(self.blocks, self.serial)

    def step(self, kind, island_id, batches):
        if kind == "join" or island_id not in self.at:
            self.take(self.blocks.join(island_id, 1))
            self.at[island_id] = (0, 0)
            self.away.discard(island_id)
        elif kind == "die":
            self.away.add(island_id)
        elif island_id not in self.away:
            for n, from_batch, to_batch in told(self.blocks, island_id):
                block, next_batch = self.at[island_id]
                if n < block:
                    continue
                first = next_batch if n == block else from_batch
                last = min(first + batches, to_batch)
                if first < last:
                    assert refusal(self.blocks, data(n, first, last), island_id=island_id) is None
                    self.blocks.batches.merge(0, [data(n, first, last)])
                    self.merged.append((first, last))
                self.at[island_id] = (n, last)
                if last < to_batch:
                    break
        self.settle()


STEPS = st.tuples(
    st.sampled_from(["train", "train", "train", "die", "join"]), st.sampled_from("abcd"), st.integers(1, 9)
)


@given(st.lists(STEPS, max_size=60), st.booleans())
def test_whatever_islands_do_no_batch_is_merged_twice_and_what_was_lost_goes_before_what_is_new(steps, alone):
    fleet = Fleet(alone)
    for each in steps:
        fleet.step(*each)
    ends = sorted(fleet.merged)
    assert all(a[1] <= b[0] for a, b in pairwise(ends)), "a batch was merged twice"
    held = [n for island_id in "abcd" for n in told(fleet.blocks, island_id)]
    assert len(held) <= 3 * 4, "blocks that are needed no more stay"
    assert len(fleet.blocks.batches.slice(0)) <= 4 * 4
    # Of all that was given, what nobody merged is in somebody's hands, or there to be given.
    fleet.settle()
    known = sorted([*ends, *((a, b) for _, a, b in held), *fleet.blocks.left])
    reach = 0
    for a, b in known:
        assert a <= reach or not alone, f"batches from {reach} to {a} are nowhere"
        reach = max(reach, b)
