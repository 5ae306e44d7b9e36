"""The machine of an aggregator in virtual time: a disk, and lives of the real process on it.

Each life runs :func:`aggregator.process.service.serve` as its program. What it decides is seen at its core, by whoever
watches (:class:`Watcher`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

from aggregator.interface import events as agg
from aggregator.process import service
from aggregator.rounds.core import Aggregator
from aggregator.store.commit_file import Damaged, read_header
from aggregator.store.layout import commit_path, fragment_ids, name_path, read_run, versions
from broker.base.errors import Unavailable
from broker.wire.records import LeaseView
from ops.devices.disk import Disk, full
from ops.devices.redis import Redis
from ops.virtual.loop import Killed, Process, VirtualTime
from ops.virtual.plan import Point, SimulationPlan, station_names
from ops.virtual.wires import REDIS_URL, Wires, address_of

#: A commit has several writes: each fails with this part of the chance that a commit fails.
WRITES = 4


class Watcher(Protocol):
    """The run of a station: its settings, and the observer of its decisions."""

    plan: SimulationPlan
    virtual: VirtualTime
    wires: Wires
    redis: Redis

    def dies_at(self, process: str, point: Point) -> bool:
        """Returns whether a process dies at a point that it comes by."""

    def leads(self, station: Station) -> None:
        """A core is about to lead."""

    def hears(self, station: Station, event: agg.Event) -> None:
        """Called before a core takes an event."""

    def decides(self, station: Station, actions: Sequence[agg.Action]) -> None:
        """Called when a core has answered, before any action is carried out."""


class Station:
    """One aggregator's machine.

    Args:
        run: The simulated run.
        number: Among all aggregators.
        disk: Of the machine.

    Attributes:
        name: Of machine and store.
        config: Settings of the process; the store is on the disk.
        process: Of the present life, or the last one.
        core: That leads or led last; None before.
        address: Names the process and its term.
        persisting: Commits that go to the disk: (fragment, version) -> commit.
        troubles: Why processes gave up.
        ended: Its process has ended by itself: why.
    """

    def __init__(self, run: Watcher, number: int, disk: Disk) -> None:
        plan = run.plan
        shard, place = divmod(number, 1 + plan.standbys)
        self.name, self.disk, self._run = station_names(plan.config.shards, plan.standbys)[number], disk, run
        self.config = replace(
            plan.config,
            shard=shard,
            standby=place > 0,
            redis_url=REDIS_URL,
            broker=",".join(map(address_of, range(plan.brokers))),
            tape=None if plan.config.tape is None else self.run_dir / plan.config.tape.name,
        )
        self.process: Process | None = None
        self.core: Any = None
        self.address = ""
        self.lives = 0
        self.persisting: dict[tuple[int, int], agg.Commit] = {}
        self.troubles: list[str] = []
        self.ended: service.Ending | None = None
        self._kept: tuple[dict[int, agg.Commit], dict[str, Any]] | None = None  # what is on the disk of an ended run
        disk.before, disk.after = self._before_change, self._after_change
        self._name_store()

    def _name_store(self) -> None:
        """Gives the store its machine's name, as if it had drawn that."""
        path = name_path(self.disk.path)
        path.write_text("")
        path.write_text(f"{self.name} {os.stat(self.disk.path).st_ino} {os.stat(path).st_ino}\n")

    @property
    def alive(self) -> bool:
        """Returns True while a process of the aggregator runs."""
        return self.process is not None and self.process.alive

    @property
    def run_dir(self) -> Path:
        """The directory of store and tape."""
        return self.disk.path.parent

    def commits(self) -> dict[int, agg.Commit]:
        """Returns the newest whole version of each fragment on its disk."""
        if self._kept is not None:
            return self._kept[0]
        found = {}
        for p in fragment_ids(self.disk.path):
            for version in versions(self.disk.path, p):
                try:
                    found[p] = read_header(commit_path(self.disk.path, p, version)).commit
                except Damaged:
                    continue
                break
        return found

    def record(self) -> dict[str, Any]:
        """Returns the run record on its disk; empty if there is none."""
        return self._kept[1] if self._kept is not None else read_run(self.disk.path) or {}

    def lease(self) -> LeaseView:
        """Returns what Redis has of the lease of its shard."""
        key = f"atoll:{self.config.run_id}:lease:{self.config.shard}"
        return LeaseView.of(self._run.redis.data.keys.get(key, {}), 0.0)

    # --- its lives ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts a process, unless one runs."""
        if self.alive or self.ended is service.Ending.OVER:
            return
        self.lives += 1
        troubles = tuple(each for each in self._run.plan.clocks if each.process == self.name)
        self.process = self._run.virtual.process(self.name, troubles)
        self.process.job_s = self._job_s
        self.process.start(self._main())

    def _job_s(self, pool: str) -> float:
        plan = self._run.plan
        times = {"disk": plan.persist_s, "compute": plan.merge_s}.get(pool, plan.capture_s)
        return self._run.virtual.between(self.name, f"job {pool}", *times)

    async def _main(self) -> None:
        assert self.process is not None
        settings = {each.name: getattr(self.config, each.name) for each in fields(self.config)}
        given = {name: value for name, value in settings.items() if value is not None} | {"store": self.disk.path}
        try:
            context = self._run.wires.context(self.process)
            self.ended = await service.serve(given, stop=asyncio.Event(), ready=self._leads, context=context)
        except Unavailable as err:  # its supervisor starts it again
            self.troubles.append(str(err))
            self.crash(self._run.plan.restart_s)

    def crash(self, restart_s: float, *, power: bool = False) -> None:
        """Kills its process, with its machine if the ``power`` fails; another one starts later."""
        if not self.alive:
            return
        assert self.process is not None
        self.process.kill()
        self.disk.close_files()
        if power:
            self.disk.lose_power()
        self._run.virtual.after(restart_s, self.start)

    def freeze(self, for_s: float) -> None:
        """Stops its process for a while."""
        if self.process is not None:
            self._run.wires.freeze(self.process, for_s)

    def bury(self) -> None:
        """Closes what a dead process had open, and remembers its disk, which goes with the run."""
        self.disk.close_files()
        self._kept = self.commits(), self.record()

    # --- its disk -------------------------------------------------------------------------------------------------

    def _before_change(self, change: str) -> None:
        run = self._run
        if not self.alive or run.dies_at(self.name, Point.PERSIST):
            raise Killed
        calm = run.virtual.now_s > run.plan.calm_after_s
        share = 0.0 if calm else run.plan.persist_failure / WRITES
        if change == "write" and share and run.virtual.draw(self.name, "full") < share:
            raise full()

    def _after_change(self, change: str) -> None:
        if change == "fsync" and self._run.dies_at(self.name, Point.PERSISTED):
            raise Killed

    # --- what it decides ------------------------------------------------------------------------------------------

    def _leads(self, core: Aggregator) -> None:
        self.core = core
        self.address = f"{self.name}/{self.lives}.{core.run.epoch}"
        self.persisting.clear()
        self._run.leads(self)
        start, handle, process = core.start, core.handle, self.process

        def seen(actions: list[agg.Action]) -> list[agg.Action]:
            if process is not None and process.alive:
                for action in actions:
                    if isinstance(action, agg.Persist):
                        commit = action.commit
                        self.persisting[commit.fragment_id, commit.fragment_version] = commit
                self._run.decides(self, actions)
            return actions

        def handled(event: agg.Event, now_s: float) -> list[agg.Action]:
            self._run.hears(self, event)
            return seen(handle(event, now_s))

        watched: Any = core
        watched.start, watched.handle = (lambda now_s: seen(start(now_s))), handled
