"""Events that wait for the core, in two lines: what carries tensors waits behind all else. Shell.

A thousand islands hand over within a second or two. A heartbeat that came behind them waited for all of them; now it
waits for one.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")
#: So many of the first line in a row go before one of the second that waits.
IN_A_ROW = 16
#: So many events that are there are handed out before other tasks have their turn: to read a payload takes longer.
AT_A_TIME = 4


class EventLines(Generic[T]):
    """Two queues for one reader.

    Args:
        most: How many events may wait in the first line, and in the second; who has another one waits with it.
    """

    def __init__(self, most: tuple[int, int]) -> None:
        self._first: asyncio.Queue[T] = asyncio.Queue(most[0])
        self._second: asyncio.Queue[T] = asyncio.Queue(most[1])
        self._some = asyncio.Event()
        self._in_a_row = 0
        self._taken = 0

    async def put(self, event: T, *, behind: bool = False) -> None:
        """Adds an event to the first line, or to the second; waits while that is full."""
        await (self._second if behind else self._first).put(event)
        self._some.set()

    def empty(self) -> bool:
        """Returns True if nothing waits."""
        return self._first.empty() and self._second.empty()

    def get_nowait(self) -> T:
        """Returns the next event.

        Raises:
            asyncio.QueueEmpty: There is none.
        """
        if self._first.empty() or (self._in_a_row >= IN_A_ROW and not self._second.empty()):
            self._in_a_row = 0
            return self._second.get_nowait()
        self._in_a_row += 1
        return self._first.get_nowait()

    async def get_there(self) -> T | None:
        """Returns the next event that is there, at times after a turn of other tasks; None without any."""
        if self.empty():
            return None
        self._taken += 1
        if self._taken % AT_A_TIME == 0:
            await asyncio.sleep(0)  # under a steady stream nobody else would ever run
        return self.get_nowait()

    async def get(self) -> T:
        """Returns the next event; waits for one."""
        while self.empty():
            self._some.clear()
            await self._some.wait()
        return self.get_nowait()
