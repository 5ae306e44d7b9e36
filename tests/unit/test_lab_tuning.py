"""Which value of a tuned setting is tried next and wins: decided from losses alone."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.lab.tuning import Attempt, Tune, interior, search


def played(tune, loss, possible=lambda value: True):
    """Runs whatever is due until there is a winner; returns the attempts in order and the search."""
    done = {}
    while True:
        found = search(tune, done.get, possible)
        if found.winner is not None:
            return list(done), found
        assert found.due
        assert len(done) < 200
        done[found.due[0]] = loss(found.due[0])


def test_a_best_value_in_the_middle_is_interior():
    found = interior({0.004: 3.3, 0.001: 3.2, 0.002: 3.1})
    assert (found.best, found.interior, found.next_value) == (0.002, True, None)


@pytest.mark.parametrize(
    ("losses", "best", "next_value"),
    [([3.0, 3.1, 3.2], 0.001, 0.0005), ([3.2, 3.1, 3.0], 0.004, 0.008), ([math.nan, math.inf, 9.0], 0.004, 0.008)],
)
def test_beyond_an_edge_the_next_value_continues_the_ratio(losses, best, next_value):
    found = interior(dict(zip([0.001, 0.002, 0.004], losses, strict=True)))
    assert (found.best, found.interior) == (best, False)
    assert found.next_value == pytest.approx(next_value)


def test_if_all_diverged_a_smaller_value_is_tried_next():
    assert interior({0.1: math.inf, 0.2: math.nan}).next_value == pytest.approx(0.05)


def test_a_single_value_is_an_edge_and_zero_has_no_ratio():
    assert interior({0.5: 3.0}).next_value == 1.0
    assert interior({0.0: 2.0, 0.5: 3.0, 0.9: 4.0}).next_value is None
    with pytest.raises(ValueError, match="nothing"):
        interior({})


def test_what_an_early_rung_dropped_counts_as_tried_and_worse():
    tune = Tune(name="rate", values=(1, 2, 4, 8), rungs=(0.25, 1.0), keep=2)
    first = {1: 4.2, 2: 4.1, 4: 4.0, 8: 4.3}
    last = {1: 3.6, 2: 3.4, 4: 3.5}
    order, found = played(tune, lambda each: (first if each.rung < 1 else last)[each.value])
    assert [each.value for each in order if each.rung == 1.0] == [2, 4, 1]  # its neighbour was dropped too early
    assert (found.tried, found.winner.best, found.winner.interior) == ((1, 2, 4, 8), 2, True)


def test_a_neighbour_that_never_ran_at_full_length_makes_nothing_interior():
    """The short rung liked large values; two more at full length do not reach the smallest."""
    tune = Tune(name="rate", values=(1, 2, 4, 8, 16), rungs=(0.25, 1.0), keep=2)
    order, found = played(tune, lambda each: each.value if each.rung == 1.0 else -each.value)
    assert [each.value for each in order if each.rung == 1.0] == [8, 16, 4, 2]
    assert (found.winner.best, found.winner.interior) == (2, False)


def test_a_value_that_diverged_never_goes_on():
    tune = Tune(name="rate", values=(1, 2, 4), rungs=(0.5, 1.0), keep=3)
    order, found = played(tune, lambda each: math.inf if each.value == 1 else each.value)
    assert [each.value for each in order] == [1, 2, 4, 2, 4, 1]  # but as the neighbour of the best it is asked again
    assert (found.winner.best, found.winner.interior) == (2, True)


def test_where_everything_diverges_the_smallest_value_is_left():
    order, found = played(Tune(name="rate", values=(1.0, 2.0), rungs=(0.5, 1.0)), lambda each: math.inf)
    assert [each.value for each in order] == [1.0, 2.0, 0.5, 0.25]
    assert (found.winner.best, found.winner.interior) == (0.25, False)


def test_where_a_whole_rung_diverges_smaller_values_are_tried_on_it():
    tune = Tune(name="rate", values=(0.5, 1.0, 2.0), rungs=(0.25, 1.0))
    order, found = played(tune, lambda each: math.inf if each.value > 0.2 else abs(each.value - 0.1))
    assert [each.value for each in order if each.rung < 1.0] == [0.5, 1.0, 2.0, 0.25, 0.125]
    assert [each.value for each in order if each.rung == 1.0] == [0.125, 0.5, 0.03125]
    assert (found.winner.best, found.winner.interior) == (0.125, True)


def test_while_runs_are_missing_nothing_has_won():
    """An interrupted race: the first seed prefers 2, the others have not spoken."""
    tune = Tune(name="rate", values=(1, 2, 4), seeds=3)
    done = {Attempt(value, 1.0, 1000): abs(value - 2.0) for value in (1, 2, 4)}
    found = search(tune, done.get, lambda value: True)
    assert (found.winner, found.tried) == (None, (1, 2, 4))
    assert {(each.value, each.seed) for each in found.due} == {(v, s) for v in (1, 2, 4) for s in (1001, 1002)}


@given(
    st.floats(-3, 3),
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0, 8.0]), min_size=2, max_size=5, unique=True),
    st.integers(1, 3),
    st.integers(2, 4),
    st.integers(0, 3),
)
def test_of_losses_with_one_valley_the_best_value_tried_wins(valley, values, seeds, keep, extend):
    """And it is interior, unless no more values might be tried."""
    tune = Tune(name="rate", values=tuple(sorted(values)), seeds=seeds, keep=keep, extend=extend)
    order, found = played(tune, lambda each: abs(math.log2(each.value) - valley))
    losses = {value: abs(math.log2(value) - valley) for value in found.tried}
    assert losses[found.winner.best] == min(losses.values())
    assert len(order) == len(set(order))
    assert found.winner.interior or len(found.tried) >= len(values) + extend
