"""A run in a process of its own: ``python -m ops.lab.worker JOB RESULT PROGRESS``.

Settings in, record out, both as JSON. On the way the third file gets a line for every point of the loss curve. A
process for each run costs two seconds, and no run can disturb another: not its memory, not its threads, not by
crashing.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import json
import math
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from broker.wire.errors import ConfigError
from broker.wire.messages import Reason
from islands.arrays.tree import flatten
from islands.config import LANGUAGE
from islands.tasks.corpus import MAX_TEXT_BYTES, PYTHON, files_of, holds_text, is_array
from islands.tasks.task import Params, Task, held_out_loss, load_task, task_function
from ops import cli
from ops.lab import decoupled, lockstep
from ops.lab.records import Outcome, Record, Stage
from ops.lab.settings import HOLDS_OUT, CellSettings, Mode, cell_settings, key_of, resolved

#: A loss so many times what it was before the first step, or early on if that was less, is of a run that went wrong.
FAR_ABOVE = 1.5


def main(arguments: list[str]) -> int:
    """Runs the job; 2 if its settings are wrong."""
    job: dict[str, Any] = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    try:
        record = run_cell(
            cell_settings(job["settings"]),
            job["seed"],
            experiment=job["experiment"],
            stage=Stage(job["stage"]),
            fields=job["fields"],
            watch=partial(note, Path(arguments[2])),
        )
    except ConfigError as err:
        print(err, file=sys.stderr)
        return 2
    Path(arguments[1]).write_text(record.to_json(), encoding="utf-8")
    return 0


# --- progress -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run has come: the points of its loss curve so far, those of the whole, and the loss at the latest."""

    points: int
    of: int
    loss: float


def note(path: Path, progress: Progress) -> None:
    """Adds a line. A full disk costs the line, and not a run of an hour."""
    with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(asdict(progress))}\n")


def latest(path: Path) -> Progress | None:
    """Returns what was noted last; None before the first point. A line that is not whole does not count."""
    try:
        lines = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
        return Progress(**json.loads(lines[-1])) if lines else None
    except (OSError, ValueError):
        return None


# --- the run --------------------------------------------------------------------------------------------------------


def run_cell(
    cell: CellSettings,
    seed: int,
    *,
    experiment: str = "",
    stage: Stage = Stage.FINAL,
    fields: Mapping[str, Any] | None = None,
    watch: Callable[[Progress], None] = lambda _: None,
) -> Record:
    """Trains one cell and returns the record of it.

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
    began_s, code = time.perf_counter(), code_digest()  # at the beginning: a checkout may be edited while this trains
    task = load_task(cell.task, _options(cell, cell.held_out_sequences))
    task_code, texts = digests_of_modules(sys.modules), digests_of_texts(cell)
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
        watch(Progress(points=points, of=cell.evaluations, loss=loss))
        return loss

    run = decoupled.run if cell.mode is Mode.DECOUPLED else lockstep.run
    outcome = run(task, cell, seed, judge)
    loss = _final_loss(task, outcome.params)
    # On the same sequences as the points before it: the loss of the record is of more.
    last = (float(outcome.tokens), round(outcome.virtual_s, 3), held_out_loss(quick, outcome.params))
    return Record(
        experiment=experiment,
        stage=stage,
        cell=dict(fields or {}),
        key=key_of(cell, seed),
        seed=seed,
        loss=loss,
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
        diverged=diverged(outcome, loss, begins_at),
        cosine=outcome.cosine,
        settings=resolved(cell) | {"seed": seed},
        code=code,
        task_code=digests_of_modules(sys.modules) | task_code | texts,  # and what was imported on the way
        corpus=task.corpus,
        build=_build(),
    )


def diverged(outcome: Outcome, loss: float, begins_at: float) -> bool:
    """Whether training went wrong.

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
    if known.keys() >= HOLDS_OUT and "held_out_tokens" not in options:
        context = options.get("context", known["context"].default)
        options["held_out_tokens"] = sequences * int(context)
    return options


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


# --- digests of sources and text ------------------------------------------------------------------------------------

_PACKAGES = [Path(__file__).resolve().parents[2] / name for name in ("broker", "islands", "aggregator", "ops")]
_STANDARD_LIBRARY = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
_INSTALLED = {"site-packages", "dist-packages"}
#: Of a file as large as this all bytes count; text is never larger.
WHOLE_BYTES = MAX_TEXT_BYTES


def code_digest() -> str:
    """Returns the version with a digest of our sources: what a checkout was when it made a record."""
    return f"{cli.version()} {digest_of(path for package in _PACKAGES for path in sorted(package.rglob('*.py')))}"


def digests_of_modules(modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """Returns module -> digest, of the user's own: neither ours nor installed."""
    paths = {name: Path(getattr(module, "__file__", None) or "") for name, module in list(modules.items())}
    return {name: digest_of([path]) for name, path in sorted(paths.items()) if is_own(path)}


def digests_of_texts(cell: CellSettings) -> dict[str, str]:
    """Returns ``data PATH`` -> digest, of the files and folders that our own task is to train on.

    Not of what Python brings: the corpus of a record tells of that. The run refuses what is not there, or is no list.
    Of files beyond :data:`WHOLE_BYTES`, which are arrays, both ends count and the size.
    """
    given = cell.options.get("data", ()) if cell.task == LANGUAGE else ()
    listed = [str(path) for path in given] if isinstance(given, list | tuple) else []
    own = sorted({path for path in listed if not path.startswith(PYTHON) and os.path.exists(path)})
    return {f"data {path}": _digest_of_text(Path(path)) for path in own}


def is_own(path: Path) -> bool:
    """Whether a source file is the user's own."""
    return path.suffix == ".py" and path.is_file() and not _is_installed(path) and not _is_installed(path.resolve())


def digest_of(files: Iterable[Path]) -> str:
    """Returns a short digest of the contents of files, in order."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _is_installed(path: Path) -> bool:
    inside = (*_PACKAGES, *_STANDARD_LIBRARY)
    return not _INSTALLED.isdisjoint(path.parts) or any(map(path.is_relative_to, inside))


def _digest_of_text(path: Path) -> str:
    digest = hashlib.sha256()
    with contextlib.suppress(OSError, ConfigError):  # the run says what cannot be read
        for file in files_of(path):
            with file.open("rb") as opened:
                content, size = opened.read(WHOLE_BYTES), os.fstat(opened.fileno()).st_size
                if size > WHOLE_BYTES:
                    opened.seek(max(WHOLE_BYTES, size - WHOLE_BYTES))
                    content += opened.read(WHOLE_BYTES)
            if is_array(file) or holds_text(content):  # what else is in a folder is nobody's
                digest.update(f"{file.relative_to(path)} {size} ".encode(errors="surrogateescape") + content)
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
