"""The island's side of blocks of data: one after the other, a pass of its own where none is left, and what it says."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.wire import messages as m
from broker.wire.fragments import Kind
from broker.wire.messages import OWN_PASS, Block
from broker.wire.schema import MAX_DATA_RANGES
from islands.protocol.data_shares import DataShare, Trail, TrainedBatch
from islands.protocol.events import Boundary, Fail, Tick
from islands.protocol.fragment import Point
from islands.protocol.paused import Paused
from islands.tasks.task import endless_batches
from tests.aggregator_hand import of
from tests.island_hand import Hand, sent
from tests.unit.islands_tasks.test_task import a_task


def block(number, from_batch, to_batch):
    return Block(number=number, from_batch=from_batch, to_batch=to_batch)


ONE, TWO, THREE = block(1, 0, 2), block(2, 10, 12), block(3, 20, 22)


def view(*blocks):
    return DataShare.of(blocks, seed=5, life=1)


def train(share, steps):
    return [(each.block, each.batch) for each in (share.trained() for _ in range(steps))]


@pytest.mark.parametrize("ahead", [0, 3])
def test_blocks_are_trained_one_after_the_other_also_by_a_generator_that_takes_batches_ahead(ahead):
    share = view(ONE, TWO)
    assert (share.index, share.count, share.seed) == (0, 1, 5)
    assert [share.take()[2] for _ in range(ahead)] == [0, 1, 10][:ahead]
    assert train(share, 4) == [(1, 0), (1, 1), (2, 10), (2, 11)]


def test_where_no_block_is_left_an_island_trains_a_pass_of_its_own_until_there_is():
    share = view(ONE)
    (number, batch), later = train(share, 4)[2:]
    assert (number, batch >= OWN_PASS) == (1, True)
    assert later == (1, batch + 1)
    share.hold([ONE, TWO], 1)
    *of_two, (_, again), (_, last) = train(share, 4)
    assert of_two == [(2, 10), (2, 11)]
    assert batch + 1 < again < last


@pytest.mark.parametrize(
    ("blocks", "steps", "told", "life", "goes_on"),
    [
        ([], 1, [ONE], 1, [(1, 0), (1, 1)]),
        ([block(1, 0, 9), TWO], 3, [TWO], 1, [(2, 10), (2, 11)]),
        ([ONE, TWO], 3, [ONE, TWO, THREE], 1, [(2, 11), (3, 20)]),
        ([block(7, 0, 9)], 1, [block(2, 30, 32)], 2, [(2, 30), (2, 31)]),
    ],
    ids=["it had none", "one was lost", "one was trained and is still listed", "another life has numbers of its own"],
)
def test_it_goes_on_with_the_blocks_that_it_is_told_of(blocks, steps, told, life, goes_on):
    share = view(*blocks)
    train(share, steps)
    share.hold(told, life)
    assert train(share, 2) == goes_on


def test_without_any_block_it_trains_a_pass_of_its_own():
    share = view()
    ((number, batch),) = train(share, 1)
    assert (number, batch >= OWN_PASS) == (0, True)
    share = view(block(1, 0, 9))
    share.hold([], 1)
    ((_, batch),) = train(share, 1)
    assert batch >= OWN_PASS


def test_it_runs_short_once_for_each_block_that_it_trains_as_its_last():
    share = view(ONE)
    assert not share.runs_short()
    train(share, 1)
    assert [share.runs_short(), share.runs_short()] == [True, False]
    share.hold([ONE, TWO], 1)
    train(share, 1)
    assert not share.runs_short()
    train(share, 1)
    assert share.runs_short()


@pytest.mark.parametrize(
    ("takes", "counts", "begins"), [(False, True, [0, 10]), (False, False, [0, 10]), (True, False, [0])]
)
def test_data_that_count_by_themselves_begin_anew_at_each_block_and_those_that_ask_for_batches_do_not(
    takes, counts, begins
):
    begun = []

    def data(share):
        begun.append(share.cursor)
        cursor = share.cursor
        while True:
            yield share.take()[2] if takes else cursor if counts else share.cursor
            cursor += 1

    share = view(ONE, block(2, 10, 13))
    batches, seen = endless_batches(replace(a_task(), data=data), share), []
    for _ in range(5):
        seen.append(next(batches))
        share.trained()
    assert (seen, begun) == ([0, 1, 10, 11, 12], begins)


def test_batches_of_data_that_only_this_island_has_are_counted_over_all_its_lives():
    share = DataShare.of([ONE, block(2, 10, 12)], seed=5, life=2, own=7)
    assert share.own == 7
    train(share, 3)  # its cursor has jumped
    share.hold([], 3)
    train(share, 1)
    assert share.own == 11


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=12), st.data())
def test_ranges_of_a_trail_hold_just_the_batches_of_their_steps(turns, draw):
    trail, batches, steps = Trail(), {}, []
    for number, num in turns:
        for _ in range(num):
            batches[number] = batches.get(number, -1) + 1
            trail.add(len(steps), TrainedBatch(number, batches[number]))
            steps.append((number, batches[number]))
    a = draw.draw(st.integers(0, len(steps) - 1))
    b = draw.draw(st.integers(a + 1, len(steps)))
    said = [(d.share, i) for d in trail.data_of(a, b) for i in range(d.from_batch, d.to_batch)]
    assert sorted(said) == sorted(steps[a:b])


def test_what_is_in_too_many_pieces_to_be_named_is_not_named():
    trail = Trail()
    for step in range(MAX_DATA_RANGES + 1):
        trail.add(step, TrainedBatch(0, 2 * step))
    assert len(trail.data_of(0, MAX_DATA_RANGES)) == MAX_DATA_RANGES
    assert trail.data_of(0, MAX_DATA_RANGES + 1) == ()


class Dealt(Hand):
    """An island that is given blocks."""

    def __init__(self, *blocks, **more):
        self.blocks = blocks
        super().__init__(joined=False, **more)
        self.join()

    def join(self, incarnation=1):
        self.welcome(incarnation)
        self.version(0)
        self.boundary(installed=(0,))

    def hear(self, message, *more, **rest):
        if isinstance(message, m.Welcome):
            message = replace(message, blocks=self.blocks)
        return super().hear(message, *more, **rest)

    def state(self, **more):
        return super().state(**{"blocks": self.blocks, **more})

    def tell(self, *blocks, **more):
        self.blocks = blocks
        return self.state(**more)

    def train(self, *batches):
        """Runs a step on each of (block, batch); returns what it says."""
        trained = tuple((self.step + i, TrainedBatch(n, batch)) for i, (n, batch) in enumerate(batches))
        self.step += len(batches)
        return self.feed(Boundary(inner_step=self.step, tokens=self.step * 10, trained=trained, copied=(0,)))

    def beat(self):
        self.now_s += 0.5
        (beat,) = sent(self.feed(Tick()), m.Heartbeat)
        return beat.block, beat.released


def test_it_asks_at_once_when_it_begins_its_last_block_and_no_oftener():
    island = Dealt(block(1, 0, 2))
    due_s = island.core.next_deadline_s()
    (beat,) = sent(island.train((1, 0)), m.Heartbeat)
    assert beat.block == 1
    assert island.core.next_deadline_s() == due_s, "the next heartbeat is not put off"
    assert not sent(island.train((1, 1)), m.Heartbeat)
    island.tell(block(1, 0, 2), block(2, 2, 4), block(3, 4, 6))
    assert not sent(island.train((2, 2), (2, 3)), m.Heartbeat)
    (beat,) = sent(island.train((3, 4)), m.Heartbeat)
    assert beat.block == 3


def test_a_block_is_released_when_the_fate_of_all_that_was_trained_on_it_is_known():
    """Of the fragments that move: a frozen one is never handed over, and what was trained would be kept for ever."""
    island = Dealt(block(1, 0, 2), block(2, 2, 9), fragments=2, kinds=(Kind.RDA, Kind.FROZEN))
    island.train((1, 0), (1, 1), (2, 2))
    assert island.beat() == (2, ()), "nothing of it is handed over"
    island.tell(*island.blocks, rounds=((1, 0),))
    (contribution,) = sent(island.captured(), m.Contribution)
    assert island.beat() == (2, ()), "it may have to be sent again"
    island.resolve(contribution, m.Fate.MERGED)
    assert island.beat() == (2, (1,))
    island.tell(block(2, 2, 9))
    assert island.beat() == (2, ())


def test_in_a_new_life_numbers_of_the_last_one_count_for_nothing():
    island = Dealt(block(9, 0, 4))
    island.train((9, 0))
    island.hear(m.Refused(kind="heartbeat", sequence=1, reason=m.Reason.UNKNOWN_ISLAND, detail=""))
    island.blocks = (block(1, 4, 8),)
    island.join(2)
    assert island.beat() == (0, ())


def test_the_next_process_of_a_life_goes_on_in_its_block():
    paused = Paused(
        run_id="demo",
        island_id="a",
        incarnation=1,
        nonce="n",
        sequence=5,
        at=Point(7, 70),
        overwritten_tokens=(0,),
        cursors={1: 4, 2: 7},
        contributions=(),
    )
    island = Dealt(block(1, 0, 4), block(2, 4, 9), paused=paused)
    share = DataShare.of(island.core.blocks, seed=0, life=1)
    assert train(share, 2) == [(2, 7), (2, 8)]


def test_an_island_does_not_join_a_run_with_one_share_of_the_data_for_each():
    island = Hand(joined=False)
    island.settings = replace(island.settings, data_ahead_s=0.0)
    (fail,) = of(island.welcome(), Fail)
    assert (fail.reason, "data_ahead_s = 0" in fail.cure) == (m.Reason.PROTOCOL_VERSION, True)
