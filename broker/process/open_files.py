"""Raises the number of files that a process may have open. Shell.

Each island holds two connections to its broker, and each is an open file there. Systems let a process have 1,024 of
them unless it asks for more, which it may up to a second, far higher limit: without that about 500 islands connect, and
the others are left to wait for ever.
"""

from __future__ import annotations

import resource


def raise_limit() -> int:
    """Asks for as many as the system allows; returns how many that are. A system that refuses is left as it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard in (soft, resource.RLIM_INFINITY):
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        return soft
    return hard
