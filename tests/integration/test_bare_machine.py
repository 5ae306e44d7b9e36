"""A machine that has nothing: no temporary directory that can be written, and no home for the user."""

import pytest

from tests.local_run import ROOT, Up, check_report

pytestmark = [pytest.mark.timeout(180), pytest.mark.full("a whole run")]

#: Put before everything else in each process: what a read-only root and a user number without a name look like.
BARE = """
import os, pwd, tempfile

def none():
    raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

def unknown(_):
    raise KeyError("uid not found")

os.environ.pop("HOME", None)
tempfile.gettempdir, pwd.getpwuid = none, unknown
"""


def test_a_run_needs_neither_a_home_nor_a_temporary_directory(tmp_path, monkeypatch):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    flags = ("--islands", 2, "--tokens", 4_000, "--pace", 0.005)
    path = f"{tmp_path / 'bare'}:{ROOT}"
    with Up(tmp_path / "run", *flags, PYTHONPATH=path) as up:
        assert up.wait() == 0, up.err
    check_report(up.report())
    assert "Traceback" not in up.err
    assert list((tmp_path / "here").iterdir()) == []
