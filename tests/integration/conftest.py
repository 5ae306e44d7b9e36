"""What the tests of training loops share: a hub, and seats on this host for themselves."""

import tempfile

import pytest

from tests.hub import Hub


@pytest.fixture
def seats_of_its_own(tmp_path_factory, monkeypatch):
    """Islands without a name are known by their seat on this host, and tests in other processes take seats too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("seats")))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path / "store") as running:
        yield running
