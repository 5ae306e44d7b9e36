"""One broker's connections at the aggregator, with a queue for the slower one. Shell.

Each broker has its own queue and its own task, so one that takes nothing holds up no other. What is queued for several
is encoded once (:class:`Outgoing`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from broker.base.errors import LocalProtocolError, RemoteProtocolError
from broker.routing.resending import Carried
from broker.transport.endpoint import Endpoint
from broker.transport.keys import ClientKeys
from broker.transport.sockets import Context
from broker.wire.frames import Origin
from broker.wire.headers import Limits
from broker.wire.messages import BROKER, AttachBulk, Channel, Envelope, FollowBulk, Message

#: There are few aggregators, and a broker that has come back is of no use to anybody before it knows one.
RECONNECT_MAX_S = 1.0
#: This many differences of one fragment may wait for their turn; together they are as large as a whole version.
MOST_DIFFERENCES = 4


class Outgoing:
    """A bulk message on its way to one broker or several: made once, when the first of them can take it.

    Args:
        to: Its address.
        make: Starts to make it, which encodes tensors; None: there is nothing to be sent after all.
    """

    def __init__(self, to: str, make: Callable[[], asyncio.Future[Message | None]]) -> None:
        self.to = to
        self._make = make
        self._made: asyncio.Future[Message | None] | None = None

    async def message(self) -> Message | None:
        """Returns the message, whose payload all callers share."""
        if self._made is None:
            self._made = self._make()
        return await asyncio.shield(self._made)


class Link:
    """Both endpoints towards one broker.

    Args:
        context: Of the process.
        address: The broker's control address.
        keys: To be known by; None where connections have none.
        limits: Of what is sent and received.
        wrap: Makes an envelope of an address and a message.
        on_unreadable: Told of each message that cannot be read.
        on_unsendable: Told of each message that no peer would read, and to whom it was to go. It is dropped: what a
            peer has claimed may be in it, and no peer ends an aggregator.
    """

    def __init__(
        self,
        context: Context,
        address: str,
        *,
        keys: ClientKeys | None,
        limits: Limits,
        wrap: Callable[[str, Message], Envelope],
        on_unreadable: Callable[[RemoteProtocolError, Origin], None],
        on_unsendable: Callable[[LocalProtocolError, str], None],
    ) -> None:
        self.endpoints = {
            channel: Endpoint(
                context,
                address,
                channel,
                keys=keys,
                limits=limits,
                reconnect_max_s=RECONNECT_MAX_S,
                on_unreadable=on_unreadable,
            )
            for channel in Channel
        }
        self._wrap = wrap
        self._on_unsendable = on_unsendable
        self._attach: AttachBulk | FollowBulk | None = None  # that waits to be sent
        self._attached: AttachBulk | FollowBulk | None = None  # the newest one
        self._replicas: dict[tuple[str, int | None], Outgoing] = {}  # by standby and fragment
        self._versions: dict[tuple[int, int], Outgoing] = {}  # by fragment and version, in the order of publication
        self._greeted = 0  # the connection over which it has attached
        self._woken, self._to_attach = asyncio.Event(), asyncio.Event()
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
        try:
            await self.endpoints[Channel.CONTROL].send(envelope)
        except LocalProtocolError as err:
            self._on_unsendable(err, envelope.to)

    def attach(self, message: AttachBulk | FollowBulk) -> None:
        """Sends the bulk channel's heartbeat, between two chunks of what is under way."""
        self._attach = self._attached = message
        self._to_attach.set()

    def publish(self, fragment_id: int, fragment_version: int, outgoing: Outgoing, *, whole: bool) -> None:
        """Queues a version: differences follow each other, a whole one replaces all that wait before it.

        So does a difference where many wait: the broker asks for a whole one then (:class:`WantWhole`).
        """
        waiting = [key for key in self._versions if key[0] == fragment_id]
        if whole or len(waiting) >= MOST_DIFFERENCES:
            for key in waiting:
                del self._versions[key]
        self._versions[fragment_id, fragment_version] = outgoing
        self._woken.set()

    def replicate(self, key: tuple[str, int | None], outgoing: Outgoing) -> None:
        """Queues what a standby lacks, before all versions: they wait until it is durable there."""
        self._replicas[key] = outgoing
        self._woken.set()

    @property
    def carried(self) -> Carried | None:
        """Returns what the bulk connection has carried; None without one."""
        return self.endpoints[Channel.BULK].carried

    async def send_bulk(self) -> None:
        """Sends queued messages, oldest first, until cancelled; a lost one is queued again by its sender.

        Over each connection it attaches before all else. What waits for one, or for room in it, gives way to what is
        newer in its place.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_attach())
            group.create_task(self._send_queued())

    async def _send_attach(self) -> None:
        bulk = self.endpoints[Channel.BULK]
        while True:
            await self._to_attach.wait()
            self._to_attach.clear()
            connection = bulk.connection
            if self._attached is None:
                continue
            if not connection:
                await bulk.line(False, 1.0)
                self._to_attach.set()
            elif self._attach is not None or connection != self._greeted:
                self._attach = None
                if await self._send_bulk(BROKER, self._attached, connection):
                    self._greeted = connection
                    self._woken.set()

    async def _send_queued(self) -> None:
        bulk = self.endpoints[Channel.BULK]
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._replicas or self._versions:
                connection = bulk.connection
                if not connection:
                    await bulk.line(False, 1.0)
                elif self._attached is not None and connection != self._greeted:
                    self._to_attach.set()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            await self._woken.wait()
                    self._woken.clear()
                else:
                    queue: dict[Any, Outgoing] = self._replicas or self._versions
                    key, outgoing = next(iter(queue.items()))
                    message = await outgoing.message()
                    while queue.get(key) is outgoing and bulk.connection == connection:
                        if message is None or await self._send_bulk(outgoing.to, message, connection):
                            if queue.get(key) is outgoing:
                                del queue[key]
                            break

    async def _send_bulk(self, to: str, message: Message, connection: int) -> bool:
        """Returns whether it is on its way over that connection, or never can be."""
        try:
            return await self.endpoints[Channel.BULK].send(self._wrap(to, message), over=connection)
        except LocalProtocolError as err:
            self._on_unsendable(err, to)
            return True
