"""A run in a process of its own: ``python -m ops.lab.worker JOB RESULT``.

Settings in, record out, both as JSON. It prints a line for every point of the loss curve. A process for each run costs
two seconds, and no run can disturb another: not its memory, not its threads, not by crashing.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from broker.process.release import installed
from broker.wire.errors import ConfigError
from broker.wire.messages import Reason
from islands.config import LANGUAGE
from islands.tasks.task import Params, Task, held_out_loss, load_task, task_function
from ops.lab import decoupled, lockstep
from ops.lab.records import Outcome, Record
from ops.lab.schedule import sources_of
from ops.lab.settings import CellSettings, Mode, cell_settings, key_of, resolved

#: A loss so many times what it was before the first step, or early on if that was less, is of a run that went wrong.
FAR_ABOVE = 1.5

_PACKAGES = [Path(__file__).resolve().parents[2] / name for name in ("broker", "islands", "aggregator", "ops")]


def main(arguments: list[str]) -> int:
    """Runs the job; 2 if its settings are wrong."""
    job: dict[str, Any] = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    try:
        record = run_cell(
            cell_settings(job["settings"]),
            job["seed"],
            experiment=job["experiment"],
            varied=job["cell"],
            say=lambda line: print(line, flush=True),
        )
    except ConfigError as err:
        print(err, file=sys.stderr)
        return 2
    Path(arguments[1]).write_text(record.to_json(), encoding="utf-8")
    return 0


def run_cell(
    cell: CellSettings,
    seed: int,
    *,
    experiment: str = "",
    varied: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Record:
    """Trains one cell and returns the record of it.

    The same cell and seed give the same loss to the last bit on the same build and kind of processor.

    Args:
        cell: What to run.
        seed: Of parameters, data order and virtual time.
        experiment: For the record.
        varied: The settings in which the cells of the experiment differ, for the record.
        say: Told at every point of the loss curve but the last how far the run has come.

    Raises:
        ConfigError: The task cannot be loaded, or refuses an option.
    """
    began_s = time.perf_counter()
    code, key = code_digest(), key_of(cell, seed, sources_of(cell))  # now: sources may be edited while this trains
    task = load_task(cell.task, _options(cell, cell.held_out_sequences))
    quick = load_task(cell.task, _options(cell, cell.curve_sequences))
    if cell.task != LANGUAGE:  # whether a task of the user's own can be judged is not found out at the end
        _final_loss(quick, quick.init(seed)[0])
    begins_at = held_out_loss(quick, quick.init(seed)[0])
    gc.collect()
    gc.freeze()  # what is loaded by now stays: there is no need to look through it again and again
    points = 0

    def judge(params: Params) -> float:
        nonlocal points
        points += 1
        loss = held_out_loss(quick, params)
        say(f"{points / cell.evaluations:.0%}, loss {loss:.4f} so far")
        return loss

    run = decoupled.run if cell.mode is Mode.DECOUPLED else lockstep.run
    outcome = run(task, cell, seed, judge)
    loss = _final_loss(task, outcome.params)
    # On the same sequences as the points before it: the loss of the record is of more.
    last = (float(outcome.tokens), round(outcome.virtual_s, 3), held_out_loss(quick, outcome.params))
    return Record(
        experiment=experiment,
        cell=dict(varied or {}),
        key=key,
        seed=seed,
        loss=loss,
        tokens=outcome.tokens,
        merged_tokens=outcome.merged_tokens,
        virtual_s=round(outcome.virtual_s, 3),
        wall_s=round(time.perf_counter() - began_s, 2),
        cpu_s=round(time.process_time(), 2),
        rounds=outcome.rounds,
        curve=(*((float(p.tokens), round(p.virtual_s, 3), p.loss) for p in outcome.curve), last),
        participation=outcome.participation,
        wasted=outcome.wasted,
        diverged=diverged(outcome, loss, begins_at),
        settings=resolved(cell) | {"seed": seed},
        code=code,
        corpus=task.corpus,
        build=_build(),
    )


def diverged(outcome: Outcome, loss: float, begins_at: float) -> bool:
    """Says whether training went wrong.

    * The loss is not a number, or far above the loss of the untrained model, or above the first point of the curve if
      that is lower.
    * Or islands trained what is not finite. The aggregator refuses it, so the model stays sound, but data-parallel
      training would have ended.
    """
    first = min([begins_at, *(point.loss for point in outcome.curve[:1])])
    return not math.isfinite(loss) or loss > FAR_ABOVE * first > 0 or outcome.wasted.get(str(Reason.NOT_FINITE), 0) > 0


def _final_loss(task: Task, params: Params) -> float:
    """Returns the held-out loss: the mean over single sequences where the task tells them apart."""
    if task.losses is None:
        return held_out_loss(task, params)
    losses = np.asarray(task.losses(params), np.float64)
    if losses.ndim != 1 or not losses.size:
        raise ConfigError("task.losses", losses.shape, "returned this shape: it must be one loss for each sequence")
    return float(losses.mean())


def _options(cell: CellSettings, sequences: int) -> dict[str, Any]:
    """Returns the task's options; a task that can be told how much to hold out is."""
    options = dict(cell.options)
    known = inspect.signature(task_function(cell.task)).parameters
    if known.keys() >= {"context", "held_out_tokens"} and "held_out_tokens" not in options:
        context = options.get("context", known["context"].default)
        options["held_out_tokens"] = sequences * int(context)
    return options


def _build() -> dict[str, str]:
    """Returns what the last bits of a sum depend on, as far as it can be told."""
    import jax

    lines = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return {
        **{name: version(name) for name in ("jax", "jaxlib", "numpy")},
        "backend": jax.default_backend(),
        "processor": ", ".join([platform.machine(), *sorted(models)]),
    }


def code_digest() -> str:
    """Returns the version with a digest of our sources: what a checkout was when it made a record."""
    digest = hashlib.sha256()
    for path in (path for package in _PACKAGES for path in sorted(package.rglob("*.py"))):
        digest.update(path.read_bytes())
    return f"{installed()} {digest.hexdigest()[:12]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
