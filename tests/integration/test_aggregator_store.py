"""The store on a real disk: what survives a kill, a torn or damaged file, a full disk, a second opener."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import Commit
from aggregator.merge.fragment_state import FragmentState
from aggregator.process.service import load_for
from aggregator.state.records import manifest_from_rows, manifest_to_rows
from aggregator.store.commit_file import Damaged
from aggregator.store.layout import commit_path, read_name, read_newest, read_run, read_seed, versions
from aggregator.store.store import Store
from broker.base.errors import ConfigError, LocalProtocolError, Unavailable
from broker.wire.fragments import FragmentManifest, Kind, TensorSpec
from broker.wire.messages import Merged
from broker.wire.ranges import StepRange
from broker.wire.tensors import fragment_digest

LEDGER = {"island-0": {"1": {"merged": [[0, 24]], "wasted": {"stale": 7}}}}


def state_of(version, size=1000, seed=0):
    rng = np.random.default_rng(1000 * seed + version)
    params, momentum = (rng.standard_normal(size, dtype=np.float32) for _ in range(2))
    return FragmentState(params=params, momentum=momentum, version=version)


def commit_of(state, fragment_id=0, **changes):
    merged = Merged(
        island_id="island-0",
        incarnation=1,
        steps=StepRange(from_step=0, to_step=24, from_tokens=0, to_tokens=24_000),
        staleness=0.25,
        token_weight=1e6,
        staleness_weight=0.9,
        merge_weight=0.9,
        fresh=True,
    )
    fields = {
        "fragment_id": fragment_id,
        "fragment_version": state.version,
        "epoch": 1,
        "digest": fragment_digest(state.params),
        "round_id": 10 * state.version + fragment_id,
        "contributions": (merged,) if state.version else (),
        "ledger": LEDGER,
    }
    return Commit(**(fields | changes))


def fill(directory, newest=3, fragments=(0,)):
    with Store.open(directory) as store:
        store.load()
        for version in range(newest + 1):
            for fragment_id in fragments:
                state = state_of(version, seed=fragment_id)
                store.commit(commit_of(state, fragment_id), state)


def load(directory):
    with Store.open(directory) as store:
        return store.load()


def newest_state(directory, fragment_id=0):
    with Store.open(directory) as store:
        store.load()
        return store.newest_file(fragment_id).state


def ledger_versions(directory):
    rows = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    return [(row["fragment_id"], row["fragment_version"]) for row in rows]


def test_the_newest_version_comes_back_bit_by_bit_with_momentum_and_books(tmp_path):
    fill(tmp_path, newest=3, fragments=(0, 7))
    loaded = load(tmp_path)
    assert sorted(loaded.fragments) == [0, 7]
    for fragment_id in (0, 7):
        commit, state = loaded.fragments[fragment_id], newest_state(tmp_path, fragment_id)
        expected = state_of(3, seed=fragment_id)
        assert commit == commit_of(expected, fragment_id)
        assert np.array_equal(state.params, expected.params)
        assert np.array_equal(state.momentum, expected.momentum)
        assert state.version == 3
    assert loaded.damaged == ()


def test_the_newest_two_versions_are_kept_and_the_seed_for_ever(tmp_path):
    fill(tmp_path, newest=6)
    assert versions(tmp_path, 0) == [6, 5, 0]
    assert np.array_equal(read_seed(tmp_path, 0)[1], state_of(0).params)
    assert np.array_equal(read_newest(tmp_path, 0)[1], state_of(6).params)


def test_the_run_record_comes_back_and_is_replaced(tmp_path):
    manifest = FragmentManifest(
        ((TensorSpec(name="a", shape=(2, 3), dtype="bfloat16", kind=Kind.RDA, unit_axes=1),), ())
    )
    record = {"run_id": "demo", "manifest": manifest_to_rows(manifest), "members": {"island-0": [0, "", 3]}}
    with Store.open(tmp_path) as store:
        store.save_run({"run_id": "old"})
        store.save_run(record)
    assert load(tmp_path).run == record
    assert manifest_from_rows(read_run(tmp_path)["manifest"]) == manifest


def test_the_ledger_file_has_one_line_per_version_with_who_and_how_much(tmp_path):
    fill(tmp_path, newest=4)
    assert ledger_versions(tmp_path) == [(0, v) for v in range(5)]
    last = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[-1])
    (merged,) = last["contributions"]
    assert (merged["island_id"], merged["staleness"], merged["merge_weight"]) == ("island-0", 0.25, 0.9)
    assert "ledger" not in last


def test_versions_never_go_back_nor_change_their_bytes(tmp_path):
    fill(tmp_path, newest=3)
    with Store.open(tmp_path) as store:
        store.load()
        for state in (state_of(2), state_of(3, seed=5)):
            with pytest.raises(LocalProtocolError, match="versions only grow"):
                store.commit(commit_of(state), state)
    assert np.array_equal(read_newest(tmp_path, 0)[1], state_of(3).params)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"digest": "0" * 32}, "is committed as 000"), ({"fragment_version": 5}, "comes with the arrays of version 1")],
)
def test_a_commit_that_does_not_name_its_arrays_is_refused_and_leaves_no_trace(tmp_path, changes, problem):
    with Store.open(tmp_path) as store:
        store.load()
        with pytest.raises(LocalProtocolError, match=problem):
            store.commit(commit_of(state_of(1), **changes), state_of(1))
    assert list((tmp_path / "fragments" / "000").iterdir()) == []


def test_a_store_is_loaded_before_it_is_written_and_closed_for_good(tmp_path):
    store = Store.open(tmp_path)
    with pytest.raises(LocalProtocolError, match="must be loaded"):
        store.commit(commit_of(state_of(0)), state_of(0))
    store.load()
    store.close()
    store.close()
    with pytest.raises(LocalProtocolError, match="is closed"):
        store.commit(commit_of(state_of(0)), state_of(0))


# --- damage ----------------------------------------------------------------------------------------------------------


def test_behind_a_damaged_newest_version_goes_on_only_who_is_told_to_and_a_new_lineage_begins_above_it(tmp_path):
    """Islands may have seen it: made again with other bytes it would part them from the run."""
    fill(tmp_path, newest=3)
    path = commit_path(tmp_path, 0, 3)
    os.truncate(path, 1000)
    with Store.open(tmp_path) as store:
        kept, before = store.load().fragments[0], store.newest_file(0).state
        store.save_run({"run_id": "atoll", "epoch": 4})
        with pytest.raises(ConfigError, match="go on from version 2, with --new-lineage"):
            load_for(store, AggregatorConfig(store=tmp_path))
        commit = load_for(store, AggregatorConfig(store=tmp_path, new_lineage=True)).fragments[0]
        state = store.newest_file(0).state
    assert (kept.fragment_version, commit.fragment_version, state.version, commit.epoch) == (2, 4, 4, 5)
    assert commit.digest == kept.digest
    assert state.momentum.tobytes() == before.momentum.tobytes()


def test_a_newest_version_that_the_operator_took_away_is_gone(tmp_path):
    fill(tmp_path, newest=3)
    commit_path(tmp_path, 0, 3).unlink()
    with Store.open(tmp_path) as store:
        assert load_for(store, AggregatorConfig(store=tmp_path)).fragments[0].fragment_version == 2


def test_a_store_is_not_taken_by_another_shard_whose_fragments_it_would_seem_to_lack(tmp_path):
    fill(tmp_path, newest=1)
    with Store.open(tmp_path) as store:
        store.load()
        store.save_run({"run_id": "atoll", "shard": [1, 2], "manifest": []})
    with Store.open(tmp_path) as store:
        for shard, shards in ((0, 1), (0, 2), (1, 3)):
            with pytest.raises(ConfigError, match="is that of shard 1 of 2: give --shard 1 --shards 2, or another"):
                load_for(store, AggregatorConfig(store=tmp_path, shard=shard, shards=shards))
        assert load_for(store, AggregatorConfig(store=tmp_path, shard=1, shards=2)).fragments[0]
        store.save_run({"run_id": "atoll", "shard": [1, 2], "manifest": None})
        assert load_for(store, AggregatorConfig(store=tmp_path)).run, "one that nothing was ever put in is anybody's"


def test_a_newest_version_that_is_torn_or_has_a_flipped_bit_is_passed_over_and_reported(tmp_path):
    fill(tmp_path, newest=3)
    path = commit_path(tmp_path, 0, 3)
    whole = path.read_bytes()

    def found(content):
        path.write_bytes(content)
        loaded = load(tmp_path)
        assert loaded.fragments[0].fragment_version == 2
        (damaged,) = loaded.damaged
        assert damaged.path == path
        assert path.read_bytes() == content
        return damaged.problem

    for keep_bytes in (0, 5, 30, 200, 1000, 5000, 8000):
        assert re.search("ends|holds", found(whole[:keep_bytes]))
    for place in range(0, len(whole), len(whole) // 23):
        flipped = bytearray(whole)
        flipped[place] ^= 0x10
        found(flipped)


def test_who_waits_for_a_commit_may_have_old_versions_removed_later(tmp_path):
    with Store.open(tmp_path) as store:
        store.load()
        for version in range(5):
            store.commit(commit_of(state_of(version)), state_of(version), prune=False)
        store.commit(commit_of(state_of(4)), state_of(4), prune=False)  # again, with nothing left to do
        assert versions(tmp_path, 0) == [4, 3, 2, 1, 0]
        store.prune(0)
        assert versions(tmp_path, 0) == [4, 3, 0]
        store.prune(1)  # of which there is none
    with Store.open(tmp_path) as store:
        assert store.load().fragments[0].fragment_version == 4


def test_a_damaged_version_is_written_again_and_pruned_like_any_other(tmp_path):
    fill(tmp_path, newest=3)
    os.truncate(commit_path(tmp_path, 0, 3), 100)
    with Store.open(tmp_path) as store:
        store.load()
        other = state_of(3, seed=9)
        store.commit(commit_of(other), other)
    assert np.array_equal(newest_state(tmp_path).params, other.params)
    with Store.open(tmp_path) as store:
        store.load()
        for state in (state_of(4), state_of(5)):
            store.commit(commit_of(state), state)
    assert versions(tmp_path, 0) == [5, 4, 0]


def test_a_fragment_without_any_whole_version_is_reported_and_missing(tmp_path):
    fill(tmp_path, newest=0)
    os.truncate(commit_path(tmp_path, 0, 0), 100)
    loaded = load(tmp_path)
    assert dict(loaded.fragments) == {}
    assert len(loaded.damaged) == 1
    with pytest.raises(Unavailable, match="holds no whole version of fragment 0"):
        read_newest(tmp_path, 0)


@pytest.mark.parametrize("content", [b"", b"junk", b"\x80", b"\x93\x01\x02\x03"])
def test_a_damaged_run_record_is_an_error_with_a_cure(tmp_path, content):
    fill(tmp_path)
    (tmp_path / "run.msgpack").write_bytes(content)
    with pytest.raises(Damaged, match="restore it from a copy"):
        load(tmp_path)


@pytest.mark.parametrize("lost_bytes", [1, 20, 300, 700, 10**6])
def test_lines_lost_at_the_end_of_the_ledger_are_written_again_from_the_commits(tmp_path, lost_bytes):
    fill(tmp_path, newest=1, fragments=(0, 1))
    path = tmp_path / "ledger.jsonl"
    whole = path.read_bytes()
    os.truncate(path, max(0, len(whole) - lost_bytes))
    load(tmp_path)
    assert path.read_bytes() == whole
    load(tmp_path)
    assert path.read_bytes() == whole


# --- the disk says no ------------------------------------------------------------------------------------------------


def failing_write(after_bytes, code):
    """Stands in for os.write: takes some bytes, then fails as a full disk does."""
    real, left = os.write, [after_bytes]

    def write(fd, data):
        if left[0] <= 0:
            raise OSError(code, os.strerror(code))
        taken = real(fd, data[: left[0]])
        left[0] -= taken
        return taken

    return write


@pytest.mark.parametrize(
    ("code", "cure"), [(errno.ENOSPC, "free space"), (errno.EDQUOT, "quota"), (errno.EIO, "check")]
)
@pytest.mark.parametrize("after_bytes", [0, 100, 3000, 7000])
def test_a_failed_write_did_not_happen_and_says_what_to_do(tmp_path, monkeypatch, code, cure, after_bytes):
    fill(tmp_path, newest=3)
    with Store.open(tmp_path) as store:
        store.load()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", failing_write(after_bytes, code))
            with pytest.raises(Unavailable, match=cure) as failure:
                store.commit(commit_of(state_of(4)), state_of(4))
        assert failure.value.definite
        assert versions(tmp_path, 0) == [3, 2, 0]
        assert list(tmp_path.rglob("*.tmp")) == []
        store.commit(commit_of(state_of(4)), state_of(4))
    assert load(tmp_path).fragments[0].fragment_version == 4
    assert ledger_versions(tmp_path) == [(0, v) for v in range(5)]


def second_call_fails(call, code):
    calls = []

    def instead(fd):
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(code, os.strerror(code))
        return call(fd)

    return instead


@pytest.mark.parametrize("fails", ["the ledger line", "to flush the directory"])
def test_what_fails_once_a_version_is_in_place_leaves_the_outcome_open_and_asking_again_settles_it(
    tmp_path, monkeypatch, fails
):
    fill(tmp_path, newest=3)
    with Store.open(tmp_path) as store:
        store.load()
        with monkeypatch.context() as patch:
            if fails == "the ledger line":
                size = commit_path(tmp_path, 0, 3).stat().st_size
                patch.setattr(os, "write", failing_write(size + 40, errno.ENOSPC))
            else:
                patch.setattr(os, "fsync", second_call_fails(os.fsync, errno.EIO))
            with pytest.raises(Unavailable) as failure:
                store.commit(commit_of(state_of(4)), state_of(4))
        assert not failure.value.definite
        assert ledger_versions(tmp_path) == [(0, v) for v in range(4)]
        store.commit(commit_of(state_of(4)), state_of(4))
    assert ledger_versions(tmp_path) == [(0, v) for v in range(5)]


# --- other processes -------------------------------------------------------------------------------------------------

#: Commits version 4 and stops for ever at the point named: {point} wraps a function of the operating system.
VICTIM = """
import os, sys
sys.path.insert(0, {tests!r})
import test_aggregator_store as t
from pathlib import Path

def stop_here(*args, **kwargs):
    print("here", flush=True)
    sys.stdin.read()

store = t.Store.open(Path({directory!r}))
store.load()
real_write, written = os.write, 0

def write(fd, data):
    global written
    if written >= {stop_after_bytes}:
        stop_here()
    n = real_write(fd, data[:1000])
    written += n
    return n

if {stop_after_bytes} >= 0:
    os.write = write
if {stop_in!r}:
    setattr(os, {stop_in!r}, stop_here)
state = t.state_of(4)
store.commit(t.commit_of(state), state)
"""


def kill_in_commit(directory, *, stop_after_bytes=-1, stop_in=""):
    code = VICTIM.format(
        tests=os.path.dirname(__file__), directory=str(directory), stop_after_bytes=stop_after_bytes, stop_in=stop_in
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as victim:
        try:
            assert victim.stdout.readline() == b"here\n"
            with pytest.raises(Unavailable, match=f"in use by process {victim.pid} on .*; stop that process"):
                Store.open(directory)
        finally:
            victim.kill()


@pytest.mark.parametrize(("after", "kept"), [("some bytes", 3), ("all bytes", 3), ("the rename", 4)])
def test_a_kill_in_a_commit_leaves_the_version_before_or_all_of_the_new_one_and_no_litter(tmp_path, after, kept):
    fill(tmp_path, newest=3)
    num_bytes = commit_path(tmp_path, 0, 3).stat().st_size
    match after:
        case "some bytes":
            kill_in_commit(tmp_path, stop_after_bytes=3000)
        case "all bytes":
            kill_in_commit(tmp_path, stop_in="replace")
        case "the rename":
            kill_in_commit(tmp_path, stop_after_bytes=num_bytes)
    assert len(list(tmp_path.rglob("*.tmp"))) == (kept == 3)
    assert ledger_versions(tmp_path) == [(0, v) for v in range(4)]
    loaded = load(tmp_path)
    assert (loaded.fragments[0].fragment_version, loaded.damaged) == (kept, ())
    assert ledger_versions(tmp_path) == [(0, v) for v in range(kept + 1)]
    assert list(tmp_path.rglob("*.tmp")) == []


def test_two_openers_in_one_process_exclude_each_other_until_the_first_closes(tmp_path):
    with Store.open(tmp_path), pytest.raises(Unavailable, match="is in use by") as refused:
        Store.open(tmp_path)
    assert refused.value.definite
    Store.open(tmp_path).close()


def name_of(directory):
    with Store.open(directory) as store:
        return store.name


def test_a_store_keeps_its_name_when_it_is_moved(tmp_path):
    drawn = name_of(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert name_of(tmp_path / "b") == read_name(tmp_path / "b") == drawn


def test_a_copy_of_a_store_gets_a_name_of_its_own(tmp_path):
    drawn = name_of(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    name_of(tmp_path / "d")
    shutil.copy2(tmp_path / "a" / "name", tmp_path / "d" / "name")  # over what was there
    names = [name_of(tmp_path / each) for each in "abd"]
    assert names[0] == drawn
    assert len(set(names)) == 3
    assert [name_of(tmp_path / each) for each in "abd"] == names
