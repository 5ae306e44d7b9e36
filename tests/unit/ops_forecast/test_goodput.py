"""``atoll simulate``: accounts, closed forms as oracles, jobs over islands, staleness."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.forecast.accounts import account, contributions
from ops.forecast.failures import FailureModel, SimulatedFleet, all_slices
from ops.forecast.fleet import Mode
from ops.forecast.goodput import simulate
from ops.forecast.timeline import Cause, TimeLine
from tests.closed_goodput import away_share, expected
from tests.profiles import examples

MODES = (Mode.DECOUPLED, Mode.ELASTIC_DP, Mode.DP)


def wasted(result):
    """Returns cause -> share, without the causes that waste nothing."""
    return {cause: each.value for cause, each in result.account.wasted.items() if each.value}


def life(end_s, *intervals, down=(), lost_s=0.0):
    """A time line from (from, to) of training; what is not down between them is a pause."""
    training = np.array(intervals, dtype=np.float64).reshape(-1, 2)
    downs = np.array(down, dtype=np.float64).reshape(-1, 2)
    gaps = zip([0.0, *training[:, 1]], [*training[:, 0], end_s], strict=True)
    idle = {cause: np.empty((0, 2)) for cause in Cause} | {Cause.ISLAND_DOWN: downs}
    idle[Cause.PAUSED] = np.array([gap for gap in gaps if list(gap) not in downs.tolist()]).reshape(-1, 2)
    return TimeLine(
        duration_s=end_s,
        from_s=training[:, 0],
        to_s=training[:, 1],
        share=np.ones(len(training)),
        idle=idle,
        down_from_s=downs[:, 0],
        down_to_s=downs[:, 1],
        lost_s=np.full(len(downs), lost_s),
    )


# --- accounts ---------------------------------------------------------------------------------------------------


@given(
    mode=st.sampled_from(MODES),
    islands=st.integers(1, 4),
    days=st.sampled_from([0.1, 1.0, 4.0]),
    slice_chips=st.sampled_from([64, 256]),
    mtbi_years=st.sampled_from([5e-4, 1e-3, 0.01, 0.1, 1e9]),
    step_s=st.sampled_from([1.0, 10.0]),
    sync_interval=st.sampled_from([3, 24, 500]),
    max_staleness=st.integers(0, 3),
    repair_s=st.sampled_from([0.0, 60.0, 1800.0, 50_000.0]),
    scale_down_s=st.sampled_from([0.0, 22.3, 400.0]),
)
@examples(60)
def test_nothing_is_wasted_twice_whatever_the_trouble(mode, islands, days, slice_chips, **troubles):
    fleet = SimulatedFleet(mode=mode, chips=256 * islands, islands=islands, days=days)
    result = simulate(fleet, FailureModel(slice_chips=slice_chips, **troubles))
    goodput = result.account.goodput
    assert goodput.value + sum(wasted(result).values()) == pytest.approx(1.0, abs=1e-9)
    assert all(-1e-12 <= share <= 1.0 + 1e-12 for share in (goodput.value, *wasted(result).values()))
    assert 0.0 <= goodput.low <= goodput.value + 1e-12
    assert goodput.value - 1e-12 <= goodput.high <= 1.0


@pytest.mark.parametrize("mode", MODES)
def test_every_cause_of_waste_occurs_where_it_should(mode):
    """Islands of two slices, which are both away now and then."""
    model = FailureModel(mtbi_years=0.01, scale_down_s=250.0)
    found = wasted(simulate(SimulatedFleet(mode=mode, chips=512, islands=4, days=100.0), model)).keys()
    if mode is Mode.DECOUPLED:
        assert found == set(Cause)
    elif mode is Mode.DP:
        assert found == {Cause.PAUSED}, "spares replace what is away"
    else:
        assert found >= {Cause.PAUSED, Cause.CAPACITY_AWAY}
        assert not found & {Cause.ISLAND_LOST, Cause.STALE}


def test_uptime_is_the_time_in_which_anybody_trains():
    lines = [life(100.0, (0, 40), (60, 70)), life(100.0, (30, 50), (90, 100))]
    assert account(lines).uptime.value == pytest.approx(0.7)
    assert account(lines).goodput.value == pytest.approx((50 + 30) / 200)


def test_the_confidence_interval_covers_the_expectation_about_as_often_as_it_says():
    fleet = SimulatedFleet(mode=Mode.ELASTIC_DP, chips=300_000, days=2.0)
    goodput, _ = expected(fleet, FailureModel())
    runs = [simulate(replace(fleet, seed=seed), FailureModel()).account.goodput for seed in range(40)]
    covered = sum(run.low <= goodput <= run.high for run in runs)
    assert 34 <= covered <= 40


# --- closed forms as oracles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.DECOUPLED, Mode.ELASTIC_DP, Mode.DP])
@pytest.mark.parametrize(("chips", "days"), [(150_000, 20.0), (1_200_000, 4.0)])
@pytest.mark.parametrize(
    "model", [FailureModel(), FailureModel(check_s=0.0, rejoin_wait_s=20.0), FailureModel(mtbi_years=0.3, check_s=20.0)]
)
def test_simulations_agree_with_the_closed_form(mode, chips, days, model):
    fleet = SimulatedFleet(mode=mode, chips=chips, islands=16, days=days)
    found = simulate(fleet, model).account
    assert (found.goodput.value, found.uptime.value) == pytest.approx(expected(fleet, model), abs=0.006)


def test_slices_under_repair_are_as_many_as_m_g_infinity_says():
    model = FailureModel(mtbi_years=0.05, rejoin_wait_s=0.0, scale_down_s=0.0, scale_up_s=0.0, check_s=0.0)
    waste = wasted(simulate(SimulatedFleet(chips=100_000, islands=1, days=5.0), model))
    slices, rate = model.slices(100_000), 100_000 / model.chip_mtbi_s
    offered = rate * model.repair_s / slices  # slices in repair over slices, if all could always fail
    assert waste[Cause.CAPACITY_AWAY] == pytest.approx(offered / (1 + offered), rel=0.02)
    assert away_share(100_000, slices, model) == pytest.approx(offered / (1 + offered))


@pytest.mark.parametrize("mode", MODES)
def test_without_failures_everything_counts(mode):
    result = simulate(SimulatedFleet(mode=mode, days=1.0), FailureModel(mtbi_years=1e9)).account
    assert result.goodput.value == pytest.approx(1.0, abs=1e-9)
    assert result.uptime.value == pytest.approx(1.0, abs=1e-9)


def test_one_decoupled_island_is_an_elastic_job():
    alone, job = (
        simulate(SimulatedFleet(mode=m, islands=1, days=5.0), FailureModel()) for m in (Mode.DECOUPLED, Mode.ELASTIC_DP)
    )
    assert alone.account.goodput == job.account.goodput


# --- jobs over islands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accelerators", "islands"), [(8, 4), (40, 4), (3, 2)])
def test_a_job_over_small_islands_loses_one_of_them_and_not_all(accelerators, islands):
    """Closed form: each failure costs both pauses, and the slice its repair and its wait for one."""
    model = FailureModel(mtbi_years=0.1)
    fleet = SimulatedFleet(mode=Mode.ELASTIC_DP, chips=accelerators * islands, islands=islands, days=10_000.0)
    assert all_slices(fleet, model) == islands
    every_s = model.chip_mtbi_s / fleet.chips
    lost_s = model.scale_down_s + model.scale_up_s + (model.repair_s + model.rejoin_wait_s) / islands
    assert simulate(fleet, model).account.goodput.value == pytest.approx(1 - lost_s / every_s, abs=0.002)


def test_slices_are_those_nearest_to_what_was_asked_for():
    model = replace(FailureModel(), slice_chips=512)
    assert [model.slices(chips) for chips in (100, 767, 768, 1279, 1280)] == [1, 1, 2, 2, 3]
    fleet = SimulatedFleet(chips=10 * 768 + 3, islands=10)
    assert all_slices(fleet, model) == sum(model.slices(fleet.chips_of(i)) for i in range(10)) == 20


# --- staleness ----------------------------------------------------------------------------------------------------


STEADY = life(5000.0, (0, 5000))


def staleness_of(lines):
    model = FailureModel(sync_interval=24, overlap=2, max_staleness=8)
    found, dropped = contributions(lines, model)
    return found, sum(float(np.sum(each.lost_s)) for each in dropped)


def test_islands_that_never_pause_are_stale_by_overlap_over_interval():
    found, refused = staleness_of([STEADY] * 3)
    assert found == pytest.approx(2 / 24, rel=0.01)
    assert refused == 0.0


def test_what_straddles_a_long_pause_is_refused_and_counted_but_what_was_trained_since_an_island_went_down_is_not():
    _, refused = staleness_of([*[STEADY] * 49, life(5000.0, (0, 2000), (2300, 5000))])
    # The mean fragment had 12 s before the pause that were not handed over, and gets 12 s more until it is due again.
    assert refused == pytest.approx(24.0, rel=0.1)
    found, refused = staleness_of([*[STEADY] * 49, life(5000.0, (0, 2000), (2300, 5000), down=[(2000, 2300)])])
    assert refused == 0.0
    assert found == pytest.approx(2 / 24, rel=0.01)
