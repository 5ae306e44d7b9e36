"""Broker addresses: their format, the address of each channel, and the need for keys."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

from broker.base.errors import ConfigError
from broker.wire.identity import KeyRole
from broker.wire.messages import Channel

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:;/\[\]@?#]+):(?P<port>[0-9]{1,5})", re.ASCII)
#: An aggregator keeps a pair of connections to each broker; two or three are plenty.
MAX_BROKERS = 16
_IPC_PATH_BYTES = 107 - len(".bulk")  # sockaddr_un holds 107 and a zero


def check_address(address: str, *, field: str = "broker") -> str:
    """Returns a valid control address, ``tcp://HOST:PORT`` or ``ipc://PATH``.

    Args:
        address: As configured; an IPv6 host is in brackets.
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
        ConfigError: One of them is invalid (:func:`check_address`) or repeated, or there are too many.
    """
    found = tuple(each.strip() for each in text.split(","))
    for each in found:
        if not each:
            cure = "has an empty place: write tcp://a:7001,tcp://b:7001, commas between them"
            raise ConfigError(field, text, cure)
        check_address(each, field=field)
        if found.count(each) > 1:
            raise ConfigError(field, text, f"names {each} twice: name each broker once")
    if len(found) > MAX_BROKERS:
        raise ConfigError(field, text, f"names {len(found)} brokers, at most {MAX_BROKERS} are supported")
    return found


def split_tcp(address: str) -> tuple[str, int]:
    """Returns host and port of a control address ``tcp://HOST:PORT``; the host without brackets.

    Raises:
        ConfigError: As :func:`check_address`, or if it is ``ipc://PATH``.
    """
    match = _TCP.fullmatch(check_address(address))
    if match is None:
        raise ConfigError("broker", address, "must be tcp://HOST:PORT here")
    return match["host"].strip("[]"), int(match["port"])


def channel_address(control_address: str, channel: Channel) -> str:
    """Returns a channel's address; bulk has the next port, or the path and ``.bulk``; raises ConfigError."""
    match = _TCP.fullmatch(check_address(control_address))
    if channel is Channel.CONTROL:
        return control_address
    return control_address + ".bulk" if match is None else f"tcp://{match['host']}:{int(match['port']) + 1}"


def check_exposure(address: str, *, setting: str, key: Path | None, insecure: bool, role: KeyRole) -> None:
    """Raises ConfigError if a connection without keys would leave this machine.

    Args:
        address: ``tcp://HOST:PORT``, ``ipc://PATH``, or a host alone.
        setting: Where the address comes from.
        key: The process's secret key file, if it has one.
        insecure: The operator accepts the risk.
        role: The role of this process.

    Raises:
        ConfigError: The address is not of this machine, and there is neither a key nor ``insecure``.
    """
    if key is not None and insecure:
        raise ConfigError("insecure", True, "contradicts key: with a key nothing is insecure; leave one of them out")
    if key is None and not insecure and not is_local(address):
        name = " NAME" if role in (KeyRole.ISLAND, KeyRole.OBSERVER) else ""
        cure = (
            f"needs keys outside this machine: make one with `atoll keys new {role}{name}` and give its secret file "
            "with --key; or accept with --insecure that anybody who reaches the ports can take part"
        )
        raise ConfigError(setting, address, cure)


def is_local(address: str) -> bool:
    """Returns whether an address or host is clearly of this machine; names are not looked up."""
    if address.startswith("ipc://"):
        return True
    host = address.removeprefix("tcp://")
    if address.startswith("tcp://"):
        host = host.rpartition(":")[0]
    host = host.strip("[]").partition("%")[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_metrics_address(host: str, port: int) -> None:
    """Raises ConfigError for an invalid ``metrics_host`` or ``metrics_port``."""
    if not 0 <= port <= 65_535:
        raise ConfigError("metrics_port", port, "must be from 1 to 65535, or 0: no metrics are served")
    if not host:
        raise ConfigError("metrics_host", host, "must be an address of this machine, or 0.0.0.0 for all of them")
