"""The island's side of blocks of data: one after the other, a pass of its own where none is left, and what it says."""

from dataclasses import replace

import pytest

from broker.wire import messages as m
from broker.wire.messages import OWN_PASS, Block
from islands.protocol.data_shares import Cursor, DataShare, TrainedBatch
from islands.protocol.events import Boundary, Tick
from islands.protocol.fragment import Point
from islands.protocol.paused import Paused
from islands.tasks.task import endless_batches
from tests.island_hand import Hand, sent
from tests.unit.test_islands_task import a_task


def block(number, from_batch, to_batch):
    return Block(number=number, from_batch=from_batch, to_batch=to_batch)


ONE, TWO, THREE = block(1, 0, 2), block(2, 10, 12), block(3, 20, 22)


def view(*blocks):
    return DataShare.of(blocks, seed=5, life=1, by_blocks=True)


def train(share, steps):
    return [(each.share, each.batch) for each in (share.trained() for _ in range(steps))]


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


class Dealt(Hand):
    """An island of a run whose data go out in blocks."""

    def __init__(self, *blocks, **more):
        self.blocks = blocks
        super().__init__(joined=False, **more)
        self.settings = replace(self.settings, data_ahead_s=10.0)
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
        trained = tuple((self.step + i, TrainedBatch(n, 0, batch)) for i, (n, batch) in enumerate(batches))
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
    island = Dealt(block(1, 0, 2), block(2, 2, 9))
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
        cursors=(Cursor(1, 0, 4), Cursor(2, 0, 7)),
        contributions=(),
    )
    island = Dealt(block(1, 0, 4), block(2, 4, 9), paused=paused)
    share = DataShare.of(island.core.shares, seed=0, life=1, by_blocks=True)
    assert train(share, 2) == [(2, 7), (2, 8)]
