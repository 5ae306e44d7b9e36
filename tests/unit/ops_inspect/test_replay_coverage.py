"""What a replay could not check is counted, said, and no success: a gap in a tape must not hide what was changed."""

import copy
import json
import re
from dataclasses import replace

import pytest

from aggregator.rounds.recovery import renumbered
from aggregator.state.records import ledger_line
from ops import cli
from ops.inspect.replay import skipped_versions
from ops.inspect.replay_result import Coverage, PartReason
from tests.taped import STEPS_PER_ROUND, Taped
from tests.unit.ops_inspect.test_replay import played


class Recorded:
    """Three lives of an aggregator, two rounds each; its tape, and its ledger."""

    def __init__(self, **settings):
        self.ledger, self.begins = [], []
        self.tape, self.record, self.commits = [], None, {}
        for life in range(3):
            self.begins.append(len(self.tape))
            taped = Taped(tape=self.tape, record=self.record, commits=self.commits, now_s=50.0 * life, **settings)
            if life == 0:
                taped.gather("a", "b")
                self.ledger.append(ledger_line(taped.commits[0]))
            else:
                taped.report(STEPS_PER_ROUND * 2 * life, "a", "b")
            for number in (2 * life + 1, 2 * life + 2):
                taped.round(number, "a", "b")
                self.ledger.append(ledger_line(taped.commits[0]))
            self.record, self.commits = taped.record, taped.commits

    def write(self, run_dir, *, tape=None, ledger=None):
        """Writes both as a run leaves them; a line of the tape that is None is one that a crash cut short."""
        (run_dir / "store").mkdir(parents=True, exist_ok=True)
        lines = ['{"now_s": 1' if line is None else json.dumps(line) for line in (self.tape if tape is None else tape)]
        (run_dir / "events.jsonl").write_text("".join(line + "\n" for line in lines))
        rows = self.ledger if ledger is None else ledger
        (run_dir / "store" / "ledger.jsonl").write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
        return run_dir

    def cut(self, life, *, after_version):
        """The tape without the end of a life: all from the closing of the round after this version on."""
        end = self.begins[life + 1] if life < 2 else len(self.tape)
        cut = next(
            n
            for n in range(self.begins[life], end)
            if self.tape[n].get("event") == "computed" and self.tape[n]["fragment_version"] > after_version
        )
        return [*self.tape[:cut], *self.tape[end:]]


@pytest.fixture(scope="module")
def recorded():
    return Recorded()


def replayed(capsys, run_dir, *flags):
    """Returns the exit status of ``atoll replay`` and what it printed, as JSON."""
    status = cli.main(["replay", str(run_dir), "--json", *flags])
    return status, json.loads(capsys.readouterr().out)


def difference(found):
    return found["tapes"][0]["difference"]["what"]


def test_a_tape_that_tells_everything_is_a_success(recorded, tmp_path, capsys):
    status, found = replayed(capsys, recorded.write(tmp_path))
    assert (status, found["same"], found["complete"]) == (0, True, True)
    assert (found["coverage"]["versions"], found["coverage"]["checked"]) == (7, 7)
    assert cli.main(["replay", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("checked 7 of 7 versions\nthe replay agrees with the tape\n")


@pytest.mark.parametrize(("life", "reason"), [(0, PartReason.CRASH), (1, PartReason.CRASH), (2, PartReason.NO_TAPE)])
def test_versions_that_only_the_ledger_has_are_counted_and_no_success_unless_told(
    recorded, tmp_path, capsys, life, reason
):
    run_dir = recorded.write(tmp_path, tape=recorded.cut(life, after_version=2 * life))
    status, found = replayed(capsys, run_dir)
    assert (status, found["same"], found["complete"]) == (1, True, False)
    assert (found["coverage"]["versions"], found["coverage"]["checked"]) == (7, 5)
    assert found["coverage"]["unchecked"] == {reason: 2}
    assert replayed(capsys, run_dir, "--allow-missing")[0] == 0
    assert cli.main(["replay", str(run_dir)]) == 1
    said = capsys.readouterr().out
    assert f"checked 5 of 7 versions; 2 could not be: made {reason}" in said
    assert "INCOMPLETE" in said


def until_the_last_commit(tape):
    """The tape of an aggregator that was stopped while it wrote the last version."""
    return tape[: max(n for n, line in enumerate(tape) if line.get("event") == "persisted")]


@pytest.mark.parametrize(("digest", "counted"), [({}, (0, True, 7)), ({"digest": "0" * 32}, (1, False, 6))])
def test_a_version_that_was_being_written_when_the_run_was_stopped_is_checked_if_it_is_the_one_that_was_ordered(
    recorded, tmp_path, capsys, digest, counted
):
    ledger = [*recorded.ledger[:-1], recorded.ledger[-1] | digest]
    run_dir = recorded.write(tmp_path, tape=until_the_last_commit(recorded.tape), ledger=ledger)
    status, found = replayed(capsys, run_dir)
    assert (status, found["complete"], found["coverage"]["checked"]) == counted


@pytest.mark.parametrize("life", [0, 2])
def test_versions_behind_a_gap_of_the_tape_are_counted_whichever_life_it_is_in(recorded, tmp_path, capsys, life):
    tape, at = list(recorded.tape), recorded.begins[life] + 5
    tape[at : at + 2] = [{"gap": 2}]
    status, found = replayed(capsys, recorded.write(tmp_path, tape=tape))
    expected = 3 if life == 0 else 2
    assert (status, found["coverage"]["missing_lines"]) == (1, 2)
    assert found["coverage"]["unchecked"] == {PartReason.GAP: expected}
    assert found["tapes"][0]["counts"]["unfollowed"] == expected


def test_a_line_that_was_cut_short_is_a_missing_line(recorded, tmp_path, capsys):
    second = recorded.begins[1]
    run_dir = recorded.write(tmp_path, tape=[*recorded.tape[:second], None, *recorded.tape[second:]])
    status, found = replayed(capsys, run_dir)
    assert (status, found["same"], found["coverage"]["missing_lines"]) == (1, True, 1)


@pytest.mark.parametrize("flags", [(), ("--allow-missing",)])
def test_a_replay_that_checked_nothing_is_never_a_success(recorded, tmp_path, capsys, flags):
    status, found = replayed(capsys, recorded.write(tmp_path, tape=[]), *flags)
    assert (status, found["coverage"]["checked"], found["coverage"]["versions"]) == (1, 0, 7)
    recorded.write(tmp_path, tape=[], ledger=[])
    assert replayed(capsys, tmp_path, *flags)[0] == 1


def test_a_run_that_made_no_version_yet_is_a_success(recorded, tmp_path, capsys):
    status, found = replayed(capsys, recorded.write(tmp_path, tape=recorded.tape[:3], ledger=[]))
    assert (status, found["coverage"]["versions"]) == (0, 0)


def test_recordings_that_should_be_there_and_are_not_are_no_success(tmp_path, capsys):
    status, found = replayed(capsys, Recorded(record_payloads=True).write(tmp_path))
    assert (status, found["same"], found["coverage"]["missing_recordings"]) == (1, True, 6)


# --- tampering where the tape does not tell ---------------------------------------------------------------------


def without_line(version):
    return lambda ledger: ledger.pop(version)


def other_weight(version):
    return lambda ledger: ledger[version]["contributions"][0].update(merge_weight=1.0)


@pytest.mark.parametrize(
    ("tamper", "what"),
    [
        (without_line(1), "has no line for version 1 of fragment 0"),
        (without_line(2), "has no line for version 2 of fragment 0"),
        (other_weight(1), r"^line 2 of .*its other weights give"),
        (other_weight(2), r"^line 3 of .*is not what the tape says"),
    ],
)
def test_a_ledger_that_was_changed_is_noticed_behind_a_gap(recorded, tmp_path, capsys, tamper, what):
    ledger = copy.deepcopy(recorded.ledger)
    tamper(ledger)
    run_dir = recorded.write(tmp_path, tape=recorded.cut(0, after_version=0), ledger=ledger)
    status, found = replayed(capsys, run_dir, "--allow-missing")
    assert status == 1
    assert re.search(what, difference(found))


@pytest.mark.parametrize("broken", [{"a": 1}, {"fragment_id": "0"}])
def test_a_line_of_the_ledger_that_nobody_writes_is_named(recorded, tmp_path, capsys, broken):
    first, second, *others = recorded.ledger
    ledger = [first, broken if "a" in broken else second | broken, *others]
    status, found = replayed(capsys, recorded.write(tmp_path, ledger=ledger))
    assert status == 1
    assert re.search("line 2 of .*is nothing that an aggregator writes", str(found))


def test_a_digest_that_was_changed_in_the_ledger_is_noticed_behind_a_gap_that_left_its_note(recorded, tmp_path, capsys):
    first, second, *others = recorded.ledger
    tape = [*recorded.tape[:5], {"gap": 2}, *recorded.tape[7:]]
    ledger = [first, second | {"digest": "another"}, *others]
    status, found = replayed(capsys, recorded.write(tmp_path, tape=tape, ledger=ledger))
    assert status == 1
    assert re.search("line 2 of .*has another digest than the tape says", difference(found))


# --- lives that begin with less, or with other numbers ----------------------------------------------------------


def test_a_life_that_begins_with_an_empty_store_may_do_nothing_but_wait(recorded):
    tape = copy.deepcopy(recorded.tape[: recorded.begins[1]])
    life = Taped(tape=tape, record=None, commits={}, now_s=500.0)
    assert played(tape)[1] is None
    life.gather("a", "b")  # it seeds the run anew
    _, found = played(tape)
    assert found.line == recorded.begins[1] + 1
    assert found.what == "this life begins with no version of fragment 0, and version 2 was durable"


def test_a_life_between_that_made_nothing_leaves_no_version_unexplained(recorded):
    _, second, third = recorded.begins
    tape = [*recorded.tape[:second], recorded.tape[second] | {"now_s": 40.0}, *recorded.tape[second:third]]
    replay, found = played(tape)
    assert found is None
    assert (replay.counts.lives, replay.counts.unwitnessed, replay.counts.versions) == (3, 0, 5)


def lineage(recorded, *, digest=None, stopped=False, above=2):
    """The first life's tape, after which version 1 goes on above another, since version 2 was lost; and its line."""
    tape = copy.deepcopy(recorded.tape[: recorded.begins[1]])
    if stopped:
        tape = until_the_last_commit(tape)
    commit = replace(recorded.commits[0], fragment_version=1, digest=digest or recorded.ledger[1]["digest"])
    record = recorded.tape[recorded.begins[1]]["record"]
    life = Taped(tape=tape, record=record, commits={0: renumbered(commit, above, 2)}, now_s=500.0)
    return tape, ledger_line(life.commits[0])


def test_a_new_lineage_is_no_gap(recorded, tmp_path, capsys):
    tape, row = lineage(recorded)
    replay, found = played(tape)
    assert found is None
    assert (replay.counts.unwitnessed, replay.given_up) == (0, {(0, 2)})
    assert (0, 3) in replay.durable
    for kept in (recorded.ledger[:3], recorded.ledger[:2]):  # the same store, or an old copy of it
        status, found = replayed(capsys, recorded.write(tmp_path, tape=tape, ledger=[*kept, row]))
        assert (status, found["same"], found["complete"]) == (0, True, True)


@pytest.mark.parametrize("who", ["standby-1", "aggregator-1"])
def test_a_new_lineage_is_no_gap_beside_the_ledger_of_a_standby_that_came_later_or_of_another_shard(
    recorded, tmp_path, capsys, who
):
    tape, row = lineage(recorded)
    run_dir = recorded.write(tmp_path, tape=tape, ledger=[*recorded.ledger[:2], row])
    rows = [row] if who == "standby-1" else [row | {"fragment_id": 1, "fragment_version": v} for v in (0, 5)]
    recorded.write(tmp_path / who, tape=[], ledger=rows)
    status, found = replayed(capsys, run_dir, "--allow-missing")
    assert [each["difference"] for each in found["tapes"]] == [None, None]
    assert (status, found["same"]) == (0, True)


@pytest.mark.parametrize(
    ("above", "kept", "checked"),
    [
        pytest.param(2, 3, 4, id="it is on the disk"),
        pytest.param(1, 2, 3, id="it never came there, and the lineage has its number"),
    ],
)
def test_a_version_that_was_being_written_before_a_new_lineage_is_checked_or_nothing_missing(
    recorded, tmp_path, capsys, above, kept, checked
):
    tape, row = lineage(recorded, stopped=True, above=above)
    status, found = replayed(capsys, recorded.write(tmp_path, tape=tape, ledger=[*recorded.ledger[:kept], row]))
    assert (status, found["complete"], found["coverage"]["checked"]) == (0, True, checked)


def test_a_lineage_that_goes_on_from_a_version_that_was_being_written_says_that_it_was_written(
    recorded, tmp_path, capsys
):
    """As a restore leaves it, whose copy of the tape ended a moment before that of the store."""
    tape, row = lineage(recorded, digest=recorded.ledger[2]["digest"], stopped=True, above=9)
    status, found = replayed(capsys, recorded.write(tmp_path, tape=tape, ledger=[*recorded.ledger[:3], row]))
    assert (status, found["same"], found["coverage"]["checked"]) == (0, True, 4)


def test_a_new_lineage_of_bytes_that_nobody_made_is_not_checked(recorded, tmp_path, capsys):
    tape, row = lineage(recorded, digest="invented")
    status, found = replayed(capsys, recorded.write(tmp_path, tape=tape, ledger=[*recorded.ledger[:3], row]))
    assert (status, found["complete"], found["coverage"]["unchecked"]) == (1, False, {PartReason.CRASH: 1})


# --- sums -------------------------------------------------------------------------------------------------------


def test_what_one_tape_does_not_tell_another_may():
    missing = PartReason.NO_TAPE
    first = Coverage(checked={(0, 0), (0, 1)}, unchecked={(0, 2): missing, (0, 3): missing}, lives=1)
    second = Coverage(checked={(0, 2)}, unchecked={(0, 1): PartReason.CRASH}, lives=1)
    covered = Coverage.added([first, second, Coverage()])
    assert (covered.versions, len(covered.checked), covered.reasons()) == (4, 3, {missing: 1})
    assert not covered.complete


def test_only_a_new_lineage_is_made_from_no_version():
    known = {(0, 0), (0, 1), (0, 3), (1, 0), (1, 5)}
    assert skipped_versions(known, []) == [(0, 2), (1, 4)]
    assert skipped_versions(known, [(1, 5)]) == [(0, 2)]
