"""The broker's gate: admits connections by key, and ends those of strangers. Shell.

*Keys.* With a key of its own the broker's sockets speak CurveZMQ only. ZeroMQ asks for each new connection over an
in-process socket (ZAP, rfc.zeromq.org/spec/27) whether its key is welcome, and attaches our answer, the key itself, to
every message of the connection as its ``User-Id``; what the key may say is for the relay to judge, message by message.
The handler here is our own, not that of pyzmq: it reads the same allow list as the relay, and all there is to it is
:func:`zap_answer`. Without keys everybody is welcome, and is asked about all the same: a socket that asks refuses
ZMTP 1.0 and 2.0, which know no ZAP, at the first bytes. TLS, HTTP and RDP read as ZMTP 1.0.

*Strangers.* Whoever fails the handshake is seen by the socket's monitor, and counted by the relay. A peer that names
its own routing id is shown out; one that names such an id as ZeroMQ draws cannot be told (:func:`draw_afresh`).

*Floods.* A connection of which more waits than any message may hold, unread or not whole, is ended, as is one whose
message has far too many frames (:mod:`broker.clients.connections`). Where all connections together would take more
open files than the process can spare, the oldest that has delivered nothing is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from broker.base.errors import ConfigError
from broker.clients.connections import Connections, Ending, files_for_connections
from broker.gateway.turns import Taken, said_of
from broker.process import logs
from broker.routing.events import AllowListChanged, TurnedAway
from broker.transport.descriptors import Name, hang_up, hold, received_bytes
from broker.transport.keys import ALLOW_LIST, read_allow_list, read_secret
from broker.transport.sockets import Context
from broker.wire.identity import AllowList, KeyRole
from broker.wire.messages import Channel, Reason

log = logs.get(__name__)

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = "atoll"
#: A routing id that ZeroMQ has drawn has so many bytes, the first of them 0.
DRAWN_BYTES = 5
#: How often the allow list is looked at, and the connections are.
LOOK_EVERY_S = 1.0
#: A broker that can hold fewer connections does not begin: an aggregator and a few islands take so many.
LEAST_CONNECTIONS = 16
#: Cure for too few open files.
MORE_FILES = "raise the limit (`ulimit -n`, `ulimit -Hn`; LimitNOFILE= of a systemd unit)"

_WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
#: What the gate tells the relay.
GateEvent = AllowListChanged | TurnedAway


def zap_answer(frames: list[bytes], allowed: AllowList | None) -> list[bytes] | None:
    """Answers one question of ZAP: 200 with the key as user id, or 400; None if it is no question at all.

    Args:
        frames: Routing id, empty, version, request id, domain, peer's address, its routing id, mechanism, and for
            CURVE the client's public key, 32 bytes.
        allowed: Public keys in z85 that may connect; None: everybody may, without a key.
    """
    if len(frames) < 8 or frames[1] != b"":
        return None
    route, _, version, request, _, _, _, mechanism, *credentials = frames
    if allowed is None and mechanism == b"NULL":
        return [route, b"", version, request, b"200", b"OK", b"", b""]
    key = z85.encode(credentials[0]) if mechanism == b"CURVE" and [len(each) for each in credentials] == [32] else b""
    identity = (allowed or {}).get(key.decode())
    if identity is None or identity.role is KeyRole.BROKER:
        return [route, b"", version, request, b"400", b"no such key on the allow list", b"", b""]
    return [route, b"", version, request, b"200", b"OK", key, b""]


def draw_afresh() -> None:
    """Has ZeroMQ's sockets begin their routing ids at random; to be called before they are made.

    It draws the first id from C's ``rand()``, which nobody seeds, and counts on from there: every broker's ids are the
    same. A peer may name any id as its own, and libzmq 4.3.5 ends the process (an assertion in ``add_out_pipe``) when
    it draws one that is taken.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))


@dataclass(slots=True)
class _Port:
    """One of the broker's sockets, as the gate sees it."""

    sock: Any
    names: frozenset[Name]  # of our ends of its connections
    monitor: Any
    connections: Connections
    held: dict[int, socket.socket] = field(default_factory=dict)  # those that have not delivered, by descriptor

    def release(self, fd: int) -> int | None:
        """Lets go of a connection; returns the bytes that came over it, None if that is not known."""
        copy = self.held.pop(fd, None)
        if copy is None:
            return None
        with copy:
            return received_bytes(copy.fileno())

    def hang_up(self, fd: int) -> bool:
        """Ends a connection and says whether there was one."""
        copy = self.held.pop(fd, None)
        if copy is None:
            return hang_up(fd, self.names)
        with copy, contextlib.suppress(OSError):  # the peer may have ended it
            copy.shutdown(socket.SHUT_RDWR)  # by the copy: there may be no file left for another one
        return True


class Gate:
    """Keys, strangers and floods of one broker.

    Args:
        context: The context of the sockets to guard: ZeroMQ asks within one.
        key: The broker's secret key file, with the allow list beside it; None: no keys.
        tell: Takes what the relay should know.
        ended: Takes the descriptor of each connection that has ended.

    Raises:
        ConfigError: A key file or the allow list is missing or wrong.
    """

    def __init__(
        self,
        context: Context,
        key: Path | None,
        tell: Callable[[GateEvent], None],
        ended: Callable[[Channel, int], None],
    ) -> None:
        self._context, self._tell, self._tell_ended = context, tell, ended
        self._most_files = 0  # of connections and their copies; told by :meth:`share_files`
        self._ports: dict[Channel, _Port] = {}
        self._fds: dict[str, dict[tuple[Channel, int], None]] = {}  # by key: its connections, in order
        self._pair = None
        self._list: Path | None = None
        self._allowed: AllowList | None = None  # everybody
        self._stamp: tuple[int, ...] = ()
        if key is not None:
            self._pair = read_secret(key)
            if self._pair.identity.role is not KeyRole.BROKER:
                raise ConfigError("key", str(key), f"is the key of {self._pair.identity}; a broker needs a broker's")
            self._list = key.parent / ALLOW_LIST
            self._stamp = _stamp(self._list)
            self._allowed = read_allow_list(self._list)
            tell(AllowListChanged(allowed=self._allowed))
        self._zap: zmq.asyncio.Socket = context.socket(zmq.ROUTER)
        self._zap.linger = 0
        self._zap.bind(ZAP_ADDRESS)

    # --- sockets ---

    def guard(self, sock: zmq.asyncio.Socket) -> None:
        """Makes a socket ask for each connection if it may come in; called before it is bound."""
        if self._pair is not None:
            sock.curve_server = True
            sock.curve_publickey = self._pair.public.encode()
            sock.curve_secretkey = self._pair.secret.encode()
        sock.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
        sock.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer nobody gets in

    def watch(
        self, channel: Channel, sock: zmq.asyncio.Socket, names: frozenset[Name], connections: Connections
    ) -> None:
        """Begins to watch the connections of a bound socket, which come to one of these names."""
        sock.monitor(f"inproc://monitor-{channel}", _WATCHED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.rcvhwm = 1  # a flood must not outrun it by more than ZeroMQ's own queue (UNTOLD_FILES)
        monitor.connect(f"inproc://monitor-{channel}")
        self._ports[channel] = _Port(sock=sock, names=names, monitor=monitor, connections=connections)

    def share_files(self, limit: int, in_use: int, *, unix: bool) -> None:
        """Sets how many connections there may be; raises ConfigError if there is room for hardly any."""
        self._most_files = files_for_connections(limit, in_use, unix=unix)
        if self._most_files < LEAST_CONNECTIONS:
            cure = f"leaves room for {self._most_files} connections beside {in_use} files: {MORE_FILES}"
            raise ConfigError("open files", limit, cure)

    def close(self) -> None:
        """Ends the watch, before the sockets are closed."""
        for port in self._ports.values():
            # Disabled before it is closed, and emptied before that: ZeroMQ's thread may wait for room in it, and then
            # would wait for ever.
            emptied = self._context.direct(port.monitor)
            with contextlib.suppress(zmq.Again):
                while True:
                    emptied.recv_multipart(zmq.NOBLOCK)
            port.sock.disable_monitor()
            port.monitor.close(linger=0)
            for fd in list(port.held):
                port.release(fd)
        self._ports.clear()
        self._zap.close(linger=0)

    # --- messages ---

    def key_of(self, channel: Channel, taken: Taken) -> str | None:
        """Returns the key that a message came under, empty without keys; notes that its connection delivers.

        None for a message that nobody is to read: its peer names its own routing id, or ZeroMQ knows nothing of it.
        """
        fd, key = taken.fd, said_of(taken.frames[0], "User-Id") if taken.frames else None
        port = self._ports.get(channel)
        if port is not None and fd is not None:
            port.connections.delivered(fd, sum(map(len, taken.frames)), len(taken.frames))
            if fd in port.held:
                port.release(fd)
        named = not (len(taken.peer) == DRAWN_BYTES and taken.peer.startswith(b"\0"))
        if fd is None or key is None or named:
            why = "it names its own routing id" if named else "it speaks no ZMTP 3"
            self._turned_away(channel, Reason.MALFORMED, why)  # which logs it now and then
            if port is not None and fd is not None:
                hang_up(fd, port.names)
            return None
        if self._pair is not None:
            self._fds.setdefault(key, {})[channel, fd] = None
        return str(key)

    def connections(self, channel: Channel) -> Connections:
        """Returns the connections of a watched socket."""
        return self._ports[channel].connections

    def end(self, channel: Channel, fd: int | None, why: str) -> None:
        """Ends a connection, if it is known."""
        port = self._ports.get(channel)
        if port is not None and fd is not None and hang_up(fd, port.names):
            log.warning("gate.shown_out", channel=channel, reason=why)

    # --- tasks ---

    async def answer(self) -> None:
        """Answers ZAP until cancelled."""
        while True:
            reply = zap_answer(await self._zap.recv_multipart(), self._allowed)
            if reply is not None:
                await self._zap.send_multipart(reply)

    async def listen(self, channel: Channel) -> None:
        """Takes in what the monitor of a socket sees, until cancelled."""
        port = self._ports[channel]
        while True:
            seen = parse_monitor_message(await port.monitor.recv_multipart())
            match seen["event"]:
                case zmq.EVENT_ACCEPTED:
                    self._begun(channel, port, seen["value"])
                case zmq.EVENT_DISCONNECTED:
                    self._ended(channel, port, seen["value"])
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    port.connections.shook_hands()
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    port.connections.failed()
                    self._turned_away(channel, Reason.WRONG_KEY, "its key is not on the allow list")
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    port.connections.left()
                case _:
                    port.connections.failed()
                    what = "no key, or not this broker's" if self._pair is not None else "not what this broker speaks"
                    self._turned_away(channel, Reason.MALFORMED, f"its handshake failed: {what}")

    def _begun(self, channel: Channel, port: _Port, fd: int) -> None:
        port.release(fd)
        ending = port.connections.accepted(fd)
        if ending is not None:
            self._tell_end(channel, ending)
            return
        copy = hold(fd, port.names) if self._files() < self._most_files else None
        if copy is not None:
            port.held[fd] = copy
        if self._files() > self._most_files and (oldest := port.connections.give_up()) is not None:
            port.hang_up(oldest)
            why = f"there are open files for {self._most_files} connections, and no more: {MORE_FILES}"
            self._turned_away(channel, Reason.QUEUE_FULL, why)

    def _files(self) -> int:
        return sum(len(port.connections) + len(port.held) for port in self._ports.values())

    def _ended(self, channel: Channel, port: _Port, fd: int) -> None:
        for fds in self._fds.values():
            fds.pop((channel, fd), None)
        self._tell_ended(channel, fd)
        self._tell_end(channel, port.connections.closed(fd, port.release(fd)))

    def _tell_end(self, channel: Channel, ending: Ending | None) -> None:
        match ending:
            case Ending.SILENT:
                self._turned_away(channel, None, "it ended without a message")
            case Ending.STRANGER:
                self._turned_away(channel, Reason.MALFORMED, "it ended in the handshake: what it spoke was not ZMTP 3")
            case _:
                pass

    def _turned_away(self, channel: Channel, reason: Reason | None, detail: str) -> None:
        self._tell(TurnedAway(channel=channel, reason=reason, detail=detail))

    async def look_around(self) -> None:
        """Looks at the allow list and at the connections every second, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self._look_at_list()
            for channel, port in self._ports.items():
                for fd, nbytes in port.connections.overfull(received_bytes):
                    self.end(channel, fd, f"{nbytes} bytes of it wait unread, or are no whole message")

    def _look_at_list(self) -> None:
        if self._list is None or _stamp(self._list) == self._stamp:
            return
        self._stamp = _stamp(self._list)
        try:
            allowed = read_allow_list(self._list)
        except ConfigError as err:
            log.error("gate.allow_list_kept", detail=str(err), cure="put it right: until then the old one holds")
            return
        revoked = [key for key, identity in (self._allowed or {}).items() if allowed.get(key) != identity]
        self._allowed = allowed
        log.info("gate.allow_list", keys=len(allowed), revoked=len(revoked))
        self._tell(AllowListChanged(allowed=allowed))
        for key in revoked:
            for channel, fd in self._fds.pop(key, {}):
                self.end(channel, fd, "its key was revoked")


def _stamp(path: Path) -> tuple[int, ...]:
    """Returns time, size and inode of a file, which change when it does; empty if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino
