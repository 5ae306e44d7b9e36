"""Copies by Google's requests, and back; skipped where no server is installed."""

import pytest

from aggregator.copies.bucket import Bucket
from tests.google_server import ACCOUNT, google_server
from tests.object_check import comes_back_bit_by_bit, says_that_nobody_made_it, takes_and_gives_objects
from tests.s3_server import SERVER, WHY_NOT

pytestmark = [
    pytest.mark.full("megabytes through a gateway"),
    pytest.mark.timeout(120),
    pytest.mark.skipif(SERVER is None, reason=WHY_NOT),
]


def test_a_store_comes_back_from_google_bit_by_bit_and_objects_of_every_size_do(tmp_path, monkeypatch):
    account = tmp_path / "account.json"
    account.write_text(ACCOUNT)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
    with google_server(tmp_path / "moto.log") as url:
        comes_back_bit_by_bit(Bucket.open(url("runs/one")), tmp_path)
        takes_and_gives_objects(Bucket.open(url("a/b")), tmp_path)
        says_that_nobody_made_it(Bucket.open(url("x").replace("atoll-test", "nobody-made-it")))
