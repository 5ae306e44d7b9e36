"""An island's two connections to its broker. Shell.

Which broker that is, the core says (:mod:`islands.protocol.broker_choice`). A move closes both connections and opens
two new ones; what was on its way over the old ones may be lost, and is sent again by the core's rules.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, NamedTuple, Self

from broker.base.errors import ConfigError, RemoteProtocolError, worth_repeating
from broker.chunks.sending import is_urgent
from broker.process import logs
from broker.process.release import refusal_detail
from broker.routing.resending import Carried
from broker.transport.endpoint import Endpoint, OnUnreadable
from broker.transport.keys import client_keys
from broker.transport.sockets import Context
from broker.wire.frames import Origin
from broker.wire.identity import KeyRole
from broker.wire.messages import (
    Channel,
    Contribution,
    Envelope,
    FilesPart,
    Heartbeat,
    HostPart,
    Message,
    Reason,
    Seed,
    StatePart,
    Want,
)
from islands.interface.config import IslandConfig
from islands.protocol.core import Island
from islands.session.exchange import Exchange

log = logs.get(__name__)

#: How long a receive waits before it looks again; nothing depends on it.
POLL_S = 1.0
#: Parts of this island's optimizer state that may wait to be sent; what is beyond is asked for again.
MOST_STATE_PARTS = 16

Endpoints = dict[Channel, Endpoint]


class Posted(NamedTuple):
    """A message that waits for its connection; it gets its number when it leaves.

    What waits on a narrow link for longer than thousands of heartbeats take would look played back by its number
    (:mod:`broker.routing.directory`), if that were older.
    """

    message: Message
    to: str
    sender: str
    incarnation: int


class Connections:
    """Both endpoints and their unsent messages; an async context manager around :meth:`run`.

    Without a connection, what cannot be sent is dropped, not kept: a broker that comes back hears from the core all
    that still matters. Over one that stands, what is large waits until it takes more: the link may be narrow.

    Args:
        config: Addresses and limits.
        context: Makes the ZeroMQ context, which is terminated at the end.
        receive: Takes each message that can be read, with its channel; those of one channel one after the other.
        line: Told when the control connection stands and when it is lost, and why the name of the broker's host
            cannot be found, or nothing.
        channels: Those to connect.
        sequence: Of the last message of an earlier process of this life: the next one is one more.
        on_unreadable: Told of each message that cannot be read; what it raises ends :meth:`run`.

    Attributes:
        sequence: Of the last message sent.
    """

    def __init__(
        self,
        config: IslandConfig,
        context: Callable[[], Context],
        receive: Callable[[Channel, Envelope], Awaitable[None]],
        line: Callable[[bool, str], None],
        *,
        channels: Sequence[Channel] = tuple(Channel),
        sequence: int = 0,
        on_unreadable: OnUnreadable | None = None,
    ) -> None:
        self._config, self._channels = config, tuple(channels)
        self._make_context, self._receive = context, receive
        self._line, self._on_unreadable = line, on_unreadable
        self._broker = 0
        self._moved = asyncio.Event()
        self._endpoints: Endpoints = {}
        # What is urgent on the bulk channel passes between two chunks of what waits there.
        self._outboxes = {channel: Outbox() for channel in Channel}
        self._urgent = Outbox()
        self.sequence = sequence
        self._closed_up = self._closed_down = 0  # bytes of connections that were closed
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Makes the ZeroMQ context; ConfigError if a key file is wrong."""
        self._keys = client_keys(self._config.key, KeyRole.ISLAND)
        self._context = self._make_context()
        self._stack.callback(self._context.term)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the context; :meth:`run` has ended. What was handed to it is sent within its linger time."""
        await self._stack.aclose()

    @property
    def bytes_up(self) -> int:
        """Bytes sent."""
        return self._closed_up + sum(endpoint.traffic.bytes_up for endpoint in self._endpoints.values())

    @property
    def bytes_down(self) -> int:
        """Bytes received."""
        return self._closed_down + sum(endpoint.traffic.bytes_down for endpoint in self._endpoints.values())

    @property
    def carried(self) -> Carried | None:
        """Returns what the bulk connection has carried; None without one."""
        endpoint = self._endpoints.get(Channel.BULK)
        return None if endpoint is None else endpoint.carried

    def connect(self, broker: int) -> None:
        """Leaves the present broker for the one at this place of the configuration."""
        self._broker = broker
        self._moved.set()

    def post(self, posted: Posted) -> None:
        """Puts a message behind those that wait for its connection."""
        channel = posted.message.channel
        urgent = channel is Channel.BULK and is_urgent(posted.message)
        (self._urgent if urgent else self._outboxes[channel]).put(posted)

    async def emptied(self, channel: Channel, within_s: float) -> None:
        """Returns when nothing waits for a connection any more, or when the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._outboxes[channel].empty.wait()

    async def run(self) -> None:
        """Carries messages to and from the broker chosen last, until it is cancelled.

        Raises:
            ConfigError: If ZeroMQ does not take the address.
        """
        while True:
            self._moved.clear()
            async with self._opened(self._config.brokers[self._broker]) as endpoints:
                work = [self._watch(endpoints[self._channels[0]])]
                for channel in self._channels:
                    endpoint = endpoints[channel]
                    work += [self._receive_over(endpoint), self._send_over(endpoint, self._outboxes[channel])]
                    if channel is Channel.BULK:
                        work.append(self._send_over(endpoint, self._urgent))
                await _until(self._moved, work)

    @contextlib.asynccontextmanager
    async def _opened(self, address: str) -> AsyncIterator[Endpoints]:
        async with AsyncExitStack() as stack:
            for channel in self._channels:
                endpoint = Endpoint(
                    self._context,
                    address,
                    channel,
                    keys=self._keys,
                    limits=self._config.limits(),
                    connections=self._config.connections if channel is Channel.BULK else 1,
                    on_unreadable=self._on_unreadable,
                )
                self._endpoints[channel] = await stack.enter_async_context(endpoint)
            try:
                yield self._endpoints
            finally:
                self._closed_up, self._closed_down = self.bytes_up, self.bytes_down
                self._endpoints = {}

    async def _watch(self, endpoint: Endpoint) -> None:
        told = False, ""
        while True:
            now = await endpoint.line(told[0], POLL_S), endpoint.no_address
            if now != told:
                told = now
                self._line(*told)

    async def _receive_over(self, endpoint: Endpoint) -> None:
        while True:
            envelope = await endpoint.recv(POLL_S)
            if envelope is not None:
                await self._receive(endpoint.channel, envelope)

    async def _send_over(self, endpoint: Endpoint, outbox: Outbox) -> None:
        while True:
            posted = await outbox.next()
            self.sequence += 1
            run_id, number = self._config.run_id, self.sequence
            envelope = Envelope(run_id=run_id, sequence=number, **posted._asdict())
            while not await endpoint.send(envelope):
                if endpoint.channel is Channel.CONTROL or not await endpoint.line(True, 0.0):
                    break
            outbox.sent()


class Unreadable:
    """Counts and logs messages that cannot be read.

    One in another version of the protocol ends the joining, if there is no other broker to try.

    Args:
        config: With the brokers' addresses.
        core: Says whether the island has joined, and through which broker.
        exchange: Says to people what is waited for.
    """

    def __init__(self, config: IslandConfig, core: Island, exchange: Exchange) -> None:
        self._config, self._core, self._exchange = config, core, exchange
        self._times: Counter[str] = Counter()

    def __call__(self, error: RemoteProtocolError, origin: Origin) -> None:
        """Takes note of a message.

        Raises:
            ConfigError: The only broker speaks another version of the protocol.
        """
        detail = refusal_detail(error)
        self._times[error.reason] += 1
        times = self._times[error.reason]
        if worth_repeating(times):
            log.warning("message.unreadable", sender=origin.sender, kind=origin.kind, detail=detail, times=times)
        if error.reason != Reason.PROTOCOL_VERSION or self._core.joined:
            return
        address = self._config.brokers[self._core.broker]
        if len(self._config.brokers) == 1:
            raise ConfigError("broker", address, detail)
        self._exchange.doing = f"waiting for another broker than {address}: {detail}"


async def _until(event: asyncio.Event, work: list[Coroutine[Any, Any, None]]) -> None:
    """Runs coroutines side by side until the event is set; then, or when one of them fails, all end."""
    tasks = [asyncio.create_task(each) for each in work]
    waiting = asyncio.create_task(event.wait())
    ending: list[asyncio.Task[Any]] = [waiting, *tasks]
    try:
        await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for each in ending:
            each.cancel()
        await asyncio.gather(*ending, return_exceptions=True)


class Outbox:
    """Messages on their way to one connection, in order; a message that a newer one replaces is taken out.

    What an island says again must not wait twice: the way up may be so narrow that a copy is made before the first one
    has left.

    What this island gives to others of its optimizer's state goes last, a part to each in turn, and never piles up: who
    hears nothing while another one gets all of its parts would take this island for silent.

    Attributes:
        empty: Set while nothing waits.
    """

    def __init__(self) -> None:
        self._waiting: list[Posted] = []
        self._served: list[str] = []  # who got a part and waits for another one, the last one last
        self._more = asyncio.Event()
        self.empty = asyncio.Event()
        self.empty.set()

    def put(self, posted: Posted) -> None:
        """Puts a message behind the others, or in the place of the one that says the same."""
        message = posted.message
        if isinstance(message, Want | Heartbeat | FilesPart):  # the newest says it all
            self._waiting = [each for each in self._waiting if type(each.message) is not type(message)]
        elif isinstance(message, Seed):
            for place, each in enumerate(self._waiting):
                if isinstance(each.message, Seed) and each.message.fragment_id == message.fragment_id:
                    self._waiting[place] = posted
                    return
        elif self._too_many(posted):
            return
        self._waiting.append(posted)
        self._more.set()
        self.empty.clear()

    async def next(self) -> Posted:
        """Returns what goes next, as soon as there is anything; :meth:`sent` is to follow."""
        while not self._waiting:
            self._more.clear()
            await self._more.wait()
        posted = self._waiting.pop(min(range(len(self._waiting)), key=lambda i: self._turn(self._waiting[i])))
        if isinstance(posted.message, StatePart):
            waiting = {each.to for each in self._waiting if isinstance(each.message, StatePart)}
            self._served = [name for name in self._served if name in waiting and name != posted.to] + [posted.to]
        return posted

    def sent(self) -> None:
        """Notes that what :meth:`next` returned has left, or was given up."""
        if not self._waiting:
            self.empty.set()

    def _too_many(self, posted: Posted) -> bool:
        """Returns whether it waits here already, or enough of its kind do."""
        message = posted.message
        if isinstance(message, StatePart):
            others = [(each.to, each.message) for each in self._waiting if isinstance(each.message, StatePart)]
            same = ((to, part.state_id, part.part) for to, part in others)
            return (posted.to, message.state_id, message.part) in same or len(others) >= MOST_STATE_PARTS
        return isinstance(message, Contribution | HostPart) and any(each.message is message for each in self._waiting)

    def _turn(self, posted: Posted) -> tuple[bool, int]:
        """Returns the sort key: parts of a state go last, and first to who got one longest ago."""
        place = self._served.index(posted.to) + 1 if posted.to in self._served else 0
        is_part = isinstance(posted.message, StatePart)
        return is_part, place if is_part else 0
