"""A whole ``up`` under a merge rule of one's own: it trains, survives its aggregator, replays; a wrong rule ends it."""

import os

import pytest

from ops.inspect.replay import replay_all
from tests.local_run import ROOT, Up, check_invariants, check_report, wait_for

pytestmark = [pytest.mark.timeout(180), pytest.mark.full("starts whole runs")]

FRAGMENTS = 4
MEDIAN = "examples.geometric_median:GeometricMedian"
WRONG = """
from aggregator.interface.merge_rule import RoundRule

class Wrong(RoundRule):
    def factors(self, round, state):
        return [1.0 / (round.fragment_version - 2) for _ in round.contributions], None
"""


def test_a_run_under_the_geometric_median_loses_its_aggregator_and_replays_to_the_same_bytes(tmp_path):
    flags = ["--islands", 3, "--tokens", 90_000, "--fragments", FRAGMENTS, "--pace", 0.01]
    flags += ["--merge", MEDIAN, "--record-payloads", "--json"]
    with Up(tmp_path / "run", *flags) as up:
        wait_for(lambda: len(up.ledger()) > 2 * FRAGMENTS, "versions", evidence=lambda: up.err)
        up.kill("aggregator")
        assert up.wait() == 0, up.err
    report = up.report()
    check_report(report)
    check_invariants(up.run_dir)
    assert report["loss"]["after"] <= 0.6 * report["loss"]["before"]
    assert report["recipe"]["merge"].startswith(f"rda+{MEDIAN}#")
    (found,), _ = replay_all([up.run_dir / "events.jsonl"], ledgers=[up.run_dir / "store" / "ledger.jsonl"])
    assert found.difference is None
    assert found.counts.lives == 2
    assert found.derived >= len(up.ledger()) - FRAGMENTS > FRAGMENTS  # one may have been made twice
    of_three = [row["contributions"] for row in up.ledger() if len(row["contributions"]) == 3]
    assert any(each["staleness_weight"] > 1 for row in of_three for each in row)  # which no staleness is


def test_a_rule_that_fails_in_a_round_ends_the_run_and_says_which_and_what_to_do(tmp_path):
    (tmp_path / "mine.py").write_text(WRONG)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    with Up(
        tmp_path / "run", "--islands", 1, "--tokens", 10**9, "--pace", 0.01, "--merge", "mine:Wrong", PYTHONPATH=path
    ) as up:
        assert up.wait() not in (0, None)
    assert "merge = 'mean+mine:Wrong#" in up.err
    assert "returned the factors [-1.0]" in up.err
    assert "for version 1 of fragment" in up.err
