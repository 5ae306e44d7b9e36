"""The profiles side by side: one task, data, seed and tokens by ``up``, one island five times slower.

Each row is a whole run of real processes, one after the other: ours, the published algorithm, and its ancestors.
*Waiting* is the part of an island's time in which it could not train; bytes are those of one island in the mean, up and
down. Seconds are counted from the first step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import output
from benchmarks.output import Column, Printer
from broker.base.errors import Unavailable
from broker.wire.messages import Profile
from ops.launcher import ROOT

COLUMNS = (
    Column(key="profile", title="profile"),
    Column(key="loss", title="held-out loss", form=".3f"),
    Column(key="train_s", title="seconds", form=".1f"),
    Column(key="tokens_per_s", title="tokens/s", form=",.0f"),
    Column(key="speed", title="x decoupled", form=".2f"),
    Column(key="fast_waiting", title="waiting, fast islands", form=".1%"),
    Column(key="slow_waiting", title="waiting, slow island", form=".1%"),
    Column(key="mb_up", title="MB up", form=".1f"),
    Column(key="mb_down", title="MB down", form=".1f"),
)
#: So many times slower is the last one.
ISLANDS, SLOWER = 4, 5.0


def measured(profile: Profile, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Returns the row of one profile.

    Raises:
        Unavailable: The run failed; with the end of what it said.
    """
    pace = ",".join([str(args.pace)] * (ISLANDS - 1) + [str(SLOWER * args.pace)])
    flags = ("--profile", profile, "--islands", ISLANDS, "--tokens", args.tokens, "--pace", pace, "--json")
    task = ("--model", "tiny", "--run-dir", directory / profile)
    command = [sys.executable, "-m", "ops", "up", *map(str, (*flags, *task))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise Unavailable(
            f"up --profile {profile} ended with status {done.returncode}: {done.stderr[-500:]}", definite=True
        )
    report = json.loads(done.stdout.splitlines()[-1])
    islands = [report["islands"][name] for name in sorted(report["islands"])]
    train_s = report["wall_s"] - (report["first_step_s"] or 0.0)
    return {
        "profile": str(profile),
        "loss": report["loss"]["after"],
        "train_s": train_s,
        "tokens_per_s": report["tokens"]["trained"] / train_s,
        "fast_waiting": statistics.fmean(each["sync_share"] or 0.0 for each in islands[:-1]),
        "slow_waiting": islands[-1]["sync_share"] or 0.0,
        "mb_up": statistics.fmean(each["bytes_up"] for each in islands) / 1e6,
        "mb_down": statistics.fmean(each["bytes_down"] for each in islands) / 1e6,
    }


def measure(args: argparse.Namespace, printer: Printer) -> None:
    """Runs every profile and prints the table."""
    profiles = [Profile.DECOUPLED, Profile.DILOCO] if args.quick else list(Profile)
    base: float | None = None
    with tempfile.TemporaryDirectory(prefix="atoll-profiles-") as directory:
        for profile in profiles:
            printer.say(f"up --profile {profile}")
            row = measured(profile, args, Path(directory))
            base = base or row["tokens_per_s"]
            printer.add(row | {"speed": row["tokens_per_s"] / base})


def main(arguments: list[str] | None = None) -> int:
    parser = output.parser_of("profiles", __doc__, "--tokens 600000 --pace 0.05")
    parser.add_argument("--tokens", type=int, default=300_000, help="tokens of every run (default 300000)")
    parser.add_argument("--pace", type=float, default=0.05, help="least seconds of an inner step (default 0.05)")
    args = parser.parse_args(arguments)
    if args.quick:
        args.tokens = min(args.tokens, 40_000)
    return output.guarded(measure, args, COLUMNS)


if __name__ == "__main__":
    sys.exit(main())
