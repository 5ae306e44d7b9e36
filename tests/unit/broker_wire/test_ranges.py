"""Interval sets against a plain set of integers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.wire.ranges import IntervalSet

INTERVALS = st.tuples(st.integers(0, 60), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(INTERVALS, max_size=40), INTERVALS)
def test_an_interval_set_is_a_set_of_integers_in_as_few_sorted_intervals_as_there_can_be(added, asked):
    intervals, twin = IntervalSet(), set()
    for start, end in added:
        members = set(range(start, end))
        if not members or members & twin:
            before = list(intervals)
            with pytest.raises(ValueError, match=r"overlaps|empty"):
                intervals.add(start, end)
            assert list(intervals) == before
        else:
            intervals.add(start, end)
            twin |= members
    wanted = set(range(*asked))
    assert len(intervals) == len(twin)
    assert bool(intervals) == bool(twin)
    assert intervals.end == max(twin, default=-1) + 1
    assert intervals.overlaps(*asked) == bool(wanted & twin)
    assert intervals.covers(*asked) == (wanted <= twin)
    assert {step for start, end in intervals for step in range(start, end)} == twin
    assert all(end < start for (_, end), (start, _) in pairwise(intervals)), "sorted, disjoint, not adjacent"


def test_the_lowest_gaps_that_need_not_stay_are_closed_until_few_intervals_are_left():
    intervals = IntervalSet([(1, 4), (8, 12), (13, 14), (20, 21)])
    intervals.close_gaps(2, lambda start, end: (start, end) == (12, 13))
    assert list(intervals) == [(1, 12), (13, 21)]
    intervals.close_gaps(2, lambda start, end: False)
    assert list(intervals) == [(1, 12), (13, 21)]
    assert intervals != {1, 2, 3}
