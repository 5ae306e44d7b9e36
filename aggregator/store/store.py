"""The durable store of one aggregator: every version is on disk before any island can see it.

The layout is in :mod:`aggregator.store.layout`, the history in :mod:`aggregator.store.ledger_file`. Files are replaced
whole (:mod:`aggregator.store.replacing`), and what a crash leaves half-written the next :meth:`Store.open` removes. Per
fragment the newest versions are kept, every n-th where that is asked for, and version 0 for ever: the loss before
training is measured on it. Snapshots (:mod:`aggregator.store.snapshots`) are never touched here.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from aggregator.interface.events import Commit
from aggregator.ledger.rolling_back import rolled_back
from aggregator.merge.fragment_state import FragmentState
from aggregator.rounds.recovery import renumbered
from aggregator.store.commit_file import Damaged, read_header, write_all, write_commit
from aggregator.store.layout import (
    commit_path,
    fragment_ids,
    ledger_path,
    mapped,
    model_path,
    name_path,
    pack_run,
    read_run,
    run_path,
    versions,
)
from aggregator.store.ledger_file import LedgerFile, key_of
from aggregator.store.replacing import TEMPORARY, flush, replace
from aggregator.store.rotation import Aside, on_the_spot
from aggregator.store.version_file import VersionFile, verified
from broker.base.errors import LocalProtocolError, Unavailable
from broker.process import chance, logs

log = logs.get(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The contents of a store.

    Attributes:
        run: The run record; None in a new store.
        fragments: Fragment id -> its newest whole version; :meth:`Store.newest_file` has its arrays.
        damaged: Newer versions that are not whole. They stay where they are until newer ones replace them; whether
            to go on without them is for the core to decide, since a peer may have seen them.
    """

    run: Mapping[str, Any] | None
    fragments: Mapping[int, Commit]
    damaged: tuple[Damaged, ...]


def newer_but_damaged(loaded: Loaded) -> Iterator[tuple[int, Damaged]]:
    """Yields the damaged versions above a fragment's newest whole one, with the fragment's id."""
    for damaged in loaded.damaged:
        p = int(damaged.path.parent.name)
        if p in loaded.fragments and int(damaged.path.stem) > loaded.fragments[p].fragment_version:
            yield p, damaged


class Store:
    """The one writer of a directory. Methods block on the disk; call them from one thread at a time.

    Order of use: :meth:`open`, :meth:`load`, then commits and run records, :meth:`close`. Every method raises
    Unavailable, with a cure, when the disk does not do its part. ``definite`` says that the old state still stands;
    after any failure the same call again is safe, and settles it.
    """

    def __init__(self, directory: Path, lock_fd: int, ledger: LedgerFile, keep: int, keep_every: int) -> None:
        self._directory, self._ledger = directory, ledger
        self._lock_fd = lock_fd
        self._keep, self._keep_every = keep, keep_every
        self._loaded = False
        self._newest: dict[int, Commit] = {}  #: fragment -> newest whole version
        self._damaged: defaultdict[int, set[int]] = defaultdict(set)  #: fragment -> versions not whole
        self._to_strike: dict[int, int] = {}  #: fragment -> version from which on its lines in the ledger are void

    @property
    def model_folder(self) -> Path:
        """The directory of the model's small files, which may not be there."""
        return model_path(self._directory)

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        keep: int = 2,
        keep_every: int = 0,
        segment_bytes: int = 0,
        segments: int = 0,
        aside: Aside = on_the_spot,
    ) -> Self:
        """Creates the directory if need be, locks it, and removes what an earlier process left half-written.

        Args:
            directory: Of this aggregator alone.
            keep: Newest versions to keep per fragment: with two, one that the disk damages has a predecessor.
            keep_every: Versions whose number divides by this are kept for ever; 0: none.
            segment_bytes: Length at which the ledger's file is closed, and another begun; 0: never.
            segments: Closed ones to keep; 0: all.
            aside: Where they are compressed and dropped.

        Raises:
            Unavailable: Also when another process has the store open.
        """
        if keep < 1:
            raise ValueError(f"keep = {keep}: must be at least 1, the newest version")
        with mapped(f"cannot open the store {directory}", definite=True):
            (directory / "fragments").mkdir(parents=True, exist_ok=True)
            for created in (directory, directory.parent):
                flush(created)
            lock_fd = _locked(directory / "lock")
            try:
                for pattern in (f"*{TEMPORARY}", f"fragments/*/*{TEMPORARY}"):
                    for leftover in directory.glob(pattern):
                        leftover.unlink()
            except OSError:
                os.close(lock_fd)
                raise
        ledger = LedgerFile(ledger_path(directory), segment_bytes, segments, aside)
        return cls(directory, lock_fd, ledger, keep, keep_every)

    def close(self) -> None:
        """Gives the store up. Nothing is written: whatever was accepted is durable already."""
        if self._lock_fd >= 0:
            self._ledger.close()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- reading ---------------------------------------------------------------------------------------------

    def load(self) -> Loaded:
        """Returns the newest whole state, verified; completes the ledger file where a crash cut it short.

        Raises:
            Damaged: If the run record is.
        """
        run = read_run(self._directory)
        self._newest.clear()
        damaged: list[Damaged] = []
        for fragment_id in fragment_ids(self._directory):
            for version in versions(self._directory, fragment_id):
                try:
                    self._newest[fragment_id] = verified(commit_path(self._directory, fragment_id, version)).commit
                except Damaged as err:
                    damaged.append(err)
                    self._damaged[fragment_id].add(version)
                    continue
                break
        present = {p: max(versions(self._directory, p), default=-1) for p in fragment_ids(self._directory)}
        for fragment_id, version in self._ledger.complete(self._commits_on_disk()).items():
            first = present.get(fragment_id, -1) + 1
            if version >= first:  # given up for a leader's, and not struck before a crash
                self._to_strike[fragment_id] = min(first, self._to_strike.get(fragment_id, first))
        self._loaded = True
        return Loaded(run=run, fragments=dict(self._newest), damaged=tuple(damaged))

    def newest_file(self, fragment_id: int) -> VersionFile:
        """Returns the file of a fragment's newest whole version, to use its arrays where they lie.

        Raises:
            Unavailable: It cannot be read, or is not what was written.
        """
        path = commit_path(self._directory, fragment_id, self._newest[fragment_id].fragment_version)
        with mapped(f"cannot read {path}", definite=True):
            return VersionFile(path)

    # --- writing ---------------------------------------------------------------------------------------------

    def save_run(self, record: Mapping[str, Any]) -> None:
        """Replaces the run record: plain data with at least the keys named in :mod:`aggregator.state.records`."""
        content = pack_run(record)
        self._replace(run_path(self._directory), lambda fd: write_all(fd, memoryview(content)))

    def commit(self, commit: Commit, state: FragmentState, *, prune: bool = True) -> None:
        """Makes one fragment version durable: once this returns, it may be published.

        Args:
            commit: Names the version.
            state: Its arrays.
            prune: Afterwards, and before this returns; else :meth:`prune` is the caller's to call.

        Raises:
            LocalProtocolError: If versions would go back, or one that is on disk would get other bytes.
        """
        if not self._loaded:
            raise LocalProtocolError(f"the store {self._directory} must be loaded before anything is committed to it")
        newest = self._newest.get(commit.fragment_id, commit)
        # An island that dies half-way through seeding leaves fragments of a version 0 that nobody has seen; the core
        # asks for another one's only while version 0 is not whole.
        seeded_anew = commit.fragment_version == newest.fragment_version == 0
        if commit.fragment_version <= newest.fragment_version and key_of(commit) != key_of(newest) and not seeded_anew:
            asked = f"version {commit.fragment_version} ({commit.digest}) of fragment {commit.fragment_id}"
            stands = f"version {newest.fragment_version} ({newest.digest})"
            raise LocalProtocolError(f"{asked} cannot follow {stands}: versions only grow")
        # Asked for again with nothing left to do: after a full disk, another fragment's commit has listed it too.
        written = commit.fragment_id in self._newest and key_of(commit) == key_of(newest)
        if written and not self._ledger.owes(commit):
            if prune:
                self.prune(commit.fragment_id)
            return
        path = commit_path(self._directory, commit.fragment_id, commit.fragment_version)
        with mapped(f"cannot create {path.parent}", definite=True):
            if not path.parent.is_dir():
                path.parent.mkdir()
                flush(path.parent.parent)
        self._replace(path, lambda fd: write_commit(fd, commit, state))
        self._newest[commit.fragment_id] = commit
        self._to_strike.pop(commit.fragment_id, None)  # from here on its versions are our own
        self._damaged[commit.fragment_id].discard(commit.fragment_version)
        self._ledger.owe(commit)
        self._ledger.settle()
        if prune:
            self.prune(commit.fragment_id)

    def mend(self, commit: Commit, state: FragmentState) -> VersionFile:
        """Writes the newest version of a fragment again, whose file has lost bytes, and returns the new file."""
        path = commit_path(self._directory, commit.fragment_id, commit.fragment_version)
        self._replace(path, lambda fd: write_commit(fd, commit, state))
        return self.newest_file(commit.fragment_id)

    def adopt(self, commit: Commit, state: FragmentState, *, prune: bool = True) -> None:
        """Makes a leader's commit durable in place of whatever is here: what nobody has seen gives way to it.

        The arguments are those of :meth:`commit`.

        A store that led before may hold a newer version that was never published, or other bytes under the same one.
        Both leave the ledger file too, so that it tells one history.
        """
        self._check_open("nothing can be adopted")
        p, version = commit.fragment_id, commit.fragment_version
        newer = [each for each in versions(self._directory, p) if each > version]
        held = self._newest.get(p)
        if held is not None and key_of(held) == key_of(commit) and not newer and p not in self._to_strike:
            self._ledger.settle()
            return  # a copy of what is here
        differs = held is not None and held.fragment_version == version and held.digest != commit.digest
        if newer or differs:
            self._to_strike[p] = min(version, self._to_strike.get(p, version))
        self._newest.pop(p, None)
        for each in newer:  # first: a crash must not leave them above what was acknowledged
            path = commit_path(self._directory, p, each)
            with mapped(f"cannot remove {path}", definite=False):
                path.unlink()
                flush(path.parent)
            self._damaged[p].discard(each)
        if p in self._to_strike:
            first = min(version, self._to_strike[p])
            self._ledger.strike(p, first)
            # An earlier attempt that failed may have come further than the ledger file: what it adopted keeps its line.
            for whole in self._commits_on_disk():
                if whole.fragment_id == p and first <= whole.fragment_version < version:
                    self._ledger.owe(whole)
        self.commit(commit, state, prune=prune)

    def prune(self, fragment_id: int) -> None:
        """Removes versions before the newest ``keep`` whole ones, but 0 and every ``keep_every``-th.

        A file of 140 MB takes a twentieth of a second, a third of what writing one does: who waits for a commit should
        not wait for this as well.
        """
        try:
            present = versions(self._directory, fragment_id)
        except Unavailable as err:
            log.warning("store.prune_failed", error=str(err))
            return
        whole = [version for version in present if version not in self._damaged[fragment_id]]
        oldest_kept = whole[: self._keep][-1] if whole else 0
        for version in present:
            if 0 < version < oldest_kept and not (self._keep_every and version % self._keep_every == 0):
                path = commit_path(self._directory, fragment_id, version)
                try:
                    path.unlink()
                except OSError as err:
                    # The commit stands, and the next one tries again: nothing to fail for, but something to say.
                    log.warning("store.prune_failed", path=str(path), error=err.strerror)

    def begin_lineage(self, above: Mapping[int, int], epoch: int) -> None:
        """Gives the newest whole version of each fragment a new number, above all that anybody may hold.

        A crash half-way leaves some fragments under their old numbers; the same order again settles it.

        Args:
            above: Fragment -> highest version that was seen; damaged versions in this store count besides.
            epoch: Of the commits.
        """
        for p, version in sorted(above.items()):
            whole = verified(commit_path(self._directory, p, self._newest[p].fragment_version))
            highest = max(version, *versions(self._directory, p))
            if highest > whole.commit.fragment_version:
                self.commit(renumbered(whole.commit, highest, epoch), whole.state._replace(version=highest + 1))

    def roll_back(
        self, snapshot: Path, above: Mapping[int, int], epoch: int, books: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Makes a snapshot's versions the newest, under numbers above all others, which never go back.

        After a crash half-way, the same order again settles it.

        Args:
            snapshot: Its directory.
            above: Fragment -> highest version in any store of this shard.
            epoch: Of the commits: above all before.
            books: Fragment -> the newest ones in any store of this shard.

        Raises:
            Damaged: A file of the snapshot is not what was written. Nothing is changed then.
        """
        files = {p: commit_path(snapshot, p, versions(snapshot, p)[0]) for p in fragment_ids(snapshot)}
        whole = {p: verified(path) for p, path in sorted(files.items())}  # all of them first
        for p, saved in whole.items():
            again = renumbered(saved.commit, above[p], epoch, rolled_back(saved.commit.ledger, books[p]))
            self.commit(again, saved.state._replace(version=again.fragment_version))
            saved.release()

    @property
    def name(self) -> str:
        """This store's own name, drawn when it was new: no two stores of a run are taken for one.

        A copy of a store holds its name too. So the file says where it was written, by the inodes of the directory and
        of itself, which no copy has; where they differ, a new name is drawn. Devices are left out: their numbers change
        when a machine starts again, and a store that loses its name loses its place in the lease.
        """
        path = name_path(self._directory)
        with mapped(f"cannot name the store {self._directory}", definite=True):
            known, *place = path.read_text(encoding="utf-8").split() if path.exists() else [""]
            here = [str(each.stat().st_ino) for each in (self._directory, path)] if known else []
            if known and place == here:
                return known
            name = known if not place else ""  # written before names had a place
            if not name:
                name = f"{re.sub('[^A-Za-z0-9._-]', '-', socket.gethostname())[:40]}-{chance.hexadecimal(4)}"
            if place:
                log.warning("store.renamed", path=str(self._directory), was=known, name=name, reason="a copy")

            def write(fd: int) -> None:
                content = f"{name} {self._directory.stat().st_ino} {os.fstat(fd).st_ino}\n"
                write_all(fd, memoryview(content.encode()))

            self._replace(path, write)
            return name

    def _replace(self, path: Path, write: Callable[[int], None]) -> None:
        """Puts what ``write`` writes in the place of ``path``, whole and durable."""
        self._check_open(f"{path.name} cannot be written")
        replace(path, write)

    def _check_open(self, then: str) -> None:
        """Raises if the store was closed: another process may own it."""
        if self._lock_fd < 0:
            raise LocalProtocolError(f"the store {self._directory} is closed, {then}")

    def _commits_on_disk(self) -> Iterable[Commit]:
        for fragment_id in fragment_ids(self._directory):
            for version in versions(self._directory, fragment_id):
                if version not in self._damaged[fragment_id]:
                    with suppress(Damaged):  # an older version, of which only the header is looked at here
                        yield read_header(commit_path(self._directory, fragment_id, version)).commit


def _locked(path: Path) -> int:
    """Returns the lock's descriptor; the system drops the lock when this process ends, in any way."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BlockingIOError as err:
        holder = os.pread(fd, 200, 0).decode(errors="replace") or "another process"
        os.close(fd)
        cure = "stop that process, or choose another directory"
        raise Unavailable(f"the store {path.parent} is in use by {holder}; {cure}", definite=True) from err
    except OSError:
        os.close(fd)
        raise
    return fd
