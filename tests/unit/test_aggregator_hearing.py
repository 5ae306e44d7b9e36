"""When the aggregator takes its bulk connection to a broker for one that delivers nothing."""

import pytest

from aggregator.rounds.brokers import SAID_LATELY_S, DeafBrokers
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


def test_contributions_that_are_said_to_be_on_their_way_and_do_not_come_cost_the_connection(hearings):
    assert renewals(hearings, 10, lambda second: (1,), lacks=False, listed=["a"]) == [1 + PATIENCE_S]


def test_whatever_comes_from_a_broker_shows_that_its_connection_delivers(hearings):
    came = range(0, 60, 5)
    assert renewals(hearings, 60, lambda second: (1,), lacks=False, listed=["a"], came_at_s=came) == []


def test_versions_that_wait_in_the_kernel_are_on_their_way_and_the_broker_is_not_deaf(hearings):
    def carried(second):
        return Carried(1_000 * second, 0, 1_000_000 - 1_000 * second)

    assert renewals(hearings, 900, lambda second: (1, 1), lacks=True, carried=carried) == []


def test_versions_that_a_broker_has_acknowledged_and_does_not_hold_are_swallowed(hearings):
    def carried(second):
        return Carried(100_000 * min(second, 10), 0, max(0, 1_000_000 - 100_000 * second))

    assert renewals(hearings, 20, lambda second: (1, 1), lacks=True, carried=carried) == [10 + 1 + PATIENCE_S]


def test_contributions_that_come_in_slowly_are_coming(hearings):
    def carried(second):
        return Carried(0, 5_000 * second)

    assert renewals(hearings, 200, lambda second: (1,), lacks=False, listed=["a"], carried=carried) == []


def test_an_island_that_is_gone_is_not_waited_for(hearings):
    hearings.listed(0, "a", True, 0.0)
    assert SAID_LATELY_S < PATIENCE_S
    assert renewals(hearings, 60, lambda second: (1,), lacks=False) == []


def test_an_island_that_has_nothing_on_its_way_is_not_waited_for(hearings):
    for second in range(60):
        hearings.listed(0, "a", second % 6 != 5, float(second))
        assert not hearings.answered(0, (1,), False, 0, float(second))


def test_each_broker_has_a_connection_of_its_own(hearings):
    for second in range(9):
        hearings.listed(0, "a", True, float(second))
        first = hearings.answered(0, (1,), False, 0, float(second))
        second_ = hearings.answered(1, (1,), False, 0, float(second))
    assert (first, second_) == (True, False)
