"""The proxy: listens at every door of a wiring, and hands each connection to the carrier of its link. Shell."""

from __future__ import annotations

import asyncio
import random
import socket
from functools import partial
from types import TracebackType

from broker.wire.errors import Unavailable
from ops.links.carrier import SOCKET_BUFFER_BYTES, Carrier
from ops.links.link import Link
from ops.links.wiring import Wiring


class Proxy:
    """All links of a run; an asynchronous context manager.

    Attributes:
        carriers: By the name of the link.
    """

    def __init__(self, wiring: Wiring) -> None:
        self.carriers: dict[str, Carrier] = {}
        self._wiring = wiring
        self._servers: list[asyncio.Server] = []

    async def __aenter__(self) -> Proxy:
        """Listens.

        Raises:
            Unavailable: A port is in use.
        """
        loop = asyncio.get_running_loop()
        try:
            for name, wire in self._wiring.wires.items():
                source = random.Random(f"{self._wiring.seed}/{name}")
                now_s = loop.time()
                link = Link(wire.plan, began_s=self._wiring.began_s, random_source=source, now_s=now_s)
                carrier = self.carriers[name] = Carrier(name, link, loop)
                for door in wire.doors:
                    listening = _listening(self._wiring.host, door.listen)
                    accept = partial(carrier.accept, door.host, door.port)
                    self._servers.append(await loop.create_server(accept, sock=listening))
                carrier.pump()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends every connection."""
        self.close()

    def close(self) -> None:
        """Listens no more, and resets every connection."""
        for server in self._servers:
            server.close()
        for carrier in self.carriers.values():
            carrier.close()


def _listening(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # accepted sockets inherit them
            listening.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        listening.bind((host, port))
        listening.listen(128)
        listening.setblocking(False)
    except OSError as err:
        listening.close()
        cure = "end the process that listens there, or start the run anew"
        raise Unavailable(f"links cannot listen on {host}:{port} ({err.strerror}); {cure}", definite=True) from err
    return listening
