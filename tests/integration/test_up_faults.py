"""``up`` that is interrupted or killed, and an aggregator that somebody ends: nothing stays behind."""

import json
import signal

import pytest

from tests.local_run import (
    Up,
    descendants,
    end_by_signal,
    is_alive,
    wait_for,
)

pytestmark = pytest.mark.timeout(180)


def test_an_interrupted_run_ends_every_process_and_reports_what_was_done(tmp_path):
    with Up(tmp_path / "run", "--islands", 2, "--tokens", 10_000_000, "--pace", 0.02, "--json") as up:
        merged = lambda: {each["island_id"] for row in up.ledger() for each in row["contributions"]}  # noqa: E731
        wait_for(lambda: len(merged()) == 2, "something merged of both islands")
        report = end_by_signal(up, signal.SIGINT, up.signal_group)
    assert set(report["islands"]) == {"island-0", "island-1"}
    assert report["resume"].endswith(f" up --resume {tmp_path / 'run'}")


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
