"""A broker's end of a bulk connection, for tests with a bare ROUTER: chunks become messages, and give credit."""

import asyncio

from broker.chunks import heads
from broker.chunks.receiving import Inflow
from broker.wire.codec import decode


class BulkReceiver:
    """Takes whole messages off a ROUTER, of any number of connections."""

    def __init__(self, router):
        self._router, self._flows = router, {}

    async def message(self, within_s=30.0):
        """Returns the next one."""
        return (await self.taken(within_s))[1]

    async def taken(self, within_s=30.0):
        """Returns the routing id of its connection, and the message."""
        async with asyncio.timeout(within_s):
            while True:
                peer, first, *frames = await self._router.recv_multipart()
                if not heads.is_head(first):
                    return peer, decode([first, *frames])
                into = self._flows.setdefault(peer, Inflow(most_bytes=1 << 30, most_frames=100))
                found = into.take(heads.read(first), frames)
                await self._router.send_multipart([peer, into.credit.packed()])
                if found is not None:
                    return peer, decode(found)
