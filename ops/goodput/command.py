"""``atoll simulate``: its flags and its output."""

from __future__ import annotations

import argparse
import json
import sys

from broker.process import sources
from broker.process.settings import whole_number
from broker.wire.errors import ConfigError
from ops.goodput import view
from ops.goodput.fleet import FailureModel, Fleet, check_together, expected_failures
from ops.goodput.published import check_plot, curves, plot, table, table_json, table_text
from ops.goodput.simulation import simulate

#: Interruptions that take so long that a word is said before.
MANY = 2_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``simulate``."""
    parser.add_argument("--json", action="store_true", help="one JSON object, on one line")
    parser.add_argument("--table", action="store_true", help="table 1 of the paper, simulated, beside what it says")
    parser.add_argument("--plot", type=sources.as_path, metavar="FILE", help="goodput over fleet size, as SVG")
    sources.add_flags(parser, Fleet)
    sources.add_flags(parser, FailureModel)


def run(args: argparse.Namespace) -> int:
    """Simulates and prints; returns the exit code.

    Raises:
        ConfigError: A setting cannot work.
        Unavailable: The plot cannot be drawn or written.
    """
    model = _model(args)
    if args.plot is not None:
        check_plot(args.plot)
    if args.table:
        for name in ("mode", "chips", "islands"):
            if getattr(args, name) is not None:
                raise ConfigError(name, getattr(args, name), "is set by each cell of the table: leave it out")
        if args.plot is not None:
            raise ConfigError("plot", str(args.plot), "is of one fleet: leave out --table")
    fleet = sources.from_sources(Fleet, {}, args)
    check_together(fleet, model)
    if args.table:
        cells = table(fleet, model, _say_cell)
        print(json.dumps(table_json(cells, model)) if args.json else table_text(cells, model))
        return 0
    interruptions = expected_failures(fleet, model)["interruptions"]
    if interruptions > MANY:
        print(
            f"atoll: {interruptions:.1e} interruptions to simulate: this may take minutes", file=sys.stderr, flush=True
        )
    result = simulate(fleet, model)
    print(json.dumps(view.to_json(result), allow_nan=False) if args.json else view.text(result), flush=True)
    if args.plot is not None:
        plot(args.plot, result, curves(fleet, model))
        if not args.json:
            print(f"plot: {args.plot}")
    return 0


def _model(args: argparse.Namespace) -> FailureModel:
    """Returns the failure model of the flags; an interval of one step makes 0 the default overlap."""
    try:
        no_room = args.sync_interval is not None and whole_number(str(args.sync_interval)) == 1
    except ValueError:
        no_room = False  # what is wrong with it is told below
    return sources.from_sources(FailureModel, {"overlap": 0} if no_room else {}, args)


def _say_cell(done: int, of: int) -> None:
    if done % 5 == 0 < done:
        print(f"atoll: {done} of {of} cells simulated", file=sys.stderr, flush=True)
