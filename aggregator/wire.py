"""The aggregator's two connections to the broker: messages in as events, messages and versions out.

Shell. Whatever arrives is well-formed, or was counted and dropped. Payloads are inspected before the core hears of
them, one at a time, so that the order of one sender's messages stays what it was, and the broker holds what follows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import zmq.asyncio

from aggregator import versions
from aggregator.config import AggregatorConfig
from aggregator.events import Publish, Received
from aggregator.inspection import flaw_in
from aggregator.outer import FragmentState
from broker import logs
from broker.codec import Limits, Origin
from broker.endpoint import Endpoint
from broker.errors import ConfigError, RemoteProtocolError
from broker.fragments import FragmentManifest
from broker.identity import KeyRole
from broker.keys import client_keys
from broker.messages import (
    AGGREGATOR,
    BROKER,
    AttachBulk,
    Channel,
    Contribution,
    Envelope,
    Message,
    Refused,
    Seed,
    Version,
)
from broker.tensors import payload_bytes

log = logs.get(__name__)

#: How long a receive waits before it looks again; nothing depends on it.
POLL_S = 1.0
#: Payloads below this are inspected on the spot: it takes 50 us, and handing them to a thread as much.
INSPECT_HERE_BYTES = 1 << 18
#: Of a message's size limit: what a header with thousands of contributions or tensors may take.
_HEADER_BYTES = 4 << 20


class Wire:
    """Both endpoints of the aggregator.

    Args:
        context: Of the process.
        config: Addresses, limits and the codec of versions.
        deliver: Takes what was received.
    """

    def __init__(
        self, context: zmq.asyncio.Context, config: AggregatorConfig, deliver: Callable[[Received], Awaitable[None]]
    ) -> None:
        self._config = config
        self._deliver = deliver
        header_bytes = min(_HEADER_BYTES, config.max_message_bytes)
        limits = Limits(max_header_bytes=header_bytes, max_message_bytes=config.max_message_bytes)
        keys = client_keys(config.key, KeyRole.AGGREGATOR)
        self._control, self._bulk = (
            Endpoint(context, config.broker, channel, keys=keys, limits=limits, on_unreadable=self._unreadable)
            for channel in (Channel.CONTROL, Channel.BULK)
        )
        self._manifest: FragmentManifest | None = None
        self._sequence = 0
        self._threads = ThreadPoolExecutor(1, "payloads")
        self._attach: AttachBulk | None = None
        self._to_publish: dict[int, tuple[Publish, int, FragmentState]] = {}  # by fragment: with epoch and parameters
        self._woken = asyncio.Event()
        self._complaints: Counter[tuple[str, ...]] = Counter()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Starts connecting; ConfigError if the address cannot be used."""
        await self._stack.enter_async_context(self._control)
        await self._stack.enter_async_context(self._bulk)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes both connections; the tasks that use them must have ended."""
        await self._stack.aclose()
        self._threads.shutdown(cancel_futures=True)

    def expect(self, manifest: FragmentManifest) -> None:
        """Takes the fragments that payloads are checked against.

        Raises:
            ConfigError: A fragment of the run would not fit into a message.
        """
        largest = 4 * max(manifest.sizes) + _HEADER_BYTES
        if largest > self._config.max_message_bytes:
            cure = f"must be at least {largest} for the largest fragment; raise it everywhere, or use more fragments"
            raise ConfigError("max_message_bytes", self._config.max_message_bytes, cure)
        round_bytes = 4 * max(manifest.sizes) * self._config.islands
        if round_bytes > self._config.held_bytes:
            cure = f"must be at least {round_bytes}, one round of the largest fragment, or no round could complete"
            raise ConfigError("held_bytes", self._config.held_bytes, cure)
        self._manifest = manifest

    # --- in -----------------------------------------------------------------------------------------------------

    async def receive_control(self) -> None:
        """Delivers control messages until cancelled."""
        while True:
            envelope = await self._control.recv(POLL_S)
            if envelope is not None and self._is_for_us(envelope):
                await self._deliver(Received(envelope=envelope))

    async def receive_bulk(self) -> None:
        """Delivers bulk messages, inspected, until cancelled."""
        while True:
            envelope = await self._bulk.recv(POLL_S)
            if envelope is not None and self._is_for_us(envelope):
                await self._deliver(await self._inspected(envelope))

    async def _inspected(self, envelope: Envelope) -> Received:
        if not isinstance(envelope.message, Contribution | Seed):
            return Received(envelope=envelope)
        nbytes = payload_bytes(envelope.message.payload)
        if nbytes < INSPECT_HERE_BYTES:
            flaw = flaw_in(envelope, self._manifest)
        else:
            looking = self._threads.submit(flaw_in, envelope, self._manifest)
            flaw = await asyncio.wrap_future(looking)
        return Received(envelope=envelope, flaw=flaw, payload_bytes=nbytes)

    def _is_for_us(self, envelope: Envelope) -> bool:
        if envelope.run_id != self._config.run_id:
            self._complain("wrong_run", envelope.sender, envelope.run_id)
            return False
        if isinstance(envelope.message, Refused):
            # Said by the broker about what we sent; all of it is sent again while it matters.
            refused = envelope.message
            self._complain(refused.reason, refused.kind, refused.detail, key=(refused.reason, refused.kind))
            return False
        return True

    def _unreadable(self, error: RemoteProtocolError, origin: Origin) -> None:
        self._complain(error.reason, origin.kind, str(error), key=(error.reason, origin.kind))

    def _complain(self, reason: str, about: str, detail: str, *, key: tuple[str, ...] = ()) -> None:
        """Logs the 1st, 10th, 100th, .. time of a complaint."""
        key = key or (reason, about)
        self._complaints[key] += 1
        times = self._complaints[key]
        if str(times).rstrip("0") == "1":
            log.warning("wire.refused", reason=reason, about=about, detail=detail, times=times)

    # --- out ----------------------------------------------------------------------------------------------------

    async def send(self, to: str, message: Message) -> None:
        """Sends a small message at once, or drops it when the broker is away: all of them are repeated.

        On the bulk channel there is one, AttachBulk, which waits its turn but goes before any version.
        """
        if isinstance(message, AttachBulk):
            self._attach = message
            self._woken.set()
            return
        await self._control.send(self._envelope(to, message))

    def publish(self, action: Publish, epoch: int, state: FragmentState) -> None:
        """Queues a version; of a fragment whose turn has not come, only the newest one is sent."""
        self._to_publish[action.fragment_id] = action, epoch, state
        self._woken.set()

    async def publish_versions(self) -> None:
        """Sends what is queued, oldest first, until cancelled. What cannot be sent is published again by the core."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._attach is not None or self._to_publish:
                if self._attach is not None:
                    message: Message = self._attach
                    self._attach = None
                else:
                    message = await self._version(*self._to_publish.pop(next(iter(self._to_publish))))
                await self._bulk.send(self._envelope(BROKER, message))

    async def _version(self, action: Publish, epoch: int, state: FragmentState) -> Version:
        assert self._manifest is not None
        tensors = self._manifest.fragments[action.fragment_id]
        encoding = self._threads.submit(versions.payload_of, tensors, state, self._config.version_codec)
        return Version(
            epoch=epoch,
            fragment_id=action.fragment_id,
            fragment_version=action.fragment_version,
            digest=action.digest,
            contributions=action.contributions,
            payload=await asyncio.wrap_future(encoding),
        )

    def _envelope(self, to: str, message: Message) -> Envelope:
        self._sequence += 1
        return Envelope(
            run_id=self._config.run_id,
            sender=AGGREGATOR,
            incarnation=0,
            sequence=self._sequence,
            to=to,
            message=message,
        )
