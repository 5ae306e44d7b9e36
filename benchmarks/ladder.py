"""Trains models of growing size on one device, data-parallel and as islands: do gaps shrink as the law says?

The law is that of "Scaling laws for DiLoCo" (arXiv 2503.09799): loss = A N^alpha for each way to train. Quotients of
it are gaps to data-parallel training: 1.0353 N^-0.0016 - 1 for two islands, 1.0901 N^-0.0039 - 1 for four. As there,
all modes see 20 tokens for each parameter, and b2 of AdamW is 0.99. A step has the same tokens in all modes, and each
of M islands has one M-th of them. So all take the same number of steps, and one data-parallel run is the baseline of
all. (The authors chose a batch for each mode.)

Each finished run is a record of the laboratory in a folder, and a second call goes on with what is missing: first
seeds and small sizes first. A run that would not end within --minutes, by the steps of others, is not begun; one whose
own first steps say so is dropped. Islands sync all at once, by the aggregator's merge and outer step. The text is the
language task's own, which larger models read many times ("epochs" in the table): name more of it with --data.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
from scipy import stats

from benchmarks import output, side_by_side
from benchmarks.output import Column, Printer, Row
from broker.base.errors import ConfigError
from islands.tasks.corpus import load_corpus
from islands.tasks.model import shape_of
from ops.lab import records
from ops.lab.records import Record
from ops.lab.schedule import Run, current, due
from ops.lab.statistics import ONE_SIDED, findings
from ops.lab.worker import run_cell
from ops.plans.cell import Mode, resolved
from ops.plans.experiment import Comparison, Experiment, Kind, label
from ops.plans.scaling import LAW, law_gap
from ops.processes.numeric import compilation_cache
from ops.text import finite

NAME = "ladder"
#: Tokens in a step as the law has them for data-parallel training: 61,000 at 35 M, growing with this power of the size.
BATCH_TOKENS, BATCH_POWER = 61_000 / 35e6**0.286, 0.286
CONTEXT, SYNC_INTERVAL = 256, 24
#: The peak at a width of 256, carried to others in inverse proportion.
RATE = 0.002
SEEDS = 5  #: as far as the time lasts
SAY_EVERY_S = 5.0


class TooLong(Exception):
    """By its first steps a run does not end in time."""


# --- what is run ----------------------------------------------------------------------------------------------------


def experiment_of(args: argparse.Namespace, vocabulary: int) -> Experiment:
    """Returns the experiment: a cell for each size and way to train, and a claim for each number of islands."""
    grids = []
    for size in sorted(args.sizes):
        model = model_of(args.scale * size, vocabulary)
        # At any scale a step has the same number of windows; these become shorter, and steps fewer.
        context = max(8, round(CONTEXT * math.sqrt(args.scale)))
        windows = max(1, round(BATCH_TOKENS * size**BATCH_POWER / CONTEXT / 32)) * 32
        tokens = args.tokens * parameters_of(model, vocabulary)
        steps = max(1, round(tokens / (windows * context * SYNC_INTERVAL))) * SYNC_INTERVAL
        of_size = {
            "steps": steps,
            "task.model": model,
            "task.context": context,
            "task.learning_rate": RATE * 256 / shape_of(model)["width"],
            "task.warm_up_steps": min(1000, steps // 10),
        }
        for islands in (0, *args.islands):
            mode, count = (Mode.DILOCO, islands) if islands else (Mode.DATA_PARALLEL, 1)
            cell = of_size | {"mode": str(mode), "islands": count, "task.batch": windows // count}
            grids.append({name: (value,) for name, value in cell.items()})
    claims = [
        Comparison(
            claim=f"{islands} islands come to the loss of data-parallel training",
            candidate={"mode": str(Mode.DILOCO), "islands": islands},
            baseline={"mode": str(Mode.DATA_PARALLEL), "islands": 1},
            ignore=("task.batch",),
            kind=Kind.NOT_WORSE,
        )
        for islands in args.islands
    ]
    base: dict[str, Any] = {
        "fragments": 1,
        "sync_interval": SYNC_INTERVAL,
        "task.b2": 0.99,
        "task.ramp_steps": 0,
        "task.compute": "float32" if jax.default_backend() == "cpu" else "bfloat16",
        "task.vocabulary": vocabulary,
        "task.data": list(args.data),
    }
    return Experiment(
        question="Do gaps to data-parallel training shrink with size as the law says?",
        name=NAME,
        path=Path(__file__),
        seeds=args.seeds,
        base=base,
        grids=tuple(grids),
        comparisons=tuple(claims),
    )


def model_of(parameters: float, vocabulary: int) -> str:
    """Returns width and depth of a model of about this size, about 64 times as wide as deep, such as ``256x6``."""

    def flaw(model: str) -> float:
        shape = shape_of(model)
        away = abs(math.log(parameters_of(model, vocabulary) / parameters))
        return away + 0.1 * abs(math.log(shape["width"] / shape["depth"] / 64))

    widths = (*range(8, 128, 8), *range(128, 4096, 64))
    return min((f"{width}x{depth}" for width in widths for depth in range(2, 33)), key=flaw)


def parameters_of(model: str, vocabulary: int) -> int:
    """Returns the number of parameters of such a model, embeddings included."""
    shape = shape_of(model)
    width, depth = shape["width"], shape["depth"]
    return width * (vocabulary + 1) + depth * width * (4 * width + 3 * shape["hidden"] + 2)


def size_of(settings: Mapping[str, Any]) -> int:
    """Returns the number of parameters of the model in resolved settings."""
    return parameters_of(settings["task.model"], settings["task.vocabulary"])


def tokens_of(settings: Mapping[str, Any]) -> int:
    """Returns the tokens that a run with these resolved settings trains."""
    return int(settings["steps"] * settings["islands"] * settings["task.batch"] * settings["task.context"])


# --- runs -----------------------------------------------------------------------------------------------------------


def train_missing(experiment: Experiment, folder: Path, printer: Printer, ends_s: float) -> None:
    """Trains what has no record yet and fits until ``ends_s`` of the monotonic clock; each record is kept at once."""
    left_out = 0
    for run in due(experiment, records.read(folder, NAME)):
        name = f"{label(run.cell, ('task.model', 'mode', 'islands'))}, seed {run.seed}"
        needed_s = foretold_s(resolved(run.settings), records.read(folder, NAME))
        if ends_s - time.monotonic() <= needed_s:
            left_out += 1
            continue
        printer.say(f"{name}: " + (f"takes about {needed_s:.0f} s" if needed_s else "takes a time not yet known"))
        try:
            record = record_of(run, name, printer, ends_s)
        except TooLong:
            printer.say(f"{name}: would not end in time: dropped")
            continue
        records.append(folder, record)
        printer.say(f"{name}: {record.loss:.4f} nats per token after {record.wall_s:.0f} s")
    if left_out:
        printer.say(f"{left_out} runs do not fit into the time that was left")


def foretold_s(settings: Mapping[str, Any], finished: Iterable[Record]) -> float:
    """Returns the seconds that a run will take, by the finished run of the nearest size on this device; 0 without one.

    A step is taken to grow with parameters and tokens. It grows less, since larger models use a GPU better.
    """
    size, islands = size_of(settings), settings["islands"]
    here = [record for record in finished if record.settings["device"] == device()]
    if not here:
        return 0.0
    near = min(here, key=lambda r: (abs(math.log(size_of(r.settings) / size)), r.settings["islands"] != islands))
    trained_s = near.settings["step_s"] * near.settings["steps"]
    work = size * tokens_of(settings) / (size_of(near.settings) * near.tokens)
    return float(trained_s * work + near.wall_s - trained_s)


def record_of(run: Run, name: str, printer: Printer, ends_s: float) -> Record:
    """Trains one run and returns its record.

    Raises:
        TooLong: By its first steps it would end after ``ends_s`` of the monotonic clock.
    """
    steps, cpu_s = run.settings.steps, time.process_time()
    first: tuple[int, float] | None = None
    said_s = step_s = 0.0

    def told(step: int, loss: float) -> None:
        nonlocal first, said_s, step_s
        now_s = time.monotonic()
        if first is None:  # what came before was compiled, too
            first = step, now_s
            return
        step_s = (now_s - first[1]) / (step - first[0])
        if now_s - (said_s or first[1]) < SAY_EVERY_S:
            return
        left_s, tokens_per_s = step_s * (steps - step), tokens_of(resolved(run.settings)) / steps / step_s
        so_far = f"step {step:,} of {steps:,}, loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s"
        printer.say(f"{name}: {so_far}, {left_s:.0f} s to go")
        if not said_s and step < steps and now_s + left_s > ends_s:
            raise TooLong
        said_s = now_s

    train = partial(side_by_side.run, told=told)
    record = run_cell(run.settings, run.seed, experiment=NAME, varied=run.cell, train=train)
    settings = {**record.settings, "device": device(), "step_s": step_s}
    return replace(record, settings=settings, cpu_s=round(time.process_time() - cpu_s, 2))


def device() -> str:
    """Returns the kind of device."""
    return str(jax.devices()[0].device_kind)


# --- tables ---------------------------------------------------------------------------------------------------------

GAPS = (
    Column(key="islands", title="M"),
    Column(key="parameters", title="parameters", form=","),
    Column(key="epochs", title="epochs", form=".2f"),
    Column(key="pairs", title="seeds"),
    Column(key="baseline", title="data-parallel", form=".4f"),
    Column(key="loss", title="loss", form=".4f"),
    Column(key="gap", title="gap", form="+.2%"),
    Column(key="half_width", title="±", form=".2%"),
    Column(key="law", title="law", form="+.2%"),
    Column(key="reason", title=""),
)
SLOPES = (
    Column(key="islands", title="M"),
    Column(key="pairs", title="pairs"),
    Column(key="slope", title="slope of ln(ratio) by ln N", form="+.4f"),
    Column(key="half_width", title="±", form=".4f"),
    Column(key="law", title="law", form="+.4f"),
)


def tables(experiment: Experiment, finished: Iterable[Record], text_tokens: int) -> tuple[list[Row], list[Row]]:
    """Returns a row for each number of islands and size, and one for each number of islands.

    Args:
        experiment: Its claims are the rows.
        finished: All records.
        text_tokens: Tokens of the text that is trained on.
    """
    results, cells = current(experiment, finished), experiment.cells()
    pairings = [each for claim in experiment.comparisons for each in experiment.pairings(claim)]
    gaps, points = list[Row](), dict[int, list[tuple[float, float]]]()
    for found, (_, (ours,), (theirs,)) in zip(findings(experiment, results), pairings, strict=True):
        settings, islands = resolved(experiment.settings_of(cells[ours])), cells[ours]["islands"]
        size = size_of(settings)
        loss, baseline = (
            fmean(run.loss for run in results[i].values()) if results[i] else None for i in (ours, theirs)
        )
        mean, half_width = found.interval or (None, None)
        gaps.append(
            {
                "islands": islands,
                "parameters": size,
                "epochs": tokens_of(settings) / text_tokens,
                "pairs": len(found.differences),
                "baseline": baseline,
                "loss": loss,
                "gap": mean,
                "half_width": finite(half_width),
                "law": law_gap(size, islands),
                "reason": found.reason,
            }
        )
        logarithms = [(math.log(size), math.log1p(each)) for each in found.differences.values()]
        points.setdefault(islands, []).extend(logarithms)
    return gaps, [{"islands": m, "pairs": len(of), "law": LAW[m][1]} | slope_of(of) for m, of in points.items()]


def slope_of(points: Sequence[tuple[float, float]]) -> dict[str, object]:
    """Returns the slope of a line through points with the half-width of its 95 % interval; nothing of too few."""
    if len(points) < 3 or len({x for x, _ in points}) < 2:
        return {}
    line = stats.linregress(*zip(*points, strict=True))
    half_width = stats.t.isf(ONE_SIDED, len(points) - 2) * line.stderr
    return {"slope": float(line.slope), "half_width": float(half_width)}


# --- command --------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace, gaps: Printer, slopes: Printer) -> int:
    """Trains what is missing and prints the tables; returns 130 if it was interrupted."""
    ends_s = time.monotonic() + 60 * args.minutes
    if jax.local_device_count() > 1:
        raise ConfigError("devices", jax.local_device_count(), "it trains on one: set CUDA_VISIBLE_DEVICES=0")
    if args.quick:
        args.scale, args.sizes, args.islands, args.seeds = 0.001, (min(args.sizes),), (2,), 1
    corpus = load_corpus(args.data)
    experiment, status = experiment_of(args, corpus.vocabulary), 0
    missing = len(due(experiment, records.read(args.out, NAME)))
    gaps.say(f"{missing} runs are missing in {args.out}; {args.minutes:g} minutes for them on {device()}")
    try:
        train_missing(experiment, args.out, gaps, ends_s)
    except KeyboardInterrupt:
        gaps.say("stopped: what is finished is kept, and the same command goes on")
        status = 130
    found = tables(experiment, records.read(args.out, NAME), sum(map(len, corpus.train)))
    for printer, rows in zip((gaps, slopes), found, strict=True):
        for row in rows:
            printer.add(row)
    return status


def main(argv: list[str] | None = None) -> int:
    parser = output.parser_of("ladder", __doc__, "--minutes 12 --data python:stdlib,python:torch,python:transformers")
    parser.set_defaults(islands=(2, 4), seeds=SEEDS)
    add = parser.add_argument
    add("--minutes", type=float, default=12.0, help="no run is begun that would not end within them (12)")
    add("--out", type=Path, default=Path("runs/ladder"), help="folder of the records (runs/ladder)")
    add("--sizes", type=output.numbers, default=(5_000_000, 10_000_000, 20_000_000, 35_000_000), metavar="5M,10M,..")
    add("--scale", type=float, default=1.0, help="of sizes and tokens: 0.001 tries all of it on a CPU (1)")
    add("--tokens", type=float, default=20.0, help="for each parameter (20)")
    add(
        "--data", type=lambda text: text.split(","), default=(), metavar="NAME,..", help="text (default: python:stdlib)"
    )
    return output.guarded(measure, parser.parse_args(argv), GAPS, SLOPES)


if __name__ == "__main__":
    # A second command finds what the first one compiled, and a mode what it shares with others of its size.
    jax.config.update("jax_compilation_cache_dir", compilation_cache().get("JAX_COMPILATION_CACHE_DIR"))  # type: ignore[no-untyped-call]
    sys.exit(main())
