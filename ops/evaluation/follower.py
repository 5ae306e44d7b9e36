"""Evaluates a run's newest global model each time that a number of tokens were trained, until its end.

The loop takes a clock, a way to sleep and what judges a model as arguments; it is the only one that decides what is
evaluated when. Whatever fails here costs a point of the curve, and the run nothing. The run is seen through its files:
nothing here asks a process of it, takes a lock of it or writes to its store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aggregator.interface.events import Commit
from aggregator.ledger.ledger import tokens_trained
from aggregator.state.records import RUN_ID
from aggregator.store.commit_file import Damaged, read_header
from aggregator.store.layout import commit_path, fragment_ids, read_run, versions
from broker.base.errors import ConfigError, Unavailable
from islands.tasks.benchmarks import Judgement
from ops import run_directory
from ops.evaluation.curve_file import CurveFile
from ops.models.global_model import GlobalModel, Which, read_model, stores_of
from ops.story import curve
from ops.story.curve import Point

POLL_S = 0.5
#: What stands in Redis is written again so often: an emptied one looks like one that was never gone.
REPUBLISH_S = 10.0


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
        except (FileNotFoundError, Damaged):  # pruned since, or read_newest passes over it
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


class Follower:
    """One run and its curve.

    Args:
        run: To be followed.
        file: Of its curve.
        every: Tokens between two evaluations.
        judge: Tensors of a model, and words for it -> what is measured of it.
        publish: Writes the newest point where status looks; whatever hinders it, it says itself.
        say: Prints a line.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        run: FollowedRun,
        file: CurveFile,
        *,
        every: int,
        judge: Callable[[Mapping[str, Any], str], Judgement],
        publish: Callable[[Point], None],
        say: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._run = run
        self._file = file
        self._every = every
        self._judge = judge
        self._publish = publish
        self._say = say
        self._sleep = sleep
        self._published_s = float("-inf")
        self._behind = False  # said that the disk takes nothing

    def follow(self) -> None:
        """Returns after the last model of a run that has ended, or that nobody runs any more.

        Raises:
            ConfigError: Nothing could be measured of a model: the task or the benchmarks do not fit it.
        """
        seeded = any(not any(point.versions) for point in self._file.points)
        before = self._file.points[-1].tokens if self._file.points else None
        while True:
            # Asked before the model is read: what is read afterwards is the last one.
            over = self._run.has_ended() or self._run.is_abandoned()
            if not seeded:
                seeded = self._evaluate(self._run.model(Which.SEED))
            tokens = self._run.tokens()
            due = tokens is not None and curve.is_due(tokens, before, self._every)
            if (over or due) and self._evaluate(self._run.model()):
                seeded, before = True, tokens  # version 0 would come too late
            if over:
                self._republish(now=True)
                return
            self._republish()
            self._sleep(POLL_S)

    def once(self) -> Point:
        """Evaluates the newest model, even if it was before.

        Raises:
            Unavailable: There is none yet.
            ConfigError: Nothing could be measured of it.
        """
        if not self._evaluate(self._run.model(), again=True):
            raise Unavailable("the run has no model yet: wait until an island has joined", definite=True)
        return self._file.points[-1]

    def _evaluate(self, model: GlobalModel | None, *, again: bool = False) -> bool:
        """Evaluates a model unless it was before; says whether there is one."""
        if model is None:
            return False
        if again or all(point.model != model.digest for point in self._file.points):
            began_s = time.monotonic()
            found = self._judge(model.tensors, f"run {model.run_id}")
            point = Point(
                tokens=model.tokens,
                versions=model.versions,
                model=model.digest,
                at=round(time.time(), 3),
                seconds=round(time.monotonic() - began_s, 3),
                metrics=found.metrics,
                better=found.better,
                stderr=found.stderr,
                failed=found.failed,
            )
            self._keep(point)
        return True

    def _keep(self, point: Point) -> None:
        """Writes a point wherever it belongs."""
        try:
            self._file.append(point)
        except Unavailable as err:
            if not self._behind:
                self._say(f"atoll: {err}; evaluations that are not in the file are only told here")
            self._behind = True
        else:
            self._behind = False
        self._say(curve.sentence(point))
        self._republish(now=True)

    def _republish(self, *, now: bool = False) -> None:
        now_s = time.monotonic()
        if self._file.points and (now or now_s >= self._published_s + REPUBLISH_S):
            self._published_s = now_s
            self._publish(self._file.points[-1])
