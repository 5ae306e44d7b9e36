"""The history of a store, ``ledger.jsonl``: a line per version, with islands, weights and staleness.

A version is durable before it has its line, and keeps its bytes until it has: a line that could not be written is owed,
and comes with whatever is asked for next. What a crash leaves is mended at the next beginning: a torn line is cut off,
and versions that lie on the disk without a line get one.

The file is closed, compressed and dropped in segments like the event tape (:mod:`aggregator.store.rotation`). Each
segment but the first has, behind its header, a line that sums up all before it, so that nobody has to read those::

    {"carried": {"0": {"version": 41, "digest": "..", "epoch": 1, "merged": {"island-0": 91750400, ..}}, ..}}

Nothing is decided by lines that were dropped: the books are in the commits, and a version that lies on the disk and is
not above the one carried over has had its line.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from aggregator.interface.events import Commit
from aggregator.ledger.ledger import merged_by_island
from aggregator.state.records import Carried, is_ledger_line, ledger_line
from aggregator.store.commit_file import write_all
from aggregator.store.layout import mapped
from aggregator.store.replacing import flush, replace
from aggregator.store.rotation import Aside, Rotation, on_the_spot
from aggregator.store.segments import PACKED, Header, closed_of, header_of, opened, segments_of
from aggregator.store.tape import read_lines
from broker.process import logs

log = logs.get(__name__)

#: Fragment, version, digest: what a line is of.
Key = tuple[int, int, str]
_CARRIED = "carried"


def key_of(commit: Commit) -> Key:
    """Returns what tells a commit from every other of its run."""
    return commit.fragment_id, commit.fragment_version, commit.digest


# --- reading ------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Returns the lines of versions in all segments of a ledger; whatever else is there is passed over.

    Raises:
        OSError: The file cannot be read.
    """
    return filter(is_ledger_line, read_lines(path))


def head_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a line of which ``contributions`` only says whether there are any: all that lineages need."""
    names = ("fragment_id", "fragment_version", "digest", "epoch")
    return {name: row[name] for name in names} | {"contributions": bool(row["contributions"])}


def carried_over(line: Mapping[str, Any]) -> dict[int, Carried] | None:
    """Returns fragment -> what a line carries over; None if it is no such line."""
    try:
        return {int(p): Carried(**each) for p, each in line[_CARRIED].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def is_of_segment(line: Mapping[str, Any]) -> bool:
    """Returns True for a line about a segment, False for one about a version."""
    return "segment" in line or _CARRIED in line


def dropped_before(path: Path) -> dict[int, Carried]:
    """Returns fragment -> the newest version whose line the rule has dropped; empty where no line was.

    Raises:
        OSError: The ledger cannot be read.
    """
    for again in (True, True, False):
        try:
            there = segments_of(path)
            first = min(there, default=1)
            if not 1 < first <= header_of(there[max(there)]).dropped + 1:
                return {}
            with opened(there[first]) as file:
                _, line = file.readline(), file.readline()
            return carried_over(_row(line) or {}) or {}
        except FileNotFoundError:  # closed, compressed or dropped in this moment
            if not again:
                raise
    return {}


def newest_dropped(paths: Iterable[Path]) -> dict[int, Carried]:
    """Returns fragment -> the newest version up to which any ledger dropped lines; raises OSError."""
    found: dict[int, Carried] = {}
    for path in paths:
        for p, each in dropped_before(path).items():
            found[p] = max(each, found.get(p, each), key=lambda carried: carried.version)
    return found


# --- writing ------------------------------------------------------------------------------------------------------


def cut_above(path: Path, newest: Mapping[int, int]) -> None:
    """Removes the lines of versions above the newest that is to stay, in all segments, the oldest first.

    The others stay as they are, byte for byte. After a crash half-way the last segment still has such lines, or carries
    them over: the same call again settles it.

    Args:
        path: The ledger; nobody else may change it meanwhile.
        newest: Fragment -> version; of others all lines stay.

    Raises:
        Unavailable: The disk fails.
    """
    with mapped(f"cannot read {path}", definite=True):
        files = segments_of(path).values()
    stays: dict[int, Carried] = {}
    for file in files:
        with mapped(f"cannot read {file}", definite=True), opened(file) as read:
            before = read.read().splitlines(keepends=True)
        after = [each for line in before if (each := _left(line, newest, stays))]
        if after == before:
            continue
        content = b"".join(after)
        if (packed := file.with_name(file.name.removesuffix(PACKED) + PACKED)).exists():
            file = packed
            content = gzip.compress(content)
            with mapped(f"cannot remove {file}", definite=False):
                file.with_name(file.name.removesuffix(PACKED)).unlink(missing_ok=True)
        replace(file, partial(_write, content))


def _write(content: bytes, fd: int) -> None:
    write_all(fd, memoryview(content))


def _left(line: bytes, newest: Mapping[int, int], stays: dict[int, Carried]) -> bytes:
    """Returns what is left of a line, and notes in ``stays`` what is carried over after it."""
    row = _row(line)
    if row is None:
        return line  # torn or damaged, which is for others to find
    carried = carried_over(row)
    if carried is not None:
        kept = {p: each for p, each in carried.items() if each.version <= newest.get(p, each.version)}
        if kept != carried:
            kept |= {p: stays[p] for p in carried.keys() - kept.keys() if p in stays}
            line = _carried_line(kept)
        stays.clear()
        stays.update(kept)
    elif (key := _key_in(row)) is not None:
        if key[1] > newest.get(key[0], key[1]):
            return b""
        stays[key[0]] = Carried.behind(row)
    return line


def _carried(commit: Commit) -> Carried:
    merged = dict(merged_by_island(commit.ledger))
    return Carried(version=commit.fragment_version, digest=commit.digest, epoch=commit.epoch, merged=merged)


def _carried_line(carried: Mapping[int, Carried]) -> bytes:
    rows = {str(p): asdict(each) for p, each in sorted(carried.items())}
    return json.dumps({_CARRIED: rows}, separators=(",", ":")).encode() + b"\n"


def _key_in(row: Mapping[str, Any]) -> Key | None:
    """Returns what a line is of, whatever else it has."""
    p, version, digest = row.get("fragment_id"), row.get("fragment_version"), row.get("digest")
    return (p, version, digest) if type(p) is type(version) is int and isinstance(digest, str) else None


def _row(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError):
        row = json.loads(line)
        return row if isinstance(row, dict) else None
    return None


class LedgerFile:
    """The ledger file of one store, and its only writer; raises Unavailable when the disk fails.

    Args:
        path: The file.
        segment_bytes: Length at which it is closed as a segment, and another begun; 0: never.
        keep: Closed segments to keep; 0: all.
        aside: Where they are compressed and dropped.
    """

    def __init__(self, path: Path, segment_bytes: int = 0, keep: int = 0, aside: Aside = on_the_spot) -> None:
        self._path = path
        self._owed: dict[Key, Commit] = {}
        self._last: dict[int, Carried] = {}  # of each fragment, by the lines so far
        self._rotation = Rotation(path, segment_bytes, keep, self._opening, aside)
        self._renamed = False  # since the directory was flushed

    def owes(self, commit: Commit) -> bool:
        """Returns whether a commit is durable, and has no line yet."""
        return key_of(commit) in self._owed

    def owe(self, commit: Commit) -> None:
        """Notes a commit that is durable: its line comes with the next :meth:`settle`."""
        self._owed[key_of(commit)] = commit

    def settle(self) -> None:
        """Writes the missing lines of commits that are durable, before the next attempt after a failed one."""
        if self._owed:
            self._append(self._owed.values())
            self._owed.clear()

    def strike(self, fragment_id: int, first_version: int) -> None:
        """Removes the lines of a fragment from a version on; the others stay as they are, byte for byte."""
        self._owed = {key: each for key, each in self._owed.items() if key[0] != fragment_id or key[1] < first_version}
        self._rotation.tidy()
        cut_above(self._path, {fragment_id: first_version - 1})
        self._last.pop(fragment_id, None)
        if self._path.exists():
            with mapped(f"cannot read {self._path}", definite=True):
                last = self._known()[2]
            self._last |= {p: each for p, each in last.items() if p == fragment_id}

    def complete(self, on_disk: Iterable[Commit]) -> dict[int, int]:
        """Cuts a torn end off, and adds the versions on disk that have no line.

        Args:
            on_disk: Every whole version.

        Returns:
            Fragment -> newest version that the lines list that were there.
        """
        with mapped(f"cannot open {self._path}", definite=False):
            new = not self._path.exists()
            os.close(self._rotation.open())
            if new:
                flush(self._path.parent)
            self._cut_torn_end()
            known, before, self._last = self._known()
        listed: dict[int, int] = {p: each.version for p, each in before.items()}
        for p, version, _ in known:
            listed[p] = max(version, listed.get(p, version))
        missing = []
        for commit in on_disk:
            p, key = commit.fragment_id, key_of(commit)
            carried, last = before.get(p), self._last.get(p)
            if last is not None and key == (p, last.version, last.digest):
                self._last[p] = _carried(commit)
            had = carried is not None and (key[1] < carried.version or key[1:] == (carried.version, carried.digest))
            if key not in known and not had:
                missing.append(commit)
        if missing:
            self._append(sorted(missing, key=lambda commit: (commit.round_id, key_of(commit))))
        return listed

    def close(self) -> None:
        """Ends what compresses."""
        self._rotation.close()

    def _opening(self) -> bytes:
        return _carried_line(self._last) if self._last else b""

    def _cut_torn_end(self) -> None:
        with self._path.open("r+b") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    file.truncate(file.tell() - len(line))
                    os.fsync(file.fileno())
                    break

    def _known(self) -> tuple[set[Key], dict[int, Carried], dict[int, Carried]]:
        """Returns the last segment's lines, and what is carried over before and behind; raises OSError."""
        known: set[Key] = set()
        before: dict[int, Carried] = {}
        last: dict[int, Carried] = {}
        whole = not closed_of(self._path)
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                row = _row(line) or {}
                if (carried := carried_over(row)) is not None:
                    whole, before, last = True, carried, carried | last
                elif (key := _key_in(row)) is not None:
                    known.add(key)
                    last[key[0]] = Carried.behind(row)
                elif Header.of(line) is None:
                    log.warning("store.ledger_line_damaged", path=str(self._path), line=number)
        if not whole:  # a power failure took the line that carries over
            for row in read_rows(self._path):
                known.add((row["fragment_id"], row["fragment_version"], row["digest"]))
                last[row["fragment_id"]] = Carried.behind(row)
            with self._path.open("ab") as file:
                file.write(_carried_line(last))
        return known, before, last

    def _append(self, commits: Iterable[Commit]) -> None:
        """Adds a line per commit, all or none, durably: afterwards the commit may be pruned."""
        commits = list(commits)
        lines = "".join(json.dumps(ledger_line(commit), separators=(",", ":")) + "\n" for commit in commits)
        with mapped(f"cannot append to {self._path}", definite=False):
            fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(fd).st_size
                try:
                    write_all(fd, memoryview(lines.encode()))
                    os.fsync(fd)
                    if self._renamed:
                        flush(self._path.parent)
                        self._renamed = False
                except OSError:
                    os.ftruncate(fd, size)
                    raise
                self._last |= {commit.fragment_id: _carried(commit) for commit in commits}
                turned = self._rotation.turn(fd)
                self._renamed = self._renamed or turned != fd
                fd = turned
            finally:
                os.close(fd)
