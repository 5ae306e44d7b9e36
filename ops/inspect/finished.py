"""Reads the Redis data of a finished run, through a server that is started for one question.

``up`` starts a Redis of its own, which ends with the run and leaves a snapshot in the run directory. Asked for the
status of that directory, we start a server on a copy of the snapshot, ask it, and end it: the answer still comes from
Redis alone, by the same code as for a live run.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from broker.config import DEFAULT_REDIS_URL
from broker.process import settings
from broker.wire.errors import ConfigError, Unavailable
from ops.processes.child_process import tied
from ops.processes.cluster import free_ports, wait_until_listening
from ops.processes.redis_server import SNAPSHOT, server

#: In the run directory: address and run id in the Redis that was started for it.
ADDRESS_FILE = "redis-url"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a run's Redis listens, or listened, and the run's name in it.

    Attributes:
        own: Redis was started for this run, ended with it, and left a snapshot; otherwise it was there before.
    """

    url: str
    run_id: str
    own: bool


def address_in(run_dir: Path) -> Address:
    """Returns the address in a run directory.

    Raises:
        ConfigError: It is no run directory.
    """
    config = run_dir / "config.toml"
    if not config.is_file():
        raise ConfigError("RUN_DIR", str(run_dir), "must be the directory of a run that `up` started")
    try:
        url, run_id = (run_dir / ADDRESS_FILE).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        run = settings.read_file(config).get("run", {})
        return Address(url=run.get("redis_url", DEFAULT_REDIS_URL), run_id=run.get("run_id", ""), own=False)
    return Address(url=url, run_id=run_id, own=True)


def _temporary_directory() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="atoll-status-")
    except OSError as err:
        cure = "name a folder that can be written with TMPDIR"
        raise Unavailable(f"no copy of what Redis left can be made ({err.strerror}): {cure}", definite=True) from err


@contextlib.contextmanager
def served(run_dir: Path) -> Iterator[str]:
    """Serves a finished run's snapshot on loopback, and yields the address.

    Raises:
        Unavailable: There is no snapshot, or the server does not start.
    """
    snapshot = run_dir / SNAPSHOT
    if not snapshot.is_file():
        cure = (
            "is the run still starting, or was its Redis killed? report.json and aggregator-report.json may have more"
        )
        raise Unavailable(f"{run_dir} has no {SNAPSHOT}: {cure}", definite=True)
    with _temporary_directory() as directory:
        shutil.copy(snapshot, directory)
        port = free_ports(1)
        found = server(port=port, directory=directory)
        with subprocess.Popen(tied(found.command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                if not wait_until_listening(port, alive=lambda: process.poll() is None):
                    raise Unavailable(f"Redis did not start on {snapshot}: is it damaged?", definite=True)
                yield found.url
            finally:
                process.kill()  # it has nothing to save
