"""``atoll export``: writes the global model of a run for other tools, also while the run goes on."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from broker.base import sources
from ops.models import formats
from ops.models.global_model import DTYPES, export, stores_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``atoll export``."""
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="directory of a run, or a store by itself")
    parser.add_argument(
        "--out", type=sources.as_path, metavar="FILE", help="file to write (default: model.safetensors in RUN_DIR)"
    )
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), default="f32", help="number format of the tensors (default: f32)"
    )
    formats.add_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Writes the file and says what is in it; returns the exit code.

    Raises:
        ConfigError: If the directory holds no store.
        Unavailable: If the store has no model yet, or a file cannot be read or written.
    """
    if formats.wanted(args):
        written = formats.write(args, args.directory, stores_of(args.directory))
        print(json.dumps(asdict(written)) if args.json else str(written))
        return 0
    out = args.out if args.out is not None else args.directory / "model.safetensors"
    exported = export(args.directory, out, dtype=args.dtype)
    if args.json:
        print(json.dumps(asdict(exported)))
    else:
        size = f"{exported.parameters:,} parameters as {args.dtype}, {exported.file_bytes / 1e6:.1f} MB"
        print(f"{exported.path}: run {exported.run_id}, {size}")
        print("fragment versions: " + " ".join(map(str, exported.versions)))
    return 0
