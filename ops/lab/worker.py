"""Carries out one run in a process of its own: ``python -m ops.lab.worker JOB RESULT``.

Settings in, record out, both as JSON. A process for each run costs two seconds, and no run can disturb another: not
its memory, not its threads, not by crashing.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from broker.base.errors import ConfigError
from broker.process.release import installed
from broker.wire.messages import Reason
from islands.tasks.task import Task, held_out_loss, load_task, task_function
from ops.lab import decoupled, lockstep
from ops.lab.records import Judge, Outcome, Record
from ops.plans.cell import CellSettings, Mode, cell_settings, key_of, resolved

#: A run diverged if its loss is this multiple of the loss before the first step, or of an early one if less.
FAR_ABOVE = 1.5
#: Sequences that judge the model on the way.
CURVE_SEQUENCES = 512


def main(arguments: list[str]) -> int:
    """Runs the job; returns 2 if its settings are wrong."""
    job: dict[str, Any] = json.loads(arguments[0])
    logging.disable(logging.WARNING)  # what each process of a run tells of itself
    try:
        record = run_cell(
            cell_settings(job["settings"]),
            job["seed"],
            experiment=job["experiment"],
            varied=job["cell"],
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
    train: Callable[[Task, CellSettings, int, Judge], Outcome] | None = None,
) -> Record:
    """Trains one cell and returns its record.

    The same cell and seed give the same loss to the last bit on the same build and kind of processor.

    Args:
        cell: The cell to run.
        seed: The seed of parameters, data order and virtual time.
        experiment: For the record.
        varied: The settings in which the cells of the experiment differ, for the record.
        train: Carries the run out, if not the cell's own mode does.

    Raises:
        ConfigError: The task cannot be loaded, or refuses an option.
    """
    began_s = time.perf_counter()
    task = load_task(cell.task, _options(cell, cell.held_out_sequences))
    quick = load_task(cell.task, _options(cell, CURVE_SEQUENCES))
    begins_at = held_out_loss(quick, quick.init(seed)[0])
    gc.collect()
    gc.freeze()  # loaded modules stay: the collector need not look through them again and again
    run = train or (decoupled.run if cell.mode is Mode.DECOUPLED else lockstep.run)
    outcome = run(task, cell, seed, partial(held_out_loss, quick))
    loss = held_out_loss(task, outcome.params)
    # On the same sequences as the points before it: the loss of the record is of more.
    last = (float(outcome.tokens), round(outcome.virtual_s, 3), held_out_loss(quick, outcome.params))
    return Record(
        experiment=experiment,
        cell=dict(varied or {}),
        key=key_of(cell, seed),
        seed=seed,
        loss=loss,
        tokens=outcome.tokens,
        virtual_s=round(outcome.virtual_s, 3),
        wall_s=round(time.perf_counter() - began_s, 2),
        cpu_s=round(time.process_time(), 2),
        curve=(*((float(p.tokens), round(p.virtual_s, 3), p.loss) for p in outcome.curve), last),
        diverged=diverged(outcome, loss, begins_at),
        settings=resolved(cell) | {"seed": seed},
        code=installed(),
        corpus=task.corpus,
    )


def diverged(outcome: Outcome, loss: float, begins_at: float) -> bool:
    """Returns whether training diverged.

    * The loss is not a number, or far above the loss of the untrained model, or above the first point of the curve if
      that is lower.
    * Or islands trained values that are not finite. The aggregator refuses them, so the model stays sound, but
      data-parallel training would have ended.
    """
    first = min([begins_at, *(point.loss for point in outcome.curve[:1])])
    return not math.isfinite(loss) or loss > FAR_ABOVE * first > 0 or outcome.wasted.get(str(Reason.NOT_FINITE), 0) > 0


def _options(cell: CellSettings, sequences: int) -> dict[str, Any]:
    """Returns the task's options, with the size of the held-out part if the task takes it."""
    options = dict(cell.options)
    known = inspect.signature(task_function(cell.task)).parameters
    if known.keys() >= {"context", "held_out_tokens"} and "held_out_tokens" not in options:
        context = options.get("context", known["context"].default)
        options["held_out_tokens"] = sequences * int(context)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
