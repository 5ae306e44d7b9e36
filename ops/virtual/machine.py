"""The simulated machine of a real island: its training thread runs only while it has the baton.

An island's communication is tasks of a simulated process (:mod:`ops.virtual.loop`). Its training loop is any program
that calls and waits, so it is a real thread. The process hands it the baton and stands still; the thread hands it back
wherever it waits: for news, for the time of a step, for the end. One runs at a time, in one order for a seed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from islands.session.machine import Machine
from ops.virtual.loop import Killed, Process

T = TypeVar("T")
#: Nobody waits as long without a limit.
FOR_EVER_S = 1e9


class SimMachine(Machine):
    """The machine of one simulated process; its methods are the training thread's, but for the first.

    Args:
        process: Of the island.
        context: Makes the context of its sockets.
        begins: Told of the communication that is about to run.
    """

    def __init__(
        self, process: Process, context: Callable[[], Any], begins: Callable[[Any], None] = lambda _: None
    ) -> None:
        self._process, self._make_context, self._begins = process, context, begins
        self._to_training, self._to_process = threading.Semaphore(0), threading.Semaphore(0)
        self._training: threading.Thread | None = None
        self._trains = True
        self._waiting: object = None  # a new object for each wait
        self._error: BaseException | None = None
        process.ended.append(self._end)

    def train(self, main: Callable[[], object]) -> None:
        """Runs a function as the training thread of the process; what it raises is a failure of the seed."""

        def run() -> None:
            self._to_training.acquire()
            try:
                if self._process.alive:
                    main()
            except Killed:
                self._process.kill()
            except BaseException as error:  # noqa: BLE001 (raised in the process)
                self._error = error
            self._trains = False
            self._to_process.release()

        self._training = threading.Thread(target=run, name=f"training of {self._process.name}", daemon=True)
        self._training.start()
        self._waiting = beginning = object()
        self.wake(beginning)

    def _end(self) -> None:
        """Ends the thread with its process: what it still does on its way out reaches nobody."""
        if self._training is not threading.current_thread():
            self._process.run(self._hand_over, self._waiting)

    def wake(self, waiting: object) -> None:
        """Lets the training thread go on, if it still waits as it did."""
        self._process.call_soon(self._hand_over, waiting)

    def _hand_over(self, waiting: object) -> None:
        """Hands the training thread the baton, and stands still until it hands it back."""
        if waiting is not None and waiting is self._waiting:
            self._waiting = None
            self._to_training.release()
            self._to_process.acquire()
            if not self._trains and self._training is not None:
                self._training.join()
            if self._error is not None:
                error, self._error = self._error, None
                raise error

    def wait(self, seconds: float, begun: Callable[[object], None] = lambda _: None) -> None:
        """Hands the baton back for a time, by no clock of the process; ``begun`` is told what to :meth:`wake`."""
        self._live()
        self._waiting = waiting = object()
        begun(waiting)
        self._process.virtual.after(seconds, lambda: self.wake(waiting))
        self._to_process.release()
        self._to_training.acquire()
        self._live()

    def _live(self) -> None:
        if not self._process.alive:
            raise Killed

    # --- as islands.session.machine has them ------------------------------------------------------------------

    def context(self) -> Any:
        """Returns a context for simulated sockets."""
        return self._make_context()

    def bell(self, call: Callable[[], None]) -> SimBell:
        """Returns what calls a function in the process."""
        return SimBell(self._process, call)

    def serve(
        self, main: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[BaseException | None], None]
    ) -> SimRunning:
        """Runs a coroutine as a task of the process; tells ``ended`` what it raised, or None."""
        self._begins(getattr(main, "__self__", None))
        return SimRunning(self, self._process.create_task(main(), name="communication"), ended)

    def news(self) -> SimNews:
        """Returns something that the training thread can wait for."""
        return SimNews(self)

    def sleep(self, seconds: float) -> None:
        """Lets the training thread wait."""
        self.wait(seconds)

    def within(self, seconds: float, call: Callable[[], T]) -> T:
        """Returns what a call returns, at once."""
        self._live()
        return call()


class SimBell:
    """Calls a function in a simulated process."""

    def __init__(self, process: Process, call: Callable[[], None]) -> None:
        self._process, self._call = process, call

    def ring(self) -> None:
        """Calls it soon."""
        self._process.call_soon(self._call)

    def end(self) -> None:
        """Nobody rings any more."""


class SimNews:
    """A flag for a training thread with a baton, like :class:`threading.Event`."""

    def __init__(self, machine: SimMachine) -> None:
        self._machine, self._is_set = machine, False
        self._waiting: object = None

    def set(self) -> None:
        """Wakes who waits."""
        self._is_set = True
        self._machine.wake(self._waiting)

    def clear(self) -> None:
        """Makes the next wait one for what comes from now on."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set, or the time is over; returns whether it is."""
        if not self._is_set:
            self._machine.wait(FOR_EVER_S if timeout is None else timeout, self._begun)
        return self._is_set

    def _begun(self, waiting: object) -> None:
        self._waiting = waiting


class SimRunning:
    """A task, for a training thread that waits for its end."""

    def __init__(
        self, machine: SimMachine, task: asyncio.Task[None], ended: Callable[[BaseException | None], None]
    ) -> None:
        self._end = SimNews(machine)
        self._ended = ended
        task.add_done_callback(self._done)
        self._task = task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._ended(asyncio.CancelledError() if task.cancelled() else task.exception())
        self._end.set()

    def is_alive(self) -> bool:
        """Returns whether it has not ended."""
        return not self._task.done()

    def join(self, timeout: float | None = None) -> None:
        """Returns when it has ended, or the time is over."""
        if self.is_alive():
            self._end.wait(timeout)
