"""A simulated socket as libzmq has it: no call waits, and what happens is announced once.

Its process is told of something new (:attr:`Core.readable`, which stands for ZeroMQ's descriptor) only where it has
found nothing before; it learns more when it looks.
"""

from __future__ import annotations

import errno
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import zmq

from ops.virtual.zeromq.connection import Dialer, End, Frame, Inlet, Listener
from ops.virtual.zeromq.pipe import Pipe

#: What made the socket, of :mod:`ops.virtual.zeromq.sockets`.
Context = Any
#: Without need, a send looks only this often whether a connection has come or gone.
LOOK_EVERY_S = 0.001
#: A receive looks so often, by messages.
LOOK_EVERY = 100


class Out(Protocol):
    """The receiving end of a socket's messages."""

    @property
    def full(self) -> bool:
        """Whether it takes none."""
        ...

    def put(self, frames: Sequence[Any]) -> None:
        """Takes one."""
        ...


class Core:
    """A ROUTER, DEALER or PAIR for calls that do not wait."""

    def __init__(self, context: Context, kind: int) -> None:
        self.context, self._kind = context, kind
        self.curve: dict[str, Any] = {}
        self.closed = False
        self.readable: Callable[[], object] = lambda: None
        self.dialers: dict[str, Dialer] = {}
        self.ends: dict[int, End] = {}
        self._options: dict[int, Any] = {zmq.LINGER: -1, zmq.RCVHWM: 1000, zmq.SNDHWM: 1000}
        self._bound: list[tuple[str, int]] = []
        self._monitor: Monitor | None = None
        self._commands: deque[Callable[[], object]] = deque()
        self._looked_s, self._received = -1.0, 0
        self._active: deque[Inlet] = deque()  # those in which something may be
        self._rest: deque[Frame] = deque()  # of a message of which frames have been taken
        self._outs: dict[bytes, Out] = {}  # by routing id
        self._next_id = context.network.virtual.bits(31)

    # --- options ---

    @property
    def most_bytes(self) -> int:
        """Most bytes of a frame; 0 for any number."""
        return max(0, self.option(zmq.MAXMSGSIZE, -1))

    @property
    def asks(self) -> bool:
        """Returns whether the socket asks an authenticator."""
        return zmq.ZAP_DOMAIN in self._options

    def option(self, name: int, otherwise: int = 0) -> int:
        """Returns an option that is a number."""
        return int(self._options.get(name, otherwise))

    def set(self, name: int, value: Any) -> None:
        """Sets an option."""
        self._options[name] = value

    def get(self, name: int) -> Any:
        """Returns an option, or what is ready (``EVENTS``: looks)."""
        if name == zmq.EVENTS:
            if self._mute():
                return 0
            self.look()
            return zmq.POLLIN if self._rest or self._has_message() else 0
        return bool(self._rest) if name == zmq.RCVMORE else self._options[name]

    # --- what other threads say ---

    def command(self, call: Callable[[], object]) -> None:
        """Leaves word for the socket, which does it when it looks; the process is woken if nothing else waits."""
        if not self.closed:
            self._commands.append(call)
            if len(self._commands) == 1:
                self.context.process.watch(lambda: bool(self._commands), self.readable)

    def look(self) -> None:
        """Does what it has been told."""
        self._looked_s = self.context.network.virtual.now_s
        while self._commands:
            self._commands.popleft()()

    def activate(self, inlet: Inlet) -> None:
        """Something has come into an empty pipe."""
        self._active.append(inlet)

    def attach(self, end: End) -> None:
        """A connection stands."""
        self._next_id = (self._next_id + 1) % 2**32
        end.routing_id = b"\0" + struct.pack(">I", self._next_id)
        self._outs[end.routing_id] = end

    def detach(self, end: End) -> None:
        """A connection has ended; what has come over it can still be read."""
        self._outs.pop(end.routing_id, None)

    def lose(self, end: End) -> None:
        """A connection is lost: with ``IMMEDIATE`` a client drops what it has not read, once it notices."""
        self.detach(end)
        if end.dialer is not None and self.option(zmq.IMMEDIATE):
            end.inbox.clear()

    def expect(self, route: bytes, out: Out) -> None:
        """Has what is sent to ``route`` go somewhere."""
        self._outs[route] = out

    # --- messages ---

    def _has_message(self) -> bool:
        while self._active:
            if self._active[0].inbox.ready():
                return True
            self._active.popleft()
        return False

    def _next(self) -> bool:
        if not self._has_message():
            return False
        inlet = self._active[0]
        self._active.rotate(-1)
        frames = inlet.inbox.read()
        assert frames is not None
        if self._kind == zmq.ROUTER:
            frames = [Frame(inlet.routing_id), *frames]
        for frame in frames:
            frame.more, frame.said = True, inlet.said
        frames[-1].more = False
        self._rest.extend(frames)
        return True

    def recv(self, flags: int = 0, copy: bool = True) -> Any:
        """Takes one frame; raises zmq.Again if there is none."""
        if self._mute():
            raise zmq.Again
        if not self._rest:
            self._received += 1
            if self._received % LOOK_EVERY == 0:
                self.look()
            if not self._next():
                self.look()
                if not self._next():
                    raise zmq.Again
        frame = self._rest.popleft()
        return bytes(frame) if copy else frame

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[Any]:
        """Takes one message; raises zmq.Again if there is none."""
        frames = [self.recv(flags, copy)]
        while self._rest:
            frames.append(self.recv(flags, copy))
        return frames

    def send_multipart(self, frames: Sequence[Any], flags: int = 0, copy: bool = True) -> None:
        """Hands a message on; raises zmq.Again if nothing takes it, ZMQError for an unknown peer."""
        if self._mute():
            raise zmq.Again
        if self.context.network.virtual.now_s - self._looked_s >= LOOK_EVERY_S:
            self.look()
        if self._kind == zmq.ROUTER:
            out = self._outs.get(bytes(frames[0]))
            if out is None:
                raise zmq.ZMQError(errno.EHOSTUNREACH)
            if out.full:
                raise zmq.Again
            self.context.network.on_send(self.context.process)
            out.put(frames[1:])
            return
        for out in self._outs.values():
            if not out.full:
                self.context.network.on_send(self.context.process)
                out.put(frames)
                return
        raise zmq.Again

    def poll(self, timeout: int = 0, flags: int = zmq.POLLIN) -> int:
        """Returns what is ready now."""
        return int(self.get(zmq.EVENTS)) & flags

    # --- addresses ---

    def bind(self, address: str) -> None:
        """Listens on an address; raises ZMQError if it is taken."""
        if address.startswith("inproc:"):
            self.context.inproc[address] = self
            return
        listeners, host = self.context.network.listeners, self.context.host
        port = int(address.rpartition(":")[2]) or 20_000 + self.context.network.virtual.bits(14)
        if (host, port) in listeners:
            raise zmq.ZMQError(errno.EADDRINUSE)
        listeners[host, port] = Listener(self, port)
        self._bound.append((host, port))
        self._options[zmq.LAST_ENDPOINT] = f"tcp://{host}:{port}".encode()

    def connect(self, address: str) -> None:
        """Begins to connect; to a monitor at once."""
        if address.startswith("inproc:"):
            self.context.inproc[address].connect(self)
        elif not self._mute():
            self.dialers[address] = Dialer(self, address)

    def disconnect(self, address: str) -> None:
        """Ends a connection or the attempts at one; raises ZMQError if ZeroMQ has forgotten it."""
        if self._mute():
            return
        dialer = self.dialers.pop(address, None)
        if dialer is None:
            raise zmq.ZMQError(errno.ENOENT)
        dialer.stop(self.option(zmq.LINGER))

    def close(self, linger: int | None = None) -> None:
        """Closes the socket; what is queued is sent for ``linger`` ms."""
        if not self.closed:
            self.closed = True
            self.unbind()
            linger = self.option(zmq.LINGER) if linger is None else linger
            for dialer in self.dialers.values():
                dialer.stop(linger)
            for end in tuple(self.ends.values()):
                end.finish(linger)

    def unbind(self) -> None:
        """Listens no more."""
        for address in self._bound:
            self.context.network.listeners.pop(address, None)
        self._bound.clear()

    def _mute(self) -> bool:
        """Returns True if its process is dead, and is heard no more; raises ZMQError if it is closed."""
        if not self.context.process.alive:
            return True
        if self.closed:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        return False

    # --- monitor ---

    def monitor(self, address: str, events: int) -> None:
        """Tells of events at an in-process address."""
        self._monitor = self.context.inproc[address] = Monitor(self.context, events)

    def disable_monitor(self) -> None:
        """Tells of nothing more."""
        self._monitor = None

    def tell(self, event: int, value: int, end: End | None = None) -> None:
        """Has the monitor tell of something."""
        if self._monitor is not None and not self.closed:
            address = end.dialer.address if end is not None and end.dialer is not None else ""
            self._monitor.tell(event, value, address)


class Monitor(Inlet):
    """The events of a socket's monitor, which come late and in order."""

    def __init__(self, context: Context, events: int) -> None:
        super().__init__(Pipe(0, lambda _: None))
        self._context, self._events = context, events
        self._reader: Core | None = None
        self._last_s = 0.0

    def connect(self, reader: Core) -> None:
        """Has a PAIR read it."""
        self._reader = reader
        reader.activate(self)

    def tell(self, event: int, value: int, address: str) -> None:
        """Says something."""
        if event & self._events:
            network, process = self._context.network, self._context.process
            late_s = network.virtual.between(process.name, "monitor", *network.monitor_s)
            self._last_s = max(self._last_s, network.virtual.now_s + late_s)
            frames = [Frame(struct.pack("=Hi", event, value)), Frame(address.encode())]
            network.virtual.at(self._last_s, partial(self._arrive, frames))

    def _arrive(self, frames: list[Frame]) -> None:
        if self.inbox.write(frames) and self._reader is not None:
            self._reader.command(partial(self._reader.activate, self))
