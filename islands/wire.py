"""An island's two connections to its broker: messages out in order, messages in as they come. Shell."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import zmq.asyncio

from broker.endpoint import Endpoint
from broker.identity import KeyRole
from broker.keys import client_keys
from broker.messages import Channel, Contribution, Envelope, Heartbeat, Want
from islands.config import IslandConfig

#: How long a receive waits before it looks again; nothing depends on it.
POLL_S = 1.0


class Wire:
    """Both endpoints, each with what waits to be sent over it; an async context manager.

    What cannot be sent now is dropped, not kept: a broker that comes back hears from the core all that still matters.
    """

    def __init__(self, config: IslandConfig) -> None:
        self._config = config
        self._endpoints: dict[Channel, Endpoint] = {}
        self._outboxes = {channel: _Outbox() for channel in Channel}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Starts connecting.

        Raises:
            ConfigError: If ZeroMQ does not take the address, or a key file is wrong.
        """
        keys, limits = client_keys(self._config.key, KeyRole.ISLAND), self._config.limits()
        context = zmq.asyncio.Context()
        self._stack.callback(context.term)
        async with AsyncExitStack() as stack:
            stack.push_async_exit(self._stack)  # closed at once if what follows fails
            for channel in Channel:
                endpoint = Endpoint(context, self._config.broker, channel, keys=keys, limits=limits)
                self._endpoints[channel] = await self._stack.enter_async_context(endpoint)
            stack.pop_all()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes both connections; what was handed to the control connection is sent within its linger time."""
        await self._stack.aclose()

    @property
    def bytes_up(self) -> int:
        """Bytes sent."""
        return sum(endpoint.traffic.bytes_up for endpoint in self._endpoints.values())

    @property
    def bytes_down(self) -> int:
        """Bytes received."""
        return sum(endpoint.traffic.bytes_down for endpoint in self._endpoints.values())

    async def connected(self) -> None:
        """Returns as soon as the control connection stands."""
        while not await self._endpoints[Channel.CONTROL].ready(POLL_S):
            pass

    async def receive(self, channel: Channel) -> Envelope:
        """Returns the next message that can be read."""
        while True:
            envelope = await self._endpoints[channel].recv(POLL_S)
            if envelope is not None:
                return envelope

    def post(self, envelope: Envelope) -> None:
        """Puts a message behind those that wait for its connection."""
        self._outboxes[envelope.message.channel].put(envelope)

    async def send(self, channel: Channel) -> None:
        """Sends what is posted, until it is cancelled."""
        outbox = self._outboxes[channel]
        while True:
            await self._endpoints[channel].send(await outbox.next())
            outbox.sent()

    async def emptied(self, channel: Channel, within_s: float) -> None:
        """Returns when nothing waits for a connection any more, or when the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._outboxes[channel].empty.wait()


class _Outbox:
    """Messages on their way to one connection, in order; a message that a newer one replaces is taken out."""

    def __init__(self) -> None:
        self._waiting: list[Envelope] = []
        self._more = asyncio.Event()
        self.empty = asyncio.Event()
        self.empty.set()

    def put(self, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, Want | Heartbeat):  # the newest says it all
            self._waiting = [each for each in self._waiting if type(each.message) is not type(message)]
        elif isinstance(message, Contribution) and any(each.message is message for each in self._waiting):
            return
        self._waiting.append(envelope)
        self._more.set()
        self.empty.clear()

    async def next(self) -> Envelope:
        while not self._waiting:
            self._more.clear()
            await self._more.wait()
        return self._waiting.pop(0)

    def sent(self) -> None:
        if not self._waiting:
            self.empty.set()
