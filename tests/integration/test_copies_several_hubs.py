"""Copies of several hubs in one place: a restored one beside the one that was lost, and those of shards."""

import pytest

from aggregator.copies.bucket import Bucket
from aggregator.copies.copier import Copies
from aggregator.copies.restoring import restore
from aggregator.copy_rules.planning import CopyClock
from aggregator.store.layout import read_run, versions
from aggregator.store.store import Store
from broker.base.errors import Unavailable
from ops import cli
from tests.copied_hub import NOW_S, Hub, sets_there


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path) as made:
        yield made


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
        place = tmp_path / "again" / "store"
        epoch = restored.epoch + 1
        new = Copies(place=hub.bucket, store=place, tape=None, name=store.name, run_id="demo", epoch=epoch)
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
        self.shard, self.as_shard = shard, (shard, 2)
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
