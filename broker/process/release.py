"""The release of this program, and cures for peers of another protocol and missing packages."""

from __future__ import annotations

import shlex
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from broker.base.errors import RemoteProtocolError
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


def install(*packages: str) -> str:
    """Returns the command that installs packages into the environment that runs this program.

    Never an extra of our own: on an index the name ``atoll`` may be anybody's.
    """
    words, python = shlex.join(packages), shlex.quote(sys.executable)
    if find_spec("pip") is not None:
        return f"{python} -m pip install {words}"
    uv = Path(sys.executable).with_name("uv")  # an environment that uv made has no pip
    return f"{shlex.quote(str(uv)) if uv.exists() else 'uv'} pip install --python {python} {words}"


def refusal_detail(error: RemoteProtocolError) -> str:
    """Returns the fault of a message; for another protocol version, both versions and the cure."""
    if error.reason != Reason.PROTOCOL_VERSION:
        return f"{error.field} is {error.got}, expected {error.expected}"
    said = f"it speaks version {error.got} of the wire protocol, and {installed()} here version {PROTOCOL_VERSION}"
    return f"{said}: install the same minor version of atoll on both sides, or neighbours, as PROTOCOL.md has them"
