"""Copies of a real store in a folder, and back: failures at every point, damage, replacement, what a restore makes."""

import contextlib
import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from aggregator.config import AggregatorConfig
from aggregator.copies import copier as copier_module
from aggregator.copies.bucket import Bucket
from aggregator.copies.copier import Copier, Copies
from aggregator.copies.place import place_of
from aggregator.copies.planning import CopyClock
from aggregator.copies.restoring import restore, sets_there
from aggregator.copies.sets import order_of
from aggregator.copies.taking import take
from aggregator.rounds.recovery import lineages
from aggregator.store.layout import commit_path, read_run, versions
from aggregator.store.ledger_file import read_rows
from aggregator.store.loading import load_for
from aggregator.store.store import Store
from broker.wire.errors import ConfigError, Unavailable
from ops import cli
from tests.integration.test_aggregator_store import commit_of, state_of

FRAGMENTS = (0, 1)
NOW_S = 2e9


class Hub:
    """A store with two fragments and a tape, which is copied to a folder."""

    def __init__(self, folder, *, epoch=1):
        self.run_dir, self.place = folder / "run", folder / "copies"
        self.store, self.tape = self.run_dir / "store", self.run_dir / "events.jsonl"
        self.versions = dict.fromkeys(FRAGMENTS, 0)
        self.run_dir.mkdir()
        self.opened = Store.open(self.store)
        self.opened.load()
        self.record = {"run_id": "demo", "epoch": epoch, "manifest": [[], []], "shard": [0, 1]}
        self.opened.save_run(self.record)
        for p in FRAGMENTS:
            self._commit(p, 0)
        self.tape.write_text('{"tape":11}\n')
        self.bucket = Bucket.open(f"file://{self.place}")
        self.copies = self.copier(epoch)

    def copier(self, epoch=1, bucket=None, name="hub-1"):
        return Copies(
            bucket or self.bucket,
            store=self.store,
            tape=self.tape,
            name=name,
            run_id="demo",
            epoch=epoch,
            wall_s=lambda: NOW_S,
        )

    def _commit(self, p, version):
        state = state_of(version, seed=p)
        self.opened.commit(commit_of(state, p), state)
        self.versions[p] = version

    def commit(self, p):
        self._commit(p, self.versions[p] + 1)
        with self.tape.open("a") as tape:
            tape.write(json.dumps({"note": f"version {self.versions[p]} of {p}"}) + "\n")

    def digests(self):
        return tuple(commit_of(state_of(self.versions[p], seed=p), p).digest for p in FRAGMENTS)

    def there(self):
        return {path.relative_to(self.place).as_posix() for path in self.place.rglob("*") if path.is_file()}


@pytest.fixture
def hub(tmp_path):
    made = Hub(tmp_path)
    yield made
    made.opened.close()


def loaded(directory):
    with Store.open(directory / "store") as store:
        return load_for(store, AggregatorConfig(run_id="demo", store=directory / "store"))


# --- there and back -----------------------------------------------------------------------------------------------


def test_nothing_is_copied_before_something_was_published(hub):
    assert hub.copies.make() is None
    with pytest.raises(Unavailable, match="holds no complete copy"):
        sets_there(hub.bucket)


def test_a_restored_store_has_parameters_momentum_and_books_of_the_copy_bit_by_bit(hub, tmp_path):
    for p in (0, 1, 0):
        hub.commit(p)
    assert [each.version for each in hub.copies.make().versions] == [2, 1]
    tape = hub.tape.read_bytes()
    hub.commit(1)  # is lost
    (restored,) = restore(hub.bucket, tmp_path / "again", NOW_S + 30)
    assert (restored.age_s, restored.epoch) == (30.0, 1001)
    assert restored.versions == (2 + 1000 + 120 + 1, 1 + 1000 + 120 + 1)
    again = loaded(tmp_path / "again")
    assert again.run == hub.record | {"epoch": 1001}
    assert again.damaged == ()
    for p, kept in zip(FRAGMENTS, (2, 1), strict=True):
        commit, state = again.fragments[p]
        expected = state_of(kept, seed=p)
        assert commit.epoch == 1001
        assert commit.fragment_version == state.version == restored.versions[p]
        assert state.params.tobytes() == expected.params.tobytes()
        assert state.momentum.tobytes() == expected.momentum.tobytes()
        assert commit.ledger == commit_of(expected, p).ledger | {"gaps": "store_lost"}
        copied = commit_path(tmp_path / "again" / "store", p, kept)
        assert copied.read_bytes() == commit_path(hub.store, p, kept).read_bytes()
        assert versions(tmp_path / "again" / "store", p) == [restored.versions[p], kept, 0]
    assert (tmp_path / "again" / "events.jsonl").read_bytes() == tape
    rows = list(read_rows(tmp_path / "again" / "store" / "ledger.jsonl"))
    assert (
        rows[:-2]
        == [row for row in read_rows(hub.store / "ledger.jsonl") if row["fragment_version"] <= 2][: len(rows) - 2]
    )
    assert [(each.fragment_id, each.kept) for each in lineages(rows)] == [(0, 2), (1, 1)]


def test_a_run_that_had_ended_keeps_its_versions(hub, tmp_path):
    hub.commit(0)
    hub.opened.save_run(hub.record | {"ended": True})
    assert hub.copies.make().ended
    (restored,) = restore(hub.bucket, tmp_path / "again", NOW_S)
    assert restored.versions == (1, 0)
    assert loaded(tmp_path / "again").fragments[0][0] == commit_of(state_of(1), 0)


def test_finished_parts_of_the_tape_snapshots_and_settings_come_along(hub, tmp_path):
    (hub.run_dir / "events.000001.jsonl.gz").write_bytes(b"closed part")
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


# --- failures -----------------------------------------------------------------------------------------------------


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
    ended, problems = threading.Event(), []

    def commit():
        try:
            while not ended.is_set():
                for p in FRAGMENTS:
                    hub.commit(p)
        except BaseException as err:  # noqa: BLE001 (raised below)
            problems.append(err)

    writer = threading.Thread(target=commit)
    hub.commit(0)
    writer.start()
    seen = set()
    try:
        for _ in range(15):
            whole = hub.copies.make()
            first, second = (each.version for each in whole.versions)
            seen.add((first, second))
            assert first - second in (1, 2), "fragment 0 is one ahead, and committed first"
    finally:
        ended.set()
        writer.join(20)
    assert not problems
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


def test_nothing_is_overwritten(hub, tmp_path):
    hub.commit(0)
    hub.copies.make()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        restore(hub.bucket, tmp_path / "mine", NOW_S)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


# --- two hubs -----------------------------------------------------------------------------------------------------


def test_two_restores_take_two_epochs_and_stop_nobody_before_they_copy(hub, tmp_path):
    hub.commit(0)
    hub.copies.make()
    assert [restore(hub.bucket, tmp_path / name, NOW_S)[0].epoch for name in ("a", "b")] == [1001, 2001]
    assert [read_run(tmp_path / name / "store")["epoch"] for name in ("a", "b")] == [1001, 2001]
    hub.commit(0)
    assert hub.copies.make() is not None


def test_the_lost_hub_that_was_not_lost_copies_nothing_once_the_restored_one_does(hub, tmp_path):
    hub.commit(0)
    hub.copies.make()
    (restored,) = restore(hub.bucket, tmp_path / "again", NOW_S)
    with Store.open(tmp_path / "again" / "store") as store:
        store.load()
        assert store.name != "hub-1"
        new = Copies(
            hub.bucket,
            store=tmp_path / "again" / "store",
            tape=None,
            name=store.name,
            run_id="demo",
            epoch=restored.epoch + 1,
        )
        new.make()
    before = hub.there()
    hub.commit(0)
    with pytest.raises(Unavailable, match="is copied there under epoch 1002, this one leads under 1: end one"):
        hub.copies.make()
    assert hub.there() == before
    assert sets_there(hub.bucket)[0].epoch == 1002


# --- several shards -----------------------------------------------------------------------------------------------


class ShardHub(Hub):
    """The store of one shard of two, which has one fragment."""

    def __init__(self, folder, shard):
        self.shard = shard
        folder = folder / f"host-{shard}"
        folder.mkdir()
        super().__init__(folder)
        self.place = folder.parent / "copies"
        self.bucket = Bucket.open(f"file://{self.place}")
        self.copies = self.copier()
        self.known((1, 0))

    def known(self, roster):
        """Shard 0's record has come so far, or shard 1 has taken so much of it over."""
        at = {"roster": list(roster)} if self.shard else {"epoch": roster[0], "serial": roster[1]}
        self.opened.save_run(self.record | {"shard": [self.shard, 2]} | at)

    def copier(self, epoch=1, bucket=None, name="hub-1"):
        return Copies(
            bucket or self.bucket,
            store=self.store,
            tape=self.tape,
            name=name,
            run_id="demo",
            epoch=epoch,
            shard=(self.shard, 2),
            wall_s=lambda: NOW_S,
        )

    def _commit(self, p, version):
        if p == self.shard:
            super()._commit(p, version)

    def copy(self, roster):
        self.commit(self.shard)
        self.known(roster)
        return self.copies.make()


@pytest.fixture
def hubs(tmp_path):
    (tmp_path / "two").mkdir()
    made = ShardHub(tmp_path / "two", 0), ShardHub(tmp_path / "two", 1)
    yield made
    for each in made:
        each.opened.close()


def test_each_shard_has_a_place_of_its_own_and_a_restore_takes_copies_that_fit(hubs, tmp_path, caplog):
    first, second = hubs
    second.copy((1, 1))
    with pytest.raises(Unavailable, match="no complete copy of shard 0"):
        restore(first.bucket, tmp_path / "early", NOW_S)
    assert first.copy((1, 2)) is not None
    assert not first.copies.alone
    for n in range(3, 9):  # shard 0 copies no more
        second.copy((1, n))
    kept = [each.roster for each in sets_there(second.bucket) if each.shard == (1, 2)]
    assert kept == [(1, 8), (1, 7), (1, 1)], "the newest two, and what fits to shard 0's"
    one, two = restore(first.bucket, tmp_path / "again", NOW_S)
    assert (one.whole.roster, two.whole.roster) == ((1, 2), (1, 1))
    assert [each.version for each in two.whole.versions] == [1]
    assert (tmp_path / "again" / "aggregator-1" / "events.jsonl").read_bytes() in second.tape.read_bytes()
    for n, inner in enumerate((".", "aggregator-1")):
        record = read_run(tmp_path / "again" / inner / "store")
        assert (record["epoch"], record["shard"]) == (1001, [n, 2])
        assert versions(tmp_path / "again" / inner / "store", n)[:2] == [1002, 1]
    first.copy((1, 9))
    second.copy((1, 8))
    kept = [each.roster for each in sets_there(second.bucket) if each.shard == (1, 2)]
    assert kept == [(1, 8), (1, 8), (1, 1)], "the copy of before of shard 0 is there, too"
    broken = (
        first.place
        / "shard-0-of-2"
        / next(key for key in sets_there(first.bucket)[0].object_names() if "00000002.commit" in key)
    )
    broken.write_bytes(b"")
    assert [each.whole.roster for each in restore(first.bucket, tmp_path / "more", NOW_S)] == [(1, 2), (1, 1)]


def test_one_shard_that_was_lost_is_restored_by_itself_and_shard_0_never(hubs, tmp_path, capsys):
    first, second = hubs
    first.copy((1, 2))
    second.copy((1, 7))
    assert first.copies.alone, "what shard 1 has goes by what shard 0's copy does not know"
    with pytest.raises(Unavailable, match=r"no whole copy of shard 1 .* fits to one of shard 0: each is newer"):
        restore(first.bucket, tmp_path / "both", NOW_S)
    place = f"file://{first.place}"
    assert cli.main(["restore", place, str(tmp_path / "one"), "--shard", "1"]) == 0
    assert f"aggregator --run demo --store {tmp_path}/one/store --shards 2 --shard 1" in capsys.readouterr().out
    assert versions(tmp_path / "one" / "store", 1)[:2] == [1002, 1]
    for shard, cure in (("0", "restore all without --shard"), ("2", "the run has the shards 0 to 1")):
        assert cli.main(["restore", place, str(tmp_path / "no"), "--shard", shard]) == 2
        assert cure in capsys.readouterr().err
    assert cli.main(["restore", f"{place}/shard-1-of-2", str(tmp_path / "no")]) == 2
    assert "give the place above it" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_runs_of_other_numbers_of_shards_are_not_copied_to_the_same_place(hub, hubs):
    hub.commit(0)
    hub.copies.make()
    hubs[0].commit(0)
    other = hubs[0].copier(bucket=hub.bucket)
    with pytest.raises(Unavailable, match="holds copies of a run of one shard, and this one has 2: give this run"):
        other.make()
    hubs[0].copies.make()
    with pytest.raises(Unavailable, match="holds copies of a run of 2 shards, and this one has 1"):
        hub.copier(bucket=hubs[0].bucket).make()


def test_shard_0_copies_soon_again_until_a_restore_could_work():
    clock = CopyClock(60.0, 0.0)
    clock.done(0.0, 1.0)
    waits = []
    for _ in range(7):
        clock.done(0.0, 0.0)
        clock.again(0.0)
        waits.append(clock.wait_s(0.0))
    assert waits == [2, 4, 8, 16, 32, 60, 60]


# --- the thread ---------------------------------------------------------------------------------------------------


def wait_until(condition, within_s=20.0):
    ends_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def test_the_thread_copies_by_itself_and_once_more_at_the_end(hub):
    hub.commit(0)
    copier = Copier(hub.copies, 3600.0, "file:///somewhere")
    wait_until(lambda: any(key.startswith("complete/") for key in hub.there()))
    hub.commit(0)
    assert copier.finish(within_s=20.0)
    assert [each.version for each in sets_there(hub.bucket)[0].versions] == [2, 0]
    assert copier.troubles() == ()


def test_copies_that_fail_are_a_trouble_that_ends_when_they_work_again(hub, monkeypatch):
    now_s = [1000.0]
    monkeypatch.setattr(copier_module.clocks, "monotonic", lambda: now_s[0])
    hub.commit(0)
    shutil.rmtree(hub.place)
    hub.place.write_text("a file where the folder was")
    copier = Copier(hub.copies, 10.0, "file:///somewhere")
    wait_until(lambda: copier._clock.detail)
    assert copier.troubles() == ()
    now_s[0] += 31.0
    (said,) = copier.troubles()
    assert "the last complete copy in file:///somewhere is 31 s old (cannot" in said
    assert "give another --copy-to" in said
    hub.place.unlink()
    hub.place.mkdir()
    assert copier.finish(within_s=20.0)
    assert copier.troubles() == ()


# --- settings and commands ----------------------------------------------------------------------------------------


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
    with take(hub.store, hub.tape, "hub-1", NOW_S) as taken:
        assert [each.version for each in taken.whole.versions] == [1, 0]
