"""Step ranges, and interval sets against a plain set of integers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.wire.ranges import IntervalSet

INTERVALS = st.tuples(st.integers(0, 60), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(INTERVALS, max_size=40), INTERVALS)
def test_an_interval_set_is_a_set_of_integers(added, asked):
    intervals, twin = IntervalSet(), set()
    for start, end in added:
        members = set(range(start, end))
        if not members or members & twin:
            with pytest.raises(ValueError, match=r"overlaps|empty"):
                intervals.add(start, end)
        else:
            intervals.add(start, end)
            twin |= members
    wanted = set(range(*asked))
    assert len(intervals) == len(twin)
    assert intervals.end == max(twin, default=-1) + 1
    assert intervals.overlaps(*asked) == bool(wanted & twin)
    assert intervals.covers(*asked) == (wanted <= twin)
    assert {step for start, end in intervals for step in range(start, end)} == twin


@given(st.lists(INTERVALS, max_size=40))
def test_stored_intervals_are_sorted_disjoint_and_not_adjacent(added):
    intervals = IntervalSet()
    for start, end in added:
        if start < end and not intervals.overlaps(start, end):
            intervals.add(start, end)
    stored = list(intervals)
    assert all(start < end for start, end in stored)
    assert all(end < start for (_, end), (start, _) in pairwise(stored))


def test_a_failed_add_changes_nothing():
    intervals = IntervalSet([(0, 4), (8, 12)])
    for start, end in ((3, 9), (4, 9), (5, 5), (6, 5), (0, 1)):
        with pytest.raises(ValueError, match=r"overlaps|empty"):
            intervals.add(start, end)
    assert list(intervals) == [(0, 4), (8, 12)]


def test_gaps_lie_between_the_intervals():
    assert list(IntervalSet().gaps()) == []
    assert IntervalSet().num_intervals == 0
    intervals = IntervalSet([(1, 4), (8, 12), (13, 14)])
    assert list(intervals.gaps()) == [(4, 8), (12, 13)]
    assert intervals.num_intervals == 3


def test_the_empty_set_ends_at_zero_and_is_false():
    assert IntervalSet().end == 0
    assert not IntervalSet()
    assert IntervalSet() != set()
