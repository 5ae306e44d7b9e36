"""When to send again what nothing was heard of. Pure."""

from __future__ import annotations

from dataclasses import dataclass

#: First and longest pause before a contribution, a seed or a Want that nothing was heard of is sent again.
RESEND_S = (2.0, 8.0)
#: On a slow link: in multiples of a contribution's journey as measured, lest copies queue behind each other.
RESEND_JOURNEYS = (3.0, 12.0)


@dataclass(slots=True)
class Backoff:
    """When to try again: at once, then after pauses that double."""

    first_s: float
    longest_s: float
    due_at_s: float = 0.0
    pause_s: float = 0.0

    def tried(self, now_s: float) -> None:
        """Takes note of an attempt."""
        self.pause_s = min(self.longest_s, 2 * self.pause_s) if self.pause_s else self.first_s
        self.due_at_s = now_s + self.pause_s

    def due(self, now_s: float) -> bool:
        """Whether the pause is over."""
        return now_s >= self.due_at_s


class Patience:
    """How long to wait for an answer, on a link as it has shown itself."""

    def __init__(self) -> None:
        self._journey_s = 0.0  # average time until the aggregator is known to have a contribution

    def took(self, journey_s: float) -> None:
        """A contribution that was sent once is known to have arrived after so long."""
        self._journey_s = journey_s if not self._journey_s else 0.8 * self._journey_s + 0.2 * journey_s

    def backoff(self) -> Backoff:
        """Returns the pauses before something is sent again; the first attempt is due at once."""
        first_s, longest_s = (max(s, n * self._journey_s) for s, n in zip(RESEND_S, RESEND_JOURNEYS, strict=True))
        return Backoff(first_s, longest_s)
