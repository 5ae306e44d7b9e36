"""The ledger in segments on a real disk: bounded, whole after a crash at any write, and the same to all its readers."""

import gzip
import json
import os
import re
import shutil
import threading
from contextlib import suppress

import pytest

from aggregator.copies import taking
from aggregator.copies.restoring import restore
from aggregator.interface.events import Commit
from aggregator.rounds.recovery import lineages
from aggregator.store.ledger_file import cut_above, dropped_before, newest_dropped, read_rows
from aggregator.store.segments import closed_of, packed_name, plain_name, segments_of
from aggregator.store.store import Store
from broker.wire.messages import Merged
from broker.wire.ranges import StepRange
from broker.wire.tensors import fragment_digest
from ops.chaos import verify
from tests.copied_hub import NOW_S, Hub
from tests.integration.test_aggregator_store import state_of

SEGMENT_BYTES, KEEP = 1000, 3
TOKENS = 640


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What ends here are processes, and no machine: nothing has to reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def commit_of(version, p=0, **changes):
    """Returns version ``version`` of a fragment with its arrays, and books that say what was merged by then."""
    state = state_of(version, size=8, seed=p)
    steps = StepRange(
        from_step=10 * (version - 1),
        to_step=10 * version,
        from_tokens=TOKENS * (version - 1),
        to_tokens=TOKENS * version,
    )
    merged = Merged(
        island_id="island-0",
        incarnation=1,
        steps=steps if version else StepRange(from_step=0, to_step=1, from_tokens=0, to_tokens=1),
        staleness=0.0,
        token_weight=1.0,
        staleness_weight=1.0,
        merge_weight=1.0,
        fresh=True,
    )
    fields = {
        "fragment_id": p,
        "fragment_version": version,
        "epoch": 1,
        "digest": fragment_digest(state.params),
        "round_id": 10 * version + p,
        "contributions": (merged,) if version else (),
        "ledger": {"accounts": {"island-0": {"1": {"merged_tokens": TOKENS * version}}}},
    }
    return Commit(**(fields | changes)), state


def opened(path, **changes):
    return Store.open(path, **({"segment_bytes": SEGMENT_BYTES, "segments": KEEP} | changes))


def fill(path, versions, fragments=(0, 1), **changes):
    """Commits versions that are not there yet, as a life of an aggregator does."""
    with opened(path, **changes) as store:
        loaded = store.load()
        for version in versions:
            for p in fragments:
                at = loaded.fragments.get(p)
                if at is None or version > at.fragment_version:
                    store.commit(*commit_of(version, p))
        return loaded


def keys(path):
    return [(row["fragment_id"], row["fragment_version"]) for row in read_rows(path / "ledger.jsonl")]


def size_of(path):
    return sum(each.stat().st_size for each in segments_of(path / "ledger.jsonl").values())


def test_disk_is_bounded_and_the_newest_lines_are_there(tmp_path):
    sizes = []
    for first in range(0, 200, 20):
        fill(tmp_path, range(first, first + 20))
        sizes.append(size_of(tmp_path))
    assert max(sizes) < (KEEP + 2) * 2 * SEGMENT_BYTES  # one line and the sums more than a segment is long
    numbers = list(closed_of(tmp_path / "ledger.jsonl"))
    assert len(numbers) == KEEP
    assert numbers[0] > 20
    assert all(packed_name(tmp_path / "ledger.jsonl", n).exists() for n in numbers)
    there = keys(tmp_path)
    dropped = dropped_before(tmp_path / "ledger.jsonl")
    assert there == [(p, v) for v in range(200) for p in (0, 1) if v > dropped[p].version]
    assert dropped[0].merged == {"island-0": TOKENS * dropped[0].version}
    assert dropped[0].digest == commit_of(dropped[0].version)[0].digest


def test_all_segments_are_kept_where_that_is_asked_for(tmp_path):
    fill(tmp_path, range(40), segments=0)
    assert keys(tmp_path) == [(p, v) for v in range(40) for p in (0, 1)]
    assert dropped_before(tmp_path / "ledger.jsonl") == {}


def test_a_ledger_of_one_file_goes_on_in_segments(tmp_path):
    fill(tmp_path, range(40), segment_bytes=0)
    assert not closed_of(tmp_path / "ledger.jsonl")
    fill(tmp_path, range(44), segments=0)
    assert min(closed_of(tmp_path / "ledger.jsonl")) == 1
    assert keys(tmp_path) == [(p, v) for v in range(44) for p in (0, 1)]


def test_versions_that_are_kept_for_ever_get_no_second_line_when_theirs_was_dropped(tmp_path):
    fill(tmp_path, range(120), keep_every=10)
    before = keys(tmp_path)
    fill(tmp_path, [], keep_every=10)
    assert keys(tmp_path) == before
    assert (0, 10) not in before


# --- crashes ----------------------------------------------------------------------------------------------------------


class CrashError(BaseException):
    """The process is gone."""


class Crashing:
    """Ends the main thread at the n-th change of the disk: before it, or with half of what is written."""

    def __init__(self, monkeypatch, at):
        self.at, self.count, self.done = at, 0, False
        for name in ("write", "rename", "replace", "fsync", "ftruncate", "unlink"):
            monkeypatch.setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name, function):
        def call(*args, **kwargs):
            if threading.current_thread() is threading.main_thread():
                if self.done:
                    raise CrashError  # whoever is dead does not tidy up
                self.count += 1
                if self.count == self.at:
                    self.done = True
                    if name == "write":
                        function(args[0], bytes(args[1])[: len(args[1]) // 2])
                    raise CrashError
            return function(*args, **kwargs)

        return call


def crashed(path, at, versions, **changes):
    """Commits versions until the n-th change of the disk; returns those that were acknowledged, and whether it died."""
    acknowledged = []
    with pytest.MonkeyPatch.context() as patch:
        store = opened(path, **changes)
        crash = Crashing(patch, at)
        try:
            store.load()
            for version in versions:
                for p in (0, 1):
                    store.commit(*commit_of(version, p))
                    acknowledged.append((p, version))
        except CrashError:
            pass
    os.close(store._lock_fd)
    store._lock_fd = -1
    return acknowledged, crash.done


@pytest.mark.parametrize("keep", [0, 2])
def test_a_crash_at_any_change_of_the_disk_costs_no_line_and_doubles_none(tmp_path, keep):
    whole, begun = tmp_path / "whole", tmp_path / "begun"
    fill(begun, range(3), segments=keep)
    shutil.copytree(begun, whole)
    fill(whole, range(9), segments=keep)
    at, turned = 0, 0
    while True:
        at += 1
        path = tmp_path / str(at)
        shutil.copytree(begun, path)
        acknowledged, died = crashed(path, at, range(3, 9), segments=keep)
        if not died:
            break
        turned += len(closed_of(path / "ledger.jsonl")) > 1
        fill(path, [], segments=keep)
        after = keys(path)
        assert len(after) == len(set(after))
        dropped = dropped_before(path / "ledger.jsonl")
        missing = [
            (p, v) for p, v in acknowledged if (p, v) not in after and v > (dropped[p].version if dropped else -1)
        ]
        assert not missing, at
        loaded = fill(path, range(9), segments=keep)
        assert {p: each.fragment_version for p, each in loaded.fragments.items()}.keys() == {0, 1}
        if not keep:
            assert keys(path) == keys(whole), at
        there, all_ = keys(path), [(p, v) for v in range(9) for p in (0, 1)]
        assert there == all_[-len(there) :], at
        assert len(there) >= 4
        for each in dropped.items() if dropped else ():
            assert each[1].merged in (None, {"island-0": TOKENS * each[1].version})
    assert turned > 20


def test_killed_between_the_two_renamings_what_is_carried_over_is_whole(tmp_path):
    fill(tmp_path, range(40))
    path = tmp_path / "ledger.jsonl"
    before, carried = keys(tmp_path), dropped_before(path)
    number = max(closed_of(path)) + 1
    with opened(tmp_path) as store:
        store.load()
        rotation = store._ledger._rotation
        header = rotation._next(rotation._header, path)
        (tmp_path / "ledger.jsonl.new").write_bytes(header.text() + rotation._opening())
    path.rename(plain_name(path, number))
    fill(tmp_path, range(41))
    assert keys(tmp_path)[-2:] == [(0, 40), (1, 40)]
    assert set(before) - set(keys(tmp_path)) <= {(p, v) for p, v in before if v <= dropped_before(path)[p].version}
    assert dropped_before(path)[0].version >= carried[0].version


def test_without_the_line_that_carries_over_all_segments_are_read_and_nothing_is_written_twice(tmp_path):
    fill(tmp_path, range(40), segments=0)
    path = tmp_path / "ledger.jsonl"
    path.unlink()  # a power failure on a disk that lies
    there = keys(tmp_path)
    fill(tmp_path, [], segments=0)
    after = keys(tmp_path)
    assert after[: len(there)] == there
    assert len(after) == len(set(after))
    assert after[-1] == (1, 39)


# --- lines that are struck --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [38, 30, 4])
def test_a_leader_that_lost_its_tail_strikes_it_from_closed_segments_too(tmp_path, kept):
    fill(tmp_path, range(40), segments=0)
    with opened(tmp_path, segments=0) as store:
        store.load()
        commit, state = commit_of(kept, epoch=2)
        store.adopt(commit, state)
        store.adopt(*commit_of(kept + 1, epoch=2))
    assert [v for p, v in keys(tmp_path) if p == 0] == [*range(kept + 2)]
    assert [v for p, v in keys(tmp_path) if p == 1] == [*range(40)]
    fill(tmp_path, [], segments=0)
    assert [v for p, v in keys(tmp_path) if p == 0] == [*range(kept + 2)]
    newest = max(closed_of(tmp_path / "ledger.jsonl"))
    with gzip.open(packed_name(tmp_path / "ledger.jsonl", newest)) as file:
        carried = json.loads(file.readlines()[1])["carried"]
    assert carried["0"]["version"] <= kept + 1


def test_a_crash_while_lines_are_struck_is_settled_by_the_same_again(tmp_path):
    fill(tmp_path, range(30), segments=0)
    path = tmp_path / "ledger.jsonl"
    wanted = [(p, v) for p, v in keys(tmp_path) if p or v <= 5]
    for at in range(1, 100):
        with pytest.MonkeyPatch.context() as patch:
            crash = Crashing(patch, at)
            with suppress(CrashError):
                cut_above(path, {0: 5})
        if not crash.done:
            break
        if keys(tmp_path) != wanted:
            last = {p: each.version for p, each in _last(path).items()}
            assert last[0] > 5, "the last segment must still tell that there is something to strike"
    assert keys(tmp_path) == wanted
    assert at > 5


def _last(path):
    with Store.open(path.parent) as store:
        store._ledger._cut_torn_end()
        return store._ledger._known()[2]


# --- readers ----------------------------------------------------------------------------------------------------------


def failing(run_dir):
    return [(check.name, check.examples) for check in verify.verify(run_dir) if not check.holds]


def test_the_invariants_hold_where_lines_were_dropped_and_a_wrong_sum_is_still_found(tmp_path):
    fill(tmp_path / "store", range(100))
    assert failing(tmp_path) == []
    assert any("of the ledger" in each and "tape_segments" in each for each in verify.left_out(tmp_path))
    with opened(tmp_path / "store") as store:
        store.load()
        store.commit(*commit_of(100, ledger={"accounts": {"island-0": {"1": {"merged_tokens": 1}}}}))
    ((name, (example, *_)),) = failing(tmp_path)
    assert "the books in the commits agree" in name
    assert "island-0 has 1 merged tokens booked, the ledger 64000" in example


def test_a_line_that_is_missing_behind_those_that_were_dropped_is_found(tmp_path):
    fill(tmp_path / "store", range(100))
    path = tmp_path / "store" / "ledger.jsonl"
    number = list(closed_of(path))[1]
    packed_name(path, number).unlink()
    assert "no version is missing" in dict(failing(tmp_path))


def test_a_rollback_behind_the_dropped_lines_is_a_lineage_and_no_difference(tmp_path):
    fill(tmp_path / "store", range(60))
    seed, state = commit_of(0)
    again = {"digest": seed.digest, "ledger": {"accounts": {"island-0": {"1": {"merged_tokens": 0}}}}}
    with opened(tmp_path / "store") as store:
        store.load()
        commit, _ = commit_of(61, contributions=(), epoch=2, **again)
        store.commit(commit, state._replace(version=61))
    path = tmp_path / "store" / "ledger.jsonl"
    rows = sorted(read_rows(path), key=lambda row: (row["fragment_id"], row["fragment_version"]))
    assert [(each.version, each.kept) for each in lineages(rows, newest_dropped([path]))] == [(61, -1)]
    assert failing(tmp_path) == []


@pytest.mark.parametrize("keep", [0, 20])
def test_a_restored_store_has_the_segments_and_no_line_of_versions_after_the_copy(tmp_path, monkeypatch, keep):
    with Hub(tmp_path) as hub:
        hub.opened.close()
        hub.opened = opened(hub.store, segments=keep)
        hub.opened.load()

        def go_on(rounds):
            for _ in range(rounds):
                for p in (0, 1):
                    hub.commit(p)
            hub.opened._ledger._rotation.tidy()

        newest = taking._newest

        def slowly(directory, stack):  # the versions are taken, and the ledger is turned before it is read
            taken = newest(directory, stack)
            go_on(8)
            return taken

        go_on(30)
        monkeypatch.setattr(taking, "_newest", slowly)
        whole = hub.copies.make()
        at = {each.fragment_id: each.version for each in whole.versions}
        assert at == {0: 30, 1: 30}
        dropped = dropped_before(hub.store / "ledger.jsonl")
        names = {file.path for file in whole.files}
        assert {name for name in names if re.fullmatch(r"store/ledger\.\d+\.jsonl(\.gz)?", name)}
        (restored,) = restore(hub.bucket, tmp_path / "again", NOW_S)
        store = tmp_path / "again" / "store"
        there = keys(store)
        assert there[-2:] == [(p, restored.versions[p]) for p in (0, 1)]
        assert [each for each in there[:-2] if each[1] > at[each[0]]] == []
        gone = {p: each.version for p, each in dropped.items()}
        assert there[:-2] == [(p, v) for v in range(31) for p in (0, 1) if v > gone.get(p, -1)]
        before = keys(store)
        fill(store, range(restored.versions[0] + 1, restored.versions[0] + 3), segments=keep)
        assert len(set(keys(store)) - set(before)) == 4
        (tmp_path / "again" / "events.jsonl").unlink()
        assert [each for each in failing(tmp_path / "again") if "is missing" in each[0]] == []
