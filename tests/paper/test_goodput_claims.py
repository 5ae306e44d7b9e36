"""What Decoupled DiLoCo (https://arxiv.org/abs/2604.21428) says about goodput and uptime, a test per claim."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from ops.forecast.failures import FailureModel, SimulatedFleet
from ops.forecast.fleet import Mode
from ops.forecast.goodput import simulate
from tests import closed_goodput

#: Table 1: goodput in percent, by mode, islands and chips; one interruption per chip and year. The paper does not say
#: how many groups a synchronous job has: that hardly counts.
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
TABLE_1 = {
    (Mode.DP, 8): (72, 57, 38, 27, 18),
    (Mode.ELASTIC_DP, 8): (88, 80, 69, 58, 40),
    (Mode.DECOUPLED, 2): (94, 88, 80, 70, 54),
    (Mode.DECOUPLED, 8): (98, 96, 94, 88, 80),
}
CELLS = [
    pytest.param(SimulatedFleet(mode=mode, chips=chips, islands=islands), percent, id=f"{mode}-{islands}-{chips}")
    for (mode, islands), row in TABLE_1.items()
    for chips, percent in zip(CHIPS, row, strict=True)
]


def expected(model=None, **fleet):
    """Returns the goodput in closed form, without luck in the draws."""
    return closed_goodput.expected(SimulatedFleet(**fleet), model or FailureModel())[0]


@pytest.mark.parametrize(("fleet", "percent"), CELLS)
def test_table_1_goodput_within_two_points(fleet, percent):
    """One set of parameters for all cells: the defaults. Simulated, and the same without luck in the draws."""
    found = simulate(replace(fleet, days=5.0), FailureModel()).account.goodput.value
    assert 100 * found == pytest.approx(percent, abs=2.0)
    assert 100 * closed_goodput.expected(fleet, FailureModel())[0] == pytest.approx(percent, abs=1.9)


def test_table_1_goodput_0_9_points_off_in_the_mean():
    cells = [each.values for each in CELLS]
    apart = [abs(100 * closed_goodput.expected(fleet, FailureModel())[0] - percent) for fleet, percent in cells]
    assert sum(apart) / len(apart) == pytest.approx(0.9, abs=0.05)


def test_section_4_the_fair_and_the_unfair_comparison_at_1_2_million_chips():
    """DP 27 against DD 88 is without elasticity; with it 58."""
    dp, elastic, decoupled = (expected(mode=mode) for mode in (Mode.DP, Mode.ELASTIC_DP, Mode.DECOUPLED))
    assert dp < 0.3 < 0.5 < elastic < 0.6 < 0.86 < decoupled


@pytest.mark.parametrize("chips", CHIPS)
@pytest.mark.parametrize("islands", [8, 16])
def test_section_4_uptime_is_about_one_hundred_percent_for_enough_learners(chips, islands):
    assert (
        simulate(SimulatedFleet(chips=chips, islands=islands, days=2.0), FailureModel()).account.uptime.value > 0.9999
    )


@pytest.mark.parametrize("mtbi_years", [0.5, 3.0])
def test_goodput_grows_with_learners_and_falls_with_chips(mtbi_years):
    """Also where the paper prints no cell: 1 to 32 learners, 50 thousand to 10 million chips."""
    model = FailureModel(mtbi_years=mtbi_years)
    sizes = [50_000, 150_000, 450_000, 1_200_000, 4_000_000, 10_000_000]
    grid = [[expected(model, chips=chips, islands=islands) for chips in sizes] for islands in (1, 2, 4, 8, 16, 32)]
    assert all(fewer > more for row in grid for fewer, more in pairwise(row))
    assert all(many > few for lower, upper in pairwise(grid) for few, many in zip(lower, upper, strict=True))
    assert all(0.0 < share < 1.0 for row in grid for share in row)


@pytest.mark.parametrize("islands", [2, 4, 8, 16])
def test_goodput_depends_on_the_interval_between_failures_of_an_island(islands):
    """Table 1 repeats itself along the diagonals: 88, 80, 70 for M = 2 and M = 8 at four times the chips."""
    assert expected(chips=150_000 * islands, islands=islands) == pytest.approx(0.88, abs=0.01)
    here = expected(chips=75_000 * islands, islands=islands)
    assert here == pytest.approx(expected(chips=300_000, islands=4), abs=1e-3)


def test_half_the_time_between_interruptions_is_like_twice_the_chips():
    """But for slices under repair, whose share doubles too."""
    halved = expected(FailureModel(mtbi_years=0.5, repair_s=900.0), chips=600_000)
    assert halved == pytest.approx(expected(chips=1_200_000), abs=1e-3)


def test_staleness_of_a_fleet_at_1_2_million_chips_stays_below_the_limit():
    """Section 9: the paper's merge has no staleness term; with pauses of seconds it hardly needs one."""
    result = simulate(SimulatedFleet(days=3.0), FailureModel())
    assert result.staleness < 0.25


def test_thirty_days_of_1_2_million_chips_take_less_than_ten_seconds():
    started_s = time.process_time()  # what others do on this machine does not count
    simulate(SimulatedFleet(chips=1_200_000, islands=8, days=30.0), FailureModel())
    assert time.process_time() - started_s < 10.0
