"""Pauses before a repeated message, from measured round trips. Pure.

What is sent again too early queues behind its own first copy: on a link that is nearly full each copy makes the next
journey longer, until the link carries nothing else. So pauses follow the journeys, as in TCP (Karn and Partridge): only
one that needed no second attempt is measured, and a pause that was too short is kept, doubled, until one was. And what
has not left this machine is not missing: where the connection says what it still holds, a pause begins when that has
gone. Nor does it say anything of the link that a connection broke, or that the receiver has gone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from broker.chunks.meter import Link

#: An island's first pause before a contribution, a seed or a Want that nothing was heard of is sent again.
RESEND_S = 2.0
#: An aggregator's, of versions: brokers and standbys say every second what they have.
REPUBLISH_S = 1.0
#: After a longer silence a peer was away, and its next word gives no round trip: it may have been true for long.
SILENT_S = 2.5
#: Pauses double at least up to this as long as no journey was measured: any link may be a slow one then.
UNKNOWN_S = 60.0
#: Rate assumed before a round trip is measured: that of a poor link, 8 Mbit/s.
LEAST_BYTES_PER_S = 1e6
#: Pause in average round trips.
JOURNEYS = 3.0
#: Pauses double up to this multiple of the first one, so that a loss farther on is noticed soon.
LONGEST = 4.0
#: At most this many messages of the same size wait in a connection before this one.
AHEAD = 4
#: The longest first pause, and as long as anything may take to leave this machine.
PATIENT_S = 600.0


class Carried(NamedTuple):
    """Bytes of large messages that a bulk connection has sent since it was made."""

    up: int  #: the other end has noted them
    waiting: int = 0  #: to go up, or to be noted
    connection: int = 0  #: its number
    link: Link = Link()  #: as far as it is known


@dataclass(slots=True)
class Backoff:
    """The times of repeated attempts: the first at once, the others after doubling pauses.

    Times are in seconds of the caller's clock; what a connection has ``carried`` is given where it is known.
    """

    first_s: float
    longest_s: float
    size_bytes: int = 0
    due_at_s: float = 0.0
    pause_s: float = 0.0
    attempts: int = 0
    tried_at_s: float = 0.0
    leaves_by_bytes: float = math.nan  #: a connection that has carried more than this carries the last attempt no more
    excused: bool = False  #: the last attempt was lost by no fault of the link, so the next pause is no longer

    def tried(self, now_s: float) -> None:
        """Notes an attempt."""
        grows = self.pause_s > 0 and not self.excused
        self.pause_s = min(self.longest_s, 2 * self.pause_s) if grows else self.first_s
        self.excused = False
        self.due_at_s, self.tried_at_s = now_s + self.pause_s, now_s
        self.leaves_by_bytes = math.nan
        self.attempts += 1

    def left(self) -> None:
        """Notes that the last attempt has left this machine."""
        self.leaves_by_bytes = -math.inf

    def lost(self, now_s: float) -> None:
        """Notes that the last attempt was lost with its connection: the next one is due."""
        self.unheard(now_s)
        self.left()

    def unheard(self, now_s: float) -> None:
        """Notes that the receiver has gone: the next attempt is due once the last one has left this machine."""
        self.due_at_s, self.excused = min(self.due_at_s, now_s), True

    def due(self, now_s: float, carried: Carried | None = None) -> bool:
        """Returns whether the pause is over; it begins when the last attempt has left this machine."""
        if carried is not None and self.attempts and now_s <= self.tried_at_s + PATIENT_S:
            if math.isnan(self.leaves_by_bytes):
                self.leaves_by_bytes = carried.up + carried.waiting + AHEAD * self.size_bytes
            if carried.waiting and carried.up <= self.leaves_by_bytes:
                self.due_at_s = max(self.due_at_s, now_s + self.pause_s)
        return now_s >= self.due_at_s


class Patience:
    """The waiting time for a delivery over a link, from earlier deliveries; ``least_s`` at first."""

    def __init__(self, least_s: float = RESEND_S) -> None:
        self._least_s = least_s
        self._journey_s: float | None = None  # average
        self._kept_s = 0.0

    def took(self, journey_s: float) -> None:
        """Adds one measured delivery time of a message that was sent only once."""
        self._journey_s = journey_s if self._journey_s is None else 0.8 * self._journey_s + 0.2 * journey_s
        self._kept_s = 0.0

    def in_vain(self, backoff: Backoff) -> None:
        """Notes a repetition; later messages wait as long as it did."""
        self._kept_s = max(self._kept_s, backoff.pause_s)

    def backoff(self, size_bytes: int = 0) -> Backoff:
        """Returns the pauses of one message; the first attempt is due at once."""
        usual_s = size_bytes / LEAST_BYTES_PER_S if self._journey_s is None else JOURNEYS * self._journey_s
        first_s = max(self._least_s, min(PATIENT_S, max(usual_s, self._kept_s)))
        longest_s = max(LONGEST * first_s, UNKNOWN_S if self._journey_s is None else 0.0)
        return Backoff(first_s, longest_s, size_bytes)
