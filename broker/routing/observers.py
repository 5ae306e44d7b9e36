"""Limits for observers at a broker: connections, and questions per second. Pure.

An observer is no peer of the run: it is not in the directory, counts as no island, and gets nothing but answers. What
is kept here is one small entry per connection, for the latest ones alone. So an observer that comes in under many
connections loses its older entries, and what it may cost in all is bounded by who answers
(:mod:`broker.observing.desk`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from broker.routing.directory import Seen
from broker.routing.events import Refusal
from broker.wire.messages import Reason

#: Connections that are remembered.
MOST_OBSERVERS = 64
#: Questions over one connection: per second, and at once after a pause.
QUESTIONS_PER_S, QUESTIONS_AT_ONCE = 8.0, 16


@dataclass(slots=True)
class _Observer:
    """One connection of an observer; ``credit`` is the number of questions that it may ask now."""

    heard_s: float
    seen: Seen = field(default_factory=Seen)
    credit: float = QUESTIONS_AT_ONCE


class Observers:
    """The observers, by the routing id of their connections."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Observer] = {}  # in the order of their last questions

    def __len__(self) -> int:
        return len(self._known)

    def hear(self, peer: bytes, sequence: int, now_s: float) -> Refusal | None:
        """Returns why a question is refused: an old number, or too many over the same connection."""
        observer = self._known.pop(peer, None) or _Observer(now_s)
        self._known[peer] = observer
        if len(self._known) > MOST_OBSERVERS:
            del self._known[next(iter(self._known))]
        earned = max(0.0, now_s - observer.heard_s) * QUESTIONS_PER_S
        observer.credit, observer.heard_s = min(QUESTIONS_AT_ONCE, observer.credit + earned), now_s
        if observer.seen.repeats(sequence):
            return Reason.REPLAYED, f"message {sequence} has come over this connection before"
        if observer.credit < 1.0:
            return Reason.QUEUE_FULL, f"at most {QUESTIONS_PER_S:g} questions a second are answered: ask again later"
        observer.credit -= 1.0
        return None

    def forget(self, peer: bytes) -> None:
        """Drops a lost connection."""
        self._known.pop(peer, None)
