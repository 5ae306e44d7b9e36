"""Routes to islands: the broker over which each was last heard. Pure.

Islands speak through one broker at a time and change it without saying so. Whoever was never heard in this life of the
aggregator, or not lately among very many, is addressed through every broker: the one that knows it passes the message
on, the others drop it.
"""

from __future__ import annotations

from collections import OrderedDict

from broker.wire.messages import Envelope

#: Names remembered: every member, and as many processes that are about to join.
MOST_NAMES = 20_000


class Routes:
    """Sender -> place of the broker that it was last heard over."""

    def __init__(self) -> None:
        self._last_heard: OrderedDict[str, tuple[tuple[int, int], int]] = OrderedDict()

    def heard(self, envelope: Envelope, broker: int) -> bool:
        """Takes note of a message; says whether it is the sender's newest.

        An older one, such as a broker sets free that was frozen, changes nothing.
        """
        name, order = envelope.sender, (envelope.incarnation, envelope.sequence)
        known = self._last_heard.get(name)
        if known is not None and order < known[0]:
            return False
        self._last_heard[name] = order, broker
        self._last_heard.move_to_end(name)
        if len(self._last_heard) > MOST_NAMES:
            self._last_heard.popitem(last=False)
        return True

    def to(self, name: str) -> int | None:
        """Returns the broker to send by; None: each of them."""
        known = self._last_heard.get(name)
        return None if known is None else known[1]
