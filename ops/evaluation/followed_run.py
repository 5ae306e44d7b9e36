"""A followed run, seen through its files: its progress, its newest model, and whether it has ended.

Nothing here asks a process of the run, takes a lock of it or writes to its store.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aggregator.events import Commit
from aggregator.ledger.ledger import tokens_trained
from aggregator.state.records import RUN_ID
from aggregator.store.commit_file import Damaged, read_header
from aggregator.store.layout import commit_path, fragment_ids, read_run, versions
from broker.wire.errors import ConfigError, Unavailable
from ops import run_directory
from ops.inspect.global_model import GlobalModel, Which, read_model, stores_of


class FollowedRun:
    """A run's stores, and what they say.

    Args:
        directory: Of a run of ``up``, or a store by itself.
        target_tokens: That the run is to train by its configuration; 0: no end.

    Raises:
        ConfigError: It is neither.
    """

    def __init__(self, directory: Path, *, target_tokens: int) -> None:
        self._own = (directory / "config.toml").is_file()
        if not self._own and not (directory / "fragments").is_dir():
            cure = "must be the directory of a run of `up` or `hub`, or a store with fragments in it (and its --config)"
            raise ConfigError("follow", str(directory), cure)
        self._directory = directory
        self._target_tokens = target_tokens
        self._newest: dict[tuple[Path, int], tuple[int, int]] = {}  # store, fragment -> version, tokens trained by it

    def tokens(self) -> int | None:
        """Returns the tokens trained by the newest version of any fragment; None while there is no version.

        Cheap: of a version that is new, the header is read.
        """
        for store in self._stores():
            try:
                for p in fragment_ids(store):
                    self._look(store, p)
            except Unavailable:  # told where the model is read
                continue
        return max((tokens for _, tokens in self._newest.values()), default=None)

    def _look(self, store: Path, fragment_id: int) -> None:
        newest = next(iter(versions(store, fragment_id)), None)
        if newest is None or self._newest.get((store, fragment_id), (-1, 0))[0] == newest:
            return
        try:
            commit: Commit = read_header(commit_path(store, fragment_id, newest)).commit
        except (FileNotFoundError, Damaged):  # pruned since, or whoever reads the model passes over it
            return
        self._newest[(store, fragment_id)] = newest, tokens_trained(commit.ledger)

    def model(self, which: Which = Which.NEWEST) -> GlobalModel | None:
        """Returns a model; None while the run has none."""
        try:
            return read_model(stores_of(self._directory), which)
        except (ConfigError, Unavailable):
            return None

    def has_ended(self) -> bool:
        """Says whether every shard has ended the run, and nobody has asked for more tokens since."""
        try:
            shards = stores_of(self._directory)
        except ConfigError:
            return False
        return all(self._shard_has_ended(stores) for stores in shards)

    def _shard_has_ended(self, stores: list[Path]) -> bool:
        records = [record for store in stores if (record := _record(store)) is not None]
        newest = max(records, key=lambda each: int(each.get("epoch", 0)), default={})
        if not newest.get("ended"):
            return False
        # Asked for more tokens, an aggregator goes on and says so at its first save; we may look before.
        _, target = newest.get("told", ("", 0))
        return not self._own or 0 < self._target_tokens <= int(target)

    def is_abandoned(self) -> bool:
        """Says whether this is the directory of an ``up`` that does not run."""
        return self._own and not run_directory.in_use(self._directory)

    def run_id(self) -> str:
        """Returns the run's name by its store; empty while that is not known."""
        return next((str(record[RUN_ID]) for store in self._stores() if (record := _record(store)) is not None), "")

    def _stores(self) -> list[Path]:
        try:
            return [store for shard in stores_of(self._directory) for store in shard]
        except ConfigError:  # not seeded yet
            return []


def _record(store: Path) -> dict[str, Any] | None:
    try:
        return read_run(store)
    except Unavailable:
        return None
