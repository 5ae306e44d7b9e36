"""Worker threads of an event loop that cannot hold up the end of the process.

Those of :mod:`concurrent.futures` are joined as the interpreter ends, however long that takes: a disk or a device that
hangs would keep an island's process from ending, and what comes after it from beginning.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

#: The end of the process gives what is being done so long: a thread had better not be in a device's library then.
END_WITHIN_S = 2.0
#: Of each job that is being done: will be done once what it held is freed, which may be a device's library's work, too.
_at_work: set[Future[None]] = set()


class Workers(Executor):
    """Up to ``count`` threads, begun as they are needed; a single one does its jobs in the order given.

    Args:
        count: Of threads.
        name: Of each, for people who look at a process.
    """

    def __init__(self, count: int, name: str) -> None:
        self._max_workers, self._thread_name_prefix = count, name  # as concurrent.futures calls them
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)  # threads that wait for a job which nobody has put there yet
        self._threads = 0
        self._shutdown = False

    async def do(self, job: Callable[..., T], *args: Any) -> T:
        """Returns what ``job`` returns, or raises what it raises; for one event loop only.

        Raises:
            RuntimeError: If they were closed.
        """
        if self._shutdown:
            raise RuntimeError(f"{self._thread_name_prefix} has ended")
        return await asyncio.get_running_loop().run_in_executor(self, job, *args)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Has a job done; returns its future."""
        future: Future[T] = Future()
        self._jobs.put((future, lambda: fn(*args, **kwargs)))
        if not self._idle.acquire(blocking=False) and self._threads < self._max_workers:
            self._threads += 1
            threading.Thread(target=self._work, name=f"{self._thread_name_prefix}-{self._threads}", daemon=True).start()
        return future

    def close(self) -> None:
        """Ends the threads; what they are doing is finished, what waits for them is dropped."""
        self._shutdown = True
        with contextlib.suppress(Empty):
            while True:
                waiting = self._jobs.get_nowait()
                if waiting is not None:
                    waiting[0].cancel()
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (taken := self._jobs.get()) is not None:
            future, job = taken
            freed: Future[None] = Future()
            _at_work.add(freed)
            if future.set_running_or_notify_cancel():
                try:
                    result = job()
                except BaseException as err:  # noqa: BLE001 (raised where it is awaited)
                    future.set_exception(err)
                else:
                    future.set_result(result)
                    del result
            del taken, future, job  # tensors among what they hold, until there is another job
            freed.set_result(None)
            _at_work.discard(freed)
            self._idle.release()


def _end() -> None:
    wait(list(_at_work), END_WITHIN_S)


atexit.register(_end)
os.register_at_fork(after_in_child=_at_work.clear)  # nobody does it there
