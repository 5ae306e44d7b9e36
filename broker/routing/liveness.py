"""Liveness by silence: alive, suspect or dead."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from broker.base.errors import ConfigError
from broker.base.settings import setting

#: Islands that send heartbeats at the configured interval; of more each sends fewer.
ISLANDS_AT_USUAL_PACE = 128
#: So many times the heartbeats of those are too many for a hub of two cores (docs/performance.md).
MOST_OF_USUAL_PACE = 2


class Liveness(StrEnum):
    """The state of a peer, by the time since it was last heard."""

    ALIVE = "alive"
    SUSPECT = "suspect"  # late, still waited for
    DEAD = "dead"  # not waited for until it is heard again
    LEFT = "left"  # said goodbye


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessConfig:
    """Allowances for silence, in seconds; rounds wait for an island until ``dead_after_s``."""

    heartbeat_interval_s: float = setting(0.5, "seconds between two heartbeats of an island", flag=None)
    suspect_after_s: float = setting(2.0, "seconds of silence after which status calls an island suspect", flag=None)
    dead_after_s: float = setting(6.0, "seconds of silence after which the broker counts an island as dead")

    def __post_init__(self) -> None:
        if self.heartbeat_interval_s <= 0:
            raise ConfigError("heartbeat_interval_s", self.heartbeat_interval_s, "must be above 0, 0.5 is usual")
        if self.suspect_after_s < 2 * self.heartbeat_interval_s:
            cure = f"must be at least 2 heartbeat intervals ({2 * self.heartbeat_interval_s:g})"
            raise ConfigError("suspect_after_s", self.suspect_after_s, cure)
        if self.dead_after_s < max(3 * self.heartbeat_interval_s, self.suspect_after_s):
            cure = f"must be at least 3 heartbeat intervals and suspect_after_s ({self.suspect_after_s:g})"
            raise ConfigError("dead_after_s", self.dead_after_s, cure)

    def interval_of(self, islands: int) -> float:
        """Returns the seconds between two heartbeats of an island; more in very large fleets.

        Then the fleet sends as many a second as 128 islands, within the time limits: two missed heartbeats make no
        island suspect, and three none dead.
        """
        most_s = max(self.heartbeat_interval_s, min(self.suspect_after_s / 2, self.dead_after_s / 3))
        return min(most_s, self._wanted_s(islands))

    def too_many(self, islands: int) -> str:
        """Returns a warning if a fleet sends more heartbeats than a hub answers; else an empty text.

        It names the allowances under which they would send no more than 128 islands do.
        """
        per_s, usual_per_s = islands / self.interval_of(islands), ISLANDS_AT_USUAL_PACE / self.heartbeat_interval_s
        if per_s <= MOST_OF_USUAL_PACE * usual_per_s:
            return ""
        suspect_s, dead_s = math.ceil(2 * self._wanted_s(islands)), math.ceil(3 * self._wanted_s(islands))
        cure = f"suspect_after_s = {suspect_s} and dead_after_s = {dead_s} make them {usual_per_s:.0f}"
        many = f"{islands} islands send {per_s:.0f} heartbeats a second, more than a hub of two cores answers"
        return f"{many}; at brokers and aggregators {cure}"

    def _wanted_s(self, islands: int) -> float:
        return self.heartbeat_interval_s * max(1.0, islands / ISLANDS_AT_USUAL_PACE)


def liveness(silent_s: float, config: LivenessConfig) -> Liveness:
    """Returns the liveness of an island that was last heard ``silent_s`` ago."""
    if silent_s >= config.dead_after_s:
        return Liveness.DEAD
    return Liveness.SUSPECT if silent_s >= config.suspect_after_s else Liveness.ALIVE
