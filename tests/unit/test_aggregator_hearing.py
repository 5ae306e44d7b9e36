"""When the aggregator takes its bulk connection to a broker for one that delivers nothing."""

import pytest

from aggregator.rounds.brokers import DeafBrokers
from broker.routing.deafness import PATIENCE_S, Carried


@pytest.fixture
def hearings():
    return DeafBrokers()


def renewals(hearings, until_s, held, *, lacks, listed=(), broker=0, came_at_s=(), carried=lambda second: None):
    """One answer to Attach a second; returns when the connection is made anew."""
    found = []
    for second in range(until_s + 1):
        for island_id in listed:
            hearings.listed(broker, island_id, True, float(second))
        if second in came_at_s:
            hearings.came(broker, float(second))
        if hearings.answered(broker, held(second), lacks, 1_000_000, float(second), carried(second)):
            found.append(second)
    return found


def test_a_broker_that_takes_nothing_in_is_reached_by_another_connection(hearings):
    assert renewals(hearings, 10, lambda second: (1, 1), lacks=True) == [1 + PATIENCE_S]


def test_a_broker_that_lacks_one_version_and_takes_others_in_is_left_alone(hearings):
    assert renewals(hearings, 60, lambda second: (1, second // 5), lacks=True) == []


def test_contributions_that_come_in_slowly_are_coming(hearings):
    def carried(second):
        return Carried(0, 5_000 * second)

    assert renewals(hearings, 200, lambda second: (1,), lacks=False, listed=["a"], carried=carried) == []
