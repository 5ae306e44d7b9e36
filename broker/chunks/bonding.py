"""A client's end of a flow over several connections: which of them carry chunks. Pure.

The first connection stands for the flow, and says so under a number that is drawn for it. Once the broker has said that
back, the others are made, and say the same. One carries chunks from the answer on; until then, and with a broker that
never answers, the first carries all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from broker.chunks.heads import Bond


class Bonding:
    """Decides when a client announces a connection as part of a flow, and when that one may carry chunks.

    Args:
        others: Connections beside the first.
        draw: Returns a random number of 64 bits.
    """

    def __init__(self, others: int, draw: Callable[[], int]) -> None:
        self._others = others
        self._nonce = draw() if others else 0
        self._said: dict[int, int] = {}  # subflow -> the number of the connection over which it was
        self._joined: set[int] = set()

    @property
    def wants_others(self) -> bool:
        """Returns True if the other connections are due: the broker has answered over the first."""
        return 0 in self._joined

    def due(self, standing: Mapping[int, int]) -> dict[int, Bond]:
        """Returns what is to be said, by subflow; :meth:`said` is to follow.

        Args:
            standing: Subflow -> number of the connection that stands, 0 for none.
        """
        if not self._others:
            return {}
        return {
            subflow: Bond(self._nonce, subflow)
            for subflow, connection in standing.items()
            if connection and self._said.get(subflow) != connection and (subflow == 0 or self.wants_others)
        }

    def said(self, subflow: int, connection: int) -> None:
        """It went out over a connection of this number."""
        self._said[subflow] = connection

    def heard(self, bond: Bond, subflow: int) -> bool:
        """The broker has answered over a connection; returns whether another one carries chunks from now on."""
        if bond != Bond(self._nonce, subflow) or subflow not in self._said or subflow in self._joined:
            return False
        self._joined.add(subflow)
        return subflow != 0

    def carries(self, subflow: int) -> bool:
        """Returns True if a connection may carry chunks: the first, or one over which the broker answered."""
        return subflow == 0 or subflow in self._joined

    @property
    def carrying(self) -> int:
        """Returns the number of connections over which chunks may be sent, the first one included."""
        return len(self._joined | {0})

    def torn(self, standing: Mapping[int, int]) -> bool:
        """Returns True if a connection beside the first that carried chunks has ended.

        Its chunks are lost, and all connections must be made anew.
        """
        return any(each and standing.get(each) != self._said[each] for each in self._joined)
