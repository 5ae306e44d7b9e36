"""``atoll snapshots``: named snapshots of the whole model, and the way back to one.

A snapshot is made while the run goes on, in every store of the run (:mod:`aggregator.store.snapshots`). To roll back,
the run must have ended or been stopped: its stores get the snapshot's versions as their newest, under numbers above all
that anybody has seen. So the next life of the run is a new lineage of the model. Tokens and data go on where they
were: what was merged since the snapshot stays counted, as ``rolled_back``, and is not trained again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aggregator.interface.notes import RolledBack
from aggregator.store import layout, snapshots
from aggregator.store.commit_file import Damaged
from aggregator.store.snapshots import Snapshot
from aggregator.store.store import Store
from aggregator.store.tape import Tape, note_line
from broker.base import sources
from broker.base.errors import ConfigError, Unavailable
from broker.process import clocks
from ops import run_directory
from ops.inspect.tapes import tapes_in
from ops.models import formats, global_model
from ops.models.global_model import stores_of

_EPILOG = """
  atoll snapshots save runs/demo before-anneal         also while the run goes on
  atoll snapshots list runs/demo
  atoll snapshots export runs/demo before-anneal --out model.safetensors
  atoll snapshots restore runs/demo before-anneal      when it has been stopped; then: atoll up --resume runs/demo
  atoll snapshots remove runs/demo before-anneal

RUN_DIR is the directory of a run, or the store of one aggregator by itself. Snapshots have no room of their own until
the store drops the versions that they hold: each then takes 8 bytes a
parameter, 12 where versions are rounded (version_codec)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``atoll snapshots``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    summaries = {
        "list": "show the snapshots of a run, oldest first",
        "save": "make a snapshot of the newest versions",
        "restore": "roll a run that is stopped back to a snapshot, as a new lineage",
        "export": "write the model of a snapshot as safetensors",
        "remove": "remove a snapshot",
    }
    for action, summary in summaries.items():
        made = actions.add_parser(action, help=summary, description=summary)
        made.add_argument("directory", type=Path, metavar="RUN_DIR", help="directory of a run, or a store by itself")
        if action != "list":
            made.add_argument("name", metavar="NAME", help="of the snapshot")
        if action == "export":
            made.add_argument(
                "--out", type=sources.as_path, metavar="FILE", help="file to write (default: NAME.safetensors)"
            )
            made.add_argument(
                "--dtype", choices=sorted(global_model.DTYPES), default="f32", help="of the tensors (f32)"
            )
            formats.add_flags(made)
        made.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.epilog = f"{parser.epilog}\n{_EPILOG}"


def run(args: argparse.Namespace) -> int:
    """Does what was asked for and says so; returns the exit code.

    Raises:
        ConfigError: The directory holds no store, or no snapshot of this name; or the name is taken.
        Unavailable: The run goes on, a file is damaged, or the disk fails.
    """
    stores = stores_of(args.directory)
    match args.action:
        case "list":
            _say(args, [asdict(each) for each in _listed(stores)], _table(_listed(stores)))
        case "save":
            made = save(stores, args.name)
            _say(args, asdict(made), f"snapshot {made.name}: {_sentence(made)}")
        case "restore":
            restored = restore(args.directory, args.name)
            versions = " ".join(str(restored[p]) for p in sorted(restored))
            after = f"the newest versions are now {versions}; islands adopt them when the run goes on"
            _say(args, {"snapshot": args.name, "versions": restored}, f"rolled back to {args.name}: {after}")
        case "export" if formats.wanted(args):
            parts = [[path] for path in _snapshots_in(stores, args.name)]
            written = formats.write(args, args.directory, parts)
            _say(args, asdict(written), f"{written}: snapshot {args.name}")
        case "export":
            out = args.out if args.out is not None else Path(f"{args.name}.safetensors")
            exported = global_model.export(_snapshots_in(stores, args.name), out, dtype=args.dtype)
            size = f"{exported.parameters:,} parameters as {args.dtype}, {exported.file_bytes / 1e6:.1f} MB"
            _say(args, asdict(exported), f"{exported.path}: snapshot {args.name} of run {exported.run_id}, {size}")
        case "remove":
            for path in _snapshots_in(stores, args.name):
                snapshots.remove(path.parent.parent, args.name)
            _say(args, {"removed": args.name}, f"removed {args.name}")
    return 0


def save(stores: Sequence[Sequence[Path]], name: str) -> Snapshot:
    """Makes a snapshot in every shard, in its store with the newest versions; returns all as one.

    With several shards, each has its own moment, some milliseconds apart: fragments of two shards are never of one.
    """
    leaders = [max(shard, key=_progress) for shard in stores]
    for store in leaders:
        if snapshots.snapshot_path(store, name).exists():
            raise ConfigError("NAME", name, f"is taken in {store}: choose another, or remove that one first")
    return _together([snapshots.save(store, name) for store in leaders])


def restore(directory: Path, name: str) -> dict[int, int]:
    """Rolls a run back; returns the new number of each fragment's version.

    All stores of a shard get the same versions, those of its standbys too: whoever leads next has them.

    Raises:
        ConfigError: There is no such snapshot.
        Unavailable: The run goes on, or the snapshot is damaged; nothing is changed then.
    """
    stores = stores_of(directory)
    sources = _snapshots_in(stores, name)
    if run_directory.in_use(directory):
        raise Unavailable(f"the run in {directory} goes on; stop it first (Ctrl-C)", definite=True)
    restored: dict[int, int] = {}
    with ExitStack() as stack:
        for shard, source in zip(stores, sources, strict=True):
            opened = [stack.enter_context(Store.open(store)) for store in shard]
            loaded = [each.load() for each in opened]
            epoch = 1 + max(each.run["epoch"] for each in loaded if each.run is not None)
            commits = [commit for each in loaded for commit in each.fragments.values()]
            newest = sorted(commits, key=lambda commit: (commit.epoch, commit.fragment_version))
            books = {commit.fragment_id: commit.ledger for commit in newest}  # the last one stands
            above = {
                p: max(max(layout.versions(store, p), default=-1) for store in shard)
                for p in layout.fragment_ids(source)
            }
            try:
                for store in opened:
                    store.roll_back(source, above, epoch, books)
            except Damaged as err:
                raise Unavailable(f"{err}; nothing was changed by it", definite=True) from err
            restored |= {p: version + 1 for p, version in above.items()}
    _record(directory, name, restored)
    return restored


def _record(directory: Path, name: str, restored: dict[int, int]) -> None:
    """Writes a snapshot's event to the tape, for replay and explain."""
    for path in tapes_in(directory)[:1]:
        tape = Tape(path)
        note = RolledBack(snapshot=name, versions=[restored[p] for p in sorted(restored)], at=time.time())
        tape.write(note_line(note, clocks.monotonic()))
        tape.close()


def _snapshots_in(stores: Sequence[Sequence[Path]], name: str) -> list[Path]:
    """Returns the directory of a snapshot in each shard; the newest, where several of its stores have one.

    Raises:
        ConfigError: A shard has none.
    """
    found = []
    for shard in stores:
        having = [store for store in shard if snapshots.snapshot_path(store, name).is_dir()]
        if not having:
            snapshots.named(shard[0], name)  # says which there are
        newest = max(having, key=lambda store: snapshots.named(store, name).saved_at_s)
        found.append(snapshots.snapshot_path(newest, name))
    return found


def _listed(stores: Sequence[Sequence[Path]]) -> list[Snapshot]:
    by_name: dict[str, list[Snapshot]] = {}
    for shard in stores:
        for each in {each.name: each for store in shard for each in snapshots.listed(store)}.values():
            by_name.setdefault(each.name, []).append(each)
    whole = [_together(parts) for parts in by_name.values() if len(parts) == len(stores)]
    return sorted(whole, key=lambda each: each.saved_at_s)


def _together(parts: Sequence[Snapshot]) -> Snapshot:
    """Returns the snapshots of all shards as one."""
    return Snapshot(
        name=parts[0].name,
        saved_at_s=max(each.saved_at_s for each in parts),
        epoch=max(each.epoch for each in parts),
        tokens=max(each.tokens for each in parts),
        versions={p: version for each in parts for p, version in each.versions.items()},
        digests={p: digest for each in parts for p, digest in each.digests.items()},
        size_bytes=sum(each.size_bytes for each in parts),
    )


def _progress(store: Path) -> tuple[int, int]:
    """Returns what tells a store that leads, or led last, from one that lags."""
    record = layout.read_run(store)
    newest = [max(layout.versions(store, p), default=-1) for p in layout.fragment_ids(store)]
    return (record or {}).get("epoch", -1), sum(newest)


def _sentence(each: Snapshot) -> str:
    versions = [each.versions[p] for p in sorted(each.versions)]
    span = str(versions[0]) if len(set(versions)) == 1 else f"{min(versions)} to {max(versions)}"
    return f"{len(versions)} fragments at versions {span}, {each.tokens:,} tokens, {each.size_bytes / 1e6:.1f} MB"


def _table(found: Sequence[Snapshot]) -> str:
    if not found:
        return "no snapshots"
    width = max(len(each.name) for each in found)
    moments = [time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.saved_at_s)) for each in found]
    rows = zip(found, moments, strict=True)
    return "\n".join(f"{each.name:{width}}  {moment}  {_sentence(each)}" for each, moment in rows)


def _say(args: argparse.Namespace, found: Any, text: str) -> None:
    print(json.dumps(found) if args.json else text, flush=True)
