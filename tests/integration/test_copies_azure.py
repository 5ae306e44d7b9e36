"""Copies at a server process that speaks Azure's blob storage, and back; skipped where none is installed."""

import pytest

from aggregator.copies.bucket import Bucket
from broker.base.errors import ConfigError, Unavailable
from tests.azure_server import CREDENTIALS, SERVER, WHY_NOT, azure_server
from tests.object_check import comes_back_bit_by_bit, says_that_nobody_made_it, takes_and_gives_objects

pytestmark = pytest.mark.timeout(120)
needs_azure = pytest.mark.skipif(SERVER is None, reason=WHY_NOT)


@pytest.fixture
def azure(tmp_path, monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with azure_server(tmp_path / "azure.log") as server:
        yield server


@needs_azure
def test_a_store_comes_back_from_azure_bit_by_bit_and_objects_of_every_size_do(azure, tmp_path, monkeypatch):
    comes_back_bit_by_bit(Bucket.open(azure.url("runs/one")), tmp_path)
    takes_and_gives_objects(Bucket.open(azure.url("a/b")), tmp_path)

    says_that_nobody_made_it(Bucket.open(azure.url("x").replace("atoll-test", "nobody-made-it")))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "AAAA")
    with pytest.raises(Unavailable, match="check credentials and rights"):
        Bucket.open(azure.url("x")).list()


def test_an_account_that_is_not_said_is_asked_for(monkeypatch):
    for name in CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="set AZURE_STORAGE_ACCOUNT_NAME"):
        Bucket.open("az://container/run")
