"""Client of the links process: changes links during a run, by JSON lines over a unix socket.

Requests, with the answer's fields beside ``"ok": true``:

* ``{"do": "list"}``: ``links``, by name: ``condition`` (a table, see :mod:`ops.links.condition`), ``up_bytes``,
  ``down_bytes``, ``connections``
* ``{"do": "set", "link": GLOB, "condition": TABLE, "for_s": SECONDS or null}``: ``links``, the names that it applied to
* ``{"do": "clear", "link": GLOB}``: the region file counts again; ``links`` likewise; without a link, of all

What cannot be done is answered with ``{"ok": false, "field": .., "value": .., "cure": ..}``, and changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from broker.base.errors import ConfigError, Unavailable
from ops.links.condition import LinkCondition

#: A line, either way. Answers list all links: some 300 bytes each.
MAX_LINE_BYTES = 4 << 20
#: Where ``up`` puts the socket in the run directory.
SOCKET_NAME = "links.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCount:
    """Bytes and connections of one link since its process started.

    Attributes:
        up_bytes: From the client to the broker; handshakes and framing of ZeroMQ are in it.
        down_bytes: From the broker to the client.
        connections: Connections that are open or being made.
    """

    up_bytes: int
    down_bytes: int
    connections: int


class LinkControl:
    """The client; one connection per call, so that it survives restarts of the links process.

    Args:
        path: The path of the socket, ``links.sock`` in the run directory.
        within_s: How long a call may take.
    """

    def __init__(self, path: str | os.PathLike[str], *, within_s: float = 5.0) -> None:
        self._path = Path(path)
        self._within_s = within_s

    def set(self, link: str, condition: LinkCondition, *, for_s: float | None = None) -> tuple[str, ...]:
        """Sets the condition of links; returns their names.

        Args:
            link: A name, or a glob such as ``island-*``.
            condition: Takes the place of whatever they are like, and does not add to it.
            for_s: For so long, and then as before; None: until changed.

        Raises:
            ConfigError: No link has such a name.
            Unavailable: The links process does not answer; whether it did it is not known.
        """
        return self._names({"do": "set", "link": link, "condition": condition.table(), "for_s": for_s})

    def clear(self, link: str | None = None) -> tuple[str, ...]:
        """Puts links back to what the region file says, all of them if none is named; returns their names.

        Raises as :meth:`set`.
        """
        return self._names({"do": "clear"} if link is None else {"do": "clear", "link": link})

    def conditions(self) -> dict[str, LinkCondition]:
        """Returns the current condition of each link. Raises as :meth:`set`."""
        return {name: LinkCondition.of(**each["condition"]) for name, each in self._list().items()}

    def counts(self) -> dict[str, LinkCount]:
        """Returns the counts of each link. Raises as :meth:`set`."""
        fields = LinkCount.__dataclass_fields__
        return {name: LinkCount(**{key: each[key] for key in fields}) for name, each in self._list().items()}

    def _names(self, request: dict[str, Any]) -> tuple[str, ...]:
        return tuple(self._ask(request)["links"])

    def _list(self) -> dict[str, dict[str, Any]]:
        return dict(self._ask({"do": "list"})["links"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, short_path(self._path) as path:
                sock.settimeout(self._within_s)
                sock.connect(path)
                sock.sendall(json.dumps(request).encode() + b"\n")
                with sock.makefile("rb") as file:
                    answer = json.loads(file.readline(MAX_LINE_BYTES))
        except (OSError, ValueError) as err:
            cure = "check that the run was started with up --link, and is still running"
            raise Unavailable(
                f"no answer from the links process at {self._path} ({err}); {cure}", definite=False
            ) from err
        if not answer.get("ok"):
            raise ConfigError(answer["field"], answer["value"], answer["cure"])
        return dict(answer)


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yields a short alias of a socket's path, since addresses have at most 107 bytes."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
