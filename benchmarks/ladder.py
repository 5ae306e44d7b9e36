"""Trains models of growing size on one device, data-parallel and as islands: do gaps shrink as the law says?

The law is that of "Scaling laws for DiLoCo" (arXiv 2503.09799): loss = A N^alpha for each way to train. Quotients of
it are gaps to data-parallel training: 1.0353 N^-0.0016 - 1 for two islands, 1.0901 N^-0.0039 - 1 for four. As there,
all modes see 20 tokens for each parameter, and b2 of AdamW is 0.99; --same-memory gives islands b2^(1/M), the same
memory in tokens. A step has the same tokens in all modes, and each of M islands has one M-th of them. So all take the
same number of steps, and one data-parallel run is the baseline of all. (The authors chose a batch for each mode.)

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
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
from scipy import stats

from benchmarks import output
from benchmarks.output import Column, Printer, Row
from benchmarks.side_by_side import SideBySide, corpus_of, parameters_of
from broker.base.errors import ConfigError
from broker.process.release import installed
from broker.wire.messages import MergeRule
from islands.tasks.task import Task, held_out_loss, load_task
from ops.lab import records
from ops.lab.records import Record
from ops.lab.schedule import Run
from ops.lab.statistics import ONE_SIDED, interval
from ops.plans.cell import CellSettings, Mode, cell_settings, key_of, resolved
from ops.processes.numeric import compilation_cache
from ops.text import finite

NAME = "ladder"
#: Islands -> A and alpha of the ratio of the law's losses to those of data-parallel training: A N^alpha.
LAW = {1: (1.0129, -0.0008), 2: (1.0353, -0.0016), 4: (1.0901, -0.0039), 8: (1.1612, -0.0065)}
#: Tokens in a step as the law has them for data-parallel training: 61,000 at 35 M, growing with this power of the size.
BATCH_TOKENS, BATCH_POWER = 61_000 / 35e6**0.286, 0.286
#: Rates are given for this width, and carried to others in inverse proportion.
RATE_WIDTH = 256
SAY_EVERY_S = 5.0


class TooLong(Exception):
    """By its first steps a run does not end in time."""


def planned(args: argparse.Namespace) -> list[Run]:
    """Returns all runs: first seeds first, then small sizes, then data-parallel training before islands.

    Raises:
        ConfigError: No cell can be made of the arguments.
    """
    modes = (0, *args.islands)  # 0: data-parallel
    if len(args.rates) not in (1, len(modes)):
        cure = f"must be one rate, or {len(modes)}: data-parallel training's, then those of --islands"
        raise ConfigError("rates", args.rates, cure)
    rates = dict(zip(modes, args.rates * len(modes), strict=False))
    found = []
    for size in sorted(args.sizes):
        for islands in modes:
            cell, parameters = cell_of(args, size, islands, rates[islands])
            what = {"parameters": parameters, "islands": islands}
            found += [Run(what, cell, seed, key_of(cell, seed)) for seed in range(args.seeds)]
    return sorted(found, key=lambda run: run.seed)


def cell_of(args: argparse.Namespace, size: int, islands: int, rate: float) -> tuple[CellSettings, int]:
    """Returns a cell of the laboratory, and the number of parameters of its model."""
    vocabulary = corpus_of(args.data).vocabulary
    width, depth = shape_of(args.scale * size, vocabulary)
    parameters, every, count = parameters_of(width, depth, vocabulary), args.sync_interval, max(1, islands)
    # At any scale a step has the same number of windows; these become shorter, and steps fewer.
    context = max(8, round(args.context * math.sqrt(args.scale)))
    unit = math.lcm(32, *args.islands)
    windows = max(unit, round(BATCH_TOKENS * size**BATCH_POWER / args.context / unit) * unit)
    steps = max(1, round(args.tokens * parameters / (windows * context * every))) * every
    values = {
        "task": "benchmarks.side_by_side:task",
        "mode": str(Mode.DILOCO if islands else Mode.DATA_PARALLEL),
        "islands": count,
        "steps": steps,
        "fragments": 1,
        "sync_interval": every,
        "task.width": width,
        "task.depth": depth,
        "task.batch": windows // count,
        "task.context": context,
        "task.learning_rate": rate * RATE_WIDTH / width,
        "task.warm_up_steps": min(1000, steps // 10),
        "task.b2": args.b2 ** (1 / count) if args.same_memory else args.b2,
        "task.compute": "float32" if jax.default_backend() == "cpu" else "bfloat16",
        "task.data": list(args.data),
    }
    outer = {"merge": args.merge, "outer_learning_rate": args.outer_rate, "outer_momentum": args.outer_momentum}
    return cell_settings(values | (outer if islands else {})), parameters


def shape_of(parameters: float, vocabulary: int) -> tuple[int, int]:
    """Returns width and depth of a model of about this size, about 64 times as wide as deep."""

    def flaw(shape: tuple[int, int]) -> float:
        size = parameters_of(*shape, vocabulary)
        return abs(math.log(size / parameters)) + 0.1 * abs(math.log(shape[0] / shape[1] / 64))

    widths = (*range(8, 128, 8), *range(128, 4096, 64))
    return min(((width, depth) for width in widths for depth in range(2, 33)), key=flaw)


# --- runs -----------------------------------------------------------------------------------------------------------


def train_missing(runs: Sequence[Run], done: dict[str, Record], folder: Path, printer: Printer, ends_s: float) -> None:
    """Trains what has no record yet and fits; each record is kept at once, in ``done`` too."""
    trainers: dict[str, tuple[Task, SideBySide]] = {}  # seeds share what is compiled
    too_large = math.inf
    for run in runs:
        if run.key in done or run.cell["parameters"] >= too_large:
            continue
        cell, left_s = key_of(run.settings, 0), ends_s - time.monotonic()
        needed_s = foretold_s(run, done.values(), compiled=cell in trainers)
        if left_s < needed_s:
            printer.say(f"{title(run)}: takes about {needed_s:.0f} s, and {max(0.0, left_s):.0f} s are left: not begun")
            continue
        printer.say(f"{title(run)}: " + (f"takes about {needed_s:.0f} s" if needed_s else "takes a time not yet known"))
        if cell not in trainers:
            task = load_task(run.settings.task, run.settings.options)
            trainers[cell] = task, SideBySide(task, run.settings)
        try:
            record = record_of(run, *trainers[cell], printer, ends_s)
        except TooLong as err:
            printer.say(f"{title(run)}: {err}: dropped, and larger models with it")
            too_large = run.cell["parameters"]
            continue
        records.append(folder, record)
        done[run.key] = record
        printer.say(f"{title(run)}: {record.loss:.4f} nats per token after {record.wall_s:.0f} s")


def foretold_s(run: Run, finished: Iterable[Record], *, compiled: bool) -> float:
    """Returns the seconds that a run will take, by the finished run of the nearest size on this device; 0 without one.

    A step is taken to grow with parameters and tokens. It grows less, since larger models use a GPU better.
    """
    size = run.cell["parameters"]

    def distance(record: Record) -> tuple[float, bool]:
        away = abs(math.log(record.cell["parameters"] / size))
        return away, record.cell["islands"] != run.cell["islands"]

    here = [record for record in finished if record.settings["device"] == _device()]
    near = min(here, key=distance, default=None)
    if near is None:
        return 0.0
    steps_s = near.settings["step_s"] * near.settings["steps"]
    work = size * tokens_of(run) / (near.cell["parameters"] * near.tokens)
    return float(steps_s * work + (0.0 if compiled else near.wall_s - steps_s))


def record_of(run: Run, task: Task, trainer: SideBySide, printer: Printer, ends_s: float) -> Record:
    """Trains one run and returns its record.

    Raises:
        TooLong: By its first steps it would end after ``ends_s`` of the monotonic clock.
    """
    began_s, cpu_s = time.monotonic(), time.process_time()
    timed_from: tuple[int, float] | None = None
    said_s, step_s = began_s, 0.0

    def told(step: int, loss: float) -> None:
        nonlocal timed_from, said_s, step_s
        steps, now_s = run.settings.steps, time.monotonic()
        if timed_from is None:  # what came before was compiled, too
            timed_from = step, now_s
        elif now_s - said_s >= SAY_EVERY_S or step == steps:
            step_s = (now_s - timed_from[1]) / (step - timed_from[0])
            left_s, tokens_per_s = step_s * (steps - step), tokens_of(run) / steps / step_s
            so_far = f"step {step:,} of {steps:,}, loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s"
            printer.say(f"{title(run)}: {so_far}, {left_s:.0f} s to go")
            if said_s == began_s and step < steps and now_s + left_s > ends_s:
                raise TooLong(f"{max(0.0, ends_s - now_s):.0f} s are left")
            said_s = now_s

    begins_at = held_out_loss(task, task.init(run.seed)[0])
    outcome = trainer.run(run.seed, lambda params: held_out_loss(task, params), told)
    loss = held_out_loss(task, outcome.params)
    return Record(
        experiment=NAME,
        cell=run.cell,
        key=run.key,
        seed=run.seed,
        loss=loss,
        tokens=outcome.tokens,
        wall_s=round(time.monotonic() - began_s, 2),
        cpu_s=round(time.process_time() - cpu_s, 2),
        curve=(*((float(p.tokens), 0.0, p.loss) for p in outcome.curve), (float(outcome.tokens), 0.0, loss)),
        diverged=not loss < begins_at,
        settings=resolved(run.settings) | {"seed": run.seed, "device": _device(), "step_s": step_s},
        code=installed(),
        corpus=task.corpus,
    )


def title(run: Run) -> str:
    """Returns a run in a few words."""
    islands = run.cell["islands"]
    mode = f"M = {islands}" if islands else "data-parallel"
    return f"{run.cell['parameters']:,} parameters, {mode}, seed {run.seed}"


def tokens_of(run: Run) -> int:
    """Returns the tokens that a run trains."""
    cell = run.settings
    return int(cell.steps * cell.islands * cell.options["batch"] * cell.options["context"])


def _device() -> str:
    return str(jax.devices()[0].device_kind)


# --- tables ---------------------------------------------------------------------------------------------------------


def columns_of(islands: Sequence[int]) -> list[Column]:
    """Returns the columns of the table of sizes."""
    columns = [
        Column(key="parameters", title="parameters", form=","),
        Column(key="epochs", title="epochs", form=".2f"),
        Column(key="seeds", title="seeds"),
        Column(key="loss_0", title="data-parallel", form=".4f"),
    ]
    for m in islands:
        columns += [
            Column(key=f"loss_{m}", title=f"M = {m}", form=".4f"),
            Column(key=f"gap_{m}", title="gap", form="+.2%"),
            Column(key=f"half_width_{m}", title="±", form=".2%"),
            Column(key=f"pairs_{m}", title="pairs"),
            Column(key=f"law_{m}", title="law", form="+.2%"),
        ]
    return columns


#: Of the table of slopes.
SLOPES = (
    Column(key="islands", title="M"),
    Column(key="pairs", title="pairs"),
    Column(key="slope", title="slope of ln(ratio) by ln N", form="+.4f"),
    Column(key="half_width", title="±", form=".4f"),
    Column(key="law", title="law", form="+.4f"),
)


def tables(runs: Sequence[Run], done: Mapping[str, Record], text_tokens: int) -> tuple[list[Row], list[Row]]:
    """Returns a row for each size, and one for each number of islands; runs that diverged count in neither.

    Args:
        runs: All that are planned.
        done: Key -> record.
        text_tokens: Tokens of the text that is trained on.
    """
    losses: dict[tuple[int, int], dict[int, float]] = {}  # size and islands -> seed -> loss
    sizes: dict[int, dict[str, object]] = {}
    for run in runs:
        size, record = run.cell["parameters"], done.get(run.key)
        sizes[size] = {"parameters": size, "tokens": tokens_of(run), "epochs": tokens_of(run) / text_tokens}
        of_cell = losses.setdefault((size, run.cell["islands"]), {})
        if record is not None and not record.diverged:
            of_cell[run.seed] = record.loss
    points: dict[int, list[tuple[float, float]]] = {}
    for (size, m), found in losses.items():
        row, baseline = sizes[size], losses[size, 0]
        row |= {f"loss_{m}": fmean(found.values())} if found else {}
        if not m:
            row["seeds"] = len(found)
            continue
        ratios = [loss / baseline[seed] for seed, loss in found.items() if seed in baseline]
        points.setdefault(m, []).extend((math.log(size), math.log(ratio)) for ratio in ratios)
        if ratios:
            gap = interval([ratio - 1 for ratio in ratios])
            row |= {f"gap_{m}": gap.mean, f"half_width_{m}": finite(gap.half_width)}
        row[f"pairs_{m}"] = len(ratios)
        row[f"law_{m}"] = LAW[m][0] * size ** LAW[m][1] - 1 if m in LAW else None
    slopes: list[Row] = [
        {"islands": m, "pairs": len(found), "law": LAW[m][1] if m in LAW else None} | slope_of(found)
        for m, found in points.items()
    ]
    return list(sizes.values()), slopes


def slope_of(points: Sequence[tuple[float, float]]) -> dict[str, object]:
    """Returns the slope of a line through points with the half-width of its 95 % interval; nothing of too few."""
    if len(points) < 3 or len({x for x, _ in points}) < 2:
        return {}
    line = stats.linregress(*zip(*points, strict=True))
    half_width = stats.t.isf(ONE_SIDED, len(points) - 2) * line.stderr
    return {"slope": float(line.slope), "half_width": float(half_width)}


# --- command --------------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> int:
    """Trains what is missing and prints the tables; returns 130 if it was interrupted."""
    ends_s = time.monotonic() + 60 * args.minutes
    if jax.local_device_count() > 1:
        raise ConfigError("devices", jax.local_device_count(), "it trains on one: set CUDA_VISIBLE_DEVICES=0")
    if args.quick:
        args.scale, args.sizes, args.seeds = 0.001, (min(args.sizes),), 1
    sizes, slopes = Printer(columns_of(args.islands), as_json=args.json), Printer(SLOPES, as_json=args.json)
    corpus, runs, status = corpus_of(args.data), planned(args), 0
    digest = corpus.digest
    done = {each.key: each for each in records.read(args.out, NAME) if each.corpus == digest}
    finished = sum(run.key in done for run in runs)
    sizes.say(f"{len(runs)} runs on {_device()}, {finished} of them finished, {args.minutes:g} minutes for the others")
    try:
        train_missing(runs, done, args.out, sizes, ends_s)
    except KeyboardInterrupt:
        sizes.say(f"stopped: what is finished is kept in {args.out}, and the same command goes on")
        status = 130
    for printer, found in zip((sizes, slopes), tables(runs, done, sum(map(len, corpus.train))), strict=True):
        for row in found:
            printer.add(row)
        printer.close()
    return status


def words(text: str) -> tuple[str, ...]:
    """Reads a flag that is a list with commas."""
    return tuple(word for word in text.split(",") if word)


def rates(text: str) -> tuple[float, ...]:
    """Reads a list of rates."""
    return tuple(map(float, words(text)))


def main(argv: list[str] | None = None) -> int:
    parser = output.parser_of("ladder", __doc__, "--minutes 12 --data python:stdlib,python:torch,python:transformers")
    output.add_arguments(parser)
    add: Any = parser.add_argument
    add("--minutes", type=float, default=12.0, help="no run is begun that would not end within them (12)")
    add("--out", type=Path, default=Path("runs/ladder"), help="folder of the records (runs/ladder)")
    add("--sizes", type=output.numbers, default=(5_000_000, 10_000_000, 20_000_000, 35_000_000), metavar="5M,10M,..")
    add("--islands", type=output.numbers, default=(2, 4), metavar="2,4", help="numbers of islands (2,4)")
    add("--seeds", type=int, default=3, help="runs of each cell, as far as the time lasts (3)")
    add("--scale", type=float, default=1.0, help="of sizes and tokens: 0.001 tries all of it on a CPU (1)")
    add("--tokens", type=float, default=20.0, help="for each parameter (20)")
    add("--context", type=int, default=256, help="tokens of a window (256)")
    add("--data", type=words, default=(), metavar="NAME,..", help="text, as the language task's; none: python:stdlib")
    add("--rates", type=rates, default=(0.002,), help="peak at width 256; or data-parallel's, then each of --islands'")
    add("--b2", type=float, default=0.99, help="of AdamW (0.99)")
    add("--same-memory", action="store_true", help="islands have b2^(1/M)")
    add("--sync-interval", type=int, default=24, help="H (24)")
    add("--merge", choices=list(map(str, MergeRule)), default=str(CellSettings().merge), help="(%(default)s)")
    add("--outer-rate", type=float, default=CellSettings().outer_learning_rate, help="(%(default)s)")
    add("--outer-momentum", type=float, default=CellSettings().outer_momentum, help="(%(default)s)")
    return output.guarded(measure, parser.parse_args(argv))


if __name__ == "__main__":
    # A second command finds what the first one compiled, and a mode what it shares with others of its size.
    jax.config.update("jax_compilation_cache_dir", compilation_cache().get("JAX_COMPILATION_CACHE_DIR"))  # type: ignore[no-untyped-call]
    sys.exit(main())
