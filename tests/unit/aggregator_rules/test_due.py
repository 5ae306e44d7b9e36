"""Deadlines, ranks, who lives and how fast the fleet is, each against a twin that looks at everybody every time."""

from statistics import median_low

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aggregator.rules.deadlines import FEW, Deadlines, Living
from aggregator.rules.pacing import Pacer
from aggregator.rules.ranked import Ranked
from aggregator.rules.step_clock import SPREAD, FleetRates, StepClock

NAMES = st.sampled_from("abcde")
#: Few, so that many are equal.
TIMES = st.integers(0, 12).map(float)


MOVED_OR_DROPPED = st.tuples(NAMES, st.one_of(TIMES, st.none()))


@given(st.lists(st.one_of(MOVED_OR_DROPPED, st.tuples(st.just("now"), TIMES))))
def test_deadlines_come_in_order_whatever_was_moved_or_dropped(steps):
    made, twin = Deadlines(), {}
    for name, at_s in steps:
        if name == "now":
            due = sorted((each_s, each) for each, each_s in twin.items() if each_s <= at_s)
            assert made.due(at_s) == [each for _, each in due]
            twin = {each: each_s for each, each_s in twin.items() if each_s > at_s}
        elif at_s is None:
            made.drop(name)
            twin.pop(name, None)
        else:
            made.put(name, at_s)
            twin[name] = at_s
        assert made.first() == min(((each_s, each) for each, each_s in twin.items()), default=None)
        assert {each: made.get(each) for each in "abcde"} == {each: twin.get(each) for each in "abcde"}
        assert all((each in made) == (each in twin) for each in "abcde")


def test_deadlines_that_move_with_each_message_do_not_pile_up():
    made = Deadlines()
    for at_s in range(10_000):
        made.put("a", float(at_s))
        made.put("b", float(-at_s))
    assert len(made._heap) <= FEW + 1
    assert made.first() == (-9999.0, "b")


@given(st.lists(MOVED_OR_DROPPED), TIMES)
def test_ranks_are_those_of_a_sorted_list(steps, limit):
    made, twin = Ranked(), {}
    for name, value in steps:
        if value is None:
            made.drop(name)
            twin.pop(name, None)
        else:
            made.put(name, value)
            twin[name] = value
    ordered = sorted((value, name) for name, value in twin.items())
    assert made.order == ordered
    assert made.value == twin
    assert made.below(limit) == sum(value < limit for value in twin.values())
    assert made.middle == (median_low(twin.values()) if twin else 0.0)


#: It leaves, and is heard again at an earlier time, before anybody asks.
BACK_EARLIER = [("a", "heard", 10.0), ("b", "asked", 5.0), ("a", "leaves", 5.0), ("a", "heard", 3.0)]
BACK_EARLIER += [("b", "asked", 5.5), ("b", "asked", 7.0)]


@given(st.lists(st.tuples(NAMES, st.sampled_from(["heard", "leaves", "asked"]), TIMES)))
@example(BACK_EARLIER)
def test_who_lives_is_whoever_was_heard_lately_and_has_not_left(steps):
    """Time passes as it likes, also backwards: whoever asks of an earlier moment is told of that one."""
    heard_s, dead_after_s = {}, 3.0
    asked = []

    def lives(name, now_s):
        asked.append(name)
        return name in heard_s and now_s - heard_s[name] < dead_after_s

    made = Living(lives, lambda name: heard_s[name] + dead_after_s)
    for name, what, now_s in steps:
        if what == "heard":
            heard_s[name] = max(now_s, heard_s.get(name, now_s))
            made.changed(name)
        elif what == "leaves":
            heard_s.pop(name, None)
            made.changed(name)
        else:
            alive = {each for each in heard_s if now_s - heard_s[each] < dead_after_s}
            assert made.ids(now_s) == alive
            assert made.ids(now_s) is made.ids(now_s)
            assert made.next_death_s(now_s) == min((heard_s[each] + dead_after_s for each in alive), default=None)


def test_a_question_looks_at_nobody_who_is_as_it_was():
    heard_s = {f"island-{i}": 0.0 for i in range(100)}
    looks = []
    made = Living(
        lambda name, now_s: not looks.append(name) and now_s < heard_s[name] + 6.0, lambda n: heard_s[n] + 6.0
    )
    for name in heard_s:
        made.changed(name)
    assert len(made.ids(0.0)) == len(looks) == 100
    for now_s in range(1, 6):
        heard_s["island-7"] = float(now_s)
        made.changed("island-7")
        made.ids(now_s)
    assert looks[100:] == ["island-7"] * 5
    assert made.ids(6.0) == {"island-7"}


class SlowTwin:
    """Who advances and how far each is, from every report, asked of everybody."""

    def __init__(self, heartbeat_s):
        self.heartbeat_s, self.paces = heartbeat_s, {}

    def report(self, name, step, now_s, step_time_s):
        last, _, advanced_s, _ = self.paces.get(name, (-1, 0.0, 0.0, 0.0))
        if step > last:
            self.paces[name] = step, now_s, now_s, step_time_s
        elif step == last:
            reported_s = max(self.paces[name][1], now_s - step_time_s)
            self.paces[name] = step, reported_s, advanced_s, step_time_s
        else:
            self.paces[name] = (*self.paces[name][:3], step_time_s)

    def advancing(self, now_s, out):
        return {
            name: (step + min(max(0.0, now_s - reported_s), self.allowance_s(time_s)) / time_s, time_s)
            for name, (step, reported_s, advanced_s, time_s) in sorted(self.paces.items())
            if now_s - advanced_s <= self.allowance_s(time_s) and name not in out
        }

    def allowance_s(self, step_time_s):
        return max(3 * self.heartbeat_s, 4 * step_time_s)


EVENTS = st.tuples(
    NAMES,
    st.sampled_from(["report", "report", "report", "out", "in", "forget", "interval", "nothing"]),
    st.integers(0, 3),
    st.sampled_from([0.1, 0.25, 0.5, 2.0, 100.0]),
    st.sampled_from([0.0, 0.125, 0.3, 1.5, 9.0]),
)


@given(st.lists(EVENTS, max_size=60))
def test_who_advances_at_which_pace_and_what_is_due_is_as_if_everybody_were_asked(events):
    out, steps, now_s, twin, tokens = set(), {}, 0.0, SlowTwin(0.5), {name: i * 7 for i, name in enumerate("abcde")}
    clock = StepClock(0.5, lambda name, _: name not in out)
    interval, pacer, rates = 6, Pacer(range(3), 6, clock), FleetRates(clock, tokens.__getitem__)
    for name, what, more, step_time_s, wait_s in events:
        now_s += wait_s
        clock.look_again()
        match what:
            case "report":
                steps[name] = steps.get(name, 0) + more
                clock.report(name, steps[name], now_s, step_time_s)
                twin.report(name, steps[name], now_s, step_time_s)
            case "out":
                out.add(name)
                clock.look_at(name)
            case "in":
                out.discard(name)
                clock.look_at(name)
            case "forget":
                clock.forget(name)
                pacer.forget(name)
                twin.paces.pop(name, None)
                steps.pop(name, None)
            case "interval":
                before, ratio = [pacer.progress(p, now_s) for p in range(3)], (6, 9, 30, 200)[more] / interval
                interval = (6, 9, 30, 200)[more]
                pacer.change_interval(interval, now_s)
                after = [pacer.progress(p, now_s) for p in range(3)]
                assert after == pytest.approx([done * ratio for done in before], abs=1e-9)
            case _:
                pass
        clock.look_again()
        at = twin.advancing(now_s, out)
        times = sorted(time_s for _, time_s in at.values())
        assert clock.advancing(now_s) == tuple(at)
        assert clock.at(now_s) == {each: step for each, (step, _) in at.items()}
        assert clock.median_step_time_s(now_s) == (times[len(times) // 2] if times else None)
        per_s = {each: tokens[each] / time_s for each, (_, time_s) in at.items()}
        middle = median_low(per_s.values()) if per_s else 0.0
        within = {each: min(max(rate, middle / SPREAD), middle * SPREAD) for each, rate in per_s.items()}
        for each in "abcde":
            ratio = sum(within.values()) / within[each] if per_s.get(each) and within[each] else max(1, len(per_s))
            assert rates.ratio(each, now_s) == pytest.approx(ratio, rel=1e-12)
        due, waits_s = pacer.most_overdue(now_s, range(3)), pacer.due_in_s(range(3), now_s)
        began = {p: dict(pacer._began[p]) for p in range(3)}
        progress = {p: sorted(at[each][0] - began[p][each] for each in at) for p in range(3)}
        fleet = {p: done[(len(done) - 1) // 2] if done else 0.0 for p, done in progress.items()}
        assert fleet == {p: pacer.progress(p, now_s) for p in range(3)}
        ready = [(done, -p) for p, done in fleet.items() if at and done >= interval]
        assert due == (-max(ready)[1] if ready else None)
        for p, wait_s in waits_s.items():
            waits = sorted((interval - (at[each][0] - began[p][each])) * at[each][1] for each in at)
            assert wait_s == pytest.approx(max(0.0, waits[len(at) - 1 - (len(at) - 1) // 2]), abs=1e-5)
        assert waits_s.keys() == (set(range(3)) if at else set())
        if due is not None:
            pacer.opened(due, now_s)
