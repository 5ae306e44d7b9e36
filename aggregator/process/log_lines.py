"""Turns the core's decisions into log lines, and leaves out those that only repeat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aggregator.events import Note
from broker.process import logs
from broker.wire.errors import worth_repeating

log = logs.get(__name__)

#: Several of these in every round: the round's own line, at its commit, says what matters of them.
_DETAILS = frozenset({"round.opened", "round.closed", "contribution.accepted", "contribution.held"})
#: Not meant to happen; each is dealt with.
_WARNINGS = frozenset(
    {
        "contribution.refused",
        "contribution.retry",
        "fleet.too_many_heartbeats",
        "island.quarantined",
        "join.refused",
        "message.refused",
        "message.unexpected",
        "run_record.failed",
        "standby.namesake",
        "store.behind",
        "store.not_behind",
        "version.not_durable",
    }
)
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
        if note.name in _DETAILS:
            log.debug(note.name, **fields)
            return None
        if note.name not in _WARNINGS:
            log.info(note.name, **fields)
            return fields
        about = fields.get("island") or fields.get("sender")
        key = (note.name, about, fields.get("reason") or fields.get("kind"))
        times = self._times.pop(key, 0) + 1
        self._times[key] = times
        if len(self._times) > MOST_COMPLAINTS:  # names are chosen by whoever sends them
            del self._times[next(iter(self._times))]
        if not worth_repeating(times):
            log.debug(note.name, **fields)
            return None
        fields["times"] = times
        log.warning(note.name, **fields)
        return fields
