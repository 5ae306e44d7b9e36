"""Named snapshots of a store: one version of each fragment, all of one moment, kept until removed.

    snapshots/before-anneal/snapshot.json                   when it was made, and of which versions
    snapshots/before-anneal/run.msgpack                     the run record of that moment
    snapshots/before-anneal/fragments/003/00000017.commit   as in a store, so that it is read as one

Files of versions are never written to once they have their name, so a snapshot holds them by hard links: it takes no
time and no room, until the store itself has dropped them. It is made without the store's lock, while training goes on.
The moment is one at which each of its versions was the newest: no version came between the first look and the last.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from aggregator.ledger.ledger import tokens_trained
from aggregator.store.commit_file import Damaged, Header, read_header
from aggregator.store.layout import commit_path, fragment_ids, mapped, run_path, versions
from aggregator.store.replacing import TEMPORARY, flush
from broker.base.errors import ConfigError, Unavailable
from broker.process import clocks
from broker.wire.names import check_name

FILE = "snapshot.json"
#: A look and its links take milliseconds; a run whose versions come faster for so long is not expected.
TRIES = 200
PAUSE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Run, versions and time of a snapshot.

    Attributes:
        name: As it was made.
        saved_at_s: Seconds since 1970.
        epoch: Of the aggregator that made its newest version.
        tokens: Trained by all islands, as far as its versions know.
        versions: Fragment -> version.
        digests: Fragment -> of its parameters' float32 bytes.
        size_bytes: Of its files, which the store may hold as well.
    """

    name: str
    saved_at_s: float
    epoch: int
    tokens: int
    versions: Mapping[int, int]
    digests: Mapping[int, str]
    size_bytes: int


def snapshot_path(store: Path, name: str) -> Path:
    """Returns the directory of a snapshot."""
    return store / "snapshots" / name


def save(store: Path, name: str) -> Snapshot:
    """Makes a snapshot of the newest versions.

    Raises:
        ConfigError: The name cannot be used, or is taken.
        Unavailable: The store has no model yet, a newest version is damaged, or the disk fails.
    """
    check_name("NAME", name)
    path = snapshot_path(store, name)
    if path.exists():
        raise ConfigError("NAME", name, f"is taken in {store}: choose another, or remove that one first")
    building = path.with_name(name + TEMPORARY)
    with mapped(f"cannot make the snapshot {path}", definite=True):
        for _ in range(TRIES):
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir(parents=True)
            found = _linked(store, building)
            if found is not None:
                break
            time.sleep(PAUSE_S)
        else:
            raise Unavailable(f"versions come faster than {store} can be looked at; try again", definite=True)
        made = replace(found, name=name)
        (building / FILE).write_text(json.dumps(asdict(made)), encoding="utf-8")
        for each in (building / FILE, *building.glob("fragments/*"), building / "fragments", building):
            flush(each)
        building.rename(path)
        flush(path.parent)
    return made


def listed(store: Path) -> list[Snapshot]:
    """Returns the whole snapshots of a store, oldest first.

    Raises:
        Unavailable: They cannot be read.
    """
    with mapped(f"cannot list the snapshots of {store}", definite=True):
        files = [each for each in store.glob(f"snapshots/*/{FILE}") if not each.parent.name.endswith(TEMPORARY)]
        found = [_read(each) for each in files]
    return sorted(found, key=lambda each: each.saved_at_s)


def named(store: Path, name: str) -> Snapshot:
    """Returns one snapshot.

    Raises:
        ConfigError: There is none of this name.
        Unavailable: It cannot be read.
    """
    for each in listed(store):
        if each.name == name:
            return each
    there = ", ".join(each.name for each in listed(store)) or "none; make one with `atoll snapshots save`"
    raise ConfigError("NAME", name, f"is no snapshot in {store}; there are: {there}")


def remove(store: Path, name: str) -> None:
    """Removes a snapshot; raises as :func:`named` does."""
    named(store, name)
    path = snapshot_path(store, name)
    with mapped(f"cannot remove {path}", definite=False):
        (path / FILE).unlink()  # first: half a snapshot is none
        shutil.rmtree(path)


def _linked(store: Path, building: Path) -> Snapshot | None:
    """Links the newest versions into a directory; None where another came meanwhile.

    Raises:
        Unavailable: There is nothing to link, or it is damaged.
        OSError: The disk fails.
    """
    newest = _newest(store)
    if not newest or not run_path(store).exists():
        raise Unavailable(f"{store} holds no model yet; wait until the run is seeded", definite=True)
    headers: dict[int, Header] = {}
    size = 0
    try:
        shutil.copyfile(run_path(store), run_path(building))
        for fragment_id, version in newest.items():
            target = commit_path(building, fragment_id, version)
            target.parent.mkdir(parents=True)
            _link(commit_path(store, fragment_id, version), target)
            headers[fragment_id], size = read_header(target), size + target.stat().st_size
    except FileNotFoundError:
        return None  # pruned since it was listed
    except Damaged as err:
        raise Unavailable(f"{err}; a snapshot needs a whole version of every fragment", definite=True) from err
    if _newest(store) != newest:
        return None
    commits = {fragment_id: header.commit for fragment_id, header in headers.items()}
    return Snapshot(
        name="",
        saved_at_s=round(clocks.wall(), 3),
        epoch=max(each.epoch for each in commits.values()),
        tokens=max(tokens_trained(each.ledger) for each in commits.values()),
        versions=newest,
        digests={fragment_id: each.digest for fragment_id, each in commits.items()},
        size_bytes=size,
    )


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as err:
        if err.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        cure = "a snapshot needs hard links: be the user of the aggregator, and have the store on a disk with links"
        raise Unavailable(f"cannot link {source} ({err.strerror}); {cure}", definite=True) from err


def _newest(store: Path) -> dict[int, int]:
    return {p: found[0] for p in fragment_ids(store) if (found := versions(store, p))}


def _read(file: Path) -> Snapshot:
    try:
        row = json.loads(file.read_text(encoding="utf-8"))
        numbered = {key: {int(p): x for p, x in row[key].items()} for key in ("versions", "digests")}
        return Snapshot(**{**row, **numbered, "name": file.parent.name})
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise Unavailable(f"{file} is damaged ({err}); remove its directory", definite=True) from err
