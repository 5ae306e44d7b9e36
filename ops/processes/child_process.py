"""One child process: started, watched, stopped, with the end of its log."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from broker.base.errors import Unavailable

#: Of a line that says why something failed.
LONGEST_ERROR = 300

_HERE = Path(__file__).resolve().parent
_LIGHT_PYTHON = (sys.executable, "-I", "-S")  # no site-packages: starts in 10 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A process to be run.

    Attributes:
        name: Of the process: its log file is ``NAME.log``.
        command: Program and arguments.
        environment: Added to ours.
        cpus: Processors it may use, by number; empty: any.
        ends_by_itself: Exit status 0 means that its work is done; otherwise any end is a death.
        stop_order: Processes of lower order are stopped first.
        progress: A file whose time of modification changes as its work goes on, and is 0 before; None: nothing tells.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)  # which may hold passwords
    cpus: tuple[int, ...] = ()
    ends_by_itself: bool = False
    stop_order: int = 0
    progress: Path | None = None


def tied(command: Sequence[str], cpus: Sequence[int] = ()) -> list[str]:
    """Returns a command that dies with the thread that starts it, and stays on ``cpus`` if any are named."""
    where = ",".join(map(str, cpus)) or "any"
    return [*_LIGHT_PYTHON, os.fspath(_HERE / "child.py"), str(os.getpid()), where, *command]


class Child:
    """A running process in its own process group, which dies with the thread that made it.

    Its standard output and error are appended to a file; it reads nothing. Because it leads a group of its own, a
    Ctrl-C at the terminal reaches only its parent, which then ends it in order.
    """

    def __init__(self, spec: ProcessSpec, log: Path, *, now_s: float) -> None:
        """Starts the process.

        Raises:
            Unavailable: The log cannot be written or no process can be made; nothing was started.
        """
        try:
            with open(log, "ab", buffering=0) as file:
                self._says_from = file.seek(0, os.SEEK_END)
                self._process = subprocess.Popen(
                    tied(spec.command, spec.cpus),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=os.environ | spec.environment,
                    process_group=0,
                )
        except OSError as err:
            cure = "check disk space, permissions and the limit on processes"
            raise Unavailable(f"cannot start {spec.name} ({err.strerror}: {log}); {cure}", definite=True) from err
        self.spec = spec
        self.log = log
        self.started_s = now_s
        self._progress_before = _modified(spec.progress)
        self._swept = False

    @property
    def pid(self) -> int:
        """The id of the process, and of the group that it leads."""
        return self._process.pid

    def poll(self) -> int | None:
        """Returns the exit status (minus the signal's number), None while it runs; reaps it and its group."""
        status = self._process.poll()
        if status is not None and not self._swept:
            self._swept = True  # once: an empty group's number may be used again
            self.signal(signal.SIGKILL)  # whatever it started and left behind
        return status

    def progressed(self) -> bool | None:
        """Returns whether its work went on in this life; None if nothing tells."""
        return None if self.spec.progress is None else _modified(self.spec.progress) not in (0, self._progress_before)

    def error(self) -> str:
        """Returns the line of a child's output that says why it failed; empty if there is none."""
        try:
            return error_in(end_of(self.log, self._says_from))
        except OSError:
            return ""

    def signal(self, number: int) -> None:
        """Signals the process and everything in its group; nothing happens if all have ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class Guard:
    """A process that kills every listed group if we die first (:mod:`ops.processes.guard`)."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process = self._start()

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        command = [*_LIGHT_PYTHON, os.fspath(_HERE / "guard.py")]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)

    def add(self, group: int) -> None:
        """Lists a process group."""
        self._groups.add(group)
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Takes a group off the list: it has ended, and its number may be used again."""
        self._groups.discard(group)
        self._write(f"-{group}\n")

    def poll(self) -> None:
        """Starts another guard if somebody killed this one."""
        if self._process.poll() is not None:
            self._close()
            self._process = self._start()
            for group in self._groups:
                self._write(f"+{group}\n")

    def stop(self) -> None:
        """Ends the guard, which kills the groups still listed."""
        self._close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # poll() starts the next guard and tells it everything
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()

    def _close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def stop_in_order(children: Sequence[Child], *, within_s: float) -> list[str]:
    """Ends processes, lower ``stop_order`` first: SIGTERM, then SIGKILL for those that exceed their share.

    Args:
        children: Those that still run, or have just ended.
        within_s: Time for all of it. Every order gets an equal part of what is left when its turn comes.

    Returns:
        Names of the processes that had to be killed.
    """
    ends_s = time.monotonic() + within_s
    orders = sorted({child.spec.stop_order for child in children})
    killed = []
    for position, order in enumerate(orders):
        group = [child for child in children if child.spec.stop_order == order]
        now_s = time.monotonic()
        deadline_s = now_s + max(0.0, ends_s - now_s) / (len(orders) - position)
        for child in group:
            if child.poll() is None:
                child.signal(signal.SIGTERM)
        while any(child.poll() is None for child in group) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        for child in group:
            if child.poll() is None:
                killed.append(child.spec.name)
                child.signal(signal.SIGKILL)
        for child in group:
            while child.poll() is None:  # SIGKILL cannot be refused
                time.sleep(0.01)
    return killed


def _modified(path: Path | None) -> int:
    """Returns when a file was modified, in nanoseconds; 0 if there is none."""
    try:
        return 0 if path is None else path.stat().st_mtime_ns
    except OSError:
        return 0


def last_lines(log: Path, count: int = 10) -> str:
    """Returns the end of a log file, or says that there is none."""
    try:
        return "\n".join(end_of(log)[-count:]) or f"({log} is empty)"
    except OSError as err:
        return f"({log}: {err.strerror})"


def error_in(lines: Sequence[str]) -> str:
    """Returns the line that says why a program failed: the last Python exception's, or the last line.

    What a library notes below its exception is left out, and so is the frame of a group of them.
    """
    said = [line for each in lines if (line := re.sub(r"^( *\| )+", "", each).rstrip())]
    begins = [n for n, line in enumerate(said) if line.endswith("Traceback (most recent call last):")]
    exceptions = [line for line in said[begins[-1] + 1 :] if not line.startswith(" ")] if begins else []
    found = [*exceptions[:1], *said[-1:]][:1]
    return "".join(found).strip()[:LONGEST_ERROR]


def end_of(log: Path, start: int = 0) -> list[str]:
    """Returns the lines of a log file from a place on, at most the last 64 KiB."""
    with open(log, "rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - 64 * 1024))
        return file.read().decode(errors="replace").splitlines()
