"""The broker daemon: two ROUTER sockets around a :class:`~broker.routing.relay.Relay`.

Shell. Each message becomes an event (:mod:`broker.gateway.turns`), is handed to the relay, and what that answers is
done at once, without waiting: a send that would block goes back to the relay as an event. So nothing that a peer does,
and nothing that Redis does (:mod:`broker.registry.reporter` and :mod:`broker.observing.desk` have tasks of their own),
holds up anybody else.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, assert_never

import zmq
import zmq.asyncio

from broker.base import settings, sources
from broker.base.errors import ConfigError
from broker.chunks.receiving import SPARE_BYTES, Refused
from broker.clients.connections import LEAST_FILES_FOR_UNIX, Connections, most_unread_bytes
from broker.clients.flows import Flows, Put
from broker.gateway.config import DEFAULT_REDIS_URL, BrokerConfig
from broker.gateway.gate import LOOK_EVERY_S, MORE_FILES, Gate, GateEvent, draw_afresh
from broker.gateway.listening import (
    PORT_ATTEMPTS,
    cannot_listen,
    kernel_name,
    listen_on_unix,
    resolved,
    unix_paths,
)
from broker.gateway.turns import Intake, Outbox, Taken, event_of, refused
from broker.metrics.serving import served
from broker.observing.desk import Desk
from broker.process import clocks, limits, logs
from broker.registry.registry import Registry
from broker.registry.reporter import Reporter, families_of
from broker.routing.events import (
    AllowListChanged,
    Blocked,
    LookUp,
    Note,
    RelayEvent,
    Report,
    Send,
    Tick,
    Unreachable,
)
from broker.routing.relay import Relay
from broker.transport.descriptors import Name
from broker.transport.sockets import IN_A_ROW, Context, configure_socket, failure_of
from broker.wire.frames import encode
from broker.wire.headers import Buffer, Limits, partial_room_bytes, room_bytes
from broker.wire.messages import Channel

log = logs.get(__name__)

#: What is still queued for islands when the broker ends is sent for so long; all of it is repeated by its senders.
LINGER_MS = 200
#: ZeroMQ allocates frames in its threads, they are freed elsewhere, and pools by thread were not used again.
POOLS = 1
#: How often it is looked whether much memory that was freed has stayed: it does beneath what is still in use.
RETURN_EVERY_S = 10.0
#: A bulk connection that took nothing is tried again after this.
TRY_AGAIN_S = 0.005
#: The last report to Redis may take so long.
LAST_REPORT_S = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """The addresses of a broker: for clients, its bulk port, and, if there is one, for this machine."""

    address: str
    bulk_port: int
    ipc: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``atoll broker``."""
    sources.add_config_flag(parser)
    sources.add_flags(parser, BrokerConfig, defaults={"run_id": None})


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or SIGINT, then returns 0.

    Raises:
        ConfigError: A setting cannot work, such as a port that is taken.
    """
    logs.configure("broker")
    config = settings.build(BrokerConfig, sources.of_a_run(BrokerConfig, args, "broker"))
    limits.keep_freed(SPARE_BYTES, arenas=POOLS)
    limits.collect_seldom()
    asyncio.run(_until_signalled(config))
    return 0


async def _return_spare() -> None:
    """Gives back what a flood has left of memory, until cancelled."""
    while True:
        await asyncio.sleep(RETURN_EVERY_S)
        limits.return_spare(2 * SPARE_BYTES)


async def _until_signalled(config: BrokerConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(config, stop=stop)


async def serve(
    config: BrokerConfig,
    *,
    stop: asyncio.Event,
    ready: Callable[[Listening], None] = lambda _: None,
    context: Context | None = None,
    registries: tuple[Registry, Registry] | None = None,
) -> None:
    """Serves until about a second after ``stop`` is set; calls ``ready`` once both ports are open.

    Args:
        config: Of the broker.
        stop: Ends it.
        ready: Told of its addresses.
        context: Of its sockets; None: one of its own.
        registries: For reports, and for observers' questions, which may come at the same time; None: those of
            ``redis_url``.

    Raises:
        ConfigError: An address cannot be listened on, or ``redis_url`` is none.
    """
    limit = limits.raise_open_files()
    if config.ipc and limit < LEAST_FILES_FOR_UNIX:
        cure = f"needs {LEAST_FILES_FOR_UNIX:,} open files, and may have {limit:,}: {MORE_FILES}, or leave --ipc out"
        raise ConfigError("ipc", config.ipc, cure)
    url = config.redis_url or DEFAULT_REDIS_URL
    registry, shown = registries or (Registry(url, config.run_id), Registry(url, config.run_id))
    context = context or Context(io_threads=2)
    draw_afresh()
    broker = None
    try:
        broker = _Broker(config, registry, shown, context)
        listening = broker.bind()
        broker.gate.share_files(limit, limits.open_files(), unix=bool(config.ipc))
        log.info(
            "broker.ready",
            run=config.run_id,
            address=listening.address,
            bulk=listening.bulk_port,
            **({"ipc": listening.ipc} if listening.ipc else {}),
            redis=registry.address,
            keys=config.key is not None,
        )
        async with served(config.metrics_host, config.metrics_port, broker.reporter.snapshot, families_of):
            ready(listening)
            await broker.run(stop)
    finally:
        if broker is not None:
            broker.close()
        await registry.aclose()
        await shown.aclose()
        context.term()
    log.info("broker.ended", run=config.run_id)


class _Broker:
    """Sockets and the relay between them."""

    def __init__(self, config: BrokerConfig, registry: Registry, shown: Registry, context: Context) -> None:
        self._config, self._context = config, context
        self._clock = clocks.monotonic
        memory = limits.memory_bytes()
        self._relay = Relay(config.relay(memory))
        self.reporter = Reporter(
            registry,
            self._relay,
            name=config.name,
            liveness=config.liveness,
            interval_s=config.report_interval_s,
            clock=self._clock,
        )
        self._desk = Desk(shown, self._handle, clock=self._clock)
        self._limits: dict[Channel, Limits] = {
            Channel.CONTROL: config.control_limits(),
            Channel.BULK: config.limits(memory),
        }
        self._sockets: dict[Channel, zmq.asyncio.Socket] = {}
        self._outbox = Outbox()
        self._waiting_for: set[bytes] = set()  # bulk connections that are tried again in a moment
        self._woken = asyncio.Event()  # the relay's next deadline may have changed
        self._waiting_until_s: float | None = None
        self._flows = Flows(self._limits[Channel.BULK], partial_room_bytes(memory))
        self.gate = Gate(context, config.key, self._handle, self._ended)

    # --- sockets ---

    def bind(self) -> Listening:
        """Opens both ports, and the Unix sockets of both channels if there are to be any.

        Raises:
            ConfigError: One of them is taken, or the host is no address of this machine.
        """
        host, port = resolved(self._config.host), self._config.port
        for attempt in range(PORT_ATTEMPTS):
            try:
                control = self._open(Channel.CONTROL, host, port)
                control_port = int(bytes(control.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").rpartition(b":")[2])
                self._open(Channel.BULK, host, control_port + 1)
            except zmq.ZMQError as err:
                self._close_ports()
                # Port 0 gave a control port whose neighbour is taken, or that has none: try another.
                if port != 0 or attempt == PORT_ATTEMPTS - 1 or err.errno not in (errno.EADDRINUSE, errno.EINVAL):
                    raise cannot_listen(self._config, err) from err
            else:
                self.reporter.name = self._config.name or f"{socket.gethostname()}:{control_port}"
                paths = unix_paths(self._config.ipc)
                for channel, path in paths.items():
                    listen_on_unix(self._sockets[channel], path)
                for channel, number in ((Channel.CONTROL, control_port), (Channel.BULK, control_port + 1)):
                    own = {kernel_name(paths[channel])} if paths else set()
                    self._watch(channel, frozenset({number} | own))
                return Listening(
                    address=f"tcp://{host}:{control_port}",
                    bulk_port=control_port + 1,
                    ipc=f"ipc://{self._config.ipc}" if paths else "",
                )
        raise AssertionError("the last attempt returns or raises")

    def _open(self, channel: Channel, host: str, port: int) -> zmq.asyncio.Socket:
        sock = self._sockets[channel] = self._context.socket(zmq.ROUTER)
        configure_socket(sock, channel, self._limits[channel])
        # Clients ping, and say for how long a silent one is to be believed in. A ping of our own may go to a connection
        # that has ended while its input waited, upon which libzmq 4.3.5 ends the process (its issues 4364 and 4841).
        sock.set(zmq.HEARTBEAT_IVL, 0)
        sock.set(zmq.ROUTER_MANDATORY, 1)  # a send that nobody takes must not vanish silently
        sock.set(zmq.IPV6, int(":" in host))  # the name of an IPv4 address must stay one for bind
        self.gate.guard(sock)
        sock.bind(f"tcp://{host}:{port}")
        return sock

    def _watch(self, channel: Channel, names: frozenset[Name]) -> None:
        sock = self._sockets[channel]
        most_bytes = most_unread_bytes(channel, int(sock.get(zmq.MAXMSGSIZE)))
        connections = Connections(most_bytes=most_bytes, total_bytes=room_bytes(limits.memory_bytes()))
        self.gate.watch(channel, sock, names, connections)

    def close(self) -> None:
        """Closes the sockets; what is queued in them is sent for ``LINGER_MS`` at most."""
        self.gate.close()
        self._close_ports()

    def _close_ports(self) -> None:
        for sock in self._sockets.values():
            sock.close(linger=LINGER_MS)
        self._sockets.clear()

    # --- tasks ---

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until ``stop`` is set; if one of the tasks fails, all end and its error is raised."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._receive(Channel.CONTROL), name="control"),
                group.create_task(self._receive(Channel.BULK), name="bulk"),
                group.create_task(self._outbox.run(self._send_kept), name="bulk out"),
                group.create_task(self._keep_time(), name="time"),
                group.create_task(self.reporter.run(), name="reporter"),
                group.create_task(self._desk.run(), name="observers"),
                group.create_task(self.gate.answer(), name="keys"),
                group.create_task(self.gate.listen(Channel.CONTROL), name="control connections"),
                group.create_task(self.gate.listen(Channel.BULK), name="bulk connections"),
                group.create_task(self.gate.look_around(), name="gate"),
                group.create_task(self._end_stalled(), name="stalled connections"),
                group.create_task(_return_spare(), name="memory"),
            ]
            await stop.wait()
            for task in tasks:
                task.cancel()
        try:
            async with asyncio.timeout(LAST_REPORT_S):
                await self.reporter.write()  # so that status knows who left last
        except TimeoutError:
            log.warning("redis.lost", detail=f"no answer to the last report within {LAST_REPORT_S} s")

    async def _receive(self, channel: Channel) -> None:
        limits = self._limits[channel]
        intake = Intake(
            self._context,
            self._sockets[channel],
            most_frames=limits.max_buffers + 2,  # a header, and the head of a chunk
            in_a_row=IN_A_ROW[channel],
            flooded=lambda fd: self.gate.end(channel, fd, "a message of far too many frames"),
            drained=self.gate.connections(channel).drained,
        )
        while True:
            taken = await intake.take()
            key = self.gate.key_of(channel, taken)
            if key is not None:
                for whole in self._whole(channel, taken, key):
                    if isinstance(whole, Refused):
                        self._handle(refused(channel, taken, whole, limits, key))
                    else:
                        self._handle(await event_of(channel, whole, limits, key))

    def _whole(self, channel: Channel, taken: Taken, key: str) -> list[Taken | Refused]:
        """Returns the messages that are whole now, and what of them is refused."""
        if channel is Channel.CONTROL or taken.surplus or not taken.frames:
            return [taken]
        found = self._flows.take(taken.peer, taken.fd, taken.frames, self._clock(), key)
        peer = self._flows.first_of(taken.peer)
        if found != [taken.frames]:
            self._go_on(peer)
        return [each if isinstance(each, Refused) else replace(taken, peer=peer, frames=each) for each in found]

    async def _keep_time(self) -> None:
        while True:
            deadline_s = self._waiting_until_s = self._relay.next_deadline_s()
            self._woken.clear()
            try:
                async with asyncio.timeout(None if deadline_s is None else max(0.0, deadline_s - self._clock())):
                    await self._woken.wait()
            except TimeoutError:
                self._handle(Tick())

    # --- what the relay wants done ---

    def _handle(self, event: RelayEvent | GateEvent) -> None:
        """Hands an event to the relay, carries out what it answers, and hands back what could not be sent."""
        now_s, bulk = self._clock(), 0
        actions = deque(self._relay.handle(event, now_s))
        if isinstance(event, AllowListChanged):
            self.reporter.membership.allow(self._relay.anyone_may_be)
        while actions:
            match actions.popleft():
                case Send() as send:
                    bulk += send.channel is Channel.BULK
                    if send.channel is Channel.BULK and self._outbox.keeps(send, bulk):
                        continue
                    for told in self._send(send, now_s):
                        actions.extend(self._relay.handle(told, now_s))
                case Report(envelope=envelope):
                    self.reporter.membership.observe(envelope, now_s)
                case Note(event=name, fields=fields, warning=warning):
                    (log.warning if warning else log.info)(name, **fields)
                case LookUp() as question:
                    self._desk.ask(question)
                case other:
                    assert_never(other)
        deadline_s = self._relay.next_deadline_s()
        if deadline_s is not None and (self._waiting_until_s is None or deadline_s < self._waiting_until_s):
            self._woken.set()

    def _send(self, send: Send, now_s: float) -> Sequence[RelayEvent]:
        if send.channel is Channel.BULK:
            failed = self._flows.send(send)
            return self._carry(send.peer, now_s) if failed is None else (failed,)
        outcome = self._hand_over(Channel.CONTROL, send.peer, encode(send.envelope))
        if outcome is Put.TAKEN:
            return ()
        failure = Blocked if outcome is Put.FULL else Unreachable
        return (failure(channel=send.channel, peer=send.peer, envelope=send.envelope, size_bytes=send.size_bytes),)

    def _send_kept(self, send: Send) -> None:
        for told in self._send(send, self._clock()):
            self._handle(told)

    def _hand_over(self, channel: Channel, peer: bytes, frames: Sequence[Buffer]) -> Put:
        # With NOBLOCK, and nobody polling for room, pyzmq has tried before it returns: the future is done.
        sent: Any = self._sockets[channel].send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        error = failure_of(sent)
        if error is None:
            return Put.TAKEN
        if isinstance(error, zmq.Again):
            return Put.FULL
        if isinstance(error, zmq.ZMQError) and error.errno == errno.EHOSTUNREACH:
            return Put.GONE
        raise error

    def _go_on(self, first: bytes) -> None:
        """Sends what may go of a flow, by its first connection; tells the relay what has become of it."""
        for event in self._carry(first, self._clock()):
            self._handle(event)

    def _carry(self, first: bytes, now_s: float) -> Sequence[RelayEvent]:
        """Hands over what may go of a flow; returns what the relay is to hear."""
        for route, step in self._flows.steps(first):
            self._flows.sent(first, step, self._hand_over(Channel.BULK, route, step.frames), now_s)
        if first in self._flows.full and first not in self._waiting_for:
            self._waiting_for.add(first)
            asyncio.get_running_loop().call_later(TRY_AGAIN_S, self._retry, first)
        return self._flows.outcome(first)

    def _retry(self, first: bytes) -> None:
        self._waiting_for.discard(first)
        if self._sockets:
            self._go_on(first)

    async def _end_stalled(self) -> None:
        suspected: set[int] = set()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            stalled = set(self._flows.stalled(self._clock()))
            for fd in stalled & suspected:  # where this process was held up, what waits is read between two looks
                self.gate.end(Channel.BULK, fd, "it takes no note of what it is sent")
            suspected = stalled

    def _ended(self, channel: Channel, fd: int) -> None:
        """A connection has ended."""
        if channel is Channel.BULK:
            for event in self._flows.ended(fd, self._clock()):
                self._handle(event)
