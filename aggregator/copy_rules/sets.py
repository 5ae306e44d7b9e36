"""Names of the copies in an object store, and the file that says which of them belong together. Pure.

    objects/store/fragments/003/00000017.commit/0-HASH     bytes of a file of the store, by the hash of what they are
    objects/events.jsonl/4194304-HASH.gz                   a part of a file that grows, from that offset, compressed
    complete/0000000003-00000012.json                      a set that is whole: epoch 3, its twelfth copy
    leads/0000000003-STORE.json                            the store of this name is copied there, under epoch 3
    claims/0000001003.json                                 a restore has taken epoch 1003, and no other will

Objects are never changed: whatever differs has another name. So an aggregator that was replaced, and does not know it
yet, overwrites nothing. A set counts from when its file in ``complete/`` is there, which is written last.
Of a run of several shards each has such folders of its own (:mod:`aggregator.copy_rules.planning`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

FORMAT = 1
OBJECTS, COMPLETE, LEADS, CLAIMS = "objects/", "complete/", "leads/", "claims/"
#: The files of the store lie in this folder of the restored directory.
STORE = "store"

_NAME = re.compile(r"(complete/|leads/|claims/)(\d{10})(?:-(.+))?\.json")
#: A path that stays below the directory it is put into.
_PATH = re.compile(r"(?!.*(^|/)\.\.?(/|$))[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some bytes of a file.

    Attributes:
        start: Offset in the file.
        size: In bytes, before they are compressed.
        digest: xxh3_128 of them, likewise.
        packed: Compressed, by gzip.
    """

    start: int
    size: int
    digest: str
    packed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedFile:
    """A file, and the parts that make it up, in order."""

    path: str
    parts: tuple[Part, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of its objects."""
        at = OBJECTS + self.path
        return tuple(f"{at}/{each.start}-{each.digest}{'.gz' if each.packed else ''}" for each in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedVersion:
    """The newest version of a fragment in a set; ``digest`` is that of its parameters."""

    fragment_id: int
    version: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteSet:
    """A state that the store had at one moment.

    Attributes:
        run_id: Whose.
        store: Name of the store (:attr:`aggregator.store.store.Store.name`).
        epoch: Of the aggregator that copied.
        serial: Number of the copy within the epoch, from 1.
        time_s: Moment of the state, in seconds since 1970.
        ended: Whether the run had ended: nothing newer can be anywhere.
        versions: Newest version of each fragment, in order of the fragments.
        files: In the order in which they are uploaded.
        shard: Number of the shard, and how many there are.
        roster: Epoch and serial number of shard 0's record: of itself, or as far as another shard has taken it over.
    """

    run_id: str
    store: str
    epoch: int
    serial: int
    time_s: float
    ended: bool
    versions: tuple[CopiedVersion, ...]
    files: tuple[CopiedFile, ...]
    shard: tuple[int, int] = (0, 1)
    roster: tuple[int, int] = (0, 0)

    @property
    def key(self) -> str:
        """The name of its own object."""
        return f"{COMPLETE}{self.epoch:010d}-{self.serial:08d}.json"

    @property
    def size(self) -> int:
        """In bytes, all files together."""
        return sum(part.size for file in self.files for part in file.parts)

    def object_names(self) -> tuple[str, ...]:
        """Returns the names of its objects, in order."""
        return tuple(key for file in self.files for key in file.keys)


def epoch_of(key: str) -> int:
    """Returns the epoch in the name of a set, a lead or a claim; 0: it is another object."""
    match = _NAME.fullmatch(key)
    return 0 if match is None else int(match[2])


def order_of(key: str) -> tuple[int, int] | None:
    """Returns epoch and serial of a set's own object, by which sets are older and newer; None: it is none."""
    match = _NAME.fullmatch(key)
    return (int(match[2]), int(match[3])) if match and match[1] == COMPLETE and (match[3] or "").isdecimal() else None


def newest_sets(there: Iterable[str]) -> list[str]:
    """Returns the names of the sets that are there, newest first."""
    orders = {order: key for key in there if (order := order_of(key)) is not None}
    return [orders[order] for order in sorted(orders, reverse=True)]


def lead_key(epoch: int, store: str) -> str:
    """Returns the name of the object by which an aggregator says that it copies there."""
    return f"{LEADS}{epoch:010d}-{store}.json"


def lead_of(key: str) -> tuple[int, str] | None:
    """Returns epoch and store of an aggregator that copies there; None: that is another object."""
    match = _NAME.fullmatch(key)
    return (int(match[2]), match[3]) if match and match[1] == LEADS and match[3] else None


def claim_key(epoch: int) -> str:
    """Returns the name of the object by which a restore takes an epoch."""
    return f"{CLAIMS}{epoch:010d}.json"


def write_set(whole: CompleteSet) -> bytes:
    """Returns the content of a set's own object."""
    names = ("run_id", "store", "epoch", "serial", "time_s", "ended", "shard", "roster")
    row = {"format": FORMAT} | {name: getattr(whole, name) for name in names}
    row["versions"] = [[each.fragment_id, each.version, each.digest] for each in whole.versions]
    row["files"] = [
        {"path": file.path, "parts": [[p.start, p.size, p.digest, p.packed] for p in file.parts]}
        for file in whole.files
    ]
    return json.dumps(row, separators=(",", ":")).encode()


def read_set(content: bytes) -> CompleteSet:
    """Returns the set that :func:`write_set` wrote.

    Raises:
        ValueError: It is none, or of another format; with what is wrong.
    """
    row = json.loads(content)
    if not isinstance(row, dict):
        raise ValueError("it is no object of JSON")
    if row.get("format") != FORMAT:
        raise ValueError(f"it has format {row.get('format')!r}, this program reads {FORMAT}")
    try:
        return CompleteSet(
            run_id=str(row["run_id"]),
            store=str(row["store"]),
            epoch=_count(row["epoch"]),
            serial=_count(row["serial"]),
            time_s=float(row["time_s"]),
            ended=row["ended"] is True,
            versions=tuple(
                CopiedVersion(fragment_id=_count(p), version=_count(v), digest=str(d)) for p, v, d in row["versions"]
            ),
            files=tuple(_file(each["path"], each["parts"]) for each in row["files"]),
            shard=_pair(row.get("shard", (0, 1))),  # which those of runs of one shard had not from the beginning
            roster=_pair(row.get("roster", (0, 0))),
        )
    except (KeyError, TypeError) as err:
        raise ValueError(f"it lacks a field, or one does not fit: {err}") from err


def _file(path: Any, rows: Any) -> CopiedFile:
    if not isinstance(path, str) or _PATH.fullmatch(path) is None:
        raise ValueError(f"{path!r} is no path below a directory")
    at, parts = 0, []
    for start, size, digest, packed in rows:
        if start != at:
            raise ValueError(f"{path} has a part from {start} on, expected one from {at} on")
        at += _count(size)
        parts.append(Part(start=at - size, size=size, digest=str(digest), packed=packed is True))
    return CopiedFile(path=path, parts=tuple(parts))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _pair(value: Any) -> tuple[int, int]:
    first, second = value
    return _count(first), _count(second)
