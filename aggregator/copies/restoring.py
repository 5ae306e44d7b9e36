"""Makes a store out of the newest set in an object store. Shell.

The store that comes out is not the one that was lost: that one may have gone on after its last copy, and may even live.
So a restore *claims* an epoch above all that are known there, by an object that only one can make. When the restored
aggregator begins to copy, whoever copies there under a lower one stops; a restore that is only tried stops nobody. And
the restored versions go on under numbers above all that may have been made since
(:func:`aggregator.copy_rules.planning.gap`), as a new lineage: islands with later ones adopt them, and what they
trained since the copy stands in the books as lost.

Each of several shards is restored from its own copies, and claims an epoch of its own. All of them go back to the
newest copy of shard 0, or less far than that never: of each other shard that is taken which fits to it
(:mod:`aggregator.copy_rules.planning`). So fragments of two shards may be of unlike moments.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from aggregator.copies.bucket import AlreadyThere, Bucket
from aggregator.copy_rules.planning import below, fits, folder, gap, restored_epoch, shards_there
from aggregator.copy_rules.sets import CLAIMS, STORE, CompleteSet, CopiedFile, claim_key, newest_sets, read_set
from aggregator.store.commit_file import write_all
from aggregator.store.layout import ledger_path, mapped, read_run
from aggregator.store.ledger_file import cut_above
from aggregator.store.replacing import flush
from aggregator.store.store import Store
from broker.base.errors import ConfigError, Unavailable
from broker.process import logs

log = logs.get(__name__)

#: Restores that may claim an epoch at the same time.
CLAIM_ATTEMPTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A store that was made out of copies.

    Attributes:
        folder: Where it lies in the directory, with its tape; of the first shard there itself.
        whole: The copies that it was made of.
        age_s: How old they are, in seconds.
        epoch: That was claimed; the next aggregator leads above it.
        versions: Under which the fragments go on.
    """

    folder: Path
    whole: CompleteSet
    age_s: float
    epoch: int
    versions: tuple[int, ...]


def sets_by_shard(bucket: Bucket) -> dict[int, list[CompleteSet]]:
    """Returns shard -> its sets in an object store, newest first.

    Raises:
        ConfigError: The address is that of one shard's folder.
        Unavailable: There is none, of one shard at least, or it cannot be read.
    """
    keys = bucket.list()
    counts = sorted(shards_there(keys))
    if not counts:
        cure = "check the address; an aggregator with --copy-to makes the first after the first versions"
        raise Unavailable(f"{bucket.url} holds no complete copy; {cure}", definite=True)
    if len(counts) > 1:
        what = f"{bucket.url} holds copies of runs of {' and of '.join(map(str, counts))} shards"
        raise Unavailable(f"{what}; move those of one run to a place of its own", definite=True)
    found = {n: sets_of(bucket, keys, n, counts[0]) for n in range(counts[0])}
    for n, sets in found.items():
        if not sets:
            which = f"of shard {n} (there are {counts[0]})" if counts[0] > 1 else "that can be read"
            cure = "each shard's aggregator needs --copy-to" if counts[0] > 1 else "check the address"
            raise Unavailable(f"{bucket.url} holds no complete copy {which}; {cure}", definite=True)
        for each in sets:
            if each.shard[1] != counts[0]:
                cure = f"is of shard {each.shard[0]} alone: give the place above it, with --shard if only that is lost"
                raise ConfigError("PLACE", bucket.url, cure)
    return found


def sets_of(bucket: Bucket, keys: Iterable[str], shard: int, shards: int) -> list[CompleteSet]:
    """Returns the sets of a shard among ``keys`` that can be read, newest first; raises Unavailable."""
    where, found = folder(shard, shards), []
    for key in newest_sets(below(keys, where)):
        with suppress(FileNotFoundError):  # replaced by a newer one since it was listed
            try:
                found.append(read_set(bucket.read(where + key)))
            except ValueError as err:
                log.warning("copy.set_unreadable", key=where + key, detail=str(err))
    return found


def chosen(sets: Mapping[int, Sequence[CompleteSet]]) -> dict[int, CompleteSet]:
    """Returns each shard's set for a restore, if all are sound; a shard without one that fits is left out.

    Args:
        sets: As :func:`sets_by_shard` returns them.
    """
    leader = sets[0][0]
    return {n: fitting[0] for n in sets if (fitting := [each for each in sets[n] if fits(each, leader)])}


def restore(bucket: Bucket, directory: Path, now_s: float, shard: int | None = None) -> list[Restored]:
    """Writes the newest whole sets that fit together into a new directory, as stores to go on from.

    It is laid out as ``up`` does: the store of shard 0 is in the folder ``store``; the event tape, and the settings of
    a run by ``up``, lie beside it. Those of shard 1 are in ``aggregator-1``, and so on.

    Args:
        bucket: Where the copies are.
        directory: Must not exist, or be empty. It is there as a whole, or not at all.
        now_s: Seconds since 1970.
        shard: Only this one, for the others live; its store is in ``store``.

    Raises:
        ConfigError: Something is in the directory, or this shard cannot be restored by itself.
        Unavailable: There is no set that is whole, or the disk or the other side fails.
    """
    if directory.is_symlink() or (directory.exists() and (not directory.is_dir() or any(directory.iterdir()))):
        raise ConfigError("RUN_DIR", str(directory), "is in use, and nothing is overwritten: name a new directory")
    sets = sets_by_shard(bucket)
    if shard is not None:
        _check_alone(shard, len(sets))
    building = directory.with_name(f".{directory.name}.restoring-{os.getpid()}")
    made: list[Restored] = []
    try:
        with mapped(f"cannot write {directory}", definite=True):
            building.mkdir(parents=True)
            for n in sets if shard is None else (shard,):
                inner = Path(f"aggregator-{n}") if n and shard is None else Path()
                usable = [each for each in sets[n] if not made or fits(each, made[0].whole)]
                if not usable:
                    raise Unavailable(_unfit(bucket, n, len(sets)), definite=True)
                made.append(_restore_one(bucket.below(folder(n, len(sets))), building, inner, usable, now_s))
            if directory.exists():
                directory.rmdir()
            building.rename(directory)
            flush(directory.parent)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return made


def _check_alone(shard: int, shards: int) -> None:
    if not 0 <= shard < shards:
        number = "one shard" if shards == 1 else f"the shards 0 to {shards - 1}"
        raise ConfigError("shard", shard, f"is not there: the run has {number}")
    if not shard:
        cure = "cannot be restored by itself, for it decides for the others: stop them, and restore all without --shard"
        raise ConfigError("shard", shard, cure)


def _unfit(bucket: Bucket, shard: int, shards: int) -> str:
    what = f"no whole copy of shard {shard} (of {shards}) in {bucket.url} fits to one of shard 0: each is newer"
    return f"{what}; restore the objects by the versions that the bucket keeps, if it does"


def _restore_one(bucket: Bucket, building: Path, inner: Path, sets: list[CompleteSet], now_s: float) -> Restored:
    """Makes the store of one shard out of the newest of its sets that is whole."""
    epoch = _claim(bucket, now_s)
    target = building / inner
    target.mkdir(exist_ok=True)
    whole = _download_one(bucket, sets, target)
    go_on = gap(sets[sets.index(whole) :], now_s)
    versions = _make_store(target / STORE, whole, epoch, 0 if whole.ended else go_on)
    return Restored(folder=inner, whole=whole, age_s=max(0.0, now_s - whole.time_s), epoch=epoch, versions=versions)


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
    """Downloads the newest set that is whole into an empty directory."""
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
    """An object is missing or damaged."""


def _download(bucket: Bucket, file: CopiedFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if path.suffix == ".toml" else 0o644)
    try:
        for part, key in zip(file.parts, file.keys, strict=True):
            digest, size = xxhash.xxh3_128(), 0
            try:
                for piece in [gzip.decompress(bucket.read(key))] if part.packed else bucket.get(key):
                    digest.update(piece)
                    size += len(piece)
                    write_all(fd, memoryview(piece))
            except FileNotFoundError as err:
                raise _Broken(f"{key} is not there") from err
            except (EOFError, zlib.error, gzip.BadGzipFile) as err:
                raise _Broken(f"{key} cannot be unpacked ({err})") from err
            if size != part.size or digest.hexdigest() != part.digest:
                raise _Broken(f"{key} is not what was copied ({size} bytes, expected {part.size})")
        os.fsync(fd)
    finally:
        os.close(fd)


def _make_store(store: Path, whole: CompleteSet, epoch: int, leave_out: int) -> tuple[int, ...]:
    """Makes the copied files a store that goes on, and returns its versions."""
    newest = {each.fragment_id: each.version for each in whole.versions}
    cut_above(ledger_path(store), newest)  # it was read a moment after the versions
    with Store.open(store) as opened:
        loaded = opened.load()
        for damaged in loaded.damaged:
            raise damaged
        for each in whole.versions:
            commit = loaded.fragments[each.fragment_id]
            if (commit.fragment_version, commit.digest) != (each.version, each.digest):
                what = f"version {each.version} of fragment {each.fragment_id} is {each.digest} in the set"
                raise Unavailable(f"{what}, and {commit.digest} in its file; take another copy", definite=True)
        if leave_out:
            opened.begin_lineage({p: version + leave_out for p, version in newest.items()}, epoch)
        record = read_run(store)
        assert record is not None, "a set has a run record"
        opened.save_run(record | {"epoch": epoch})
    return tuple(version + leave_out + 1 if leave_out else version for _, version in sorted(newest.items()))
