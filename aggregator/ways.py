"""By which broker an island is reached: the one over which it was last heard. Pure.

Islands speak through one broker at a time and change it without saying so. Whoever was never heard in this life of the
aggregator, or not lately among very many, is addressed through every broker: the one that knows it passes the message
on, the others drop it.
"""

from __future__ import annotations

from collections import OrderedDict

#: Names remembered: every member, and as many processes that are about to join.
MOST_NAMES = 20_000


class Ways:
    """Sender -> place of the broker that it was last heard over."""

    def __init__(self) -> None:
        self._brokers: OrderedDict[str, int] = OrderedDict()

    def heard(self, name: str, broker: int) -> None:
        """Takes note of a message."""
        self._brokers[name] = broker
        self._brokers.move_to_end(name)
        if len(self._brokers) > MOST_NAMES:
            self._brokers.popitem(last=False)

    def to(self, name: str) -> int | None:
        """Returns the broker to send by; None: each of them."""
        return self._brokers.get(name)
