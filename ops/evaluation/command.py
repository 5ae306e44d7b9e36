"""``evaluate``: prints a model's held-out metrics as JSON, or evaluates a run while it trains."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.base import sources
from broker.base.errors import ConfigError, Unavailable
from broker.base.settings import from_flag
from broker.gateway.config import DEFAULT_REDIS_URL
from ops.asked_task import needs_torch
from ops.evaluation import harness
from ops.processes.numeric import one_thread_environment
from ops.story import curve

#: Of the follower: training goes first. With 10 or 19, beside two islands for each processor, it compiled for minutes.
NICE = 5
DEFAULT_EVERY = 1_000_000

_EPILOG = """
RUN_DIR alone: its newest model is evaluated once. Following ends by itself after the last model, or with Ctrl-C.
The run never waits for it. Each evaluation is a line of evaluations.jsonl there, and the newest one is in status.
For a store by itself, such as that of an aggregator that `up` did not start, name the task with --config.

A benchmark is one of:
  package.module:function    takes the parameters, and returns a number or a mapping of names to numbers
  lm_eval:TASKS[,LIMIT]      lm-evaluation-harness, of a model of Hugging Face: names, task files or a folder of them,
                             joined by +; LIMIT examples of each at most. Its first use builds .venv-lm-eval
  perplexity:FILE            of a language model of Hugging Face on held-out texts"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``evaluate``."""
    sources.add_config_flag(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("directory", nargs="?", type=Path, metavar="RUN_DIR", help="run whose newest model to evaluate")
    what.add_argument("--follow", type=Path, metavar="RUN_DIR", help="run to follow: its directory, or a store")
    what.add_argument("--model", type=Path, metavar="FILE", help="safetensors file of the one model to evaluate")
    every_help = f"trained tokens between two evaluations, with --follow (default {DEFAULT_EVERY})"
    parser.add_argument("--every", metavar="TOKENS", help=every_help)
    parser.add_argument(
        "--benchmark",
        action="append",
        metavar="BENCHMARK",
        help="also evaluate by this, see below; may be given several times",
    )
    parser.epilog = f"{parser.epilog}\n{_EPILOG}"


def run(args: argparse.Namespace) -> int:
    """Evaluates one model, once or again and again, or a file; returns the exit code.

    Raises:
        ConfigError: The task, its options, a benchmark or the model do not fit together, or a path leads nowhere.
        Unavailable: The file of the curve cannot be written.
    """
    for path in args.benchmark or ():
        harness.check(path)  # before anything is loaded
    if args.follow is None and args.every is not None:
        raise ConfigError("every", args.every, "goes with --follow RUN_DIR: leave it out, or name the run")
    return _evaluate_file(args) if args.model is not None else _evaluate_run(args, args.follow or args.directory)


def _evaluate_file(args: argparse.Namespace) -> int:
    """Prints the held-out metrics of a model, and the functions that failed, as JSON.

    The form: ``{"loss": nats per token, "metrics": {name: {"value": number, "better": "min"}}, "failed": {}}``. The
    loss is null where the task evaluates none; ``better`` is ``min``, ``max``, or empty where nobody says. A function
    that failed stands in ``failed`` with the reason, and on standard error.
    """
    from islands.tasks.benchmarks import judged
    from islands.tasks.evaluate import load_file_of
    from islands.tasks.task import LOSS

    with contextlib.ExitStack() as stack:
        task, benchmarks = _loaded(args, stack)
        found = judged(task, load_file_of(task, args.model), benchmarks)
    for name, why in found.failed.items():
        print(f"atoll: {name} failed: {why}", file=sys.stderr)
    metrics = {
        name: {"value": value, "better": found.better.get(name, "")}
        | ({"stderr": found.stderr[name]} if name in found.stderr else {})
        for name, value in found.metrics.items()
    }
    print(json.dumps({"loss": found.metrics.get(LOSS), "metrics": metrics, "failed": dict(found.failed)}), flush=True)
    return 0


def _loaded(args: argparse.Namespace, stack: contextlib.ExitStack) -> tuple[Any, tuple[Any, ...]]:
    """Returns the task and the benchmarks; a stack closes what they have opened.

    A task with PyTorch loads a model: it comes after what is looked for in benchmarks. Another one has no form for the
    harness, and is asked before an environment is built for nothing.
    """
    from islands.interface.config import IslandConfig
    from islands.tasks.benchmarks import Benchmark, load_benchmarks
    from islands.tasks.task import Task, load_task

    def load() -> Task:
        tables = sources.read_file(args.config) if args.config is not None else {}
        return load_task(sources.load(IslandConfig, args, "island").task, tables.get("task", {}))

    named = dict.fromkeys(path for path in args.benchmark or () if harness.check(path))
    benchmarks = load_benchmarks(path for path in args.benchmark or () if path not in named)
    task = None if needs_torch([os.fspath(args.config)]) else load()
    makers: dict[str, Callable[[Task], Callable[[Any], Any]]] = {}
    for path in named:
        if not path.startswith(f"{harness.LM_EVAL}:"):
            makers[path] = functools.partial(harness.by_task, path)
            continue
        if task is not None:
            harness.saver(path, task)
        makers[path] = stack.enter_context(contextlib.closing(harness.Harness(path))).judge
    task = task or load()
    return task, (*benchmarks, *(Benchmark(path=path, function=make(task)) for path, make in makers.items()))


# --- a run ----------------------------------------------------------------------------------------------------------


def _evaluate_run(args: argparse.Namespace, directory: Path) -> int:
    """Evaluates the newest model of a run, and with --follow the next ones."""
    every = DEFAULT_EVERY if args.every is None else from_flag("every", args.every, int)
    if every < 1:
        raise ConfigError("every", every, "must be at least 1 token, such as 500K")
    own = directory / "config.toml"
    if own.is_file() and args.config is not None:
        raise ConfigError(
            "config", str(args.config), f"does not go with the directory of a run, which has {own}: leave it out"
        )
    args.config = own if own.is_file() else args.config
    if args.follow is not None:
        # Before anything is imported that computes: training has the processors, and one of them at most is shared.
        os.environ.update(one_thread_environment())
        with contextlib.suppress(OSError):
            os.nice(max(0, NICE - os.nice(0)))

    from aggregator.interface.config import AggregatorConfig
    from islands.tasks.benchmarks import judged
    from islands.tasks.evaluate import place
    from ops.evaluation.curve_file import CurveFile
    from ops.evaluation.follower import FollowedRun, Follower

    config = sources.load(AggregatorConfig, args, "aggregator") if args.config is not None else AggregatorConfig()
    followed = FollowedRun(directory, target_tokens=config.total_tokens)
    if args.config is None:
        cure = "name the task: --config FILE with the table [task], as islands read it"
        raise ConfigError("config", None, f"is needed where RUN_DIR is a store by itself; {cure}")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(contextlib.closing(CurveFile(directory)))
        task, benchmarks = _loaded(args, stack)
        follower = Follower(
            followed,
            file,
            every=every,
            judge=lambda tensors, source: judged(task, place(task, tensors, source=source), benchmarks),
            publish=_publisher(_redis_of(directory, config.redis_url), followed.run_id),
            say=(lambda line: print(line, flush=True)) if args.follow is not None else (lambda line: None),
        )
        try:
            if args.follow is not None:
                follower.follow()
                return 0
            point = follower.once()
        except KeyboardInterrupt:
            print(f"atoll: ended; {len(file.points)} evaluations are in {file.path}", file=sys.stderr)
            raise
    print(f"at {point.tokens:,} tokens, fragment versions {' '.join(map(str, point.versions))}")
    rows = curve.table(point)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")
    for name, why in point.failed.items():
        print(f"atoll: {name} failed: {why}", file=sys.stderr)
    return 0


def _redis_of(directory: Path, configured: str) -> str:
    """Returns the address of the run's Redis: its own, empty once that is gone, or the configured one."""
    from ops import run_directory
    from ops.inspect.status import address_in

    if (directory / "config.toml").is_file():
        kept = address_in(directory)
        if kept.own:
            return kept.url if run_directory.in_use(directory) else ""
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
        if not url or not run_id():  # a run that has ended, or was not seeded yet
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
