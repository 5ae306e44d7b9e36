"""What every object store must do for copies of a run, whoever made it."""

import os

import pytest

from aggregator.copies.bucket import AlreadyThere


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
