"""The history of a store, ``ledger.jsonl``: a line per version, with islands, weights and staleness.

A version is durable before it has its line, and keeps its bytes until it has: a line that could not be written is owed,
and comes with whatever is asked for next. What a crash leaves is mended at the next beginning: a torn line is cut off,
and versions that lie on the disk without a line get one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from aggregator.events import Commit
from aggregator.state.records import is_ledger_line, ledger_line
from aggregator.store.commit_file import write_all
from aggregator.store.layout import mapped
from aggregator.store.replacing import flush_directory, replace
from aggregator.store.tape import read_lines
from broker.process import logs

log = logs.get(__name__)

#: Fragment, version, digest: what a line is of.
Key = tuple[int, int, str]


def key_of(commit: Commit) -> Key:
    """Returns what tells a commit from every other of its run."""
    return commit.fragment_id, commit.fragment_version, commit.digest


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Returns the lines of a ledger; what is none, whoever made it so, is passed over.

    Raises:
        OSError: The file cannot be read.
    """
    return filter(is_ledger_line, read_lines(path))


class LedgerFile:
    """The ledger file of one store, and its only writer; raises Unavailable when the disk fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owed: dict[Key, Commit] = {}

    def owes(self, commit: Commit) -> bool:
        """Whether a commit is durable, and has no line yet."""
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
        if not self._path.exists():
            return
        kept = []
        with mapped(f"cannot read {self._path}", definite=True):
            for line in self._path.read_bytes().splitlines(keepends=True):
                with suppress(ValueError, KeyError, TypeError):
                    row = json.loads(line)
                    if row["fragment_id"] == fragment_id and row["fragment_version"] >= first_version:
                        continue
                kept.append(line)
        replace(self._path, lambda fd: write_all(fd, memoryview(b"".join(kept))))

    def complete(self, on_disk: Iterable[Commit]) -> set[Key]:
        """Cuts a torn end off, and adds the versions on disk that have no line.

        Args:
            on_disk: Every whole version.

        Returns:
            What the lines list that were there.
        """
        known: set[Key] = set()
        with mapped(f"cannot open {self._path}", definite=False):
            if self._path.exists():
                with self._path.open("r+b") as file:
                    for number, line in enumerate(file, start=1):
                        if not line.endswith(b"\n"):
                            file.truncate(file.tell() - len(line))
                            os.fsync(file.fileno())
                            break
                        try:
                            row = json.loads(line)
                            known.add((row["fragment_id"], row["fragment_version"], row["digest"]))
                        except (ValueError, KeyError, TypeError):
                            log.warning("store.ledger_line_damaged", path=str(self._path), line=number)
            else:
                self._path.touch()
                flush_directory(self._path.parent)
        missing = [commit for commit in on_disk if key_of(commit) not in known]
        if missing:
            self._append(sorted(missing, key=lambda commit: (commit.round_id, key_of(commit))))
        return known

    def _append(self, commits: Iterable[Commit]) -> None:
        """Adds a line per commit, all or none, durably: afterwards the commit may be pruned."""
        lines = "".join(json.dumps(ledger_line(commit), separators=(",", ":")) + "\n" for commit in commits)
        with mapped(f"cannot append to {self._path}", definite=False):
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(fd).st_size
                try:
                    write_all(fd, memoryview(lines.encode()))
                    os.fsync(fd)
                except OSError:
                    os.ftruncate(fd, size)
                    raise
            finally:
                os.close(fd)
