"""The four-region drill: Atoll against data-parallel training, over the same links, to the same loss.

Each region is a network namespace with one shaped link: packets are held back for half of the round trip, pass at the
rate of the link, and are dropped where its queue is full. The base is the same model, data and inner optimizer with one
all-reduce of all gradients in each step, by JAX's own collectives (gloo) over TCP between the regions. Atoll has an
island in each region, and its hub in the first. Both sides have the same processors, batch and tokens in a step of all
regions; compiling and evaluating are off the clock of both. Atoll runs before and after the base. Linux only, with
/dev/net/tun, as root or where users may make namespaces.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import output
from benchmarks.output import Column, Printer, median
from benchmarks.regions import fleet
from benchmarks.regions.network import regions
from broker.base.errors import Unavailable

#: Of both sides, constant after 50 steps; of Atoll's pseudo-gradients and versions; models of its run that are judged.
LEARNING_RATE, CODEC, SAMPLES = 1e-3, "int4", 20

#: One point: ``s`` since the first step, ``loss`` held out, and whatever else a side counts.
Point = Mapping[str, Any]

COLUMNS = (
    Column(key="side", title="side"),
    Column(key="parameters", title="model"),
    Column(key="mbit", title="Mbit/s", form="g"),
    Column(key="loss", title="held-out loss", form=".2f"),
    Column(key="seconds", title="seconds to it", form=",.1f"),
    Column(key="step_ms", title="ms per step", form=",.0f"),
    Column(key="steps", title="steps of a region", form=",.0f"),
    Column(key="mb_up", title="MB up, busiest region", form=",.1f"),
    Column(key="speed", title="x faster", form=",.1f"),
)


def run_atoll(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Returns the row and curve of one run with Atoll."""
    with regions(args.regions, round_trip_ms=args.round_trip_ms, mbit=args.mbit) as network:
        samples, steps, spent_s = fleet.atoll(
            network,
            directory,
            options_of(args),
            seconds=args.seconds,
            sample_s=args.seconds / (4 if args.quick else SAMPLES),
            codec=CODEC,
        )
        counted = network.counted()
    curve = fleet.losses_of(samples, options_of(args))
    return row_of("atoll", args, curve, steps=median(steps), spent_s=spent_s, counted=counted)


def run_base(args: argparse.Namespace, directory: Path, printer: Printer) -> dict[str, Any]:
    """Returns the row and curve of one data-parallel run."""

    def heard(said: dict[str, Any]) -> None:
        if "loss" in said:
            printer.say(f"  base: {said['s']:.0f} s, step {said['steps']}, loss {said['loss']:.3f}")

    with regions(args.regions, round_trip_ms=args.round_trip_ms, mbit=args.mbit) as network:
        said = fleet.base(
            network,
            directory,
            options_of(args),
            heard,
            loss=args.loss,
            seconds=args.base_seconds,
            every=args.every,
        )
        counted = network.counted()
    curve = [each for each in said if "loss" in each]
    if not curve:
        raise Unavailable("the base evaluated nothing: see --every", definite=True)
    return row_of("data-parallel", args, curve, steps=curve[-1]["steps"], spent_s=curve[-1]["s"], counted=counted)


def row_of(
    side: str,
    args: argparse.Namespace,
    curve: list[dict[str, Any]],
    *,
    steps: float,
    spent_s: float,
    counted: dict[str, Any],
) -> dict[str, Any]:
    """Returns the row of one run, with its curve."""
    return {
        "side": side,
        "parameters": args.model,
        "mbit": args.mbit,
        "round_trip_ms": args.round_trip_ms,
        "batch_tokens": args.batch * args.context,
        "wire": "float32" if side == "data-parallel" else CODEC,
        "loss": args.loss,
        "seconds": seconds_to(curve, args.loss),
        "steps": steps,
        "step_ms": 1e3 * spent_s / max(1.0, steps),
        "mb_up": max(counted["up_bytes"]) / 1e6,
        "counted": counted,
        "curve": curve,
    }


def seconds_to(curve: Sequence[Point], loss: float) -> float | None:
    """Returns when a curve first falls to a loss, on the line between two points; None if it does not."""
    before: Point | None = None
    for point in curve:
        if point["loss"] <= loss:
            if before is None or not before["loss"] > point["loss"]:  # as where it was no number
                return float(point["s"])
            share = (before["loss"] - loss) / (before["loss"] - point["loss"])
            return float(before["s"] + share * (point["s"] - before["s"]))
        before = point
    return None


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the options of the language task, the same on both sides."""
    return {
        "model": args.model,
        "batch": args.batch,
        "context": args.context,
        "learning_rate": LEARNING_RATE,
        "held_out_tokens": args.held_out_tokens,
    }


def measure(args: argparse.Namespace, printer: Printer) -> None:
    """Runs both sides in turn; prints a line for each run."""
    found: list[dict[str, Any]] = []
    sides = ["atoll", "data-parallel", "atoll"]
    for number, side in enumerate(sides, start=1):
        printer.say(f"run {number} of {len(sides)}: {side}")
        with tempfile.TemporaryDirectory(prefix="atoll-regions-") as name:
            row = run_atoll(args, Path(name)) if side == "atoll" else run_base(args, Path(name), printer)
        found.append(row)
    base_s = median(each["seconds"] for each in found if each["side"] != "atoll" and each["seconds"] is not None)
    for row in found:
        faster = base_s / row["seconds"] if row["seconds"] is not None and base_s == base_s else None
        printer.add({**{key: value for key, value in row.items() if key != "curve"}, "speed": faster})
    if args.raw is not None:
        output.keep(args.raw, found)


def main(arguments: list[str] | None = None) -> int:
    parser = output.parser_of("regions", __doc__, "--mbit 50 --loss 2.3 --raw drill.jsonl.gz")
    parser.add_argument("--regions", type=int, default=4, help="regions (4)")
    parser.add_argument("--round-trip-ms", type=float, default=80.0, help="between any two of them (80)")
    parser.add_argument("--mbit", type=float, default=50.0, help="rate of each region's link, each way (50)")
    parser.add_argument("--model", default="small", help="size of the built-in model (small: 0.9 M parameters)")
    parser.add_argument("--batch", type=int, default=4, help="windows in a step of one region (4)")
    parser.add_argument("--context", type=int, default=64, help="tokens of a window (64)")
    parser.add_argument("--held-out-tokens", type=int, default=32_768, help="that are evaluated (32768)")
    parser.add_argument("--loss", type=float, default=2.3, help="held-out loss to be reached, nats per byte (2.3)")
    parser.add_argument("--seconds", type=float, default=60.0, help="that Atoll trains (60)")
    parser.add_argument("--base-seconds", type=float, default=1800.0, help="that the base trains at most (1800)")
    parser.add_argument("--every", type=int, default=25, help="steps of the base between two evaluations (25)")
    parser.add_argument("--raw", type=Path, metavar="FILE", help="where every curve is kept, as JSON lines (.gz)")
    args = parser.parse_args(arguments)
    if args.quick:
        args.model, args.batch, args.regions, args.mbit, args.loss = "tiny", 2, 2, 200.0, 5.4
        args.seconds, args.every, args.base_seconds, args.held_out_tokens = 4.0, 5, 30.0, 4096
    return output.guarded(measure, args, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
