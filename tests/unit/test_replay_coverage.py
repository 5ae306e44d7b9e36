"""What a replay could not check is counted, said, and no success: a gap in a tape must not hide what was changed."""

import copy
import json
from dataclasses import replace

import pytest

from aggregator.rounds.recovery import renumbered
from aggregator.state.records import ledger_line
from ops import cli
from ops.inspect.replay import misweighted, skipped_versions
from ops.inspect.replay_core import Replay
from ops.inspect.replay_result import Coverage, PartReason
from tests.taped import STEPS_PER_ROUND, Taped


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
                taped.beat(STEPS_PER_ROUND * 2 * life, "a", "b")
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


@pytest.mark.parametrize("life", [0, 1])
def test_versions_of_the_moments_before_a_crash_are_counted_and_no_success_unless_told(
    recorded, tmp_path, capsys, life
):
    run_dir = recorded.write(tmp_path, tape=recorded.cut(life, after_version=2 * life))
    status, found = replayed(capsys, run_dir)
    assert (status, found["same"], found["complete"]) == (1, True, False)
    assert (found["coverage"]["versions"], found["coverage"]["checked"]) == (7, 5)
    assert found["coverage"]["unchecked"] == {PartReason.CRASH: 2}
    assert replayed(capsys, run_dir, "--allow-missing")[0] == 0
    assert cli.main(["replay", str(run_dir)]) == 1
    said = capsys.readouterr().out
    assert f"checked 5 of 7 versions; 2 could not be: made {PartReason.CRASH}" in said
    assert "INCOMPLETE" in said


def test_the_last_versions_of_a_run_that_only_its_ledger_has_are_counted_too(recorded, tmp_path, capsys):
    status, found = replayed(capsys, recorded.write(tmp_path, tape=recorded.cut(2, after_version=4)))
    assert (status, found["coverage"]["unchecked"]) == (1, {PartReason.NO_TAPE: 2})


def until_the_last_commit(recorded):
    """The tape of an aggregator that was stopped while it wrote the last version."""
    last = max(n for n, line in enumerate(recorded.tape) if line.get("event") == "persisted")
    return recorded.tape[:last]


def test_a_version_that_was_being_written_when_the_run_was_stopped_is_checked(recorded, tmp_path, capsys):
    status, found = replayed(capsys, recorded.write(tmp_path, tape=until_the_last_commit(recorded)))
    assert (status, found["complete"], found["coverage"]["checked"]) == (0, True, 7)


def test_a_line_that_is_not_of_the_commit_that_was_ordered_last_is_not_taken_for_it(recorded, tmp_path, capsys):
    ledger = copy.deepcopy(recorded.ledger)
    ledger[-1]["digest"] = "0" * 32
    run_dir = recorded.write(tmp_path, tape=until_the_last_commit(recorded), ledger=ledger)
    status, found = replayed(capsys, run_dir)
    assert (status, found["coverage"]["checked"]) == (1, 6)


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


@pytest.mark.parametrize("version", [1, 2])
def test_a_line_that_was_removed_from_the_ledger_is_noticed_behind_a_gap(recorded, tmp_path, capsys, version):
    ledger = [row for row in recorded.ledger if row["fragment_version"] != version]
    run_dir = recorded.write(tmp_path, tape=recorded.cut(0, after_version=0), ledger=ledger)
    status, found = replayed(capsys, run_dir, "--allow-missing")
    assert status == 1
    assert f"has no line for version {version} of fragment 0" in difference(found)


@pytest.mark.parametrize(("version", "what"), [(1, "its other weights give"), (2, "is not what the tape says")])
def test_a_weight_that_was_changed_in_the_ledger_is_noticed_behind_a_gap(recorded, tmp_path, capsys, version, what):
    ledger = copy.deepcopy(recorded.ledger)
    ledger[version]["contributions"][0]["merge_weight"] *= 2
    run_dir = recorded.write(tmp_path, tape=recorded.cut(0, after_version=0), ledger=ledger)
    status, found = replayed(capsys, run_dir, "--allow-missing")
    assert status == 1
    assert difference(found).startswith(f"line {version + 1} of ")
    assert what in difference(found)


@pytest.mark.parametrize("broken", [{"a": 1}, {"fragment_id": "0"}])
def test_a_line_of_the_ledger_that_nobody_writes_is_named(recorded, tmp_path, capsys, broken):
    ledger = copy.deepcopy(recorded.ledger)
    ledger[1] = broken if "a" in broken else ledger[1] | broken
    status, found = replayed(capsys, recorded.write(tmp_path, ledger=ledger))
    assert status == 1
    assert "line 2 of" in str(found)
    assert "is nothing that an aggregator writes" in str(found)


def test_a_digest_that_was_changed_in_the_ledger_is_noticed_behind_a_gap_that_left_its_note(recorded, tmp_path, capsys):
    tape, ledger = list(recorded.tape), copy.deepcopy(recorded.ledger)
    tape[5:7] = [{"gap": 2}]
    ledger[1]["digest"] = "another"
    status, found = replayed(capsys, recorded.write(tmp_path, tape=tape, ledger=ledger))
    assert status == 1
    assert "line 2 of" in difference(found)
    assert "has another digest than the tape says" in difference(found)


# --- lives that begin with less, or with other numbers ----------------------------------------------------------


def played(lines):
    replay = Replay()
    for number, line in enumerate(lines, start=1):
        found = replay.take(number, line)
        if found is not None:
            return replay, found
    return replay, None


def behind(recorded, commits):
    """The first life's tape, and one whose store went back to these commits, behind which its peers are ahead."""
    tape = copy.deepcopy(recorded.tape[: recorded.begins[1]])
    life = Taped(tape=tape, record=recorded.record, commits=commits, now_s=500.0)
    return tape, life


def test_a_life_that_begins_with_an_empty_store_may_do_nothing_but_wait(recorded):
    tape = copy.deepcopy(recorded.tape[: recorded.begins[1]])
    life = Taped(tape=tape, record=None, commits={}, now_s=500.0)
    assert played(tape)[1] is None
    life.gather("a", "b")  # it seeds the run anew
    _, found = played(tape)
    assert found.line == recorded.begins[1] + 1
    assert found.what == "this life begins with no version of fragment 0, and version 2 was durable"


def test_a_life_between_that_made_nothing_leaves_no_version_unexplained(recorded):
    begins = recorded.begins
    idle = copy.deepcopy(recorded.tape[begins[1]])
    idle["now_s"] = 40.0
    tape = [*recorded.tape[: begins[1]], idle]
    life = Taped(tape=copy.deepcopy(tape), record=idle["record"], commits={}, now_s=45.0)
    assert life.tape[: len(tape)] == tape
    replay, found = played([*tape, *recorded.tape[begins[1] : begins[2]]])
    assert found is None
    assert (replay.counts.lives, replay.counts.unwitnessed, replay.counts.versions) == (3, 0, 5)


def lineage(recorded, *, digest):
    """The first life's tape, after which version 1 goes on as version 3, since version 2 was lost."""
    tape = copy.deepcopy(recorded.tape[: recorded.begins[1]])
    start = copy.deepcopy(recorded.tape[recorded.begins[1]])
    commit = replace(recorded.commits[0], fragment_version=1, digest=digest)
    life = Taped(tape=tape, record=start["record"], commits={0: renumbered(commit, 2, 2)}, now_s=500.0)
    return tape, ledger_line(life.commits[0])


def test_a_new_lineage_is_no_gap(recorded, tmp_path, capsys):
    tape, row = lineage(recorded, digest=recorded.ledger[1]["digest"])
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
    tape, row = lineage(recorded, digest=recorded.ledger[1]["digest"])
    run_dir = recorded.write(tmp_path, tape=tape, ledger=[*recorded.ledger[:2], row])
    rows = [row] if who == "standby-1" else [row | {"fragment_id": 1, "fragment_version": v} for v in (0, 5)]
    recorded.write(tmp_path / who, tape=[], ledger=rows)
    status, found = replayed(capsys, run_dir, "--allow-missing")
    assert [each["difference"] for each in found["tapes"]] == [None, None]
    assert (status, found["same"]) == (0, True)


def test_a_version_that_was_being_written_before_a_new_lineage_is_checked_too(recorded, tmp_path, capsys):
    tape, row = lineage(recorded, digest=recorded.ledger[1]["digest"])
    end = recorded.begins[1]
    last = max(n for n, line in enumerate(tape[:end]) if line.get("event") == "persisted")
    run_dir = recorded.write(tmp_path, tape=[*tape[:last], *tape[end:]], ledger=[*recorded.ledger[:3], row])
    status, found = replayed(capsys, run_dir)
    assert (status, found["complete"], found["coverage"]["checked"]) == (0, True, 4)


def test_a_version_that_never_came_to_the_disk_before_a_new_lineage_with_its_number_is_nothing_missing(
    recorded, tmp_path, capsys
):
    tape, _ = lineage(recorded, digest=recorded.ledger[1]["digest"])
    end = recorded.begins[1]
    last = max(n for n, line in enumerate(tape[:end]) if line.get("event") == "persisted")
    start = copy.deepcopy(tape[end])
    commit = replace(recorded.commits[0], fragment_version=1, digest=recorded.ledger[1]["digest"])
    again = Taped(tape=tape[:last], record=start["record"], commits={0: renumbered(commit, 1, 2)}, now_s=500.0)
    run_dir = recorded.write(tmp_path, tape=again.tape, ledger=[*recorded.ledger[:2], ledger_line(again.commits[0])])
    status, found = replayed(capsys, run_dir)
    assert (status, found["complete"], found["coverage"]["checked"]) == (0, True, 3)


def test_a_new_lineage_of_bytes_that_nobody_made_is_not_checked(recorded, tmp_path, capsys):
    tape, row = lineage(recorded, digest="invented")
    status, found = replayed(capsys, recorded.write(tmp_path, tape=tape, ledger=[*recorded.ledger[:3], row]))
    assert (status, found["complete"], found["coverage"]["unchecked"]) == (1, False, {PartReason.CRASH: 1})


# --- sums -------------------------------------------------------------------------------------------------------


def test_what_one_tape_does_not_tell_another_may():
    first = Coverage(
        checked={(0, 0), (0, 1)}, unchecked={(0, 2): PartReason.NO_TAPE, (0, 3): PartReason.NO_TAPE}, lives=1
    )
    second = Coverage(checked={(0, 2)}, unchecked={(0, 1): PartReason.CRASH}, lives=1)
    covered = Coverage.added([first, second, Coverage()])
    assert (covered.versions, len(covered.checked), covered.reasons()) == (4, 3, {PartReason.NO_TAPE: 1})
    assert not covered.complete


def test_only_a_new_lineage_is_made_from_no_version():
    known = {(0, 0), (0, 1), (0, 3), (1, 0), (1, 5)}
    assert skipped_versions(known, []) == [(0, 2), (1, 4)]
    assert skipped_versions(known, [(1, 5)]) == [(0, 2)]


def test_weights_of_a_line_fit_each_other(recorded):
    assert not misweighted(recorded.ledger[0])
    assert not misweighted(recorded.ledger[1])
    row = copy.deepcopy(recorded.ledger[1])
    row["contributions"][0]["staleness_weight"] *= 0.5
    assert "its other weights give" in misweighted(row)
