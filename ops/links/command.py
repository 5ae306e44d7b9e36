"""``atoll links``: the process that carries the links of a run; ``up --link`` starts it."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

from broker.process import logs
from broker.wire.errors import ConfigError
from ops.links import wiring
from ops.links.control_server import listening
from ops.links.proxy import Proxy
from ops.links.wiring import Wiring

log = logs.get(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``atoll links``."""
    parser.add_argument("--plan", type=Path, required=True, metavar="FILE", help="the wiring, as up writes it")
    parser.add_argument("--control", type=Path, required=True, metavar="SOCKET", help="unix socket to take orders at")


def run(args: argparse.Namespace) -> int:
    """Carries bytes until SIGTERM or SIGINT, then returns 0.

    Raises:
        ConfigError: The plan cannot be read.
        Unavailable: A port or the socket cannot be had.
    """
    logs.configure("links")
    try:
        text = args.plan.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError("plan", str(args.plan), f"cannot be read: {err}") from err
    asyncio.run(_until_signalled(wiring.load(text), args.control.absolute()))
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
