"""Serves the control socket of the links process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from broker.base.errors import ConfigError, Unavailable, cure_of
from broker.base.settings import nearest, refuse_unknown
from ops.link_proxy.carrier import Carrier
from ops.link_proxy.control import short_path
from ops.links.condition import LinkCondition, Way
from ops.links.region import meant

MAX_REQUEST_BYTES = 64 << 10
MAX_FOR_S = 1e6

_KEYS = {
    "list": {"do"},
    "set": {"do", "link", "condition", "for_s"},
    "clear": {"do", "link"},
}


def answer(carriers: Mapping[str, Carrier], line: bytes) -> dict[str, Any]:
    """Carries out one request; returns the answer, also for a failure."""
    try:
        return {"ok": True, "links": _do(carriers, _request(line))}
    except ConfigError as err:
        return {"ok": False, "field": err.field, "value": str(err.value)[:200], "cure": err.cure}


def _request(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as err:
        raise ConfigError("request", line[:80].decode(errors="replace"), f"is not JSON: {err}") from err
    if not isinstance(request, dict):
        raise ConfigError("request", request, 'must be an object, such as {"do": "list"}')
    verb = request.get("do")
    if not isinstance(verb, str) or verb not in _KEYS:
        raise ConfigError("do", verb, nearest(str(verb), list(_KEYS)))
    refuse_unknown(request, _KEYS[verb], where=verb)
    return request


def _do(carriers: Mapping[str, Carrier], request: Mapping[str, Any]) -> Any:
    if request["do"] == "list":
        return {name: _shown(carrier) for name, carrier in carriers.items()}
    every = request["do"] == "clear" and "link" not in request
    names = list(carriers) if every else meant("link", str(request.get("link")), list(carriers))
    match request["do"]:
        case "set":
            condition, for_s = _condition(request.get("condition")), _duration(request.get("for_s"))
            for name in names:
                carriers[name].order(condition, for_s=for_s)
        case "clear":
            for name in names:
                carriers[name].clear()
    return names


def _condition(table: Any) -> LinkCondition:
    if not isinstance(table, dict):
        raise ConfigError("condition", table, 'must be an object, such as {"delay_ms": 40}; {} for no faults')
    return LinkCondition().changed(table)


def _duration(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_FOR_S:
        raise ConfigError("for_s", value, f"must be seconds, above 0 and at most {MAX_FOR_S:g}, or null for ever")
    return float(value)


def _shown(carrier: Carrier) -> dict[str, Any]:
    lanes = carrier.link.lanes
    return {
        "condition": carrier.link.condition.table(),
        **{f"{way}_bytes": lanes[way].passed_bytes for way in Way},
        "connections": len(carrier.connections),
    }


# --- the socket -------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def listening(path: Path, carriers: Mapping[str, Carrier]) -> Any:
    """Answers requests at a unix socket that only this user can open, during the block.

    Raises:
        Unavailable: The socket cannot be made.
    """
    try:
        with short_path(path) as short:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(short)  # of a process that was killed
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.bind(short)
            os.chmod(short, 0o600)
    except OSError as err:
        raise Unavailable(f"cannot make the socket {path} ({err.strerror}); {cure_of(err)}", definite=True) from err

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            while line := await _line(reader):
                writer.write(json.dumps(answer(carriers, line)).encode() + b"\n")
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, sock=sock, limit=MAX_REQUEST_BYTES)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Returns the next request; empty at the end, or for a too long one, which ends the connection."""
    try:
        return await reader.readline()
    except ValueError:
        return b""
