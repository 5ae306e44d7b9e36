"""``atoll links``: the proxy that carries the links of a run; ``up --link`` starts it.

It listens at every door of a wiring, and hands each connection to the carrier of its link.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import socket
from functools import partial
from pathlib import Path

from broker.base.errors import Unavailable, cure_of_listening
from broker.process import logs
from ops.link_proxy.carrier import SOCKET_BUFFER_BYTES, Carrier
from ops.link_proxy.control_server import listening
from ops.links import wiring
from ops.links.link import Link
from ops.links.wiring import Wiring

log = logs.get(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``atoll links``."""
    parser.add_argument("--plan", type=Path, required=True, metavar="FILE", help="the wiring, as up writes it")
    parser.add_argument("--control", type=Path, required=True, metavar="SOCKET", help="unix socket to take orders at")


def run(args: argparse.Namespace) -> int:
    """Carries bytes until SIGTERM or SIGINT, then returns 0.

    Raises:
        OSError: The plan cannot be read.
        Unavailable: A port or the socket cannot be had.
    """
    logs.configure("links")
    asyncio.run(_until_signalled(wiring.load(args.plan.read_text(encoding="utf-8")), args.control.absolute()))
    return 0


async def _until_signalled(wired: Wiring, control: Path) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Proxy(wired) as proxy, listening(control, proxy.carriers):
        log.info("links.ready", links=len(proxy.carriers), control=str(control))
        await stop.wait()
    log.info("links.ended")


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
        """Opens all ports and the control socket.

        Raises:
            Unavailable: A port is in use.
        """
        loop = asyncio.get_running_loop()
        try:
            for name, wire in self._wiring.wires.items():
                link = Link(wire.condition, random_source=random.Random(name), now_s=loop.time())
                carrier = self.carriers[name] = Carrier(name, link, loop)
                for door in wire.doors:
                    sock = _bound(door.listen)
                    accept = partial(carrier.accept, door.host, door.port)
                    self._servers.append(await loop.create_server(accept, sock=sock))
                carrier.pump()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Closes everything."""
        self.close()

    def close(self) -> None:
        """Stops listening, and resets every connection."""
        for server in self._servers:
            server.close()
        for carrier in self.carriers.values():
            carrier.close()


def _bound(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # accepted sockets inherit them
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        sock.bind((wiring.HOST, port))
        sock.listen(128)
        sock.setblocking(False)
    except OSError as err:
        sock.close()
        cure = f"{cure_of_listening(err)}: start the run anew"
        raise Unavailable(
            f"links cannot listen on {wiring.HOST}:{port} ({err.strerror}); {cure}", definite=True
        ) from err
    return sock
