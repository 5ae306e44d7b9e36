"""Replaces a file as a whole: a crash leaves the old one or the new one.

What is new is written beside its place, flushed and renamed, and its directory flushed. What a crash leaves at most is
a file whose name ends in ``TEMPORARY``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from aggregator.store.layout import mapped

TEMPORARY = ".tmp"


def replace(path: Path, write: Callable[[int], None], *, mode: int = 0o644) -> None:
    """Puts what ``write`` writes into a descriptor in the place of ``path``, whole and durable.

    Raises:
        Unavailable: Definite where the old file still stands.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with mapped(f"cannot write {path}", definite=True):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            try:
                write(fd)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # on a full disk, half a file takes the space that somebody is trying to free
            temporary.unlink(missing_ok=True)
        raise
    with mapped(f"cannot flush {path.parent}", definite=False):
        flush(path.parent)


def flush(path: Path) -> None:
    """Makes the content of a file durable, or the names in a directory; raises OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
