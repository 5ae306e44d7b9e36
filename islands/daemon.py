"""The island daemon: trains a :class:`islands.tasks.task.Task` through :mod:`islands.loop` alone.

Exit codes: 0 the run has ended; 1 it failed, and may be started again; 2 settings are wrong, or the run refuses this
island: starting it again would not help; 128 + n ended by signal n, after saying goodbye.

Where JAX keeps what it compiles is JAX's own setting (``JAX_COMPILATION_CACHE_DIR``); nothing here imports JAX.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import islands
from broker.base import settings, sources
from broker.base.errors import ConfigError, RunEnded, cure_of
from broker.process import clocks, limits, logs
from broker.process.signals import Interrupted, Signals
from broker.transport.keys import JoinFile, client_keys
from broker.wire.identity import KeyRole
from islands.arrays.tree import devices_of
from islands.interface import arguments
from islands.interface.config import SETTINGS, IslandConfig, JoinOptions
from islands.joining import join_on
from islands.session.machine import THIS, Machine
from islands.session.pulse import Pulse
from islands.tasks.options import check_options
from islands.tasks.task import OptState, Params, Task, endless_batches, load_task, task_function

log = logs.get(__name__)

#: Between two log lines about progress.
SAY_EVERY_S = 5.0
#: A thousand steps in a second need not write to the file for health checks a thousand times.
MARK_EVERY_S = 1.0
#: Sleeping for the pace is cut into pieces, so that a signal is noticed.
LONGEST_NAP_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of ``atoll island``; options of the task stand in the table [task] of the file."""
    sources.add_config_flag(parser)
    sources.add_flags(parser, IslandConfig, defaults={"run_id": None})
    join_help = "file that the hub made for this island: run, broker and key (atoll keys new island NAME --join HOST)"
    parser.add_argument("--join", type=sources.as_path, metavar="FILE", help=join_help)
    check_help = "only check settings and key; exit status 0, or 2 with the cure"
    parser.add_argument("--check", action="store_true", help=check_help)


def run(args: argparse.Namespace) -> int:
    """Trains until the run ends or a signal comes, or with ``--check`` not at all; returns the exit code.

    Raises:
        ConfigError: A setting cannot work, or the run refuses this island.
        Unavailable: The run stayed silent.
    """
    if args.join is not None:
        _take(args)
    config = settings.build(IslandConfig, sources.of_a_run(IslandConfig, args, "island"))
    client_keys(config.key, KeyRole.ISLAND)  # before the seconds that it takes to load the task
    if args.check:
        print(f"settings and key are right for run {config.run_id} at {config.broker}")
        return 0
    logs.configure(config.island_id or "island")
    tables = sources.read_file(args.config) if args.config is not None else {}
    options = tables.get("task", {})
    # Each step frees its temporaries and allocates them again. Giving pages back takes milliseconds under the lock of
    # the allocator, which the training thread then waits for in the middle of a boundary: three quarters of one percent
    # of its time instead of one quarter, on two processors shared by four islands.
    limits.keep_freed()
    with Signals() as signals:
        try:
            with _ranks(config.task, options) as rank:
                if rank:  # the first one writes the files, which are the island's
                    config = replace(config, pulse=None, health=None)
                    logs.configure(f"{config.island_id or 'island'}.{rank}")
                train(config, load_task(config.task, options), recipe=tables.get("recipe", {}), check=signals.check)
        except Interrupted as err:
            log.info("island.ended", reason=str(err))
            return 128 + err.number
        except RunEnded as err:
            log.info("island.ended", reason=str(err))
    return 0


def _ranks(task: str, options: Mapping[str, Any]) -> contextlib.AbstractContextManager[int]:
    """Returns a context of this process's rank; of a task with the option ``ranks`` it starts the others."""
    signature = inspect.signature(task_function(task))
    if "ranks" not in signature.parameters:
        return contextlib.nullcontext(0)
    check_options(task, signature, options)
    count = arguments.whole("task.ranks", options.get("ranks", 0), "must be a number of processes; 0: one for each GPU")
    ranks: Any = importlib.import_module("islands.torch.ranks")  # such a task has loaded PyTorch by now
    return ranks.started(count)  # type: ignore[no-any-return]


def _take(args: argparse.Namespace) -> None:
    """Fills in what a join file says: run, broker and key.

    Raises:
        ConfigError: It is no join file, or a flag says otherwise.
    """
    file = JoinFile.read(args.join)
    for name, value in (("run_id", file.run_id), ("broker", file.broker), ("key", args.join)):
        if getattr(args, name, None) not in (None, value) and name != "broker":
            cure = f"does not go with {args.join}, which is for {value}: leave one of them out"
            raise ConfigError("run" if name == "run_id" else name, getattr(args, name), cure)
        setattr(args, name, getattr(args, name, None) or value)


def train(
    config: IslandConfig,
    task: Task,
    *,
    recipe: Mapping[str, Any] | None = None,
    check: Callable[[], None] = lambda: None,
    machine: Machine = THIS,
) -> Params:
    """Trains a task as one island of a run, from joining to the end; returns the run's final parameters.

    Args:
        config: Resolved settings.
        task: What to train.
        recipe: What of the run's recipe this island insists on: the table ``[recipe]`` of its file.
        check: Called often; what it raises ends the training, and the island leaves.
        machine: That it runs on.

    Raises:
        ConfigError: The run refuses this island.
        Unavailable: The run stayed silent.
    """
    log.info("island.starts", task=config.task, model=task.describe, broker=config.broker, run=config.run_id)
    params, opt_state = task.init(0)
    log.info("island.devices", devices=devices_of(params))
    pulse = None if config.pulse is None else Pulse(config.pulse)
    health = None if config.health is None else _Health(config.health)
    check()
    given = {name: SETTINGS.get(name, name) for name in JoinOptions.__annotations__}
    options = {name: getattr(config, setting) for name, setting in given.items() if hasattr(config, setting)}
    of_task = "kinds", "unit_axes", "tokens_per_step", "inner_optimizer", "inputs", "files"
    options |= {name: getattr(task, name) for name in of_task}
    options |= {"recipe": recipe, "check": check}
    init = config.init or (lambda seed: task.init(seed)[0])
    with join_on(machine, config.broker, params, init=init, **options) as island:
        params, opt_state = island.restore(params, opt_state)
        if machine is THIS:
            gc.freeze()  # what is loaded by now stays: looking through it again and again took 10 ms each time
        pace = Pace(config.pace, check, machine)
        return _loop(island, task, params, opt_state, pace, pulse, health)


def _loop(
    island: islands.Island,
    task: Task,
    params: Params,
    opt_state: OptState,
    pace: Pace,
    pulse: Pulse | None,
    health: _Health | None,
) -> Params:
    progress, previous = _Progress(island), None
    for batch in endless_batches(task, island.share):
        pace.begin()
        params, opt_state, loss = task.train(params, opt_state, batch, island.schedule)
        # One step in flight keeps a device busy; more would only make what is copied older.
        _wait_for(previous)
        previous = loss
        params = island.step(params, tokens=task.tokens_per_step, loss=loss, state=(opt_state, island.inner_step + 1))
        if pulse is not None:
            pulse.beat()
        if health is not None:
            health.step(island.heard_ago_s)
        if island.reset_optimizer:
            log.warning("island.optimizer_reset", step=island.inner_step, reason="parameters were not finite")
            opt_state = task.fresh_optimizer(params)
        if island.done:
            break
        progress.say(loss)
        try:
            pace.end()
        except Interrupted as err:  # the next process of this island goes on from here
            island.pause(params, (opt_state, island.inner_step), reason=str(err))
            raise
    progress.say(previous, now=True)
    return island.close(params)


def _wait_for(loss: Any) -> None:
    if hasattr(loss, "block_until_ready"):
        loss.block_until_ready()


class Pace:
    """Makes each step take a while at least, and looks for signals meanwhile.

    Args:
        step_s: How long a step takes at least.
        check: Raises where training is to end.
        machine: That sleeps.
    """

    def __init__(self, step_s: float, check: Callable[[], None], machine: Machine) -> None:
        self._step_s, self._check, self._machine = step_s, check, machine

    def begin(self) -> None:
        """Notes the beginning of a step."""
        self._began_s = clocks.monotonic()

    def end(self) -> None:
        """Sleeps for the rest of the step; a clock that stands still makes it no longer."""
        self._check()
        left_s = self._step_s - max(0.0, clocks.monotonic() - self._began_s)
        while left_s > 0:
            nap_s = min(left_s, LONGEST_NAP_S)
            self._machine.sleep(nap_s)
            self._check()
            left_s -= nap_s


class _Progress:
    """Says in the log how far the island is, every few seconds."""

    def __init__(self, island: islands.Island) -> None:
        self._island, self._said_at_s, self._tokens = island, clocks.monotonic(), island.tokens

    def say(self, loss: Any, *, now: bool = False) -> None:
        """Says it, if it is time; reads the loss, and so waits for a device, only then."""
        now_s, island = clocks.monotonic(), self._island
        passed_s = now_s - self._said_at_s
        if loss is None or not (now or passed_s >= SAY_EVERY_S):
            return
        log.info(
            "island.progress",
            step=island.inner_step,
            loss=round(float(loss), 4),
            tokens=island.tokens,
            tokens_per_s=round((island.tokens - self._tokens) / max(passed_s, 1e-3)),
            sync_share=round(island.sync_share, 5),
            versions=island.versions,
        )
        self._said_at_s, self._tokens = now_s, island.tokens


class _Health:
    """The file for health checks; its modification time is the broker's last word before the latest step.

    It grows old while training stands still, and while the broker is out of reach. It is 0 before a step.

    Raises:
        ConfigError: It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._marked_at_s = -math.inf
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.utime(path, (0, 0))
        except OSError as err:
            raise ConfigError("health", str(path), f"cannot be written ({err.strerror}): {cure_of(err)}") from err

    def step(self, heard_ago_s: float | None) -> None:
        """Takes note of a step, and of when anything last came from the broker before it; None if nothing has."""
        now_s = clocks.monotonic()
        if heard_ago_s is None or now_s < self._marked_at_s + MARK_EVERY_S:
            return
        self._marked_at_s = now_s
        heard_at_s = clocks.wall() - heard_ago_s
        with contextlib.suppress(OSError):  # somebody removed it: the check fails, and training goes on
            os.utime(self._path, (heard_at_s, heard_at_s))
