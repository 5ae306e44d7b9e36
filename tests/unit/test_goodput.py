"""``atoll simulate``: accounts, closed forms as oracles, staleness, the command."""

import argparse
import itertools
import json
import math
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker.errors import ConfigError, Unavailable
from ops.goodput import barrier, estimate, renewal, simulation
from ops.goodput import command as goodput
from ops.goodput.availability import BATCHES, account, batch_means, stepping_by
from ops.goodput.barrier import coupled
from ops.goodput.estimate import expected_goodput
from ops.goodput.fleet import (
    DAY_S,
    FailureModel,
    Fleet,
    Mode,
    Outage,
    Stream,
    all_slices,
    domain_outages,
    generator,
    job_losses,
)
from ops.goodput.simulation import pauses, simulate
from ops.goodput.staleness import contributions, distribution
from ops.goodput.timeline import Cause, TimeLine

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

TROUBLES = [
    FailureModel(),
    FailureModel(domain_mtbi_days=1.0, domain_islands=2.0, coordinator_mtbi_days=0.5, coordinator_repair_s=7200.0),
    FailureModel(domain_mtbi_days=0.5, domain_islands=0.5, mtbi_years=0.2),
    FailureModel(scale_down_s=400.0, mtbi_years=5.0),  # pauses so long that contributions get too stale
]


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("model", TROUBLES)
@pytest.mark.parametrize("chips", [500, 1_200_000])
def test_goodput_and_all_waste_add_up_to_one(mode, model, chips):
    result = simulate(Fleet(mode=mode, chips=chips, islands=4, days=2.0), model).account
    assert result.goodput.value + sum(result.waste.values()) == pytest.approx(1.0, abs=1e-9)
    assert all(share >= -1e-12 for share in result.waste.values())
    assert 0.0 <= result.goodput.low <= result.goodput.value <= result.goodput.high <= 1.0
    assert 0.0 <= result.uptime.low <= result.uptime.value <= result.uptime.high <= 1.0


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
    domains=st.sampled_from([None, (0.2, 1.0, 600.0), (0.5, 0.25, 60.0)]),
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
@settings(max_examples=150, deadline=None)
def test_nothing_is_wasted_twice_whatever_the_trouble(
    mode, islands, days, coordinator, domains, sync_interval, **troubles
):
    mtbi_days, repair_s, hold_s = coordinator or (None, 60.0, 3600.0)
    domain_mtbi_days, part, repair_min = domains or (None, 1.0, 60.0)
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
    troubled = replace(TROUBLES[1], scale_down_s=250.0)
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


def test_batch_means_of_equal_batches_have_no_width():
    assert batch_means(np.full(BATCHES, 0.25)) == batch_means(np.full(2, 0.25))
    assert batch_means(np.full(BATCHES, 0.25)).low == 0.25


def test_the_confidence_interval_covers_the_expectation_about_as_often_as_it_says():
    fleet = Fleet(mode=Mode.ELASTIC_DP, chips=1_200_000, days=2.0)
    expected = renewal.goodput(fleet, FailureModel())
    runs = [simulate(replace(fleet, seed=seed), FailureModel()).account.goodput for seed in range(60)]
    covered = sum(run.low <= expected <= run.high for run in runs)
    assert 50 <= covered <= 60


@pytest.mark.parametrize("mode", [Mode.ELASTIC_DP, Mode.DP, Mode.DILOCO])
def test_the_confidence_interval_covers_other_draws_of_speeds_too(mode):
    uneven = FailureModel(speed_spread=0.05)
    runs = [simulate(Fleet(mode=mode, chips=50_000, islands=4, days=0.5, seed=seed), uneven) for seed in range(40)]
    found = [run.account.goodput for run in runs]
    waiting = [run.account.wasted[Cause.WAITING] for run in runs]
    for estimates in (found, waiting):  # what one has less, the other has more
        mean = np.mean([each.value for each in estimates])
        assert 34 <= sum(each.low <= mean <= each.high for each in estimates) <= 40


# --- closed forms as oracles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.DECOUPLED, Mode.ELASTIC_DP, Mode.DP])
@pytest.mark.parametrize("chips", [150_000, 1_200_000, 5_000_000])
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
    assert lines[0].trained_s == lines[1].trained_s == pytest.approx(33.0)


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
@pytest.mark.parametrize(
    ("chips", "islands", "step_s"), [(64, 64, 0.004), (1024, 128, 0.01), (8, 8, 1e-6), (1_200_000, 8, 1e-3)]
)
def test_where_rounds_come_often_the_expected_goodput_is_not_refused_and_takes_few_of_them(
    mode, chips, islands, step_s, monkeypatch
):
    """Of 64 chips in so many rounds as are computed in a second or two not one fails."""
    simulated = []

    def counting(fleet, model):
        simulated.append((fleet, model))
        return simulate(fleet, model)

    monkeypatch.setattr(estimate, "simulate", counting)
    found = expected_goodput(mode=mode, chips=chips, islands=islands, step_s=step_s, sync_interval=24)
    for fleet, model in simulated:
        assert fleet.islands * fleet.duration_s / model.interval_s < 6e6
        assert fleet.chips / model.chip_mtbi_s * fleet.duration_s > 250
    if chips < 1_200_000:  # by hand: a repair and a restart, of one island or for all of them
        away = chips / FailureModel().chip_mtbi_s * (1800.0 + 83.5)
        assert found == pytest.approx(math.exp(-away if mode == "diloco" else -away / islands), abs=0.01)


@pytest.mark.parametrize("chips", [512, 40_000])
def test_barriers_without_pauses_are_taken_many_at_a_time_and_change_nothing(chips, monkeypatch):
    """Against the loop that takes one after the other."""
    fleet = Fleet(mode=Mode.DILOCO, chips=chips, days=20.0)
    model = FailureModel(coordinator_mtbi_days=3.0)
    many = simulate(fleet, model).account
    monkeypatch.setattr(barrier._Island, "trains_until_s", lambda self, now_s: now_s)
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


def test_what_never_comes_back_ends_a_simulation_with_its_duration():
    never = FailureModel(domain_mtbi_days=0.2, domain_repair_min=1e12)
    for mode in Mode:
        account = simulate(Fleet(mode=mode, chips=20_000, islands=4, days=3.0), never).account
        assert account.wasted[Cause.ISLAND_DOWN].value > 0.5 or account.wasted[Cause.WAITING].value > 0.5
        assert account.goodput.value + sum(account.waste.values()) == pytest.approx(1.0)


def test_step_times_of_many_groups_are_drawn_in_parts_that_change_nothing(monkeypatch):
    fleet, model = Fleet(mode=Mode.DP, chips=20_000, islands=7, days=1.0), FailureModel(step_jitter=0.05)
    whole = simulation._in_step_share(fleet, model)
    monkeypatch.setattr(simulation, "_DRAWN_AT_ONCE", 7 * 999)
    assert simulation._in_step_share(fleet, model) == whole


def test_what_an_island_loses_again_before_the_next_barrier_it_loses_once():
    """Renewals: up for U, exponential, and away for D. Of the U trained before it goes down, what it trained since the
    last barrier or its return is lost; a barrier comes after W of training."""
    model = replace(FailureModel(), mtbi_years=0.01, sync_interval=500, step_s=10.0, check_s=0.0)
    fleet = Fleet(mode=Mode.DILOCO, chips=64, islands=1, days=4000.0)
    up_s, down_s, interval_s = model.chip_mtbi_s / 64, model.repair_s + model.restart_s, model.interval_s
    kept = up_s * (1.0 - math.exp(-interval_s / up_s)) / (interval_s * (1.0 + down_s / up_s))
    assert simulate(fleet, model).account.goodput.value == pytest.approx(kept, abs=0.01)


@pytest.mark.parametrize("chips", [999_936, 1_000_000, 1_200_000])
@pytest.mark.parametrize("domain_islands", [8.0, 4.0, 1.0, 0.25])
def test_when_all_domains_are_gone_no_slice_is_left_to_a_job(chips, domain_islands):
    fleet = Fleet(mode=Mode.ELASTIC_DP, chips=chips, islands=8)
    model = replace(NEVER, domain_mtbi_days=1.0, domain_islands=domain_islands)
    of_islands = domain_outages(fleet, model)
    once = [[each._replace(outage=Outage(1.0, 2.0)) for each in unique(of_island)] for of_island in of_islands]
    losses = itertools.takewhile(lambda loss: loss.at_s < 3.0, job_losses(fleet, NEVER, once))
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


@pytest.mark.parametrize(
    ("name", "cure"),
    [("goodput.png", "must end in .svg"), ("none/goodput.svg", "a folder that"), ("there.svg", "cannot be written")],
)
def test_a_plot_that_cannot_be_is_refused_before_anything_is_simulated(name, cure, tmp_path):
    (tmp_path / "there.svg").mkdir()
    with pytest.raises(ConfigError, match=cure):
        command("--days", "1e5", "--plot", str(tmp_path / name))


def unique(of_island):
    """One outage of each domain of an island."""
    return {each.domain: each for each in of_island}.values()


# --- staleness ----------------------------------------------------------------------------------------------------


def staleness_of(lines, model, coordinator=()):
    found, dropped = contributions(lines, model, list(coordinator))
    return found, sum(float(np.sum(each.lost_s)) for each in dropped)


def test_islands_that_never_pause_are_stale_by_overlap_over_interval():
    found, refused = staleness_of([life(5000.0, (0, 5000))] * 3, FailureModel(sync_interval=24, overlap=2))
    assert found.mean == pytest.approx(2 / 24, rel=0.01)
    assert refused == 0.0


def test_a_pause_of_one_of_many_islands_makes_its_contribution_staler():
    model = FailureModel(sync_interval=24, overlap=2)
    others = [life(24_000.0, (0, 24_000))] * 49
    pausing = life(24_000.0, *((at, at + 216) for at in range(0, 24_000, 240)))
    found, refused = staleness_of([*others, pausing], model)
    alone, _ = staleness_of(others, model)
    assert found.p50 == pytest.approx(alone.p50, rel=0.02)
    assert found.mean > alone.mean
    assert max(edge for edge, share in found.histogram.items() if share > 0.0) in (0.75, 1.0)
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


def test_there_is_no_distribution_of_nothing():
    assert distribution(np.array([])) is None
    assert simulate(Fleet(days=1e-4), NEVER).staleness is None, "8.6 s are less than an interval"


# --- for other parts of the program -------------------------------------------------------------------------------


def test_pauses_are_sorted_disjoint_and_those_behind_the_goodput():
    fleet = Fleet(chips=1_200_000, islands=8, days=1.0, seed=5)
    found = pauses(FailureModel(), chips=fleet.chips, islands=8, duration_s=DAY_S, seed=5)
    assert len(found) == 8
    for of_island in found:
        assert all(pause.for_s > 0.0 for pause in of_island)
        ends = [pause.at_s + pause.for_s for pause in of_island]
        assert all(end <= later.at_s for end, later in zip(ends, of_island[1:], strict=False))
        assert ends[-1] <= DAY_S
    paused = sum(pause.for_s for of_island in found for pause in of_island) / (8 * DAY_S)
    assert paused == pytest.approx(simulate(fleet, FailureModel()).account.waste[Cause.PAUSED])


def test_pauses_can_be_played_faster():
    slow = pauses(FailureModel(), chips=600_000, islands=2, duration_s=10_000.0, seed=1)
    fast = pauses(FailureModel(), chips=600_000, islands=2, duration_s=100.0, seed=1, time_scale=0.01)
    assert np.allclose(np.array(slow[1]) / 100.0, np.array(fast[1]))


def test_a_time_scale_of_zero_is_refused():
    with pytest.raises(ConfigError, match="time_scale"):
        pauses(FailureModel(), chips=8, islands=2, duration_s=1.0, seed=0, time_scale=0.0)


@pytest.mark.parametrize("mode", list(Mode))
def test_the_expected_goodput_is_what_a_long_simulation_finds(mode):
    expected = expected_goodput(mode=mode, chips=600_000, islands=4, mtbi_years=2.0)
    found = simulate(Fleet(mode=mode, chips=600_000, islands=4, days=20.0, seed=9), FailureModel(mtbi_years=2.0))
    assert expected == pytest.approx(found.account.goodput.value, abs=0.01)


@pytest.mark.parametrize("mode", ["diloco", "elastic-dp"])
@pytest.mark.parametrize("islands", [2, 8, 64])
def test_the_expected_goodput_is_of_usual_differences_in_speed_and_not_of_one_draw(mode, islands):
    uneven = replace(NEVER, speed_spread=0.1, step_jitter=0.0)
    fleet = Fleet(mode=Mode(mode), chips=islands, islands=islands)
    found = expected_goodput(mode=mode, chips=islands, islands=islands, model=uneven)
    assert found == pytest.approx(renewal.in_step_share(fleet, uneven), abs=0.006)


def test_pauses_that_waiting_for_the_slowest_hides_are_not_counted_twice():
    """Equal speeds, times what unequal ones leave where nothing fails, is four points less."""
    fleet, uneven = Fleet(mode=Mode.DILOCO, days=0.25), FailureModel(speed_spread=0.05)
    runs = [simulate(replace(fleet, seed=seed), uneven).account.goodput.value for seed in range(10)]
    expected = expected_goodput(mode="diloco", chips=fleet.chips, islands=fleet.islands, model=uneven)
    assert expected == pytest.approx(np.mean(runs), abs=0.012)


def test_the_expected_goodput_takes_domains_into_account():
    spared = expected_goodput(mode="decoupled", chips=100_000, islands=4)
    hit = expected_goodput(mode="decoupled", chips=100_000, islands=4, domain_mtbi_days=2.0, domain_repair_min=480.0)
    assert hit == pytest.approx(spared * 48 / 56, abs=0.03)


@pytest.mark.parametrize(
    ("mode", "islands", "rare"),
    [
        ("decoupled", 64, {"domain_mtbi_days": 30.0}),
        ("diloco", 8, {"coordinator_mtbi_days": 1.0, "coordinator_repair_s": 300.0}),
    ],
)
def test_what_is_rare_takes_as_much_as_a_simulation_of_it_alone_says(mode, islands, rare):
    fleet = Fleet(mode=Mode(mode), chips=64 * islands, islands=islands, days=60.0)
    never = FailureModel(mtbi_years=1e9, **rare)
    alone = (
        simulate(fleet, never).account.goodput.value
        / simulate(fleet, FailureModel(mtbi_years=1e9)).account.goodput.value
    )
    ours = expected_goodput(mode=mode, chips=64 * islands, islands=islands, model=FailureModel(**rare))
    assert ours / expected_goodput(mode=mode, chips=64 * islands, islands=islands) == pytest.approx(alone, abs=0.0015)


@pytest.mark.parametrize(("slices", "away_s"), [(1, 1800.0), (1, 7200.0), (2, 7200.0), (40, 1800.0)])
def test_the_expected_goodput_knows_what_islands_lose_that_go_down_unheard(slices, away_s):
    model = FailureModel(mtbi_years=0.01, coordinator_mtbi_days=0.1, coordinator_repair_s=away_s)
    fleet = Fleet(chips=8 * 64 * slices, islands=8, days=60.0)
    found = simulate(fleet, model).account.goodput
    expected = expected_goodput(chips=fleet.chips, islands=8, model=model)
    assert expected == pytest.approx(found.value, abs=0.015 + (found.high - found.low) / 2)


@pytest.mark.parametrize("mode", ["decoupled", "dp"])
def test_what_fails_once_a_month_takes_its_part_of_any_fleet(mode):
    rare = {"coordinator_mtbi_days": 30.0, "coordinator_repair_s": 7 * 86400.0}
    parts = [
        expected_goodput(mode=mode, chips=chips, islands=8, **rare)
        / expected_goodput(mode=mode, chips=chips, islands=8)
        for chips in (50_000, 2_400_000)
    ]
    assert parts == pytest.approx([30 / 37, 30 / 37], abs=0.03)


@given(st.lists(st.floats(0.0, 1.0), min_size=2, max_size=30))
def test_an_estimate_lies_within_its_interval_and_within_0_and_1(samples):
    found = batch_means(np.array(samples))
    assert 0.0 <= found.low <= found.value <= found.high <= 1.0


def test_the_expected_goodput_of_a_closed_form_is_not_refused_for_the_length_of_a_simulation():
    assert 0.1 < expected_goodput(mode="elastic-dp", chips=3_200_000_000, islands=8) < 0.3


def test_the_expected_goodput_of_many_small_islands_is_that_of_some_of_them():
    some, many = (expected_goodput(chips=8 * islands, islands=islands) for islands in (64, 100_000))
    assert many == pytest.approx(some, abs=1e-3)


def test_the_expected_goodput_refuses_what_cannot_be():
    with pytest.raises(ConfigError, match="chips"):
        expected_goodput(chips=2, islands=4)


# --- the command --------------------------------------------------------------------------------------------------


def command(*flags):
    parser = argparse.ArgumentParser()
    goodput.add_arguments(parser)
    return goodput.run(parser.parse_args(list(flags)))


def test_waste_by_cause_and_staleness_have_intervals_that_hold_for_other_seeds(capsys):
    flags = ("--chips", "300000", "--islands", "4", "--days", "4", "--mtbi-years", "0.5", "--json")
    runs = []
    for seed in range(12):
        assert command(*flags, "--seed", str(seed)) == 0
        runs.append(json.loads(capsys.readouterr().out))
    assert runs[0]["goodput"] + sum(runs[0]["waste"].values()) == pytest.approx(1.0, abs=1e-9)
    told = [("waste", "paused"), ("waste", "capacity_away")]
    for table, name in told:
        mean = np.mean([run[table][name] for run in runs])
        covered = sum(low <= mean <= high for low, high in (run["waste_ci"][name] for run in runs))
        assert covered >= 9, (name, covered)
        assert all(high - low < 0.5 * mean for low, high in (run["waste_ci"][name] for run in runs))
    stale = np.mean([run["staleness"]["mean"] for run in runs])
    assert sum(low <= stale <= high for low, high in (run["staleness"]["mean_ci"] for run in runs)) >= 9


def test_an_interval_of_one_step_is_simulated(capsys):
    assert command("--mode", "diloco", "--sync-interval", "1e0", "--days", "0.01", "--json") == 0
    assert 0 < json.loads(capsys.readouterr().out)["goodput"] < 1


def test_the_command_prints_one_json_object(capsys):
    assert command("--chips", "300000", "--islands", "4", "--days", "1", "--mtbi-years", "0.5", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["goodput_ci"][0] <= found["goodput"] <= found["goodput_ci"][1]
    assert 0.0 < found["goodput"] < found["uptime"] <= 1.0
    assert found["goodput"] + sum(found["waste"].values()) == pytest.approx(1.0)
    assert found["parameters"]["mtbi_years"] == 0.5
    assert found["seed"] == 0
    assert sum(each["share"] for each in found["staleness"]["histogram"]) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", list(Mode))
def test_the_same_seed_prints_the_same_bytes_and_another_one_others(capsys, mode):
    printed = []
    for seed in ("7", "7", "8"):
        command("--mode", mode.value, "--days", "0.5", "--seed", seed, "--json")
        printed.append(capsys.readouterr().out.replace(f'"seed": {seed}', ""))
    assert printed[0] == printed[1] != printed[2]


def test_the_text_names_what_was_simulated_and_every_cause(capsys):
    command("--days", "1", "--domain-mtbi-days", "1", "--coordinator-mtbi-days", "1", "--coordinator-repair-s", "9000")
    printed = capsys.readouterr().out
    for words in ("1,200,000 chips in 8 islands, decoupled", "goodput", "uptime", "slices under repair", "versions"):
        assert words in printed


def test_a_run_that_may_see_no_failure_at_all_says_that_its_interval_means_little(capsys):
    assert command("--chips", "64", "--islands", "1", "--days", "10") == 0
    out = capsys.readouterr().out
    assert "64 chips in 1 island" in out
    assert "with 1.8 interruptions to be expected the intervals are too narrow; simulate more --days" in out
    command("--chips", "1", "--islands", "1", "--days", "10", "--domain-mtbi-days", "20", "--json")
    assert "interruptions and 0.5 domain failures to be" in json.loads(capsys.readouterr().out)["warning"]
    command("--days", "1", "--json")
    assert json.loads(capsys.readouterr().out)["warning"] is None


#: A coordinator that is away for two days of five, and one domain that everything stands in.
AWAY = ("--chips", "10000", "--days", "30", "--coordinator-mtbi-days", "3", "--coordinator-repair-s", "172800")
ONE = ("--chips", "10000", "--domain-islands", "8")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--mode", "dp", "--chips", "20000000"], "an interruption every 1.6 s of the job is more often than check_s"),
        (["--mtbi-years", "0.01", "--days", "0.2"], "an interruption every 2.1 s of an island is more often than"),
        (["--mode", "dp", "--chips", "1024", "--days", "365"], "elastic modes go without one of 16 slices for 1800 s"),
        (["--mode", "dp", "--chips", "2304", "--days", "365"], None),
        (["--mode", "elastic-dp", "--chips", "1024", "--days", "365"], None),
        (["--step-s", "60"], "cuts a step of 60 s short"),
        (["--step-s", "6"], None),
        (["--mode", "diloco", "--chips", "512", "--days", "300"], "everybody waits for the only slice of an island"),
        (["--mode", "diloco", "--chips", "51200", "--days", "10"], None),
        (["--mode", "diloco", "--domain-mtbi-days", "0.1"], "everybody waits for a domain to be repaired (60 min)"),
        (["--mode", "diloco", "--domain-mtbi-days", "0.1", "--domain-islands", "0.5", "--days", "9"], None),
        (["--speed-spread", "0.1"], "speed_spread and step_jitter change nothing here"),
        (["--domain-islands", "2"], "domain_islands changes nothing without domain_mtbi_days"),
        (["--domain-islands", "2", "--domain-mtbi-days", "0.1", "--days", "3"], None),
        (["--hold-s", "60"], "hold_s changes nothing without coordinator_mtbi_days"),
        (["--hold-s", "60", "--coordinator-mtbi-days", "0.09"], None),
        ([*AWAY, "--mode", "elastic-dp"], "with 6 coordinator failures to be expected"),
        ([*AWAY, "--mode", "elastic-dp"], "repairs of the coordinator last longer than a 20th of the simulated time"),
        ([*AWAY, "--mode", "diloco"], "repairs of the coordinator take 2 of 30 days: goodput and interval are up to"),
        (AWAY, "repairs of the coordinator beyond hold_s take 2 of 30 days"),
        ([*AWAY, "--hold-s", "172800", "--coordinator-mtbi-days", "0.9"], None),
        (["--domain-mtbi-days", "3", "--domain-repair-min", "2880", *ONE, "--days", "30"], "with 6 domain failures"),
        (["--mode", "dp", "--speed-spread", "0.1"], None),
        (["--repair-s", "36000", "--days", "8"], "repairs of slices last longer than a 20th of the simulated time"),
        (["--repair-s", "604800", "--days", "7"], "repairs of slices take 7 of 7 days: goodput and interval are up to"),
        (["--mode", "dp", "--repair-s", "604800", "--days", "7"], None),
        (["--domain-mtbi-days", "1", "--domain-repair-min", "1440", "--days", "20"], "repairs of domains take 1 of 20"),
        (["--mtbi-years", "1e9"], None),
        (["--slice-chips", "100000", "--days", "2"], "has 2 slices of 75,000 here, not of 100,000"),
        (["--slice-chips", "1000", "--chips", "100", "--islands", "4", "--days", "300"], "is one slice of 25 here"),
        (["--slice-chips", "70", "--days", "1"], None),
        (["--mode", "diloco", "--sync-interval", "1", "--days", "0.2"], "one elastic-dp job on the same chips has 56"),
        (["--mode", "diloco", "--chips", "10000", "--islands", "4", "--days", "20"], None),
    ],
)
def test_what_makes_a_figure_look_better_than_it_is_stands_beside_it(flags, words, capsys):
    assert command("--days", "1", *flags, "--json") == 0
    warning = json.loads(capsys.readouterr().out)["warning"]
    assert (words in warning) if words else (warning is None)


def test_with_few_slices_a_free_spare_is_cheaper_than_a_slice_less():
    """By hand: 83.5 s on a spare against 30.3 s and 1,800 s of one slice of 16 or 36."""
    modes = ("dp", "elastic-dp")
    for chips, better in ((1024, "dp"), (2304, "elastic-dp")):
        found = {mode: expected_goodput(mode=mode, chips=chips, islands=8, model=FailureModel()) for mode in modes}
        assert max(found, key=found.get) == better


def test_a_fleet_without_waste_says_so(capsys):
    command("--days", "0.1", "--mtbi-years", "1e9", "--islands", "1")
    assert "none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--chips", "4"], "chips = 4: must be at least one per island: 8"),
        (["--days", "-3"], "days = -3.0: must be above 0"),
        (["--mode", "magic"], "mode = 'magic': must be one of decoupled, elastic-dp, dp, diloco"),
        (["--mtbi-years", "0"], "mtbi_years = 0.0: must be above 0"),
        (["--mtbi-years", "1e305"], "mtbi_years = 1e+305: must be at most 1e+12; give that for what never happens"),
        (["--mtbi-years", "nan"], "mtbi_years = nan: must be"),
        (["--chips", "1e15"], "must be at most 1e+12"),
        (["--seed", "-1"], "seed = -1: must be at least 0"),
        (["--check-s", "1e-7"], "check_s = 1e-07: must be at least 0.001, or 0 for at once"),
        (["--coordinator-mtbi-days", "1e-300", "--coordinator-repair-s", "0"], "failures of domains and coordinators"),
        (["--table", "--domain-mtbi-days", "1", "--domain-islands", "4"], "at most the number of islands, 2"),
        (["--islands", "many"], "islands = 'many': must be a whole number"),
        (["--step-s", "0.001"], "days = 30.0: would be 8.6e+08 rounds of all islands; at most 5e+07: simulate fewer"),
        (["--table", "--chips", "100"], "leave it out"),
        (["--table", "--plot", "x.svg"], "leave out --table"),
        (["--domain-mtbi-days", "1", "--domain-islands", "9"], "at most the number of islands"),
    ],
)
def test_a_wrong_flag_says_field_value_and_cure(flags, words):
    with pytest.raises(ConfigError) as refused:
        command(*flags)
    assert words in str(refused.value)


def test_the_table_shows_every_cell_beside_the_published_one(capsys):
    assert command("--table", "--days", "0.2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[6].startswith("mean distance ")
    assert all(line.count(" / ") == 5 for line in lines[2:6])
    assert command("--table", "--days", "0.2", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 20


@pytest.mark.parametrize(
    ("flags", "sentences"),
    [
        (["--days", "4"], []),
        (["--days", "0.01", "--repair-s", "30", "--rejoin-wait-s", "0"], ["repair_s = 30 (1800)", "with 4.1 interr"]),
        (["--days", "0.2"], ["elastic DP with 150,000 chips, and 14 more alike: repairs of slices last longer"]),
        (
            ["--days", "4", "--mtbi-years", "0.5", "--domain-mtbi-days", "9"],
            ["mtbi_years = 0.5 (1), domain_mtbi_days = 9 (none)", "and 19 more alike: with 3.5 domain failures"],
        ),
        (["--days", "4", "--hold-s", "60"], ["hold_s = 60 (3600)", "hold_s changes nothing without"]),
    ],
)
def test_what_makes_cells_of_the_table_look_better_than_they_are_stands_below_it(flags, sentences, capsys):
    assert command("--table", *flags) == 0
    below = capsys.readouterr().out.splitlines()[7:]
    assert len(below) == len(sentences)
    assert all(words in line for words, line in zip(sentences, below, strict=True))
    command("--table", *flags, "--seed", "3", "--json")
    document = json.loads(capsys.readouterr().out)
    assert all(words in (document["warning"] or "") for words in sentences)
    assert (document["warning"] is None) == (not sentences)
    assert document["seed"] == 3
    assert document["parameters"]["days"] == float(flags[1])
    assert document["parameters"]["coordinator_mtbi_days"] is None


def test_a_long_simulation_says_how_far_it_is(monkeypatch, capsys):
    clock = iter(range(0, 10_000, 2))
    monkeypatch.setattr(goodput.time, "monotonic", lambda: float(next(clock)))
    command("--days", "0.2", "--json")
    captured = capsys.readouterr()
    assert "s to go" in captured.err
    json.loads(captured.out)


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(Unavailable, match="pip install matplotlib"):
        command("--days", "0.1", "--plot", str(tmp_path / "plot.svg"))


def test_a_plot_is_an_svg_that_names_the_modes(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    assert command("--days", "0.1", "--plot", str(path)) == 0
    text = path.read_text()
    assert ET.fromstring(text).tag.endswith("svg")
    assert all(words in text for words in ("elastic-dp", "staleness", "slices under repair"))
    again = tmp_path / "again.svg"
    command("--days", "0.1", "--plot", str(again))
    assert again.read_text() == text
    full = tmp_path / "full.svg"
    full.symlink_to("/dev/full")
    capsys.readouterr()
    with pytest.raises(Unavailable, match="cannot write"):
        command("--days", "0.1", "--plot", str(full))
    assert "goodput" in capsys.readouterr().out  # what was simulated is not lost with it


def test_sizes_that_do_not_go_with_the_domains_are_no_part_of_a_curve():
    """Ten domains of an island are more than the slices of islands of few chips."""
    fleet = Fleet(chips=1_000_000, islands=8)
    drawn = goodput.curves(fleet, FailureModel(slice_chips=10_000, domain_mtbi_days=100.0, domain_islands=0.1))
    sizes = [chips for chips, _ in drawn["decoupled"]]
    assert 0 < len(sizes) < 12
    assert min(sizes) > 700_000


def test_curves_have_the_size_of_the_fleet_itself():
    for chips in (1_000, 1_234_567, 20_000_000):
        drawn = goodput.curves(Fleet(mode=Mode.DP, chips=chips), FailureModel())["dp"]
        sizes = [size for size, _ in drawn]
        assert chips in sizes
        assert sizes == sorted(set(sizes))
        assert min(sizes) <= 50_000
        assert max(sizes) >= 10_000_000


@pytest.mark.parametrize("years", [1e-3, 1e-5, 1e-7])
def test_sizes_that_fail_too_often_are_no_part_of_a_curve_and_the_others_take_no_minutes(years, monkeypatch):
    """What a closed form is for is drawn at any size."""
    simulated = []

    def counting(fleet, model):
        simulated.append(fleet.chips / model.chip_mtbi_s * fleet.duration_s)
        return simulate(replace(fleet, days=fleet.days / 100), model)

    monkeypatch.setattr(estimate, "simulate", counting)
    drawn = goodput.curves(Fleet(chips=1_000, days=0.001), FailureModel(mtbi_years=years))
    assert len(drawn.get("decoupled", ())) < len(drawn["dp"]) == 12
    assert max(simulated, default=0.0) <= 500_001
