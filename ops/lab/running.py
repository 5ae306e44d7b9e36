"""Runs one cell of an experiment with one seed, in this process: from settings to a record."""

from __future__ import annotations

import gc
import inspect
import math
import platform
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.wire.errors import ConfigError
from broker.wire.messages import Reason
from islands.arrays.tree import flatten
from islands.config import LANGUAGE
from islands.tasks.task import Params, Task, held_out_loss, load_task, task_function
from ops.lab import decoupled, lockstep, sources
from ops.lab.outcome import Outcome
from ops.lab.progress import Progress
from ops.lab.records import Record, Stage
from ops.lab.settings import HOLDS_OUT, CellSettings, Mode, key_of, resolved

#: A loss so many times what it was before the first step, or early on if that was less, is of a run that went wrong.
FAR_ABOVE = 1.5

#: Blocks of neighbouring held-out sequences whose losses a record keeps. Which of them count as independent, who reads
#: them decides: a long file is several blocks.
BLOCKS = 32


def run_cell(
    cell: CellSettings,
    seed: int,
    *,
    experiment: str = "",
    stage: Stage = Stage.FINAL,
    fields: Mapping[str, Any] | None = None,
    watch: Callable[[Progress], None] = lambda _: None,
) -> Record:
    """Trains one cell and returns what is to be remembered of it.

    The same cell and seed give the same loss to the last bit on the same build and kind of processor.

    Args:
        cell: What to run.
        seed: Of parameters, data order and virtual time.
        experiment: For the record.
        stage: For the record.
        fields: The settings in which the cells of the experiment differ, for the record.
        watch: Called at every point of the loss curve but the last.

    Raises:
        ConfigError: The task cannot be loaded, or refuses an option.
    """
    began_s, code = time.perf_counter(), sources.code()  # at the beginning: a checkout may be edited while this trains
    task = load_task(cell.task, _options(cell, cell.held_out_sequences))
    task_code, texts = sources.of_modules(sys.modules), sources.of_texts(cell)
    quick = load_task(cell.task, _options(cell, cell.curve_sequences))
    if cell.task != LANGUAGE:  # whether a task of somebody's own can be judged is not found out at the end
        _judged(quick, quick.init(seed)[0])
    begins_at = held_out_loss(quick, quick.init(seed)[0])
    gc.collect()
    gc.freeze()  # what is loaded by now stays: there is no need to look through it again and again
    points = 0

    def judge(params: Params) -> float:
        nonlocal points
        points += 1
        loss = held_out_loss(quick, params)
        watch(Progress(points=points, of=cell.evaluations, loss=loss))
        return loss

    outcome = (
        decoupled.run(task, cell, seed, judge, _together(task.init(seed)[0]))
        if cell.mode is Mode.DECOUPLED
        else lockstep.run(task, cell, seed, judge)
    )
    loss, losses = _judged(task, outcome.params)
    # On the same sequences as the points before it: the loss of the record is of more.
    last = (float(outcome.tokens), round(outcome.virtual_s, 3), held_out_loss(quick, outcome.params))
    return Record(
        experiment=experiment,
        stage=stage,
        cell=dict(fields or {}),
        key=key_of(cell, seed),
        seed=seed,
        loss=loss,
        loss_se=float(losses.std(ddof=1) / math.sqrt(len(losses))) if len(losses) > 1 else 0.0,
        sequences=len(losses),
        blocks=_blocks(losses),
        bytes_per_token=task.bytes_per_token,
        tokens=outcome.tokens,
        merged_tokens=outcome.merged_tokens,
        virtual_s=round(outcome.virtual_s, 3),
        wall_s=round(time.perf_counter() - began_s, 2),
        cpu_s=round(time.process_time(), 2),
        train_s=round(outcome.train_s, 2),
        rounds=outcome.rounds,
        parameters=sum(int(np.asarray(leaf).size) for leaf in flatten(outcome.params).values()),
        curve=(*((float(p.tokens), round(p.virtual_s, 3), p.loss) for p in outcome.curve), last),
        participation=outcome.participation,
        staleness=outcome.staleness,
        wasted=outcome.wasted,
        staleness_histogram=tuple((lag, float(count)) for lag, count in outcome.staleness_histogram),
        gantt=tuple((round(a, 3), round(b, 3), round(c, 3), float(p), float(n)) for a, b, c, p, n in outcome.gantt),
        diverged=diverged(outcome, loss, begins_at),
        cosine=outcome.cosine,
        autocorrelation=outcome.autocorrelation,
        settings=resolved(cell) | {"seed": seed},
        code=code,
        task_code=sources.of_modules(sys.modules) | task_code | texts,  # and what was imported on the way
        corpus=task.corpus,
        build=_build(),
    )


def diverged(outcome: Outcome, loss: float, begins_at: float) -> bool:
    """Whether training went wrong: the loss is not a number, or far above where it began.

    A run that blew up at once may end below the first point of its curve, and there may be no such point: so it began
    with the loss of its untrained model, or with that point if it is lower.

    Or islands trained what is not finite: it is refused, so the model stays sound, but the same in data-parallel
    training would have ended it.
    """
    first = min([begins_at, *(point.loss for point in outcome.curve[:1])])
    return not math.isfinite(loss) or loss > FAR_ABOVE * first > 0 or outcome.wasted.get(str(Reason.NOT_FINITE), 0) > 0


def _judged(task: Task, params: Params) -> tuple[float, npt.NDArray[np.float64]]:
    """Returns the held-out loss, and those of single sequences; none of these if the task does not tell."""
    if task.losses is None:
        return held_out_loss(task, params), np.empty(0)
    losses = np.asarray(task.losses(params), np.float64)
    if losses.ndim != 1 or not losses.size:
        raise ConfigError("task.losses", losses.shape, "returned this shape: it must be one loss for each sequence")
    return float(losses.mean()), losses


def _blocks(losses: npt.NDArray[np.float64]) -> tuple[float, ...]:
    """Returns the mean losses of ``BLOCKS`` runs of neighbouring sequences; none if they are too few, or no numbers."""
    if len(losses) < 2 * BLOCKS or not np.isfinite(losses).all():
        return ()
    return tuple(round(float(block.mean()), 6) for block in np.array_split(losses, BLOCKS))


def _options(cell: CellSettings, sequences: int) -> dict[str, Any]:
    """Returns the task's options; a task that can be told how much to hold out is."""
    options = dict(cell.options)
    known = inspect.signature(task_function(cell.task)).parameters
    if known.keys() >= HOLDS_OUT and "held_out_tokens" not in options:
        context = options.get("context", known["context"].default)
        options["held_out_tokens"] = sequences * int(context)
    return options


def _together(params: Params) -> int:
    """Returns how many islands step as one: batched products are 1.6 times slower on a CPU, and win elsewhere."""
    import jax

    on_device = all(isinstance(leaf, jax.Array) for leaf in flatten(params).values())
    return 64 if on_device and jax.default_backend() != "cpu" else 1


def _build() -> dict[str, str]:
    import jax

    return {
        **{name: version(name) for name in ("jax", "jaxlib", "numpy")},
        "backend": jax.default_backend(),
        "processor": _processor(),
    }


def _processor() -> str:
    """Returns the model where the kernel tells it: what the last bits of a sum depend on besides the build."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return ", ".join([platform.machine(), *sorted(models)])
