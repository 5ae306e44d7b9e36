"""The supervised processes of a local run.

:class:`LocalCluster` starts the processes of a run, restarts the ones that die, and ends all of them. It is driven by
calling :meth:`LocalCluster.poll` every tenth of a second from the thread that started it. No process survives that
thread: not after an exception, and not after kill -9 (see :mod:`ops.processes.child` and :mod:`ops.processes.guard`).
"""

from __future__ import annotations

import errno
import random
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import assert_never

from broker.base.errors import ConfigError, Unavailable, cure_of_listening
from ops.processes.child_process import Child, Guard, ProcessSpec, last_lines, stop_in_order
from ops.processes.supervision import Ended, GiveUp, Restart, RestartPolicy, Supervision

#: Time for an orderly end of everything; with what the report takes, Ctrl-C is answered within 5 s.
STOP_WITHIN_S = 4.0
#: A process that does not listen after so long hangs.
START_WITHIN_S = 60.0
LOOPBACK = "127.0.0.1"


class Change(StrEnum):
    """A change in the life of a process."""

    STARTED = "started"
    DIED = "died"  # and will be restarted
    ENDED = "ended"  # its work is done
    GAVE_UP = "gave_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEvent:
    """A change of one process, with a sentence about it."""

    process: str
    change: Change
    detail: str
    misset: bool = False  #: whether it gave up for its settings


class LocalCluster:
    """The processes of one run; use as a context manager."""

    def __init__(
        self,
        log_dir: Path,
        *,
        policy: RestartPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapt: Callable[[ProcessSpec], ProcessSpec] = lambda spec: spec,
    ) -> None:
        """Prepares an empty cluster.

        Args:
            log_dir: An existing directory; process ``x`` appends to ``x.log`` in it.
            policy: When to restart and when to give up.
            clock: Monotonic seconds.
            adapt: What becomes of each process before it is started for the first time.
        """
        self._log_dir = log_dir
        self._clock = clock
        self._adapt = adapt
        self._killed: set[str] = set()  # on purpose, by kill()
        self._down_until_s: dict[str, float] = {}
        self._supervision = Supervision(policy or RestartPolicy())
        self._running: dict[str, Child] = {}
        self._waiting: dict[str, tuple[float, ProcessSpec]] = {}
        self._guard: Guard | None = None

    def __enter__(self) -> LocalCluster:
        """Starts the guard."""
        self._guard = Guard()
        return self

    def __exit__(self, *exc: object) -> None:
        """Ends every process."""
        try:
            self.stop()
        finally:
            if self._guard is not None:
                self._guard.stop()
                self._guard = None

    def start(self, specs: Iterable[ProcessSpec]) -> None:
        """Starts processes, all at once.

        Raises:
            Unavailable: One of them could not be started.
        """
        for spec in specs:
            self._launch(self._adapt(spec))

    def _launch(self, spec: ProcessSpec) -> None:
        if self._guard is None:
            raise RuntimeError("start processes inside the with block")
        child = Child(spec, self.log_of(spec.name), now_s=self._clock())
        self._running[spec.name] = child
        self._guard.add(child.pid)

    def wait_for_port(self, name: str, port: int) -> None:
        """Waits until a process that was just started accepts connections on a port.

        Raises:
            Unavailable: It has ended, or hangs; with the end of its log.
        """
        child = self._running[name]
        if not wait_until_listening(port, alive=lambda: child.poll() is None):
            end = last_lines(self.log_of(name))
            raise Unavailable(f"{name} did not start on port {port}; its log ends:\n{end}", definite=True)

    def poll(self) -> list[ProcessEvent]:
        """Notes ended processes, restarts those that are due, and returns what happened, in order."""
        now_s = self._clock()
        events = []
        if self._guard is not None:
            self._guard.poll()
        for name, child in list(self._running.items()):
            status = child.poll()
            if status is not None:
                del self._running[name]
                if self._guard is not None:
                    self._guard.remove(child.pid)
                events.append(self._bury(child, status, now_s))
        for name, (at_s, spec) in list(self._waiting.items()):
            if now_s >= max(at_s, self._down_until_s.get(name, at_s)):
                del self._waiting[name]
                self._launch(spec)
                detail = f"{name} started again (restart {self.restarts(name)})"
                events.append(ProcessEvent(process=name, change=Change.STARTED, detail=detail))
        return events

    def _bury(self, child: Child, status: int, now_s: float) -> ProcessEvent:
        name = child.spec.name
        verdict = self._supervision.died(
            name,
            status=status,
            lived_s=now_s - child.started_s,
            ends_by_itself=child.spec.ends_by_itself,
            now_s=now_s,
            progressed=child.progressed(),
            ordered=name in self._killed,
        )
        self._killed.discard(name)
        error = child.error() if 0 < status < 128 else ""  # who was ended by a signal says nothing of an error
        why = f": {error} (all of it in {child.log})" if error else ""
        match verdict:
            case Ended():
                return ProcessEvent(process=name, change=Change.ENDED, detail=f"{name} ended")
            case Restart(at_s=at_s, reason=reason):
                self._waiting[name] = (at_s, child.spec)
                return ProcessEvent(process=name, change=Change.DIED, detail=f"{reason}{why}; restarting it")
            case GiveUp(reason=reason, misset=misset):
                detail = f"{reason}{why}; the end of {child.log}:\n{last_lines(child.log)}"
                return ProcessEvent(process=name, change=Change.GAVE_UP, detail=detail, misset=misset)
            case _:
                assert_never(verdict)

    def stop(self, names: Iterable[str] | None = None, *, within_s: float = STOP_WITHIN_S) -> list[str]:
        """Ends the named processes, or all, and restarts none of them; returns those that were killed."""
        chosen = set(self._running) | set(self._waiting) if names is None else set(names)
        for name in chosen:
            self._waiting.pop(name, None)
        children = [self._running.pop(name) for name in list(self._running) if name in chosen]
        try:
            return stop_in_order(children, within_s=within_s)
        finally:
            for child in children:
                if child.poll() is None:  # interrupted while stopping: no more manners
                    child.signal(9)
                if self._guard is not None:
                    self._guard.remove(child.pid)

    def kill(self, name: str, *, down_s: float = 0.0) -> None:
        """Kills a process as a power cut would; it is restarted as after any death, but not within ``down_s``."""
        self._down_until_s[name] = self._clock() + down_s
        self._killed.add(name)
        self.signal(name, signal.SIGKILL)

    def signal(self, name: str, number: int) -> None:
        """Signals a process and its group, if it runs."""
        child = self._running.get(name)
        if child is not None:
            child.signal(number)

    def running(self) -> set[str]:
        """Returns the names of processes that run or wait to be restarted."""
        return set(self._running) | set(self._waiting)

    def pid(self, name: str) -> int | None:
        """Returns a running process's id."""
        child = self._running.get(name)
        return None if child is None else child.pid

    def restarts(self, name: str) -> int:
        """Returns how often a process was restarted."""
        return self._supervision.restarts[name]

    def log_of(self, name: str) -> Path:
        """Returns the file that a process's output goes to."""
        return self._log_dir / f"{name}.log"


# --- ports ------------------------------------------------------------------------------------------------------


def free_ports(count: int) -> int:
    """Returns the first of ``count`` adjacent TCP ports that nobody listens on, on loopback.

    They lie below the range from which the kernel takes ports for outgoing connections: one of those may be in use by
    the time we listen, and a client that connects to its own outgoing port before we listen even talks to itself.
    """
    lowest_outgoing = _lowest_outgoing_port()
    low, high = (10_000, lowest_outgoing) if lowest_outgoing > 12_000 else (10_000, 60_000)
    for _ in range(200):
        first = random.Random().randrange(low, high - count)
        if are_free(range(first, first + count)):
            return first
    which = "no port is" if count == 1 else f"no {count} adjacent ports are"
    raise ConfigError("port", 0, f"{which} free: end what listens on so many, or name one")


def are_free(ports: Sequence[int] | range) -> bool:
    """Says whether nobody listens on any of these TCP ports of loopback.

    Raises:
        Unavailable: This machine has no IPv4 loopback, or the user may not listen there.
    """
    for port in ports:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((LOOPBACK, port))
        except OSError as err:
            if err.errno == errno.EADDRINUSE:
                return False
            cure = cure_of_listening(err)
            if err.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                cure = "processes of one machine meet there: give the device lo that address of IPv4"
            raise Unavailable(f"cannot listen on {LOOPBACK}:{port} ({err.strerror}); {cure}", definite=True) from err
    return True


def wait_until_listening(
    port: int, *, alive: Callable[[], bool] = lambda: True, within_s: float = START_WITHIN_S
) -> bool:
    """Returns True as soon as something accepts connections on a port, False if nothing does in time.

    Args:
        port: The port.
        alive: Whether the process that is to listen is there; it is not waited for once it has ended.
        within_s: For how long it is waited for: the limit is for what hangs, a busy machine takes its time.
    """
    ends_s = time.monotonic() + within_s
    while time.monotonic() < ends_s and alive():
        try:
            with socket.create_connection((LOOPBACK, port), timeout=1.0):
                return True
        except OSError:
            time.sleep(0.02)
    return False


def _lowest_outgoing_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768  # Linux's default
