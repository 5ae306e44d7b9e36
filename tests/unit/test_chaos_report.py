"""The arithmetic of the report: steps, stalls, healing and participation, from recordings made by hand."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.chaos.faults import Kind, fault
from ops.chaos.healing import outcome
from ops.chaos.records import Change, ClockJump, Happening, ProcessChange, Recording, Step, VersionSeen
from ops.chaos.report import chaos_report, participation, render
from ops.chaos.stepping import between, merged, out_spells, share_of_steps, stall_beside, stepping
from ops.chaos.tapes import NoteSeen, RoundSeen, Tapes, take_in, true_time

PACE_S = 0.25


def steps(first_s, last_s, pid=1, every_s=PACE_S):
    count = round((last_s - first_s) / every_s) + 1
    return [Step(at_s=first_s + n * every_s, pid=pid) for n in range(count)]


def happening(kind, *processes, at_s, ended_s=None, number=1):
    targets = () if kind in (Kind.NAN, Kind.OUTAGE) else processes
    return Happening(number=number, fault=fault(kind, at_s, targets), processes=processes, at_s=at_s, ended_s=ended_s)


def version(at_s, *islands, epoch=1, incarnation=1, p=0, number=1):
    parts = [{"island_id": each, "incarnation": incarnation} for each in islands]
    return VersionSeen(at_s=at_s, fragment_id=p, version=number, epoch=epoch, row={"contributions": parts})


def recording(**more):
    islands = ("a", "b")
    given = {"steps": {name: steps(0.0, 100.0) for name in islands}, "began_s": 0.0, "ended_s": 100.0} | more
    return Recording(islands=islands, pace_s=dict.fromkeys(islands, PACE_S), **given)


def change(at_s, process, what):
    return ProcessChange(at_s=at_s, process=process, change=what)


# --- steps --------------------------------------------------------------------------------------------------------


def test_islands_that_never_stop_have_a_goodput_of_one_and_no_stall():
    figures = stepping(recording())
    assert figures.goodput == pytest.approx(1.0)
    assert figures.longest.stall_s == pytest.approx(0.0)
    assert figures.usual_steps == pytest.approx(800)


def test_time_in_which_an_island_is_dead_is_not_counted_against_it():
    killed = recording(
        steps={"a": [*steps(0.0, 40.0), *steps(48.0, 100.0, pid=2)], "b": steps(0.0, 100.0)},
        happenings=[happening(Kind.KILL, "a", at_s=40.1, ended_s=40.1)],
    )
    assert out_spells(killed, "a") == [(40.1, 48.0)]
    figures = stepping(killed)
    assert figures.goodput == pytest.approx(1.0, abs=1e-3)
    assert figures.longest.stall_s == pytest.approx(0.0, abs=1e-9)
    assert figures.usual_steps == pytest.approx((40.1 + 52 + 100) / PACE_S)


def test_an_island_that_waits_for_somebody_elses_fault_is_found():
    # b stands still for two seconds while the broker is dead: 8 steps of 400 are missing.
    waits = recording(
        steps={"a": steps(0.0, 100.0), "b": [*steps(0.0, 50.0), *steps(52.25, 100.0)]},
        happenings=[happening(Kind.KILL, "broker", at_s=50.1, ended_s=50.1)],
    )
    figures = stepping(waits)
    assert figures.goodput == pytest.approx(792 / 800)
    assert (figures.longest.island, figures.longest.at_s) == ("b", 50.0)
    assert figures.longest.stall_s == pytest.approx(2.0)
    assert figures.by_island["a"][2] == pytest.approx(0.0)
    assert figures.longest_before_s == pytest.approx(0.0)
    periods = dict.fromkeys("ab", PACE_S)
    waits.late = [(20.0, 0.3), (51.0, 0.1)]
    worst = chaos_report(waits, Tapes())["stepping"]
    assert (worst["observer_late_s"], worst["longest_stall"]["observer_late_s"]) == (0.3, 0.1)
    assert stall_beside(waits, waits.happenings[0], periods, 55.0) == pytest.approx(2.0)
    assert stall_beside(waits, waits.happenings[0], periods, 51.0) == pytest.approx(0.75)
    assert share_of_steps(waits, periods, 40.0, 50.0) == pytest.approx(1.0)
    assert share_of_steps(waits, periods, 50.0, 60.0) == pytest.approx(72 / 80)


def test_a_stopped_island_is_out_until_its_next_step_after_it_goes_on():
    stopped = recording(
        steps={"a": [*steps(0.0, 20.0), *steps(25.0, 100.0)], "b": steps(0.0, 100.0)},
        happenings=[happening(Kind.STOP, "a", at_s=20.2, ended_s=24.9)],
    )
    assert out_spells(stopped, "a") == [(20.2, 25.0)]
    assert stepping(stopped).longest.stall_s == pytest.approx(0.0, abs=1e-9)


def test_a_death_that_nobody_ordered_is_no_stall_either():
    crashed = recording(
        steps={"a": [*steps(0.0, 20.0), *steps(25.0, 100.0, pid=2)], "b": steps(0.0, 100.0)},
        changes=[change(20.2, "a", Change.DIED), change(20.4, "a", Change.STARTED)],
    )
    assert out_spells(crashed, "a") == [(20.2, 25.0)]


def test_an_island_that_never_comes_back_is_out_to_the_end():
    gone = recording(
        steps={"a": steps(0.0, 20.0), "b": steps(0.0, 100.0)},
        happenings=[happening(Kind.KILL, "a", at_s=20.1, ended_s=20.1)],
    )
    assert out_spells(gone, "a") == [(20.1, 100.0)]


spells = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20)).map(lambda s: (s[0], s[0] + s[1])))


@given(spells=spells)
def test_spells_and_what_lies_between_them_make_up_all_the_time(spells):
    together = merged(spells)
    assert all(a[1] < b[0] for a, b in pairwise(together))
    free = list(between(together, 0.0, 200.0))
    length = sum(b - a for a, b in free) + sum(b - a for a, b in together)
    assert length == pytest.approx(200.0)


# --- healing ------------------------------------------------------------------------------------------------------


def heal(what, *, notes=(), **more):
    return outcome(what, recording(happenings=[what], **more), Tapes(notes=list(notes)))


def test_a_killed_island_is_whole_again_with_its_next_life_in_a_version():
    found = heal(
        happening(Kind.KILL, "a", at_s=10.0, ended_s=10.0),
        changes=[change(10.1, "a", Change.DIED), change(10.3, "a", Change.STARTED)],
        versions=[version(9.0, "a", "b"), version(11.0, "a", "b"), version(13.3, "a", "b", incarnation=2)],
    )
    assert (found.detected_s, found.restarted_s, found.healed_s) == (0.1, 0.3, 3.3)
    assert found.heals_after == pytest.approx(3.0)


def test_a_killed_aggregator_is_whole_again_with_a_version_of_a_later_epoch():
    found = heal(
        happening(Kind.KILL, "aggregator", at_s=10.0, ended_s=10.0),
        versions=[version(9.0, "a"), version(10.05, "a"), version(11.5, "a", epoch=2)],
    )
    assert (found.restarted_s, found.healed_s) == (None, None)  # nobody started it again, so far as was seen
    found = heal(
        happening(Kind.KILL, "aggregator", at_s=10.0, ended_s=10.0),
        changes=[change(12.0, "aggregator", Change.STARTED)],
        versions=[version(9.0, "a"), version(10.05, "a"), version(11.5, "a", epoch=2)],
    )
    assert found.healed_s == 1.5  # by a standby, before the dead one was back


@pytest.mark.parametrize(
    ("kind", "process", "healed_s"), [(Kind.STOP, "broker", 5.0), (Kind.STOP, "a", 7.0), (Kind.STOP, "redis", 4.5)]
)
def test_what_was_stopped_is_whole_again_after_it_goes_on(kind, process, healed_s):
    found = heal(
        happening(kind, process, at_s=10.0, ended_s=14.0),
        versions=[version(12.0, "a", "b"), version(15.0, "b"), version(17.0, "a", "b")],
        redis=[(13.0, True), (13.9, False), (14.5, True)],
    )
    assert found.healed_s == healed_s
    assert found.heals_after == healed_s - 4.0


def test_what_notices_a_fault_depends_on_its_kind():
    notes = [
        NoteSeen(at_s=10.5, name="contribution.refused", fields={"island": "b", "reason": "stale"}),
        NoteSeen(at_s=11.0, name="version.not_durable", fields={}),
        NoteSeen(at_s=12.0, name="round.closed", fields={"missing": ["b"]}),
        NoteSeen(at_s=13.0, name="round.closed", fields={"missing": ["a"]}),
        NoteSeen(at_s=14.0, name="contribution.refused", fields={"island": "rogue-nan", "reason": "not_finite"}),
        NoteSeen(at_s=15.0, name="broker.back", fields={}),
    ]
    detected = {
        what: heal(happening(kind, what, at_s=10.0, ended_s=16.0), notes=notes).detected_s
        for kind, what in (
            (Kind.DISK_FULL, "aggregator"),
            (Kind.STOP, "a"),
            (Kind.NAN, "rogue-nan"),
            (Kind.STOP, "broker"),
            (Kind.STOP, "redis"),
        )
    }
    assert detected == {"aggregator": 1.0, "a": 3.0, "rogue-nan": 4.0, "broker": 5.0, "redis": None}


# --- participation ------------------------------------------------------------------------------------------------


def seen(opened_s, committed_s, *islands):
    return RoundSeen(fragment_id=0, version=1, opened_s=opened_s, committed_s=committed_s, islands=frozenset(islands))


def test_only_islands_that_were_there_all_the_while_are_expected_in_a_version():
    run = recording(
        steps={"a": [*steps(0.0, 20.0), *steps(25.0, 100.0, pid=2)], "b": steps(0.0, 100.0)},
        happenings=[happening(Kind.KILL, "a", at_s=20.2, ended_s=20.2)],
    )
    heard = {"a": [1.0, 20.0, 25.5, 30.0], "b": [1.0]}
    rounds = [
        seen(10.0, 11.0, "a", "b"),
        seen(19.9, 20.5, "b"),  # a died in it
        seen(22.0, 23.0, "b"),  # a was dead
        seen(24.0, 26.0, "b"),  # a came back in it
        seen(25.2, 26.5, "b"),  # a trained, but had not been heard of
        seen(26.0, 27.0, "b"),  # a was missed
        seen(99.0, 101.0, "b"),  # after the end
    ]
    found = participation(run, Tapes(rounds=rounds, heard=heard))
    assert [each["live"] for each in found["by_version"]] == [2, 1, 1, 1, 1, 2]
    assert found["worst"] == 0.5
    assert found["mean"] == pytest.approx(5.5 / 6, abs=1e-4)
    assert (found["versions"], found["at_least_90_percent"]) == (6, 5)


def test_rounds_heartbeats_and_decisions_are_taken_from_a_tape():
    lines = [
        {"tape": 1, "now_s": 0.0},
        {"now_s": 1.0, "event": "received", "kind": "heartbeat", "sender": "a", "body": {}},
        {"now_s": 2.0, "note": "round.opened", "fields": {"round": 7}},
        {"gap": 3},
        {"now_s": 3.0, "note": "round.closed", "fields": {"round": 7, "missing": []}},
        {
            "now_s": 4.0,
            "note": "version.committed",
            "fields": {"round": 7, "fragment": 2, "version": 5, "contributions": [{"island": "a"}]},
        },
        {
            "now_s": 5.0,
            "note": "version.committed",  # of a round whose opening is lost
            "fields": {"round": 8, "fragment": 2, "version": 6, "contributions": []},
        },
    ]
    tapes = Tapes()
    take_in(tapes, iter(lines), lambda now_s: now_s + 100)
    assert tapes.heard == {"a": [101.0]}
    assert tapes.rounds == [
        RoundSeen(fragment_id=2, version=5, opened_s=102.0, committed_s=104.0, islands=frozenset({"a"}))
    ]
    assert [note.name for note in tapes.notes] == ["round.closed"]


# --- clocks -------------------------------------------------------------------------------------------------------


def jump(at_s, offset_s):
    return ClockJump(at_s=at_s, process="aggregator", offset_s=offset_s)


def test_readings_of_a_clock_that_jumped_forward_are_turned_back_and_it_stays_ahead():
    time_of = true_time([jump(10.0, 30.0), jump(15.0, 0.0)])
    assert [time_of(reading) for reading in (5.0, 9.0, 41.0, 44.0, 46.0)] == [5.0, 9.0, 11.0, 14.0, 16.0]


def test_a_new_life_of_a_process_knows_nothing_of_earlier_jumps():
    time_of = true_time([jump(10.0, 30.0), jump(15.0, 0.0)], lives=[20.0])
    assert [time_of(reading) for reading in (9.0, 48.0, 21.0)] == [9.0, 18.0, 21.0]


def test_a_clock_that_went_back_is_ahead_only_after_it_came_forward_again():
    time_of = true_time([jump(10.0, -30.0), jump(15.0, 0.0)])
    assert [time_of(reading) for reading in (9.0, 12.0, 46.0)] == [9.0, 12.0, 16.0]


# --- all of it ----------------------------------------------------------------------------------------------------


def test_the_report_of_a_run_without_anything_is_no_accident():
    empty = Recording(islands=("a",))
    report = chaos_report(empty, Tapes())
    assert report["stepping"]["goodput"] is None
    assert report["participation"]["mean"] is None
    assert "0 faults" in render(report)


def test_the_text_says_what_people_ask_first():
    skipped = Happening(
        number=2, fault=fault(Kind.STOP, 60.0), processes=(), at_s=60.0, ended_s=60.0, skipped="nobody is there"
    )
    run = recording(
        steps={"a": [*steps(0.0, 20.0), *steps(25.0, 100.0, pid=2)], "b": steps(0.0, 100.0)},
        happenings=[happening(Kind.KILL, "a", at_s=20.2, ended_s=20.2), skipped],
        changes=[change(20.25, "a", Change.DIED), change(20.5, "a", Change.STARTED)],
        versions=[version(10.0, "a", "b"), version(27.0, "a", "b", incarnation=2)],
    )
    rounds = [seen(9.0, 10.0, "a", "b"), seen(26.0, 27.0, "a", "b")]
    report = chaos_report(run, Tapes(rounds=rounds, heard={"a": [1.0, 25.5], "b": [1.0]}))
    text = render(report)
    assert "1 faults in 1 min 40 s (36 an hour): 1 kill" in text
    assert "1 could not be done: nobody is there" in text
    assert "(100.00%)" in text
    assert "100.0% of the islands that were live for the whole round, at least 90 % in 2 of 2 versions" in text
    assert "kill island" in text
    assert report["healing"]["kill island"]["heals_after_s"] == {"median": 6.5, "worst": 6.5}
    assert report["versions_per_min"] == pytest.approx(1.2)
