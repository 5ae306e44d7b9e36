"""The addresses that a broker listens on, and why it cannot. Shell."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from typing import Any

import zmq

from broker.base.errors import ConfigError, cure_of_listening
from broker.gateway.config import BrokerConfig
from broker.wire.addresses import channel_address
from broker.wire.messages import Channel

#: How often two adjacent free ports are looked for when the port is 0.
PORT_ATTEMPTS = 50


def resolved(host: str) -> str:
    """Returns the address to bind for a host: ZeroMQ takes no host names there.

    An IPv6 address may be given with brackets or without, and is returned with them.

    Raises:
        ConfigError: No such host.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        found = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as err:  # the latter where no name can be such
        why = err.strerror if isinstance(err, OSError) else "no host can have that name"
        cure = f"is no address ({why}); give one of this machine, or 0.0.0.0 for all of them"
        raise ConfigError("host", host, cure) from err
    family, *_, at = min(found, key=lambda each: each[0] != socket.AF_INET)  # IPv4 first
    return f"[{at[0]}]" if family == socket.AF_INET6 else str(at[0])


def cannot_listen(config: BrokerConfig, err: zmq.ZMQError) -> ConfigError:
    """Returns what is wrong with the address that a broker was to listen on, with its cure."""
    if config.port == 0 and err.errno == errno.EADDRINUSE:
        cure = f"no two neighbours were found free at {config.host} in {PORT_ATTEMPTS} attempts: name one with --port"
        return ConfigError("port", config.port, cure)
    cure = cure_of_listening(OSError(err.errno, err.strerror))
    if err.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        cure = f"{cure} with --host, or 0.0.0.0 for all of them"
        return ConfigError("host", config.host, cure)
    ports = f"{config.port} and {config.port + 1}" if config.port else "any"
    why = f"cannot listen on {ports} at {config.host} ({err.strerror}): {cure}"
    return ConfigError("port", config.port, why)


def unix_paths(ipc: str) -> dict[Channel, str]:
    """Returns the path of each channel's Unix socket, by the setting ``ipc``; none if that is empty."""
    found = {channel: channel_address(f"ipc://{ipc}", channel) for channel in Channel} if ipc else {}
    return {channel: address.removeprefix("ipc://") for channel, address in found.items()}


def kernel_name(path: str) -> bytes:
    """Returns the kernel's name of a Unix socket: an abstract one begins with a zero byte, not ``@``."""
    return b"\0" + os.fsencode(path[1:]) if path.startswith("@") else os.fsencode(path)


def listen_on_unix(sock: zmq.Socket[Any], path: str) -> None:
    """Has a socket listen on a Unix socket as well.

    Raises:
        ConfigError: Another process listens there, or a file is there that is no socket, both of which ZeroMQ would put
            out of the way without a word; or this one may not.
    """
    with contextlib.suppress(OSError):
        if not path.startswith("@") and not stat.S_ISSOCK(os.stat(path).st_mode):
            raise ConfigError("ipc", path, "is a file, and no socket: give another path, or remove it yourself")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        taken = asking.connect_ex(kernel_name(path)) == 0
    if taken:
        raise ConfigError("ipc", path, "a process listens there already: end it, or take another --ipc")
    try:
        sock.bind(f"ipc://{path}")
    except zmq.ZMQError as err:
        cure = "in a folder that this user may write in, or @NAME, which needs none on Linux"
        why = f"cannot be listened on ({os.strerror(err.errno or 0)}): give a path on a local disk, {cure}"
        raise ConfigError("ipc", path, why) from err
