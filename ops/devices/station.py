"""The machine of an aggregator in virtual time: a disk, and lives of the real process on it.

Each life runs :func:`aggregator.process.service.serve` as its program. What it decides is seen at its core, by whoever
watches (:class:`Watched`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Protocol

from aggregator.interface import events as agg
from aggregator.interface.config import AggregatorConfig
from aggregator.process import service
from aggregator.rounds.core import Aggregator
from aggregator.store.commit_file import Damaged, read_header
from aggregator.store.layout import commit_path, fragment_ids, name_path, versions
from broker.base.errors import Unavailable
from broker.transport.sockets import Context
from ops.devices.disk import Disk
from ops.virtual.loop import Process, VirtualTime
from ops.virtual.queue import ClockTrouble


class Watcher(Protocol):
    """Observer of the decisions of a run's leaders."""

    def leads(self, station: Station, core: Aggregator) -> None:
        """A core is about to lead."""

    def hears(self, station: Station, event: agg.Event) -> None:
        """Called before a core takes an event."""

    def decides(self, station: Station, actions: Sequence[agg.Action]) -> None:
        """Called when a core has answered, before any action is carried out."""


class Station:
    """One aggregator's machine.

    Args:
        virtual: The time.
        name: Of machine and store.
        config: Settings of the process, the address of Redis among them; the store is on the disk.
        disk: Of the machine.
        context: Makes the sockets of each life, which has a number.
        watcher: Sees what is decided.
        clocks: What is wrong with its clock.

    Attributes:
        process: Of the present life, or the last one.
        core: That leads or led last; None before.
        restart_s: Until a process starts again that gave up.
        job_s: See :class:`ops.virtual.loop.Process`.
        ended: Its process has ended by itself: why.
    """

    def __init__(
        self,
        virtual: VirtualTime,
        name: str,
        config: AggregatorConfig,
        disk: Disk,
        *,
        context: Callable[[Station, int], Context],
        watcher: Watcher,
        clocks: tuple[ClockTrouble, ...] = (),
    ) -> None:
        self.name, self.config, self.disk = name, config, disk
        self._virtual, self._context, self._watcher, self._clocks = virtual, context, watcher, clocks
        self.process: Process | None = None
        self.core: Aggregator | None = None
        self.lives = 0
        self.restart_s = 0.5
        self.job_s: Callable[[str], float] = lambda pool: virtual.between(name, f"job {pool}", 1e-3, 2e-2)
        self.ended: service.Ending | None = None
        self.troubles: list[str] = []
        self._name_store()

    def _name_store(self) -> None:
        """Gives the store its machine's name, as if it had drawn that."""
        path = name_path(self.disk.path)
        path.write_text("")
        path.write_text(f"{self.name} {os.stat(self.disk.path).st_ino} {os.stat(path).st_ino}\n")

    @property
    def alive(self) -> bool:
        """Whether a process runs here."""
        return self.process is not None and self.process.alive

    def commits(self) -> dict[int, agg.Commit]:
        """Returns the newest whole version of each fragment on its disk."""
        found = {}
        for p in fragment_ids(self.disk.path):
            for version in versions(self.disk.path, p):
                try:
                    found[p] = read_header(commit_path(self.disk.path, p, version)).commit
                except Damaged:
                    continue
                break
        return found

    # --- its lives ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts a process, unless one runs."""
        if self.alive or self.ended is service.Ending.OVER:
            return
        self.lives += 1
        self.process = self._virtual.process(self.name, self._clocks)
        self.process.job_s = self.job_s
        self.process.start(self._main(self.lives))

    async def _main(self, life: int) -> None:
        settings = {each.name: getattr(self.config, each.name) for each in fields(self.config)}
        given = {name: value for name, value in settings.items() if value is not None} | {"store": self.disk.path}
        try:
            context = self._context(self, life)
            self.ended = await service.serve(given, stop=asyncio.Event(), ready=self._leads, context=context)
        except Unavailable as err:  # its supervisor starts it again
            self.troubles.append(str(err))
            self.crash(self.restart_s)

    def crash(self, restart_s: float, *, power: bool = False) -> None:
        """Kills its process, with its machine if the ``power`` fails; another one starts later."""
        if not self.alive:
            return
        assert self.process is not None
        self.process.kill()
        self.disk.close_files()
        if power:
            self.disk.lose_power()
        self._virtual.after(restart_s, self.start)

    def freeze(self, for_s: float) -> None:
        """Stops its process for a while."""
        if self.process is not None:
            self.process.freeze(for_s)

    # --- what it decides ------------------------------------------------------------------------------------------

    def _leads(self, core: Aggregator) -> None:
        self.core = core
        self._watcher.leads(self, core)
        start, handle, process = core.start, core.handle, self.process

        def seen(actions: list[agg.Action]) -> list[agg.Action]:
            if process is not None and process.alive:
                self._watcher.decides(self, actions)
            return actions

        def handled(event: agg.Event, now_s: float) -> list[agg.Action]:
            self._watcher.hears(self, event)
            return seen(handle(event, now_s))

        watched: Any = core
        watched.start, watched.handle = (lambda now_s: seen(start(now_s))), handled
