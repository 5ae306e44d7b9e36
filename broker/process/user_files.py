"""Files of this user outside any run: locks and a cache. Each is optional.

A machine may have no temporary directory that can be written (a read-only root), and a user no home. Then there is no
lock and no cache, and everything works without.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from broker.process import logs

log = logs.get(__name__)


def lock(name: str) -> int | None:
    """Takes a lock among this user's processes on this machine, held while the descriptor is open.

    The file stays: whoever removed it would let two others lock two files of that name.

    Returns:
        None where no lock can be taken: that is as if there were none.

    Raises:
        BlockingIOError: Another process holds it.
    """
    try:
        path = Path(tempfile.gettempdir(), f"atoll-{os.getuid()}-{name}.lock")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as err:
        log.warning("lock.unavailable", lock=name, reason=err.strerror or str(err), cure="goes on without it")
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        os.close(descriptor)
        if isinstance(err, BlockingIOError):
            raise
        log.warning("lock.unavailable", lock=str(path), reason=err.strerror, cure="goes on without it")
        return None
    return descriptor


def cache_folder() -> Path | None:
    """Returns the folder for what can be made again: ``$XDG_CACHE_HOME/atoll``, or ``~/.cache/atoll``.

    None for a user without a home.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "atoll")
    return folder if folder.is_absolute() else None
