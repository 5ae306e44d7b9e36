"""A real run whose aggregator cannot write for a while: islands train on, status says why, nothing is lost."""

import json
import resource

import pytest

from aggregator.store.tape import read_lines
from ops.inspect import replay
from tests.local_run import Up, check_ranges, check_report, check_versions, ops, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def limit_files(pid, limit_bytes):
    """Lets a process write no byte beyond the limit: to it, the disk is full (EFBIG in place of ENOSPC)."""
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit_bytes, most))


def steps(up):
    status = json.loads(ops("status", up.run_dir, "--json").stdout)
    return {name: each["inner_step"] for name, each in status["islands"].items()}, status["totals"]["troubles"]


def test_a_full_disk_stops_publishing_and_nothing_else_until_there_is_space(tmp_path):
    with Up(tmp_path / "run", "--islands", 2, "--tokens", 10_000_000, "--pace", 0.02, "--json") as up:
        up.wait_for_progress()
        aggregator = up.process("aggregator")
        limit_files(aggregator, 0)
        wait_for(lambda: "nothing is published, islands train on" in up.err, "complaint", evidence=lambda: up.err)
        versions, (before, troubles) = up.versions(), steps(up)
        assert "raise the limit on file sizes" in troubles[0]
        assert "The aggregator says, for " in ops("status", up.run_dir).stdout
        wait_for(lambda: min(steps(up)[0].values()) >= max(before.values()) + 25, "steps during the outage")
        assert up.versions() == versions
        assert up.process("aggregator") == aggregator
        limit_files(aggregator, resource.RLIM_INFINITY)
        up.wait_for_progress(2)
        wait_for(lambda: "the aggregator can go on" in up.err, "recovery", evidence=lambda: up.err)
        assert steps(up)[1] == []
        up.signal(2)
        assert up.wait(within_s=30) == 130
    report = json.loads(up.out.splitlines()[-1])
    check_report(report, ended=False)
    check_versions(up.ledger())
    check_ranges(up.ledger())
    assert report["tokens"]["wasted"] == {}
    assert report["restarts"]["aggregator"] == 0
    assert any("gap" in line for line in read_lines(up.run_dir / "events.jsonl"))
    played, seen = replay.replay(up.run_dir / "events.jsonl", ledger=up.run_dir / "store" / "ledger.jsonl")
    assert played.difference is None
    assert played.counts.missing == seen.missing_lines > 0
    assert len(seen.checked | seen.unchecked.keys()) == len(up.ledger())
