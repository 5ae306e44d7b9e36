"""``atoll log``: sends figures and traces of a run, live or ended, to the tools that people have."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from broker.base.errors import ConfigError, Unavailable
from broker.process import logs, user_files
from broker.process.signals import Interrupted, Signals
from broker.registry.registry import Registry
from ops.inspect.tapes import tapes_in
from ops.sinks.follower import Follower
from ops.sinks.sink import Identity, Sink
from ops.sinks.sources import DirectorySource, RedisSource, Source, key_of, run_id_of
from ops.sinks.target import HELP, Kind, Target, check_installed, target_of

log = logs.get(__name__)

EVERY_S = 10.0
#: Of this process: training goes first.
NICE = 5
#: For a run that has not begun, started beside us.
BEGINS_WITHIN_S, LOOK_EVERY_S = 600.0, 0.5

_EPILOG = """
It ends by itself after the last point of the run, or with Ctrl-C. Killed and started again it leaves no point out and
writes none twice: it asks the library what it has. The run never waits for it.
The axis is tokens trained. Points are fleet/.., islands/NAME/.. and evaluation/..; one run in the library for one run.
With --redis there are points from now on only, and of the islands that Redis knows.
otlp:URL gets a trace of each round instead, with contributions, merge, write, publication and adoption.
Each library is a package of its own: tensorboard, wandb, mlflow-skinny, opentelemetry-exporter-otlp-proto-http."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``atoll log``."""
    directory_help = "directory of a run, live or ended: of `up`, or wherever an aggregator writes its events.jsonl"
    parser.add_argument("run_dir", metavar="RUN_DIR", nargs="?", type=Path, help=directory_help)
    parser.add_argument("--to", metavar="TARGET", required=True, help=HELP)
    parser.add_argument("--redis", metavar="URL", help="address of Redis, for a run that has no directory here")
    parser.add_argument("--run", metavar="TEXT", default="", help="name of the run (default: written to last)")
    every_help = f"seconds of the run between two points (default: {EVERY_S:g})"
    parser.add_argument("--every", metavar="SECONDS", type=float, default=EVERY_S, help=every_help)
    parser.epilog = f"{parser.epilog}\n{_EPILOG}"


def run(args: argparse.Namespace) -> int:
    """Follows a run until it has ended; returns the exit code.

    Raises:
        ConfigError: There is no such run, the target is none, its library is missing, or another process does the same.
        Unavailable: Redis does not answer at the start, or the library took nothing when the run had ended.
    """
    target = target_of(args.to, field="to")
    check_installed(target, field="to")
    if not 0 < args.every < math.inf:
        raise ConfigError("every", args.every, "must be a number of seconds above 0")
    if (args.run_dir is None) == (args.redis is None):
        raise ConfigError(
            "RUN_DIR", str(args.run_dir or ""), "name the directory of a run, or --redis URL: one of them"
        )
    if args.run_dir is not None and not args.run_dir.is_dir():
        cure = "must be the directory of a run of `up` or `hub`; any other run has an address: --redis"
        raise ConfigError("RUN_DIR", str(args.run_dir), cure)
    if target.kind is Kind.OTLP and args.run_dir is None:
        raise ConfigError("to", str(target), "needs the directory of the run: rounds are read from its event tape")
    with Signals() as signals:
        try:
            identity, open_source = _followed(args, target.kind, signals.check)
            held = claim(target, identity)
            logs.configure("log")
            with suppress(OSError):
                os.nice(max(0, NICE - os.nice(0)))
            follower = Follower(
                target, open_sink=lambda: open_sink(target, identity), open_source=open_source, check=signals.check
            )
            log.info("log.begins", run=identity.group, to=str(target), as_=identity.key)
            follower.follow()
            log.info("log.ended", rows=follower.written)
        except Interrupted as err:
            log.info("log.ended", reason=str(err))
            return 128 + err.number
    if held is not None:
        os.close(held)
    return 0


def open_sink(target: Target, identity: Identity) -> Sink:
    """Opens a run in a library, which is imported here; raises whatever that raises."""
    match target.kind:
        case Kind.TENSORBOARD:
            from ops.sinks.tensorboard import TensorBoardSink

            return TensorBoardSink(Path(target.place), identity)
        case Kind.WANDB:
            from ops.sinks.wandb import WandbSink

            return WandbSink(target.place, identity)
        case Kind.MLFLOW:
            from ops.sinks.mlflow import MlflowSink

            return MlflowSink(target.place, identity)
        case Kind.OTLP:
            from ops.sinks.traces import TraceSink

            return TraceSink(target.place, identity)


def _followed(args: argparse.Namespace, kind: Kind, check: Callable[[], None]) -> tuple[Identity, Callable[[], Source]]:
    """Returns the run's identity in the library, and the function that makes its source of rows."""
    if args.run_dir is None:
        run_id = args.run or asyncio.run(_newest_run(args.redis))
        identity = Identity(key=run_id, name=run_id, group=run_id, folder=Path().absolute())
        return identity, lambda: RedisSource(args.redis, run_id, args.every)
    run_dir: Path = args.run_dir.absolute()
    run_id = args.run or run_id_of(run_dir)
    key = _key(run_dir, run_id, check)
    identity = Identity(key=key, name=run_id, group=run_id, folder=run_dir)
    if kind is not Kind.OTLP:
        return identity, lambda: DirectorySource(run_dir, args.every)
    from ops.sinks.traces import RoundsSource

    return identity, lambda: RoundsSource(run_dir)


def _key(run_dir: Path, run_id: str, check: Callable[[], None]) -> str:
    """Returns the run's key; waits for its tape if the run is beginning.

    Raises:
        ConfigError: There is no run, nor anybody who begins one.
        Unavailable: It has not begun in time.
    """
    if not tapes_in(run_dir) and not (run_dir / "config.toml").is_file():
        raise ConfigError("RUN_DIR", str(run_dir), "has no event tape (events.jsonl): name the directory of a run")
    ends_at_s = time.monotonic() + BEGINS_WITHIN_S
    while True:
        check()
        try:
            return key_of(run_dir, run_id)
        except Unavailable:
            if time.monotonic() > ends_at_s:
                raise
            time.sleep(LOOK_EVERY_S)


async def _newest_run(url: str) -> str:
    registry = Registry(url, "any")
    try:
        runs = await registry.known_runs()
    finally:
        await registry.aclose()
    if not runs:
        raise Unavailable(
            f"Redis at {registry.address} knows no run: name it with --run once it has begun", definite=True
        )
    return runs[0]


def claim(target: Target, identity: Identity) -> int | None:
    """Locks this run in this target against other processes of this user on this machine.

    Raises:
        ConfigError: Another process has it: together they would write everything twice.
    """
    digest = hashlib.sha256(f"{target} {identity.key}".encode()).hexdigest()[:16]
    try:
        return user_files.lock(f"log-{digest}")
    except BlockingIOError:
        cure = f"another process writes run {identity.group} there already: end that one first, or let it go on"
        raise ConfigError("to", str(target), cure) from None
