"""The aggregator's connections to every broker: messages in as events, messages and versions out.

Shell. Whatever arrives is well-formed, or was counted and dropped. Payloads are inspected before the core hears of
them, one at a time, so that the order of one sender's messages stays what it was, and the broker holds what follows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import Commit, Fenced, NotLetIn, Publish, Received, Send, refusal_of_ours
from aggregator.merge.fragment_state import FragmentState
from aggregator.merge.payload_checks import inspect
from aggregator.process.broker_link import Link, Outgoing
from aggregator.standby import replicas
from aggregator.state.model_limits import HEADER_BYTES, misfit, most_message_bytes
from aggregator.store.commit_file import Damaged
from broker.base.errors import ConfigError, LocalProtocolError, RemoteProtocolError, worth_repeating
from broker.process import logs
from broker.process.release import refusal_detail
from broker.transport.endpoint import Endpoint
from broker.transport.keys import client_keys
from broker.transport.sockets import Context
from broker.wire.fragments import FragmentManifest
from broker.wire.frames import Origin
from broker.wire.headers import Limits, room_bytes
from broker.wire.identity import KeyRole
from broker.wire.messages import (
    AGGREGATOR,
    BROKER,
    AttachBulk,
    Attached,
    Contribution,
    Encoded,
    Envelope,
    FilesPart,
    FollowBulk,
    HostPart,
    Message,
    Refused,
    Replica,
    ReplicaRun,
    Seed,
    Version,
    standing_by,
)
from broker.wire.tensors import payload_bytes

log = logs.get(__name__)

#: How long a receive waits before it looks again; nothing depends on it.
POLL_S = 1.0
#: Payloads below this are inspected on the spot: it takes 50 us, and handing them to a thread as much.
INSPECT_HERE_BYTES = 1 << 18


class BrokerLinks:
    """A :class:`aggregator.process.broker_link.Link` to each broker, and what they share.

    Args:
        context: Of the process.
        config: Addresses, limits and the codec of versions.
        deliver: Takes what was received.
        sender: Who speaks: the leader, or a standby under its own name.
    """

    def __init__(
        self,
        context: Context,
        config: AggregatorConfig,
        deliver: Callable[[Received | Fenced | NotLetIn], Awaitable[None]],
        *,
        sender: str = AGGREGATOR,
    ) -> None:
        self._config = config
        self._deliver = deliver
        self._sender = sender
        self._known = False  # whether anything of our run was heard
        message_bytes = most_message_bytes(config) or room_bytes(0)
        limits = Limits(max_header_bytes=min(HEADER_BYTES, message_bytes), max_message_bytes=message_bytes)
        keys = client_keys(config.key, KeyRole.AGGREGATOR)
        self._links = [
            Link(
                context,
                address,
                keys=keys,
                limits=limits,
                wrap=self._envelope,
                on_unreadable=self._unreadable,
                on_unsendable=self._unsendable,
            )
            for address in config.brokers
        ]
        self._manifest: FragmentManifest | None = None
        self._sequence = 0
        self._threads = ThreadPoolExecutor(1, "payloads")
        self._complaints: Counter[tuple[str, ...]] = Counter()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Starts connecting; ConfigError if the address cannot be used."""
        for link in self._links:
            await self._stack.enter_async_context(link)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes all connections; the tasks that use them must have ended."""
        await self._stack.aclose()
        self._threads.shutdown(cancel_futures=True)

    def expect(self, manifest: FragmentManifest) -> None:
        """Takes the fragments that payloads are checked against.

        Raises:
            ConfigError: A fragment of a run that had begun would not fit into a message: a limit was lowered since.
        """
        problem = misfit(manifest, self._config, begun=True)
        if problem is not None:
            raise problem
        self._manifest = manifest

    # --- in -----------------------------------------------------------------------------------------------------

    def work(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Yields what is to be run side by side, until cancelled."""
        for place, link in enumerate(self._links):
            yield link.send_bulk()
            for endpoint in link.endpoints.values():
                yield self._receive(place, endpoint)

    async def _receive(self, place: int, endpoint: Endpoint) -> None:
        """Delivers what comes over one connection of the broker at this place."""
        while True:
            envelope = await endpoint.recv(POLL_S)
            if envelope is None:
                continue
            if envelope.run_id != self._config.run_id:
                if envelope.sender == BROKER and len(self._links) == 1 and not self._known:
                    where = self._config.brokers[place]
                    cure = f"the broker {where} serves run {envelope.run_id}: name that, or another broker"
                    raise ConfigError("run_id", self._config.run_id, cure)
                self._complain("wrong_run", envelope.sender, envelope.run_id)
                continue
            self._known = True
            if isinstance(envelope.message, Refused):
                await self._refused(place, envelope.message)
            else:
                await self._deliver(await self._inspected(envelope, place))

    async def _refused(self, place: int, refused: Refused) -> None:
        """Handles a broker's refusal: messages are sent again while they matter, unless we are deposed."""
        self._complain(refused.reason, refused.kind, refused.detail, key=(refused.reason, refused.kind, str(place)))
        event = refusal_of_ours(refused, place)
        if event is not None:
            await self._deliver(event)

    async def _inspected(self, envelope: Envelope, place: int) -> Received:
        message = envelope.message
        carried = self._links[place].carried if isinstance(message, Attached) else None
        if isinstance(message, FilesPart):  # its digest is looked at once all are here
            return Received(envelope=envelope, broker=place, payload_bytes=payload_bytes(message.payload))
        if not isinstance(message, Contribution | Seed | HostPart):
            return Received(envelope=envelope, broker=place, carried=carried)
        nbytes = payload_bytes(message.payload)
        if nbytes < INSPECT_HERE_BYTES:
            found = inspect(envelope, self._manifest)
        else:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._threads, inspect, envelope, self._manifest)
        return Received(
            envelope=envelope,
            flaw=found.flaw,
            payload_bytes=nbytes,
            broker=place,
            norm=found.norm,
            carried=carried,
        )

    def _unreadable(self, error: RemoteProtocolError, origin: Origin) -> None:
        self._complain(error.reason, origin.kind, refusal_detail(error), key=(error.reason, origin.kind))

    def _unsendable(self, error: LocalProtocolError, to: str) -> None:
        self._complain("unsendable", to, str(error), key=("unsendable",))

    def _complain(self, reason: str, about: str, detail: str, *, key: tuple[str, ...] = ()) -> None:
        """Logs the 1st, 10th, 100th, .. time of a complaint."""
        key = key or (reason, about)
        self._complaints[key] += 1
        times = self._complaints[key]
        if worth_repeating(times):
            log.warning("wire.refused", reason=reason, about=about, detail=detail, times=times)

    # --- out ----------------------------------------------------------------------------------------------------

    async def send(self, action: Send) -> None:
        """Sends a small message at once.

        It is dropped where the broker is away, for all of them are repeated, and with a complaint where no peer would
        read it.
        """
        links = self._by(action.by)
        if isinstance(action.message, AttachBulk | FollowBulk):  # the only ones on the bulk channel
            for link in links:
                link.attach(action.message)
            return
        envelope = self._envelope(action.to, action.message)
        for link in links:
            await link.send(envelope)

    def publish(self, action: Publish, epoch: int, payload: Callable[[], tuple[Encoded, ...]]) -> None:
        """Queues a version for its brokers, whole or as a difference; encoded once for all of them.

        One whose file has lost bytes is left out: nobody could use it, and the next merge asks for those bytes.
        """

        def encoded() -> Version:
            return Version(
                shard=self._config.shard,
                epoch=epoch,
                fragment_id=action.fragment_id,
                fragment_version=action.fragment_version,
                digest=action.digest,
                contributions=action.contributions,
                base=action.base,
                payload=payload(),
            )

        outgoing = Outgoing(BROKER, lambda: self._in_thread(encoded))
        for link in self._by(action.by):
            link.publish(action.fragment_id, action.fragment_version, outgoing, whole=action.base is None)

    def replicate(
        self, name: str, by: int | None, commit: Commit, epoch: int, read: Callable[[], FragmentState]
    ) -> None:
        """Queues a commit for a standby; of one fragment whose turn has not come, only the newest is sent."""

        def encoded() -> Replica:
            return replicas.replica_of(commit, self._config.shard, epoch, replicas.payload_of(read()))

        outgoing = Outgoing(standing_by(name), lambda: self._in_thread(encoded))
        for link in self._by(by):
            link.replicate((name, commit.fragment_id), outgoing)

    def replicate_run(self, name: str, by: int | None, message: ReplicaRun) -> None:
        """Queues a run record for a standby; of those whose turn has not come, only the newest is sent."""
        outgoing = Outgoing(standing_by(name), lambda: self._in_thread(lambda: message))
        for link in self._by(by):
            link.replicate((name, None), outgoing)

    def _in_thread(self, make: Callable[[], Message]) -> asyncio.Future[Message | None]:
        def made() -> Message | None:
            try:
                return make()
            except Damaged as err:
                log.error("version.not_sent", detail=str(err))
                return None

        return asyncio.get_running_loop().run_in_executor(self._threads, made)

    def _by(self, place: int | None) -> list[Link]:
        return self._links if place is None else [self._links[place]]

    def _envelope(self, to: str, message: Message) -> Envelope:
        self._sequence += 1
        return Envelope(
            run_id=self._config.run_id,
            sender=self._sender,
            incarnation=0,
            sequence=self._sequence,
            to=to,
            message=message,
        )
