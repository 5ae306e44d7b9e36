"""``atoll simulate``: what to simulate, and how it is shown."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from broker.process import flags, settings
from broker.process.values import whole_number
from broker.wire.errors import ConfigError
from ops.goodput import view
from ops.goodput.estimate import expected_goodput
from ops.goodput.fleet import FailureModel, Fleet, Mode, check_together
from ops.goodput.published import TABLE_1
from ops.goodput.simulation import Progress, simulate

#: Fleets that curves are of, from the least chips to the most, and how many: those of table 1, and some beyond.
_CURVE_CHIPS, _CURVE_SIZES = (50_000, 10_000_000), 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``simulate``."""
    parser.add_argument("--json", action="store_true", help="one JSON object, on one line")
    parser.add_argument("--table", action="store_true", help="table 1 of the paper, simulated, beside what it says")
    parser.add_argument(
        "--plot", type=flags.path, metavar="FILE", help="goodput over fleet size, waste, staleness as SVG"
    )
    flags.add_flags(parser, Fleet)
    flags.add_flags(parser, FailureModel)


def run(args: argparse.Namespace) -> int:
    """Simulates and prints; returns the exit code.

    Raises:
        ConfigError: A setting cannot work.
        Unavailable: The plot cannot be drawn or written.
    """
    model = _model(args)
    if args.plot is not None:
        _check_plot(args.plot)
    if args.table:
        for name in ("mode", "chips", "islands"):
            if getattr(args, name) is not None:
                raise ConfigError(name, getattr(args, name), "is set by each cell of the table: leave it out")
        if args.plot is not None:
            raise ConfigError("plot", str(args.plot), "is of one fleet: leave out --table")
    fleet = settings.from_sources(Fleet, {}, args)
    check_together(fleet, model)
    progress = _ProgressLine()
    if args.table:
        cells = table(fleet, model, progress)
        print(json.dumps(view.table_json(cells, model)) if args.json else view.table_text(cells, model))
        return 0
    result = simulate(fleet, model, progress)
    print(json.dumps(view.to_json(result), allow_nan=False) if args.json else view.text(result), flush=True)
    if args.plot is not None:
        view.plot(args.plot, result, curves(fleet, model, _ProgressLine("the curves")))
        if not args.json:
            print(f"plot: {args.plot}")
    return 0


def _model(args: argparse.Namespace) -> FailureModel:
    """Returns the failure model of the flags; with an interval of one step there is no room for the usual overlap."""
    try:
        no_room = args.sync_interval is not None and whole_number(str(args.sync_interval)) == 1
    except ValueError:
        no_room = False  # what is wrong with it is told below
    return settings.from_sources(FailureModel, {"overlap": 0} if no_room else {}, args)


def _check_plot(path: Path) -> None:
    """Refuses a file that cannot be written before anything is simulated."""
    if path.suffix != ".svg":
        raise ConfigError("plot", str(path), "must end in .svg, which is what it is")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError("plot", str(path), "cannot be written; choose a folder that exists and that you may write to")


def table(fleet: Fleet, model: FailureModel, on_progress: Progress = lambda done: None) -> list[view.Cell]:
    """Returns table 1 of the paper with each cell simulated, for as long and from the seed that ``fleet`` says."""
    fleets = [
        (row, replace(fleet, mode=Mode(row.mode), chips=chips, islands=row.islands), goodput)
        for row, published in TABLE_1.items()
        for chips, goodput in published.items()
    ]
    for _, one, _ in fleets:  # before the first of them has taken its time
        check_together(one, model)
    cells = []
    for i, (row, one, goodput) in enumerate(fleets):
        on_progress(i / len(fleets))
        cells.append(view.Cell(row=row, fleet=one, published=goodput, account=simulate(one, model).account))
    return cells


def curves(
    fleet: Fleet, model: FailureModel, on_progress: Progress = lambda done: None
) -> Mapping[str, list[tuple[int, float]]]:
    """Returns goodput over fleet size for each mode, as (chips, goodput), by :func:`expected_goodput`.

    Sizes that do not go with the failure model are left out, such as those whose islands have less slices than domains,
    and those that fail too often to be simulated. The fleet's own size is one of them.
    """
    smallest, largest = min(_CURVE_CHIPS[0], fleet.chips), max(_CURVE_CHIPS[1], fleet.chips)
    spread = (max(int(each), fleet.islands) for each in np.geomspace(smallest, largest, _CURVE_SIZES))
    sizes = sorted({*spread, fleet.chips})
    own = [fleet.mode] if fleet.mode is Mode.DILOCO else []  # has no closed form: drawn where it was asked for
    modes = [Mode.DECOUPLED, *own, Mode.ELASTIC_DP, Mode.DP]
    found: dict[str, list[tuple[int, float]]] = {}
    for i, mode in enumerate(modes):
        for k, chips in enumerate(sizes):
            on_progress((i + k / len(sizes)) / len(modes))
            try:
                goodput = expected_goodput(mode=mode, chips=chips, islands=fleet.islands, model=model)
            except ConfigError:
                continue
            found.setdefault(mode.value, []).append((chips, goodput))
    return found


class _ProgressLine:
    """Says on standard error how far a simulation is, if it takes more than a second or two; the rarer the longer."""

    def __init__(self, what: str = "") -> None:
        self._what = f" {what}:" if what else ""
        self._started_s = self._said_s = time.monotonic()

    def __call__(self, done: float) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s < max(1.5, 0.1 * (now_s - self._started_s)) or done >= 1.0:
            return
        self._said_s = now_s
        left_s = (now_s - self._started_s) * (1.0 - done) / done if done > 0.0 else 0.0
        print(f"atoll:{self._what} simulated {done:.0%}, about {left_s:.0f} s to go", file=sys.stderr, flush=True)
