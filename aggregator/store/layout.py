"""The layout of a store directory, and reading it without a lock.

    lock                            held (flock) by the one process that writes
    name                            what this store is called, and where: a copy of it must not be taken for it
    run.msgpack                     the run record: run id, epoch, manifest, members and their incarnations
    fragments/003/00000017.commit   version 17 of fragment 3 (:mod:`aggregator.store.commit_file`)
    ledger.jsonl                    one line per version: who is in it, with what weight and staleness
    model/                          the small files of the model, where an island brought them: configuration, tokenizer

Files are replaced by renaming, so a reader sees the old or the new; a version may be pruned between listing and
opening, and then a newer one is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from aggregator.interface.events import Commit
from aggregator.merge.fragment_state import Vector
from aggregator.store.commit_file import FORMAT, Damaged, read_params
from broker.base.errors import Unavailable, cure_of
from broker.process import logs

log = logs.get(__name__)


@contextmanager
def mapped(what: str, *, definite: bool) -> Iterator[None]:
    """Turns an error of the operating system into Unavailable: what failed, why, and what to do about it."""
    try:
        yield
    except OSError as err:
        raise Unavailable(f"{what}: {err.strerror or err}; {cure_of(err)}", definite=definite) from err


def name_path(directory: Path) -> Path:
    """Returns the path of the store's name."""
    return directory / "name"


def read_name(directory: Path) -> str | None:
    """Returns what the store was called when it was opened last; None if it never stood by."""
    words = name_path(directory).read_text(encoding="utf-8").split() if name_path(directory).exists() else []
    return words[0] if words else None


def run_path(directory: Path) -> Path:
    """Returns the path of the run record."""
    return directory / "run.msgpack"


def ledger_path(directory: Path) -> Path:
    """Returns the path of the ledger of versions."""
    return directory / "ledger.jsonl"


def model_path(directory: Path) -> Path:
    """Returns the path of the small files of the model."""
    return directory / "model"


def commit_path(directory: Path, fragment_id: int, version: int) -> Path:
    """Returns the path of one fragment version."""
    return directory / "fragments" / f"{fragment_id:03d}" / f"{version:08d}.commit"


def fragment_ids(directory: Path) -> list[int]:
    """Returns the fragments that have a directory, in order; raises Unavailable."""
    with mapped(f"cannot list the fragments of {directory}", definite=True):
        return sorted(int(path.name) for path in (directory / "fragments").glob("*") if path.name.isdecimal())


def versions(directory: Path, fragment_id: int) -> list[int]:
    """Returns the versions of a fragment that have a file, newest first, whole or not; raises Unavailable."""
    folder = commit_path(directory, fragment_id, 0).parent
    with mapped(f"cannot list the versions in {folder}", definite=True):
        found = [int(path.stem) for path in folder.glob("*.commit") if path.stem.isdecimal()]
    return sorted(found, reverse=True)


def pack_run(record: Mapping[str, Any]) -> bytes:
    """Returns the file content of a run record of plain data (:mod:`aggregator.state.records`)."""
    body = msgpack.packb(dict(record))
    packed: bytes = msgpack.packb({"format": FORMAT, "checksum": xxhash.xxh3_64_intdigest(body), "record": body})
    return packed


def read_run(directory: Path) -> dict[str, Any] | None:
    """Returns the run record, or None if none was written yet.

    Raises:
        Damaged: If it is not what was written.
        Unavailable: If it cannot be read.
    """
    path = run_path(directory)
    with mapped(f"cannot read {path}", definite=True):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
    return unpack_run(path, content)


def unpack_run(path: Path, content: bytes) -> dict[str, Any]:
    """Returns the run record in the content of its file; raises as :func:`read_run`."""
    try:
        outer = msgpack.unpackb(content)
        written_format, body = outer["format"], outer["record"]
        intact = xxhash.xxh3_64_intdigest(body) == outer["checksum"]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as err:
        raise Damaged(path, "it is no run record", cure="restore it from a copy of the store") from err
    if not intact:
        raise Damaged(path, "it does not fit its checksum", cure="restore it from a copy of the store")
    if written_format != FORMAT:
        cure = f"this program reads format {FORMAT}: run the one that wrote it"
        raise Unavailable(f"{path} has format {written_format!r}; {cure}", definite=True)
    record: dict[str, Any] = msgpack.unpackb(body)
    return record


def read_newest(directory: Path, fragment_id: int) -> tuple[Commit, Vector]:
    """Returns the newest whole version of a fragment, without its momentum.

    A damaged newer one is passed over, with a warning.

    Raises:
        Unavailable: If there is none, or it cannot be read.
    """
    while True:
        listed = versions(directory, fragment_id)
        try:
            for version in listed:
                try:
                    return read_params(commit_path(directory, fragment_id, version))
                except Damaged as err:
                    log.warning("store.version_damaged", path=str(err.path), problem=err.problem)
        except FileNotFoundError:
            continue  # pruned since it was listed: the writer is ahead, and newer versions are there
        what = "no whole version" if listed else "no version"
        cure = "wait until the run is seeded" if not listed else "restore one from a copy of the store"
        raise Unavailable(f"{directory} holds {what} of fragment {fragment_id}; {cure}", definite=True)


def read_seed(directory: Path, fragment_id: int) -> tuple[Commit, Vector]:
    """Returns version 0 of a fragment, without its momentum.

    Raises:
        Damaged: If it is not what was written.
        Unavailable: If there is none, or it cannot be read.
    """
    try:
        return read_params(commit_path(directory, fragment_id, 0))
    except FileNotFoundError as err:
        what = f"{directory} holds no version 0 of fragment {fragment_id}; wait until the run is seeded"
        raise Unavailable(what, definite=True) from err
