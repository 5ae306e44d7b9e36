"""The connections of an island's speaker and its other hosts: ZeroMQ sockets under CURVE. Shell.

The speaker has one ROUTER socket, every other host one DEALER. Each draws its keys anew for every life of the island
(:mod:`islands.hosts.rendezvous`); a process without the speaker's public key cannot say a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio

from broker.process import clocks, logs
from broker.wire.headers import Buffer
from islands.agreement.messages import HostMessage, packed, unpacked

log = logs.get(__name__)

#: At the end, what was said last may take so long to leave.
LINGER_MS = 2000
#: How long a receive waits before it looks again; nothing depends on it.
POLL_S = 0.5
_NAME = "host-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """How the hosts of an island reach its speaker, and prove that they are its hosts.

    Attributes:
        address: Of the speaker's socket.
        speaker_public: Its public key.
        public: The public key that all the others have; ``secret`` goes with it.
        token: What each of them says first.
    """

    address: str
    speaker_public: str
    public: str
    secret: str = field(repr=False)
    token: str = field(repr=False)


def listen(context: zmq.asyncio.Context, interface: str, hosts: int) -> tuple[SpeakerLink, int, str]:
    """Returns the speaker's end, its port, and its public key; closing it terminates the context.

    Raises:
        zmq.ZMQError: Nobody can listen there.
    """
    public, secret = zmq.curve_keypair()
    socket = context.socket(zmq.ROUTER)
    socket.curve_server = True
    socket.curve_secretkey = secret
    socket.set(zmq.ROUTER_HANDOVER, 1)  # a host whose connection broke comes back under its name
    socket.set(zmq.ROUTER_MANDATORY, 1)  # what is said to a host without a connection is not dropped in silence
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, LINGER_MS)
    port = socket.bind_to_random_port(f"tcp://{interface}")
    return SpeakerLink(socket, hosts), port, public.decode()


class SpeakerLink:
    """The speaker's end.

    Args:
        socket: That listens.
        hosts: How many there are, the speaker among them.

    Attributes:
        unreachable_s: Host -> since when it has had no connection, after it had one.
    """

    def __init__(self, socket: zmq.asyncio.Socket, hosts: int) -> None:
        self._socket, self._hosts = socket, hosts
        self.unreachable_s: dict[int, float] = {}

    def close(self) -> None:
        """Closes the socket; what was said is sent within the linger time."""
        self._socket.close()
        self._socket.context.term()

    async def send(self, host: int, message: HostMessage, buffers: Sequence[Buffer] = ()) -> None:
        """Says something to one host; takes note of it if that has no connection."""
        frames = [f"{_NAME}{host}".encode(), *packed(message, buffers)]
        try:
            await self._socket.send_multipart(frames, copy=False)
        except zmq.ZMQError as err:
            if err.errno != zmq.EHOSTUNREACH:
                raise
            self.unreachable_s.setdefault(host, clocks.monotonic())
        else:
            self.unreachable_s.pop(host, None)

    async def recv(self) -> tuple[int, Any, tuple[memoryview, ...]] | None:
        """Returns the next message with its host and its buffers; None after a while without one."""
        if not await self._socket.poll(1000 * POLL_S):
            return None
        name, *frames = await self._socket.recv_multipart(copy=False)
        said = name.bytes.decode(errors="replace").removeprefix(_NAME)
        if not (said.isdecimal() and 0 < int(said) < self._hosts):
            log.warning("hosts.stranger", name=said[:40])
            return None
        message, buffers = unpacked([frame.buffer for frame in frames])
        return int(said), message, buffers


class HostLink:
    """Another host's end."""

    def __init__(self, context: Callable[[], zmq.asyncio.Context], contact: Contact, host: int) -> None:
        self._make_context, self._contact, self._host = context, contact, host
        self._socket: zmq.asyncio.Socket

    async def __aenter__(self) -> Self:
        """Connects."""
        self._context = self._make_context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.ROUTING_ID, f"{_NAME}{self._host}".encode())
        self._socket.curve_serverkey = self._contact.speaker_public.encode()
        self._socket.curve_publickey = self._contact.public.encode()
        self._socket.curve_secretkey = self._contact.secret.encode()
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.connect(self._contact.address)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the socket; what was said is sent within the linger time."""
        self._socket.close()
        self._context.term()

    async def send(self, message: HostMessage, buffers: Sequence[Buffer] = ()) -> None:
        """Says something to the speaker."""
        await self._socket.send_multipart(packed(message, buffers), copy=False)

    async def recv(self) -> tuple[Any, tuple[memoryview, ...]] | None:
        """Returns the next message with its buffers; None after a while without one."""
        if not await self._socket.poll(1000 * POLL_S):
            return None
        frames = await self._socket.recv_multipart(copy=False)
        return unpacked([frame.buffer for frame in frames])
