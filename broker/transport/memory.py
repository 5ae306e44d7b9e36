"""How much memory this process may use, for the limits that follow from it."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def memory_bytes() -> int:
    """Returns this machine's memory, or the least limit of a container or service; 0 if not known."""
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # some systems have no such names
        return 0
    return min([machine, *_limits(_CGROUPS, _own(Path("/proc/self/cgroup")))])


def _own(listing: Path) -> str:
    """Returns the path of this process's control group, version 2; the root where there is none."""
    try:
        lines = listing.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return "/"
    return next((line[3:] for line in lines if line.startswith("0::")), "/")


def _limits(root: Path, own: str) -> list[int]:
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
