"""``atoll dashboard``: serves the page of one run until it is interrupted."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import socket
import sys
from pathlib import Path

from broker.base.errors import ConfigError, Unavailable, cure_of_listening
from broker.observing.client import ObservedRun
from broker.process.release import install
from ops.dashboard.watched_run import WatchedRun
from ops.inspect.source import BROKER_HELP, BROKER_METAVAR, add_key_flags, observed_run

HOST, PORT = "127.0.0.1", 7080
#: An answer that is on its way when the server ends.
END_WITHIN_S = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``atoll dashboard``."""
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", nargs="?", type=Path, help="directory of a run of `up` or `hub`, live or ended"
    )
    parser.add_argument("--redis", metavar="URL", help="address of Redis, for a run that has no directory here")
    parser.add_argument("--broker", metavar=BROKER_METAVAR, help=BROKER_HELP)
    add_key_flags(parser)
    parser.add_argument("--run", metavar="TEXT", default="", help="name of the run (default: written to last)")
    parser.add_argument("--host", metavar="ADDRESS", default=HOST, help=f"where to listen (default: {HOST})")
    parser.add_argument("--port", metavar="PORT", type=int, default=PORT, help=f"0: any that is free (default: {PORT})")


def run(args: argparse.Namespace) -> int:
    """Serves the page; returns 0 once interrupted.

    Raises:
        ConfigError: There is no such run, or nothing to ask; or the packages of the extra are missing.
        Unavailable: The address is taken, or the broker does not answer.
    """
    check_packages("dashboard", args.port)
    observed = observed_run(args.broker, args)
    if args.run_dir is None and args.redis is None and observed is None:
        raise ConfigError("RUN_DIR", "", "is missing: name the directory of a run, --redis URL, or --broker ADDRESS")
    if args.run_dir is not None and observed is not None:
        raise ConfigError("broker", args.broker, "contradicts RUN_DIR: a run that has a directory here needs no broker")
    if observed is not None:
        asyncio.run(_try_out(observed))
    watched = WatchedRun(args.run_dir, args.redis, args.run, observed=observed)
    serve(watched, listen(args.host, args.port))
    return 0


async def _try_out(run: ObservedRun) -> None:
    """Asks once, so that a missing key or a wrong address is an error at once, and not an empty page."""
    async with contextlib.aclosing(run):
        await run.read()


def check_packages(field: str, value: object) -> None:
    """Refuses to show a page where the packages for it are missing.

    Args:
        field: The setting that asks for the page, for the error.
        value: Its value.

    Raises:
        ConfigError: They are not installed.
    """
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        cure = f"needs packages that are not installed ({', '.join(missing)}): {install(*missing)}"
        raise ConfigError(field, value, cure)


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket.

    Raises:
        ConfigError: ``port`` is none.
        Unavailable: It is taken, or ``host`` is none of this machine's addresses.
    """
    if not 0 <= port < 65536:
        raise ConfigError("port", port, "must be between 0 and 65535")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as err:
        what = f"cannot listen on {host}:{port} ({os.strerror(err.errno) if err.errno else err})"
        cure = f"{cure_of_listening(err)}, or --port 0 for any that is free"
        raise Unavailable(f"{what}: {cure}", definite=True) from err


def serve(watched: WatchedRun, listening: socket.socket) -> None:
    """Serves until the process is interrupted."""
    import uvicorn

    from ops.dashboard.server import application

    host, port = listening.getsockname()[:2]
    print(f"dashboard at http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends it)", file=sys.stderr)
    app = application(watched, lambda: server.should_exit)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=END_WITHIN_S))
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again once it has ended
        server.run(sockets=[listening])
