"""Addresses of the two channels, the options of their sockets, and whether a client's connection stands.

Shell, and shared by both sides of a connection. The reasons behind the numbers are in PROTOCOL.md, section 10.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from broker.errors import ConfigError
from broker.headers import DEFAULT_LIMITS, Limits
from broker.hearing import Carried
from broker.messages import Channel
from broker.tcp import carried, forget_unsent

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:;/\[\]@?#]+):(?P<port>[0-9]{1,5})", re.ASCII)
#: An aggregator keeps a pair of connections to each broker; two or three are plenty.
MAX_BROKERS = 16
_IPC_PATH_BYTES = 107 - len(".bulk")  # sockaddr_un holds 107 and a zero


# --- addresses --------------------------------------------------------------------------------------------------


def check_address(address: str, *, field: str = "broker") -> str:
    """Returns a control address that this project can use: ``tcp://HOST:PORT`` or ``ipc://PATH``.

    Args:
        address: As configured. An IPv6 host stands in brackets.
        field: The setting it comes from, named in the error.

    Raises:
        ConfigError: If it is anything else, or its port leaves no room for the bulk port.
    """
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not path or len(path.encode()) > _IPC_PATH_BYTES:
            raise ConfigError(field, address, f"the path must have 1 to {_IPC_PATH_BYTES} bytes")
        return address
    match = _TCP.fullmatch(address)
    if match is None:
        raise ConfigError(field, address, "must be tcp://HOST:PORT or ipc://PATH, such as tcp://hub:7001")
    if not 1 <= int(match["port"]) <= 65_534:
        raise ConfigError(field, address, "the port must be 1 to 65534: the next one is the bulk port")
    return address


def broker_addresses(text: str, *, field: str = "broker") -> tuple[str, ...]:
    """Returns the control addresses in a comma-separated list: one for each broker of the run.

    Raises:
        ConfigError: One of them is none (:func:`check_address`), stands there twice, or there are too many.
    """
    found = tuple(each.strip() for each in text.split(","))
    for each in found:
        if not each:
            raise ConfigError(field, text, "has an empty place: write tcp://a:7001,tcp://b:7001, commas between them")
        check_address(each, field=field)
        if found.count(each) > 1:
            raise ConfigError(field, text, f"names {each} twice: name each broker once")
    if len(found) > MAX_BROKERS:
        raise ConfigError(field, text, f"names {len(found)} brokers, at most {MAX_BROKERS} are supported")
    return found


def split_tcp(address: str, *, field: str = "broker") -> tuple[str, int]:
    """Returns host and port of a control address that is ``tcp://HOST:PORT``; the host without brackets.

    Raises:
        ConfigError: As :func:`check_address`, or if it is ``ipc://PATH``.
    """
    match = _TCP.fullmatch(check_address(address, field=field))
    if match is None:
        raise ConfigError(field, address, "must be tcp://HOST:PORT here")
    return match["host"].strip("[]"), int(match["port"])


def bulk_address(control_address: str, *, field: str = "broker") -> str:
    """Returns the address of the bulk channel: the next port, or the same path with ``.bulk`` behind it.

    Raises:
        ConfigError: As :func:`check_address`.
    """
    match = _TCP.fullmatch(check_address(control_address, field=field))
    if match is None:
        return control_address + ".bulk"
    return f"tcp://{match['host']}:{int(match['port']) + 1}"


def channel_address(control_address: str, channel: Channel, *, field: str = "broker") -> str:
    """Returns the address of either channel.

    Raises:
        ConfigError: As :func:`check_address`.
    """
    if channel is Channel.BULK:
        return bulk_address(control_address, field=field)
    return check_address(control_address, field=field)


# --- socket options, for both sides -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketOptions:
    """What the sockets of one channel are set to, at brokers and at their clients. The reasons are in PROTOCOL.md.

    Attributes:
        high_water_mark: Messages queued per connection and direction.
        linger_s: How long closing waits for what is queued.
        ping_every_s: Interval of ZeroMQ's own heartbeats.
        ping_timeout_s: Silence after which ZeroMQ gives a connection up. An answer waits behind the frame that is
            being sent, so this must exceed the time of the largest frame on the slowest link, or that frame never
            arrives.
    """

    high_water_mark: int
    linger_s: float
    ping_every_s: float
    ping_timeout_s: float

    def apply(self, socket: zmq.Socket[Any], max_frame_bytes: int) -> None:
        """Sets the options; to be called before the socket is bound or connected."""
        socket.set_hwm(self.high_water_mark)
        socket.linger = round(1000 * self.linger_s)
        socket.set(zmq.HEARTBEAT_IVL, round(1000 * self.ping_every_s))
        socket.set(zmq.HEARTBEAT_TIMEOUT, round(1000 * self.ping_timeout_s))
        ttl_ms = round(1000 * self.ping_timeout_s)
        # The other end counts the milliseconds in 16 bits (libzmq issue 4226): 600 s became ten, and a connection that
        # was idle, or carried a frame for so long, was ended. It has the kernel's probes to find out about dead hosts.
        socket.set(zmq.HEARTBEAT_TTL, ttl_ms if ttl_ms < 1 << 16 else 0)
        socket.set(zmq.HANDSHAKE_IVL, 10_000)
        socket.set(zmq.MAXMSGSIZE, max_frame_bytes)
        socket.set(zmq.IPV6, 1)
        # Below ZeroMQ's pings, the kernel's: they work beside a frame that takes minutes, and keep a NAT's entry alive.
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.set(zmq.TCP_KEEPALIVE_IDLE, 15)
        socket.set(zmq.TCP_KEEPALIVE_INTVL, 5)
        socket.set(zmq.TCP_KEEPALIVE_CNT, 4)
        socket.set(zmq.TCP_MAXRT, 60_000)


CONTROL_OPTIONS = SocketOptions(high_water_mark=1000, linger_s=1.0, ping_every_s=2.0, ping_timeout_s=6.0)
BULK_OPTIONS = SocketOptions(high_water_mark=4, linger_s=0.0, ping_every_s=15.0, ping_timeout_s=600.0)


def configure_socket(socket: zmq.Socket[Any], channel: Channel, limits: Limits = DEFAULT_LIMITS) -> None:
    """Sets the options of a channel on a socket, at either side, before it is bound or connected."""
    if channel is Channel.BULK:
        BULK_OPTIONS.apply(socket, limits.max_message_bytes)
    else:
        # ZeroMQ ends the connection over a frame that exceeds its maximum. The room between the limit and the maximum
        # is for what is merely too large: it is read, and refused with a reason.
        CONTROL_OPTIONS.apply(socket, 4 * limits.max_header_bytes)


# --- whether a connection stands --------------------------------------------------------------------------------


#: ZeroMQ says within a moment of a loss that it tries again. If it has not after this long, it never will.
FORGOTTEN_AFTER_S = 1.0


class Line:
    """The one connection of a client's socket, made anew when ZeroMQ has given it up.

    ZeroMQ reconnects after a loss, but not after what it takes for a violation of its own protocol: another security
    mechanism, a stranger on the broker's port, bytes that were damaged on the way. Then it forgets the connection
    without a word. Only its monitor shows the difference between such a socket, one that is still trying, and one that
    is merely full: who tries says so as soon as a connection is lost.

    Args:
        socket: Not yet connected.
        address: Where to connect it.
        renew_after_s: How long there may be no connection before it is made anew; longer than a handshake takes.

    Attributes:
        connections: How many there were, up to now.
    """

    __slots__ = (
        "_address",
        "_down_since_s",
        "_fd",
        "_monitor",
        "_renew_after_s",
        "_socket",
        "_trying",
        "_watcher",
        "connections",
    )

    def __init__(self, socket: zmq.asyncio.Socket, address: str, renew_after_s: float) -> None:
        self._socket = socket
        self._address = address
        self._renew_after_s = renew_after_s
        self._down_since_s: float | None = None
        self._trying = True
        self._fd: int | None = None  # the descriptor of the connection
        self.connections = 0
        watched = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._watcher = socket.get_monitor_socket(watched | zmq.EVENT_CONNECT_RETRIED)
        # Read without asyncio: the monitor is asked, never waited for.
        self._monitor: zmq.Socket[bytes] = zmq.Socket.shadow(self._watcher.underlying)

    def connect(self, now_s: float) -> None:
        """Starts connecting.

        Raises:
            ConfigError: If ZeroMQ does not take the address.
        """
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as err:
            raise ConfigError("broker", self._address, f"ZeroMQ cannot connect to it: {err}") from err
        self._down_since_s, self._trying = now_s, True

    def watch(self, now_s: float) -> bool:
        """Takes in what the monitor has seen; makes the connection anew when that is due, and says whether it did."""
        self._take_in(now_s)
        patience_s = self._renew_after_s if self._trying else min(self._renew_after_s, FORGOTTEN_AFTER_S)
        if self._down_since_s is None or now_s - self._down_since_s < patience_s:
            return False
        self.renew(now_s)
        return True

    def _take_in(self, now_s: float) -> None:
        while self._monitor.poll(0):
            seen = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            match seen["event"]:
                case zmq.EVENT_CONNECTED:
                    self._fd = seen["value"]
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._down_since_s = None
                    self.connections += 1
                case zmq.EVENT_CONNECT_RETRIED:
                    self._trying = True
                case _:
                    self._down_since_s, self._trying, self._fd = now_s, False, None

    def renew(self, now_s: float) -> None:
        """Makes the connection anew, whatever has become of the old one and of what was on its way there.

        Until :attr:`stands` again, the socket would take messages for the old one.
        """
        self._take_in(now_s)  # of the old one: the new one begins with what is seen from now on
        if self._fd is not None and self._port:
            forget_unsent(self._fd, self._port)
        self._fd = None
        try:
            self._socket.disconnect(self._address)
        except zmq.ZMQError as err:
            if err.errno != errno.ENOENT:  # which says that ZeroMQ has forgotten it: our very case
                raise
        self.connect(now_s)

    async def changed(self, timeout_s: float) -> None:
        """Returns when :meth:`watch` has something to take in, or when the time is over."""
        await self._watcher.poll(round(1000 * timeout_s), zmq.POLLIN)  # type: ignore[call-arg]

    @property
    def carried(self) -> Carried | None:
        """What the connection has carried; None if there is none, or if it is not known."""
        found = None if self._fd is None else carried(self._fd, to_port=self._port)
        return None if found is None else found._replace(connection=self.connections)

    @property
    def _port(self) -> int:
        return int(self._address.rpartition(":")[2]) if self._address.startswith("tcp://") else 0

    @property
    def stands(self) -> bool:
        """Whether there was a connection when :meth:`watch` looked."""
        return self._down_since_s is None

    def close(self) -> None:
        """Ends the watch, before the socket is closed."""
        self._socket.disable_monitor()
        self._watcher.close(linger=0)
