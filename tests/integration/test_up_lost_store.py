"""A real fleet whose aggregator comes back without its store, then with an old copy: it waits, then goes on."""

import json
import os
import shutil
import signal

import pytest

from ops.inspect.replay import replay_all
from tests.local_run import Up, check_invariants, check_report, ops, wait_for

pytestmark = [pytest.mark.timeout(180), pytest.mark.full("a whole run of its own")]


def totals_and_steps(up):
    status = json.loads(ops("status", up.run_dir, "--json").stdout)
    return status["totals"], {name: each["inner_step"] for name, each in status["islands"].items()}


def above(versions, seen):
    return all(versions.get(p, -1) > seen[p] for p in seen)


def come_back(up, change):
    """Kills the aggregator, changes what it will find, and returns when it is there again."""
    old = up.process("aggregator")
    change()
    up.kill("aggregator")
    up.restarted("aggregator", old)


def test_an_aggregator_that_is_behind_waits_and_a_new_lineage_goes_on(tmp_path):
    store, copied = tmp_path / "run" / "store", tmp_path / "copy"
    with Up(tmp_path / "run", "--islands", 2, "--tokens", 10_000_000, "--pace", 0.03, "--json") as up:
        up.wait_for_progress()
        aggregator = up.process("aggregator")
        os.kill(aggregator, signal.SIGSTOP)  # or files that are listed are gone before they are copied
        shutil.copytree(store, copied, ignore=shutil.ignore_patterns("*.tmp"))  # which come and go
        os.kill(aggregator, signal.SIGCONT)
        up.wait_for_progress(2)
        seen = up.versions()

        come_back(up, lambda: store.rename(tmp_path / "lost"))  # at once: the aggregator is still writing there
        wait_for(lambda: "atoll: behind: " in up.err, "complaint", evidence=lambda: up.err)
        assert "this store holds no model to go on from" in up.err
        before = totals_and_steps(up)[1]
        wait_for(lambda: min(totals_and_steps(up)[1].values()) > max(before.values()), "steps", evidence=lambda: up.err)
        assert up.versions() == {}

        def restore_an_old_copy():
            store.rename(tmp_path / "empty")
            shutil.copytree(copied, store)
            config = up.run_dir / "config.toml"
            text = config.read_text()
            assert "new_lineage = false" in text
            config.write_text(text.replace("new_lineage = false", "new_lineage = true"))

        come_back(up, restore_an_old_copy)
        wait_for(lambda: above(up.versions(), seen), "new lineage", evidence=lambda: up.err)
        up.wait_for_progress()
        up.signal(signal.SIGINT)
        assert up.wait(within_s=30.0) == 130
    check_report(json.loads(up.out.splitlines()[-1]), ended=False)
    keys = [(row["fragment_id"], row["fragment_version"]) for row in up.ledger()]
    assert len(set(keys)) == len(keys)
    # The tape has the versions that were given up, which the copy of the ledger has not; nothing calls that a fault.
    check_invariants(up.run_dir)
    (played,), covered = replay_all([up.run_dir / "events.jsonl"], ledgers=[up.run_dir / "store" / "ledger.jsonl"])
    assert played.difference is None
    assert played.counts.lives == 4  # the last one begins with the numbers that the third chose
    assert len(covered.checked) >= len(keys)
