"""What the tests share: recorded runs; Redis servers; for training loops a hub, and seats on this host."""

import tempfile

import pytest

from tests.hub import Hub
from tests.local_run import RedisServer
from tests.recorded.plain import plain as record_plain
from tests.recorded.recording import recorded
from tests.recorded.resumed import resumed as record_resumed
from tests.recorded.watched import watched as record_watched


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    return recorded(record_plain, tmp_path_factory)


@pytest.fixture(scope="session")
def watched(tmp_path_factory):
    return recorded(record_watched, tmp_path_factory)


@pytest.fixture(scope="session")
def resumed(tmp_path_factory):
    return recorded(record_resumed, tmp_path_factory)


@pytest.fixture
def seats_of_its_own(tmp_path_factory, monkeypatch):
    """Islands without a name are known by their seat on this host, and tests in other processes take seats too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("seats")))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path / "store") as running:
        yield running


@pytest.fixture
def redis(tmp_path_factory):
    """A server of the test's own that is not started yet."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def server(redis):
    """A server of the test's own."""
    return redis.start()


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory):
    """A server for all tests that have a run of their own in it."""
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.stop()
