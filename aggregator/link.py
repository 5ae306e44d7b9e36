"""One broker as the aggregator sees it: two connections, and the versions that wait for the slower one. Shell.

Each broker has its own queue and its own task, so one that takes nothing holds up no other. What is queued for several
is encoded once (:class:`Publication`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import zmq.asyncio

from broker.codec import Limits, Origin
from broker.endpoint import Endpoint
from broker.errors import RemoteProtocolError
from broker.messages import AttachBulk, Channel, Envelope, Message, Payload, Version

#: There are few aggregators, and a broker that has come back is of no use to anybody before it knows one.
RECONNECT_MAX_S = 1.0


class Publication:
    """A version on its way to brokers: encoded once, when the first of them can take it.

    Args:
        version: All but the payload.
        encode: Starts to encode the parameters.
    """

    def __init__(self, version: Callable[[Payload], Version], encode: Callable[[], asyncio.Future[Payload]]) -> None:
        self._version = version
        self._encode = encode
        self._payload: asyncio.Future[Payload] | None = None

    async def message(self) -> Version:
        """Returns the version with its payload, which all callers share."""
        if self._payload is None:
            self._payload = self._encode()
        return self._version(await asyncio.shield(self._payload))


class Link:
    """Both endpoints towards one broker.

    Args:
        context: Of the process.
        address: The broker's control address.
        limits: Of what is sent and received.
        wrap: Makes an envelope of a message to the broker.
        on_unreadable: Told of each message that cannot be read.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        *,
        limits: Limits,
        wrap: Callable[[Message], Envelope],
        on_unreadable: Callable[[RemoteProtocolError, Origin], None],
    ) -> None:
        self.endpoints = {
            channel: Endpoint(
                context,
                address,
                channel,
                limits=limits,
                reconnect_max_s=RECONNECT_MAX_S,
                on_unreadable=on_unreadable,
            )
            for channel in Channel
        }
        self._wrap = wrap
        self._attach: AttachBulk | None = None
        self._waiting: dict[int, Publication] = {}  # by fragment, in the order of publication
        self._woken = asyncio.Event()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Starts connecting; ConfigError if the address cannot be used."""
        for endpoint in self.endpoints.values():
            await self._stack.enter_async_context(endpoint)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes both connections; the tasks that use them must have ended."""
        await self._stack.aclose()

    async def send(self, envelope: Envelope) -> None:
        """Sends a control message at once, or drops it when the broker is away: all of them are repeated."""
        await self.endpoints[Channel.CONTROL].send(envelope)

    def attach(self, message: AttachBulk) -> None:
        """Sends the bulk channel's heartbeat: it waits its turn, but goes before any version."""
        self._attach = message
        self._woken.set()

    def publish(self, fragment_id: int, publication: Publication) -> None:
        """Queues a version; of a fragment whose turn has not come, only the newest one is sent."""
        self._waiting[fragment_id] = publication
        self._woken.set()

    async def publish_versions(self) -> None:
        """Sends what is queued, oldest first, until cancelled. What cannot be sent is published again by the core."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._attach is not None or self._waiting:
                if self._attach is not None:
                    message: Message = self._attach
                    self._attach = None
                else:
                    message = await self._waiting.pop(next(iter(self._waiting))).message()
                await self.endpoints[Channel.BULK].send(self._wrap(message))
