"""The watched run: its tapes, and its entries in Redis; asks no process, and writes nothing.

With a run's directory the tapes tell what has happened, and its Redis, while there is one, who lives now. With the
address of a Redis alone, or of a broker that shows it, the events in it tell both, from a few thousand events ago on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from broker.base.errors import ConfigError, Unavailable
from broker.observing.client import ObservedRun
from broker.registry.registry import Registry
from ops.evaluation.curve_file import read_points
from ops.inspect.dropped import gone_of
from ops.inspect.explain import explain, explain_from, target_of
from ops.inspect.source import FollowedEvents, RunReader
from ops.inspect.status import address_in
from ops.inspect.tapes import FollowedTapes, Line, ledgers_in, tapes_in
from ops.run_directory import LOCK_FILE, PROCESSES_FILE, in_use
from ops.story import curve
from ops.story.history import History
from ops.story.run_status import Status, status_of
from ops.text import finite

#: How often tapes and Redis are looked at. An island that falls silent is seen after two seconds of silence.
LOOK_EVERY_S = 0.25
#: Likewise at a broker, which answers some questions a second; each look has two.
ASK_EVERY_S = 0.5
#: Of a tape, before a page that asks is answered: some 20 ms.
LINES_AT_A_TIME = 1000
#: Silence of the tapes after which the run may be over: it is checked then whether an `up` works in the directory.
QUIET_S = 2.0
#: Evaluations that a page gets of a long curve.
SHOWN_POINTS = 200
#: Age of a heartbeat in Redis below which an island counts as heard.
HEARD_WITHIN_S = 1.0
#: Events of a Redis that are read at a time, and in how many readings those of one look.
EVENTS, READINGS = 2000, 5


class WatchedRun:
    """A run's history and present.

    Args:
        run_dir: Directory of a run of ``up``, live or ended; None: Redis alone.
        url: Address of Redis; None: the one of the directory.
        run_id: Empty: the run of the directory, or the one that Redis was written to last.
        observed: In place of a directory and of Redis: the run as a broker shows it.
        also: Gets each line of the tapes, beside the history.

    Raises:
        ConfigError: ``run_dir`` is none.
    """

    def __init__(
        self,
        run_dir: Path | None,
        url: str | None,
        run_id: str,
        *,
        observed: ObservedRun | None = None,
        also: Callable[[Line], object] | None = None,
    ) -> None:
        self._run_dir, self._url, self._also = run_dir, url, also
        self.run_id, self.history = run_id, History()
        self.status: Status | None = None
        self.failure = ""
        self._tapes = FollowedTapes()
        self._observed = observed
        self._reader: RunReader | None = observed
        self._reading = asyncio.Lock()  # one operation at a time
        self._events_of_run = FollowedEvents()
        self._stopped, self._quiet_since_s = False, -math.inf
        self._evaluations: tuple[object, list[curve.Point]] = (None, [])  # the file's size and time, and what was in it
        self._gone: tuple[dict[Path, int], str] = ({}, "")  # segments that nobody can read any more, and that in words
        if run_dir is not None:
            address = address_in(run_dir)
            self.run_id = run_id or address.run_id or run_dir.name
            if url is None and (not address.own or in_use(run_dir)):
                self._url = os.environ.get("REDIS_URL") or address.url
            if not tapes_in(run_dir) and self._url is None:
                raise ConfigError("RUN_DIR", str(run_dir), "has no event tape (events.jsonl), and its Redis has ended")

    async def follow(self) -> None:
        """Reads tapes and Redis again and again; an error that ends this is shown on the page."""
        try:
            while True:
                began_s = time.monotonic()
                lines = await asyncio.to_thread(self._new_lines)
                for first in range(0, len(lines), LINES_AT_A_TIME):  # pages ask between two of these
                    self._take(lines[first : first + LINES_AT_A_TIME])
                    await asyncio.sleep(0)
                self._look_for_stop(quiet=not lines and not self._tapes.behind)
                await self._ask()
                if not self._tapes.behind:
                    every_s = LOOK_EVERY_S if self._observed is None else ASK_EVERY_S
                    await asyncio.sleep(max(0.05, every_s - (time.monotonic() - began_s)))
        except Exception as err:
            self.failure = f"The dashboard follows the run no more ({type(err).__name__}: {err}): what is shown is old."
            raise

    def read(self) -> bool:
        """Reads what is new on the tapes, a chunk of each; returns whether there is more."""
        self._take(self._new_lines())
        self._look_for_stop(quiet=not self._tapes.behind)
        return self._tapes.behind

    def _look_for_stop(self, *, quiet: bool) -> None:
        """Finds out whether the run's processes are gone; unknown without a lock, as with daemons."""
        if self._tapes.behind:
            return  # how it ended is still to be read
        now_s = time.monotonic()
        if not quiet and self._quiet_since_s > -math.inf:  # at first it is looked at once, whatever the tapes have
            self._stopped, self._quiet_since_s = False, now_s
        elif self._run_dir is not None and now_s >= self._quiet_since_s + QUIET_S:
            self._quiet_since_s = now_s
            self._stopped = (self._run_dir / LOCK_FILE).exists() and not in_use(self._run_dir)

    def _new_lines(self) -> list[Line]:
        if self._run_dir is None:
            return []
        return self._tapes.lines((*tapes_in(self._run_dir), self._run_dir / PROCESSES_FILE))

    def _take(self, lines: list[Line]) -> None:
        for line in lines:
            self.history.take(line)
            if self._also is not None:
                self._also(line)

    async def _ask(self) -> None:
        """Reads the status from Redis, and its events if there is no tape."""
        if self._reader is None and self._url is None:
            return
        try:
            if self._reader is None:
                assert self._url is not None
                self._reader = await self._connect(self._url)
            async with self._reading:
                snapshot = await self._reader.read()
            self.run_id = snapshot.run_id
            self.status = status_of(snapshot, snapshot.now_s)
            if self._run_dir is None or not tapes_in(self._run_dir):
                await self._events(self._reader)
                self.history.present(self.status, snapshot.now_s, HEARD_WITHIN_S)
            for name, each in self.status.islands.items():
                self.history.seen(name, each.state)
            if self._observed is not None:
                self.failure = ""
        except Unavailable as err:
            self.status = None  # the page says that nothing is known of now
            if self._observed is not None:
                self.failure = f"What is shown is old: {err}."

    async def _connect(self, url: str) -> Registry:
        run_id = self.run_id
        if not run_id:
            runs = await Registry(url, "any").known_runs()
            if not runs:
                raise Unavailable(f"Redis at {url} knows no run", definite=False)
            run_id = self.run_id = runs[0]
        return Registry(url, run_id)

    async def _events(self, reader: RunReader) -> None:
        for _ in range(READINGS):
            async with self._reading:
                events, more = await self._events_of_run.read(reader, EVENTS)
            for at_s, note in events:
                self.history.at(at_s)
                self.history.note(note)
            if not more:
                return

    # --- what a page asks for -----------------------------------------------------------------------------------

    def frame(self, since: int, *, stopped: bool = False) -> dict[str, Any]:
        """Returns the history's frame, with the run's name and its present status in Redis.

        Args:
            since: Number of the last change that the page has.
            stopped: The caller knows that the run's processes are gone.
        """
        frame = self.history.frame(since, stopped=stopped or self._stopped)
        status = self.status
        present = None
        if status is not None:
            present = {
                "leaders": {str(shard): asdict(each) for shard, each in status.shards.items()},
                "brokers": {name: asdict(each) for name, each in status.brokers.items()},
                "totals": dict(status.totals),
                "broker_is_silent": status.broker_is_silent,
            }
        return frame | {
            "run": self.run_id,
            "failure": self.failure,
            "gone": self._what_is_gone(),
            "evaluations": [each.to_json() for each in curve.some(self._points(), SHOWN_POINTS)],
            "present": None if present is None else dict(finite(present, digits=6)),
        }

    def _points(self) -> list[curve.Point]:
        """Returns the run's evaluations; without a directory those that Redis had while this object looked."""
        if self._run_dir is None:
            newest = None if self.status is None else self.status.evaluation
            if newest is not None and newest.model != self._evaluations[0]:
                self._evaluations = newest.model, [*self._evaluations[1], newest]
        else:
            with contextlib.suppress(OSError):  # there is none
                found = (self._run_dir / curve.FILE).stat()
                if (stamp := (found.st_size, found.st_mtime_ns)) != self._evaluations[0]:
                    self._evaluations = stamp, read_points(self._run_dir)
        return self._evaluations[1]

    def _what_is_gone(self) -> str:
        """Names the segments of tapes that were gone before they could be read; empty if none were."""
        missed = self._tapes.missed()
        if missed != self._gone[0]:
            found = [gone_of(tape) for tape in missed]
            said = "; ".join(each.sentence() for each in found if each is not None)
            self._gone = missed, said and f"This page does not tell everything: {said}."
        return self._gone[1]

    async def version(self, fragment: int, version: int) -> dict[str, Any] | None:
        """Returns the explanation of a version as ``atoll explain`` has it; None if unknown here."""
        target = target_of(f"{fragment}:{version}")
        if self._run_dir is not None:
            files = {"ledgers": ledgers_in(self._run_dir), "tapes": tapes_in(self._run_dir)}
            found = await asyncio.to_thread(explain, target, **files)
        elif self._reader is not None:
            try:
                async with self._reading:
                    found = await explain_from(self._reader, target)
            except Unavailable:
                return None
        else:
            return None
        return None if found is None else dict(finite(asdict(found), digits=6))
