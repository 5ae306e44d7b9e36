"""The events of a run in Redis, read as they come."""

from __future__ import annotations

import json
from collections import deque
from typing import Any, Protocol

from broker.wire.records import EventNumber, NumberedEvent

#: Who writes events repeats those of which it does not know whether they came; the last ones are compared.
COPIES = 1000


class EventReader(Protocol):
    """A run's Redis, or a broker that asks it."""

    async def read_events_after(self, after: EventNumber, count: int) -> list[NumberedEvent]:
        """Reads the first events after a number."""
        ...


class FollowedEvents:
    """The events of one run, each once, oldest first."""

    def __init__(self) -> None:
        self._last: EventNumber = (0, 0)
        self._copies: deque[str] = deque(maxlen=COPIES)

    async def read(self, reader: EventReader, count: int) -> tuple[list[tuple[float, str, dict[str, Any]]], bool]:
        """Returns the next events, each as time by Redis' clock, name and fields; and whether there were any.

        Args:
            reader: Whom to ask.
            count: The most to read.

        Raises:
            Unavailable: It does not answer.
        """
        numbered = await reader.read_events_after(self._last, count)
        found = []
        for number, event in numbered:
            self._last = number
            text = json.dumps(event, sort_keys=True)
            if text in self._copies:
                continue
            self._copies.append(text)
            fields = {key: value for key, value in event.items() if key not in ("n", "event")}
            found.append((number[0] / 1000, str(event.get("event", "")), fields))
        return found, bool(numbered)
