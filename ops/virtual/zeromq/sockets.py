"""Simulated sockets with the interface of pyzmq's, as far as the broker and its clients use it.

:class:`Socket` is pyzmq's for asyncio around a :class:`~ops.virtual.zeromq.core.Core`, and waits by the same rules:
ZeroMQ announces once, so whoever has been handed a message looks whether there is another one for those that wait.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import zmq
from zmq.utils import z85

from ops.virtual.loop import Process
from ops.virtual.zeromq.connection import CURVE, NULL, Frame, Inlet
from ops.virtual.zeromq.core import Core
from ops.virtual.zeromq.network import Network
from ops.virtual.zeromq.pipe import Pipe

#: The in-process address where ZeroMQ asks whom to let in.
ZAP = "inproc://zeromq.zap.01"


class Socket:
    """A socket of asyncio's: receives and polls are futures of the running process."""

    def __init__(self, context: Context, kind: int) -> None:
        self.context, self.core = context, (core := Core(context, kind))
        core.readable = self._readable
        self._waiting: deque[tuple[asyncio.Future[Any], Callable[[], Any]]] = deque()
        self.set, self.get, self.bind, self.connect = core.set, core.get, core.bind, core.connect
        self.disconnect, self.monitor, self.disable_monitor = core.disconnect, core.monitor, core.disable_monitor

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("curve_"):
            self.core.curve[name.removeprefix("curve_")] = value
        elif name in ("linger", "rcvhwm"):
            self.core.set(getattr(zmq, name.upper()), value)
        else:
            super().__setattr__(name, value)

    def set_hwm(self, messages: int) -> None:
        """Sets both high-water marks."""
        self.core.set(zmq.RCVHWM, messages)
        self.core.set(zmq.SNDHWM, messages)

    def get_monitor_socket(self, events: int) -> Socket:
        """Returns a socket that tells of events here."""
        address = self.context.new_address()
        self.monitor(address, events)
        socket = self.context.socket(zmq.PAIR)
        socket.connect(address)
        return socket

    def close(self, linger: int | None = None) -> None:
        """Closes it; what waits is cancelled."""
        for future, _ in self._waiting:
            future.cancel()
        self.core.close(linger)

    def send_multipart(self, frames: Sequence[Any], flags: int = 0, copy: bool = True) -> asyncio.Future[None]:
        """Hands a message on at once, or fails at once, as with ``NOBLOCK``."""
        done = self._done(partial(self.core.send_multipart, frames, flags, copy))
        if self._waiting:
            self._look_again()
        return done

    def recv(self, flags: int = 0, copy: bool = True) -> asyncio.Future[Any]:
        """Takes a frame."""
        return self._take(flags, partial(self.core.recv, flags, copy))

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> asyncio.Future[list[Any]]:
        """Takes a message."""
        return self._take(flags, partial(self.core.recv_multipart, flags, copy))

    def poll(self, timeout: int, flags: int = zmq.POLLIN) -> asyncio.Future[Any]:
        """Waits until there is something to receive, for ``timeout`` ms."""
        poller = self.context.poller()
        poller.register(self, flags)
        return poller.poll(timeout)

    def _done(self, call: Callable[[], Any]) -> asyncio.Future[Any]:
        future = self.context.process.create_future()
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)
        return future

    def _take(self, flags: int, call: Callable[[], Any]) -> asyncio.Future[Any]:
        if flags & zmq.NOBLOCK:
            return self._done(call)
        future = self.context.process.create_future()
        self.wait(future, call)
        return future

    # --- pyzmq's way of waiting: one announcement wakes one, and then it is looked whether there is more ---

    def wait(self, future: asyncio.Future[Any], call: Callable[[], Any]) -> None:
        """Has a future wait for its turn, and then be what ``call`` returns."""
        self._waiting.append((future, call))
        if self.get(zmq.EVENTS):
            self._hand_over()
        self._look_again()

    def _hand_over(self) -> None:
        while self._waiting:
            future, call = self._waiting.popleft()
            if not future.done():
                try:
                    future.set_result(call())
                except Exception as error:  # noqa: BLE001 - it is the caller's
                    future.set_exception(error)
                return

    def _readable(self) -> None:
        if not self.core.closed and self.get(zmq.EVENTS):
            self._hand_over()
            self._look_again()

    def _look_again(self) -> None:
        while self._waiting and self._waiting[0][0].done():
            self._waiting.popleft()
        if self._waiting and self.get(zmq.EVENTS):
            self.context.process.call_soon(self._readable)


class Poller:
    """Waits for several sockets."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process
        self._sockets: list[Socket] = []

    def register(self, socket: Socket, flags: int = zmq.POLLIN) -> None:
        """Waits for this one, too."""
        self._sockets.append(socket)

    def poll(self, timeout: int) -> asyncio.Future[list[tuple[Socket, int]]]:
        """Waits until one has something, for ``timeout`` ms; returns those that do."""
        future: asyncio.Future[Any] = self._process.create_future()
        if timeout == 0:
            future.set_result(self._ready())
            return future
        watcher: asyncio.Future[Any] = self._process.create_future()
        for socket in self._sockets:
            socket.wait(watcher, lambda: None)

        def seen(_: object) -> None:
            if not future.done():
                if watcher.cancelled():
                    future.cancel()
                else:
                    future.set_result(self._ready())

        def over() -> None:
            if not watcher.done():
                watcher.set_result(None)

        watcher.add_done_callback(seen)
        wait_s = timeout / 1000
        if self._network.idle_polls and self._network.virtual.draw("polls", "idle") < self._network.idle_polls:
            wait_s *= self._network.virtual.draw("polls", "wait") ** 3
        timer = self._process.call_later(wait_s, over)

        def finished(_: object) -> None:
            timer.cancel()
            watcher.cancel()

        future.add_done_callback(finished)
        return future

    def _ready(self) -> list[tuple[Socket, int]]:
        return [(socket, zmq.POLLIN) for socket in self._sockets if not socket.core.closed and socket.get(zmq.EVENTS)]


class Context:
    """Makes the sockets of a simulated process on a host of its own."""

    def __init__(self, network: Network, process: Process, host: str) -> None:
        self.network, self.process, self.host = network, process, host
        self.inproc: dict[str, Any] = {}
        self._sockets: list[Socket] = []
        self._asked = 0
        process.ended.append(self._died)

    def socket(self, kind: int) -> Socket:
        """Returns a new socket."""
        made = Socket(self, kind)
        self._sockets.append(made)
        return made

    def new_address(self) -> str:
        """Returns an in-process address that nothing has."""
        return f"inproc://{len(self._sockets)}"

    def poller(self) -> Poller:
        """Returns what waits for several sockets."""
        return Poller(self.network, self.process)

    def direct(self, socket: Socket) -> Core:
        """Returns a socket for calls that do not wait."""
        return socket.core

    def term(self) -> None:
        """Ends it: libzmq would wait here for a socket that is open."""
        closed = all(each.core.closed for each in self._sockets)
        assert closed or not self.process.alive, "a socket is still open: term would wait for ever"

    def ask_zap(self, key: str | bytes | None, answer: Callable[[bytes, bytes], None]) -> None:
        """Asks this process whether a connection is welcome; ``answer`` takes status and user id."""
        handler: Core = self.inproc[ZAP]
        self._asked += 1
        route = b"\0" + struct.pack(">I", self._asked)
        mechanism, credentials = NULL, []
        if key is not None:
            mechanism, credentials = CURVE, [z85.decode(key)]
        words = [b"", b"1.0", b"1", b"atoll", b"", b"", mechanism, *credentials]
        question = Inlet(Pipe(0, lambda _: None))
        question.routing_id = route
        question.inbox.write([Frame(word) for word in words])
        handler.command(partial(handler.expect, route, _Answer(answer)))
        handler.command(partial(handler.activate, question))

    def _died(self) -> None:
        for each in self._sockets:
            each.core.closed = True
            each.core.unbind()
            for dialer in each.core.dialers.values():
                dialer.stop(0)
            for end in tuple(each.core.ends.values()):
                end.hang_up()


class _Answer:
    """Where the answer of a ZAP handler goes."""

    full = False

    def __init__(self, answer: Callable[[bytes, bytes], None]) -> None:
        self._answer = answer

    def put(self, frames: Sequence[Any]) -> None:
        """Takes it in: empty, version, request, status, text, user id, metadata."""
        self._answer(bytes(frames[3]), bytes(frames[5]))
