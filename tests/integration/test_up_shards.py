"""``up --shards 2 --standbys 1`` with real processes: the leader of one and an island are killed.

The island comes back just when its shard loses its leader, so it has to wait for the standby. Everything else that may
happen to shards is tried in virtual time (``tests/sim/test_shards.py``); here it is about processes, files and the one
report.
"""

import time
from collections import defaultdict

import numpy as np
import pytest
from safetensors.numpy import load_file

from aggregator.store.layout import read_run
from ops.evaluation.curve_file import read_points
from ops.models.global_model import export
from tests.local_run import Up, check_invariants, check_report, json_lines, wait_for

pytestmark = [pytest.mark.timeout(150), pytest.mark.full("a whole run of its own")]

FRAGMENTS = range(4)
SHARDS = {0: ("aggregator", "standby-1"), 1: ("aggregator-1", "aggregator-1-standby-1")}


class Run:
    """A run of two shards with a standby each; an island is killed, and the leader of shard 1 as soon as it is back."""

    def __init__(self, run_dir):
        self.run_dir = run_dir
        flags = ("--shards", 2, "--standbys", 1, "--islands", 2, "--tokens", 52_000, "--pace", 0.04, "--json")
        flags += ("--evaluate-every", 10_000)
        with Up(run_dir, *flags, "--sync-interval", 20) as self.up:
            self.wait_for(lambda: self.up.notes("standby.in_sync", "aggregator-1"), "standby of shard 1 in sync")
            self.wait_for(lambda: self.up.notes("version.committed", "aggregator"), "first version in shard 0")
            self.wait_for(lambda: self.up.notes("version.committed", "aggregator-1"), "first version in shard 1")
            self.wait_for(lambda: len(self.up.notes("island.joined", "aggregator")) == 2, "both islands in the run")
            self.up.restarted("island-0", self.up.kill("island-0"))
            with self.up.nobody_restarts():
                began_s = time.monotonic()
                self.up.kill("aggregator-1")
                self.took_over = self.wait_for(
                    lambda: self.up.notes("version.committed", "aggregator-1-standby-1", began_s), "takeover in shard 1"
                )[0]
            self.exit = self.up.wait()
        self.report = self.up.report()

    def ledgers(self, shard):
        """Name -> lines of the ledger, of a shard's aggregators."""
        return {name: json_lines(self.up.folder(name) / "store" / "ledger.jsonl") for name in SHARDS[shard]}

    def wait_for(self, condition, what):
        def checked():
            assert self.up.is_running(), f"up ended early:\n{self.up.err}\n{self.up.out}"
            return condition()

        return wait_for(checked, what, 40.0, evidence=lambda: self.up.err)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("shards") / "run")


def test_the_run_ends_in_order_and_its_one_report_balances(run):
    assert run.exit == 0, run.up.err
    check_report(run.report)
    assert set(run.report["versions"]) == {str(p) for p in FRAGMENTS}
    assert min(run.report["versions"].values()) > 1
    assert run.report["loss"]["after"] < run.report["loss"]["before"]


def test_each_shard_has_its_own_fragments_and_all_its_aggregators_have_the_same_ones(run):
    for shard in SHARDS:
        for name, rows in run.ledgers(shard).items():
            assert {row["fragment_id"] % len(SHARDS) for row in rows} == {shard}, name


def test_a_standby_of_a_shard_takes_over_in_it_alone(run):
    assert run.took_over["fragment"] % len(SHARDS) == 1
    epochs = defaultdict(set)
    for shard in SHARDS:
        for rows in run.ledgers(shard).values():
            epochs[shard] |= {row["epoch"] for row in rows}
    assert epochs == {0: {1}, 1: {1, 2}}


def test_all_shards_have_the_same_lives_of_islands_on_record(run):
    records = [read_run(run.up.folder(name) / "store") for name in ("aggregator", "aggregator-1-standby-1")]
    lives = [{name: row[2] for name, row in record["members"].items()} for record in records]
    assert lives == [{"island-0": 2, "island-1": 1}] * 2
    assert {record["phase"] for record in records} == {"ended"}


def test_no_step_is_merged_twice_and_every_invariant_holds(run):
    check_invariants(run.run_dir)


def test_the_model_that_is_left_has_the_last_version_of_every_fragment(run, tmp_path):
    stores = [run.up.folder(name) / "store" for name in ("aggregator", "aggregator-1-standby-1")]
    exported = export(stores, tmp_path / "model.safetensors")
    assert exported.versions == tuple(run.report["versions"][str(p)] for p in FRAGMENTS)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path, run.run_dir))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_the_model_is_evaluated_while_leaders_change(run):
    points = read_points(run.run_dir)
    assert len({each.model for each in points}) == len(points) >= 3
    assert dict(enumerate(points[-1].versions)) == {int(p): v for p, v in run.report["versions"].items()}
    assert points[-1].metrics["loss"] == pytest.approx(run.report["loss"]["after"])
