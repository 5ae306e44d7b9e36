"""Makes a store out of the newest set in an object store. Shell.

The store that comes out is not the one that was lost: that one may have gone on after its last copy, and may even live.
So a restore *claims* an epoch above all that are known there, by an object that only one can make. When the restored
aggregator begins to copy, whoever copies there under a lower one stops; a restore that is only tried stops nobody. And
the restored versions go on under numbers above all that may have been made since
(:func:`aggregator.copies.planning.gap`), as a new lineage: islands with later ones adopt them, and what they trained
since the copy stands in the books as lost.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from aggregator.copies.bucket import AlreadyThere, Bucket
from aggregator.copies.planning import gap, newest_sets, restored_epoch
from aggregator.copies.sets import CLAIMS, STORE, CompleteSet, CopiedFile, Part, claim_key, read_set
from aggregator.store.commit_file import write_all
from aggregator.store.layout import ledger_path, mapped, read_run
from aggregator.store.replacing import flush_directory, replace
from aggregator.store.store import Store
from broker.process import logs
from broker.wire.errors import ConfigError, Unavailable

log = logs.get(__name__)

#: Restores that may claim an epoch at the same time.
CLAIM_ATTEMPTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A store that was made out of copies.

    Attributes:
        whole: The copies that it was made of.
        age_s: How old they are, in seconds.
        epoch: That was claimed; the next aggregator leads above it.
        versions: Under which the fragments go on.
    """

    whole: CompleteSet
    age_s: float
    epoch: int
    versions: tuple[int, ...]


def sets_there(bucket: Bucket) -> list[CompleteSet]:
    """Returns the sets in an object store, newest first.

    Raises:
        Unavailable: There is none, or it cannot be read.
    """
    found = []
    for key in newest_sets(bucket.list()):
        try:
            found.append(read_set(bucket.read(key)))
        except FileNotFoundError:
            continue  # replaced by a newer one since it was listed
        except ValueError as err:
            log.warning("restore.set_unreadable", key=key, detail=str(err))
    if not found:
        cure = "check the address; an aggregator with --copy-to makes the first after the first versions"
        raise Unavailable(f"{bucket.url} holds no complete copy; {cure}", definite=True)
    return found


def restore(bucket: Bucket, directory: Path, now_s: float) -> Restored:
    """Writes the newest set that is whole into a new directory, as a store that an aggregator goes on from.

    The store is in the folder ``store``; the event tape, and the settings of a run by ``up``, lie beside it.

    Args:
        bucket: Where the copies are.
        directory: Must not exist, or be empty. It is there as a whole, or not at all.
        now_s: Seconds since 1970.

    Raises:
        ConfigError: Something is in the directory.
        Unavailable: There is no set that is whole, or the disk or the other side fails.
    """
    if directory.is_symlink() or (directory.exists() and (not directory.is_dir() or any(directory.iterdir()))):
        raise ConfigError("RUN_DIR", str(directory), "is in use, and nothing is overwritten: name a new directory")
    sets = sets_there(bucket)
    epoch = _claim(bucket, now_s)
    building = directory.with_name(f".{directory.name}.restoring-{os.getpid()}")
    try:
        with mapped(f"cannot write {directory}", definite=True):
            building.mkdir(parents=True)
            whole = _download_one(bucket, sets, building)
            go_on = gap(sets[sets.index(whole) :], now_s)
            versions = _make_store(building / STORE, whole, epoch, 0 if whole.ended else go_on)
            if directory.exists():
                directory.rmdir()
            building.rename(directory)
            flush_directory(directory.parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return Restored(whole=whole, age_s=max(0.0, now_s - whole.time_s), epoch=epoch, versions=versions)


def _claim(bucket: Bucket, now_s: float) -> int:
    """Takes an epoch that no other restore has."""
    for _ in range(CLAIM_ATTEMPTS):
        epoch = restored_epoch(bucket.list())
        try:
            bucket.put(claim_key(epoch), json.dumps({"time_s": now_s}).encode(), new=True)
        except AlreadyThere:
            continue
        return epoch
    what = f"{CLAIM_ATTEMPTS} other restores came first in {bucket.url}/{CLAIMS}"
    raise Unavailable(f"{what}; see who restores the same run, and try again", definite=True)


def _download_one(bucket: Bucket, sets: list[CompleteSet], building: Path) -> CompleteSet:
    """Downloads the newest set that is whole."""
    problems = []
    for whole in sets:
        try:
            for file in whole.files:
                _download(bucket, file, building / file.path)
        except _Broken as err:
            problems.append(str(err))
            log.warning("restore.set_broken", key=whole.key, detail=str(err), cure="the one before is taken")
            shutil.rmtree(building)
            building.mkdir()
            continue
        return whole
    cure = "restore the objects by the versions that the bucket keeps, if it does"
    raise Unavailable(f"no copy in {bucket.url} is whole: {'; '.join(problems)}; {cure}", definite=True)


class _Broken(Exception):
    """An object is missing, or is not what was copied."""


def _download(bucket: Bucket, file: CopiedFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if path.suffix == ".toml" else 0o644)
    try:
        for part, key in zip(file.parts, file.keys, strict=True):
            digest, size = xxhash.xxh3_128(), 0
            try:
                for piece in _content(bucket, key, part):
                    digest.update(piece)
                    size += len(piece)
                    write_all(fd, memoryview(piece))
            except FileNotFoundError as err:
                raise _Broken(f"{key} is not there") from err
            except zlib.error as err:
                raise _Broken(f"{key} cannot be unpacked ({err})") from err
            if size != part.size or digest.hexdigest() != part.digest:
                raise _Broken(f"{key} is not what was copied ({size} bytes, expected {part.size})")
        os.fsync(fd)
    finally:
        os.close(fd)


def _content(bucket: Bucket, key: str, part: Part) -> Iterator[bytes | memoryview]:
    if not part.packed:
        yield from bucket.get(key)
        return
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    for piece in bucket.get(key):
        yield unpacker.decompress(piece)
    yield unpacker.flush()


def _make_store(store: Path, whole: CompleteSet, epoch: int, leave_out: int) -> tuple[int, ...]:
    """Makes the copied files a store that goes on, and returns its versions."""
    newest = {each.fragment_id: each.version for each in whole.versions}
    _cut_ledger(ledger_path(store), newest)
    with Store.open(store) as opened:
        loaded = opened.load()
        for damaged in loaded.damaged:
            raise damaged
        for each in whole.versions:
            commit = loaded.fragments[each.fragment_id][0]
            if (commit.fragment_version, commit.digest) != (each.version, each.digest):
                what = f"version {each.version} of fragment {each.fragment_id} is {each.digest} in the set"
                raise Unavailable(f"{what}, and {commit.digest} in its file; take another copy", definite=True)
        if leave_out:
            opened.begin_lineage({p: version + leave_out for p, version in newest.items()}, epoch)
        record = read_run(store)
        assert record is not None, "a set has a run record"
        opened.save_run(record | {"epoch": epoch})
    return tuple(version + leave_out + 1 if leave_out else version for _, version in sorted(newest.items()))


def _cut_ledger(path: Path, newest: dict[int, int]) -> None:
    """Leaves out lines of versions after the set: the ledger was read a moment later."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line)
            later = row["fragment_version"] > newest.get(row["fragment_id"], -1)
        except (ValueError, KeyError, TypeError):
            later = False  # one that is torn or damaged is for the store to deal with
        if not later:
            kept.append(line)
    replace(path, lambda fd: write_all(fd, memoryview(b"".join(kept))))
