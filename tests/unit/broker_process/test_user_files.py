"""Locks, caches and paths of a user who may have no temporary directory, and no home."""

import logging
import os
import pwd
import tempfile
from pathlib import Path

import pytest

import islands
from broker.base import settings
from broker.base.errors import ConfigError, Unavailable
from broker.process import user_files
from islands.joining import HostIdentity
from ops import run_directory
from ops.inspect.status import served
from ops.processes import numeric


@pytest.fixture
def nowhere(monkeypatch):
    """As under a read-only root."""

    def none():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """As in a container under a number that no user has."""

    def unknown(_):
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)


def test_a_lock_is_held_by_one_until_it_is_closed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    first = user_files.lock("x")
    with pytest.raises(BlockingIOError):
        user_files.lock("x")
    os.close(first)
    os.close(user_files.lock("x"))


def test_a_lock_that_cannot_be_taken_is_none_and_is_told_in_one_line(nowhere, caplog):
    with caplog.at_level(logging.WARNING):
        assert user_files.lock("x") is None
        assert HostIdentity.take("demo") is None
    line, _ = caplog.messages
    assert line.startswith('lock.unavailable lock=x reason="No usable temporary directory found')


def test_a_file_system_without_locks_has_none(monkeypatch, tmp_path):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(user_files.fcntl, "flock", refuse)
    assert HostIdentity.take("demo") is None
    assert len(list(tmp_path.iterdir())) == 1


def test_what_needs_a_temporary_directory_says_which_setting_names_one(nowhere, tmp_path):
    (tmp_path / "status.rdb").touch()
    with pytest.raises(Unavailable, match="TMPDIR"), served(tmp_path):
        pass


def test_the_cache_is_where_the_user_keeps_caches_and_without_a_home_there_is_none(homeless, monkeypatch, tmp_path):
    assert user_files.cache_folder() is None
    assert numeric.compilation_cache() == {}
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/somewhere")
    assert numeric.compilation_cache()["JAX_COMPILATION_CACHE_DIR"] == "/somewhere"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_files.cache_folder() == tmp_path / ".cache" / "atoll"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_files.cache_folder() == tmp_path / "atoll"


def test_a_tilde_is_the_home_directory_or_refused_and_never_a_folder(homeless, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"state_dir = '~/x': .* set HOME"):
        islands.join("tcp://127.0.0.1:1", {}, state_dir="~/x")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert settings.expanded("out", "~/x") == tmp_path / "home" / "x"
    assert settings.expanded("out", "x~") == Path("x~")
    assert list(tmp_path.iterdir()) == []
    assert run_directory.unused(None).parent == tmp_path / "runs"
