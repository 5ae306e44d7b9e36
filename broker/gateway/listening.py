"""The addresses that a broker listens on, and why it cannot. Shell."""

from __future__ import annotations

import errno
import ipaddress
import socket

import zmq

from broker.config import BrokerConfig
from broker.wire.errors import ConfigError

#: How often two adjacent free ports are looked for when the port is 0.
PORT_ATTEMPTS = 50


def resolved(host: str) -> str:
    """Returns the address to bind: ZeroMQ takes no names of hosts there, and IPv6 in brackets, which may be given too.

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
    address = str(min(found, key=lambda each: each[0] != socket.AF_INET)[4][0])  # IPv4 first
    return (
        f"[{address}]"
        if isinstance(ipaddress.ip_address(address.partition("%")[0]), ipaddress.IPv6Address)
        else address
    )


def cannot_listen(config: BrokerConfig, err: zmq.ZMQError) -> ConfigError:
    """Returns what is wrong with the address that a broker was to listen on, with its cure."""
    if config.port == 0 and err.errno == errno.EADDRINUSE:
        cure = f"no two neighbours were found free at {config.host} in {PORT_ATTEMPTS} attempts: name one with --port"
        return ConfigError("port", config.port, cure)
    ports = f"{config.port} and {config.port + 1}" if config.port else "any"
    match err.errno:
        case errno.EADDRINUSE:
            cure = f"a process listens on one of {ports} at {config.host} already: end it, or take another --port"
        case errno.EACCES:
            cure = f"this user may not listen on {ports}: take a --port above 1023"
        case errno.EADDRNOTAVAIL | errno.ENODEV:
            cure = "this machine has no such address: give one of its own with --host, or 0.0.0.0 for all of them"
            return ConfigError("host", config.host, cure)
        case _:
            cure = f"ZeroMQ cannot listen there: {err.strerror}"
    return ConfigError("port", config.port, cure)
