"""The machine of an island: its second thread, waits and sockets. Shell.

An event loop brings timers and tasks, :mod:`broker.process` clocks and chance. What else an island needs of the world
it asks for here. So all of it also runs in virtual time, on another machine (:mod:`ops.virtual.machine`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from broker.transport.sockets import Context

T = TypeVar("T")


class Running(Protocol):
    """Something that runs beside the caller."""

    def is_alive(self) -> bool:
        """Returns whether it has not ended."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Returns when it has ended, or the time is over."""
        ...


class News(Protocol):
    """A flag that the training thread waits for, like :class:`threading.Event`."""

    def set(self) -> None:
        """Wakes who waits."""
        ...

    def clear(self) -> None:
        """Makes the next wait one for what comes from now on."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set, or the time is over; returns whether it is."""
        ...


class Bell(Protocol):
    """Calls a function in an event loop, from another thread."""

    def ring(self) -> None:
        """Calls the function soon."""
        ...

    def end(self) -> None:
        """Stops all calls of :meth:`ring`."""
        ...


class QueueBell:
    """A bell whose ringer keeps the GIL.

    Writing to the loop's own socket gives it away for a moment, which on a busy processor took milliseconds to get back
    (measured: most of the time of a step). Putting something into a queue does not; a thread of its own takes it out.

    Args:
        call: What to call; made in the loop that it is to be called in.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._loop, self._call = asyncio.get_running_loop(), call
        self._rings: SimpleQueue[bool] = SimpleQueue()
        threading.Thread(target=self._listen, name="atoll-bell", daemon=True).start()

    def ring(self) -> None:
        """Calls the function soon."""
        self._rings.put(True)

    def end(self) -> None:
        """Ends the thread; nobody rings any more."""
        self._rings.put(False)

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            while self._rings.get():
                self._loop.call_soon_threadsafe(self._call)


class Machine:
    """The machine that this process runs on."""

    def context(self) -> Context:
        """Returns a ZeroMQ context, to be terminated by the caller."""
        return Context()

    def bell(self, call: Callable[[], None]) -> Bell:
        """Returns what calls a function in the running event loop, for another thread."""
        return QueueBell(call)

    def serve(
        self, main: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[BaseException | None], None]
    ) -> Running:
        """Runs a coroutine in an event loop beside this thread; tells ``ended`` what it raised, or None."""

        def run() -> None:
            error: BaseException | None = None
            try:
                asyncio.run(main())
            except BaseException as err:  # noqa: BLE001 (told)
                error = err
            ended(error)

        thread = threading.Thread(target=run, name="atoll-island", daemon=True)
        thread.start()
        return thread

    def news(self) -> News:
        """Returns something that this thread can wait for."""
        return threading.Event()

    def sleep(self, seconds: float) -> None:
        """Lets this thread wait."""
        time.sleep(seconds)

    def within(self, seconds: float, call: Callable[[], T]) -> T:
        """Returns what a call returns that may hang for ever: the end of the process does not wait for it.

        Raises:
            TimeoutError: It took longer.
        """
        found: list[T] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                found.append(call())
            except BaseException as err:  # noqa: BLE001 (raised in the caller's thread)
                failed.append(err)

        thread = threading.Thread(target=run, name="atoll-within", daemon=True)
        thread.start()
        thread.join(seconds)
        if failed:
            raise failed[0]
        if not found:
            raise TimeoutError(f"took longer than {seconds:g} s")
        return found[0]


#: That of this process.
THIS = Machine()
