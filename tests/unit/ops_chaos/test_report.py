"""The arithmetic of the report: steps, stalls, healing and participation, from recordings made by hand."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from islands.session.pulse import Beat
from ops.chaos.recording import Happening, NoteSeen, Observer, Recording, RoundSeen, VersionSeen
from ops.chaos.report import (
    between,
    chaos_report,
    healing,
    merged,
    out_spells,
    outcome,
    participation,
    render,
    stepping,
)
from ops.faults.kinds import FaultKind
from ops.faults.plan import fault
from ops.processes.cluster import Change, ProcessEvent
from tests.noted import line, noted

PACE_S = 0.25


def steps(first_s, last_s, pid=1, every_s=PACE_S):
    count = round((last_s - first_s) / every_s) + 1
    return [Beat(at_s=first_s + n * every_s, pid=pid) for n in range(count)]


def happening(kind, *processes, at_s, ended_s=None, number=1):
    targets = () if kind in (FaultKind.NAN, FaultKind.OUTAGE) else processes
    return Happening(number=number, fault=fault(kind, at_s, targets), processes=processes, at_s=at_s, ended_s=ended_s)


def version(at_s, *islands, epoch=1, incarnation=1):
    parts = [{"island_id": each, "incarnation": incarnation} for each in islands]
    return VersionSeen(at_s=at_s, version=1, epoch=epoch, contributions=parts)


def recording(**more):
    islands = ("a", "b")
    given = {"steps": {name: steps(0.0, 100.0) for name in islands}, "began_s": 0.0, "ended_s": 100.0} | more
    return Recording(islands=islands, **given)


def change(at_s, process, what):
    return at_s, ProcessEvent(process=process, change=what, detail="")


# --- steps --------------------------------------------------------------------------------------------------------


def test_islands_that_never_stop_have_a_goodput_of_one_and_no_stall():
    figures = stepping(recording())
    assert figures["goodput"] == pytest.approx(1.0)
    assert figures["longest_stall"]["stall_s"] == pytest.approx(0.0)
    assert figures["usual_steps"] == pytest.approx(800)


def test_an_island_that_waits_for_somebody_elses_fault_is_found():
    # b stands still for two seconds while the broker is dead: 8 steps of 400 are missing.
    waits = recording(
        steps={"a": steps(0.0, 100.0), "b": [*steps(0.0, 50.0), *steps(52.25, 100.0)]},
        happenings=[happening(FaultKind.KILL, "broker", at_s=50.1, ended_s=50.1)],
    )
    figures = stepping(waits)
    assert figures["goodput"] == pytest.approx(792 / 800)
    assert figures["longest_stall"] == {"island": "b", "at_s": 50.0, "stall_s": 2.0}
    assert figures["longest_stall_before_s"] == pytest.approx(0.0)


STOPPED = {"happenings": [happening(FaultKind.STOP, "a", at_s=20.2, ended_s=24.9)]}
KILLED = {"happenings": [happening(FaultKind.KILL, "a", at_s=20.2, ended_s=20.2)]}
DIED = {"changes": [change(20.2, "a", Change.DIED)]}


@pytest.mark.parametrize(
    ("more", "after", "out"),
    [
        pytest.param(STOPPED, steps(25.0, 100.0), (20.2, 25.0), id="until its next step after it goes on"),
        pytest.param(DIED, steps(25.0, 100.0, pid=2), (20.2, 25.0), id="by a death that nobody ordered"),
        pytest.param(KILLED, [], (20.2, 100.0), id="for good"),
    ],
)
def test_an_island_is_out_from_a_fault_to_its_next_step_and_that_is_not_counted_against_it(more, after, out):
    run = recording(steps={"a": [*steps(0.0, 20.0), *after], "b": steps(0.0, 100.0)}, **more)
    assert out_spells(run, "a") == [out]
    figures = stepping(run)
    assert figures["goodput"] == pytest.approx(1.0, abs=1e-3)
    assert figures["longest_stall"]["stall_s"] == pytest.approx(0.0, abs=1e-9)
    assert figures["usual_steps"] == pytest.approx((200.0 - (out[1] - out[0])) / PACE_S)


spells = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20)).map(lambda s: (s[0], s[0] + s[1])))


@given(spells=spells)
def test_spells_and_what_lies_between_them_make_up_all_the_time(spells):
    together = merged(spells)
    assert all(a[1] < b[0] for a, b in pairwise(together))
    free = list(between(together, 0.0, 200.0))
    length = sum(b - a for a, b in free) + sum(b - a for a, b in together)
    assert length == pytest.approx(200.0)


# --- healing ------------------------------------------------------------------------------------------------------


def heal(what, **more):
    found = outcome(what, recording(happenings=[what], **more))
    moments = (found[key] for key in ("detected_s", "restarted_s", "healed_s"))
    return [None if each is None else round(each, 6) for each in moments]


def test_a_killed_island_is_whole_again_with_its_next_life_in_a_version():
    found = heal(
        happening(FaultKind.KILL, "a", at_s=10.0, ended_s=10.0),
        changes=[change(10.1, "a", Change.DIED), change(10.3, "a", Change.STARTED)],
        versions=[version(9.0, "a", "b"), version(11.0, "a", "b"), version(13.3, "a", "b", incarnation=2)],
    )
    assert found == [0.1, 0.3, 3.3]


def test_a_killed_aggregator_is_whole_again_with_a_version_of_a_later_epoch():
    killed = happening(FaultKind.KILL, "aggregator", at_s=10.0, ended_s=10.0)
    versions = [version(9.0, "a"), version(10.05, "a"), version(11.5, "a", epoch=2)]
    assert heal(killed, versions=versions) == [None, None, None]  # nobody started it again, so far as was seen
    started = [change(12.0, "aggregator", Change.STARTED)]
    assert heal(killed, versions=versions, changes=started)[2] == 1.5  # by a standby, before the dead one was back


@pytest.mark.parametrize(("process", "healed_s"), [("broker", 5.0), ("a", 7.0), ("redis", 4.5)])
def test_what_was_stopped_is_whole_again_after_it_goes_on(process, healed_s):
    found = heal(
        happening(FaultKind.STOP, process, at_s=10.0, ended_s=14.0),
        versions=[version(12.0, "a", "b"), version(15.0, "b"), version(17.0, "a", "b")],
        redis=[(13.0, True), (13.9, False), (14.5, True)],
    )
    assert found[2] == healed_s


def test_an_outage_is_over_when_the_last_of_its_processes_is_back():
    outage = happening(FaultKind.OUTAGE, "aggregator", "broker", "redis", at_s=10.0, ended_s=11.0)
    changes = [change(11.0 + n, name, Change.STARTED) for n, name in enumerate(outage.processes)]
    versions = [version(12.5, "a", epoch=2)]
    assert heal(outage, changes=changes, versions=versions)[1:] == [3.0, 2.5]
    assert heal(outage, changes=changes[:2], versions=versions)[1:] == [None, None]


NOTED = [
    (10.5, "contribution.refused", {"island": "b", "reason": "stale"}),
    (11.0, "version.not_durable", {}),
    (12.0, "round.closed", {"missing": ["b"]}),
    (13.0, "round.closed", {"missing": ["a"]}),
    (14.0, "contribution.refused", {"island": "rogue-nan", "reason": "not_finite"}),
    (15.0, "broker.back", {}),
]


@pytest.mark.parametrize(
    ("kind", "process", "detected_s"),
    [
        (FaultKind.DISK_FULL, "aggregator", 1.0),
        (FaultKind.STOP, "a", 3.0),
        (FaultKind.NAN, "rogue-nan", 4.0),
        (FaultKind.STOP, "broker", 5.0),
        (FaultKind.STOP, "redis", None),
    ],
)
def test_what_notices_a_fault_depends_on_its_kind(kind, process, detected_s):
    befell = happening(kind, process, at_s=10.0, ended_s=16.0)
    notes = [NoteSeen(at_s=at_s, note=noted(name, **fields)) for at_s, name, fields in NOTED]
    assert heal(befell, notes=notes)[0] == detected_s


def test_faults_are_summed_up_by_kind_and_role_and_a_rogue_need_not_heal():
    run = recording(changes=[change(12.0, "a", Change.DIED), change(14.0, "a", Change.STARTED)])
    killed = [happening(FaultKind.KILL, "a", at_s=at_s) for at_s in (11.0, 11.5)]
    rogue = happening(FaultKind.NAN, "rogue-nan", at_s=11.0)
    groups = healing([outcome(each, run) for each in (*killed, rogue)])
    assert groups["kill island"]["detected_s"] == {"median": 0.75, "worst": 1.0}
    counts = {name: (each["count"], each["not_healed"]) for name, each in groups.items()}
    assert counts == {"kill island": (2, 2), "nan": (1, 0)}


def seen(opened_s, committed_s, *islands):
    return RoundSeen(opened_s=opened_s, committed_s=committed_s, islands=frozenset(islands))


def test_only_islands_that_were_there_all_the_while_are_expected_in_a_version():
    run = recording(
        steps={"a": [*steps(0.0, 20.0), *steps(25.0, 100.0, pid=2)], "b": steps(0.0, 100.0)},
        happenings=[happening(FaultKind.KILL, "a", at_s=20.2, ended_s=20.2)],
        rounds=[
            seen(10.0, 11.0, "a", "b"),
            seen(19.9, 20.5, "b"),  # a died in it
            seen(22.0, 23.0, "b"),  # a was dead
            seen(24.0, 26.0, "b"),  # a came back in it
            seen(26.0, 27.0, "b"),  # a was missed
            seen(99.0, 101.0, "b"),  # after the end
        ],
    )
    found = participation(run)
    assert (found["versions"], found["at_least_90_percent"], found["worst"]) == (5, 4, 0.5)
    assert found["mean"] == pytest.approx(4.5 / 5)


def test_rounds_decisions_and_versions_are_read_off_tapes_and_ledgers_as_they_grow(tmp_path):
    run = Recording(islands=("a",))
    observer = Observer(tmp_path, run)
    committed = {"fragment": 2, "version": 5, "contributions": [{"island": "a"}]}
    lines = [
        {"tape": 1, "now_s": 0.0},
        {"now_s": 1.0, "event": "received", "kind": "heartbeat", "sender": "a", "body": {}},
        line(2.0, "round.opened", round=7),
        {"gap": 3},
        line(3.0, "round.closed", round=7),
        line(4.0, "version.committed", round=7, **committed),
        line(5.0, "version.committed", round=8, **committed),  # whose opening is lost
    ]
    row = {"fragment_id": 2, "fragment_version": 5, "epoch": 1, "contributions": []}
    for store in ("store", "standby-1/store"):  # a copy is no other version
        (tmp_path / store).mkdir(parents=True)
        (tmp_path / store / "ledger.jsonl").write_text(json.dumps(row) + "\n")
    with (tmp_path / "events.jsonl").open("w") as tape:
        for each in lines:
            text = json.dumps(each) + "\n"
            for part in (text[:9], text[9:]):  # torn, until the rest is there
                tape.write(part)
                tape.flush()
                observer.look()
    assert [each.islands for each in run.rounds] == [{"a"}]
    assert run.rounds[0].opened_s < run.rounds[0].committed_s
    assert [each.note.name for each in run.notes] == ["round.closed"]
    assert [(each.version, each.epoch) for each in run.versions] == [(5, 1)]


def test_the_report_of_a_run_without_anything_is_no_accident():
    report = chaos_report(Recording(islands=("a",)))
    assert report["stepping"]["goodput"] is None
    assert report["participation"]["mean"] is None
    assert "0 faults" in render(report)


def test_the_report_and_its_text_have_what_was_done_and_what_could_not_be():
    skipped = Happening(
        number=2, fault=fault(FaultKind.STOP, 60.0), processes=(), at_s=60.0, ended_s=60.0, skipped="nobody is there"
    )
    run = recording(
        steps={"a": [*steps(0.0, 20.0), *steps(25.0, 100.0, pid=2)], "b": steps(0.0, 100.0)},
        happenings=[happening(FaultKind.KILL, "a", at_s=20.2, ended_s=20.2), skipped],
        changes=[change(20.25, "a", Change.DIED), change(20.5, "a", Change.STARTED)],
        versions=[version(10.0, "a", "b"), version(27.0, "a", "b", incarnation=2)],
        rounds=[seen(9.0, 10.0, "a", "b"), seen(26.0, 27.0, "a", "b")],
    )
    report = chaos_report(run)
    assert report["faults_by_kind"] == {"kill": 1}
    assert [each["why"] for each in report["skipped"]] == ["nobody is there"]
    assert report["healing"]["kill island"]["healed_s"] == {"median": 6.8, "worst": 6.8}
    text = render(report)
    assert all(words in text for words in ("1 kill", "nobody is there", "(100.00%)", "2 of 2 versions", "kill island"))
