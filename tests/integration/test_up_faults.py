"""``up`` with real processes that are killed: everything comes back, nothing goes back, and nothing stays behind."""

import json
import signal

import pytest

from tests.local_run import (
    Up,
    check_ranges,
    check_report,
    check_versions,
    descendants,
    end_by_signal,
    is_alive,
    wait_for,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

KILLED = ("redis", "island-1", "aggregator", "broker")


class Run:
    """A run that every process was killed in, once each, and that then trained to its end."""

    def __init__(self, run_dir):
        # Enough tokens for some 25 s: recovering from all four takes about 8 s on two busy processors.
        with Up(run_dir, "--tokens", 160_000, "--pace", 0.04, "--json") as up:
            up.wait_for_progress()
            for name in KILLED:
                old = up.kill(name)
                up.restarted(name, old)
                up.wait_for_progress()
            self.exit = up.wait()
        self.up = up
        self.report = json.loads(up.out.splitlines()[-1]) if up.out else {}
        self.ledger, self.tape = up.ledger(), up.tape()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("faults") / "run")


def test_a_run_survives_kill_9_of_each_of_its_processes(run):
    assert run.exit == 0, run.up.err
    assert run.report["exit"] == 0
    assert run.report["phase"] == "ended"
    assert run.report["tokens"]["trained"] >= 160_000
    assert run.report["loss"]["after"] < 0.6 * run.report["loss"]["before"]
    for name in KILLED:
        assert f"{name} was killed by signal 9" in run.up.err
        assert f"{name} started again (restart 1)" in run.up.err


def test_versions_never_go_back_and_each_has_one_content_across_the_kills(run):
    check_versions(run.ledger)
    committed = {}
    for line in run.tape:
        if line.get("note") == "version.committed":
            key = line["fields"]["fragment"], line["fields"]["version"]
            assert committed.setdefault(key, line["fields"]["digest"]) == line["fields"]["digest"]
    known = {(row["fragment_id"], row["fragment_version"]): row["digest"] for row in run.ledger}
    assert {key: known[key] for key in committed} == committed  # the ledger and the tape speak of the same versions
    epochs = [row["epoch"] for row in run.ledger]
    assert epochs == sorted(epochs)
    assert set(epochs) == {1, 2}  # the aggregator's two lives


def test_the_report_is_consistent_after_the_kills(run):
    check_report(run.report)
    newest = {str(row["fragment_id"]): row["fragment_version"] for row in run.ledger}
    assert run.report["versions"] == newest
    restarts = {name: each["restarts"] for name, each in run.report["islands"].items()} | run.report["restarts"]
    assert restarts == dict.fromkeys(restarts, 0) | dict.fromkeys(KILLED, 1)


def test_no_step_is_merged_twice_and_only_what_the_killed_island_still_had_is_lost(run):
    check_ranges(run.ledger)
    wasted = run.report["tokens"]["wasted"]
    assert set(wasted) <= {"island_lost"}, wasted
    # What it trained since it last handed over, on each fragment: never more than two intervals of 24 steps.
    assert wasted.get("island_lost", 0) <= 2 * 24 * 64
    merged = {}
    for row in run.ledger:
        for each in row["contributions"]:
            key = each["island_id"], row["fragment_id"]
            merged[key] = merged.get(key, 0) + each["steps"]["to_tokens"] - each["steps"]["from_tokens"]
    for (island, fragment), tokens in merged.items():
        trained = run.report["islands"][island]["tokens"]
        assert tokens <= trained, (island, fragment)
        assert island == "island-1" or tokens == trained, (island, fragment)


def test_islands_step_on_through_the_death_of_everybody_else(run):
    # Steps as their heartbeats count them: one life each, and the killed island goes on from where it was known to be.
    heard = {}
    for line in run.tape:
        if line.get("kind") == "heartbeat":
            heard.setdefault((line["sender"], line["incarnation"]), []).append(line["body"]["inner_step"])
    assert sorted(heard) == [("island-0", 1), ("island-1", 1), ("island-1", 2), ("island-2", 1), ("island-3", 1)]
    assert all(steps == sorted(steps) for steps in heard.values())
    assert heard["island-1", 2][0] >= 1
    # An outage of seconds at 25 steps per second: across the gap in what the aggregator heard, they went on.
    lives = [n for n, line in enumerate(run.tape) if "tape" in line]
    assert len(lives) == 2
    for island in ("island-0", "island-2", "island-3"):
        steps = [
            (n, line["body"]["inner_step"])
            for n, line in enumerate(run.tape)
            if line.get("kind") == "heartbeat" and line["sender"] == island
        ]
        last = max(step for n, step in steps if n < lives[1])
        first = min(step for n, step in steps if n > lives[1])
        assert first - last >= 5, (island, last, first)


@pytest.mark.parametrize("whom", ["the group, as Ctrl-C does", "up alone"])
def test_an_interrupted_run_ends_every_process_and_reports_what_was_done(tmp_path, whom):
    with Up(tmp_path / "run", "--islands", 2, "--tokens", 10_000_000, "--pace", 0.02, "--json") as up:
        up.wait_for_progress()
        report = end_by_signal(up, signal.SIGINT, up.signal if whom == "up alone" else up.signal_group)
    assert set(report["islands"]) == {"island-0", "island-1"}


def test_an_aggregator_that_somebody_ends_before_the_run_has_ended_comes_back(tmp_path):
    with Up(tmp_path / "run", "--islands", 2, "--tokens", 40_000, "--pace", 0.02, "--json") as up:
        up.wait_for_progress()
        up.restarted("aggregator", up.kill("aggregator", signal.SIGTERM))
        assert up.wait() == 0
    assert "aggregator ended with status 143" in up.err
    report = json.loads(up.out.splitlines()[-1])
    assert report["phase"] == "ended"
    assert report["tokens"]["merged"] >= 40_000


def test_nothing_survives_kill_9_of_up_itself(tmp_path):
    with Up(tmp_path / "run", "--islands", 2, "--tokens", 10_000_000, "--pace", 0.02) as up:
        wait_for(lambda: up.process("island-1"), "second island")
        below = descendants(up.pid)
        up.signal(signal.SIGKILL)
        assert up.wait() == -signal.SIGKILL
        wait_for(lambda: not any(map(is_alive, below)), f"end of all of {below}")
