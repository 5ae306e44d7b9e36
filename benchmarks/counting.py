"""A TCP forwarder that counts every byte: an observer that shares no code with what it observes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from broker.wire.messages import Channel
from ops.processes.cluster import free_ports

CHUNK_BYTES = 1 << 18


@dataclass(slots=True)
class Counted:
    """Bytes inside TCP, ZeroMQ's own framing, greetings and heartbeats included; TCP and IP headers not."""

    up_bytes: int = 0
    down_bytes: int = 0


class CountingForwarder:
    """Stands between one island and the broker, on two ports of its own.

    Args:
        broker: Control address of the broker, ``tcp://HOST:PORT``.
    """

    def __init__(self, broker: str) -> None:
        host, _, port = broker.removeprefix("tcp://").rpartition(":")
        self.counted = {channel: Counted() for channel in Channel}
        self._target = host, int(port)
        self._port = free_ports(2)
        self.address = f"tcp://127.0.0.1:{self._port}"
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Listens."""
        for offset, channel in enumerate((Channel.CONTROL, Channel.BULK)):
            self._servers.append(await self._listen(channel, offset))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cuts every connection."""
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reset(self) -> None:
        """Counts from here on."""
        for channel in Channel:
            self.counted[channel] = Counted()

    async def _listen(self, channel: Channel, offset: int) -> asyncio.Server:
        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._forward(channel, offset, reader, writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return await asyncio.start_server(connected, "127.0.0.1", self._port + offset, limit=CHUNK_BYTES)

    async def _forward(
        self, channel: Channel, offset: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        host, port = self._target
        there_reader, there_writer = await asyncio.open_connection(host, port + offset, limit=CHUNK_BYTES)
        try:
            async with asyncio.TaskGroup() as pair:
                pair.create_task(self._pump(channel, "up_bytes", reader, there_writer))
                pair.create_task(self._pump(channel, "down_bytes", there_reader, writer))
        except* ConnectionError:
            pass  # an end that was cut ends both: the peers see it, as they would without us
        finally:
            writer.close()
            there_writer.close()

    async def _pump(
        self, channel: Channel, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(CHUNK_BYTES):
            counted = self.counted[channel]
            setattr(counted, direction, getattr(counted, direction) + len(data))
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
