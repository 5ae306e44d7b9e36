"""Detects a bulk connection that receives bytes but delivers no message. Pure.

One changed byte in the length that ZeroMQ writes before a frame, and the receiver waits for a frame that nobody sends:
whatever comes is swallowed as a part of it. The connection stands, nothing is refused, and ZeroMQ's own pings find out
after 615 s, because on this channel an answer may honestly wait behind a frame for so long. Islands and aggregators
know sooner. They hear over the other connection what should have come over this one; when nothing at all has come for
much longer than the largest message takes, they make the bulk connection anew, which mends both of its ways.

A link that is merely slow must not be cut off in the middle of a message, again and again: so the first patience is
that of a poor link, it doubles with each renewal that helped nothing, and what has been slow before may be slow again.
And where the kernel says what it carries, silence begins when nothing passes any more: on a slow link something does
all the time, while one that is deaf takes everything soon, and too much of it if there is ever more. Where nothing has
passed at all, nothing was swallowed: what is missing waits somewhere else, perhaps for another's slow link.
"""

from __future__ import annotations

from typing import NamedTuple

#: Silence after which a connection is made anew: by then an island's third Want has gone unanswered.
PATIENCE_S = 8.0
#: And what the largest message takes on a link of 8 Mbit/s.
LEAST_BYTES_PER_S = 1e6
#: Patience is so many times the silence before messages that came lately.
TIMES = 3.0
#: Less than this share of the largest message in one patience is silence, within bounds: pings and answers of a few
#: bytes pass over a connection that is deaf too, and 33 kbit/s are a link.
LEAST_SHARE = 1 / 16
LEAST_BYTES = 1 << 10
MOST_BYTES = 1 << 15
#: No message of this channel is smaller.
LEAST_MESSAGE_BYTES = 256
#: What ZeroMQ's own pings and their answers take: a few tens of bytes every 15 s.
PINGS_BYTES_PER_S = 10.0
#: More than so many of the largest messages do not pass before one has come.
MOST_MESSAGES = 2
#: By then ZeroMQ's pings have found out.
LONGEST_PATIENCE_S = 600.0


class Carried(NamedTuple):
    """Bytes that a connection has carried since it was made, by the account of the kernel at this end."""

    up: int  #: the other end has acknowledged them
    down: int
    waiting: int = 0  #: to go up, or to be acknowledged
    connection: int = 0  #: its number


class Hearing:
    """One way of a bulk connection.

    Args:
        most_messages: So many of the largest may pass before one comes that is known of here.
    """

    def __init__(self, most_messages: int = MOST_MESSAGES) -> None:
        self._most_messages = most_messages
        self._first_s = PATIENCE_S
        self._largest_bytes = 0
        self._took_s = 0.0  # of silence, until something came that was known of: falls slowly, rises at once
        self._missing_since_s: float | None = None
        self._silent_since_s = 0.0  # while something is missing
        self._silent_bytes = 0  # that the connection had carried when this silence began
        self._heard_at_s = 0.0
        self._heard_bytes: int | None = None  # likewise when something came last; None where nobody knows
        self._renewals = 0  # since anything came

    @property
    def patience_s(self) -> float:
        """Silence, while something is missing, after which the connection is made anew."""
        patience_s = max(self._first_s, TIMES * self._took_s) * 2.0 ** min(self._renewals, 16)
        return min(LONGEST_PATIENCE_S, patience_s)

    def expect(self, largest_bytes: int) -> None:
        """The largest message has so many bytes."""
        self._largest_bytes = largest_bytes
        self._first_s = PATIENCE_S + largest_bytes / LEAST_BYTES_PER_S

    def begin(self) -> None:
        """The connection is a new one."""
        self._missing_since_s = None

    def heard(self, now_s: float, carried_bytes: int | None = None) -> None:
        """Something came, whatever it was; ``carried_bytes`` as in :meth:`missing`."""
        if self._missing_since_s is not None:
            self._took_s = max(now_s - self._silent_since_s, 0.9 * self._took_s)
        self._missing_since_s, self._renewals = None, 0
        self._heard_at_s, self._heard_bytes = now_s, carried_bytes

    def missing(self, anything: bool, now_s: float, carried_bytes: int | None = None, *, waiting: bool = False) -> bool:
        """Says whether to make the connection anew.

        Args:
            anything: Whether something was sent that has not come.
            now_s: The time.
            carried_bytes: What the connection has carried this way since it was made; None where nobody knows.
            waiting: Whether something is still to be carried this way, as far as this end knows.
        """
        before = self._heard_bytes
        if carried_bytes is None or before is None or carried_bytes < before:  # that is another connection
            self._heard_at_s, self._heard_bytes = now_s, carried_bytes
        if not anything:
            self._missing_since_s = None
            return False
        if self._missing_since_s is None:
            self._missing_since_s = now_s
            self._be_silent(now_s, carried_bytes)
        elif self._passes(carried_bytes, waiting) or not self._swallows(carried_bytes, now_s):
            self._be_silent(now_s, carried_bytes)
        if now_s - self._silent_since_s < self.patience_s:
            return False
        self._missing_since_s = now_s
        self._be_silent(now_s, None)
        self._heard_bytes = None
        self._renewals += 1
        return True

    def _be_silent(self, now_s: float, carried_bytes: int | None) -> None:
        self._silent_since_s, self._silent_bytes = now_s, carried_bytes or 0

    def _passes(self, carried_bytes: int | None, waiting: bool) -> bool:
        """Whether something passes, and it was not too much already; what cannot, TCP itself gives up in a minute."""
        if carried_bytes is None or self._heard_bytes is None:
            return False
        least_bytes = min(MOST_BYTES, max(LEAST_BYTES, LEAST_SHARE * self._largest_bytes))
        if carried_bytes - self._heard_bytes > self._most_messages * max(self._largest_bytes, least_bytes):
            return False
        return waiting or carried_bytes - self._silent_bytes >= least_bytes

    def _swallows(self, carried_bytes: int | None, now_s: float) -> bool:
        """Whether anything that can be a message has passed and did not come: else none was sent this way yet."""
        if carried_bytes is None or self._heard_bytes is None:
            return True
        pings_bytes = PINGS_BYTES_PER_S * (now_s - self._heard_at_s)
        return carried_bytes - self._heard_bytes > LEAST_MESSAGE_BYTES + pings_bytes
