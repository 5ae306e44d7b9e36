"""Tests of the PyTorch side: ``python3 -m ops test --torch`` runs them in an environment of their own."""

from __future__ import annotations

import importlib.util
import tempfile

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(autouse=True)
def seats_of_its_own(tmp_path_factory, monkeypatch):
    """Islands without a name are known by their seat on this host, and tests in other processes take seats too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("seats")))
    monkeypatch.setattr(tempfile, "tempdir", None)
