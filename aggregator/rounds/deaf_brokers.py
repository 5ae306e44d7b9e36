"""Brokers whose bulk connection has become deaf, one way or the other. The rule is :mod:`broker.routing.deafness`.

*Up*, the broker's answers to Attach show whether any version has come since the last one, while some are missing.
*Down*, heartbeats list contributions that are on their way, while nothing whatever comes from this broker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from broker.routing.deafness import Carried, Hearing

#: What goes to standbys, twice as large as versions, goes before them, and no broker says that it has come.
UP_MESSAGES = 32
#: What an island has said is out of date after so long: it has gone, or speaks through another broker.
SAID_LATELY_S = 5.0


@dataclass(slots=True)
class _Broker:
    """Both ways of the bulk connection to one broker."""

    up: Hearing = field(default_factory=lambda: Hearing(UP_MESSAGES))
    down: Hearing = field(default_factory=Hearing)
    held: tuple[int, ...] = ()  #: on its shelf, when it answered last
    awaited: dict[str, float] = field(default_factory=dict)  #: island -> when it listed what has not come


class Hearings:
    """The bulk connections to all brokers, by their places in the configuration."""

    def __init__(self) -> None:
        self._brokers: dict[int, _Broker] = {}

    def came(self, broker: int, now_s: float, carried: Carried | None = None) -> None:
        """Something came from a broker over the bulk connection, which has ``carried`` so much by then, if known."""
        self._at(broker).down.heard(now_s, None if carried is None else carried.down)

    def listed(self, broker: int, island_id: str, on_its_way: bool, now_s: float) -> None:
        """An island's heartbeat came through a broker, and lists contributions that have not come, or none."""
        awaited = self._at(broker).awaited
        if on_its_way:
            awaited[island_id] = now_s
        else:
            awaited.pop(island_id, None)

    def answered(
        self,
        broker: int,
        held: tuple[int, ...],
        lacks: bool,
        largest_bytes: int,
        now_s: float,
        carried: Carried | None = None,
    ) -> bool:
        """A broker has said what it holds; returns whether to make its bulk connection anew.

        Args:
            broker: Its place.
            held: The versions on its shelf.
            lacks: Whether a version that it was sent is missing there.
            largest_bytes: Of a version.
            now_s: The time.
            carried: By its bulk connection; None where nobody knows.
        """
        at = self._at(broker)
        for each in (at.up, at.down):
            each.expect(largest_bytes)
        if held != at.held:
            at.held = held
            at.up.heard(now_s, None if carried is None else carried.up)
        at.awaited = {name: at_s for name, at_s in at.awaited.items() if now_s - at_s <= SAID_LATELY_S}
        up_bytes, down_bytes = (None, None) if carried is None else (carried.up, carried.down)
        waiting = carried is not None and carried.waiting > 0
        up = at.up.missing(lacks, now_s, up_bytes, waiting=waiting)
        down = at.down.missing(bool(at.awaited), now_s, down_bytes)
        return up or down

    def _at(self, broker: int) -> _Broker:
        return self._brokers.setdefault(broker, _Broker())
