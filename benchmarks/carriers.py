"""The bytes of a round by themselves: the same way over as many processes, and nothing else.

    islands (M connections, this process) -> relay process -> sink process -> relay process -> islands

Every island sends ``up_bytes``; when all of them have arrived at the sink, ``down_bytes`` travel back and the relay
gives them to every island. No headers, checksums, merging or disk. Two carriers: raw TCP with blocking sockets and a
thread per connection, and ZeroMQ with one message of several frames, as the broker forwards it, without copies.

``python -m benchmarks.carriers relay|sink ..`` is what the two processes run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

import zmq

from benchmarks.fleet import ROOT_ENVIRONMENT, group, module_command
from broker.wire.errors import Unavailable
from ops.processes.child_process import ProcessSpec
from ops.processes.cluster import free_ports

CHUNK_BYTES = 1 << 20
CONNECT_WITHIN_S = 20.0
GIVE_UP_MS = 120_000
HIGH_WATER_MARK = 4


class Kind(StrEnum):
    """What carries the bytes."""

    TCP = "tcp"
    ZEROMQ = "zeromq"


class Carrier(ABC):
    """The islands' side of one carrier; :func:`carrier` makes one."""

    @abstractmethod
    def round(self) -> float:
        """Carries one round and returns its seconds, from the first byte sent to the last one received."""

    @abstractmethod
    def close(self) -> None:
        """Closes every connection."""


@contextmanager
def carrier(
    kind: Kind, directory: Path, *, islands: int, up_bytes: int, down_bytes: int, frames: int
) -> Iterator[Carrier]:
    """Starts relay and sink, connects, and yields what carries rounds.

    Args:
        kind: TCP or ZeroMQ.
        directory: For logs.
        islands: M.
        up_bytes: Of each island, per round.
        down_bytes: To each island, per round.
        frames: Of a ZeroMQ message: tensors of a fragment.

    Raises:
        Unavailable: The processes did not start.
    """
    port = free_ports(2)
    sizes = [
        *("--port", str(port)),
        *("--islands", str(islands)),
        *("--up", str(up_bytes)),
        *("--down", str(down_bytes)),
    ]
    specs = [
        ProcessSpec(
            name=f"{kind}-{role}",
            command=module_command("benchmarks.carriers", role, "--kind", kind, *sizes, "--frames", str(frames)),
            environment=ROOT_ENVIRONMENT,
            ends_by_itself=True,
        )
        for role in ("relay", "sink")
    ]
    with group(directory, specs):
        ours: Carrier
        if kind is Kind.TCP:
            ours = _TcpCarrier(port, islands, up_bytes, down_bytes)
        else:
            ours = _ZeromqCarrier(port, islands, up_bytes, frames)
        try:
            yield ours
        finally:
            ours.close()


# --- the islands' side --------------------------------------------------------------------------------------------


class _TcpCarrier(Carrier):
    def __init__(self, port: int, islands: int, up_bytes: int, down_bytes: int) -> None:
        self._connections = [_connect(port) for _ in range(islands)]
        self._threads = ThreadPoolExecutor(islands)
        self._payload = memoryview(os.urandom(up_bytes))
        self._down_bytes = down_bytes

    def round(self) -> float:
        began_s = time.perf_counter()
        for _ in self._threads.map(self._one, self._connections):
            pass
        return time.perf_counter() - began_s

    def _one(self, connection: socket.socket) -> None:
        connection.sendall(self._payload)
        _read(connection, self._down_bytes, bytearray(CHUNK_BYTES))

    def close(self) -> None:
        for each in self._connections:
            each.close()
        self._threads.shutdown()


class _ZeromqCarrier(Carrier):
    def __init__(self, port: int, islands: int, up_bytes: int, frames: int) -> None:
        self._context = zmq.Context(io_threads=2)
        self._sockets = []
        for _ in range(islands):
            sock = _socket(self._context, zmq.DEALER)
            sock.connect(f"tcp://127.0.0.1:{port}")
            self._sockets.append(sock)
        self._frames = _cut(up_bytes, frames)

    def round(self) -> float:
        began_s = time.perf_counter()
        for sock in self._sockets:
            sock.send_multipart(self._frames, copy=False)
        for sock in self._sockets:
            if not sock.poll(GIVE_UP_MS):
                raise Unavailable("the ZeroMQ carrier fell silent: see its logs", definite=True)
            sock.recv_multipart(copy=False)
        return time.perf_counter() - began_s

    def close(self) -> None:
        self._context.destroy(linger=0)


# --- relay and sink -------------------------------------------------------------------------------------------------


def _tcp_relay(args: argparse.Namespace) -> None:
    with (
        socket.create_server(("127.0.0.1", args.port + 1)) as sink_door,
        socket.create_server(("127.0.0.1", args.port), backlog=args.islands) as door,
    ):
        sink, _ = sink_door.accept()
        islands = [door.accept()[0] for _ in range(args.islands)]
    for each in (sink, *islands):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lock = threading.Lock()

    def up(island: socket.socket) -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while n := island.recv_into(buffer):
            with lock:
                sink.sendall(buffer[:n])

    threads = [threading.Thread(target=up, args=(each,), daemon=True) for each in islands]
    for thread in threads:
        thread.start()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while n := sink.recv_into(buffer):
        for each in islands:
            each.sendall(buffer[:n])


def _tcp_sink(args: argparse.Namespace) -> None:
    with _connect(args.port + 1) as relay:
        payload = memoryview(os.urandom(args.down))
        buffer = bytearray(CHUNK_BYTES)
        while _read(relay, args.islands * args.up, buffer):
            relay.sendall(payload)


def _zeromq_relay(args: argparse.Namespace) -> None:
    context = zmq.Context(io_threads=2)
    door, sink = _socket(context, zmq.ROUTER), _socket(context, zmq.PAIR)
    door.bind(f"tcp://127.0.0.1:{args.port}")
    sink.bind(f"tcp://127.0.0.1:{args.port + 1}")
    poller = zmq.Poller()
    poller.register(door, zmq.POLLIN)
    poller.register(sink, zmq.POLLIN)
    known: dict[bytes, None] = {}
    while True:
        ready = dict(poller.poll())
        if door in ready:
            name, *frames = door.recv_multipart(copy=False)
            known[name.bytes] = None
            sink.send_multipart(frames, copy=False)
        if sink in ready:
            frames = sink.recv_multipart(copy=False)
            for island in known:
                door.send_multipart([island, *frames], copy=False)


def _zeromq_sink(args: argparse.Namespace) -> None:
    context = zmq.Context(io_threads=2)
    relay = _socket(context, zmq.PAIR)
    relay.connect(f"tcp://127.0.0.1:{args.port + 1}")
    payload = _cut(args.down, args.frames)
    while True:
        for _ in range(args.islands):
            relay.recv_multipart(copy=False)
        relay.send_multipart(payload, copy=False)


# --- both -----------------------------------------------------------------------------------------------------------


def _connect(port: int) -> socket.socket:
    ends_s = time.monotonic() + CONNECT_WITHIN_S
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
        except OSError as err:
            if time.monotonic() > ends_s:
                raise Unavailable(f"nobody listens on port {port}: see the relay's log", definite=True) from err
            time.sleep(0.02)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


def _read(connection: socket.socket, nbytes: int, buffer: bytearray) -> bool:
    """Reads and forgets so many bytes; returns False if the connection ended before."""
    view = memoryview(buffer)
    while nbytes:
        n = connection.recv_into(view[: min(nbytes, len(view))])
        if not n:
            return False
        nbytes -= n
    return True


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    sock = context.socket(kind)
    sock.set_hwm(HIGH_WATER_MARK)
    sock.linger = 0
    return sock


def _cut(nbytes: int, frames: int) -> list[memoryview]:
    payload = memoryview(os.urandom(nbytes))
    size = -(-nbytes // frames)
    return [payload[start : start + size] for start in range(0, nbytes, size)]


def main() -> None:
    """Runs the relay or the sink until its peers are gone or it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["relay", "sink"])
    parser.add_argument("--kind", type=Kind, choices=list(Kind), required=True)
    for name in ("--port", "--islands", "--up", "--down", "--frames"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    roles = {
        (Kind.TCP, "relay"): _tcp_relay,
        (Kind.TCP, "sink"): _tcp_sink,
        (Kind.ZEROMQ, "relay"): _zeromq_relay,
        (Kind.ZEROMQ, "sink"): _zeromq_sink,
    }
    with contextlib.suppress(KeyboardInterrupt, ConnectionError):
        roles[args.kind, args.role](args)


if __name__ == "__main__":
    main()
