"""Numbers that come twice over one connection, against a plain set."""

from hypothesis import given
from hypothesis import strategies as st

from broker.routing.directory import WINDOW, Seen


def test_what_was_overtaken_on_its_way_is_no_repetition_and_its_copy_is():
    seen = Seen()
    assert [seen.repeats(n) for n in (10, 14, 12, 11, 14, 12, 13, 10)] == [
        False,
        False,
        False,
        False,
        True,
        True,
        False,
        True,
    ]


def test_what_is_too_old_to_tell_counts_as_seen():
    seen = Seen()
    seen.repeats(2 * WINDOW)
    assert not seen.repeats(WINDOW + 1)
    assert seen.repeats(WINDOW)


@given(st.lists(st.integers(0, 60), max_size=60), st.integers(0, 1 << 62))
def test_a_repetition_is_what_a_set_calls_one(numbers, begins):
    seen, model = Seen(), set()
    for n in numbers:
        assert seen.repeats(begins + n) == (n in model)
        model.add(n)
