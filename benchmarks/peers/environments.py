"""Environments of the other systems, made at first use from pinned versions, never one of Atoll's own."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from broker.process.user_files import cache_folder
from broker.wire.errors import Unavailable

HERE = Path(__file__).parent
INSTALL_WITHIN_S = 1200.0
_STAMP = "benchmark.stamp"


def python_of(name: str, folder: Path | None, say: Callable[[str], None]) -> str:
    """Returns the interpreter of an environment that has what ``requirements-NAME.txt`` lists.

    pip's own settings hold, such as PIP_FIND_LINKS and PIP_INDEX_URL.

    Args:
        name: Of the system.
        folder: Where environments are kept; the user's cache when it is not given.
        say: Takes progress.

    Raises:
        Unavailable: It does not install here; with the end of what pip said.
    """
    requirements = HERE / f"requirements-{name}.txt"
    pinned = requirements.read_bytes()
    parent = folder or cache_folder()
    if parent is None:
        raise Unavailable("this user has no cache folder: name one with --environments", definite=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    home = parent / "peers" / f"{name}-{version}-{hashlib.sha256(pinned).hexdigest()[:12]}"
    python = home / "bin" / "python"
    if (home / _STAMP).exists():
        return os.fspath(python)
    say(f"installs {name} in {home}")
    shutil.rmtree(home, ignore_errors=True)
    commands = ([sys.executable, "-m", "venv", os.fspath(home)], [os.fspath(python), "-m", "pip", "install", "-r"])
    for command in (commands[0], [*commands[1], os.fspath(requirements)]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_WITHIN_S)
        except subprocess.TimeoutExpired as err:
            raise Unavailable(f"{name} was not installed within {INSTALL_WITHIN_S:g} s", definite=False) from err
        if done.returncode:
            raise Unavailable(f"{name} does not install here: {done.stderr[-600:].strip()}", definite=True)
    (home / _STAMP).write_bytes(pinned)
    return os.fspath(python)
