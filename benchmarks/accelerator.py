"""Measures Atoll's cost beside an accelerator: a step's time with and without it, and copying rates.

One island trains a stack of square layers beside a broker and an aggregator; the batch is chosen so that a step takes
about ``--step`` seconds. Each loop reads the loss of the step before, as loops that log do. ``step, ms`` is timed over
the same steps before the island joins and after its first rounds; ``sync share`` is the part of the second time that
``island.step`` took. Copies are those of one fragment, as Atoll makes them. It runs on a CPU too, with small models.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import output
from benchmarks.fleet import peak_bytes
from benchmarks.one_island import LAYERS, Loop, loop_of, run, run_cases, write
from benchmarks.output import Column, Printer

COLUMNS = (
    Column(key="framework", title="framework"),
    Column(key="device", title="device"),
    Column(key="parameters", title="parameters", form=","),
    Column(key="rows", title="rows of a batch", form=","),
    Column(key="alone_ms", title="step alone, ms", form=".2f"),
    Column(key="step_ms", title="with Atoll, ms", form=".2f"),
    Column(key="slowdown", title="slowdown", form="+.2%"),
    Column(key="sync_share", title="sync share", form=".2%"),
    Column(key="longest_ms", title="longest call, ms", form=".1f"),
    Column(key="versions", title="versions"),
    Column(key="to_host_gbs", title="to the host, GB/s", form=".1f"),
    Column(key="to_device_gbs", title="to the device, GB/s", form=".1f"),
    Column(key="host_models", title="host memory, models", form=".1f"),
)
FIRST_ROWS = 64  #: of the batch with which the right one is found
TRIES = 5  #: of each copy, of which the best counts


def measure(args: argparse.Namespace, printer: Printer) -> None:
    """Measures each case in processes of its own, and prints a row for it."""
    run_cases(
        args,
        printer,
        "accelerator",
        one_thread=False,
        settings={"fragments": LAYERS, "sync_interval": LAYERS if args.quick else args.sync_interval},
        steps=60 if args.quick else args.steps,
        step_s=0.01 if args.quick else args.step,
    )


def work(spec: dict[str, Any]) -> int:
    """Trains alone, then as an island, and writes down what was seen."""
    width = max(64, round((spec["size"] / LAYERS) ** 0.5 / 64) * 64)
    loop = loop_of(spec["framework"], width)
    rows = _rows_for(loop, spec["step_s"])
    alone_s = _timed(loop, spec["steps"], lambda loss: None)
    model_bytes, before = 4 * width**2 * LAYERS, peak_bytes(os.getpid())
    loop.join(spec["address"], rows)
    calls: list[float] = []

    def step(loss: Any) -> None:
        began_s = time.perf_counter()
        loop.step(rows, loss)
        calls.append(time.perf_counter() - began_s)

    _until_merged(loop, step)
    first = len(calls)
    with_s = _timed(loop, spec["steps"], step)
    to_host, to_device = loop.copies()
    found = {
        "framework": spec["framework"],
        "device": loop.device,
        "parameters": width**2 * LAYERS,
        "rows": rows,
        "alone_ms": 1000 * alone_s,
        "step_ms": 1000 * with_s,
        "slowdown": with_s / alone_s - 1,
        "sync_share": sum(calls[first:]) / (with_s * spec["steps"]),
        "longest_ms": 1000 * max(calls[first:]),
        "versions": min(loop.island.versions),
        "to_host_gbs": 4 * width**2 / _best(to_host) / 1e9,
        "to_device_gbs": 4 * width**2 / _best(to_device) / 1e9,
        "host_models": max(0, peak_bytes(os.getpid()) - before) / model_bytes,
    }
    return write(spec, found, loop)


def _rows_for(loop: Loop, step_s: float) -> int:
    """Prepares the batch with which a step takes about so long; returns its rows."""
    rows = FIRST_ROWS
    for _ in range(4):
        loop.prepare(rows)
        _timed(loop, 2, lambda loss: None)
        took_s = _timed(loop, 5, lambda loss: None)
        rows = min(16 * rows, max(64, round(rows * step_s / took_s / 64) * 64))
    loop.prepare(rows)
    _timed(loop, 3, lambda loss: None)
    return rows


def _timed(loop: Loop, steps: int, after: Callable[[Any], None]) -> float:
    """Returns the seconds of a step, on the average of so many."""
    previous = None
    began_s = time.perf_counter()
    for _ in range(steps):
        loss = loop.train()
        after(loss)
        if previous is not None:
            loop.wait(previous)
        previous = loss
    loop.wait(previous)
    return (time.perf_counter() - began_s) / steps


def _until_merged(loop: Loop, step: Callable[[Any], None]) -> None:
    """Trains until a version of each fragment has come back: what compiles has compiled then."""
    ends_s = time.monotonic() + 240
    while min(loop.island.versions) < 1 and time.monotonic() < ends_s:
        _timed(loop, 1, step)


def _best(copy: Callable[[], object]) -> float:
    """Returns the seconds of the quickest of several copies."""
    took = []
    for _ in range(TRIES):
        began_s = time.perf_counter()
        copy()
        took.append(time.perf_counter() - began_s)
    return min(took)


def main(argv: list[str] | None = None) -> int:
    parser = output.parser_of("accelerator", __doc__, "--framework jax --framework torch --parameters 100M,1B")
    parser.add_argument("--parameters", type=output.numbers, default=(100_000_000, 1_000_000_000))
    parser.add_argument("--steps", type=int, default=400, help="that are timed, without and with Atoll (400)")
    return run(parser, argv, measure, COLUMNS, work)


if __name__ == "__main__":
    sys.exit(main())
