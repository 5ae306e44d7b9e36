"""What a store keeps, its named snapshots, and the way back to one: on a real disk, and in a run."""

import json
import signal
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file

from aggregator.store import snapshots
from aggregator.store.layout import commit_path, read_newest, versions
from aggregator.store.store import Store
from broker.base.errors import ConfigError, Unavailable
from ops.models.snapshots import restore
from tests.integration.test_aggregator_store import commit_of, fill, load, newest_state, state_of
from tests.local_run import Process, Up, check_invariants, json_lines, ops, wait_for
from tests.recorded.recording import said

RECORD = {"run_id": "demo", "epoch": 3}


def seeded(directory, newest=3, fragments=(0, 1)):
    with Store.open(directory) as store:
        store.load()
        store.save_run(RECORD)
    fill(directory, newest=newest, fragments=fragments)


def grow(directory, newest, fragments=(0, 1)):
    with Store.open(directory) as store:
        loaded = store.load()
        for p in fragments:
            for version in range(loaded.fragments[p].fragment_version + 1, newest + 1):
                state = state_of(version, seed=p)
                store.commit(commit_of(state, p), state)


# --- what is kept ---------------------------------------------------------------------------------------------------


def test_the_last_k_and_every_nth_version_are_kept(tmp_path):
    with Store.open(tmp_path, keep=3, keep_every=5) as store:
        store.load()
        for version in range(13):
            state = state_of(version)
            store.commit(commit_of(state), state)
    assert versions(tmp_path, 0) == [12, 11, 10, 5, 0]
    assert load(tmp_path).fragments[0].fragment_version == 12


# --- snapshots ------------------------------------------------------------------------------------------------------


def test_a_snapshot_outlives_the_versions_of_the_store_and_takes_no_room_before(tmp_path):
    seeded(tmp_path)
    made = snapshots.save(tmp_path, "early")
    assert (made.versions, made.epoch, made.name) == ({0: 3, 1: 3}, 1, "early")
    here = snapshots.snapshot_path(tmp_path, "early")
    assert commit_path(here, 0, 3).stat().st_ino == commit_path(tmp_path, 0, 3).stat().st_ino
    grow(tmp_path, 9)
    assert versions(tmp_path, 0) == [9, 8, 0]
    assert np.array_equal(read_newest(here, 1)[1], state_of(3, seed=1).params)
    assert snapshots.listed(tmp_path) == [made]
    snapshots.remove(tmp_path, "early")
    assert snapshots.listed(tmp_path) == []


def test_what_cannot_be_a_snapshot_is_said(tmp_path):
    seeded(tmp_path)
    snapshots.save(tmp_path, "early")
    with pytest.raises(ConfigError, match="is taken"):
        snapshots.save(tmp_path, "early")
    with pytest.raises(ConfigError, match="must be"):
        snapshots.save(tmp_path, "../early")
    with pytest.raises(ConfigError, match=r"is no snapshot in .*; there are: early"):
        snapshots.named(tmp_path, "late")
    commit_path(tmp_path, 1, 3).write_bytes(b"broken")
    with pytest.raises(Unavailable, match="whole version of every fragment"):
        snapshots.save(tmp_path, "broken")
    assert [each.name for each in snapshots.listed(tmp_path)] == ["early"]


def test_a_snapshot_is_of_one_moment_however_fast_versions_come(tmp_path):
    """Fragments take turns: at any moment their versions differ by one at most, the first ahead."""
    seeded(tmp_path, newest=0, fragments=range(4))
    ends = threading.Event()

    def commits():
        with Store.open(tmp_path) as store:
            store.load()
            version = 1
            while not ends.is_set():
                for fragment_id in range(4):
                    state = state_of(version, size=8, seed=fragment_id)
                    store.commit(commit_of(state, fragment_id), state)
                version += 1

    thread = threading.Thread(target=commits)
    thread.start()
    try:
        made = [snapshots.save(tmp_path, f"at-{number}") for number in range(12)]
    finally:
        ends.set()
        thread.join()
    for each in made:
        found = [each.versions[p] for p in range(4)]
        assert found == sorted(found, reverse=True)
        assert found[0] - found[-1] <= 1
    assert made[-1].versions[0] > made[0].versions[0]


# --- the way back ---------------------------------------------------------------------------------------------------


def test_rolled_back_versions_are_the_snapshots_under_numbers_above_all(tmp_path):
    seeded(tmp_path)
    snapshots.save(tmp_path, "early")
    grow(tmp_path, 7)
    source = snapshots.snapshot_path(tmp_path, "early")
    for _ in range(2):  # asked for again after a crash, it is the same
        with Store.open(tmp_path) as store:
            store.load()
            store.roll_back(source, {0: 9, 1: 7}, 4, {0: {}, 1: {}})
    for p, version in ((0, 10), (1, 8)):
        commit, state = load(tmp_path).fragments[p], newest_state(tmp_path, p)
        assert (commit.fragment_version, state.version, commit.epoch) == (version, version, 4)
        assert np.array_equal(state.params, state_of(3, seed=p).params)
        assert np.array_equal(state.momentum, state_of(3, seed=p).momentum)


def test_a_damaged_snapshot_changes_nothing(tmp_path):
    seeded(tmp_path)
    snapshots.save(tmp_path, "early")
    grow(tmp_path, 5)
    path = commit_path(snapshots.snapshot_path(tmp_path, "early"), 1, 3)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(Unavailable, match="nothing was changed"):
        restore(tmp_path, "early")
    assert [load(tmp_path).fragments[p].fragment_version for p in (0, 1)] == [5, 5]


@pytest.mark.timeout(240)
@pytest.mark.full("a whole run of its own")
def test_a_run_with_a_standby_is_rolled_back_and_goes_on(tmp_path):
    run_dir = tmp_path / "run"
    copies = tmp_path / "copies"
    flags = ("--islands", 2, "--pace", 0.02, "--standbys", 1, "--copy-to", f"file://{copies}")
    with Up(run_dir, *flags, "--copy-every-s", 1, "--tokens", 0) as up:
        wait_for(lambda: min(up.versions().values(), default=0) > 5, "versions", 90)
        saved = json.loads(said("snapshots", "save", run_dir, "early", "--json"))
        up.wait_for_progress(4)
        refused = ops("snapshots", "restore", run_dir, "early")
        assert refused.returncode == 1
        assert "goes on; stop it first" in refused.stderr
        wait_for(copies.exists, "a copy")
        copies.rename(tmp_path / "lost")
        copies.write_text("a file where the folder was")
        wait_for(lambda: "no newer copy to file:" in up.err, "word of copies that fail", evidence=lambda: up.err)
        copies.unlink()
        wait_for(lambda: "the aggregator can go on" in up.err, "word that they work again", evidence=lambda: up.err)
        up.signal(signal.SIGINT)
        up.wait()
    last = max(up.versions().values())
    listed = json.loads(said("snapshots", "list", run_dir, "--json"))
    assert [each["name"] for each in listed] == ["early"]
    restored = json.loads(said("snapshots", "restore", run_dir, "early", "--json"))["versions"]
    assert min(restored.values()) > min(saved["versions"].values())
    assert max(restored.values()) <= last + 1
    said("export", run_dir, "--out", tmp_path / "now.safetensors")
    said("snapshots", "export", run_dir, "early", "--out", tmp_path / "early.safetensors")
    now, early = (load_file(tmp_path / f"{name}.safetensors") for name in ("now", "early"))
    assert all(np.array_equal(now[name], early[name]) for name in early)

    with Process(tmp_path / "again", "up", "--resume", run_dir) as again:
        newer = {int(p): version + 1 for p, version in restored.items()}
        wait_for(lambda: all(up.versions()[p] > version for p, version in newer.items()), "versions", 90)
        again.signal(signal.SIGINT)
        again.wait()
    rows = json_lines(run_dir / "store" / "ledger.jsonl")
    for p, version in restored.items():
        of = [row for row in rows if row["fragment_id"] == int(p)]
        lost = [row for row in of if saved["versions"][p] < row["fragment_version"] < version]
        tokens = sum(
            each["steps"]["to_tokens"] - each["steps"]["from_tokens"] for r in lost for each in r["contributions"]
        )
        for store in (run_dir / "store", run_dir / "standby-1" / "store"):
            books = read_newest(store, int(p))[0].ledger
            wasted = [life["wasted"] for lives in books["accounts"].values() for life in lives.values()]
            assert sum(each.get("rolled_back", 0) for each in wasted) == tokens > 0
    check_invariants(run_dir)
    totals = json.loads(said("status", run_dir, "--json"))["totals"]
    wasted = totals["wasted_tokens"]
    assert wasted["rolled_back"] > 0
    assert "store_lost" not in wasted
    assert totals["trained_tokens"] == sum(wasted.values()) + totals["merged_tokens"] + totals["in_flight_tokens"]
    explained = said("explain", f"0:{restored['0']}", run_dir)
    assert "begins a new lineage" in explained
    assert "is counted as rolled_back" in said("explain", f"0:{restored['0'] - 1}", run_dir)
    said("replay", run_dir)
    assert '"note":"run.rolled_back"' in (run_dir / "events.jsonl").read_text()
