"""The library's process beside an island: ``python -m broker.sinks TARGET KEY NAME GROUP FOLDER``.

It reads rows from standard input until that ends, which it does with the island, however that dies. So a library that
hangs, fills memory or crashes does it here. Rows that the library does not take wait, here and in the pipe; the island
drops what finds no place any more.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from pathlib import Path

from broker.process import logs
from broker.sinks.opening import open_sink
from broker.sinks.rows import Row, from_line
from broker.sinks.sink import Identity, NewRows, reason
from broker.sinks.target import target_of

log = logs.get(__name__)

WAITING_ROWS = 1000
#: Training goes first.
NICE = 5
#: After the island's end.
END_WITHIN_S = 15.0
#: Between attempts: this, and twice as long each time.
AGAIN_S, AGAIN_AT_MOST_S = 5.0, 300.0
#: Rows reach the library one by one; it hands them on when nothing comes for so long.
FLUSH_AFTER_S = 1.0


class Rows:
    """The rows that come in, read by a thread of its own."""

    def __init__(self) -> None:
        self.waiting: queue.Queue[Row] = queue.Queue(WAITING_ROWS)
        self.ended = threading.Event()
        threading.Thread(target=self._read, name="rows", daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            try:
                row = from_line(line)
            except (ValueError, KeyError, TypeError):  # cut off by the island's death
                continue
            self.waiting.put(row)
        self.ended.set()
        threading.Timer(END_WITHIN_S, _give_up).start()

    def next(self) -> Row | None:
        """Returns the next row; None if there is none for a moment."""
        try:
            return self.waiting.get(timeout=0.1 if self.ended.is_set() else FLUSH_AFTER_S)
        except queue.Empty:
            return None


def _give_up() -> None:
    os._exit(1)  # a library that hangs, hangs at a proper exit, too


def main(arguments: list[str]) -> int:
    """Writes rows until there are no more."""
    target, key, name, group, folder = arguments
    with contextlib.suppress(OSError):
        os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it is meant for the island, whose end comes here
    logs.configure(f"{name} log")
    where = target_of(target)
    identity = Identity(key=key, name=name, group=group, folder=Path(folder))
    rows, held, wait_s = Rows(), None, AGAIN_S
    while True:
        try:
            sink = open_sink(where, identity)
            new = NewRows(sink)
            if held is not None:
                new.write(held)
                held = None
            wait_s = AGAIN_S
            while True:
                row = rows.next()
                if row is None:
                    if rows.ended.is_set() and rows.waiting.empty():
                        sink.close()
                        return 0
                    sink.flush()
                    continue
                held = row
                new.write(row)
                held = None
        except Exception as err:  # noqa: BLE001 (a library may raise anything)
            if wait_s == AGAIN_S:
                log.warning("log_to.failing", to=str(where), reason=reason(err), cure=where.cure)
        if rows.ended.wait(wait_s):
            return 1
        wait_s = min(2 * wait_s, AGAIN_AT_MOST_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
