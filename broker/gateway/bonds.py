"""The flows of a broker's bulk connections: several may carry one client's chunks together. Pure.

The first connection stands for the flow, under a number that its client has drawn. One that names the number later, and
came under the same key, belongs to it.
"""

from __future__ import annotations

from broker.chunks.heads import Bond
from broker.chunks.subflow import MOST_SUBFLOWS


class Bonds:
    """The flows of several connections, by routing id of the first."""

    def __init__(self) -> None:
        self._firsts: dict[tuple[str, int], bytes] = {}  # by key and number
        self._names: dict[bytes, tuple[str, int]] = {}  # the other way round
        self._others: dict[bytes, dict[int, bytes]] = {}  # by first and subflow
        self._part_of: dict[bytes, tuple[bytes, int]] = {}  # by other

    def place_of(self, peer: bytes) -> tuple[bytes, int]:
        """Returns the first connection of a flow, and which of its connections this one is; 0 is the first."""
        return self._part_of.get(peer, (peer, 0))

    def route(self, first: bytes, subflow: int) -> bytes:
        """Returns a connection of a flow."""
        return self._others[first][subflow] if subflow else first

    def bind(self, peer: bytes, bond: Bond, key: str) -> bool:
        """Takes in what a connection says of itself, under a public key; returns whether it is so from now on."""
        name = key, bond.nonce
        if bond.subflow == 0:
            if name in self._firsts or peer in self._names or peer in self._part_of:
                return False
            self._firsts[name], self._names[peer], self._others[peer] = peer, name, {}
            return True
        first = self._firsts.get(name)
        if first is None or peer in self._names or peer in self._part_of:
            return False
        if bond.subflow >= MOST_SUBFLOWS or bond.subflow in self._others[first]:
            return False
        self._others[first][bond.subflow] = peer
        self._part_of[peer] = first, bond.subflow
        return True

    def end(self, first: bytes) -> list[bytes]:
        """Forgets a flow; returns its connections, the first among them."""
        name = self._names.pop(first, None)
        if name is not None:
            del self._firsts[name]
        others = list(self._others.pop(first, {}).values())
        for each in others:
            del self._part_of[each]
        return [first, *others]
