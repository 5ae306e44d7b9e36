"""``up --profile``: the ancestors through the same processes and sockets; one island is five times slower."""

import pytest

from tests.local_run import Up, check_invariants, check_report

pytestmark = [pytest.mark.timeout(120), pytest.mark.full("a whole run of its own")]


def test_a_profile_in_lockstep_trains_to_the_end_and_its_fast_islands_wait(tmp_path):
    flags = ("--profile", "streaming", "--islands", 3, "--tokens", 12_000, "--pace", "0.01,0.01,0.05", "--json")
    with Up(tmp_path / "run", *flags, "--fragments", 4) as up:
        assert up.wait(within_s=80.0) == 0, up.err
    report = up.report()
    check_report(report)
    check_invariants(up.run_dir)
    assert report["recipe"]["profile"] == "streaming"
    fast = [each["sync_share"] for name, each in report["islands"].items() if name != "island-2"]
    steps = [each["inner_steps"] for each in report["islands"].values()]
    assert min(fast) > 0.4
    assert max(steps) - min(steps) <= report["recipe"]["sync_interval"]
    merged = [{c["steps"]["to_step"] for c in line["contributions"]} for line in up.ledger() if line["contributions"]]
    assert sum(len(each) == 1 for each in merged) >= len(merged) - 2 * 4  # but for the last rounds
