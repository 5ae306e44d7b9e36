"""``evaluate``: prints a model's held-out metrics as JSON, or evaluates a run while it trains."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from broker.base import sources
from broker.base.errors import ConfigError, Unavailable
from broker.base.settings import from_flag
from broker.gateway.config import DEFAULT_REDIS_URL
from ops.processes.numeric import one_thread_environment

#: Of the follower: training goes first. With 10 or 19, beside two islands for each processor, it compiled for minutes.
NICE = 5
DEFAULT_EVERY = 1_000_000

_EPILOG = """
Following ends by itself after the last model of the run, or with Ctrl-C. The run never waits for it.
Each evaluation is a line of evaluations.jsonl in RUN_DIR, and the newest one is in the output of status.
For a store by itself, such as that of an aggregator that `up` did not start, name the task with --config."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``evaluate``."""
    sources.add_config_flag(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--follow", type=Path, metavar="RUN_DIR", help="run to follow: its directory, or a store")
    what.add_argument("--model", type=Path, metavar="FILE", help="safetensors file of the one model to evaluate")
    every_help = f"trained tokens between two evaluations, with --follow (default {DEFAULT_EVERY})"
    parser.add_argument("--every", metavar="TOKENS", help=every_help)
    parser.add_argument(
        "--benchmark",
        action="append",
        metavar="FUNCTION",
        help="also evaluate package.module:function, which takes the parameters and returns a number, or a mapping of"
        " names to numbers; may be given several times",
    )
    parser.epilog = f"{parser.epilog}\n{_EPILOG}"


def run(args: argparse.Namespace) -> int:
    """Evaluates one model, or follows a run; returns the exit code.

    Raises:
        ConfigError: The task, its options, a benchmark or the model do not fit together, or a path leads nowhere.
        Unavailable: The file of the curve cannot be written.
    """
    if args.follow is not None:
        return _follow(args)
    if args.every is not None:
        raise ConfigError("every", args.every, "goes with --follow RUN_DIR: leave it out, or name the run")
    return _evaluate_file(args)


def _evaluate_file(args: argparse.Namespace) -> int:
    """Prints the held-out metrics of a model, and the functions that failed, as JSON.

    The form: ``{"loss": nats per token, "metrics": {name: {"value": number, "better": "min"}}, "failed": {}}``. The
    loss is null where the task evaluates none; ``better`` is ``min``, ``max``, or empty where nobody says. A function
    that failed stands in ``failed`` with the reason, and on standard error.
    """
    from islands.tasks.benchmarks import judged, load_benchmarks
    from islands.tasks.evaluate import load_file_of
    from islands.tasks.task import LOSS

    tables = sources.read_file(args.config) if args.config is not None else {}
    benchmarks = load_benchmarks(args.benchmark or ())
    task = _task_of(args, tables)
    found = judged(task, load_file_of(task, args.model), benchmarks)
    for name, why in found.failed.items():
        print(f"atoll: {name} failed: {why}", file=sys.stderr)
    metrics = {name: {"value": value, "better": found.better.get(name, "")} for name, value in found.metrics.items()}
    print(json.dumps({"loss": found.metrics.get(LOSS), "metrics": metrics, "failed": dict(found.failed)}), flush=True)
    return 0


def _task_of(args: argparse.Namespace, tables: Mapping[str, Mapping[str, Any]]) -> Any:
    from islands.interface.config import IslandConfig
    from islands.tasks.task import load_task

    return load_task(sources.load(IslandConfig, args, "island").task, tables.get("task", {}))


# --- following ------------------------------------------------------------------------------------------------------


def _follow(args: argparse.Namespace) -> int:
    every = DEFAULT_EVERY if args.every is None else from_flag("every", args.every, int)
    if every < 1:
        raise ConfigError("every", every, "must be at least 1 token, such as 500K")
    own = args.follow / "config.toml"
    if own.is_file() and args.config is not None:
        raise ConfigError(
            "config", str(args.config), f"does not go with the directory of a run, which has {own}: leave it out"
        )
    args.config = own if own.is_file() else args.config
    # Before anything is imported that computes: training has the processors, and one of them at most is shared.
    os.environ.update(one_thread_environment())
    with contextlib.suppress(OSError):
        os.nice(max(0, NICE - os.nice(0)))

    from aggregator.interface.config import AggregatorConfig
    from islands.tasks.benchmarks import judged, load_benchmarks
    from islands.tasks.evaluate import place
    from ops.evaluation.curve_file import CurveFile
    from ops.evaluation.follower import FollowedRun, Follower

    config = sources.load(AggregatorConfig, args, "aggregator") if args.config is not None else AggregatorConfig()
    followed = FollowedRun(args.follow, target_tokens=config.total_tokens)
    if args.config is None:
        cure = "name the task: --config FILE with the table [task], as islands read it"
        raise ConfigError("config", None, f"is needed where RUN_DIR is a store by itself; {cure}")
    benchmarks = load_benchmarks(args.benchmark or ())
    file = CurveFile(args.follow)
    try:
        task = _task_of(args, sources.read_file(args.config))
        follower = Follower(
            followed,
            file,
            every=every,
            judge=lambda tensors, source: judged(task, place(task, tensors, source=source), benchmarks),
            publish=_publisher(_redis_of(args.follow, config.redis_url), followed.run_id),
            say=lambda line: print(line, flush=True),
        )
        follower.follow()
    except KeyboardInterrupt:
        print(f"atoll: ended; {len(file.points)} evaluations are in {file.path}", file=sys.stderr)
        raise
    finally:
        file.close()
    return 0


def _redis_of(directory: Path, configured: str) -> str:
    """Returns the address of the run's Redis: the one that was started for it, or the configured one."""
    from ops.inspect.status import address_in

    if (directory / "config.toml").is_file():
        kept = address_in(directory)
        if kept.own:
            return kept.url
    return configured or DEFAULT_REDIS_URL


def _publisher(url: str, run_id: Callable[[], str]) -> Callable[[Any], None]:
    """Returns what writes a point to Redis; that it cannot is said once, until it can again."""
    from broker.registry.registry import Registry

    lost = False

    async def write(point: Any) -> None:
        registry = Registry(url, run_id())
        async with contextlib.aclosing(registry):
            await registry.write_evaluation(point.to_json())

    def publish(point: Any) -> None:
        nonlocal lost
        if not run_id():  # a run that was not seeded yet
            return
        try:
            asyncio.run(write(point))
        except Unavailable as err:
            if not lost:
                print(f"atoll: {err}; evaluation goes on, status does not show it", file=sys.stderr, flush=True)
            lost = True
        else:
            lost = False

    return publish
