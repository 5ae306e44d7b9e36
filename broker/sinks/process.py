"""The island's side of the library's process (:mod:`broker.sinks.__main__`): a thread and a queue.

Whoever trains only puts a function into the queue, which takes a microsecond. The thread calls it, which may wait for a
device, and writes the row into a pipe, which may wait for the library. A full queue drops what comes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from broker.process import logs
from broker.process.signals import in_children
from broker.sinks.rows import Row, to_line
from broker.sinks.sink import Identity
from broker.sinks.target import Target

log = logs.get(__name__)

#: Rows that may wait, and those that a new process gets again: the library leaves out what it has.
WAITING_ROWS, KEPT_ROWS = 256, 1024
#: Between two starts of the process.
START_EVERY_S = 30.0


class SinkProcess:
    """Writes rows elsewhere, without ever waiting for it.

    Args:
        target: The library, and where it writes; its library is installed.
        identity: What the rows are about.
        start_every_s: Least seconds between two starts of the process, if it dies.
    """

    def __init__(self, target: Target, identity: Identity, *, start_every_s: float = START_EVERY_S) -> None:
        words = [str(target), identity.key, identity.name, identity.group, os.fspath(identity.folder)]
        self._command = [sys.executable, "-P", "-m", "broker.sinks", *words]
        self._target, self._start_every_s = target, start_every_s
        self._waiting: queue.Queue[Callable[[], Row] | None] = queue.Queue(WAITING_ROWS)
        self._kept: deque[bytes] = deque(maxlen=KEPT_ROWS)
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at_s = float("-inf")
        self._dropped, self._given_up = 0, False
        self._thread = threading.Thread(target=self._serve, name="atoll-log-to", daemon=True)
        self._thread.start()
        self._forget = in_children(self._close_pipe)  # the library's process ends when nobody can write to it

    @property
    def pid(self) -> int | None:
        """The id of the process; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def offer(self, make: Callable[[], Row]) -> bool:
        """Queues a function that returns a row, to be called later; drops it if full, and returns False."""
        try:
            self._waiting.put_nowait(make)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                cure = f"training goes on; {self._target.cure}"
                log.warning("log_to.behind", to=str(self._target), detail="points are left out", cure=cure)
            return False
        return True

    def close(self, within_s: float) -> None:
        """Lets the process write what waits and end; returns when it has, or when the time is over."""
        ends_at_s = time.monotonic() + within_s
        self._forget()
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=within_s)
        self._thread.join(max(0.0, ends_at_s - time.monotonic()))
        self._given_up = self._thread.is_alive()
        if self._process is not None and not self._thread.is_alive():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, ends_at_s - time.monotonic()))
        if self._dropped:
            log.info("log_to.dropped", to=str(self._target), points=self._dropped)

    # --- the thread -------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        self._start()  # it imports the library while the first rows are trained
        while (make := self._waiting.get()) is not None:
            try:
                line = to_line(make())
            except Exception as err:  # noqa: BLE001 (a device that failed: training says so itself)
                log.warning("log_to.left_out", reason=f"{type(err).__name__}: {err}")
                continue
            self._kept.append(line)
            self._write(line)
        self._close_pipe()
        if self._process is not None and self._process.wait() < 0:  # killed, it may have left rows in the pipe
            self._started_at_s = float("-inf")
            self._start()
            self._close_pipe()

    def _write(self, line: bytes) -> None:
        if self._process is None or self._process.poll() is not None:
            self._start()
            return
        try:
            self._pipe(line)
        except OSError:  # it has died
            self._start()

    def _start(self) -> None:
        """Starts the process, and gives it what an earlier one may not have written."""
        now_s = time.monotonic()
        if self._given_up or now_s < self._started_at_s + self._start_every_s:
            return
        self._close_pipe()
        if self._process is not None:
            cure = "it is started again; its own lines above say why it ended"
            log.warning("log_to.ended", to=str(self._target), status=self._process.poll(), cure=cure)
        self._started_at_s = now_s
        with contextlib.suppress(OSError):  # no memory for another process, or dead at once: tried again later
            # Its standard error is ours, and so is its group: whoever ends us and all below us ends it.
            # No buffer here: a thread that waits for the pipe would hold its lock when this interpreter ends.
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
            self._pipe(b"".join(self._kept))

    def _pipe(self, data: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        left = memoryview(data)
        while left:
            left = left[os.write(self._process.stdin.fileno(), left) :]

    def _close_pipe(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
