"""Limits of this process: open files, memory, what is kept of it when freed, collected cycles. Shell.

What concerns freed memory is glibc's, set while there is one thread; other C libraries have none of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # malloc.h
_CGROUPS = Path("/sys/fs/cgroup")
#: New objects, collections of those, and collections of the survivors, until each next stage collects.
THRESHOLDS = (50_000, 20, 50)


def raise_open_files() -> int:
    """Raises this process's limit of open files to the system's; returns the limit in force.

    Where the system refuses, or names no upper limit, the limit stays. Systems let a process have 1,024 open files
    unless it asks for more: with two connections each only about 500 islands would reach a broker.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard in (soft, resource.RLIM_INFINITY):
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return soft
    return hard


def most_open_files() -> int:
    """Returns the limit of open files to which a daemon would raise its own."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if hard == resource.RLIM_INFINITY else hard


def open_files() -> int:
    """Returns how many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def return_freed(least_bytes: int) -> None:
    """Returns large blocks of memory to the system as soon as they are freed.

    Left alone, glibc raises its limit for separate mappings to the size of what it sees, up to 32 MiB, and what is
    smaller lies between other things: its place is not the system's before all above it is free, and fits nothing else.
    So many bytes are to be enough that page faults cost little beside the use of them.
    """
    _set(_MMAP_THRESHOLD, least_bytes)


def keep_freed(most_bytes: int = (1 << 31) - 1, *, arenas: int = 0) -> None:
    """Has glibc keep freed memory: a new page costs the kernel more than the bytes written to it.

    What is free at the end of a pool beyond ``most_bytes`` goes back to the system. There are at most ``arenas`` pools,
    or with 0 as many as glibc likes, some for each processor.
    """
    _set(_TRIM_THRESHOLD, most_bytes)
    _set(_MMAP_THRESHOLD, 32 << 20)  # the most that it accepts
    if arenas:
        _set(_ARENA_MAX, arenas)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_size_t * 10)]  # the fifth is hblkhd, the eighth uordblks: what is in use


def return_spare(most_bytes: int) -> None:
    """Gives memory that was freed back to the system, if glibc keeps more than that.

    By itself it gives back what is free at the end of a pool (:func:`keep_freed`), and nothing beneath what is in use:
    after a flood, of which 800 MB had waited at once, a broker kept those.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError, ValueError):  # other libraries have no such functions
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = _Mallinfo2
        numbers = libc.mallinfo2().numbers
        resident, shared = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split()[1:3])
        private_bytes = (resident - shared) * resource.getpagesize()
        if private_bytes - numbers[4] - numbers[7] > most_bytes:
            libc.malloc_trim(ctypes.c_size_t(0))


def _set(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).mallopt(option, value)


def memory_bytes() -> int:
    """Returns this machine's memory, or the least limit of a container or service; 0 if not known."""
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # some systems have no such names
        return 0
    return min([machine, *_memory_limits(_CGROUPS, _own_group(Path("/proc/self/cgroup")))])


def _own_group(listing: Path) -> str:
    """Returns the path of this process's control group, version 2; the root where there is none."""
    try:
        lines = listing.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return "/"
    return next((line[3:] for line in lines if line.startswith("0::")), "/")


def _memory_limits(root: Path, own: str) -> list[int]:
    """Returns the limits of a control group and of those above it; in version 1, of the container alone."""
    place = root / own.lstrip("/")
    files = [each / "memory.max" for each in (place, *place.parents) if each.is_relative_to(root)]
    found = []
    for file in (*files, root / "memory" / "memory.limit_in_bytes"):
        try:
            found.append(int(file.read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
    return [each for each in found if each > 0]


def collect_seldom() -> None:
    """Has the collector look at old objects hardly ever; to be called once, when the modules are loaded.

    It stops everything for as long as it looks at all objects, which takes longer the more islands there are: 0.2 to
    0.8 s with a thousand, several times a minute, in which no heartbeat is answered. Nearly all objects here are in no
    cycle, and are freed without it.
    """
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
