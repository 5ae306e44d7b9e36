"""``atoll restore PLACE RUN_DIR``: makes a run directory or a store from copies in an object store.

An aggregator with ``--copy-to PLACE`` makes the copies; :mod:`aggregator.copies.restoring` says how a restored run
differs from the lost one.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from aggregator.copies.bucket import Bucket
from aggregator.copies.restoring import Restored, chosen, restore, sets_by_shard
from aggregator.copy_rules.sets import STORE, CompleteSet
from broker.base import sources
from broker.process import logs
from ops.text import age


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``atoll restore``."""
    parser.add_argument("place", metavar="PLACE", help="what --copy-to was, such as s3://bucket/run")
    parser.add_argument(
        "directory",
        type=sources.as_path,
        nargs="?",
        metavar="RUN_DIR",
        help="new directory (left out: says what there is)",
    )
    parser.add_argument(
        "--shard", type=int, metavar="N", help="only this one of several aggregator shards, since the others live"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Restores the newest complete copy, or lists the copies; returns the exit code.

    Raises:
        ConfigError: The address cannot work, or the directory is in use.
        Unavailable: There is no complete copy, or it cannot be read or written.
    """
    logs.configure("restore")
    bucket = Bucket.open(args.place, "PLACE", create=False)
    now_s = time.time()
    if args.directory is None:
        sets = sets_by_shard(bucket)
        taken = [each for n, each in chosen(sets).items() if args.shard in (None, n)]
        there = [each for n, found in sets.items() if args.shard in (None, n) for each in found]
        if args.json:
            print(json.dumps([_facts(each, now_s) | {"taken": each in taken} for each in there]))
        else:
            for each in there:
                print(f"{_sentence(each, now_s)}{'  <- a restore takes this' if each in taken else ''}")
        return 0
    restored = restore(bucket, args.directory.absolute(), now_s, args.shard)
    if args.json:
        print(json.dumps(_result(args.directory, restored, now_s)))
    else:
        print("\n".join(_lines(args.directory, restored, now_s)))
    return 0


def _facts(whole: CompleteSet, now_s: float) -> dict[str, object]:
    return {
        "run_id": whole.run_id,
        "shard": list(whole.shard),
        "time": datetime.fromtimestamp(whole.time_s, UTC).isoformat(timespec="seconds"),
        "age_s": round(max(0.0, now_s - whole.time_s), 1),
        "epoch": whole.epoch,
        "serial": whole.serial,
        "ended": whole.ended,
        "bytes": whole.size,
        "versions": [each.version for each in whole.versions],
        "digests": [each.digest for each in whole.versions],
    }


def _result(directory: Path, restored: Sequence[Restored], now_s: float) -> dict[str, object]:
    """Returns the facts of one shard; of several, those of each, in order."""
    each = [
        _facts(one.whole, now_s)
        | {"directory": str(directory / one.folder), "epoch_claimed": one.epoch, "goes_on_as": one.versions}
        for one in restored
    ]
    return each[0] if len(each) == 1 else {"directory": str(directory), "shards": each}


def _sentence(whole: CompleteSet, now_s: float) -> str:
    when = datetime.fromtimestamp(whole.time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    old = age(max(0.0, now_s - whole.time_s))
    shard, shards = whole.shard
    of = f"run {whole.run_id}" if shards == 1 else f"run {whole.run_id}, shard {shard} of {shards}"
    return f"{of}, as it was {old} ago ({when}), epoch {whole.epoch}, {whole.size / 1e6:.1f} MB"


def _lines(directory: Path, restored: Sequence[Restored], now_s: float) -> list[str]:
    lines = [line for each in restored for line in _lines_of(directory, each, now_s)]
    shards = restored[0].whole.shard[1]
    config = directory / "config.toml"
    if config.exists() and "hub" in sources.read_file(config):
        how = f"to go on: hub --run-dir {shlex.quote(str(directory))}, with the keys of before in {directory / 'keys'}"
        return [*lines, how]
    if config.exists():
        return [*lines, f"to go on: up --resume {shlex.quote(str(directory))}"]
    for each in restored:
        words = ["aggregator", "--run", each.whole.run_id, "--store", str(directory / each.folder / STORE)]
        words += ["--shards", str(shards), "--shard", str(each.whole.shard[0])] if shards > 1 else []
        lines.append(f"to go on: {shlex.join(words)}, with the other flags as before")
    return lines


def _lines_of(directory: Path, restored: Restored, now_s: float) -> list[str]:
    whole = restored.whole
    lines = [
        f"{directory / restored.folder}: {_sentence(whole, now_s)}",
        f"fragment versions {' '.join(str(each.version) for each in whole.versions)}",
    ]
    if restored.versions != tuple(each.version for each in whole.versions):
        lines.append(f"they go on as     {' '.join(map(str, restored.versions))}, above what islands may hold")
    return lines
