"""The condition of a link: delay, jitter, rate, damage, stall and partition of each direction. Pure.

In a file, on the control socket and in :meth:`LinkCondition.of` a condition is a flat table. A key alone speaks of both
directions, with ``up_`` or ``down_`` before it of one; up is from the client to the broker. So ``{"delay_ms": 40,
"up_mbit": 20, "down_partition": True}`` is a link whose way up is slow and whose way down is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from broker.base.errors import ConfigError
from broker.base.settings import nearest

#: Between cities, not between planets.
MAX_DELAY_MS = 60_000.0
#: Largest value of any number here, which keeps infinity out.
MAX_NUMBER = 1e9
#: A megabyte, as of ``corrupt_per_mb``, and a megabit, as of ``mbit``, are decimal.
MEGA = 1_000_000


class Way(StrEnum):
    """A direction of a link."""

    UP = "up"  # client to broker
    DOWN = "down"  # broker to client


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_NUMBER:
        raise ConfigError(name, value, f"must be a number from 0 to {MAX_NUMBER:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """One direction of a link.

    Attributes:
        delay_ms: One way: bytes arrive no earlier than this.
        jitter_ms: Up to so much more, drawn for each piece. Nothing is reordered: this is TCP.
        mbit: Rate in Mbit/s, of all connections of the link together; 0 for unlimited.
        corrupt_per_mb: Bytes changed on the way, per megabyte, on average.
        stall: Bytes wait; connections stay, however long it takes.
        partition: Nothing passes, neither bytes nor the making and ending of connections.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    mbit: float = 0.0
    corrupt_per_mb: float = 0.0
    stall: bool = False
    partition: bool = False

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if name in ("stall", "partition"):
                if type(value) is not bool:
                    raise ConfigError(name, value, "must be true or false")
                continue
            _check_number(name, value)
        for name in ("delay_ms", "jitter_ms"):
            if getattr(self, name) > MAX_DELAY_MS:
                raise ConfigError(name, getattr(self, name), f"must be at most {MAX_DELAY_MS:g}, a minute")
        if 0 < self.mbit < 0.001:
            raise ConfigError("mbit", self.mbit, "must be at least 0.001, or 0 for unlimited; a stall stops the bytes")
        if self.corrupt_per_mb > MEGA / 10:
            raise ConfigError("corrupt_per_mb", self.corrupt_per_mb, f"must be at most {MEGA // 10}, every tenth byte")

    @property
    def delay_s(self) -> float:
        """The least one-way delay in seconds."""
        return self.delay_ms / 1000

    @property
    def jitter_s(self) -> float:
        """The greatest addition to the delay, in seconds."""
        return self.jitter_ms / 1000

    @property
    def bytes_per_s(self) -> float:
        """The rate; 0 for unlimited."""
        return self.mbit * MEGA / 8

    @property
    def blocked(self) -> bool:
        """Returns whether nothing passes now."""
        return self.stall or self.partition


#: Keys of a table that speak of a direction; each also with the name of a way before it.
DIRECTION_KEYS = tuple(each.name for each in dataclasses.fields(Direction))
#: Every key of a table.
KEYS = (*DIRECTION_KEYS, *(f"{way}_{key}" for way in Way for key in DIRECTION_KEYS), "reset_every_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCondition:
    """The condition of a link: both directions, and resets; without faults by default.

    Attributes:
        up: From the client to the broker.
        down: From the broker to the client.
        reset_every_s: Mean time between two resets of all connections of the link, drawn from an exponential
            distribution; 0 for never.
    """

    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)
    reset_every_s: float = 0.0

    def __post_init__(self) -> None:
        _check_number("reset_every_s", self.reset_every_s)
        if 0 < self.reset_every_s < 0.01:
            raise ConfigError("reset_every_s", self.reset_every_s, "must be at least 0.01, or 0 for never")

    @classmethod
    def of(cls, **keys: Any) -> LinkCondition:
        """Returns a condition from keys: ``LinkCondition.of(delay_ms=40, up_mbit=20)``; no other faults.

        Raises:
            ConfigError: As :meth:`changed`.
        """
        return cls().changed(keys)

    def changed(self, keys: Mapping[str, Any]) -> LinkCondition:
        """Returns this condition changed by the keys of a table; keys of one direction win.

        Raises:
            ConfigError: A key that there is not, or a value that cannot be.
        """
        for key, value in keys.items():
            if key not in KEYS:
                raise ConfigError(key, value, f"is nothing that a link has; {nearest(key, KEYS)}")
        both = {key: value for key, value in keys.items() if key in DIRECTION_KEYS}
        return LinkCondition(
            up=self._direction(Way.UP, both, keys),
            down=self._direction(Way.DOWN, both, keys),
            reset_every_s=keys.get("reset_every_s", self.reset_every_s),
        )

    def _direction(self, way: Way, both: Mapping[str, Any], keys: Mapping[str, Any]) -> Direction:
        own = {key: keys[f"{way}_{key}"] for key in DIRECTION_KEYS if f"{way}_{key}" in keys}
        return dataclasses.replace(self.way(way), **{**both, **own})

    def way(self, way: Way) -> Direction:
        """Returns one direction."""
        return self.up if way is Way.UP else self.down

    @property
    def partitioned(self) -> bool:
        """Returns whether at least one direction is cut."""
        return self.up.partition or self.down.partition

    def table(self) -> dict[str, Any]:
        """Returns the table for :meth:`of` that makes this condition, without defaults."""
        plain, table = Direction(), {}
        for key in DIRECTION_KEYS:
            up, down, usual = getattr(self.up, key), getattr(self.down, key), getattr(plain, key)
            if up == down:
                values = {key: up}
            else:
                values = {f"{Way.UP}_{key}": up, f"{Way.DOWN}_{key}": down}
            table.update({name: value for name, value in values.items() if value != usual})
        if self.reset_every_s:
            table["reset_every_s"] = self.reset_every_s
        return table


#: A link without any fault.
FAULTLESS = LinkCondition()
