"""``atoll simulate``: its flags and its output."""

from __future__ import annotations

import argparse
import json
import sys

from broker.base import sources
from ops.forecast.failures import FailureModel, SimulatedFleet, check_together, expected_interruptions
from ops.forecast.goodput import simulate
from ops.forecast_commands.view import simulated_as_json, simulated_as_text

#: Interruptions that take so long that a word is said before.
MANY = 2_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``simulate``."""
    parser.add_argument("--json", action="store_true", help="one JSON object, on one line")
    sources.add_flags(parser, SimulatedFleet)
    sources.add_flags(parser, FailureModel)


def run(args: argparse.Namespace) -> int:
    """Simulates and prints; returns the exit code.

    Raises:
        ConfigError: A setting cannot work.
    """
    fleet = sources.from_sources(SimulatedFleet, {}, args)
    model = sources.from_sources(FailureModel, {}, args)
    check_together(fleet, model)
    interruptions = expected_interruptions(fleet, model)
    if interruptions > MANY:
        said = f"atoll: {interruptions:.1e} interruptions to simulate: this may take minutes"
        print(said, file=sys.stderr, flush=True)
    result = simulate(fleet, model)
    print(json.dumps(simulated_as_json(result), allow_nan=False) if args.json else simulated_as_text(result))
    return 0
