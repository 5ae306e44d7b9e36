"""An error of the operating system is told with its own cause and cure, never with the one that was expected."""

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from aggregator.store import snapshots
from aggregator.store.layout import commit_path
from aggregator.store.store import Store
from broker.base import sources
from broker.base.errors import ConfigError, Unavailable
from broker.registry.redis_client import read_password
from broker.transport.keys import BROKER_PUBLIC, read_allow_list, read_public, read_secret
from islands.session import checkpoint
from ops import launcher, run_directory
from ops.evaluation.curve_file import CurveFile
from ops.lab import runner
from ops.processes.cluster import are_free, free_ports


def failing(code, where=lambda *_: True, otherwise=None):
    """Returns a call that fails with an errno where a condition holds of its arguments."""

    def call(*args):
        if where(*args):
            raise OSError(code, os.strerror(code))
        return otherwise(*args)

    return call


def opened(context):
    with context:
        pass


LOCKING = {
    "run directory": run_directory.claim,
    "run directory, looked at": lambda path: (path / run_directory.LOCK_FILE).touch() or run_directory.in_use(path),
    "store": lambda path: Store.open(path / "store"),
    "curve": CurveFile,
    "laboratory": lambda path: opened(runner._locked(path, "parity")),
    "environment": lambda path: opened(launcher._one_builder(path / ".venv.lock")),
}


@pytest.mark.parametrize("lock", LOCKING.values(), ids=LOCKING)
def test_a_file_system_without_locks_is_no_other_process(tmp_path, monkeypatch, lock):
    monkeypatch.setattr("fcntl.flock", failing(errno.ENOLCK))
    with pytest.raises((Unavailable, launcher.LauncherError)) as caught:
        lock(tmp_path)
    assert "No locks available" in str(caught.value)
    assert "file system" in str(caught.value)
    assert "another" not in str(caught.value)


def test_a_directory_that_cannot_be_flushed_is_refused_at_the_start_and_is_no_full_disk(tmp_path, monkeypatch):
    of_a_directory = failing(errno.EINVAL, lambda fd: stat.S_ISDIR(os.fstat(fd).st_mode), os.fsync)
    monkeypatch.setattr("os.fsync", of_a_directory)
    cure = "on a file system that cannot do this .*: name one on a local disk"
    with pytest.raises(ConfigError, match=f"no checkpoint can be written there .*{cure}"):
        checkpoint.prepare(tmp_path / "state")
    with pytest.raises(Unavailable, match=cure):
        Store.open(tmp_path / "store")


def test_hard_links_that_are_not_allowed_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("os.link", failing(errno.EPERM))
    with pytest.raises(Unavailable, match=r"cannot link .* a snapshot needs hard links"):
        snapshots._link(commit_path(tmp_path, 0, 1), tmp_path / "x")


class NoIPv4(socket.socket):
    """A socket of a machine whose loopback has an address of IPv6 alone."""

    def bind(self, address):
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))


def test_a_loopback_without_ipv4_has_no_ports_that_are_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert not are_free([taken.getsockname()[1]])
    monkeypatch.setattr("ops.processes.cluster.socket.socket", NoIPv4)
    with pytest.raises(Unavailable, match=r"cannot listen on 127\.0\.0\.1:\d+ .*give the device lo that address"):
        free_ports(1)


READING = {
    "secret key": (read_secret, "atoll keys new"),
    "public key": (lambda path: read_public(path.with_name(BROKER_PUBLIC), setting="key"), "copy it from where"),
    "allow list": (read_allow_list, "atoll keys new"),
    "settings": (lambda path: sources.read_toml(path, field="config"), "give the path of a TOML file"),
    "password": (lambda path: read_password(str(path)), "check the path"),
}


@pytest.mark.parametrize(("read", "of_missing"), READING.values(), ids=READING)
def test_a_file_that_may_not_be_read_is_not_a_missing_one(tmp_path, monkeypatch, read, of_missing):
    with pytest.raises(ConfigError, match=f"No such file or directory.*{of_missing}"):
        read(tmp_path / "x")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: failing(errno.EACCES)())
    with pytest.raises(ConfigError, match=r"Permission denied.*give this user the right to it") as caught:
        read(tmp_path / "x")
    assert of_missing not in str(caught.value)
