"""Who was in a version, and why each other island was not: every answer that there is."""

import asyncio
import json

import pytest

from aggregator.process.reporter import Reporter
from aggregator.state.records import ledger_line
from broker.base.errors import ConfigError, Unavailable
from broker.wire import messages as m
from broker.wire.records import KeptVersion
from ops import cli
from ops.inspect import explain
from ops.inspect.explanation import render
from ops.story.absence import AbsenceReason, Storyteller, Target
from tests.aggregator_hand import beat
from tests.noted import line as note
from tests.taped import STEPS_PER_ROUND, Taped


def absences(tape, **target):
    """Who is not in the newest version of fragment 0, or in another round or version that is named, and why."""
    teller = Storyteller(Target(**(target or {"fragment": 0})))
    for line in tape:
        teller.take(line)
    return {each.island: each for each in teller.found.absences()}


def why(tape, **target):
    return {island: absence.why for island, absence in absences(tape, **target).items()}


def fleet(*names, **settings):
    taped = Taped(**{"islands": 3, "round_timeout_s": 1.0, **settings})
    taped.gather(*names)
    return taped


def opened(*names, **settings):
    """A fleet all of which has reported four steps, which has opened a round."""
    taped = fleet(*names, **settings)
    taped.report(STEPS_PER_ROUND, *names)
    return taped


def silence(taped, seconds, *awake, step=0):
    """Time passes; only those who are awake are heard."""
    for _ in range(int(seconds)):
        taped.now_s += 1.0
        taped.report(step, *awake)


def test_an_island_that_did_not_answer_was_waited_for_until_the_timeout_and_its_late_answer_is_in_the_next():
    taped = opened("a", "b")
    first = taped.round_id
    taped.hand_over("a", 1)
    silence(taped, 2, "a", "b", step=STEPS_PER_ROUND)
    assert why(taped.tape) == {"b": AbsenceReason.SILENT}
    taped.hand_over("b", 1, round_id=first, base=0)
    taped.round(2, "a", "b")
    absence = absences(taped.tape, fragment=0, version=1)["b"]
    assert absence.why is AbsenceReason.LATE
    assert "s after the closing, and is in version 2" in absence.detail
    assert absences(taped.tape, fragment=0, version=2) == {}


@pytest.mark.parametrize(
    ("link", "detail"),
    [
        pytest.param(None, "it had no step since its last hand-over", id="it had no step"),
        pytest.param(
            m.LinkUse(up=2e4, down=None, round_trip_s=None, codec=m.Codec.INT4, share=0.25),
            "its link carries int4 in 1 of 4 rounds",
            id="its link leaves rounds out",
        ),
    ],
)
def test_an_island_with_nothing_new_says_so_and_whether_its_link_is_why(link, detail):
    taped = opened("a", "b")
    fields = {"step_time_s": 0.1, "versions": taped.versions, "overwritten_tokens": (0,), "link": link}
    taped.say("b", beat(STEPS_PER_ROUND, **fields))
    taped.say("b", m.Nothing(round_id=taped.round_id, fragment_id=0))
    taped.hand_over("a", 1)
    absence = absences(taped.tape)["b"]
    assert absence.why is AbsenceReason.NOTHING
    assert absence.detail == detail


def test_an_island_that_found_its_memory_corrupt_says_so_whether_it_was_asked_or_not():
    taped = opened("a", "b")
    taped.say("b", m.Nothing(round_id=taped.round_id, fragment_id=0))
    taped.beat("b", STEPS_PER_ROUND, versions=(-1,))
    taped.hand_over("a", 1)
    absence = absences(taped.tape)["b"]
    assert absence.why is AbsenceReason.NOTHING
    assert absence.detail == "it had found fragment 0 corrupt in its memory, and adopted it anew"


def test_a_refusal_comes_with_its_reason():
    taped = opened("a", "b")
    taped.hand_over("b", 1, base=7)
    taped.hand_over("a", 1)
    absence = absences(taped.tape)["b"]
    assert absence.why is AbsenceReason.REFUSED
    assert absence.detail == "future_version: trained on version 7, the newest is 0"


def kept_out(until_s, *more):
    """A round opens at 20 s without an answer from ``b``, which is quarantined from 10 s on."""
    tape = [{"tape": 8, "now_s": 0.0, "config": {"dead_after_s": 100.0}, "record": None}]
    for island in "ab":
        tape.append(note(1.0, "island.joined", island=island, incarnation=1))
        tape.append(heartbeat(1.1, island))
    tape.append(note(10.0, "island.quarantined", island="b", reason="implausible", for_s=until_s - 10.0))
    merged = {"island": "a", "steps": [0, 4], "fresh": True}
    committed = {"fragment": 0, "version": 1, "round": 5, "contributions": [merged]}
    return [
        *tape,
        *more,
        note(20.0, "round.opened", round=5, fragment=0, asked=2, held=0, flush=False),
        note(23.0, "round.closed", round=5, fragment=0, reason="timeout", missing=["b"]),
        note(23.0, "version.committed", **committed),
    ]


def heartbeat(now_s, island, incarnation=1):
    said = {"sender": island, "incarnation": incarnation, "kind": "heartbeat", "body": {"versions": [0]}}
    return {"now_s": now_s, "event": "received", **said}


@pytest.mark.parametrize("lives", [1, 2])
@pytest.mark.parametrize(("until_s", "reason"), [(40.0, AbsenceReason.QUARANTINED), (15.0, AbsenceReason.SILENT)])
def test_an_island_is_kept_out_until_its_time_is_over_whatever_lives_it_begins(until_s, reason, lives):
    again = [note(12.0, "island.joined", island="b", incarnation=2), heartbeat(12.1, "b", 2)]
    assert why(kept_out(until_s, *again[: 2 * lives - 2]))["b"] is reason


def test_another_shard_knows_islands_by_the_roster_alone():
    enrolled = [{"island_id": each, "incarnation": 1, "left": each == "c"} for each in "abc"]
    roster = {"sender": "aggregator", "incarnation": 1, "kind": "roster", "body": {"members": enrolled}}
    tape = [line for line in kept_out(15.0) if line.get("note") != "island.joined"]
    assert why(tape)["b"] is AbsenceReason.SILENT  # the closing itself names who did not answer
    tape.insert(1, {"now_s": 1.0, "event": "received", **roster})
    assert why(tape) == {"b": AbsenceReason.SILENT, "c": AbsenceReason.LEFT}


def test_why_an_islands_tokens_weigh_less_is_said_beside_its_weight():
    said = "b claims 40 tokens a step, 4.0 times the fleet's 10: weighs as 20"
    before = kept_out(10.0)
    at = next(n for n, line in enumerate(before) if line.get("note") == "round.opened")
    for more, doubted in ([], said), ([note(16.0, "island.believed", island="b")], ""):
        tape = [*before[:at], note(15.0, "island.doubted", island="b", detail=said), *more, *before[at:]]
        teller = Storyteller(Target(fragment=0))
        for line in tape:
            teller.take(line)
        assert teller.found.doubted.get("b", "") == doubted


def test_a_refusal_at_the_closing_of_another_round_is_not_of_this_one():
    came = {"sender": "b", "incarnation": 1, "kind": "contribution", "body": {"round_id": 5, "fragment_id": 0}}
    tape = [
        *kept_out(15.0),
        note(19.0, "round.opened", round=4, fragment=1, asked=2, held=0, flush=False),
        {"now_s": 21.0, "event": "received", **came},
        note(21.0, "contribution.refused", island="b", fragment=1, reason="outlier"),
    ]
    assert why(sorted(tape, key=lambda line: line["now_s"]))["b"] is AbsenceReason.SILENT


def test_a_quarantine_outlasts_a_restart_of_the_aggregator():
    members = {each: [n, "", 1, each, 10, False, [0, 0], True] for n, each in enumerate("ab")}
    record = {"members": members, "quarantine": {"b": [0, 1, 30.0, "outlier", 0]}}
    begins = {"tape": 8, "now_s": 15.0, "config": {}, "record": record}
    beats = [heartbeat(19.0, island) for island in "ab"]
    assert absences(kept_out(11.0, begins, *beats))["b"].detail == "outlier"


def test_what_did_not_fit_is_to_be_sent_again():
    taped = opened("a", "b", held_bytes=300, islands=1)
    taped.hand_over("a", 1)
    taped.hand_over("b", 1)
    absence = absences(taped.tape, fragment=0, version=1)["b"]
    assert absence.why is AbsenceReason.RETRY
    assert absence.detail.startswith("queue_full: 256 bytes do not fit")


def test_who_left_and_who_died_were_not_asked():
    taped = fleet("a", "b", "c")
    taped.say("b", m.Leave(inner_step=0, tokens=0, reason="maintenance"))
    silence(taped, 8, "a", step=1)
    taped.round(1, "a")
    found = absences(taped.tape)
    assert (found["b"].why, found["b"].detail) == (AbsenceReason.LEFT, "maintenance")
    assert found["c"].why is AbsenceReason.DEAD
    assert "silent for 8." in found["c"].detail


def test_who_came_after_the_opening_or_holds_nothing_yet_was_not_asked():
    taped = fleet("a")
    taped.join("b")
    taped.report(STEPS_PER_ROUND, "a")
    taped.join("c")
    taped.hand_over("a", 1)
    found = why(taped.tape, round_id=taped.commits[0].round_id)
    assert found == {"b": AbsenceReason.NOT_READY, "c": AbsenceReason.NOT_JOINED}


def test_an_island_that_missed_two_rounds_is_not_waited_for():
    taped = fleet("a", "b")
    for number in (1, 2):
        taped.report(STEPS_PER_ROUND * number, "a", "b")
        taped.hand_over("a", number)
        silence(taped, 2, "a", "b", step=STEPS_PER_ROUND * number)
    taped.report(STEPS_PER_ROUND * 3, "a", "b")
    taped.hand_over("a", 3)
    assert why(taped.tape, fragment=0, version=3) == {"b": AbsenceReason.UNRESPONSIVE}
    assert why(taped.tape, fragment=0, version=2) == {"b": AbsenceReason.SILENT}


def test_a_round_that_was_cancelled_is_told_of_by_its_id():
    taped = opened("a", "b")
    round_id = taped.round_id
    silence(taped, 2, "a", "b", step=STEPS_PER_ROUND)
    assert set(why(taped.tape, round_id=round_id).values()) == {AbsenceReason.UNRESPONSIVE}


# --- the command ----------------------------------------------------------------------------------------------------


def explained_by(capsys, *words, status=0):
    """What the command says, on the stream on which it says it."""
    assert cli.main(["explain", *map(str, words)]) == status
    said = capsys.readouterr()
    return said.err if status else said.out


@pytest.fixture
def run_dir(tmp_path):
    """The directory of a run with two versions, whose second one is not on the tape any more."""
    taped = fleet("a", "b")
    taped.round(1, "a", "b")
    rows = [ledger_line(taped.commits[0])]
    known = len(taped.tape)
    taped.round(2, "a", "b")
    rows.append(ledger_line(taped.commits[0]))
    (tmp_path / "store").mkdir()
    for path, lines in ((tmp_path / "events.jsonl", taped.tape[:known]), (tmp_path / "store" / "ledger.jsonl", rows)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_the_command_shows_weights_and_staleness_as_text_and_as_json(run_dir, capsys):
    said = explained_by(capsys, "0:1", run_dir)
    assert "version 1 of fragment 0: 2 islands, 80 tokens" in said
    assert "closed" in said
    assert [line.split() for line in said.splitlines() if line.startswith(("a ", "b "))] == [
        [island, "0-4", "40", "50.0%", "0.00", "f32", "-", "fresh"] for island in "ab"
    ]
    assert "every island that was known is in it" in said
    found = json.loads(explained_by(capsys, "0:1", run_dir, "--json"))
    assert (found["fragment"], found["version"], found["absent"]) == (0, 1, [])
    contributors = [(each["island"], each["share"], each["fresh"]) for each in found["contributors"]]
    assert contributors == [("a", 0.5, True), ("b", 0.5, True)]


def test_a_ledger_by_itself_and_a_tape_by_itself_are_enough_and_what_the_tape_lost_is_said(run_dir, capsys):
    for words in (("0", run_dir), ("0:2", run_dir / "store")):
        said = explained_by(capsys, *words)
        assert "version 2 of fragment 0" in said
        assert "why others are not in it is not known" in said
        assert said.count("50.0%") == 2
    (run_dir / "store" / "ledger.jsonl").unlink()
    assert explained_by(capsys, "0:1", run_dir).count("50.0%") == 2


@pytest.mark.parametrize("line", ['{"a": 1}', '{"fragment_id": 0, "fragment_version": 2}', "[]", "no JSON"])
def test_a_line_of_the_ledger_that_is_none_is_passed_over(run_dir, capsys, line):
    ledger = run_dir / "store" / "ledger.jsonl"
    first, _ = ledger.read_text().splitlines()
    ledger.write_text(f"{line}\n{first}\n")
    assert "version 1 of fragment 0: 2 islands" in explained_by(capsys, "0", run_dir)
    assert "knows no 0:7: the newest are 0:1" in explained_by(capsys, "0:7", run_dir, status=1)


def test_a_new_lineage_is_said_where_it_begins_and_where_it_went_back(run_dir, capsys):
    ledger = run_dir / "store" / "ledger.jsonl"
    first = json.loads(ledger.read_text().splitlines()[0])
    begun = first | {"fragment_version": 5, "epoch": 3, "contributions": []}
    ledger.write_text(ledger.read_text() + json.dumps(begun) + "\n")
    said = explained_by(capsys, "0", run_dir)
    assert "version 5 of fragment 0 begins a new lineage: it is version 1 under a number that nobody had seen" in said
    assert "given up: 2, 3, 4;" in said
    said = explained_by(capsys, "0:2", run_dir)
    assert "it was given up: a new lineage began with version 5, which is version 1 again" in said
    assert "what was merged into it is counted as store_lost" in said
    with (run_dir / "events.jsonl").open("a") as tape:
        tape.write(json.dumps(note(9.0, "run.rolled_back", versions=[5, 2])) + "\n")
    assert "what was merged into it is counted as rolled_back" in explained_by(capsys, "0:2", run_dir)
    assert "lineage" not in explained_by(capsys, "0:1", run_dir)


@pytest.mark.parametrize("text", ["x", "1:", "1:x", ":4", "round:", "round"])
def test_what_names_no_version_is_refused(text):
    with pytest.raises(ConfigError, match="must be FRAGMENT:VERSION"):
        explain.target_of(text)


def test_a_directory_without_a_run_is_refused(tmp_path, capsys):
    assert "must be the directory of a run or a store" in explained_by(capsys, "0:1", tmp_path, status=2)


# --- from what Redis keeps --------------------------------------------------------------------------------------------


class Kept:
    """A reader that has one version, as a registry or a broker would give it."""

    run_id = "demo"

    def __init__(self, found, known=()):
        self.found, self.known = found, known

    async def read_version(self, fragment_id, version):
        return KeptVersion(fragment_id=fragment_id, found=self.found, known=self.known)


def committed(taped):
    """What is noted of the newest version on a tape."""
    return [line["fields"] for line in taped.tape if line.get("note") == "version.committed"][-1]


def kept_version(taped, **changes):
    """What the aggregator's reporter keeps of the newest version on a tape."""
    reporter = Reporter(None, collect=None, lease=None, holder="h", clock=lambda: 0.0)
    reporter.committed(committed(taped))
    (row,) = reporter._versions
    return json.loads(json.dumps(row)) | {"epoch": 1} | changes


def explained(found, target, known=()):
    return asyncio.run(explain.explain_from(Kept(found, known), target))


def test_redis_tells_who_is_in_a_version_and_who_was_waited_for_in_vain():
    taped = opened("a", "b", "c")
    taped.hand_over("a", 1)
    taped.hand_over("b", 1)
    silence(taped, 2, "a", "b", "c", step=STEPS_PER_ROUND)
    found = explained(kept_version(taped), Target(fragment=0, version=1))
    assert (found.fragment, found.version, found.epoch, found.from_redis) == (0, 1, 1, True)
    assert [each.island for each in found.contributors] == ["a", "b"]
    assert [(each.island, each.why) for each in found.absent] == [("c", AbsenceReason.SILENT)]
    assert "why somebody is not in it says the event tape" in render(found)
    assert "every island that was known is in it" not in render(found)


def test_what_an_island_agrees_by_and_weighs_is_told_from_redis_and_from_a_tape(tmp_path, capsys):
    taped = fleet("a", "b", "c")
    taped.momentum_cosine = 0.4
    taped.cosines = lambda merge: (0.3, 0.01, 0.02) if len(merge.compared) == 3 else ()
    for number in range(1, 7):
        taped.round(number, "a", "b", "c")
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in taped.tape))
    for said in (render(explained(kept_version(taped), Target(fragment=0))), explained_by(capsys, "0:6", tmp_path)):
        assert "directions: agreement 0.30, 0.40 of successive moves" in said
        cells = {line.split()[0]: line.split(maxsplit=7) for line in said.splitlines() if "fresh" in line}
        assert cells["a"][6:] == ["0.30", "fresh"]
        assert cells["c"][6] == "0.02"
        assert cells["c"][7].startswith("fresh; agrees 0.02 of 0.30 usual; weighs ")
        assert cells["c"][7].endswith("% of its tokens' worth")


def test_of_a_large_fleet_the_heaviest_contributions_are_kept_in_their_order(monkeypatch):
    monkeypatch.setattr("aggregator.process.reporter.MAX_CONTRIBUTIONS", 2)
    taped = fleet("a", "b", "c")
    taped.round(1, "a", "b", "c")
    for each, weight in zip(committed(taped)["contributions"], (0.2, 0.1, 0.7), strict=True):
        each["merge_weight"] = weight
    kept = kept_version(taped)
    assert [each["merge_weight"] for each in kept["contributions"]] == [0.2, 0.7]
    assert "1 lighter contributions are not listed" in render(explained(kept, Target(fragment=0)))


def test_what_redis_has_not_or_not_any_more_or_holds_of_others_is_said():
    with pytest.raises(Unavailable, match="knows no version 0:9 of run demo: of fragment 0 it has 3 to 5"):
        explained(None, Target(fragment=0, version=9), (3, 4, 5))
    with pytest.raises(Unavailable, match="no version of fragment 2 that anybody contributed to"):
        explained(None, Target(fragment=2))
    with pytest.raises(ConfigError, match="known to the run's directory alone"):
        explained(None, Target(round_id=3))
    taped = fleet("a")
    taped.round(1, "a")
    for spoilt in ({"round": 3}, kept_version(taped, contributions=[3]), kept_version(taped, missing=3)):
        with pytest.raises(Unavailable, match="is not ours"):
            explained(spoilt, Target(fragment=0))
