"""Pacing against an oracle: fleets whose every step is known exactly, stepped by the test."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.rules.pacing import Pacer, StepClock
from broker.wire.messages import Reason
from tests.aggregator_hand import Desk

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine

HEARTBEAT_S = 0.5


class Fleet:
    """Islands of constant speed whose counters are reported once per heartbeat."""

    def __init__(self, step_times_s, interval=8, fragments=4):
        self.clock = StepClock(HEARTBEAT_S)
        self.pacer = Pacer(range(fragments), interval, self.clock)
        self.step_times_s = dict(step_times_s)
        self.frozen_at_s = {}
        self.began_at_s = dict.fromkeys(step_times_s, 0.0)
        self.opened = []  # (time, fragment)

    def step(self, island_id, now_s):
        """The exact truth: whole steps run so far."""
        until_s = min(now_s, self.frozen_at_s.get(island_id, now_s))
        return int((until_s - self.began_at_s[island_id]) / self.step_times_s[island_id] + 1e-9)

    def run(self, seconds, start_s=0.0, tick_s=0.01):
        ticks = range(round(seconds / tick_s))
        for i in ticks:
            now_s = start_s + i * tick_s
            for n, island_id in enumerate(sorted(self.step_times_s)):
                if (i + 7 * n) % round(HEARTBEAT_S / tick_s) == 0 and now_s >= self.began_at_s[island_id]:
                    self.clock.report(island_id, self.step(island_id, now_s), now_s, self.step_times_s[island_id])
            due = self.pacer.most_overdue(now_s, frozenset())
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


def test_the_lower_median_sets_the_pace():
    fleet = Fleet({"a": 0.05, "b": 0.1, "c": 0.2}, fragments=1)
    fleet.run(40.0)
    assert sum(fleet.gaps(0)) / len(fleet.gaps(0)) == pytest.approx(8 * 0.1, rel=0.05)


def test_of_two_islands_the_slower_sets_the_pace():
    fleet = Fleet({"a": 0.05, "b": 0.1}, fragments=1)
    fleet.run(40.0)
    assert sum(fleet.gaps(0)) / len(fleet.gaps(0)) == pytest.approx(8 * 0.1, rel=0.05)


def test_a_frozen_island_stops_counting_and_the_others_go_on():
    fleet = Fleet({"a": 0.1, "b": 0.1}, fragments=1)
    fleet.frozen_at_s["b"] = 10.0
    fleet.run(40.0)
    assert fleet.clock.advancing(39.0) == ("a",)
    later = fleet.gaps(0, after_s=14.0)
    assert sum(later) / len(later) == pytest.approx(0.8, rel=0.05)


def test_nothing_is_due_while_nobody_advances():
    fleet = Fleet({"a": 0.1}, fragments=1)
    fleet.frozen_at_s["a"] = 0.2  # found out by the second heartbeat after that
    fleet.run(20.0)
    assert fleet.opened == []
    assert fleet.pacer.progress(0, 20.0) == 0.0
    assert fleet.pacer.due_in_s([0], 20.0) == {}


def test_a_newcomer_agrees_with_those_who_are_there():
    fleet = Fleet({"a": 0.1, "b": 0.1}, fragments=1)
    fleet.run(10.0)
    before = fleet.pacer.progress(0, 10.0)
    fleet.clock.report("c", 70_000, 10.0, 0.1)
    assert fleet.pacer.progress(0, 10.0) == pytest.approx(before, abs=1e-6)
    fleet.clock.report("d", 0, 10.0, 0.1)
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


def test_an_island_that_the_clock_has_forgotten_is_no_hindrance_to_another_interval():
    fleet = Fleet({"a": 0.1, "b": 0.1})
    fleet.run(3.0)
    fleet.clock.forget("b")
    fleet.pacer.change_interval(20, 3.0)
    before = fleet.pacer.progress(0, 3.0)
    fleet.clock.report("b", 500, 3.0, 0.1)
    assert fleet.pacer.progress(0, 3.0) == pytest.approx(before, abs=1e-6), "it agrees with the other as a newcomer"


def test_older_news_does_not_set_a_counter_back():
    clock = StepClock(HEARTBEAT_S)
    clock.report("a", 9, 1.0, 0.1)
    clock.report("a", 4, 1.1, 0.1)
    assert clock.estimate("a", 1.0) == 9.0


class Twin(Pacer):
    """The slow way: nothing is kept from one question to the next."""

    def _progress(self, fragment_id, moment):
        began = self._began[fragment_id]
        found = []
        for island_id in moment.advancing:
            step = self._clock.estimate(island_id, moment.now_s)
            if island_id not in began:
                here = [i for i in moment.advancing if i in began]
                known = sorted(self._clock.estimate(i, moment.now_s) - began[i] for i in here)
                began[island_id] = step - (known[(len(known) - 1) // 2] if known else self._head_start[fragment_id])
            found.append(step - began[island_id])
        return found


_EVENTS = st.one_of(
    st.tuples(st.just("report"), st.sampled_from("abc"), st.integers(0, 40), st.sampled_from([None, 0.05, 0.1, 0.3])),
    st.tuples(st.just("opened"), st.integers(0, 2)),
    st.tuples(st.just("forget"), st.sampled_from("abc"), st.booleans()),
    st.tuples(st.just("time"), st.sampled_from([0.0, 0.01, 0.2, 1.0, 5.0])),
    st.tuples(st.just("away"), st.sampled_from("abc")),
    st.tuples(st.just("interval"), st.sampled_from([8, 11, 24, 512])),
)


@given(st.lists(_EVENTS, max_size=40))
def test_what_is_kept_of_a_moment_changes_no_answer(events):
    away = set()
    clock = StepClock(HEARTBEAT_S, lambda island_id: island_id not in away)
    fast, slow = Pacer(range(3), 8, clock), Twin(range(3), 8, clock)
    now_s = 0.0
    for event in events:
        match event:
            case "report", island_id, step, step_s:
                clock.report(island_id, step, now_s, step_s)
            case "opened", p:
                fast.opened(p, now_s)
                slow.opened(p, now_s)
            case "forget", island_id, from_clock:
                if from_clock:
                    clock.forget(island_id)
                fast.forget(island_id)
                slow.forget(island_id)
            case "time", passed_s:
                now_s += passed_s
            case "interval", steps:
                before = [fast.progress(p, now_s) / (fast.spacing_steps * 3) for p in range(3)]
                fast.change_interval(steps, now_s)
                slow.change_interval(steps, now_s)
                assert [fast.progress(p, now_s) / steps for p in range(3)] == pytest.approx(before, abs=1e-9)
            case "away", island_id:
                away ^= {island_id}
                clock.look_again()
        assert fast.due_in_s(range(3), now_s) == slow.due_in_s(range(3), now_s)
        assert fast.most_overdue(now_s, frozenset()) == slow.most_overdue(now_s, frozenset())
        assert [fast.progress(p, now_s) for p in range(3)] == [slow.progress(p, now_s) for p in range(3)]


# --- who counts -----------------------------------------------------------------------------------------------


def versions_made(desk, names, seconds):
    """Lets these islands train ten steps a second and answer every round; returns how many versions that made."""
    before = desk.run.fragments[0].version
    at = desk.run.ledger.account("a", 1, 0).handed_over[0] if desk.run.versions[0] > 0 else 0
    for beat in range(1, round(seconds / HEARTBEAT_S) + 1):
        desk.now_s += HEARTBEAT_S
        desk.tick()
        for name in names:
            desk.beat(name, at + 5 * beat)
        for open_round in list(desk.run.open_rounds.values()):
            for name in names:
                if name in open_round.owing(frozenset(names)):
                    begins = desk.run.ledger.account(name, 1, 0).handed_over[0]
                    desk.offer(name, begins, at + 5 * beat, round_id=open_round.round_id, norm=1.0)
    return desk.run.fragments[0].version - before


def test_of_two_islands_a_slow_one_that_died_does_not_hold_up_the_other():
    desk = Desk(islands=2)
    desk.gather("a", "slow")
    desk.now_s = 1.0
    desk.beat("slow", 1, step_time_s=1e4)  # and then it is killed
    assert versions_made(desk, ["a"], 60.0) >= 50


def test_an_island_in_quarantine_does_not_set_the_pace():
    desk = Desk(islands=2, quarantine_s=1000.0)
    desk.gather("a", "rogue")
    desk.beat("rogue", 1, step_time_s=1e4)
    for _ in range(3):
        desk.run.offence(desk.run.members["rogue"], Reason.IMPLAUSIBLE, 0)
    desk.now_s = 1.0
    desk.beat("rogue", 1, step_time_s=1e4)
    assert versions_made(desk, ["a"], 5.0) >= 5


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
            assert pacer.most_overdue(2.9, frozenset()) is None
    assert pacer.progress(0, 2.9) == pytest.approx(29 - 22, abs=1.01), "7 steps since it has opened, not 17"
