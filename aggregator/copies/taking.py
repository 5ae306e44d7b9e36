"""Takes the state of a store at one moment, without its lock, while it is written. Shell.

The newest versions are opened, so that pruning takes nothing away, and listed once more: if none is newer by then, and
the run record was read in between, all of it stood there at one moment, as a crash would have left it. Where versions
come so fast that this never happens, a record that is younger than the versions is the best there is: what it knows
besides is who has joined and what was asked for since, which a crash between two commits leaves as well.

The ledger and the tape are read after the versions, so that all that led to these is in them. They grow meanwhile; a
part that was read is what counts.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from aggregator.copies.sets import STORE, CompleteSet, CopiedFile, CopiedVersion, Part
from aggregator.store.commit_file import Damaged, Header, read_header
from aggregator.store.layout import commit_path, fragment_ids, ledger_path, mapped, read_run, run_path, versions
from aggregator.store.replacing import TEMPORARY
from aggregator.store.segments import closed_of
from broker.wire.errors import Unavailable
from broker.wire.fragments import shard_of

#: Files that grow are cut here: what lies before is copied once, and only the rest again each time.
CHUNK_BYTES = 4 << 20
#: Attempts at a state of one moment.
ATTEMPTS = 5
SNAPSHOTS = "snapshots"
_READ_BYTES = 4 << 20

#: Names the content of a file that is never changed: device, inode, size, time of the last change.
_Identity = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file that is to be copied.

    Attributes:
        path: Its name in the set.
        place: Where it can be read, also when it has been pruned.
        size: So many bytes of it.
        grows: It is appended to, and copied in parts.
    """

    path: str
    place: Path
    size: int
    grows: bool


class Hashes:
    """The hashes of files that never change, each computed once."""

    def __init__(self) -> None:
        self._known: dict[_Identity, str] = {}

    def of(self, source: Source) -> CopiedFile:
        """Returns a file with the names of its parts; raises OSError, Unavailable where it is no longer whole."""
        fd = os.open(source.place, os.O_RDONLY)
        try:
            if source.grows:
                cuts = [(at, min(CHUNK_BYTES, source.size - at)) for at in range(0, source.size, CHUNK_BYTES)]
                parts = [_part(at, size, _digest(fd, at, size), packed=True) for at, size in cuts]
                return CopiedFile(path=source.path, parts=tuple(parts))
            status = os.fstat(fd)
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if identity not in self._known:
                self._known[identity] = _digest(fd, 0, source.size)
            return CopiedFile(path=source.path, parts=(_part(0, source.size, self._known[identity], packed=False),))
        finally:
            os.close(fd)

    def forget(self, at_most: int = 10_000) -> None:
        """Keeps what was computed last, if it is too much."""
        while len(self._known) > at_most:
            del self._known[next(iter(self._known))]


class Taken:
    """A state of the store; its files stay readable while the ``with`` block lasts.

    Attributes:
        whole: The set, of which epoch and serial are not decided, and files not yet named.
        sources: Its files, in the order of the copy.
    """

    def __init__(self, stack: ExitStack, whole: CompleteSet, sources: tuple[Source, ...]) -> None:
        self._stack = stack
        self.whole = whole
        self.sources = sources

    def __enter__(self) -> Taken:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def hashed(self, hashes: Hashes) -> CompleteSet:
        """Returns the set with its files; raises OSError, Unavailable."""
        return replace(self.whole, files=tuple(hashes.of(source) for source in self.sources))


def take(directory: Path, tape: Path | None, store: str, time_s: float) -> Taken | None:
    """Returns the state of a store, or None as long as it has no version after version 0.

    Args:
        directory: Of the store.
        tape: The event tape, whose finished parts lie beside it; None: there is none.
        store: Its name.
        time_s: Seconds since 1970.

    Raises:
        Unavailable: A file cannot be read.
    """
    with ExitStack() as stack:
        held = _newest(directory, stack)
        if held is None:
            return None
        record, commits = held
        if not any(header.commit.fragment_version for header, _ in commits.values()):
            return None  # nobody has seen anything yet that could not be made again
        sources = [_fixed(_inside(_name(header)), fd) for header, fd in commits.values()]
        sources += _standing(directory, commits)
        run_fd = os.memfd_create("run")  # as it was read, whatever replaces the file
        stack.callback(os.close, run_fd)
        os.write(run_fd, record[1])
        sources += _segments(ledger_path(directory), f"{STORE}/", stack)
        sources += [_fixed(_inside("run.msgpack"), run_fd)]
        if tape is not None:
            sources += _segments(tape, "", stack)
        if not _shard_of(record[0])[0]:  # of several shards the first has them
            sources += _settings(directory, record[0]["run_id"])
        whole = CompleteSet(
            run_id=record[0]["run_id"],
            store=store,
            epoch=0,
            serial=0,
            time_s=time_s,
            ended=bool(record[0].get("ended")),
            versions=tuple(
                CopiedVersion(fragment_id=p, version=each.commit.fragment_version, digest=each.commit.digest)
                for p, (each, _) in sorted(commits.items())
            ),
            files=(),
            shard=_shard_of(record[0]),
            roster=_roster_of(record[0]),
        )
        return Taken(stack.pop_all(), whole, tuple(sources))


def packed(source: Source, part: Part) -> bytes:
    """Returns the content of a part of a file that grows, compressed.

    Raises:
        Unavailable: It is not what was hashed.
    """
    fd = os.open(source.place, os.O_RDONLY)
    try:
        content = b"".join(_pieces(fd, part.start, part.size))
    finally:
        os.close(fd)
    if xxhash.xxh3_128_hexdigest(content) != part.digest:
        raise Unavailable(f"{source.path} was changed while it was read; it is copied anew", definite=True)
    return gzip.compress(content, compresslevel=5, mtime=0)


def _newest(
    directory: Path, stack: ExitStack
) -> tuple[tuple[Mapping[str, Any], bytes], dict[int, tuple[Header, int]]] | None:
    """Opens the newest whole version of each fragment, with a run record that is not older."""
    for attempt in range(ATTEMPTS):
        with ExitStack() as mine:
            if not (directory / "fragments").is_dir():
                return None
            try:
                commits = {p: _open_newest(directory, p, mine) for p in fragment_ids(directory)}
            except FileNotFoundError:
                continue  # pruned since it was listed
            if not run_path(directory).exists():
                return None
            content = _content(run_path(directory))
            record = read_run(directory)
            if record is None or record["manifest"] is None:
                return None
            found = {p: each for p, each in commits.items() if each is not None}
            shard, shards = _shard_of(record)
            if any(p not in found for p in range(len(record["manifest"])) if shard_of(p, shards) == shard):
                return None
            again = {p: next(iter(versions(directory, p)), -1) for p in found}
            still = content == _content(run_path(directory))
            still = still and all(again[p] == header.commit.fragment_version for p, (header, _) in found.items())
            if still or attempt == ATTEMPTS - 1:
                stack.push(mine.pop_all())
                return (record, content), found
    return None


def _content(path: Path) -> bytes:
    with mapped(f"cannot read {path}", definite=True):
        return path.read_bytes()


def _open_newest(directory: Path, fragment_id: int, stack: ExitStack) -> tuple[Header, int] | None:
    for version in versions(directory, fragment_id):
        fd = os.open(commit_path(directory, fragment_id, version), os.O_RDONLY)
        stack.callback(os.close, fd)
        try:
            return read_header(_reopened(fd)), fd
        except Damaged:
            continue  # the store goes on from the one before, and says so
    return None


def _standing(directory: Path, commits: Mapping[int, tuple[Header, int]]) -> Iterator[Source]:
    """Yields the lasting files: version 0, for the loss before training, and snapshots, if any."""
    for p, (header, _) in sorted(commits.items()):
        path = commit_path(directory, p, 0)
        if header.commit.fragment_version and path.exists():
            yield _standing_file(directory, path)
    for path in sorted((directory / SNAPSHOTS).rglob("*")):
        if path.is_file() and not path.is_symlink() and not path.name.endswith(TEMPORARY):
            yield _standing_file(directory, path)


def _standing_file(directory: Path, path: Path) -> Source:
    name = _inside(path.relative_to(directory).as_posix())
    return Source(path=name, place=path, size=path.stat().st_size, grows=False)


def _segments(tape: Path, folder: str, stack: ExitStack) -> Iterator[Source]:
    """Yields the files of a tape or ledger: none twice and none missing, if it is turned meanwhile."""
    for _ in range(ATTEMPTS):
        try:
            growing = _growing(folder + tape.name, tape, stack)
        except FileNotFoundError:
            if not closed_of(tape):
                return
            continue  # it is being closed
        with mapped(f"cannot read {tape}", definite=True):
            finished = [path for path in closed_of(tape).values() if path.is_file()]
            same = tape.exists() and tape.stat().st_ino == growing.place.stat().st_ino
        if same:
            for path in finished:
                yield Source(path=folder + path.name, place=path, size=path.stat().st_size, grows=False)
            yield growing
            return
    raise Unavailable(f"{tape} is replaced faster than it can be read; it is tried again", definite=True)


def _settings(directory: Path, run_id: str) -> Iterator[Source]:
    """Yields the settings that ``up`` wrote for this run, beside its store or above: a standby may lead."""
    for path in (directory.parent / "config.toml", directory.parent.parent / "config.toml"):
        if path.is_file() and f'run_id = "{run_id}"' in path.read_text(encoding="utf-8", errors="replace"):
            yield Source(path=path.name, place=path, size=path.stat().st_size, grows=False)
            return


def _shard_of(record: Mapping[str, Any]) -> tuple[int, int]:
    shard, shards = record.get("shard", (0, 1))  # which older stores do not say
    return shard, shards


def _roster_of(record: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the roster in a record, (epoch, serial): shard 0's own, or the one another took over."""
    epoch, serial = record.get("roster", (0, 0)) if _shard_of(record)[0] else (record["epoch"], record.get("serial", 0))
    return epoch, serial


def _growing(name: str, path: Path, stack: ExitStack) -> Source:
    fd = os.open(path, os.O_RDONLY)
    stack.callback(os.close, fd)
    return Source(path=name, place=_reopened(fd), size=os.fstat(fd).st_size, grows=True)


def _fixed(name: str, fd: int) -> Source:
    return Source(path=name, place=_reopened(fd), size=os.fstat(fd).st_size, grows=False)


def _reopened(fd: int) -> Path:
    """The path by which an open file can be read, whatever has become of its name."""
    return Path(f"/proc/self/fd/{fd}")


def _inside(name: str) -> str:
    return f"{STORE}/{name}"


def _name(header: Header) -> str:
    commit = header.commit
    return commit_path(Path(), commit.fragment_id, commit.fragment_version).as_posix()


def _part(start: int, size: int, digest: str, *, packed: bool) -> Part:
    return Part(start=start, size=size, digest=digest, packed=packed)


def _digest(fd: int, start: int, size: int) -> str:
    digest = xxhash.xxh3_128()
    for piece in _pieces(fd, start, size):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(fd: int, start: int, size: int) -> Iterator[bytes]:
    at, end = start, start + size
    while at < end:
        piece = os.pread(fd, min(_READ_BYTES, end - at), at)
        if not piece:
            raise Unavailable("a file became shorter while it was read; it is copied anew", definite=True)
        yield piece
        at += len(piece)
