"""Clocks that are wrong, links that are cut one by one, and crashes at points, as the virtual time has them."""

import random

import pytest

from ops.virtual.plan import REDIS, CrashPoint, Cut, Link, Point, Way
from ops.virtual.queue import SHORTEST_WAIT_S, Alarm, Clock, ClockTrouble, EventQueue
from ops.virtual.simulation import Passages
from tests.sim.packed import TROUBLES, links, packed_plan, swizzled


def shown(clock, queue, *moments_s):
    values = []
    for at_s in moments_s:
        queue.run_until(at_s)
        values.append(clock.now_s)
    return values


def test_a_clock_with_nothing_wrong_shows_the_true_time():
    queue = EventQueue()
    clock = Clock(queue, ())
    assert shown(clock, queue, 0.0, 3.0) == [0.0, 3.0]
    assert clock.true_s(7.0) == 7.0


@pytest.mark.parametrize("jump_s", [2.5, -2.5])
def test_a_clock_that_jumped_stays_off(jump_s):
    queue = EventQueue()
    clock = Clock(queue, (ClockTrouble(process="p", at_s=5.0, jump_s=jump_s),))
    assert shown(clock, queue, 4.0, 5.0, 9.0) == pytest.approx([4.0, 5.0 + jump_s, 9.0 + jump_s])


@pytest.mark.parametrize("rate", [0.0, 0.5, 2.0])
def test_a_clock_of_another_rate_stays_off_by_what_it_gained_or_lost(rate):
    queue = EventQueue()
    clock = Clock(queue, (ClockTrouble(process="p", at_s=4.0, for_s=2.0, rate=rate),))
    assert shown(clock, queue, 4.0, 5.0, 6.0, 9.0) == pytest.approx([4.0, 4.0 + rate, 4.0 + 2 * rate, 7.0 + 2 * rate])


@pytest.mark.parametrize(
    "wrong",
    [
        {"jump_s": 3.0},
        {"jump_s": -3.0},
        {"for_s": 4.0, "rate": 0.0},
        {"for_s": 4.0, "rate": 0.25},
        {"for_s": 4.0, "rate": 3.0},
    ],
)
def test_whoever_sets_an_alarm_again_until_the_clock_shows_it_is_woken_then_and_not_too_often(wrong):
    queue, rings = EventQueue(), []
    clock = Clock(queue, (ClockTrouble(process="p", at_s=2.0, **wrong),))

    def ring():
        rings.append(clock.now_s)
        if clock.now_s < 8.0:
            alarm.arm(8.0)

    alarm = Alarm(queue, ring, clock.true_s)
    alarm.arm(8.0)
    queue.run_until(100.0)
    assert len(rings) <= 4
    assert 8.0 <= rings[-1] <= 8.0 + SHORTEST_WAIT_S


def test_the_links_of_a_run_are_those_to_every_broker_and_of_the_stations_to_redis():
    every = links(["a", "b"], ["a"], 2)
    assert {(link.process, link.broker) for link in every} == {("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", REDIS)}


@pytest.mark.parametrize("seed", range(20))
def test_swizzled_links_are_all_cut_before_any_comes_back_and_come_back_in_another_order(seed):
    every = links(["a", "b", "c"], ["a"], 2)
    cuts = swizzled(random.Random(seed), every, 10.0, 20.0)
    assert {cut.link for cut in cuts} == set(every)
    assert len(cuts) == len(every)
    assert all(10.0 <= cut.at_s <= 15.0 <= cut.at_s + cut.for_s <= 20.0 for cut in cuts)
    assert all(cut.way is Way.BOTH for cut in cuts if cut.link.broker == REDIS)
    began = sorted(cuts, key=lambda cut: cut.at_s)
    assert began != sorted(cuts, key=lambda cut: cut.at_s + cut.for_s)


@pytest.mark.parametrize(
    ("way", "up", "down"), [(Way.BOTH, True, True), (Way.UP, True, False), (Way.DOWN, False, True)]
)
def test_a_cut_stops_what_goes_its_way_while_it_lasts(way, up, down):
    cut = Cut(link=Link(process="a", broker=0), at_s=1.0, for_s=2.0, way=way)
    assert (cut.stops("up", 2.0), cut.stops("down", 2.0)) == (up, down)
    assert not any(cut.stops(direction, at_s) for direction in ("up", "down") for at_s in (0.9, 3.0))


def test_a_crash_happens_at_the_passage_of_its_number_alone():
    crash = CrashPoint(process="a", point=Point.SEND, number=2)
    passages = Passages([crash])
    assert passages.pass_by("b", Point.SEND) is None
    assert [passages.pass_by("a", Point.SEND) for _ in range(3)] == [None, crash, None]
    assert passages.pass_by("a", Point.PERSIST) is None
    assert passages.counts["a", Point.SEND] == 3


def test_every_trouble_is_drawn_and_the_same_seed_gives_the_same_plan():
    plans = [packed_plan(seed) for seed in range(300)]
    assert plans == [packed_plan(seed) for seed in range(300)]
    assert len(TROUBLES) > 10
    assert {clock.process.partition("-")[0] for plan in plans for clock in plan.clocks} == {
        "aggregator",
        "standby",
        "island",
        "broker",
        "redis",
    }
    assert {crash.point for plan in plans for crash in plan.crash_points} == set(Point)
    assert any(plan.cuts for plan in plans)
    assert any(plan.persist_failure for plan in plans)
    assert any(island.manner for plan in plans for island in plan.islands)
