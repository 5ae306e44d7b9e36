"""What every object store must do for copies of a run, whoever made it."""

import os

import pytest

from aggregator.copies.bucket import AlreadyThere
from aggregator.copies.restoring import restore
from aggregator.store.layout import commit_path
from broker.base.errors import Unavailable
from tests.copied_hub import FRAGMENTS, NOW_S, Hub, sets_there


def takes_and_gives_objects(bucket, folder):
    """Checks an empty bucket: objects of every size, one that is made once only, lists, and what is deleted."""
    large = folder / "large"
    large.write_bytes(os.urandom(20 << 20))  # in three parts
    bucket.put("objects/large", large)
    bucket.put("objects/empty", b"")
    bucket.put("claims/1", b"x", new=True)
    with pytest.raises(AlreadyThere):
        bucket.put("claims/1", b"y", new=True)
    assert bucket.list() == {"claims/1": 1, "objects/empty": 0, "objects/large": 20 << 20}
    assert bucket.list("claims/") == {"claims/1": 1}
    assert bucket.read("objects/large") == large.read_bytes()
    bucket.delete(["claims/1", "claims/2"])
    assert bucket.list("claims/") == {}
    with pytest.raises(FileNotFoundError):
        bucket.read("claims/1")


def comes_back_bit_by_bit(bucket, folder):
    """Checks that a store is copied to an empty bucket, again and again, and restored from there."""
    hub = Hub(folder)
    try:
        copies = hub.copier(bucket=bucket)
        for p in (0, 1, 0, 0):  # sets and objects of before are removed
            hub.commit(p)
            copies.make()
        assert len(sets_there(bucket)) == 2
        (restored,) = restore(bucket, folder / "again", NOW_S)
        assert tuple(each.digest for each in restored.whole.versions) == hub.digests()
        for p in FRAGMENTS:
            original = commit_path(hub.store, p, hub.versions[p])
            assert commit_path(folder / "again" / "store", p, hub.versions[p]).read_bytes() == original.read_bytes()
        (again,) = restore(bucket, folder / "more", NOW_S)
        assert (restored.epoch, again.epoch) == (1001, 2001)
    finally:
        hub.opened.close()


def says_that_nobody_made_it(bucket):
    """Checks that whatever is asked of a bucket that is not there is answered with the cure."""
    for attempt in (bucket.list, lambda: bucket.put("a", b""), lambda: bucket.read("a"), lambda: bucket.delete(["a"])):
        with pytest.raises(Unavailable, match="make the bucket or container"):
            attempt()
