"""The leader's telemetry: event tape, log, reports to Redis, and the final report. Shell.

It reads the run and changes nothing in it. Nothing here is waited for by what is decided.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import Event, Note, Persisted, Received
from aggregator.interface.notes import VersionCommitted
from aggregator.process.lease import LeaseKey
from aggregator.process.reporter import Reporter, Snapshot
from aggregator.state import summary
from aggregator.state.metrics import Leading, leading_of
from aggregator.state.run import Run
from aggregator.state.summary import Sent, Traffic
from aggregator.store.tape import Tape, event_line, note_line
from broker.base.errors import Unavailable, worth_repeating
from broker.process import logs
from broker.registry.registry import Registry

log = logs.get(__name__)

TAPE_FLUSH_S = 0.5
#: Fields for the tape and for machines: a list as long as the fleet says nothing in a log.
_LONG = frozenset({"contributions"})
#: Complaints that are counted at a time: those that were not made for the longest are forgotten.
MOST_COMPLAINTS = 4096


class NoteLog:
    """Logs notes; a repeated complaint about an island comes at its 1st, 10th, 100th, .. time only."""

    def __init__(self) -> None:
        self._times: dict[tuple[Any, ...], int] = {}  # the latest one last

    def write(self, note: Note) -> Mapping[str, Any] | None:
        """Logs a note; returns its fields without the long ones if it is worth reading, else None."""
        fields = {name: value for name, value in note.fields.items() if name not in _LONG}
        if note.level == "debug":
            log.debug(note.name, **fields)
            return None
        if note.level != "warning":
            log.info(note.name, **fields)
            return fields
        about = fields.get("island") or fields.get("sender")
        key = (note.name, about, fields.get("reason") or fields.get("kind"))
        times = self._times.pop(key, 0) + 1
        self._times[key] = times
        if len(self._times) > MOST_COMPLAINTS:  # senders choose the names
            del self._times[next(iter(self._times))]
        if not worth_repeating(times):
            log.debug(note.name, **fields)
            return None
        fields["times"] = times
        log.warning(note.name, **fields)
        return fields


class Telemetry:
    """Takes down what the core hears and decides, and writes it to where somebody may look.

    Args:
        config: Where the report goes.
        run: The core's.
        tape: Of the process, if it keeps one; this life has begun on it.
        registry: Of the run.
        lease: To say in it who leads; None where a term keeps it.
        holder: Names this aggregator there.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: AggregatorConfig,
        run: Run,
        tape: Tape | None,
        registry: Registry,
        *,
        lease: LeaseKey | None,
        holder: str,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._run = run
        self._registry = registry
        self._tape = tape
        self._tape_due = asyncio.Event()
        self._clock = clock
        self._traffic = Traffic()
        self._notes = NoteLog()
        self._began_s = clock()  # what the store had then is at least so old
        self._committed_at_s: dict[int, float] = {}
        self.more_troubles: Callable[[], tuple[str, ...]] = tuple  #: of this process, beside those of the core
        self._reporter = Reporter(
            registry, collect=self._snapshot, shard=config.shard, lease=lease, holder=holder, clock=clock
        )

    def work(self) -> Iterator[Coroutine[Any, Any, None]]:
        """Yields what is to be run side by side, until cancelled."""
        yield self._report()
        yield self._flush_tape()

    # --- in -----------------------------------------------------------------------------------------------------

    def heard(self, event: Event, now_s: float) -> None:
        """Takes down what the core is about to hear."""
        if self._tape is not None:
            self._tape.write(event_line(event, now_s))
        match event:
            case Received(envelope=envelope):
                member = self._run.fleet.members.get(envelope.sender)
                if member is not None and member.incarnation == envelope.incarnation:
                    self._traffic.observe(envelope)
            case Persisted(fragment_id=p):
                self._committed_at_s[p] = now_s
                self._reporter.changed()
            case _:
                pass

    def note(self, note: Note, now_s: float) -> None:
        """Takes down what was decided."""
        if self._tape is not None:
            self._tape.write(note_line(note, now_s))
        if isinstance(note, VersionCommitted):
            self._reporter.committed(note.fields)
        worth_reading = self._notes.write(note)
        if worth_reading is not None:
            self._reporter.note(note.name, worth_reading)

    async def _report(self) -> None:
        """Reports to Redis, and goes on from the bytes that an earlier life had counted there."""
        with suppress(Unavailable):
            found = await self._registry.read()
            earlier = found.totals[0].get("earlier", {}) if found.totals else {}
            self._traffic.recall({name: _sent(row, earlier.get(name, {})) for name, row in found.members.items()})
        await self._reporter.run()

    # --- out ----------------------------------------------------------------------------------------------------

    def flush_tape_soon(self) -> None:
        """Has the tape written to disk without waiting for its turn."""
        self._tape_due.set()

    async def _flush_tape(self) -> None:
        while self._tape is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(TAPE_FLUSH_S):
                    await self._tape_due.wait()
            self._tape_due.clear()
            await asyncio.to_thread(self._tape.flush)

    async def report_now(self) -> None:
        """Writes to Redis what is due there."""
        await self._reporter.write()

    def _snapshot(self) -> Snapshot:
        now_s = self._clock()
        totals = summary.totals(self._run, now_s, self._traffic)
        return Snapshot(
            epoch=self._run.epoch,
            fragments=summary.fragments(self._run, self._committed_at_s, self._began_s, now_s),
            totals=replace(totals, troubles=self._troubles(now_s)),
            refusals=summary.refusals(self._run),
        )

    def _troubles(self, now_s: float) -> tuple[str, ...]:
        return (*self._run.troubles.sentences(now_s), *self.more_troubles())

    def leading(self, standbys: Mapping[str, bool] | None) -> Leading:
        """Returns the figures for metrics; ``standbys`` as in :class:`aggregator.state.metrics.Leading`."""
        now_s, reported = self._clock(), self._snapshot()
        return leading_of(
            self._run,
            fragments=reported.fragments,
            totals=reported.totals,
            refusals=reported.refusals,
            standbys=standbys,
            now_s=now_s,
        )

    def write_report(self) -> None:
        """Writes the report, if one is asked for; an error is logged."""
        path = self._config.report
        if path is None:
            return
        temporary = path.with_name(path.name + ".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            written = summary.report(self._run, self._traffic) | {"troubles": self._troubles(self._clock())}
            temporary.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        except OSError as err:
            log.error("report.failed", path=str(path), detail=err.strerror, cure="the log and Redis have the same")


def _sent(member: Mapping[str, Any], earlier: Mapping[str, int]) -> Sent:
    """Returns the bytes of an island as they stand in Redis."""
    return Sent(
        incarnation=member.get("incarnation", 0),
        newest=(member.get("bytes_up", 0), member.get("bytes_down", 0)),
        before=(earlier.get("bytes_up", 0), earlier.get("bytes_down", 0)),
    )
