"""``atoll status``: shows a run from its Redis, once or again and again.

A broker that is named with an observer's key shows the same from where Redis cannot be reached.

``up`` starts a Redis of its own, which ends with the run and leaves a snapshot in the run directory. Asked for the
status of that directory, we start a server on a copy of the snapshot, ask it, and end it: the answer still comes from
Redis alone, by the same code as for a live run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rich.live import Live
from rich.text import Text

from aggregator.store.layout import mapped
from broker.base import sources
from broker.base.errors import ConfigError, Unavailable
from broker.gateway.config import DEFAULT_REDIS_URL
from broker.observing.client import ObservedRun
from broker.registry import redis_address
from broker.registry.registry import RedisRefusal, Registry
from broker.wire.records import BROKER_WITHIN_S, LEADER_WITHIN_S
from ops.evaluation.curve_file import read_points
from ops.inspect.source import add_key_flags, observed_run
from ops.inspect.status_view import render, to_json
from ops.processes.child_process import tied
from ops.processes.cluster import free_ports, wait_until_listening
from ops.processes.redis_server import SNAPSHOT, server
from ops.run_directory import in_use
from ops.story.run_status import Status, brokerless, leaderless, status_of, stopped
from ops.terminal import Screen
from ops.text import age

#: In the run directory: address and run id in the Redis that was started for it.
ADDRESS_FILE = "redis-url"
WATCH_EVERY_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``atoll status``."""
    directory_help = "directory of a run of `up` or `hub`, live or finished (default: ask --redis)"
    parser.add_argument("run_dir", metavar="RUN_DIR", nargs="?", type=Path, help=directory_help)
    parser.add_argument("--run", metavar="TEXT", help="name of the run (default: the one that was written to last)")
    url_help = f"address of Redis (default: REDIS_URL, else {DEFAULT_REDIS_URL})"
    parser.add_argument("--redis", metavar="URL", help=url_help)
    parser.add_argument("--json", action="store_true", help="one JSON object, on one line")
    parser.add_argument("--watch", action="store_true", help="show it again and again, every second")
    leader_help = (
        "health check: exit status 1 unless an aggregator renewed its lease within SECONDS "
        f"(default: {LEADER_WITHIN_S:g})"
    )
    parser.add_argument("--leader", metavar="SECONDS", type=float, nargs="?", const=LEADER_WITHIN_S, help=leader_help)
    broker_help = (
        "ask this broker, such as tcp://hub:7001, where Redis cannot be reached; with a number of seconds or nothing: "
        f"the health check for a broker that reported to Redis (default: {BROKER_WITHIN_S:g})"
    )
    parser.add_argument(
        "--broker", metavar="ADDRESS|SECONDS", nargs="?", const=f"{BROKER_WITHIN_S:g}", help=broker_help
    )
    add_key_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Prints a run's status, or checks its leader or broker; returns 0, or 1 with a line on stderr.

    Raises:
        ConfigError: ``--redis`` or ``--broker`` is no address, a check has no limit or is one among others, or the key
            is not an observer's.
    """
    observed = _settle_broker(args)
    checks = {name: limit_s for name in ("leader", "broker") if (limit_s := getattr(args, name)) is not None}
    for name, limit_s in checks.items():
        if not limit_s > 0:
            raise ConfigError(name, limit_s, "must be a number of seconds above 0")
        if len(checks) > 1 or args.json or args.watch:
            cure = "is a check of its own: leave out --json and --watch, and ask for the other check by itself"
            raise ConfigError(name, limit_s, cure)
    console = Screen()
    try:
        if observed is not None:
            return _observed(observed, args, console, checks)
        with _address(args) as url:
            if checks:
                return _health(asyncio.run(_fetch(url, args.run)), **checks)
            if not args.watch:
                _print(_as_left(asyncio.run(_fetch(url, args.run)), args), console, as_json=args.json)
            else:
                with contextlib.suppress(KeyboardInterrupt):  # the way to end it
                    asyncio.run(_watch(lambda: _fetch(url, args.run), args, console))
                    with _address(args) as left:
                        _print(_as_left(asyncio.run(_fetch(left, args.run)), args), console, as_json=args.json)
    except Unavailable as err:
        print(f"atoll: {args.as_called(str(err))}", file=sys.stderr)
        return 1
    return 0


def _settle_broker(args: argparse.Namespace) -> ObservedRun | None:
    """Makes ``--broker`` a number for a health check; or, of an address, returns the run to ask there.

    Raises:
        ConfigError: It is neither, or contradicts another flag.
    """
    text, address = args.broker, None
    if text is not None and "://" in text:
        args.broker, address = None, text
        if args.run_dir is not None:
            raise ConfigError("broker", address, "contradicts RUN_DIR: leave that out, and name the run with --run")
    elif text is not None:
        try:
            args.broker = float(text)
        except ValueError:
            cure = "must be an address such as tcp://hub:7001, or for a health check a number of seconds above 0"
            raise ConfigError("broker", text, cure) from None
    return observed_run(address, args)


def _observed(run: ObservedRun, args: argparse.Namespace, console: Screen, checks: dict[str, float]) -> int:
    try:
        return asyncio.run(_observe(run, args, console, checks))
    except KeyboardInterrupt:
        if not args.watch:
            raise
        return 0  # the way to end it


async def _observe(run: ObservedRun, args: argparse.Namespace, console: Screen, checks: dict[str, float]) -> int:
    """Shows or watches a run by a broker's answers; returns the exit code."""

    async def fetch() -> Status:
        snapshot = await run.read()
        if snapshot.empty:
            cure = "nobody has reported to Redis yet: wait, or start an aggregator"
            raise Unavailable(f"the broker at {run.address} knows nothing of run {run.run_id}: {cure}", definite=True)
        return status_of(snapshot, snapshot.now_s)

    async with contextlib.aclosing(run):
        if args.watch:
            await _watch(fetch, args, console)
        elif checks:
            return _health(await fetch(), **checks)
        else:
            _print(await fetch(), console, as_json=args.json)
    return 0


@contextlib.contextmanager
def _address(args: argparse.Namespace) -> Iterator[str]:
    """Yields the Redis to ask: the one named, or a run directory's, from its snapshot once it has ended."""
    if args.run_dir is None:
        yield args.redis or os.environ.get("REDIS_URL") or DEFAULT_REDIS_URL
        return
    kept = address_in(args.run_dir)
    args.run = kept.run_id
    if not kept.own:
        yield args.redis or _with_password(kept.url, os.environ.get("REDIS_URL", ""))
        return
    try:
        asyncio.run(_fetch(kept.url, kept.run_id))
    except Unavailable:
        print(f"atoll: the run's Redis has ended; this is what it left in {args.run_dir}", file=sys.stderr)
        with served(args.run_dir) as served_url:
            yield served_url
    else:
        yield kept.url


def _as_left(status: Status, args: argparse.Namespace) -> Status:
    """Marks a run as stopped if no ``up`` works in its directory any more, unless it has ended.

    The newest evaluation is that of the directory, which may be younger than the run.
    """
    if args.run_dir is None or in_use(args.run_dir):
        return status
    if points := read_points(args.run_dir):
        status = replace(status, evaluation=points[-1])
    gone = address_in(args.run_dir).own or status.broker_is_silent  # another Redis may be written to by others
    return stopped(status) if gone else status


def _with_password(kept: str, given: str) -> str:
    """Returns a run directory's Redis address, with the password of REDIS_URL if that is the same one."""
    return given if redis_address.names(given, kept) else kept


async def _fetch(url: str, run_id: str | None) -> Status:
    """Reads a run's status.

    Raises:
        Unavailable: Redis does not answer, or knows nothing of the run.
    """
    with_runs = Registry(url, run_id or "", field="redis")
    async with contextlib.aclosing(with_runs):
        try:
            if run_id is not None:
                snapshot = await with_runs.read()
                if not snapshot.empty:
                    return status_of(snapshot, snapshot.now_s)
            runs = await with_runs.known_runs()
        except RedisRefusal:
            raise
        except Unavailable as err:
            cure = "start it, or say where it is with --redis URL or REDIS_URL"
            raise Unavailable(f"{err}; {cure}", definite=err.definite) from err
    if run_id is None and runs:
        return await _fetch(url, runs[0])
    known = (
        f"it knows {', '.join(runs)}; choose one with --run" if runs else "nor of any other: start one with atoll up"
    )
    about = f"run {run_id}" if run_id is not None else "a run"
    raise Unavailable(f"Redis at {with_runs.address} knows nothing of {about}: {known}", definite=True)


async def _watch(fetch: Callable[[], Awaitable[Status]], args: argparse.Namespace, console: Screen) -> None:
    """Shows the status again and again, also after outages of its source.

    Returns when a run that was started here has ended, and its own Redis with it.
    """
    as_json = args.json
    in_place = console.can_redraw and not as_json
    with Live(console=console, auto_refresh=False, screen=True) if in_place else contextlib.nullcontext() as live:
        complaint = ""
        while True:
            try:
                status = await fetch()
            except Unavailable as err:
                if args.run_dir is not None and address_in(args.run_dir).own and not in_use(args.run_dir):
                    return
                if live is not None:
                    live.update(Text(str(err), "red"), refresh=True)
                elif str(err) != complaint:
                    print(f"atoll: {err}", file=sys.stderr, flush=True)
                complaint = str(err)
            else:
                complaint = ""
                if live is not None:
                    live.update(render(status), refresh=True)
                else:
                    _print(status, console, as_json=as_json)
            await asyncio.sleep(WATCH_EVERY_S)


def _health(status: Status, *, leader: float | None = None, broker: float | None = None) -> int:
    """Prints whether an aggregator leads the run, or a broker reports, in time; returns the exit code."""
    if leader is not None:
        why = leaderless(status, leader)
        leaders = ", ".join(sorted({each.leader for each in status.shards.values()}))
        oldest_s = max((each.age_s for each in status.shards.values()), default=0.0)
        well = f"run {status.run_id} is led by {leaders}, which renewed its lease {age(oldest_s)} ago"
    else:
        why = brokerless(status, broker or 0.0)
        well = f"run {status.run_id} has a broker, which wrote to Redis {age(status.broker_age_s or 0.0)} ago"
    print(f"atoll: {why}" if why else well, file=sys.stderr if why else sys.stdout)
    return 1 if why else 0


def _print(status: Status, console: Screen, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(to_json(status), allow_nan=False), flush=True)
    else:
        console.print(render(status))


# --- finished runs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a run's Redis, and the run's name in it.

    Attributes:
        own: Redis was started for this run, ended with it, and left a snapshot; otherwise it was there before.
    """

    url: str
    run_id: str
    own: bool


def address_in(run_dir: Path) -> Address:
    """Returns the address in a run directory.

    Raises:
        ConfigError: It is no run directory.
    """
    config = run_dir / "config.toml"
    if not config.is_file():
        cure = "must be the directory of a run of `up` or `hub`; any other run has an address: --redis or --broker"
        raise ConfigError("RUN_DIR", str(run_dir), cure)
    try:
        url, run_id = (run_dir / ADDRESS_FILE).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        run = sources.read_file(config).get("run", {})
        return Address(url=run.get("redis_url", DEFAULT_REDIS_URL), run_id=run.get("run_id", ""), own=False)
    return Address(url=url, run_id=run_id, own=True)


@contextlib.contextmanager
def served(run_dir: Path) -> Iterator[str]:
    """Serves a finished run's snapshot on loopback, and yields the address.

    Raises:
        Unavailable: There is no snapshot, or the server does not start.
    """
    snapshot = run_dir / SNAPSHOT
    if not snapshot.is_file():
        cure = (
            "is the run still starting, or was its Redis killed? report.json and aggregator-report.json may have more"
        )
        raise Unavailable(f"{run_dir} has no {SNAPSHOT}: {cure}", definite=True)
    with mapped("cannot make a temporary folder, for which TMPDIR may name a place", definite=True):
        folder = tempfile.TemporaryDirectory(prefix="atoll-status-")
    with folder as directory:
        shutil.copy(snapshot, directory)
        port = free_ports(1)
        found = server(port=port, directory=directory)
        with subprocess.Popen(tied(found.command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                if not wait_until_listening(port, alive=lambda: process.poll() is None):
                    raise Unavailable(f"Redis did not start on {snapshot}: is it damaged?", definite=True)
                yield found.url
            finally:
                process.kill()  # it has nothing to save
