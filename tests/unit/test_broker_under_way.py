"""What of a connection to an aggregator has not left the broker's machine, by the account of its kernel."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.routing.deafness import Carried
from broker.routing.resending import PATIENT_S
from broker.routing.unsent import ACKNOWLEDGED_S, Unsent


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


def test_what_is_sent_again_at_once_is_an_answer_to_what_has_arrived() -> None:
    """Its acknowledgement may be on its way still."""
    line = Unsent()
    line.account(carried(0, waiting=1), 0.0)
    line.gave("a", 100, 7.0)
    line.account(carried(0, waiting=100), 7.1)
    assert not line.holds("a", 7.0 + ACKNOWLEDGED_S - 0.1)
    assert line.holds("a", 7.0 + ACKNOWLEDGED_S)


def test_nothing_is_believed_to_be_here_for_ever() -> None:
    line = Unsent()
    line.account(carried(0, waiting=1), 0.0)
    line.gave("a", 100, 7.0)
    for now_s, here in ((7.0 + PATIENT_S - 0.1, True), (7.0 + PATIENT_S, False)):
        line.account(carried(0, waiting=100), now_s)
        assert line.holds("a", now_s) is here


def test_where_nothing_waits_all_has_left_whatever_was_counted() -> None:
    """A header is packed anew when it goes on, and may have become shorter."""
    line = Unsent()
    line.account(carried(0, waiting=1), 0.0)
    line.gave("a", 100, 7.0)
    line.account(carried(61), 7.1)
    assert line.holds("a", 8.0), "too soon to say: it may not have come to the kernel"
    line.account(carried(61), 8.0)
    assert not line.holds("a", 8.0)
    line.gave("b", 100, 8.0)
    line.account(carried(161, waiting=1), 9.0)
    assert not line.holds("b", 9.0), "counted anew from there"


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
