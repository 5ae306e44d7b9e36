"""A real run whose tape is closed every few moments: it is followed meanwhile, killed, resumed and shortened."""

import contextlib
import io
import json
import re
import shutil
import signal

import pytest

from aggregator.store.ledger_file import dropped_before
from aggregator.store.segments import closed_of, segments_of
from aggregator.store.tape import numbered_lines
from ops import cli
from ops.chaos.recording import Follower
from ops.dashboard.followed_tape import FollowedTape
from ops.inspect.dropped import gone_of
from ops.inspect.replay import replay_all
from ops.inspect.replay_result import PartReason
from tests.local_run import Process, Up, check_report, descendants, is_alive, wait_for

pytestmark = [pytest.mark.timeout(180), pytest.mark.full("a whole run of its own")]

#: Tokens to train after the kill, which is less than the segments that are kept then can hold.
MORE = 8_000
KEPT = 8
SEGMENT_MB = 0.02


class Run:
    """Two islands, killed whole when ten segments are closed; a copy of that; then resumed with a rule that drops."""

    def __init__(self, run_dir, copy):
        self.tape, self.copy = run_dir / "events.jsonl", copy
        followers, seen = (FollowedTape(self.tape), Follower(self.tape)), ([], [])

        def enough():
            assert up.is_running(), up.err
            self.look(followers, seen)
            return len(closed_of(self.tape)) >= 10

        settings, stored = run_dir.with_name("settings.toml"), run_dir / "config.toml"
        settings.write_text(f"[aggregator]\ntape_segment_mb = {SEGMENT_MB}\n")
        with Up(run_dir, "--islands", 2, "--tokens", 10_000_000, "--pace", 0.01, "--config", settings) as up:
            wait_for(enough, "ten segments", within_s=90)
            below = descendants(up.pid)
            up.signal(signal.SIGKILL)
            up.wait()
            wait_for(lambda: not any(map(is_alive, below)), f"end of all of {below}")
        self.look(followers, seen)
        self.followed = seen
        shutil.copytree(run_dir, copy)
        ends = {each["island_id"]: each["steps"]["to_tokens"] for row in up.ledger() for each in row["contributions"]}
        stored.write_text(re.sub("tape_segments = .*", f"tape_segments = {KEPT}", stored.read_text()))
        flags = ("--resume", run_dir, "--tokens", sum(ends.values()) + MORE, "--json")
        with Process(run_dir.with_name("again"), "up", *flags) as again:
            self.exit, self.err = again.wait(90), again.err
            self.report = json.loads(again.out.splitlines()[-1]) if again.out else {}
        self.run_dir, self.ledger = run_dir, up.ledger()

    def look(self, followers, seen):
        seen[0].extend(followers[0].lines())
        while followers[0].behind:
            seen[0].extend(followers[0].lines())
        seen[1].extend(followers[1].news())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segments")
    return Run(folder / "run", folder / "copy")


def said_by(*command):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = cli.main([str(each) for each in command])
    return status, said.getvalue()


def test_two_that_follow_the_tape_while_it_is_closed_ten_times_see_each_line_once(run):
    whole = [line for _, line in numbered_lines(run.copy / "events.jsonl") if line is None or "segment" not in line]
    assert len(whole) > 200
    for lines in run.followed:
        seen = [line for line in lines if "segment" not in line]
        assert seen == whole[: len(seen)]
        assert len(whole) - len(seen) <= 1  # which the kill has cut short


def test_the_killed_run_is_compressed_but_for_the_last_moments_and_replays_whole(run):
    there = segments_of(run.copy / "events.jsonl")
    assert min(there) == 1
    plain = [each.name for each in there.values() if each.suffix == ".jsonl"]
    assert len(plain) <= 5  # the one that is written, and what a thread was at
    (found,), covered = replay_all([run.copy / "events.jsonl"], ledgers=[run.copy / "store" / "ledger.jsonl"])
    assert (found.difference, found.gone) == (None, None)
    assert found.counts.lives == 1
    # The last moments before the kill are in the store alone.
    assert set(covered.reasons()) <= {PartReason.NO_TAPE}
    assert len(covered.checked) >= covered.versions - 4


def test_the_resumed_run_ends_well_and_has_dropped_the_oldest_segments_alone(run):
    assert run.exit == 0, run.err
    check_report(run.report)
    there = segments_of(run.tape)
    assert list(there) == list(range(min(there), min(there) + KEPT + 1))
    assert [each.suffix for each in there.values()] == [".gz"] * KEPT + [".jsonl"]
    gone = gone_of(run.tape)
    assert gone.segments == tuple(range(1, min(there)))
    assert (gone.by_rule, gone.life) == (True, 1)
    ledger = run.run_dir / "store" / "ledger.jsonl"
    for p, before in dropped_before(ledger).items():
        left = [row["fragment_version"] for row in run.ledger if row["fragment_id"] == p]
        assert left == list(range(before.version + 1, before.version + 1 + len(left)))
    assert 2 < len(closed_of(ledger)) <= KEPT


def test_its_replay_checks_the_life_that_is_whole_and_says_what_is_gone(run):
    status, said = said_by("replay", run.run_dir, "--allow-missing", "--json")
    found = json.loads(said)
    assert (status, found["same"]) == (0, True)
    assert found["tapes"][0]["counts"]["lives"] == 1
    checked, unchecked = found["coverage"]["checked"], found["coverage"]["unchecked"]
    assert checked + sum(unchecked.values()) == found["coverage"]["versions"] == len(run.ledger)
    assert unchecked[PartReason.DROPPED] > 0
    assert checked >= 4
    status, said = said_by("replay", run.run_dir, "--allow-missing")
    assert "dropped by the rule tape_segments" in said
    assert "life 1 of the aggregator (epoch 1) has lost its beginning" in said


def test_explain_of_a_version_that_is_gone_has_it_from_the_ledger_and_the_invariants_hold(run):
    p, version = next((row["fragment_id"], row["fragment_version"]) for row in run.ledger if row["fragment_version"])
    status, said = said_by("explain", f"{p}:{version}", run.run_dir)
    assert status == 0
    assert "dropped by the rule tape_segments" in said
    status, said = said_by("chaos", "--check", run.run_dir)
    assert status == 0, said
    assert "what they told is not checked" in said
