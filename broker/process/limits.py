"""Raises the limit of open files, and sets when memory that is freed goes back to the system. Shell.

The latter are settings of glibc, to be made while there is one thread; other C libraries have no such settings.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h


def raise_open_files() -> int:
    """Raises this process's limit of open files to the system's; returns the limit in force.

    Where the system refuses, or names no upper limit, the limit stays. Each island holds two connections to its broker,
    and each is an open file there; an aggregator holds a file of each fragment. Systems let a process have 1,024 of
    them unless it asks for more, which it may up to a second, far higher limit: without that about 500 islands connect,
    and the others are left to wait for ever.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard in (soft, resource.RLIM_INFINITY):
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return soft
    return hard


def return_freed(least_bytes: int) -> None:
    """Has memory of so many bytes or more go back to the system as soon as it is freed.

    Left alone, glibc raises its limit for separate mappings to the size of what it sees, up to 32 MiB, and what is
    smaller lies between other things: its place is not the system's before all above it is free, and fits nothing else.

    Args:
        least_bytes: Large enough that the page faults cost little beside the use of it.
    """
    _set(_MMAP_THRESHOLD, least_bytes)


def keep_freed(most_bytes: int = (1 << 31) - 1, *, arenas: int = 0) -> None:
    """Has glibc keep freed memory: a new page costs the kernel more than the bytes written to it.

    Args:
        most_bytes: What is free at the end of a pool beyond that goes back to the system.
        arenas: Pools, at the most; 0: as many as glibc likes, some for each processor.
    """
    _set(_TRIM_THRESHOLD, most_bytes)
    _set(_MMAP_THRESHOLD, 32 << 20)  # the most that it accepts
    if arenas:
        _set(_ARENA_MAX, arenas)


def _set(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(option, value)
