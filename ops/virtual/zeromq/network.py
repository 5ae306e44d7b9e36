"""The simulated network: links between hosts, streams of bytes over them, ports, and faults."""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from broker.transport import descriptors
from ops.virtual.loop import Process, VirtualTime

#: One end of a connection, and a bound port, of :mod:`ops.virtual.zeromq.connection`.
End = Any
Listener = Any
#: Where the numbers of simulated descriptors begin: no process has so many real ones.
FIRST_DESCRIPTOR = 1 << 20
#: Where ``struct tcp_info`` has the bytes received, and its length.
_RECEIVED_AT, _INFO_BYTES = 128, 136
#: Less than this is sent between two packets of what other connections have on the link: TCP shares it fairly.
SMALL_BYTES = 4096
#: After a cut TCP repeats itself by and by: what waited comes this much later, at most.
REPEATED_WITHIN_S = 0.5


@dataclass(slots=True)
class Link:
    """One direction between two hosts.

    Attributes:
        delay_s: Least and greatest time on the way; each message draws its own.
        bytes_per_s: What it carries, for all connections together; 0 for any amount.
        window_bytes: Under way at a time, for each connection: the buffers of both kernels.
        cuts: Faults that let nothing pass at the moment.
        cut_s: Since when.
    """

    delay_s: tuple[float, float] = (0.0005, 0.005)
    bytes_per_s: float = 0.0
    window_bytes: int = 1 << 20
    cuts: int = 0
    cut_s: float = 0.0
    free_at_s: float = 0.0
    waiting: list[Stream] = field(default_factory=list)


class Stream:
    """One direction of a connection: what is sent arrives in order, or not at all."""

    def __init__(self, network: Network, source: str, target: str) -> None:
        self._virtual, self.link = network.virtual, network.link(source, target)
        self._name = f"{source} to {target}"
        self._arrives_s = 0.0  # what was sent last
        self._forgotten_s = float("inf")  # what has not left by then never does
        self._waiting: deque[Callable[[], None]] = deque()  # for the link

    def send(self, nbytes: int, arrive: Callable[[], None]) -> None:
        """Sends bytes; ``arrive`` is called where they go."""
        link, now_s = self.link, self._virtual.now_s
        left_s = now_s
        if link.bytes_per_s:
            took_s = nbytes / link.bytes_per_s
            link.free_at_s = max(now_s, link.free_at_s) + took_s
            left_s = link.free_at_s if nbytes >= SMALL_BYTES else now_s + took_s
        delay_s = self._virtual.between(self._name, "delay", *link.delay_s)
        self._arrives_s = max(self._arrives_s, left_s + delay_s)
        self._virtual.at(self._arrives_s, partial(self._arrive, left_s, arrive))

    def forget_unsent(self) -> None:
        """Drops what has not left yet."""
        self._forgotten_s = self._virtual.now_s

    def _arrive(self, left_s: float, arrive: Callable[[], None]) -> None:
        if left_s > self._forgotten_s:
            return
        if self.link.cuts or self._waiting:
            if not self._waiting:
                self.link.waiting.append(self)
            self._waiting.append(arrive)
        else:
            arrive()

    def healed(self) -> None:
        """The link carries again: what has waited comes, a while later."""
        self._virtual.after(self._virtual.between(self._name, "repeat", 0.0, REPEATED_WITHIN_S), self._go_on)

    def _go_on(self) -> None:
        if self.link.cuts:
            self.link.waiting.append(self)
            return
        while self._waiting:
            self._waiting.popleft()()


class Network:
    """Hosts, each with one process, and what connects them.

    Attributes:
        monitor_s: How much later a socket's monitor tells of something, at least and at most.
        io_s: How long the thread that sends takes to wake, when something is put into an empty queue.
        idle_polls: The share of polls that end early, and find nothing.
        on_send: Told of each message that a process is about to send; may raise what ends the process.
    """

    def __init__(self, virtual: VirtualTime) -> None:
        self.virtual = virtual
        self.monitor_s = (0.0, 0.002)
        self.io_s = (1e-5, 5e-5)
        self.idle_polls = 0.0
        self.on_send: Callable[[Process], None] = lambda _: None
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.connections: dict[int, tuple[End, End]] = {}  # that have been accepted, by the client's descriptor
        self._links: dict[tuple[str, str], Link] = {}
        self._descriptors: dict[int, End] = {}
        self._next = FIRST_DESCRIPTOR

    def __enter__(self) -> Network:
        self._before = descriptors.use(self._copied)
        return self

    def __exit__(self, *_: object) -> None:
        descriptors.use(self._before)

    def link(self, source: str, target: str) -> Link:
        """Returns one direction between two hosts."""
        return self._links.setdefault((source, target), Link())

    # --- faults ---

    def cut(self, source: str, target: str, for_s: float) -> None:
        """Lets nothing pass in one direction for a while; what is sent waits, as TCP has it."""
        link = self.link(source, target)
        link.cuts += 1
        if link.cuts == 1:
            link.cut_s = self.virtual.now_s
            for ends in tuple(self.connections.values()):
                for end in ends:
                    if end.host in (source, target) and end.peer_host in (source, target):
                        end.hears_nothing()
        self.virtual.after(for_s, partial(self._heal, link))

    def _heal(self, link: Link) -> None:
        link.cuts -= 1
        if not link.cuts:
            waiting, link.waiting = link.waiting, []
            for stream in waiting:
                stream.healed()

    def freeze(self, host: str, process: Process, for_s: float) -> None:
        """Stops a process, and its threads with it: nobody hears from it."""
        process.freeze(for_s)
        for other in sorted({each for pair in self._links for each in pair} - {host}):
            self.cut(host, other, for_s)
            self.cut(other, host, for_s)

    def break_all(self, one: str, other: str) -> None:
        """Ends the connections between two hosts: both sides notice, each when it is told."""
        for ends in tuple(self.connections.values()):
            if {ends[0].host, ends[1].host} == {one, other}:
                for end in ends:
                    end.lose()

    def deafen(self, host: str, port: int) -> None:
        """Lets the connections of a host to a port stand, and carry nothing any more, as damaged bytes do."""
        for ends in tuple(self.connections.values()):
            if ends[0].host == host and ends[1].port == port:
                for end in ends:
                    end.deaf = True

    # --- descriptors ---

    def descriptor(self, end: End) -> int:
        """Returns a number for one end of a connection."""
        self._next += 1
        self._descriptors[self._next] = end
        return self._next

    def close(self, fd: int) -> None:
        """The number stands for nothing any more."""
        self._descriptors.pop(fd, None)
        self.connections.pop(fd, None)

    def _copied(self, fd: int) -> Any:
        if fd not in self._descriptors:
            raise OSError(9, "closed")
        return _Copy(self._descriptors[fd])


class _Copy:
    """Stands for the kernel's socket that :mod:`broker.transport.descriptors` looks at."""

    family = socket.AF_INET

    def __init__(self, end: End) -> None:
        self._end = end

    def __enter__(self) -> _Copy:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        """Closes the copy alone."""

    def fileno(self) -> int:
        """Returns the descriptor."""
        return int(self._end.fd)

    def getsockname(self) -> tuple[str, int]:
        """Returns the address of this end."""
        return self._end.host, self._end.port

    def getpeername(self) -> tuple[str, int]:
        """Returns the address of the other end."""
        return self._end.peer_host, self._end.peer.port

    def getsockopt(self, level: int, option: int, length: int) -> bytes:
        """Returns ``tcp_info``: of it the bytes received."""
        return bytes(_RECEIVED_AT) + struct.pack("=Q", self._end.received_bytes)

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        """Drops what has not been sent (``SO_LINGER`` of 0: the connection is closed next)."""
        self._end.stream.forget_unsent()

    def shutdown(self, how: int) -> None:
        """Ends the connection."""
        self._end.lose()
