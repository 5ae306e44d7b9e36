"""What waits for one of an island's connections: in which order it goes, and that nothing piles up. Shell, no sockets.

What an island says again must not wait twice: the way up may be so narrow that a copy is made before the first one has
left.
"""

from __future__ import annotations

import asyncio

from broker.messages import Contribution, Envelope, Heartbeat, Message, Seed, StatePart, Want

#: Parts of this island's optimizer state that may wait to be sent; what is beyond is asked for again.
MOST_STATE_PARTS = 16


class Outbox:
    """Messages on their way to one connection, in order; a message that a newer one replaces is taken out.

    What it wants goes first: it is small, and the way down would lie idle for as long as contributions take to go up.
    What this island gives to others of its optimizer's state goes last, and never piles up.

    Attributes:
        empty: Set while nothing waits.
    """

    def __init__(self) -> None:
        self._waiting: list[Envelope] = []
        self._more = asyncio.Event()
        self.empty = asyncio.Event()
        self.empty.set()

    def put(self, envelope: Envelope) -> None:
        """Puts a message behind the others, or in the place of the one that says the same."""
        message = envelope.message
        if isinstance(message, Want | Heartbeat):  # the newest says it all
            self._waiting = [each for each in self._waiting if type(each.message) is not type(message)]
        elif isinstance(message, Seed):
            for place, each in enumerate(self._waiting):
                if isinstance(each.message, Seed) and each.message.fragment_id == message.fragment_id:
                    self._waiting[place] = envelope
                    return
        elif self._too_many(message):
            return
        self._waiting.append(envelope)
        self._more.set()
        self.empty.clear()

    async def next(self) -> Envelope:
        """Returns what goes next, as soon as there is anything; :meth:`sent` is to follow."""
        while not self._waiting:
            self._more.clear()
            await self._more.wait()
        return self._waiting.pop(min(range(len(self._waiting)), key=lambda i: _turn(self._waiting[i].message)))

    def sent(self) -> None:
        """Notes that what :meth:`next` returned has left, or was given up."""
        if not self._waiting:
            self.empty.set()

    def _too_many(self, message: Message) -> bool:
        """Whether it waits here already, or enough of its kind do."""
        if isinstance(message, StatePart):
            return sum(isinstance(each.message, StatePart) for each in self._waiting) >= MOST_STATE_PARTS
        return isinstance(message, Contribution) and any(each.message is message for each in self._waiting)


def _turn(message: Message) -> int:
    """Of two messages that wait, the one with the smaller number goes first; of equals the one that waits longer."""
    return 0 if isinstance(message, Want) else 2 if isinstance(message, StatePart) else 1
