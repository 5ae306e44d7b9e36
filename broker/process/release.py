"""The release of this program, and the cure where a peer speaks another version of the protocol."""

from __future__ import annotations

from importlib import metadata

from broker.wire.errors import RemoteProtocolError
from broker.wire.messages import PROTOCOL_VERSION, Reason


def release() -> str:
    """Returns the version of the installed package; empty in a checkout, which has none."""
    try:
        return metadata.version("atoll")
    except metadata.PackageNotFoundError:
        return ""


def installed() -> str:
    """Returns the program's name and version; a checkout is named as such."""
    return f"atoll {release() or '(checkout)'}"


def refusal_detail(error: RemoteProtocolError) -> str:
    """Returns the fault of a message; for another protocol version, both versions and the cure."""
    if error.reason != Reason.PROTOCOL_VERSION:
        return f"{error.field} is {error.got}, expected {error.expected}"
    said = f"it speaks version {error.got} of the wire protocol, and {installed()} here version {PROTOCOL_VERSION}"
    return f"{said}: install the same minor version of atoll on both sides, or neighbours, as PROTOCOL.md has them"
