"""Becomes a command that cannot outlive its parent: ``python child.py PARENT_PID CPUS COMMAND ...``.

Runs between fork and exec of every process that ``up`` starts, as a program of its own because Python code in that
gap can deadlock when the parent has threads. PR_SET_PDEATHSIG survives the exec: when the thread that started this
process ends, however it ends, the kernel kills what we have become. Only the standard library, and little of it: with
``-I -S`` it starts in about 10 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties this process to its parent and its processors, then becomes the command."""
    parent, cpus, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"atoll: cannot tie this process to its parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before we asked
        sys.exit("atoll: the parent process is gone")
    if cpus != "any":
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    try:
        os.execvp(command[0], command)
    except OSError as err:
        print(f"atoll: cannot start {command[0]}: {err.strerror}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
