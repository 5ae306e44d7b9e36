"""Takes the state of a store at one moment, without its lock, while it is written. Shell.

The newest versions are opened, so that pruning takes nothing away, and listed once more: if none is newer by then, and
the run record was read in between, all of it stood there at one moment, as a crash would have left it. Where versions
come so fast that this never happens, a record that is younger than the versions is the best there is: what it knows
besides is who has joined and what was asked for since, which a crash between two commits leaves as well.

The ledger and the tape are read after the versions, so that all that led to these is in them. Their closed segments
never change, and the one that is written only grows: what it held when it was opened is copied.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from aggregator.copy_rules.sets import STORE, CopiedFile, Part
from aggregator.interface.events import Commit
from aggregator.store.commit_file import Damaged, Header, read_header
from aggregator.store.layout import commit_path, fragment_ids, ledger_path, run_path, unpack_run, versions
from aggregator.store.replacing import TEMPORARY
from aggregator.store.segments import closed_of, header_of
from broker.base.errors import Unavailable
from broker.wire.fragments import shard_of

#: Files that grow are cut here: what lies before is copied once, and only the rest again each time.
CHUNK_BYTES = 4 << 20
#: Attempts at a state of one moment.
ATTEMPTS = 5
SNAPSHOTS = "snapshots"
_READ_BYTES = 4 << 20

#: Names the content of a file that is never changed: device, inode, size, time of the last change.
Identity = tuple[int, int, int, int]


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
    grows: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """A state of the store: its run record, the newest commit of each fragment, and its files in order."""

    record: Mapping[str, Any]
    commits: tuple[Commit, ...]
    sources: tuple[Source, ...]


@contextmanager
def take(directory: Path, tape: Path | None) -> Iterator[Taken | None]:
    """Yields the state of a store, readable until the end; None while it has no version after version 0.

    Args:
        directory: Of the store.
        tape: The event tape, whose closed segments lie beside it; None: there is none.

    Raises:
        OSError: A file cannot be read.
        Unavailable: Likewise, or it is not what was written.
    """
    with ExitStack() as stack:
        held = _newest(directory, stack)
        # Of version 0 alone nobody has seen anything yet that could not be made again.
        if held is None or not any(header.commit.fragment_version for header, _ in held[2]):
            yield None
            return
        record, run, commits = held
        sources = [source for _, source in commits]
        for path in _standing(directory, commits):
            name = f"{STORE}/{path.relative_to(directory).as_posix()}"
            sources.append(Source(path=name, place=path, size=path.stat().st_size))
        sources += [*_segments(ledger_path(directory), f"{STORE}/", stack), run]
        if tape is not None:
            sources += _segments(tape, "", stack)
        if not record["shard"][0]:  # of several shards the first has them
            sources += _settings(directory, record["run_id"])
        yield Taken(record, tuple(header.commit for header, _ in commits), tuple(sources))


def hashed(source: Source, known: dict[Identity, str]) -> CopiedFile:
    """Returns a file with the names of its parts.

    Args:
        source: It.
        known: The hashes of files that never change; that of this one is added.

    Raises:
        OSError: It cannot be read.
        Unavailable: It is no longer whole.
    """
    with source.place.open("rb") as file:
        fd = file.fileno()
        if source.grows:
            cuts = [(at, min(CHUNK_BYTES, source.size - at)) for at in range(0, source.size, CHUNK_BYTES)]
            parts = [Part(start=at, size=size, digest=_digest(fd, at, size), packed=True) for at, size in cuts]
            return CopiedFile(path=source.path, parts=tuple(parts))
        status = os.fstat(fd)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if identity not in known:
            known[identity] = _digest(fd, 0, source.size)
        return CopiedFile(
            path=source.path, parts=(Part(start=0, size=source.size, digest=known[identity], packed=False),)
        )


def packed(source: Source, part: Part) -> bytes:
    """Returns the content of a part of a file that grows, compressed.

    Raises:
        Unavailable: It is not what was hashed.
    """
    with source.place.open("rb") as file:
        content = b"".join(_pieces(file.fileno(), part.start, part.size))
    if xxhash.xxh3_128_hexdigest(content) != part.digest:
        raise Unavailable(f"{source.path} was changed while it was read; it is copied anew", definite=True)
    return gzip.compress(content, compresslevel=5, mtime=0)


def _newest(directory: Path, stack: ExitStack) -> tuple[Mapping[str, Any], Source, list[tuple[Header, Source]]] | None:
    """Opens the newest whole version of each fragment, with a run record that is not older."""
    for attempt in range(ATTEMPTS):
        with ExitStack() as mine:
            try:
                commits = [each for p in fragment_ids(directory) if (each := _open_newest(directory, p, mine))]
                run = _opened(run_path(directory), f"{STORE}/run.msgpack", mine)
            except FileNotFoundError:
                continue  # pruned since it was listed, or there is no record yet
            record = unpack_run(run_path(directory), run.place.read_bytes())
            found = {header.commit.fragment_id: header.commit.fragment_version for header, _ in commits}
            shard, shards = record["shard"]
            manifest = record["manifest"] or ()
            if not manifest or any(p not in found for p in range(len(manifest)) if shard_of(p, shards) == shard):
                return None
            still = run_path(directory).samefile(run.place)
            still = still and all(versions(directory, p)[:1] == [version] for p, version in found.items())
            if still or attempt == ATTEMPTS - 1:
                stack.push(mine.pop_all())
                return record, run, commits
    return None


def _open_newest(directory: Path, fragment_id: int, stack: ExitStack) -> tuple[Header, Source] | None:
    for version in versions(directory, fragment_id):
        path = commit_path(directory, fragment_id, version)
        source = _opened(path, f"{STORE}/{path.relative_to(directory).as_posix()}", stack)
        try:
            return read_header(source.place), source
        except Damaged:
            continue  # the store goes on from the one before, and says so
    return None


def _standing(directory: Path, commits: list[tuple[Header, Source]]) -> Iterator[Path]:
    """Yields the lasting files: version 0, for the loss before training, and snapshots, if any."""
    for header, _ in commits:
        path = commit_path(directory, header.commit.fragment_id, 0)
        if header.commit.fragment_version and path.exists():
            yield path
    for path in sorted((directory / SNAPSHOTS).rglob("*")):
        if path.is_file() and not path.is_symlink() and not path.name.endswith(TEMPORARY):
            yield path


def _segments(tape: Path, folder: str, stack: ExitStack) -> Iterator[Source]:
    """Yields the files of a tape or ledger: all that were closed before the one that is written, and that."""
    for _ in range(ATTEMPTS):
        try:
            growing = _opened(tape, folder + tape.name, stack, grows=True)
        except FileNotFoundError:
            if not closed_of(tape):
                return
            continue  # it is being closed
        number = header_of(growing.place).segment
        for each, path in closed_of(tape).items():
            if each < number:
                yield Source(path=folder + path.name, place=path, size=path.stat().st_size)
        yield growing
        return
    raise Unavailable(f"{tape} is replaced faster than it can be read; it is tried again", definite=True)


def _settings(directory: Path, run_id: str) -> Iterator[Source]:
    """Yields the settings that ``up`` wrote for this run, beside its store or above: a standby may lead."""
    for path in (directory.parent / "config.toml", directory.parent.parent / "config.toml"):
        if path.is_file() and f'run_id = "{run_id}"' in path.read_text(encoding="utf-8", errors="replace"):
            yield Source(path=path.name, place=path, size=path.stat().st_size)
            return


def _opened(path: Path, name: str, stack: ExitStack, *, grows: bool = False) -> Source:
    """Returns an open file by a path at which it can be read, whatever becomes of its name."""
    fd = os.open(path, os.O_RDONLY)
    stack.callback(os.close, fd)
    return Source(path=name, place=Path(f"/proc/self/fd/{fd}"), size=os.fstat(fd).st_size, grows=grows)


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
