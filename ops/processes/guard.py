"""Kills the processes of a run when the one that started them is gone: ``python guard.py < pipe``.

The kernel kills the direct children of ``up`` when it dies (:mod:`ops.processes.child`), but not what they may have
started. So every child leads a process group; ``up`` writes ``+GROUP`` and ``-GROUP`` lines to this program's standard
input, whose end it holds alone. When the pipe closes, ``up`` has ended, even by kill -9, and all groups still listed
are killed. Only the standard library, with ``-I -S``: it costs 7 MB and no time.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Reads group ids until the pipe closes, then kills those that were not taken off the list."""
    for harmless in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it ends with the pipe, and only then
        signal.signal(harmless, signal.SIG_IGN)
    groups = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
