"""Waits for the sockets of one endpoint, which several tasks read. Shell.

ZeroMQ announces what comes to an empty queue, and nothing more before somebody has found that empty again. A task that
takes some messages and then waits for no more leaves the others asleep beside what it has left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import zmq.asyncio


class Polls:
    """The tasks that wait."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[Any]] = set()

    async def ready(self, sockets: Iterable[zmq.asyncio.Socket], events: int, timeout_ms: int) -> bool:
        """Waits until a socket is ready for ``events``, or :meth:`look_again`; returns whether that is so."""
        poller = zmq.asyncio.Poller()
        for socket in sockets:
            poller.register(socket, events)
        polling: Any = poller.poll(timeout_ms)
        self._waiting.add(polling)
        try:
            return bool(await polling)
        finally:
            self._waiting.discard(polling)

    def look_again(self) -> None:
        """Wakes all that wait: another task has taken something off a socket."""
        for polling in self._waiting:
            if not polling.done():
                polling.set_result([None])
