"""What Decoupled DiLoCo (https://arxiv.org/abs/2604.21428) says about goodput and uptime, a test per claim."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest

from ops.goodput import renewal
from ops.goodput.fleet import FailureModel, Fleet, Mode
from ops.goodput.published import CHIPS, TABLE_1
from ops.goodput.simulation import expected_goodput, simulate

CELLS = [
    pytest.param(row, chips, percent, id=f"{row.mode}-{row.islands}-{chips}")
    for row, published in TABLE_1.items()
    for chips, percent in published.items()
]


@pytest.mark.parametrize(("row", "chips", "percent"), CELLS)
def test_table_1_goodput_within_two_points(row, chips, percent):
    """One set of parameters for all cells: the defaults. Simulated, and the same without luck in the draws."""
    fleet = Fleet(mode=Mode(row.mode), chips=chips, islands=row.islands, days=5.0)
    assert 100 * simulate(fleet, FailureModel()).account.goodput.value == pytest.approx(percent, abs=2.0)
    goodput = expected_goodput(mode=row.mode, chips=chips, islands=row.islands)
    assert 100 * goodput == pytest.approx(percent, abs=1.9)


def test_section_4_the_fair_and_the_unfair_comparison_at_1_2_million_chips():
    """DP 27 against DD 88 is without elasticity; with it 58."""
    dp, elastic, decoupled = (
        expected_goodput(mode=mode, chips=1_200_000, islands=8) for mode in ("dp", "elastic-dp", "decoupled")
    )
    assert dp < 0.3 < 0.5 < elastic < 0.6 < 0.86 < decoupled


@pytest.mark.parametrize("chips", CHIPS)
@pytest.mark.parametrize("islands", [8, 16])
def test_section_4_uptime_is_about_one_hundred_percent_for_enough_learners(chips, islands):
    assert simulate(Fleet(chips=chips, islands=islands, days=2.0), FailureModel()).account.uptime.value > 0.9999


@pytest.mark.parametrize("mtbi_years", [0.5, 3.0])
def test_goodput_grows_with_learners_and_falls_with_chips(mtbi_years):
    """Also where the paper prints no cell: 1 to 32 learners, 50 thousand to 10 million chips."""
    sizes = [50_000, 150_000, 450_000, 1_200_000, 4_000_000, 10_000_000]
    grid = [
        [expected_goodput(chips=chips, islands=islands, mtbi_years=mtbi_years, events=10_000) for chips in sizes]
        for islands in (1, 2, 4, 8, 16, 32)
    ]
    assert all(fewer > more for row in grid for fewer, more in pairwise(row))
    assert all(many > few for lower, upper in pairwise(grid) for few, many in zip(lower, upper, strict=True))
    assert all(0.0 < share < 1.0 for row in grid for share in row)


@pytest.mark.parametrize("islands", [2, 4, 8, 16])
def test_goodput_depends_on_the_interval_between_failures_of_an_island(islands):
    """Table 1 repeats itself along the diagonals: 88, 80, 70 for M = 2 and M = 8 at four times the chips."""
    assert expected_goodput(chips=150_000 * islands, islands=islands) == pytest.approx(0.88, abs=0.01)
    here = expected_goodput(chips=75_000 * islands, islands=islands)
    assert here == pytest.approx(expected_goodput(chips=300_000, islands=4), abs=1e-3)


def test_half_the_time_between_interruptions_is_like_twice_the_chips():
    """But for slices under repair, whose share doubles too."""
    fleet, twice = Fleet(chips=600_000), Fleet(chips=1_200_000)
    halved, usual = FailureModel(mtbi_years=0.5, repair_s=900.0), FailureModel()
    assert renewal.goodput(fleet, halved) == pytest.approx(renewal.goodput(twice, usual), abs=1e-3)


def test_synchronous_diloco_shares_pauses_as_a_job_does_unless_it_merges_seldom():
    """Barriers show every island's pauses to all; those within one interval hide each other, so long ones help."""
    fleet = Fleet(chips=600_000, islands=8, days=5.0)
    job, barrier, decoupled = (
        simulate(replace(fleet, mode=mode), FailureModel()).account.goodput.value
        for mode in (Mode.ELASTIC_DP, Mode.DILOCO, Mode.DECOUPLED)
    )
    assert barrier == pytest.approx(job, abs=0.05)
    rarely = simulate(replace(fleet, mode=Mode.DILOCO), FailureModel(sync_interval=500)).account.goodput.value
    assert max(job, barrier) < rarely < decoupled


def test_staleness_of_a_fleet_at_1_2_million_chips_stays_below_the_limit():
    """Section 9: the paper's merge has no staleness term; with pauses of seconds it hardly needs one."""
    result = simulate(Fleet(days=3.0), FailureModel())
    assert result.staleness.mean < 0.25
    assert result.staleness.p99 < 2.0


def test_thirty_days_of_1_2_million_chips_take_less_than_ten_seconds():
    started_s = time.process_time()  # what others do on this machine does not count
    simulate(Fleet(chips=1_200_000, islands=8, days=30.0), FailureModel())
    assert time.process_time() - started_s < 10.0
