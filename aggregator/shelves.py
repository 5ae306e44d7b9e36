"""What each broker holds of the newest versions, by its own account, and what it must be sent again. Pure.

Every broker answers each Attach with the versions on its shelf. One that lacks something came back empty, was connected
late, or lost a message: it gets what is missing, it alone, with pauses that double while nothing arrives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

REPUBLISH_AFTER_S = 1.0
#: Answers to Attach come every second; a broker that is silent for longer was away.
BROKER_SILENT_S = 2.5


@dataclass(slots=True)
class _Shelf:
    """One broker."""

    answered_at_s: float
    holds: bool = False  #: any version, then
    sent_at_s: dict[int, float] = field(default_factory=dict)  #: fragment -> when this broker alone was sent it
    again_after_s: dict[int, float] = field(default_factory=dict)


class Shelves:
    """The shelves of all brokers, by their places in the configuration."""

    def __init__(self, now_s: float) -> None:
        self._began_at_s = now_s
        self._shelves: dict[int, _Shelf] = {}

    def answered(self, broker: int, versions: tuple[int, ...], now_s: float) -> float | None:
        """Takes an answer in; returns since when the broker was away, None if it was not.

        A broker that held versions and holds none has died and come back between two answers.
        """
        shelf = self._shelves.setdefault(broker, _Shelf(answered_at_s=self._began_at_s))
        before_s, shelf.answered_at_s = shelf.answered_at_s, now_s
        holds = any(version >= 0 for version in versions)
        emptied, shelf.holds = shelf.holds and not holds, holds
        return before_s if emptied or now_s - before_s > BROKER_SILENT_S else None

    def alone(self, broker: int, now_s: float) -> bool:
        """Whether no other broker has answered lately."""
        return not any(
            place != broker and now_s - shelf.answered_at_s <= BROKER_SILENT_S for place, shelf in self._shelves.items()
        )

    def lacking(
        self, broker: int, held: Mapping[int, int], newest: Mapping[int, tuple[int, float | None]], now_s: float
    ) -> list[int]:
        """Returns the fragments to publish again to one broker now; they count as sent.

        Args:
            broker: Which one.
            held: Fragment -> version on its shelf.
            newest: Fragment -> newest durable version, and when every broker was sent it.
            now_s: The time.
        """
        shelf, missing = self._shelves[broker], []
        for p, (version, published_at_s) in newest.items():
            if held.get(p, -1) >= version:
                shelf.again_after_s.pop(p, None)
                continue
            sent_at_s = max(shelf.sent_at_s.get(p, -math.inf), -math.inf if published_at_s is None else published_at_s)
            again_after_s = shelf.again_after_s.get(p, REPUBLISH_AFTER_S)
            if now_s - sent_at_s >= again_after_s:
                shelf.again_after_s[p] = 2 * again_after_s  # a slow link may still be busy with the last copy
                shelf.sent_at_s[p] = now_s
                missing.append(p)
        return missing
