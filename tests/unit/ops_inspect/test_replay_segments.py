"""Replay, explain and the check of invariants on a tape in segments: whole, with dropped ones, with stolen ones."""

import json
from dataclasses import replace

import pytest

from aggregator.store.segments import closed_of, packed_name, segments_of
from aggregator.store.tape import Tape, numbered_lines
from ops import cli
from ops.chaos import verify
from ops.dashboard.watched_run import WatchedRun
from ops.inspect.dropped import gone_of
from ops.inspect.explain import explain
from ops.inspect.replay_result import Coverage, PartReason
from ops.inspect.tapes import ledgers_in, tapes_in
from ops.story.absence import Target
from tests.taped import STEPS_PER_ROUND, Taped
from tests.unit.ops_inspect.test_replay_coverage import Recorded, difference, replayed


@pytest.fixture(scope="module")
def recorded():
    return Recorded()


def write(recorded, run_dir, *, keep=0, lines=None):
    """Writes the tape as an aggregator does, flush by flush, in segments; returns the directory."""
    recorded.write(run_dir)
    path = run_dir / "events.jsonl"
    path.unlink()
    tape = Tape(path, 4000, keep)
    for line in recorded.tape if lines is None else lines:
        tape.write(line)
        tape.flush()
    tape.close()
    return run_dir


def keeping(recorded, tmp_path, life, *, late=False):
    """A run whose tape begins in the middle of a life, as early there as can be, or as late."""
    keeps = range(1, len(closed_of(write(recorded, tmp_path / "whole") / "events.jsonl")) + 1)
    for keep in keeps if late else reversed(keeps):
        run_dir = write(recorded, tmp_path / f"keep-{keep}", keep=keep)
        gone = gone_of(run_dir / "events.jsonl")
        if gone is not None and gone.life == life:
            return run_dir
    raise AssertionError("no such tape")


def test_a_tape_in_segments_replays_like_one_in_a_single_file(recorded, tmp_path, capsys):
    plain = replayed(capsys, recorded.write(tmp_path / "plain"))
    run_dir = write(recorded, tmp_path / "segments")
    assert len(closed_of(run_dir / "events.jsonl")) > 6
    found = replayed(capsys, run_dir)
    for each in (plain, found):
        each[1]["tapes"][0].pop("tape")
    assert found == plain
    assert found[1]["complete"]


def test_lives_that_are_whole_pass_and_what_was_dropped_is_said(recorded, tmp_path, capsys):
    run_dir = keeping(recorded, tmp_path, 1)
    status, found = replayed(capsys, run_dir)
    (tape,) = found["tapes"]
    assert (status, found["same"], found["complete"]) == (0, True, True)
    assert found["coverage"]["unchecked"] == {PartReason.DROPPED: 3}
    assert (found["coverage"]["checked"], found["coverage"]["versions"]) == (4, 7)
    assert tape["counts"]["lives"] == 2
    assert (tape["gone"]["life"], tape["gone"]["by_rule"]) == (1, True)
    assert cli.main(["replay", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert "dropped by the rule tape_segments; it tells from 20" in said
    assert "life 1 of the aggregator (epoch 1) has lost its beginning" in said
    assert "the oldest versions that it names: 0:" in said
    assert "3 could not be: made before the oldest life that is whole on the tape" in said
    assert said.endswith("the replay agrees with the tape\n")


def test_where_no_life_is_whole_nothing_was_checked_and_that_is_no_success(recorded, tmp_path, capsys):
    run_dir = keeping(recorded, tmp_path, 3)
    assert cli.main(["replay", str(run_dir), "--allow-missing"]) == 1
    assert "NOTHING was checked" in capsys.readouterr().out


@pytest.mark.parametrize("place", [0.0, 0.5], ids=["the first", "one in the middle"])
def test_a_segment_that_no_rule_dropped_is_missing_and_that_is_no_difference_and_no_success(
    recorded, tmp_path, capsys, place
):
    run_dir = write(recorded, tmp_path)
    numbers = list(closed_of(run_dir / "events.jsonl"))
    packed_name(run_dir / "events.jsonl", numbers[int(place * len(numbers))]).unlink()
    status, found = replayed(capsys, run_dir)
    assert (status, found["same"], found["complete"]) == (1, True, False)
    assert 0 < found["coverage"]["checked"] < 7
    assert found["coverage"]["missing_lines"] > 1
    assert replayed(capsys, run_dir, "--allow-missing")[0] == 0
    assert cli.main(["replay", str(run_dir)]) == 1
    said = capsys.readouterr().out
    assert ("segment 1 of the tape" in said and "missing, and no rule dropped them" in said) is (place == 0.0)


def test_a_line_that_claims_dropped_segments_in_the_middle_hides_nothing(recorded, tmp_path, capsys):
    """Who changes a tape might have the rest of a life pass as dropped."""
    life = {"tape": 11, "epoch": 1, "config": recorded.tape[0]["config"]}
    claim = {"segment": 40, "lines": 900, "lives": 1, "dropped": 39, "time_s": 1.0, "life": life}
    at = recorded.begins[1] + 5
    recorded.write(tmp_path, tape=[*recorded.tape[:at], claim, *recorded.tape[at:]])
    status, found = replayed(capsys, tmp_path)
    assert (status, found["complete"]) == (1, False)
    assert found["coverage"]["missing_lines"] > 0


def test_a_line_that_was_changed_is_named_by_the_number_that_it_always_had(recorded, tmp_path, capsys):
    lines = [json.loads(json.dumps(line, default=str)) for line in recorded.tape]
    at = max(n for n, line in enumerate(lines) if line.get("note") == "round.closed")
    lines[at]["fields"]["reason"] = "I said so"
    whole = replayed(capsys, write(recorded, tmp_path / "whole", lines=lines))[1]
    keep = len(closed_of(tmp_path / "whole" / "events.jsonl")) // 2
    run_dir = write(recorded, tmp_path / "dropped", lines=lines, keep=keep)
    assert gone_of(run_dir / "events.jsonl") is not None
    status, found = replayed(capsys, run_dir)
    assert status == 1
    assert found["tapes"][0]["difference"] == whole["tapes"][0]["difference"]
    assert whole["tapes"][0]["difference"]["line"] > at
    assert whole["tapes"][0]["difference"]["life"] == 3


def test_a_ledger_that_differs_from_what_a_life_without_its_beginning_says_is_found(recorded, tmp_path, capsys):
    run_dir = keeping(recorded, tmp_path, 1)
    named = {
        line["fields"]["version"]
        for _, line in numbered_lines(run_dir / "events.jsonl")
        if line.get("note") == "version.committed"
    }
    at = next(n for n, row in enumerate(recorded.ledger) if row["fragment_version"] == min(named))
    rows = [row | {"digest": "0" * 32} if n == at else row for n, row in enumerate(recorded.ledger)]
    (run_dir / "store" / "ledger.jsonl").write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
    status, found = replayed(capsys, run_dir)
    assert status == 1
    assert "has another digest than the tape says" in difference(found)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (PartReason.DROPPED, PartReason.GAP, PartReason.GAP),
        (PartReason.NO_TAPE, PartReason.DROPPED, PartReason.DROPPED),
    ],
)
def test_what_another_tape_explains_better_is_not_called_dropped(one, other, expected):
    for pair in ((one, other), (other, one)):
        added = Coverage.added(Coverage(checked={(0, 9)}, unchecked={(0, 3): each}, lives=1) for each in pair)
        assert added.unchecked == {(0, 3): expected}
        assert added.complete == (expected is PartReason.DROPPED)


# --- the others that read tapes -------------------------------------------------------------------------------------


def told(run_dir, version):
    return explain(Target(fragment=0, version=version), ledgers=ledgers_in(run_dir), tapes=tapes_in(run_dir))


def without_codec(found):
    return [replace(each, codec="") for each in found.contributors]


def test_explain_tells_the_same_of_what_is_there_and_what_is_gone_of_the_rest(recorded, tmp_path, capsys):
    whole, run_dir = write(recorded, tmp_path / "all"), keeping(recorded, tmp_path, 1, late=True)
    gone = gone_of(run_dir / "events.jsonl").sentence()
    for version in range(1, 7):
        ours, theirs = told(run_dir, version), told(whole, version)
        assert without_codec(ours) == without_codec(theirs)
        if ours.gone:
            assert ours.gone == gone
            assert version <= 2
        else:
            assert ours == theirs
    assert told(run_dir, 1).absent is None
    assert cli.main(["explain", "0:1", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert "the event tape does not tell of this round" in said
    assert gone in said


def test_islands_of_a_life_without_its_beginning_are_known_by_their_heartbeats(tmp_path):
    taped = Taped(islands=3, round_timeout_s=1.0)
    taped.gather("a", "b")
    for number in (1, 2, 3):  # b is heard, and answers nothing: in the end it is not waited for
        taped.report(STEPS_PER_ROUND * number, "a", "b")
        taped.hand_over("a", number)
        for _ in range(2 * (number < 3)):
            taped.now_s += 1.0
            taped.report(STEPS_PER_ROUND * number, "a", "b")
    closed = [
        n for n, line in enumerate(taped.tape) if line.get("note") == "round.closed" and line["fields"]["missing"]
    ]
    life = {"tape": 11, "epoch": 1, "config": taped.tape[0]["config"]}
    header = {"segment": 2, "lines": closed[-1], "lives": 1, "dropped": 1, "time_s": 1.0, "life": life}
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(line, default=str) + "\n" for line in [header, *taped.tape[closed[-1] + 1 :]]))
    found = explain(Target(fragment=0, version=3), ledgers=[], tapes=[path])
    assert {each.island for each in found.contributors} == {"a"}
    assert [each.island for each in found.absent] == ["b"]
    assert "life 1 of the aggregator (epoch 1) has lost its beginning" in found.gone


@pytest.mark.parametrize("life", [1, 2, 3])
def test_the_invariants_hold_on_a_tape_without_its_beginning_and_what_is_not_checked_is_said(
    recorded, tmp_path, life, capsys
):
    run_dir = keeping(recorded, tmp_path, life)
    assert [check.name for check in verify.verify(run_dir) if not check.holds] == []
    assert cli.main(["chaos", "--check", str(run_dir)]) == 0
    assert "events.jsonl: segment" in capsys.readouterr().out
    assert verify.left_out(recorded.write(tmp_path / "plain")) == []


def test_the_page_says_what_it_cannot_tell(recorded, tmp_path):
    directories = write(recorded, tmp_path / "all"), keeping(recorded, tmp_path, 2)
    for each in directories:
        (each / "config.toml").write_text('[run]\nrun_id = "demo"\n')
    whole, watched = (WatchedRun(each, "redis://127.0.0.1:1", "demo") for each in directories)
    for each in (whole, watched):
        while each.read():
            pass
    assert whole.frame(0)["gone"] == ""
    assert whole.frame(0)["fragments"] == watched.frame(0)["fragments"]
    assert "life 2 of the aggregator (epoch 1) has lost its beginning" in watched.frame(0)["gone"]
    assert watched.frame(0)["phase"] == whole.frame(0)["phase"]


def test_a_tape_is_found_in_the_moment_between_two_segments(recorded, tmp_path):
    run_dir = write(recorded, tmp_path)
    (run_dir / "events.jsonl").unlink()
    assert tapes_in(run_dir) == [run_dir / "events.jsonl"]
    assert min(segments_of(run_dir / "events.jsonl")) == 1
