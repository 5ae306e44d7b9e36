"""A broker's end of a bulk connection, for tests with a bare ROUTER: chunks become messages, and give credit."""

import asyncio
import time

from broker.chunks import chunk_heads
from broker.chunks.memory import ReusedMemory
from broker.chunks.receiving import Inflow, PartialMessages, Refused
from broker.wire.frames import decode
from broker.wire.headers import Limits


class BulkReceiver:
    """Takes whole messages off a ROUTER, of any number of connections.

    Attributes:
        nbytes: That came in chunks.
        largest: Bytes of the largest frame of a chunk.
        resumed: Where messages went on that a connection had cut off.
    """

    def __init__(self, router):
        self._router, self._flows, self._kept = router, {}, PartialMessages(1 << 30)
        self.nbytes, self.largest, self.resumed = 0, 0, []

    def broken(self):
        """Its connections have ended; what came of messages is kept."""
        for into in self._flows.values():
            cut_off = into.cut_off()
            if cut_off is not None:
                self._kept.keep(*cut_off, time.monotonic())
        self._flows.clear()

    async def message(self, within_s=30.0):
        """Returns the next one."""
        return (await self.taken(within_s))[1]

    async def taken(self, within_s=30.0):
        """Returns the routing id of its connection, and the message."""
        async with asyncio.timeout(within_s):
            while True:
                peer, message = await self.step()
                if message is not None:
                    return peer, message

    async def step(self):
        """Takes what comes next; returns the routing id of its connection, and the message that is whole with it."""
        peer, first, *frames = await self._router.recv_multipart()
        head = chunk_heads.read(first)
        if head is None:
            return peer, decode([first, *frames])
        self.nbytes += sum(map(len, frames))
        self.largest = max([self.largest, *map(len, frames)])
        into = self._flows.setdefault(peer, Inflow(Limits(), ReusedMemory(0)))
        answers, found = into.take_in(head, frames, self._kept)
        for answer in answers:
            self.resumed.append(chunk_heads.read(answer).offset)
            await self._router.send_multipart([peer, answer])
        await self._router.send_multipart([peer, chunk_heads.packed(into.credit())])
        # What is refused continues a message that an earlier connection has left.
        return peer, next((decode(each) for each in found if not isinstance(each, Refused)), None)
