"""``evaluate``: prints the held-out metrics of a safetensors model; ``up`` runs it as a process, for its report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from broker.process import flags, settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``evaluate``."""
    flags.add_config_flag(parser)
    parser.add_argument("--model", type=Path, required=True, metavar="FILE", help="safetensors file of the model")


def run(args: argparse.Namespace) -> int:
    """Prints ``{"loss": nats per token, "metrics": {name: {"value": number, "better": "min"}}}`` as one line.

    The loss is null where the task evaluates none; ``better`` is ``min``, ``max``, or empty where nobody says.

    Raises:
        ConfigError: The task, its options or the file do not fit together.
    """
    from islands.config import IslandConfig
    from islands.tasks.evaluate import evaluate_file
    from islands.tasks.task import LOSS, load_task

    tables = settings.read_file(args.config) if args.config is not None else {}
    task = load_task(settings.load(IslandConfig, args, "island").task, tables.get("task", {}))
    found = evaluate_file(task, args.model)
    metrics = {name: {"value": value, "better": task.better(name)} for name, value in found.items()}
    print(json.dumps({"loss": found.get(LOSS), "metrics": metrics}), flush=True)
    return 0
