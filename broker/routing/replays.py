"""Which sequence numbers have come over one connection: what comes twice was played back. Pure.

A sender counts its messages, on both channels together, and never sends one number twice. Nor does anything between it
and its broker deliver twice what it sent once over one connection: what is lost is said again, under a new number. So a
number that comes again is no mistake of the network. Order is not looked at: what an island gives of its optimizer's
state lets its contributions go first.
"""

from __future__ import annotations

#: So far behind the highest number one that is new is still known to be new; one further behind counts as seen.
WINDOW = 4096


class Seen:
    """The sequence numbers of one connection, in half a kilobyte."""

    __slots__ = ("_highest", "_recent")

    def __init__(self) -> None:
        self._highest = -1
        self._recent = 0  # bit i: number highest - i has come

    def repeats(self, sequence: int) -> bool:
        """Says whether a number has come before, and notes that it has now."""
        ahead = sequence - self._highest
        if ahead > 0:
            self._recent = 1 if ahead >= WINDOW else (self._recent << ahead | 1) & ((1 << WINDOW) - 1)
            self._highest = sequence
            return False
        if -ahead >= WINDOW or self._recent >> -ahead & 1:
            return True
        self._recent |= 1 << -ahead
        return False
