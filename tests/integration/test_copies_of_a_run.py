"""Real runs whose hub is lost, and that go on from the copies: in a folder, and at a server process that speaks S3."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from aggregator.copies.bucket import Bucket
from aggregator.copies.restoring import chosen, sets_by_shard
from aggregator.store.layout import commit_path
from broker.base.errors import Unavailable
from ops.inspect.replay import replay_all
from ops.processes.cluster import free_ports
from tests.copied_hub import sets_there
from tests.local_run import (
    NUMPY_TASK,
    Process,
    Up,
    check_invariants,
    check_report,
    json_lines,
    merged_tokens,
    ops,
    wait_for,
)
from tests.object_check import says_that_nobody_made_it, takes_and_gives_objects
from tests.s3_server import CREDENTIALS, SERVER, WHY_NOT, s3_server

pytestmark = [pytest.mark.timeout(240), pytest.mark.full("whole runs that are lost and restored")]
needs_s3 = pytest.mark.skipif(SERVER is None, reason=WHY_NOT)

MORE = 30_000


@pytest.fixture
def s3(tmp_path, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with s3_server(tmp_path / "s3.log") as server:
        yield server


@pytest.fixture
def place(request, tmp_path):
    """At a server that speaks S3, or in a folder where none is installed."""
    return f"file://{tmp_path / 'copies'}" if SERVER is None else request.getfixturevalue("s3").url("runs/one")


def complete(place):
    try:
        return sets_there(Bucket.open(place))
    except Unavailable:
        return []


def of_a_restore(place):
    """What a restore takes of each shard; nothing as long as it cannot."""
    try:
        sets = sets_by_shard(Bucket.open(place))
    except Unavailable:
        return {}
    found = chosen(sets)
    return found if len(found) == len(sets) else {}


def check_restored(restored, run_dir, lost_ledger):
    """What is there is what was lost, up to the copy, bit for bit; and it goes on above all that islands have seen."""
    known = {(row["fragment_id"], row["fragment_version"]): row for row in lost_ledger}
    newest = {p: max(v for q, v in known if q == p) for p, _ in known}
    ledger = json_lines(run_dir / "store" / "ledger.jsonl")
    again = {(row["fragment_id"], row["fragment_version"]): row for row in ledger}
    for p, version, digest in zip(sorted(newest), restored["versions"], restored["digests"], strict=True):
        assert known[p, version]["digest"] == digest
        assert [again[p, v] for v in range(version + 1)] == [known[p, v] for v in range(version + 1)]
        (beyond,) = [v for q, v in again if q == p and v > version]
        assert beyond > newest[p]
        assert again[p, beyond]["digest"] == digest
    return newest


def check_run(run_dir, report, folders=(Path(),)):
    check_report(report | {"rounds": {}, "versions": {}}, ended=False)
    assert report["phase"] == "ended"
    assert report["tokens"]["in_flight"] == 0
    ledgers = [run_dir / inner / "store" / "ledger.jsonl" for inner in folders]
    check_invariants(run_dir)
    played, _ = replay_all([run_dir / inner / "events.jsonl" for inner in folders], ledgers=ledgers)
    assert [each.difference for each in played] == [None] * len(folders)
    assert [each.counts.lives for each in played] == [2] * len(folders)


def test_all_shards_are_killed_with_their_disk_and_the_run_ends_from_copies_that_fit_together(place, tmp_path):
    run_dir, aside = tmp_path / "run", tmp_path / "aside"
    folders = {0: Path(), 1: Path("aggregator-1")}
    flags = ("--copy-to", place, "--copy-every-s", 2, "--shards", 2, "--data-ahead-s", 1, "--fragments", 4)
    flags += ("--outer-momentum", 0.5)
    with Up(run_dir, "--islands", 2, "--tokens", 10_000_000, "--pace", 0.03, *flags) as up:

        def copied():  # and so often that each shard had to keep one that fits
            serials = {each.shard[0]: each.serial for each in complete(place)[::-1]}
            return of_a_restore(place) and len(serials) == 2 and min(serials.values()) >= 3

        wait_for(copied, "copies of both shards", evidence=lambda: up.err)
        killed_s = time.time()
        up.kill_all()
    for n, inner in folders.items():
        shutil.copytree(run_dir / inner / "store", aside / str(n))
    shutil.rmtree(run_dir)

    said = ops("restore", place)
    assert said.stdout.count("<- a restore takes this") == 2, said.stdout
    taken = of_a_restore(place)
    done = ops("restore", place, run_dir, "--json")
    assert done.returncode == 0, done.stderr
    restored = json.loads(done.stdout)["shards"]
    print("as it was", [round(killed_s - each.time_s, 2) for each in taken.values()], "s before the kill, of 2 s")
    assert taken[1].roster <= taken[0].roster, "shard 1 goes by nothing that shard 0 has forgotten"
    lost = {n: json_lines(aside / str(n) / "ledger.jsonl") for n in folders}
    for n, inner in folders.items():
        assert restored[n]["versions"] == [each.version for each in taken[n].versions]
        check_restored(restored[n], run_dir / inner, lost[n])
        for each in taken[n].versions:
            original = commit_path(aside / str(n), each.fragment_id, each.version)
            if original.exists():
                again = commit_path(run_dir / inner / "store", each.fragment_id, each.version)
                assert again.read_bytes() == original.read_bytes()

    tokens = max(map(merged_tokens, lost.values())) + MORE // 3
    with Process(tmp_path / "again", "up", "--resume", run_dir, "--tokens", tokens, "--json") as again:
        assert again.wait(150) == 0, again.err
        report = json.loads(again.out.splitlines()[-1])
    assert report["tokens"]["trained"] >= tokens
    assert len(report["versions"]) == 4
    check_run(run_dir, report, tuple(folders.values()))
    assert all(newest.ended for newest, *_ in sets_by_shard(Bucket.open(place)).values()), "a last copy at the end"


def test_islands_that_outlive_their_hub_and_are_ahead_of_its_copy_go_on_and_their_loss_is_in_the_books(tmp_path):
    place, port = f"file://{tmp_path / 'copies'}", free_ports(2)
    common = ("--run", "demo", "--redis-url", f"redis://127.0.0.1:{free_ports(1)}")  # there is none
    address = ("--broker", f"tcp://127.0.0.1:{port}")

    def broker(name):
        return Process(tmp_path / name, "broker", *common, "--port", port)

    def aggregator(folder, *flags):
        kept = ("--store", folder / "store", "--tape", folder / "events.jsonl", "--report", folder / "report.json")
        copies = ("--copy-to", place, "--copy-every-s", 600)  # one at the beginning, then no more
        return Process(
            folder.with_name(f"{folder.name}-output"), "aggregator", *common, *address, *kept, *copies, *flags
        )

    def island(name):
        flags = ("--island-id", name, "--task", NUMPY_TASK, "--state-dir", tmp_path / name, "--pace", 0.03)
        return Process(tmp_path / f"{name}-output", "island", *common[:2], *address, *flags)

    first, second = tmp_path / "hub", tmp_path / "hub-2"
    sizes = ("--islands", 2, "--fragments", 4, "--outer-momentum", 0.5)
    with island("island-a") as a, island("island-b") as b:
        with broker("broker") as one, aggregator(first, *sizes) as two:
            wait_for(lambda: complete(place), "a copy", evidence=lambda: two.err)
            copied = {each.fragment_id: each.version for each in complete(place)[0].versions}

            def ahead():
                newest = {
                    row["fragment_id"]: row["fragment_version"] for row in json_lines(first / "store/ledger.jsonl")
                }
                return all(newest[p] >= version + 3 for p, version in copied.items())

            wait_for(ahead, "newer versions", evidence=lambda: two.err)
            for hub in (one, two):
                hub.signal(signal.SIGKILL)
                hub.wait()
        lost = json_lines(first / "store" / "ledger.jsonl")
        shutil.rmtree(first)
        done = ops("restore", place, second, "--json")
        assert done.returncode == 0, done.stderr
        newest = check_restored(json.loads(done.stdout), second, lost)
        with broker("broker-2"), aggregator(second, "--tokens", merged_tokens(lost) + MORE) as again:
            assert again.wait(120) == 0, again.err
            assert (a.wait(60), b.wait(60)) == (0, 0), (a.err, b.err)
    assert "store.behind" not in again.err
    report = json.loads((second / "report.json").read_text())
    check_run(second, report)
    wasted = report["tokens"]["wasted"]
    assert wasted.get("store_lost", 0) > 0, wasted
    assert all(version > newest[int(p)] for p, version in report["versions"].items())


@needs_s3
def test_a_server_that_speaks_s3_takes_and_gives_objects_of_every_size(s3, tmp_path):
    takes_and_gives_objects(Bucket.open(s3.url("a/b")), tmp_path)
    says_that_nobody_made_it(Bucket.open(s3.url("x").replace("atoll-test", "nobody-made-it")))


@needs_s3
def test_a_server_that_is_away_costs_copies_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr("aggregator.copies.bucket.RETRY_S", 1.0)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with s3_server(tmp_path / "s3.log") as server:
        bucket = Bucket.open(server.url("a"))
        bucket.put("x", b"1")
    began_s = time.monotonic()
    with pytest.raises(Unavailable, match="check address, network and credentials"):
        bucket.put("y", b"1")
    assert time.monotonic() - began_s < 30.0
    with s3_server(tmp_path / "s3.log", server.port):
        bucket.put("y", b"1")
        assert bucket.list() == {"y": 1}  # moto forgets everything
