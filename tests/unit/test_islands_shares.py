"""What an island trains next, and what it says of it afterwards."""

from hypothesis import given
from hypothesis import strategies as st

from broker.wire.messages import DataRange, Share
from broker.wire.schema import MAX_DATA_RANGES
from islands.protocol.data_shares import IN_A_ROW, DataShare, Trail, TrainedBatch


def share(index, epoch=0, cursor=0, lane=0):
    return Share(index=index, count=4, share_epoch=epoch, cursor=cursor, lane=lane)


def data(share_, from_batch, to_batch, epoch=0):
    return DataRange(share=share_, share_epoch=epoch, from_batch=from_batch, to_batch=to_batch)


def test_one_share_is_trained_batch_by_batch_from_its_cursor():
    view = DataShare.of([share(2, cursor=7)], seed=5)
    assert [view.take() for _ in range(3)] == [(2, 4, 7, 5), (2, 4, 8, 5), (2, 4, 9, 5)]
    assert [view.trained() for _ in range(3)] == [TrainedBatch(2, 0, b) for b in (7, 8, 9)]


def test_a_share_taken_over_is_trained_in_turn_with_the_own_one():
    view = DataShare.of([share(0, cursor=10), share(1, epoch=3, cursor=50)], seed=0)
    seen = [view.trained() for _ in range(3 * IN_A_ROW)]
    assert seen[:IN_A_ROW] == [TrainedBatch(0, 0, 10 + i) for i in range(IN_A_ROW)]
    assert seen[IN_A_ROW : 2 * IN_A_ROW] == [TrainedBatch(1, 3, 50 + i) for i in range(IN_A_ROW)]
    assert seen[2 * IN_A_ROW] == TrainedBatch(0, 0, 10 + IN_A_ROW)


def test_a_share_that_stays_goes_on_and_one_under_a_new_epoch_starts_where_it_says():
    view = DataShare.of([share(0), share(1, epoch=1, cursor=50)], seed=0)
    for _ in range(IN_A_ROW + 3):
        view.trained()
    view.hold([share(0), share(1, epoch=1, cursor=50)])
    assert view.trained() == TrainedBatch(1, 1, 53)
    view.hold([share(0)])
    assert view.trained() == TrainedBatch(0, 0, IN_A_ROW), "handed back"
    view.hold([share(0, epoch=2, cursor=99)])
    assert view.trained() == TrainedBatch(0, 2, 99)


def test_batches_taken_ahead_are_booked_as_what_they_are():
    view = DataShare.of([share(0)], seed=0)
    for _ in range(2):
        view.take()
    view.hold([share(0, epoch=1, cursor=9)])
    assert [view.trained() for _ in range(3)] == [TrainedBatch(0, 0, 0), TrainedBatch(0, 0, 1), TrainedBatch(0, 1, 9)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=12), st.data())
def test_ranges_of_a_trail_hold_just_the_batches_of_their_steps(turns, draw):
    trail, batches, steps = Trail(), {}, []
    for number, num in turns:
        for _ in range(num):
            batches[number] = batches.get(number, -1) + 1
            trail.add(len(steps), TrainedBatch(number, 0, batches[number]))
            steps.append((number, batches[number]))
    a = draw.draw(st.integers(0, len(steps) - 1))
    b = draw.draw(st.integers(a + 1, len(steps)))
    said = [(d.share, i) for d in trail.data_of(a, b) for i in range(d.from_batch, d.to_batch)]
    assert sorted(said) == sorted(steps[a:b])


def test_what_is_in_too_many_pieces_to_be_named_is_not_named():
    trail = Trail()
    for step in range(MAX_DATA_RANGES + 1):
        trail.add(step, TrainedBatch(0, 0, 2 * step))
    assert len(trail.data_of(0, MAX_DATA_RANGES)) == MAX_DATA_RANGES
    assert trail.data_of(0, MAX_DATA_RANGES + 1) == ()
