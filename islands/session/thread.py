"""The communication thread: an event loop beside the training thread, which wakes it by a bell. Shell."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from broker.base.errors import Unavailable, first_of
from broker.process import clocks, logs
from broker.wire.messages import Departure
from islands.arrays.persistence import trained_frozen
from islands.protocol.paused import Paused
from islands.session.array_work import ArrayWork
from islands.session.exchange import Exchange, JoinedRun, Moment
from islands.session.machine import Bell, Running

log = logs.get(__name__)


class CommunicationThread(ABC):
    """A thread for an island's communication until the training thread leaves, or something fails.

    Args:
        array_work: Closed at the end.
        exchange: Shared with the training thread; gets the error that this ends with.
    """

    def __init__(self, array_work: ArrayWork, exchange: Exchange) -> None:
        self._array_work, self._exchange = array_work, exchange
        self._thread: Running | None = None
        self._bell: Bell | None = None
        self._leave_reason: str | None = None
        self._departure = Departure.STOPPED
        self._clock = clocks.monotonic
        self._loop: asyncio.AbstractEventLoop
        self._tasks: asyncio.TaskGroup
        self._leaving: asyncio.Event

    # --- called by the training thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread = self._exchange.machine.serve(self._serve, self._ended)

    def leave(self, reason: str, departure: Departure = Departure.STOPPED, within_s: float = 3.0) -> None:
        """Says goodbye and ends the thread; returns when it has ended, or when the time is over."""
        self._departure = departure
        self._leave_reason = self._leave_reason or reason
        self._exchange.wake()
        if self._thread is not None:
            self._thread.join(within_s)

    @property
    def ended(self) -> bool:
        """Returns True if the thread has ended or was never started."""
        return self._thread is None or not self._thread.is_alive()

    def paused(self) -> Paused | None:  # the speaker of several hosts has it for all
        """Returns a state for the next process of this life; None if there is none, or the thread hangs."""
        return None

    @property
    def checkpoint_file(self) -> Path | None:
        """This island's checkpoint, if it keeps one here."""
        return None

    # --- the thread -------------------------------------------------------------------------------------------

    @abstractmethod
    async def _serve(self) -> None:
        """Serves until :attr:`_leaving` is set; calls :meth:`_open` first."""

    @abstractmethod
    def _look(self) -> None:
        """Looks at what the training thread has done; called whenever the bell rings."""

    def _ended(self, error: BaseException | None) -> None:
        """Tells the training thread that there is no communication any more, and why."""
        self._array_work.close()
        error = first_of(error) if isinstance(error, BaseExceptionGroup) else error
        if error is None and self._leave_reason is None:
            error = Unavailable("the island's communication ended without a reason", definite=False)
        self._exchange.error = error
        self._exchange.wake = lambda: None
        if self._bell is not None:
            self._bell.end()
        self._exchange.news.set()

    def _open(self) -> None:
        """Lets the training thread ring the bell."""
        self._loop, self._leaving = asyncio.get_running_loop(), asyncio.Event()
        self._bell = self._exchange.machine.bell(self._woken)
        self._exchange.wake = self._bell.ring

    def _woken(self) -> None:
        if self._leave_reason is not None:
            self._leaving.set()
        else:
            self._guarded(self._look)

    def _ring(self, at_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Returns a timer that calls at a time of this thread's clock, which the loop does not go by."""
        # Never earlier than in a millisecond, or a late one would spin.
        return self._loop.call_later(max(at_s - self._clock(), 0.001), self._guarded, call)

    def _guarded(self, call: Callable[[], None]) -> None:
        """Runs a callback of the event loop; its failure ends the thread as that of a task would."""
        try:
            call()
        except Exception as err:  # noqa: BLE001 (raised in a task)
            self._spawn(_raise(err))

    def _tell_joined(self, membership: JoinedRun, **facts: str) -> None:
        """Tells the training thread what it is a member of, and compiles for it; ``facts`` are logged."""
        exchange, recipe = self._exchange, membership.settings.recipe
        exchange.position = membership.start  # the training thread writes it only once it has a membership
        exchange.membership = membership
        exchange.doing, exchange.refused = "waiting for version 0", None
        exchange.news.set()
        self._spawn(self._warm_up(recipe.keep or recipe.mix))
        log.info(
            "island.joined",
            island=membership.island_id,
            incarnation=membership.incarnation,
            run=membership.run_id,
            start_step=membership.start.step,
            fragments=membership.num_fragments,
            **facts,
        )

    @abstractmethod
    async def _warm_up(self, keep: float) -> None:
        """Compiles what the training thread will call; then it may start."""

    async def _look_at_frozen(self, moment: Moment) -> None:
        """Ends training where it moves what is frozen in the run."""
        name = await self._array_work.moved(moment.frozen)
        if name:
            self._exchange.error = trained_frozen(name, of_base=name in self._array_work.parameters.base)
            self._exchange.news.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            self._tasks.create_task(work)
        except RuntimeError:  # something has failed, and so all ends
            work.close()


def cancel_all() -> None:
    """Cancels every other task of this event loop: its end has come."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


async def _raise(error: BaseException) -> None:
    raise error
