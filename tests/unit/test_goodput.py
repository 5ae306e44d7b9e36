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
from ops.goodput.fleet import (
    DAY_S,
    FailureModel,
    Fleet,
    Mode,
    Outage,
    Stream,
    all_slices,
    generator,
    job_losses,
)
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


@given(
    mode=st.sampled_from(Mode),
    islands=st.integers(1, 4),
    days=st.sampled_from([0.1, 1.0, 4.0]),
    mtbi_years=st.sampled_from([5e-4, 1e-3, 0.01, 0.1, 1e9]),
    step_s=st.sampled_from([1.0, 10.0]),
    sync_interval=st.sampled_from([3, 24, 500]),
    max_staleness=st.integers(0, 3),
    repair_s=st.sampled_from([0.0, 60.0, 1800.0, 50_000.0]),
    scale_down_s=st.sampled_from([0.0, 22.3, 400.0]),
    coordinator=st.sampled_from(
        [None, (0.1, 7200.0, 0.0), (0.05, 600.0, 300.0), (1.0, 60.0, 3600.0), (0.01, 1e7, 0.0)]
    ),
    domains=st.sampled_from([None, (0.2, 1, 600.0), (0.5, 1, 60.0)]),
)
@example(
    mode=Mode.DECOUPLED,
    islands=2,
    days=4.0,
    mtbi_years=5e-4,
    step_s=10.0,
    sync_interval=500,
    max_staleness=8,
    repair_s=60.0,
    scale_down_s=22.3,
    coordinator=(0.01, 1e7, 0.0),
    domains=None,
)
@examples(60)
def test_nothing_is_wasted_twice_whatever_the_trouble(
    mode, islands, days, coordinator, domains, sync_interval, **troubles
):
    mtbi_days, repair_s, hold_s = coordinator or (None, 60.0, 3600.0)
    domain_mtbi_days, part, repair_min = domains or (None, 1, 60.0)
    model = FailureModel(
        **troubles,
        sync_interval=sync_interval,
        coordinator_mtbi_days=mtbi_days,
        coordinator_repair_s=repair_s,
        hold_s=hold_s,
        domain_mtbi_days=domain_mtbi_days,
        domain_islands=part,
        domain_repair_min=repair_min,
    )
    fleet = Fleet(mode=mode, chips=256 * islands, islands=islands, days=days)
    result = simulate(fleet, model).account
    assert result.goodput.value + sum(result.waste.values()) == pytest.approx(1.0, abs=1e-9)
    assert all(-1e-12 <= share <= 1.0 + 1e-12 for share in result.waste.values())
    assert result.goodput.value >= -1e-12
    assert 0.0 <= result.goodput.low <= result.goodput.value + 1e-12
    assert result.goodput.value - 1e-12 <= result.goodput.high <= 1.0


def test_every_cause_of_waste_occurs_where_it_should():
    domains = {"domain_mtbi_days": 1.0, "domain_islands": 2}
    troubled = FailureModel(**domains, coordinator_mtbi_days=0.5, coordinator_repair_s=7200.0, scale_down_s=250.0)
    found = simulate(Fleet(chips=100_000, islands=4, days=20.0), troubled).account.waste
    decoupled = {cause for cause, share in found.items() if share > 0.0}
    assert decoupled == set(Cause) - {Cause.WAITING}, "a decoupled island waits for nobody"
    for mode in (Mode.DILOCO, Mode.ELASTIC_DP, Mode.DP):
        found = simulate(Fleet(mode=mode, chips=100_000, islands=4, days=5.0), troubled).account.waste
        assert found[Cause.WAITING] > 0.0
        assert found[Cause.COORDINATOR] > 0.0
        assert found[Cause.STALE] == 0.0


def test_uptime_is_the_time_in_which_anybody_trains():
    lines = [life(100.0, (0, 40), (60, 70)), life(100.0, (30, 50), (90, 100))]
    times_s, up_s = stepping_by(lines)
    assert up_s[-1] == pytest.approx(50 + 10 + 10)
    assert times_s[-1] == 100.0
    assert account(lines).uptime.value == pytest.approx(0.7)
    assert account(lines).goodput.value == pytest.approx((50 + 30) / 200)


def test_the_confidence_interval_covers_the_expectation_about_as_often_as_it_says():
    fleet = Fleet(mode=Mode.ELASTIC_DP, chips=1_200_000, days=2.0)
    expected = renewal.goodput(fleet, FailureModel())
    runs = [simulate(replace(fleet, seed=seed), FailureModel()).account.goodput for seed in range(60)]
    covered = sum(run.low <= expected <= run.high for run in runs)
    assert 50 <= covered <= 60


# --- closed forms as oracles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.DECOUPLED, Mode.ELASTIC_DP, Mode.DP])
@pytest.mark.parametrize("chips", [150_000, 1_200_000])
@pytest.mark.parametrize(
    "model", [FailureModel(), FailureModel(check_s=0.0, rejoin_wait_s=20.0), FailureModel(mtbi_years=0.3, check_s=20.0)]
)
def test_simulations_agree_with_the_closed_form(mode, chips, model):
    result = simulate(Fleet(mode=mode, chips=chips, islands=16, days=20.0), model)
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
    result = simulate(Fleet(days=4.0), model)
    assert result.closed_form is None
    assert abs(renewal.goodput(result.fleet, model) - result.account.goodput.value) > 0.008
    assert expected_goodput(chips=1_200_000, islands=8, model=model) == pytest.approx(
        result.account.goodput.value, abs=0.005
    )


def test_no_closed_form_is_shown_where_repaired_slices_wait_long_for_a_pause():
    """Twenty slices an island, of which a quarter are away: 0.4 points lie between both."""
    few = Fleet(chips=10_000, days=5.0)
    assert not renewal.has_closed_form(few, FailureModel(mtbi_years=0.01))
    assert renewal.has_closed_form(few, FailureModel(mtbi_years=0.1))


def test_slices_under_repair_are_as_many_as_m_g_infinity_says():
    model = FailureModel(mtbi_years=0.05, rejoin_wait_s=0.0, scale_down_s=0.0, scale_up_s=0.0, check_s=0.0)
    waste = simulate(Fleet(chips=100_000, islands=1, days=5.0), model).account.waste
    slices, rate = model.slices(100_000), 100_000 / model.chip_mtbi_s
    offered = rate * model.repair_s / slices  # slices in repair over slices, if all could always fail
    assert waste[Cause.CAPACITY_AWAY] == pytest.approx(offered / (1 + offered), rel=0.02)
    assert renewal.away_share(100_000, slices, model) == pytest.approx(offered / (1 + offered))


def test_an_island_of_one_slice_alternates_between_up_and_repair():
    model = FailureModel(mtbi_years=0.02, slice_chips=64, check_s=0.0, catch_up_s=0.0)
    result = simulate(Fleet(chips=64, islands=1, days=5000.0), replace(model, step_s=100.0)).account
    mean_up_s, mean_down_s = model.chip_mtbi_s / 64, model.repair_s + model.restart_s
    assert result.uptime.value == pytest.approx(mean_up_s / (mean_up_s + mean_down_s), abs=0.005)


def test_domain_failures_take_up_repair_and_restart():
    model = FailureModel(mtbi_years=1e9, domain_mtbi_days=0.5, domain_repair_min=60.0)
    result = simulate(Fleet(islands=8, days=100.0), model).account
    between_s, repair_s = 0.5 * DAY_S, 3600.0
    up_s = between_s * math.exp(-model.restart_s / between_s)  # the next failure may come during the restart
    assert 1.0 - result.waste[Cause.ISLAND_DOWN] == pytest.approx(up_s / (between_s + repair_s), abs=0.005)


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


def test_the_mean_of_the_greatest_of_normal_draws():
    assert renewal.expected_slowest(1) == pytest.approx(0.0, abs=1e-9)
    assert renewal.expected_slowest(2) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-6)
    drawn = np.random.default_rng(0).standard_normal((200_000, 8)).max(axis=1).mean()
    assert renewal.expected_slowest(8) == pytest.approx(drawn, abs=0.005)


def test_groups_that_keep_in_step_pay_for_the_slowest_and_decoupled_islands_do_not():
    uneven = replace(NEVER, speed_spread=0.1, step_jitter=0.0)
    found = {}
    for mode in Mode:
        runs = [simulate(Fleet(mode=mode, days=0.01, seed=seed), uneven).account.goodput.value for seed in range(40)]
        found[mode] = np.mean(runs)
    assert found[Mode.DECOUPLED] == pytest.approx(1.0)
    expected = renewal.in_step_share(Fleet(), uneven)  # 0.88
    for mode in (Mode.DP, Mode.ELASTIC_DP, Mode.DILOCO):
        assert found[mode] == pytest.approx(expected, abs=0.015)


def test_jitter_averages_out_between_barriers_but_not_within_steps():
    restless = replace(NEVER, speed_spread=0.0, step_jitter=0.1)
    every_step = simulate(Fleet(mode=Mode.DP, days=0.5), restless).account.goodput.value
    every_interval = simulate(Fleet(mode=Mode.DILOCO, days=0.5), restless).account.goodput.value
    assert every_step == pytest.approx(1 / 1.142, abs=0.005)
    assert every_interval == pytest.approx(1 / (1 + 0.142 / math.sqrt(24)), abs=0.005)


# --- barriers -----------------------------------------------------------------------------------------------------

EVEN = FailureModel(step_s=1.0, sync_interval=10, step_jitter=0.0)


def test_at_a_barrier_the_others_wait_for_the_one_that_paused():
    lines = coupled(
        [life(40.0, (0, 40)), life(40.0, (0, 5), (12, 40))], [1.0, 1.0], EVEN, [], generator(0, Stream.SPEEDS)
    )
    assert lines[0].idle_s[Cause.WAITING] == pytest.approx(7.0)
    assert lines[1].idle_s[Cause.WAITING] == 0.0
    assert [np.sum(line.to_s - line.from_s) for line in lines] == pytest.approx([33.0, 33.0])


def test_pauses_at_the_same_barrier_hide_each_other():
    one, other = life(40.0, (0, 2), (9, 40)), life(40.0, (0, 5), (12, 40))
    lines = coupled([one, other], [1.0, 1.0], EVEN, [], generator(0, Stream.SPEEDS))
    assert [line.idle_s[Cause.WAITING] for line in lines] == [0.0, 0.0]


def test_where_failures_are_rare_the_expected_goodput_has_seen_enough_of_them():
    """Eight islands of a slice each: every failure is a repair and a restart, for which all of them wait. By hand."""
    rate = 512 / FailureModel().chip_mtbi_s
    found = expected_goodput(mode="diloco", chips=512, islands=8)
    assert found == pytest.approx(1 / (1 + rate * (1800.0 + 83.5)), abs=0.006)
    assert found < expected_goodput(chips=512, islands=8)


@pytest.mark.parametrize("mode", ["diloco", "decoupled"])
@pytest.mark.parametrize(("chips", "islands", "step_s"), [(64, 64, 0.004), (1024, 128, 0.01), (8, 8, 1e-6)])
def test_where_rounds_come_often_the_expected_goodput_is_not_refused(mode, chips, islands, step_s):
    """By hand: a repair and a restart, of one island or for all of them."""
    found = expected_goodput(mode=mode, chips=chips, islands=islands, step_s=step_s, sync_interval=24)
    away = chips / FailureModel().chip_mtbi_s * (1800.0 + 83.5)
    assert found == pytest.approx(math.exp(-away if mode == "diloco" else -away / islands), abs=0.01)


@pytest.mark.parametrize("chips", [512, 40_000])
def test_barriers_without_pauses_are_taken_many_at_a_time_and_change_nothing(chips, monkeypatch):
    """Against the loop that takes one after the other."""
    fleet = Fleet(mode=Mode.DILOCO, chips=chips, days=20.0)
    model = FailureModel(coordinator_mtbi_days=3.0)
    many = simulate(fleet, model).account
    monkeypatch.setattr(timeline._Island, "trains_until_s", lambda self, now_s: now_s)
    one = simulate(fleet, model).account
    assert many.goodput.value == pytest.approx(one.goodput.value, rel=1e-9)
    assert many.waste == pytest.approx(one.waste, rel=1e-6, abs=1e-12)


def test_no_barrier_opens_while_the_coordinator_is_away():
    lines = [life(100.0, (0, 100)), life(100.0, (0, 100))]
    after = coupled(lines, [1.0, 1.0], EVEN, [Outage(12.0, 16.0), Outage(25.0, 37.0)], generator(0, Stream.SPEEDS))
    assert [line.idle_s[Cause.COORDINATOR] for line in after] == [pytest.approx(7.0)] * 2, "the first one is hidden"


def test_an_island_that_goes_down_loses_what_it_trained_since_the_barrier():
    lines = [life(100.0, (0, 100)), life(100.0, (0, 24), (60, 100), down=[(24, 60)])]
    after = coupled(lines, [1.0, 1.0], EVEN, [], generator(0, Stream.SPEEDS))
    assert after[1].lost_s.tolist() == pytest.approx([4.0])


def test_while_the_coordinator_is_away_an_island_that_goes_down_loses_all_since_then():
    """By hand: what is not handed over when the coordinator goes, half an interval, and all that is trained after."""
    line = life(10_000.0, (0, 4000), (5000, 10_000), down=((4000.0, 5000.0),), lost_s=12.0)
    held = FailureModel(hold_s=3600.0)
    (lost,) = simulation._lost_with(line, [Outage(3000.0, 6000.0)], held).lost_s
    assert lost == 12.0 + 1000.0
    # It restarted within the outage, and goes down again: what it trained since.
    again = life(10_000.0, (0, 4000), (5000, 5500), down=((4000.0, 5000.0), (5500.0, 9000.0)), lost_s=12.0)
    assert simulation._lost_with(again, [Outage(3000.0, 6000.0)], held).lost_s.tolist() == [1012.0, 500.0]
    # What is wasted for want of a coordinator is not lost once more.
    assert simulation._lost_with(line, [Outage(3000.0, 6000.0)], FailureModel(hold_s=400.0)).lost_s.tolist() == [412.0]
    assert simulation._lost_with(line, [Outage(3000.0, 3900.0)], held).lost_s.tolist() == [12.0]
    assert simulation._lost_with(line, [], held).lost_s.tolist() == [12.0]


def test_what_an_island_loses_again_before_the_next_barrier_it_loses_once():
    """Renewals: up for U, exponential, and away for D. Of the U trained before it goes down, what it trained since the
    last barrier or its return is lost; a barrier comes after W of training.
    """
    model = replace(FailureModel(), mtbi_years=0.01, sync_interval=500, step_s=10.0, check_s=0.0)
    fleet = Fleet(mode=Mode.DILOCO, chips=64, islands=1, days=4000.0)
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


def staleness_of(lines, model, coordinator=()):
    found, dropped = contributions(lines, model, list(coordinator))
    return found, sum(float(np.sum(each.lost_s)) for each in dropped)


def test_islands_that_never_pause_are_stale_by_overlap_over_interval():
    found, refused = staleness_of([life(5000.0, (0, 5000))] * 3, FailureModel(sync_interval=24, overlap=2))
    assert found.mean == pytest.approx(2 / 24, rel=0.01)
    assert refused == 0.0


def test_what_straddles_a_long_pause_is_refused_and_counted():
    model = FailureModel(sync_interval=24, overlap=2, max_staleness=8)
    others = [life(5000.0, (0, 5000))] * 49
    _, refused = staleness_of([*others, life(5000.0, (0, 2000), (2300, 5000))], model)
    # The mean fragment had 12 s before the pause that were not handed over, and gets 12 s more until it is due again.
    assert refused == pytest.approx(24.0, rel=0.1)


def test_an_island_that_went_down_hands_over_only_what_it_trained_since():
    others = [life(5000.0, (0, 5000))] * 49
    down = life(5000.0, (0, 2000), (2300, 5000), down=[(2000, 2300)])
    found, refused = staleness_of([*others, down], FailureModel())
    assert refused == 0.0
    assert found.p99 < 0.1


def test_nothing_is_merged_while_the_coordinator_is_away_and_nobody_gets_stale_by_it():
    lines = [life(5000.0, (0, 5000))] * 2
    found, refused = staleness_of(lines, FailureModel(), [Outage(1000.0, 3000.0)])
    through, _ = staleness_of(lines, FailureModel())
    assert found.contributions < 0.7 * through.contributions
    assert found.mean <= through.mean
    assert refused == 0.0
