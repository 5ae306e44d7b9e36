"""Tied leaves: one array in several places of the parameter tree.

The run has such leaves once (:class:`islands.arrays.tree.TreeNames`), and reads the first place. That is right for
weights that a loop ties, and wrong where one array was used twice in making a tree, such as one of zeros for every
bias: the first step makes two parameters of them, every version that is installed would overwrite what the second one
has learnt, and nobody would be told. By identity alone the two cases cannot be told apart once a step is jitted: it
returns an array for every place. So their bits are compared, until a step has moved them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from broker.wire.errors import ConfigError
from islands.arrays import placement
from islands.arrays.tree import Tree, named_leaves
from islands.hosts.regions import Spread

#: Steps after which what does not move is left alone: a learning rate begins at zero, and some leaves never move.
MOST_LOOKS = 16


class Ties:
    """Watches over leaves that were one array, for the first steps of a training loop.

    Args:
        places: Of each such array, where it stands among the tree's leaves, in their order: two places or more.

    Attributes:
        looks: How many further steps are to be looked at.
    """

    def __init__(self, places: Sequence[tuple[int, ...]]) -> None:
        self.looks = MOST_LOOKS if places else 0
        self._places = dict.fromkeys(places, 0)  # those that nothing has moved yet -> digest of their bits

    def begin(self, params: Tree) -> None:
        """Takes note of what training begins with; waits for a device."""
        if self._places:
            leaves = [leaf for _, leaf in named_leaves(params)]
            self._places = {places: _digest(leaves[places[0]]) for places in self._places}

    def look(self, params: Tree) -> None:
        """Compares what a step has made of them; waits for a device.

        Raises:
            ConfigError: They are two parameters; names both.
        """
        self.looks -= 1
        leaves = list(named_leaves(params))
        for places, began in list(self._places.items()):
            name, first = leaves[places[0]]
            digest = _digest(first)
            for other, leaf in (leaves[place] for place in places[1:]):
                if leaf is not first and _digest(leaf) != digest:
                    cure = "they were one array when the island joined, and training makes them differ"
                    cure += ": give each an array of its own before the join, or tie them in the loss"
                    raise ConfigError("params", f"{name} and {other}", cure)
            if digest != began:
                del self._places[places]
        if not self._places:
            self.looks = 0


def _digest(leaf: Any) -> int:
    """Returns a digest of the bits that are on this host."""
    value = placement.here(leaf)
    digest = xxhash.xxh3_64()
    for part in value.parts.values() if isinstance(value, Spread) else [value]:
        digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.intdigest()
