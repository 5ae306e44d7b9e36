"""The directory of a run: locked while in use, and written whole files at a time.

One ``up`` or ``hub`` at a time works in a run directory; it holds the file ``lock`` for as long as its process lives,
so that neither a crash nor a reboot leaves a directory that looks used. The aggregator's store in it has a lock of its
own: a store may also be used without them.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
from pathlib import Path

from aggregator.store import replacing
from aggregator.store.commit_file import write_all
from aggregator.store.layout import mapped
from broker.base.errors import ConfigError, Unavailable, cure_of
from broker.process import clocks

LOCK_FILE = "lock"


def unused(wanted: Path | None) -> Path:
    """Returns an absolute path that does not exist, or is an empty directory.

    Raises:
        ConfigError: ``wanted`` holds something, or is no directory.
    """
    if wanted is None:
        stem = Path("runs", f"{datetime.datetime.now():%Y%m%d-%H%M%S}").absolute()
        names = (stem, *(stem.with_name(f"{stem.name}-{n}") for n in range(2, 1000)))
        return next(each for each in names if not each.exists())
    path = wanted.absolute()
    if path.exists() and not path.is_dir():
        raise ConfigError("run_dir", str(wanted), "is a file: name a directory that is new or empty")
    if path.exists() and any(path.iterdir()):
        cure = "is in use; choose a new one (nothing is ever overwritten), or go on with its run: up --resume"
        raise ConfigError("run_dir", str(wanted), cure)
    return path


def claim(run_dir: Path) -> int:
    """Takes a run directory for as long as this process lives, or until the descriptor returned is closed.

    Raises:
        ConfigError: Another process has it.
        Unavailable: The directory cannot be written.
    """
    path = run_dir / LOCK_FILE
    try:
        lock = hold(path)
    except BlockingIOError as err:
        holder = path.read_text(encoding="utf-8", errors="replace") or "another process"
        cure = f"is in use by {holder}: one `up` or `hub` at a time; end that one first (Ctrl-C)"
        raise ConfigError("run_dir", str(run_dir), cure) from err
    try:
        with mapped(f"cannot write {path}", definite=True):
            os.ftruncate(lock, 0)
            os.write(lock, f"process {os.getpid()}".encode())
    except Unavailable:
        os.close(lock)
        raise
    return lock


def hold(path: Path) -> int:
    """Opens a file for appending, and locks it until the descriptor that is returned is closed.

    Raises:
        BlockingIOError: Another process holds it.
        Unavailable: It cannot be written, or not locked.
    """
    with mapped(f"cannot write {path}", definite=True):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        os.close(descriptor)
        if isinstance(err, BlockingIOError):
            raise
        raise Unavailable(f"cannot lock {path}: {err.strerror}; {cure_of(err)}", definite=True) from err
    return descriptor


def in_use(run_dir: Path) -> bool:
    """Tells whether an ``up`` works in a run directory now; raises as :func:`is_locked` does."""
    return is_locked(run_dir / LOCK_FILE)


def is_locked(path: Path) -> bool:
    """Tells whether a process holds a file; none does that is not there.

    Raises:
        Unavailable: Nobody can tell here.
    """
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as err:
        what = f"cannot tell whether a process works with {path} ({err.strerror}); {cure_of(err)}"
        raise Unavailable(what, definite=True) from err
    return False


def write(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replaces a file by ``text``, whole or not at all, even if the power fails; raises Unavailable."""
    try:
        content = memoryview(text.encode())
    except UnicodeEncodeError as err:
        what = f"cannot write {path!s}: {err.object[err.start : err.end]!r} in it is no text"
        raise Unavailable(f"{what}; choose paths that are UTF-8", definite=True) from err
    replacing.replace(path, lambda fd: write_all(fd, content), mode=mode)


#: What became of the processes of a run, beside its tape: who shows the run later reads it there.
PROCESSES_FILE = "processes.jsonl"


def tell(run_dir: Path, process: str, text: str) -> None:
    """Adds a line to the file about processes, by the tapes' clock; a full disk stops nothing."""
    line = {"now_s": round(clocks.monotonic(), 3), "process": process, "text": text}
    with contextlib.suppress(OSError), (run_dir / PROCESSES_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
