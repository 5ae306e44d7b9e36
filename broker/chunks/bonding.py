"""Which connections carry the chunks of one flow together: the client's side, and the broker's. Pure.

The first connection stands for the flow, and says so under a number that is drawn for it. Once the broker has said that
back, the client makes the others, and they say the same. One carries chunks from its answer on; until then, and with a
broker that never answers, the first carries all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from broker.chunks.chunk_heads import Bond
from broker.chunks.subflow import MOST_SUBFLOWS


class Bonding:
    """Decides when a client announces a connection as part of a flow, and when that one may carry chunks.

    There are ``others`` beside the first; ``draw`` returns a random number of 64 bits.
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
        """Notes that a bond went out over a connection of this number."""
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

    def torn(self, standing: Mapping[int, int]) -> bool:
        """Returns True if a connection beside the first that carried chunks has ended.

        Its chunks are lost, and all connections must be made anew.
        """
        return any(each and standing.get(each) != self._said[each] for each in self._joined)


class Bonds:
    """The flows of several connections at a broker, by routing id of the first."""

    def __init__(self) -> None:
        self._firsts: dict[tuple[str, int], bytes] = {}  # by key and number
        self._places: dict[bytes, tuple[bytes, int]] = {}  # of each connection: its first, and its subflow
        self._routes: dict[tuple[bytes, int], bytes] = {}  # the other way round

    def place_of(self, peer: bytes) -> tuple[bytes, int]:
        """Returns the first connection of a flow, and which of its connections this one is; 0 is the first."""
        return self._places.get(peer, (peer, 0))

    def route(self, first: bytes, subflow: int) -> bytes:
        """Returns a connection of a flow."""
        return self._routes[first, subflow] if subflow else first

    def bind(self, peer: bytes, bond: Bond, key: str) -> bool:
        """Handles a connection's introduction, under a public key; returns whether it is accepted."""
        known = self._firsts.get((key, bond.nonce))
        first = known if bond.subflow else peer
        if first is None or peer in self._places or (bond.subflow == 0 and known is not None):
            return False
        if bond.subflow >= MOST_SUBFLOWS or (first, bond.subflow) in self._routes:
            return False
        self._firsts[key, bond.nonce] = first
        self._places[peer], self._routes[first, bond.subflow] = (first, bond.subflow), peer
        return True

    def end(self, first: bytes) -> list[bytes]:
        """Forgets a flow; returns its connections, the first among them."""
        if (first, 0) not in self._routes:
            return [first]
        self._firsts = {name: each for name, each in self._firsts.items() if each != first}
        ended = [self._routes.pop((first, n)) for n in range(MOST_SUBFLOWS) if (first, n) in self._routes]
        for each in ended:
            del self._places[each]
        return ended
