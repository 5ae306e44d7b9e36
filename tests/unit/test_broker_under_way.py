"""What of a connection to an aggregator has not left the broker's machine, by the account of its kernel."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.routing.deafness import Carried
from broker.routing.unsent import Unsent


def carried(up: int, waiting: int = 0) -> Carried:
    return Carried(up=up, down=0, waiting=waiting)


def test_what_was_given_is_here_until_the_connection_has_carried_as_much() -> None:
    line = Unsent()
    line.account(carried(5_000, waiting=200), 0.0)  # a greeting that is still on its way
    line.gave("a", 100, 0.0)
    line.gave("b", 50, 0.0)
    for up, here in ((5_200, "ab"), (5_299, "ab"), (5_300, "b"), (5_349, "b"), (5_350, "")):
        line.account(carried(up, waiting=1), 1.0)
        assert [each for each in "ab" if line.holds(each, 1.0)] == list(here)


def test_where_the_kernel_says_nothing_nothing_is_known() -> None:
    line = Unsent()
    line.gave("a", 100, 0.0)
    assert not line.holds("a", 0.0)
    line.account(carried(0, waiting=1), 0.0)
    line.gave("a", 100, 0.0)
    assert line.holds("a", 1.0)
    line.account(None, 1.0)
    assert not line.holds("a", 1.0)


def test_what_the_connection_did_not_take_is_not_under_way_and_leaves_no_gap() -> None:
    line = Unsent()
    line.account(carried(0, waiting=1), 0.0)
    for what in "abc":
        line.gave(what, 100, 0.0)
    line.took_back("b", 100)
    line.account(carried(200, waiting=1), 1.0)
    assert [each for each in "abc" if line.holds(each, 1.0)] == ["c"]
    line.account(carried(201, waiting=1), 1.0)
    assert not line.holds("c", 1.0)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 120)), max_size=60))
def test_it_holds_what_a_pipe_would_hold(story: list[tuple[int, int]]) -> None:
    """Against a list of bytes: messages go in at one end, whole ones come out at the other."""
    line, pipe, up = Unsent(), [], 0
    for number, (size_bytes, moves_bytes) in enumerate(story):
        line.account(carried(up, len(pipe)), 0.0)
        line.gave(number, size_bytes, 0.0)
        pipe += [number] * size_bytes
        up += min(moves_bytes, len(pipe))
        del pipe[:moves_bytes]
        line.account(carried(up, len(pipe)), 0.4)
        assert [each for each in range(number + 1) if line.holds(each, 1.0)] == sorted(set(pipe))
