"""``evaluate``: prints the held-out loss of a safetensors model; ``up`` runs it as a process, for its report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from broker import flags, settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``evaluate``."""
    flags.add_config_flag(parser)
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="safetensors file of the model")


def run(args: argparse.Namespace) -> int:
    """Prints ``{"loss": nats per token}`` as one line.

    Raises:
        ConfigError: The task, its options or the file do not fit together.
    """
    from islands.config import IslandConfig
    from islands.evaluate import evaluate_file
    from islands.task import load_task

    tables = settings.read_file(args.config) if args.config is not None else {}
    task = load_task(settings.load(IslandConfig, args, "island").task, tables.get("task", {}))
    print(json.dumps({"loss": evaluate_file(task, args.model)}), flush=True)
    return 0
