"""Copies of a training state: checkpoints, donations given, donations received.

Shell. The training thread copies its state at a boundary when it is asked to; what is done with the copies is decided
here, in the communication thread (:mod:`islands.session.session`). What takes time is returned as work, and ends in the
event that the core waits for, or in none.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from broker.base.errors import Unavailable
from broker.process import logs
from broker.wire.messages import Encoded
from islands.interface.config import IslandConfig
from islands.protocol import events
from islands.protocol.core import Island
from islands.session import checkpoint
from islands.session.array_work import ArrayWork
from islands.session.checkpoint import Checkpoint
from islands.session.exchange import Due, Exchange, Moment, StateFound

log = logs.get(__name__)

#: Does what takes time, when it is called, and returns the event that tells the core of its end.
Work = Callable[[], Awaitable[events.Event | None]]


class Snapshots:
    """Copies of this island's training state: for checkpoints, for others, and the one it begins with."""

    def __init__(self, config: IslandConfig, core: Island, array_work: ArrayWork, exchange: Exchange, due: Due) -> None:
        self._config = config
        self._core = core
        self._array_work = array_work
        self._exchange, self._due = exchange, due
        self._save_at_s = math.inf
        self._save_wanted = self._saving = False
        self._gift_wanted = False  # another island needs a copy of the optimizer's state
        self._searching = self._begun = False  # for an optimizer state; with one
        self._found: Checkpoint | None = None  # a donor's state that fits

    @property
    def checkpoint_file(self) -> Path | None:
        """This island's checkpoint, if it keeps one."""
        if self._config.state_dir is None:
            return None
        return checkpoint.file_of(self._config.state_dir, self._core.island_id)

    def joined(self, now_s: float) -> None:
        """Begins to save checkpoints: the island has its id, and the file its name."""
        if self._config.state_dir is not None:
            self._save_at_s = now_s + self._config.checkpoint_interval_s

    def advance(self, now_s: float) -> list[events.Event]:
        """Asks for the copy of a due checkpoint; returns events of the training thread before its first step.

        The events say that it needs an optimizer state, and then, which one it has.
        """
        exchange = self._exchange
        if now_s >= self._save_at_s and not self._saving:
            self._save_at_s = now_s + self._config.checkpoint_interval_s
            self._save_wanted = self._due.snapshot_wanted = True
        news: list[events.Event] = []
        needed, begun = exchange.state_needed, exchange.begun
        if needed is not None and not self._searching:
            self._searching = True
            news.append(events.StateNeeded(most_bytes=needed.most_bytes, patience_s=self._config.donor_wait_s))
        if begun is not None and not self._begun:
            self._begun = True
            news.append(events.Restored(source=begun.source))
        return news

    def taken(self, moment: Moment) -> list[Work]:
        """Returns what to do with the copy of the state that was taken at a boundary."""
        works: list[Work] = []
        if self._save_wanted:
            self._save_wanted, self._saving = False, True
            works.append(partial(self._save, moment))
        if self._gift_wanted:
            self._gift_wanted = False
            works.append(partial(self._give, moment))
        return works

    def gift(self) -> list[Work]:
        """Has the training thread copy its state at the next boundary, if its loop shows any."""
        if not self._exchange.shows_state:
            return [partial(self._give, None)]
        self._gift_wanted = self._due.snapshot_wanted = True
        return []

    def settled(self, detail: str) -> None:
        """Ends the search for an optimizer state: gives the training thread the one found, if any."""
        self._exchange.state_found = StateFound(found=self._found, detail=detail)
        self._found = None
        self._exchange.news.set()

    async def _save(self, moment: Moment) -> None:
        path = self.checkpoint_file
        assert path is not None
        try:
            nbytes = await self._array_work.save(path, moment, self._core.incarnation)
            if nbytes:
                log.debug("checkpoint.saved", step=moment.at.step, bytes=nbytes)
        except Unavailable as err:
            log.warning("checkpoint.failed", detail=str(err), retry_s=self._config.checkpoint_interval_s)
        finally:
            self._saving = False

    async def _give(self, moment: Moment | None) -> events.Event:
        parts: tuple[tuple[Encoded, ...], ...] = ()
        state_bytes = 0
        if moment is not None:
            parts, state_bytes = await self._array_work.cut_state(moment, self._core.incarnation)
        return events.StateCopied(parts=parts, state_bytes=state_bytes)

    async def check(self, action: events.CheckState) -> events.Event:
        """Looks at a donor's state; keeps it if it fits."""
        needed = self._exchange.state_needed
        assert needed is not None
        self._found, flaw = await self._array_work.read_state(action.parts, action.state_bytes, needed)
        return events.StateChecked(flaw=flaw)
