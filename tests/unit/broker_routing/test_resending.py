"""Pauses before something is sent again follow the journeys of the link, and a link in trouble is not made worse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.routing.resending import JOURNEYS, LONGEST, PATIENT_S, RESEND_S, UNKNOWN_S, Carried, Patience


@pytest.mark.parametrize(("journey_s", "longest_s"), [(None, UNKNOWN_S), (0.1, LONGEST * RESEND_S)])
def test_pauses_double_up_to_a_multiple_of_the_first_and_for_longer_where_nothing_is_known(journey_s, longest_s):
    patience = Patience()
    if journey_s is not None:
        patience.took(journey_s)
    backoff, pauses = patience.backoff(), []
    for _ in range(7):
        backoff.tried(0.0)
        pauses.append(backoff.due_at_s)
    assert pauses == [min(RESEND_S * 2**n, longest_s) for n in range(7)]


def test_afterwards_journeys_count_and_sizes_do_not():
    patience = Patience()
    patience.took(10.0)
    assert patience.backoff(1 << 40).first_s == JOURNEYS * 10.0
    patience.took(0.0)
    assert patience.backoff().first_s == pytest.approx(JOURNEYS * 8.0)


def test_a_pause_begins_when_the_last_attempt_has_left_this_machine():
    backoff = Patience().backoff(100)
    backoff.tried(0.0)
    assert not any(backoff.due(float(now_s), Carried(0, 1)) for now_s in range(500))
    assert not backoff.due(499.0 + RESEND_S - 0.1, Carried(1, 0))
    assert backoff.due(499.0 + RESEND_S, Carried(1, 0))


def test_nothing_is_held_back_for_longer_than_anything_may_take():
    backoff, full = Patience().backoff(100), Carried(0, 1 << 40)
    backoff.tried(0.0)
    assert not backoff.due(PATIENT_S, full)
    assert backoff.due(PATIENT_S + RESEND_S, full)


def test_what_went_with_a_connection_is_due_whatever_the_next_one_carries():
    backoff = Patience().backoff(100)
    backoff.tried(0.0)
    assert not backoff.due(5.0, Carried(0, 1))
    backoff.lost(5.0)
    assert backoff.due(5.0, Carried(0, 1))
    backoff.tried(5.0)
    assert not backoff.due(50.0, Carried(0, 1))


@given(all_s=st.floats(0.01, 100.0), together=st.integers(1, 24))
def test_on_a_link_of_any_rate_copies_end(all_s, together):
    """``together`` messages share a link and take ``all_s``; what is sent again queues like the rest."""
    journey_s = all_s / together
    patience, now_s, free_at_s, late = Patience(), 0.0, 0.0, 0
    for turn in range(40):
        copies, arrivals = 0, []
        for _ in range(together):
            backoff, sent_s = patience.backoff(), now_s
            free_at_s = arrives_s = max(free_at_s, now_s) + journey_s
            backoff.tried(sent_s)
            while backoff.due_at_s < arrives_s:
                backoff.tried(backoff.due_at_s)
                patience.in_vain(backoff)
                free_at_s += journey_s
                copies += 1
            arrivals.append((arrives_s, arrives_s - sent_s, backoff))
        for arrives_s, took_s, backoff in arrivals:
            if backoff.pause_s == backoff.first_s:
                patience.took(took_s)
            now_s = max(now_s, arrives_s)
        late = turn if copies else late
    assert late < 20
