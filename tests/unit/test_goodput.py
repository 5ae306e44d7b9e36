"""``atoll simulate``: accounts, closed forms as oracles, barriers, staleness."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ops.goodput import renewal, simulation, timeline
from ops.goodput.accounts import account, contributions, stepping_by
from ops.goodput.fleet import FailureModel, Fleet, Mode, Outage, Stream, all_slices, generator, job_losses
from ops.goodput.simulation import expected_goodput, simulate
from ops.goodput.timeline import Cause, TimeLine, coupled
from tests.profiles import examples

NEVER = FailureModel(mtbi_years=1e9)


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


def coordinators(*given):
    return [{"coordinator_mtbi_days": d, "coordinator_repair_s": r, "hold_s": h} for d, r, h in given]


@given(
    mode=st.sampled_from(Mode),
    islands=st.integers(1, 4),
    days=st.sampled_from([0.1, 1.0, 4.0]),
    coordinator=st.sampled_from(
        [{}, *coordinators((0.1, 7200.0, 0.0), (0.05, 600.0, 300.0), (1.0, 60.0, 3600.0), (0.01, 1e7, 0.0))]
    ),
    domain_mtbi_days=st.sampled_from([None, 0.2, 0.5]),
    domain_repair_min=st.sampled_from([60.0, 600.0]),
    mtbi_years=st.sampled_from([5e-4, 1e-3, 0.01, 0.1, 1e9]),
    step_s=st.sampled_from([1.0, 10.0]),
    sync_interval=st.sampled_from([3, 24, 500]),
    max_staleness=st.integers(0, 3),
    repair_s=st.sampled_from([0.0, 60.0, 1800.0, 50_000.0]),
    scale_down_s=st.sampled_from([0.0, 22.3, 400.0]),
)
@example(
    mode=Mode.DECOUPLED,
    islands=2,
    days=4.0,
    coordinator=coordinators((0.01, 1e7, 0.0))[0],
    mtbi_years=5e-4,
    step_s=10.0,
    sync_interval=500,
    max_staleness=8,
    repair_s=60.0,
    scale_down_s=22.3,
    domain_mtbi_days=None,
    domain_repair_min=60.0,
)
@examples(60)
def test_nothing_is_wasted_twice_whatever_the_trouble(mode, islands, days, coordinator, **troubles):
    fleet = Fleet(mode=mode, chips=256 * islands, islands=islands, days=days)
    result = simulate(fleet, FailureModel(**coordinator, **troubles)).account
    assert result.goodput.value + sum(result.waste.values()) == pytest.approx(1.0, abs=1e-9)
    assert all(-1e-12 <= share <= 1.0 + 1e-12 for share in (result.goodput.value, *result.waste.values()))
    assert 0.0 <= result.goodput.low <= result.goodput.value + 1e-12
    assert result.goodput.value - 1e-12 <= result.goodput.high <= 1.0


@pytest.mark.parametrize("mode", list(Mode))
def test_every_cause_of_waste_occurs_where_it_should(mode):
    (coordinator,) = coordinators((0.5, 7200.0, 3600.0))
    model = FailureModel(**coordinator, domain_mtbi_days=1.0, domain_islands=2, scale_down_s=250.0)
    waste = simulate(Fleet(mode=mode, chips=100_000, islands=4, days=5.0), model).account.waste
    found = {cause for cause, share in waste.items() if share > 0.0}
    if mode is Mode.DECOUPLED:
        assert found == set(Cause) - {Cause.WAITING}, "a decoupled island waits for nobody"
    else:
        assert found >= {Cause.WAITING, Cause.COORDINATOR}
        assert Cause.STALE not in found


def test_uptime_is_the_time_in_which_anybody_trains():
    lines = [life(100.0, (0, 40), (60, 70)), life(100.0, (30, 50), (90, 100))]
    times_s, up_s = stepping_by(lines)
    assert up_s[-1] == pytest.approx(50 + 10 + 10)
    assert times_s[-1] == 100.0
    assert account(lines).uptime.value == pytest.approx(0.7)
    assert account(lines).goodput.value == pytest.approx((50 + 30) / 200)


def test_the_confidence_interval_covers_the_expectation_about_as_often_as_it_says():
    fleet = Fleet(mode=Mode.ELASTIC_DP, chips=300_000, days=2.0)
    expected = renewal.goodput(fleet, FailureModel())
    runs = [simulate(replace(fleet, seed=seed), FailureModel()).account.goodput for seed in range(40)]
    covered = sum(run.low <= expected <= run.high for run in runs)
    assert 34 <= covered <= 40


# --- closed forms as oracles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.DECOUPLED, Mode.ELASTIC_DP, Mode.DP])
@pytest.mark.parametrize(("chips", "days"), [(150_000, 20.0), (1_200_000, 4.0)])
@pytest.mark.parametrize(
    "model", [FailureModel(), FailureModel(check_s=0.0, rejoin_wait_s=20.0), FailureModel(mtbi_years=0.3, check_s=20.0)]
)
def test_simulations_agree_with_the_closed_form(mode, chips, days, model):
    result = simulate(Fleet(mode=mode, chips=chips, islands=16, days=days), model)
    expected_goodput, expected_uptime = result.closed_form
    assert result.account.goodput.value == pytest.approx(expected_goodput, abs=0.006)
    assert result.account.uptime.value == pytest.approx(expected_uptime, abs=0.006)


@pytest.mark.parametrize(
    "model",
    [
        FailureModel(repair_s=20.0),  # back within the pause that it caused
        FailureModel(mtbi_years=0.05),  # islands miss eight rounds in turn
    ],
)
def test_no_closed_form_is_shown_where_it_does_not_hold(model):
    result = simulate(Fleet(days=1.0), model)
    found = result.account.goodput.value
    assert result.closed_form is None
    assert abs(renewal.goodput(result.fleet, model) - found) > 0.008
    assert expected_goodput(chips=1_200_000, islands=8, model=model, events=50_000) == pytest.approx(found, abs=0.005)


def test_no_closed_form_is_shown_where_repaired_slices_wait_long_for_a_pause():
    few = Fleet(chips=10_000)  # twenty slices an island, of which a quarter are away
    assert not renewal.has_closed_form(few, FailureModel(mtbi_years=0.01))
    assert renewal.has_closed_form(few, FailureModel(mtbi_years=0.1))


def test_slices_under_repair_are_as_many_as_m_g_infinity_says():
    model = FailureModel(mtbi_years=0.05, rejoin_wait_s=0.0, scale_down_s=0.0, scale_up_s=0.0, check_s=0.0)
    waste = simulate(Fleet(chips=100_000, islands=1, days=5.0), model).account.waste
    slices, rate = model.slices(100_000), 100_000 / model.chip_mtbi_s
    offered = rate * model.repair_s / slices  # slices in repair over slices, if all could always fail
    assert waste[Cause.CAPACITY_AWAY] == pytest.approx(offered / (1 + offered), rel=0.02)
    assert renewal.away_share(100_000, slices, model) == pytest.approx(offered / (1 + offered))


@pytest.mark.parametrize("mode", list(Mode))
def test_without_failures_and_differences_in_speed_everything_counts(mode):
    steady = replace(NEVER, speed_spread=0.0, step_jitter=0.0)
    result = simulate(Fleet(mode=mode, days=1.0), steady).account
    assert result.goodput.value == pytest.approx(1.0, abs=1e-9)
    assert result.uptime.value == pytest.approx(1.0, abs=1e-9)


def test_one_decoupled_island_is_an_elastic_job():
    alone, job = (
        simulate(Fleet(mode=m, islands=1, days=5.0), FailureModel()) for m in (Mode.DECOUPLED, Mode.ELASTIC_DP)
    )
    barrier = simulate(Fleet(mode=Mode.DILOCO, islands=1, days=5.0), FailureModel())
    assert alone.account.goodput == job.account.goodput
    assert barrier.account.goodput.value == pytest.approx(job.account.goodput.value, abs=1e-6)


def test_groups_that_keep_in_step_pay_for_the_slowest_and_decoupled_islands_do_not(monkeypatch):
    monkeypatch.setattr(simulation, "_SPEED_DRAWS", 2)  # of these the interval is made, not the goodput
    monkeypatch.setattr(simulation, "_STEP_DRAWS", 1)  # without jitter one step is like another
    uneven = replace(NEVER, speed_spread=0.1, step_jitter=0.0)

    def found(mode, seed):
        return simulate(Fleet(mode=mode, days=0.01, seed=seed), uneven).account.goodput.value

    assert found(Mode.DECOUPLED, 0) == pytest.approx(1.0)
    expected = renewal.in_step_share(Fleet(), uneven)  # 0.88
    for mode in (Mode.DP, Mode.ELASTIC_DP, Mode.DILOCO):
        assert np.mean([found(mode, seed) for seed in range(40)]) == pytest.approx(expected, abs=0.015)


def test_jitter_averages_out_between_barriers_but_not_within_steps():
    restless = replace(NEVER, speed_spread=0.0, step_jitter=0.1)
    every_step = simulate(Fleet(mode=Mode.DP, days=0.5), restless).account.goodput.value
    every_interval = simulate(Fleet(mode=Mode.DILOCO, days=0.5), restless).account.goodput.value
    assert every_step == pytest.approx(1 / 1.142, abs=0.005)
    assert every_interval == pytest.approx(1 / (1 + 0.142 / math.sqrt(24)), abs=0.005)


# --- barriers -----------------------------------------------------------------------------------------------------

EVEN = FailureModel(step_s=1.0, sync_interval=10, step_jitter=0.0)


def at_barriers(*lines, outages=()):
    return coupled(lines, [1.0, 1.0], EVEN, outages, generator(0, Stream.SPEEDS))


def test_at_a_barrier_the_others_wait_for_the_one_that_paused_unless_they_paused_too():
    paused = life(40.0, (0, 5), (12, 40))
    lines = at_barriers(life(40.0, (0, 40)), paused)
    assert [line.idle_s[Cause.WAITING] for line in lines] == [pytest.approx(7.0), 0.0]
    assert [np.sum(line.to_s - line.from_s) for line in lines] == pytest.approx([33.0, 33.0])
    lines = at_barriers(life(40.0, (0, 2), (9, 40)), paused)
    assert [line.idle_s[Cause.WAITING] for line in lines] == [0.0, 0.0]


def test_where_failures_are_rare_the_expected_goodput_has_seen_enough_of_them():
    """Eight islands of a slice each: every failure is a repair and a restart, for which all of them wait. By hand."""
    rate = 512 / FailureModel().chip_mtbi_s
    found = expected_goodput(mode="diloco", chips=512, islands=8, events=20_000)
    assert found == pytest.approx(1 / (1 + rate * (1800.0 + 83.5)), abs=0.006)
    assert found < expected_goodput(chips=512, islands=8, events=20_000)


@pytest.mark.parametrize("mode", ["diloco", "decoupled"])
@pytest.mark.parametrize(("chips", "islands", "step_s"), [(64, 64, 0.004), (1024, 128, 0.01), (8, 8, 1e-6)])
def test_where_rounds_come_often_the_expected_goodput_is_not_refused(mode, chips, islands, step_s):
    """By hand: a repair and a restart, of one island or for all of them."""
    found = expected_goodput(mode=mode, chips=chips, islands=islands, step_s=step_s, sync_interval=24, events=20_000)
    away = chips / FailureModel().chip_mtbi_s * (1800.0 + 83.5)
    assert found == pytest.approx(math.exp(-away if mode == "diloco" else -away / islands), abs=0.01)


@pytest.mark.parametrize(("chips", "days"), [(512, 5.0), (40_000, 1.0)])
def test_barriers_without_pauses_are_taken_many_at_a_time_and_change_nothing(chips, days, monkeypatch):
    """Against the loop that takes one after the other."""
    fleet = Fleet(mode=Mode.DILOCO, chips=chips, days=days)
    model = FailureModel(coordinator_mtbi_days=0.3)
    many = simulate(fleet, model).account
    monkeypatch.setattr(timeline._Island, "trains_until_s", lambda self, now_s: now_s)
    one = simulate(fleet, model).account
    assert many.goodput.value == pytest.approx(one.goodput.value, rel=1e-9)
    assert many.waste == pytest.approx(one.waste, rel=1e-6, abs=1e-12)


def test_no_barrier_opens_while_the_coordinator_is_away():
    lines = at_barriers(*[life(100.0, (0, 100))] * 2, outages=[Outage(12.0, 16.0), Outage(25.0, 37.0)])
    assert [line.idle_s[Cause.COORDINATOR] for line in lines] == [pytest.approx(7.0)] * 2, "the first one is hidden"


def test_an_island_that_goes_down_loses_what_it_trained_since_the_barrier():
    _, line = at_barriers(life(100.0, (0, 100)), life(100.0, (0, 24), (60, 100), down=[(24, 60)]))
    assert line.lost_s.tolist() == pytest.approx([4.0])


def test_while_the_coordinator_is_away_an_island_that_goes_down_loses_all_since_then():
    """By hand: what is not handed over when the coordinator goes, half an interval, and all that is trained after."""
    once = life(10_000.0, (0, 4000), (5000, 10_000), down=[(4000, 5000)], lost_s=12.0)

    def lost_s(*outages, hold_s=3600.0, line=once):
        return simulation._lost_with(line, list(outages), FailureModel(hold_s=hold_s)).lost_s.tolist()

    assert lost_s(Outage(3000.0, 6000.0)) == [12.0 + 1000.0]
    again = life(10_000.0, (0, 4000), (5000, 5500), down=[(4000, 5000), (5500, 9000)], lost_s=12.0)
    assert lost_s(Outage(3000.0, 6000.0), line=again) == [1012.0, 500.0], "what it trained since it restarted"
    assert lost_s(Outage(3000.0, 6000.0), hold_s=400.0) == [412.0], "what is wasted anyway is not lost once more"
    assert lost_s(Outage(3000.0, 3900.0)) == lost_s() == [12.0]


def test_what_an_island_loses_again_before_the_next_barrier_it_loses_once():
    """Renewals: up for U, exponential, and away for D. Of the U trained before it goes down, what it trained since the
    last barrier or its return is lost; a barrier comes after W of training.
    """
    model = replace(FailureModel(), mtbi_years=0.01, sync_interval=500, step_s=10.0, check_s=0.0)
    fleet = Fleet(mode=Mode.DILOCO, chips=64, islands=1, days=1500.0)
    up_s, down_s, interval_s = model.chip_mtbi_s / 64, model.repair_s + model.restart_s, model.interval_s
    kept = up_s * (1.0 - math.exp(-interval_s / up_s)) / (interval_s * (1.0 + down_s / up_s))
    assert simulate(fleet, model).account.goodput.value == pytest.approx(kept, abs=0.01)


@pytest.mark.parametrize("chips", [999_936, 1_000_000, 1_200_000])
@pytest.mark.parametrize("domain_islands", [8, 3, 1])
def test_when_all_domains_are_gone_no_slice_is_left_to_a_job(chips, domain_islands):
    fleet = Fleet(mode=Mode.ELASTIC_DP, chips=chips, islands=8)
    model = replace(NEVER, domain_mtbi_days=1.0, domain_islands=domain_islands)
    losses = itertools.takewhile(lambda loss: loss.at_s < 3.0, job_losses(fleet, model, [[Outage(1.0, 2.0)]] * 8))
    assert sum(loss.slices for loss in losses) == all_slices(fleet, model)


@pytest.mark.parametrize(("accelerators", "islands"), [(8, 4), (40, 4), (3, 2)])
def test_a_job_over_small_islands_loses_one_of_them_and_not_all(accelerators, islands):
    """Closed form: each failure costs both pauses, and the slice its repair and its wait for one."""
    model = replace(FailureModel(), mtbi_years=0.1, speed_spread=0.0, step_jitter=0.0)
    fleet = Fleet(mode=Mode.ELASTIC_DP, chips=accelerators * islands, islands=islands, days=10_000.0)
    assert all_slices(fleet, model) == islands
    every_s = model.chip_mtbi_s / fleet.chips
    lost_s = model.scale_down_s + model.scale_up_s + (model.repair_s + model.rejoin_wait_s) / islands
    assert simulate(fleet, model).account.goodput.value == pytest.approx(1 - lost_s / every_s, abs=0.002)


def test_slices_are_those_nearest_to_what_was_asked_for():
    model = replace(FailureModel(), slice_chips=512)
    assert [model.slices(chips) for chips in (100, 767, 768, 1279, 1280)] == [1, 1, 2, 2, 3]
    fleet = Fleet(chips=10 * 768 + 3, islands=10)
    assert all_slices(fleet, model) == sum(model.slices(fleet.chips_of(i)) for i in range(10)) == 20


# --- staleness ----------------------------------------------------------------------------------------------------


STEADY = life(5000.0, (0, 5000))


def staleness_of(lines, coordinator=()):
    model = FailureModel(sync_interval=24, overlap=2, max_staleness=8)
    found, dropped = contributions(lines, model, list(coordinator))
    return found, sum(float(np.sum(each.lost_s)) for each in dropped)


def test_islands_that_never_pause_are_stale_by_overlap_over_interval():
    found, refused = staleness_of([STEADY] * 3)
    assert found.mean == pytest.approx(2 / 24, rel=0.01)
    assert refused == 0.0


def test_what_straddles_a_long_pause_is_refused_and_counted_but_what_was_trained_since_an_island_went_down_is_not():
    _, refused = staleness_of([*[STEADY] * 49, life(5000.0, (0, 2000), (2300, 5000))])
    # The mean fragment had 12 s before the pause that were not handed over, and gets 12 s more until it is due again.
    assert refused == pytest.approx(24.0, rel=0.1)
    found, refused = staleness_of([*[STEADY] * 49, life(5000.0, (0, 2000), (2300, 5000), down=[(2000, 2300)])])
    assert refused == 0.0
    assert found.p99 < 0.1


def test_nothing_is_merged_while_the_coordinator_is_away_and_nobody_gets_stale_by_it():
    found, refused = staleness_of([STEADY] * 2, [Outage(1000.0, 3000.0)])
    through, _ = staleness_of([STEADY] * 2)
    assert found.contributions < 0.7 * through.contributions
    assert found.mean <= through.mean
    assert refused == 0.0
