"""How long rounds take, and what follows: waits, and how many rounds are open at once."""

import pytest

from aggregator.rules.round_times import RoundTimes
from tests.aggregator_hand import config


def journeys(**settings):
    return RoundTimes(config(**{"sync_interval": 24, "overlap": 2, "grace_factor": 0.5, **settings}))


def test_the_grace_window_shrinks_by_what_quorum_and_publication_take():
    made = journeys()
    assert made.waits(1.0, 24).grace_s == 1.0  # gamma * tau * step
    made.quorum_met(0.4)
    made.committed(opened_at_s=0.0, closed_at_s=0.5, now_s=1.1)
    assert made.waits(1.0, 24).grace_s == pytest.approx(0.5 * (2.0 - 0.4 - 0.6))


def test_the_wait_for_arrivals_is_their_ninetieth_percentile_and_a_step():
    made = journeys()
    made.opened(1, 0.0)
    for i in range(1, 11):
        made.arrived(1, i / 10)
    assert made.arrivals_p90_s() == 0.9
    assert made.waits(0.25, 24).arrivals_s == 0.9 + 0.25, "answers are given at the ends of steps"


def test_longer_journeys_open_more_rounds_and_never_more_than_there_are_fragments():
    made = journeys(rounds_in_flight=2)
    assert made.rounds_allowed(8, 0.1, 24) == 2
    made.committed(opened_at_s=0.0, closed_at_s=1.0, now_s=1.2)
    # 12 steps of 0.1 s, 8 fragments in 24 steps: four are under way at any time, and one opens.
    assert made.rounds_allowed(8, 0.1, 24) == 5
    assert made.rounds_allowed(2, 0.01, 24) == 2
    assert made.rounds_allowed(8, 0.0, 24) == 2
