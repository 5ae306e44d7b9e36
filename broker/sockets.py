"""Addresses of the two channels, and the options of their sockets.

Shell, and shared by both sides of a connection. The reasons behind the numbers are in PROTOCOL.md, section 10.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import zmq

from broker.errors import ConfigError
from broker.headers import DEFAULT_LIMITS, Limits
from broker.messages import Channel

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
    try:
        match["host"].encode("idna")
    except UnicodeError as err:
        raise ConfigError(field, address, "the parts of a host's name must have 1 to 63 characters each") from err
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
