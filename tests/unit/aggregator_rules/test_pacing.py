"""Pacing against an oracle: fleets whose every step is known exactly, stepped by the test."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.rules.pacing import Pacer
from aggregator.rules.step_clock import StepClock
from tests.aggregator_hand import desk

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine

HEARTBEAT_S = 0.5


class Fleet:
    """Islands of constant speed whose counters are reported once per heartbeat."""

    def __init__(self, step_times_s, interval=8, fragments=4):
        self.clock = StepClock(HEARTBEAT_S)
        self.fragments = range(fragments)
        self.pacer = Pacer(self.fragments, interval, self.clock)
        self.step_times_s = dict(step_times_s)
        self.opened = []  # (time, fragment)

    def step(self, island_id, now_s):
        """The exact truth: whole steps run so far."""
        return int(now_s / self.step_times_s[island_id] + 1e-9)

    def run(self, seconds, start_s=0.0, tick_s=0.01):
        for i in range(round(seconds / tick_s)):
            now_s = start_s + i * tick_s
            for n, island_id in enumerate(sorted(self.step_times_s)):
                if (i + 7 * n) % round(HEARTBEAT_S / tick_s) == 0:
                    self.clock.report(island_id, self.step(island_id, now_s), now_s, self.step_times_s[island_id])
            due = self.pacer.most_overdue(now_s, self.fragments)
            if due is not None:
                self.pacer.opened(due, now_s)
                self.opened.append((now_s, due))

    def gaps(self, fragment, after_s=0.0):
        times = [at_s for at_s, p in self.opened if p == fragment and at_s >= after_s]
        return [b - a for a, b in itertools.pairwise(times)]


@pytest.mark.parametrize("step_s", [0.05, 0.1, 0.7])
def test_every_fragment_comes_round_after_its_interval(step_s):
    fleet = Fleet({"a": step_s, "b": step_s, "c": step_s})
    fleet.run(60 * step_s * 2)
    for p in range(4):
        gaps = fleet.gaps(p, after_s=10 * step_s)
        assert len(gaps) >= 8
        # Heartbeats round counters down to whole steps, and ticks are 10 ms: off by at most a step and a tick.
        assert all(abs(gap - 8 * step_s) <= step_s + 0.011 for gap in gaps), gaps
        assert sum(gaps) / len(gaps) == pytest.approx(8 * step_s, rel=0.03)


@pytest.mark.parametrize(
    "step_times_s", [{"a": 0.05, "b": 0.1, "c": 0.2}, {"a": 0.05, "b": 0.1}], ids=["three", "two: the slower"]
)
def test_the_lower_median_sets_the_pace(step_times_s):
    fleet = Fleet(step_times_s, fragments=1)
    fleet.run(40.0)
    assert sum(fleet.gaps(0)) / len(fleet.gaps(0)) == pytest.approx(8 * 0.1, rel=0.05)


def test_a_newcomer_agrees_with_those_who_are_there():
    fleet = Fleet({"a": 0.1, "b": 0.13, "c": 0.2}, fragments=1)
    fleet.run(10.0)
    before = fleet.pacer.progress(0, 10.0)
    for newcomer, step in (("d", 70_000), ("e", 0)):
        fleet.clock.report(newcomer, step, 10.0, 0.1)
        assert fleet.pacer.progress(0, 10.0) == pytest.approx(before, abs=1e-6)


@given(outage_s=st.floats(0.0, 10.0))
def test_after_an_outage_of_any_length_fragments_fall_due_apart_again(outage_s):
    # Found by chaos: after the first outage all fragments fell due together, for the rest of the run.
    fleet = Fleet({"a": 0.1, "b": 0.1})
    fleet.run(3.0)
    fleet.run(5.0, start_s=3.0 + outage_s)
    settled_s = 3.0 + outage_s + 8 * 0.1 + HEARTBEAT_S
    times = [at_s for at_s, _ in fleet.opened if at_s >= settled_s]
    assert all(b - a >= 0.2 - 0.1 - 0.011 for a, b in itertools.pairwise(times)), times  # spacing, a step, a tick
    for p in range(4):
        gaps = fleet.gaps(p, after_s=settled_s)
        assert sum(gaps) / len(gaps) == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize(("early", "later"), [(8, 20), (20, 8)])
def test_with_another_interval_fragments_come_round_after_that_one_and_stay_apart(early, later):
    fleet = Fleet({"a": 0.1, "b": 0.1, "c": 0.1}, interval=early)
    fleet.run(9.3)
    fleet.pacer.change_interval(later, 9.3)
    assert fleet.pacer.spacing_steps == later / 4
    fleet.run(20.0, start_s=9.3)
    times = [at_s for at_s, _ in fleet.opened if at_s >= 9.3]
    assert times[0] <= 9.3 + later / 4 * 0.1 + 0.111, "the next one comes when its share of the interval has passed"
    assert all(abs(b - a - later / 4 * 0.1) <= 0.111 for a, b in itertools.pairwise(times)), times
    for p in range(4):
        gaps = fleet.gaps(p, after_s=9.3)
        assert sum(gaps) / len(gaps) == pytest.approx(later * 0.1, rel=0.05)


def test_older_news_does_not_set_a_counter_back():
    clock = StepClock(HEARTBEAT_S)
    clock.report("a", 9, 1.0, 0.1)
    clock.report("a", 4, 1.1, 0.1)
    assert clock.estimate("a", 1.0) == 9.0
    clock.report("b", 9, 1.0)
    assert clock.estimate("b", 1.4) == 9.0, "it has not said its pace, and is where it was"


def test_an_island_that_the_clock_has_forgotten_is_no_hindrance_to_another_interval():
    fleet = Fleet({"a": 0.1, "b": 0.1})
    fleet.run(3.0)
    fleet.clock.forget("b")
    fleet.pacer.change_interval(20, 3.0)
    before = fleet.pacer.progress(0, 3.0)
    fleet.clock.report("b", 500, 3.0, 0.1)
    assert fleet.pacer.progress(0, 3.0) == pytest.approx(before, abs=1e-6), "it agrees with the other as a newcomer"


def test_an_island_that_is_slower_than_was_thought_is_not_waited_for_in_multiples_of_the_error():
    clock = StepClock(HEARTBEAT_S)
    pacer = Pacer([0], 8, clock)
    clock.report("a", 100, 0.0, 0.001)
    pacer.opened(0, 0.4)  # at 500 steps, as far as is known
    clock.report("a", 150, 0.5, 0.01)
    pacer.change_interval(512, 0.5)
    clock.report("a", 500 + 512, 1.0, 0.01)
    assert pacer.most_overdue(1.0, [0]) == 0


@pytest.mark.parametrize("quarantined", [False, True], ids=["dead", "in quarantine"])
def test_an_island_that_is_dead_or_in_quarantine_does_not_set_the_pace(quarantined):
    made = desk("a", "slow", islands=2, quarantine_s=1000.0)
    made.beat("slow", 1, step_time_s=1e4)
    made.beat("a", 4)
    assert not made.open_rounds, "of two the slower sets it"
    if quarantined:
        for _ in range(3):
            made.beat("slow", 4, tokens=10**9)
        made.now_s = 1.0
        made.beat("slow", 1, step_time_s=1e4)
    else:
        made.now_s = made.config.dead_after_s
    made.open_round("a", step=5)


def test_after_a_takeover_what_waits_longest_is_due_at_once_and_the_others_keep_apart():
    fleet = Fleet({"a": 0.1, "b": 0.1})
    fleet.pacer.resume({0: 1_000_007, 1: 1_000_004, 2: 1_000_005, 3: 1_000_006})
    fleet.run(1.6)
    assert [p for _, p in fleet.opened] == [1, 2, 3, 0, 1, 2, 3, 0]
    assert fleet.opened[0][0] == 0.0, "as soon as an island is heard"
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(fleet.opened)]
    assert all(abs(gap - 0.2) <= 0.111 for gap in gaps), gaps


def test_a_broker_that_was_frozen_as_a_round_opened_brings_the_next_one_no_sooner():
    fleet = Fleet({"a": 0.1, "b": 0.1, "c": 0.1}, fragments=1)
    clock, pacer = fleet.clock, fleet.pacer
    for island_id in "abc":
        clock.report(island_id, 0, 0.0, 0.1)
    for island_id in "abc":  # the last that was heard of two of them
        clock.report(island_id, 7, 0.7, 0.1)
    clock.report("a", 15, 1.5, 0.1)
    pacer.opened(0, 2.3)  # a alone is known to advance by now
    assert clock.advancing(2.3) == ("a",)
    for inner_step in (12, 17, 22, 27, 29):  # at 2.9 s all comes at once, oldest first
        for island_id in "bca":
            clock.report(island_id, inner_step, 2.9, 0.1)
            assert pacer.most_overdue(2.9, fleet.fragments) is None
    assert pacer.progress(0, 2.9) == pytest.approx(29 - 22, abs=1.01), "7 steps since it has opened, not 17"
