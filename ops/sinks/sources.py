"""Sources of a fleet's rows: the tapes of a run directory, or Redis alone. Both only read.

Tapes hold the whole run, so a restart has every row again. Redis knows the present and the last thousands of events, so
training that was not observed has no rows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from aggregator.store.segments import first_digest
from aggregator.store.tape import read_lines
from broker.base.errors import ConfigError, Unavailable
from broker.registry.registry import Registry
from ops.evaluation.curve_file import read_points
from ops.inspect.source import FollowedEvents
from ops.inspect.status import address_in
from ops.inspect.tapes import FollowedTapes, tapes_in
from ops.run_directory import in_use, is_locked
from ops.story import curve
from ops.story.curve import Point
from ops.story.figures import Figures, Sample
from ops.story.rows import Row, row
from ops.story.run_status import status_of

#: Events of a Redis read at a time, and the age of a heartbeat in seconds below which an island counts as heard.
EVENTS, HEARD_WITHIN_S = 2000, 4.0


class Source(Protocol):
    """Rows of one run, from its beginning as far as that is known."""

    def rows(self) -> list[Row]:
        """Returns the rows that are new since the last call."""
        ...

    def over(self) -> bool:
        """Returns True if no row comes after those that :meth:`rows` returns next."""
        ...


class DirectorySource:
    """The rows of a run directory: of its tapes, and of ``evaluations.jsonl``.

    Times are by the clock of whoever reads the tapes, from when they were written last: of a run that was moved here,
    they are as right as the times of its files.

    Args:
        run_dir: Directory of a run of ``up``, or where an aggregator writes its ``events.jsonl``.
        every_s: Seconds between two rows.
    """

    def __init__(self, run_dir: Path, every_s: float) -> None:
        self._run_dir = run_dir
        self._tapes, self._figures = FollowedTapes(), Figures(every_s)
        self._evaluated = -1  # tokens of the last evaluation that has a row
        self._closing = False

    def rows(self) -> list[Row]:
        """Reads tapes and evaluations to their ends."""
        taken = map(self._figures.take, self._tapes.to_end(self._run_dir))
        samples = [sample for sample in taken if sample is not None]
        if self._closing and self._figures.history.phase != "ended":  # it was broken off
            last = self._figures.sample(now=True)
            samples += [] if last is None else [last]
        return [_fleet_row(sample, self.began_at) for sample in samples] + self._evaluations()

    @property
    def began_at(self) -> float:
        """When the run began, in seconds since 1970, as far as its tapes were read to their ends."""
        return _written_at(self._run_dir) - self._figures.history.now_s

    def over(self) -> bool:
        """Returns True once the run has ended or stopped, and its last model is not being evaluated."""
        own = (self._run_dir / "config.toml").is_file()
        ended = self._figures.history.phase == "ended" or (own and not in_use(self._run_dir))
        self._closing = ended and not is_locked(self._run_dir / curve.FILE)
        return self._closing

    def _evaluations(self) -> list[Row]:
        rows = []
        for point in read_points(self._run_dir):
            if point.tokens > self._evaluated:
                self._evaluated = point.tokens
                rows.append(_evaluation_row(point))
        return rows


class RedisSource:
    """The rows of a run by its Redis.

    Args:
        url: Its address.
        run_id: The run's name.
        every_s: Seconds between two rows.
    """

    def __init__(self, url: str, run_id: str, every_s: float) -> None:
        self._url, self._run_id = url, run_id
        self._figures, self._events = Figures(every_s), FollowedEvents()
        self._ended = False

    def rows(self) -> list[Row]:
        """Asks Redis; raises Unavailable if it does not answer."""
        return asyncio.run(self._ask())

    def over(self) -> bool:
        """Returns True once the run has ended."""
        return self._ended

    async def _ask(self) -> list[Row]:
        registry = Registry(self._url, self._run_id)
        try:
            snapshot = await registry.read()
            events, _ = await self._events.read(registry, EVENTS)
        finally:
            await registry.aclose()
        figures, status = self._figures, status_of(snapshot, snapshot.now_s)
        for at_s, note in events:
            figures.history.at(at_s)
            figures.note(note)
        figures.history.present(status, snapshot.now_s, HEARD_WITHIN_S)
        self._ended = status.totals.get("phase") == "ended"
        sample = figures.sample(now=self._ended)
        began_at = snapshot.now_s - figures.history.now_s
        rows = [] if sample is None else [_fleet_row(sample, began_at)]
        return rows + ([] if status.evaluation is None else [_evaluation_row(status.evaluation)])


def _fleet_row(sample: Sample, began_at: float) -> Row:
    return row("fleet", sample.tokens, began_at + sample.run_s, sample.values)


def _evaluation_row(point: Point) -> Row:
    return row(
        "evaluation", point.tokens, point.at, {f"evaluation/{name}": value for name, value in point.metrics.items()}
    )


def key_of(run_dir: Path, run_id: str) -> str:
    """Returns a key that no other run has: the run's name, and a digest of its tape's first line.

    Raises:
        Unavailable: There is no tape yet.
    """
    for tape in tapes_in(run_dir)[:1]:
        first: Mapping[str, Any] | None = next(read_lines(tape), None)
        if first is not None:
            return f"{run_id}-{first_digest(first)[:8]}"
    raise Unavailable(f"{run_dir} has no event tape yet (events.jsonl): wait until its run has begun", definite=True)


def _written_at(run_dir: Path) -> float:
    """Returns when the last line of a tape was written, in seconds since 1970; 0 while there is none."""
    times = [0.0]
    for path in tapes_in(run_dir):
        with contextlib.suppress(OSError):  # taken away
            times.append(path.stat().st_mtime)
    return max(times)


def run_id_of(run_dir: Path) -> str:
    """Returns the name of the run in a directory."""
    try:
        return address_in(run_dir).run_id or run_dir.absolute().name
    except ConfigError:  # not of `up`
        return run_dir.absolute().name
