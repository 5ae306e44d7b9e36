"""Copies of a real store in a folder, and back: failures at every point, damage, the copying thread, the command."""

import contextlib
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aggregator.copies import copier as copier_module
from aggregator.copies.bucket import Bucket
from aggregator.copies.copier import Copier
from aggregator.copies.restoring import restore
from aggregator.copies.taking import take
from aggregator.copy_rules.sets import order_of
from aggregator.interface.config import AggregatorConfig
from aggregator.interface.place import place_of
from aggregator.process.service import load_for
from aggregator.rounds.recovery import lineages
from aggregator.store.layout import commit_path, versions
from aggregator.store.ledger_file import read_rows
from aggregator.store.segments import Header
from aggregator.store.store import Store
from broker.base.errors import ConfigError, Unavailable
from ops import cli
from tests.copied_hub import FRAGMENTS, NOW_S, Hub, sets_there
from tests.integration.test_aggregator_store import commit_of, newest_state, state_of
from tests.local_run import wait_for


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path) as made:
        yield made


def loaded(directory):
    with Store.open(directory / "store") as store:
        return load_for(store, AggregatorConfig(run_id="demo", store=directory / "store"))


def test_nothing_is_copied_before_something_was_published_and_nothing_overwritten(hub, tmp_path):
    assert hub.copies.make() is None
    with pytest.raises(Unavailable, match="holds no complete copy"):
        sets_there(hub.bucket)
    hub.commit(0)
    hub.copies.make()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        restore(hub.bucket, tmp_path / "mine", NOW_S)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_restored_store_has_parameters_momentum_and_books_of_the_copy_bit_by_bit(hub, tmp_path):
    for p in (0, 1, 0):
        hub.commit(p)
    assert [each.version for each in hub.copies.make().versions] == [2, 1]
    tape = hub.tape.read_bytes()
    hub.commit(1)  # is lost
    (restored,) = restore(hub.bucket, tmp_path / "again", NOW_S + 30)
    assert (restored.age_s, restored.epoch) == (30.0, 1001)
    assert restored.versions == (2 + 1000 + 120 + 1, 1 + 1000 + 120 + 1)
    again, store = loaded(tmp_path / "again"), tmp_path / "again" / "store"
    assert (again.run, again.damaged) == (hub.record | {"epoch": 1001}, ())
    for p, kept in zip(FRAGMENTS, (2, 1), strict=True):
        commit, state, expected = again.fragments[p], newest_state(store, p), state_of(kept, seed=p)
        assert commit.epoch == 1001
        assert commit.fragment_version == state.version == restored.versions[p]
        assert state.params.tobytes() == expected.params.tobytes()
        assert state.momentum.tobytes() == expected.momentum.tobytes()
        assert commit.ledger == commit_of(expected, p).ledger | {"gaps": "store_lost"}
        assert commit_path(store, p, kept).read_bytes() == commit_path(hub.store, p, kept).read_bytes()
        assert versions(store, p) == [restored.versions[p], kept, 0]
    assert (tmp_path / "again" / "events.jsonl").read_bytes() == tape
    rows = list(read_rows(store / "ledger.jsonl"))
    before = [row for row in read_rows(hub.store / "ledger.jsonl") if row["fragment_version"] <= 2]
    assert rows[:-2] == before[: len(rows) - 2]
    assert [(each.fragment_id, each.kept) for each in lineages(rows)] == [(0, 2), (1, 1)]


def test_a_run_that_had_ended_keeps_its_versions(hub, tmp_path):
    hub.commit(0)
    hub.opened.save_run(hub.record | {"ended": True})
    assert hub.copies.make().ended
    (restored,) = restore(hub.bucket, tmp_path / "again", NOW_S)
    assert restored.versions == (1, 0)
    assert loaded(tmp_path / "again").fragments[0] == commit_of(state_of(1), 0)


def test_finished_parts_of_the_tape_snapshots_and_settings_come_along(hub, tmp_path):
    (hub.run_dir / "events.000001.jsonl.gz").write_bytes(b"closed part")
    (hub.run_dir / "events.000002.jsonl").write_bytes(b"closed after the other was opened")
    hub.tape.write_bytes(Header(segment=2).text())
    snapshot = hub.store / "snapshots" / "000000001000"
    snapshot.mkdir(parents=True)
    (snapshot / "000.commit").write_bytes(b"a snapshot")
    (snapshot / "001.commit.tmp").write_bytes(b"half of one")
    (hub.run_dir / "config.toml").write_text('[run]\nrun_id = "demo"\n')
    hub.commit(0)
    hub.copies.make()
    again = tmp_path / "again"
    restore(hub.bucket, again, NOW_S)
    assert (again / "events.000001.jsonl.gz").read_bytes() == b"closed part"
    assert [path.name for path in again.glob("events.*jsonl")] == ["events.jsonl"]
    assert (again / "store" / "snapshots" / "000000001000" / "000.commit").read_bytes() == b"a snapshot"
    assert not list(again.rglob("*.tmp"))
    assert (again / "config.toml").stat().st_mode & 0o777 == 0o600
    (hub.run_dir / "config.toml").write_text('[run]\nrun_id = "another"\n')
    hub.copies.make()
    assert "config.toml" not in {file.path for file in sets_there(hub.bucket)[0].files}


def test_a_large_tape_is_copied_in_parts_and_only_its_end_again(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("aggregator.copies.taking.CHUNK_BYTES", 1000)
    with hub.tape.open("a") as tape:
        tape.writelines(f'{{"line":{n}}}\n' for n in range(400))
    hub.commit(0)
    hub.copies.make()
    before = {key for key in hub.there() if key.startswith("objects/events.jsonl/")}
    assert len(before) == -(-hub.tape.stat().st_size // 1000)
    hub.commit(0)
    hub.copies.make()
    assert len({key for key in hub.there() if key.startswith("objects/events.jsonl/")} - before) == 1
    restore(hub.bucket, tmp_path / "again", NOW_S)
    assert (tmp_path / "again" / "events.jsonl").read_bytes() == hub.tape.read_bytes()


def test_what_was_uploaded_is_not_uploaded_again(hub, monkeypatch):
    hub.commit(0)
    hub.copies.make()
    sent = []
    put = Bucket.put
    monkeypatch.setattr(
        Bucket, "put", lambda self, key, *rest, **more: (sent.append(key), put(self, key, *rest, **more))
    )
    hub.copies.make()
    assert [order_of(key) for key in sent] == [(1, 2)]
    hub.copier().make()  # after a restart, too
    assert [order_of(key) for key in sent] == [(1, 2), (1, 3)]


class NetworkGone(Unavailable):
    pass


class Failing(Bucket):
    """Works so many times."""

    def __init__(self, url, works):
        super().__init__(Bucket.open(url)._store, place_of(url))
        self.left = works

    def _count(self):
        self.left -= 1
        if self.left < 0:
            raise NetworkGone("the network is gone; wait", definite=False)

    def list(self, prefix=""):
        self._count()
        return super().list(prefix)

    def put(self, key, content, *, new=False):
        self._count()
        super().put(key, content, new=new)

    def delete(self, keys):
        for key in keys:
            self._count()
            super().delete([key])


def test_whatever_fails_wherever_the_newest_copy_is_whole_and_a_state_that_there_was(hub, tmp_path):
    """A copy fails at its first operation, then one further on each time, while versions come in between."""
    states = {}
    url = f"file://{hub.place}"
    whole = 0
    for works in range(40):
        hub.commit(works % 2)
        states[hub.digests()] = dict(hub.versions)
        with contextlib.suppress(NetworkGone):
            hub.copier(bucket=Failing(url, works)).make()
            whole += 1
        if not any(key.startswith("complete/") for key in hub.there()):
            continue
        newest = sets_there(hub.bucket)[0]
        assert {each.fragment_id: each.version for each in newest.versions} == states[
            tuple(each.digest for each in newest.versions)
        ]
        assert set(newest.object_names()) <= hub.there()
    assert whole > 10
    hub.copies.make()
    assert len([key for key in hub.there() if key.startswith("complete/")]) == 2
    (restored,) = restore(hub.bucket, tmp_path / "again", NOW_S)
    assert tuple(each.digest for each in restored.whole.versions) == hub.digests()
    assert set(loaded(tmp_path / "again").fragments) == set(FRAGMENTS)


def test_versions_that_come_and_go_while_they_are_read_make_no_mixed_copy(hub, monkeypatch):
    monkeypatch.setattr("aggregator.copies.taking.ATTEMPTS", 10_000)  # this test never lets it be content with less
    ended = threading.Event()

    def commit():
        while not ended.is_set():
            for p in FRAGMENTS:
                hub.commit(p)

    hub.commit(0)
    with ThreadPoolExecutor() as pool:
        writer = pool.submit(commit)
        seen = set()
        try:
            for n in range(2000):  # on a busy disk a commit takes as long as many copies
                if n >= 15 and len(seen) > 1:
                    break
                first, second = (each.version for each in hub.copies.make().versions)
                seen.add((first, second))
                assert first - second in (1, 2), "fragment 0 is one ahead, and committed first"
        finally:
            ended.set()
        writer.result()
    assert len(seen) > 1


def test_a_damaged_object_makes_the_copy_before_be_taken(hub, tmp_path, caplog):
    hub.commit(0)
    first = hub.copies.make()
    hub.commit(0)
    second = hub.copies.make()
    broken = hub.place / next(key for key in second.object_names() if key not in set(first.object_names()))
    content = bytearray(broken.read_bytes())
    content[-1] ^= 1
    broken.write_bytes(content)
    (restored,) = restore(hub.bucket, tmp_path / "again", NOW_S)
    assert restored.whole == first
    assert "restore.set_broken" in caplog.text
    (hub.place / next(iter(first.object_names()))).unlink()
    with pytest.raises(Unavailable, match=r"is whole: .* is not what was copied .* is not there"):
        restore(hub.bucket, tmp_path / "more", NOW_S)
    assert not (tmp_path / "more").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "copies", "run"]


# --- the thread ---------------------------------------------------------------------------------------------------


def test_the_thread_copies_by_itself_and_once_more_at_the_end(hub):
    hub.commit(0)
    copier = Copier(hub.copies, 3600.0)
    wait_for(lambda: any(key.startswith("complete/") for key in hub.there()), "complete copy")
    hub.commit(0)
    copier.begin_last(20.0)
    assert copier.finish()
    assert [each.version for each in sets_there(hub.bucket)[0].versions] == [2, 0]
    assert copier.troubles() == ()


def test_copies_that_fail_are_a_trouble_that_ends_when_they_work_again(hub, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(copier_module.clocks, "monotonic", lambda: now_s[0])
    hub.commit(0)
    shutil.rmtree(hub.place)
    hub.place.write_text("a file where the folder was")
    copier = Copier(hub.copies, 10.0)
    wait_for(lambda: copier._clock.detail, "failure")
    assert copier.troubles() == ()
    now_s[0] += 31.0
    (said,) = copier.troubles()
    assert said.startswith(f"for 31 s: no copy to {hub.bucket.url} was made yet (cannot")
    assert "give another --copy-to" in said
    hub.place.unlink()
    hub.place.mkdir()
    copier.begin_last(20.0)
    assert copier.finish()
    assert copier.troubles() == ()


def test_a_last_copy_is_waited_for_by_name_and_its_failure_is_told(hub, monkeypatch):
    hub.commit(0)
    answers, told = threading.Event(), []
    monkeypatch.setattr(
        hub.copies, "make", lambda: answers.wait(20.0) and None
    )  # a store that accepts and says nothing
    copier = Copier(hub.copies, 3600.0)
    copier.begin_last(0.01)
    told += copier.troubles()
    assert not copier.finish()
    told += copier.troubles()
    answers.set()
    assert told == [
        f"for up to 0 s: the last copy to {hub.bucket.url} is waited for",
        f"at the end: the last copy to {hub.bucket.url} failed (it was not through within 0 s); "
        "what was merged since the one before, if there is one, is on this disk alone",
    ]


@pytest.mark.parametrize(
    ("given", "cure"),
    [
        ({"store": "s3://bucket/run"}, "--store DIR --copy-to s3://bucket/run"),
        ({"store": "gs:bucket"}, "--store DIR --copy-to gs://bucket"),
        ({"copy_to": "bucket"}, "must begin with s3://"),
        ({"copy_every_s": 0.1}, "must be at least 1"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_the_cure(given, cure):
    given = {name: Path(value) if name == "store" else value for name, value in given.items()}
    with pytest.raises(ConfigError, match=cure):
        AggregatorConfig(**given)


def test_the_command_says_what_there_is_and_how_to_go_on(hub, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ATOLL_LOG", "text")
    hub.commit(0)
    hub.copies.make()
    place = f"file://{hub.place}"
    assert cli.main(["restore", place]) == 0
    assert "run demo, as it was" in capsys.readouterr().out
    assert cli.main(["restore", place, str(tmp_path / "again")]) == 0
    out = capsys.readouterr().out
    assert "fragment versions 1 0\n" in out
    assert "above what islands may hold" in out
    assert f"aggregator --run demo --store {tmp_path / 'again' / 'store'}" in out
    assert cli.main(["restore", place, str(tmp_path / "again")]) == 2
    assert cli.main(["restore", place, str(tmp_path / "b"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["digests"] == list(hub.digests())
    assert found["epoch_claimed"] == 2001
    assert cli.main(["restore", f"file://{tmp_path}/nowhere"]) == 2
    assert not (tmp_path / "nowhere").exists()


def test_a_store_whose_newest_version_is_damaged_is_copied_as_it_would_be_loaded(hub):
    hub.commit(0)
    hub.commit(0)
    path = commit_path(hub.store, 0, 2)
    path.write_bytes(path.read_bytes()[:100])
    with take(hub.store, hub.tape) as taken:
        assert [each.fragment_version for each in taken.commits] == [1, 0]


def test_what_a_newest_copy_that_cannot_be_read_may_need_stays(hub, caplog):
    hub.commit(0)
    first = hub.copies.make()
    (hub.place / first.key).write_text("{}")
    hub.commit(0)
    second = hub.copies.make()
    assert {first.key, *first.object_names(), second.key, *second.object_names()} <= hub.there()
    assert "copy.set_unreadable" in caplog.text
