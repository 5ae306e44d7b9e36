"""The outbox of an island's connection: order of messages, without pile-up. Shell, no sockets.

What an island says again must not wait twice: the way up may be so narrow that a copy is made before the first one has
left.
"""

from __future__ import annotations

import asyncio

from broker.wire.messages import Contribution, Envelope, Heartbeat, HostPart, Seed, StatePart, Want

#: Parts of this island's optimizer state that may wait to be sent; what is beyond is asked for again.
MOST_STATE_PARTS = 16


class Outbox:
    """Messages on their way to one connection, in order; a message that a newer one replaces is taken out.

    What this island gives to others of its optimizer's state goes last, a part to each in turn, and never piles up: who
    hears nothing while another one gets all of its parts would take this island for silent.

    Attributes:
        empty: Set while nothing waits.
    """

    def __init__(self) -> None:
        self._waiting: list[Envelope] = []
        self._served: list[str] = []  # who got a part and waits for another one, the last one last
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
        elif self._too_many(envelope):
            return
        self._waiting.append(envelope)
        self._more.set()
        self.empty.clear()

    async def next(self) -> Envelope:
        """Returns what goes next, as soon as there is anything; :meth:`sent` is to follow."""
        while not self._waiting:
            self._more.clear()
            await self._more.wait()
        envelope = self._waiting.pop(min(range(len(self._waiting)), key=lambda i: self._turn(self._waiting[i])))
        if isinstance(envelope.message, StatePart):
            waiting = {each.to for each in self._waiting if isinstance(each.message, StatePart)}
            self._served = [name for name in self._served if name in waiting and name != envelope.to] + [envelope.to]
        return envelope

    def sent(self) -> None:
        """Notes that what :meth:`next` returned has left, or was given up."""
        if not self._waiting:
            self.empty.set()

    def _too_many(self, envelope: Envelope) -> bool:
        """Whether it waits here already, or enough of its kind do."""
        message = envelope.message
        if isinstance(message, StatePart):
            others = [(each.to, each.message) for each in self._waiting if isinstance(each.message, StatePart)]
            same = ((to, part.state_id, part.part) for to, part in others)
            return (envelope.to, message.state_id, message.part) in same or len(others) >= MOST_STATE_PARTS
        return isinstance(message, Contribution | HostPart) and any(each.message is message for each in self._waiting)

    def _turn(self, envelope: Envelope) -> tuple[int, int]:
        """Of two that wait, the one with the smaller numbers goes first; of equals the one that waits longer."""
        match envelope.message:
            case StatePart():
                return 1, self._served.index(envelope.to) + 1 if envelope.to in self._served else 0
            case _:
                return 0, 0
