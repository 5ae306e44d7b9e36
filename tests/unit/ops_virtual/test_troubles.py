"""Clocks that are wrong, links that are cut one by one, and crashes at points, as the virtual time has them."""

import random

import pytest

from ops.virtual.plan import REDIS, CrashPoint, Cut, Link, Point, Way
from ops.virtual.queue import SHORTEST_WAIT_S, Clock, ClockTrouble, EventQueue
from ops.virtual.simulation import Passages
from tests.sim.packed import TROUBLES, links, packed_plan, swizzled


@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        (None, [4.0, 5.0, 6.0, 9.0]),
        ({"jump_s": 2.5}, [6.5, 7.5, 8.5, 11.5]),
        ({"jump_s": -2.5}, [1.5, 2.5, 3.5, 6.5]),
        ({"for_s": 2.0, "rate": 0.0}, [4.0, 4.0, 4.0, 7.0]),
        ({"for_s": 2.0, "rate": 0.5}, [4.0, 4.5, 5.0, 8.0]),
        ({"for_s": 2.0, "rate": 2.0}, [4.0, 6.0, 8.0, 11.0]),
    ],
    ids=str,
)
def test_a_clock_that_jumped_or_had_another_rate_stays_off(wrong, shown):
    queue, found = EventQueue(), []
    clock = Clock(queue, () if wrong is None else (ClockTrouble(process="p", at_s=4.0, **wrong),))
    for at_s in (4.0, 5.0, 6.0, 9.0):
        queue.run_until(at_s)
        found.append(clock.now_s)
    assert found == pytest.approx(shown)


@pytest.mark.parametrize("jump_s", [3.0, -3.0, 0.0])
@pytest.mark.parametrize("rate", [0.0, 0.25, 3.0])
def test_whoever_looks_again_until_the_clock_shows_it_is_woken_then_and_not_too_often(jump_s, rate):
    queue, rings = EventQueue(), []
    clock = Clock(queue, (ClockTrouble(process="p", at_s=2.0, jump_s=jump_s, rate=rate, for_s=4.0),))

    def look():
        rings.append(clock.now_s)
        if clock.now_s < 8.0:
            queue.at(clock.true_s(8.0), look)

    look()
    queue.run_until(100.0)
    assert len(rings) <= 5
    assert 8.0 <= rings[-1] <= 8.0 + SHORTEST_WAIT_S


@pytest.mark.parametrize("seed", range(5))
def test_swizzled_links_are_all_cut_before_any_comes_back_and_come_back_in_another_order(seed):
    every = links(["a", "b", "c"], ["a"], 2)
    assert len(every) == 3 * 2 + 1  # each to every broker, and the stations' to Redis
    cuts = swizzled(random.Random(seed), every, 10.0, 20.0)
    assert sorted(map(str, every)) == sorted(str(cut.link) for cut in cuts)
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
    wrong_clocks = {clock.process.partition("-")[0] for plan in plans for clock in plan.clocks}
    assert wrong_clocks == {"aggregator", "standby", "island", "broker", "redis"}
    assert {crash.point for plan in plans for crash in plan.crash_points} == set(Point)
    assert any(plan.cuts for plan in plans)
    assert any(plan.persist_failure for plan in plans)
    assert any(island.manner for plan in plans for island in plan.islands)
