"""Data by speed, in real processes: one island four times slower, and by the ledger no sample twice before all once."""

from collections import Counter
from itertools import pairwise

import pytest

from aggregator.store.ledger_file import read_rows
from broker.wire.messages import OWN_PASS
from ops.chaos.verify import verify
from tests.local_run import Up

pytestmark = [pytest.mark.timeout(180), pytest.mark.full("a whole run of its own")]

BATCH, BATCHES = 64, 2400
PASS = 500  # batches, of a text that is so long


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run of four islands, the last of which is paced four times slower."""
    folder = tmp_path_factory.mktemp("data") / "run"
    speeds = ("--islands", 4, "--pace", "0.02,0.02,0.02,0.08", "--tokens", BATCH * BATCHES)
    with Up(folder, *speeds, "--data-ahead-s", 1.0) as up:
        assert up.wait() == 0
    return folder


def merged(run_dir):
    """Of fragment 0: (version, island, first batch, one past the last), as the ledger has them."""
    rows = [row for row in read_rows(run_dir / "store" / "ledger.jsonl") if row["fragment_id"] == 0]
    return [
        (row["fragment_version"], each["island_id"], d["from_batch"], d["to_batch"])
        for row in rows
        for each in row["contributions"]
        for d in each["data"]
    ]


def test_the_slow_island_has_a_quarter_of_the_data(run_dir):
    batches = Counter()
    for _, island_id, a, b in merged(run_dir):
        batches[island_id] += b - a
    assert sum(batches.values()) >= BATCHES
    fast = sum(batches[f"island-{i}"] for i in range(3)) / 3
    assert 2.0 <= fast / batches["island-3"] <= 6.0  # a busy machine is no clock


def test_by_the_ledger_no_sample_is_seen_twice_before_all_were_seen_once(run_dir):
    """All that was trained is one sequence without a copy; but what islands had in hand at the end, without a gap."""
    ranges = sorted((a, b) for _, _, a, b in merged(run_dir) if a < OWN_PASS)
    samples = Counter(batch % PASS for a, b in ranges for batch in range(a, b))
    whole = ranges[-1][1] // PASS - 1  # passes that were over long before the end
    assert whole >= 2
    assert all(samples[each] >= whole for each in range(PASS))
    assert max(samples.values()) - min(samples.values()) <= 2
    assert all(a[1] <= b[0] for a, b in pairwise(ranges)), "a batch was merged twice"


def test_the_check_of_its_files_says_so(run_dir):
    checks = {check.name.split(",")[0]: check for check in verify(run_dir)}
    assert all(check.holds for check in checks.values())
    assert checks["each batch is merged at most once into a fragment"].looked_at > 100
    assert checks["data go out in order"].looked_at > 20
