"""Bulk messages that one event makes by the hundred: most of them wait for their turn. Shell.

A version goes to every island of a fleet. To hand a thousand over at once held up the broker for 0.2 to 0.5 s, and what
the islands answered, all at the same time, for another second. A few go at once; of the rest one goes in each turn of
the event loop, in which a message of each channel is taken in too. So answers are read as they come.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from broker.routing.events import Send

#: So many messages of one event go at once.
AT_ONCE = 8


class Outbox:
    """Bulk messages that wait for their turn. Those to one peer keep their order."""

    def __init__(self) -> None:
        self._waiting: deque[Send] = deque()
        self._peers: Counter[bytes] = Counter()
        self._some = asyncio.Event()

    def keeps(self, send: Send, number: int) -> bool:
        """Returns whether a message waits here: the first of an event do not, unless others to their peer do.

        Args:
            send: The message.
            number: Of it among those that one event has made, from 1.
        """
        if number <= AT_ONCE and not self._peers[send.peer]:
            return False
        self._waiting.append(send)
        self._peers[send.peer] += 1
        self._some.set()
        return True

    async def run(self, send: Callable[[Send], None]) -> None:
        """Sends one message in each turn of the loop, until cancelled."""
        while True:
            await self._some.wait()
            while self._waiting:
                next_ = self._waiting.popleft()
                self._peers[next_.peer] -= 1
                send(next_)
                await asyncio.sleep(0)
            self._peers.clear()
            self._some.clear()
