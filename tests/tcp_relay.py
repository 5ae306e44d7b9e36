"""A TCP port whose connections lead to another one of this host."""

import asyncio
import contextlib


class Relay:
    """What each connection carries up is counted; one can be cut, and more written to its client than was sent."""

    def __init__(self, port):
        self._port = port
        self.up = []  # bytes of each connection, in the order in which they came
        self.begun = bytearray()  # what was carried up first
        self.clients = []
        self._outers, self._tasks = [], []

    async def _carry(self, reader, writer, number=None):
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 18):
                if number is not None:
                    self.up[number] += len(data)
                    self.begun += data[: (1 << 16) - len(self.begun)]
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _accept(self, reader, writer):
        self._tasks.append(asyncio.current_task())
        inner, outer = await asyncio.open_connection("127.0.0.1", self._port)
        self.clients.append(writer)
        self._outers.append(outer)
        self.up.append(0)
        await asyncio.gather(self._carry(reader, outer, len(self.up) - 1), self._carry(inner, writer))

    def living(self):
        """Those that have not ended, the first of the flow before the others."""
        return [number for number, task in enumerate(self._tasks) if not task.done()]

    def cut(self, number):
        for writer in (self.clients[number], self._outers[number]):
            writer.transport.abort()

    @contextlib.asynccontextmanager
    async def listening(self):
        """Yields the port; afterwards all connections are cut."""
        async with await asyncio.start_server(self._accept, "127.0.0.1", 0) as server:
            yield server.sockets[0].getsockname()[1]
            for number in range(len(self.clients)):
                self.cut(number)
            await asyncio.wait(self._tasks)
