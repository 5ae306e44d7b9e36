"""Samples parameters around an adoption, and frozen ones, without waiting.

Shell around :mod:`islands.arrays.persistence`. On a device they are copied by four small computations for each
adoption that is looked at; the communication thread reads them when they are there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from islands.arrays import persistence, placement
from islands.arrays.parameters import Parameters
from islands.arrays.tree import Tree
from islands.session.exchange import Exchange, Frozen, Install, Returned
from islands.session.training_state import Leaf

#: All adoptions are looked at in the beginning, and while there is a suspicion; then one in this many.
FIRST, ONE_IN = 16, 32
#: Frozen leaves that are looked at with each hand-over: each costs the training thread 8 to 16 microseconds.
FROZEN_AT_ONCE = 8


class Samples:
    """The samples of adoptions, kept until the caller has returned twice.

    Attributes:
        waiting: Samples from before and after the adoptions of the last two boundaries.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.waiting: list[tuple[Install, Returned]] = []
        self._exchange = exchange
        self._boundaries = 0

    def looks(self, *, first: bool) -> bool:
        """Returns whether the adoptions of this boundary are to be looked at.

        Args:
            first: No step was run before: this is what restore returns.
        """
        self._boundaries += not first
        often = first or self._exchange.suspected or self._boundaries <= FIRST
        return often or self._boundaries % ONE_IN == 0

    def take(
        self,
        step: int,
        adopted: Sequence[tuple[Install, Sequence[Leaf], Sequence[Leaf]]],
        parameters: Parameters,
        *,
        first: bool,
    ) -> None:
        """Samples adoptions.

        Args:
            step: Of the boundary.
            adopted: Each with samples of its fragment before it, and the leaves after it.
            parameters: Of the island.
            first: As in :meth:`looks`.
        """
        for install, before, after in adopted:
            if install.places:
                returned = Returned(
                    fragment_id=install.fragment_id,
                    step=step,
                    first=first,
                    before=tuple(before),
                    installed=sample(after, install),
                    names=parameters.names(install.fragment_id, install.places),
                )
                self.waiting.append((install, returned))

    def returned(self, params: Tree, parameters: Parameters) -> None:
        """Samples the parameters that the caller has come back with, and lets them be judged.

        Raises:
            ConfigError: They are not those of the join.
        """
        for install, each in self.waiting:
            now = sample(parameters.of_fragment(params, install.fragment_id), install)
            if each.following:
                each.later = now
            else:
                each.following = now
        self._exchange.returned.extend(each for _, each in self.waiting if each.later)
        self.waiting = [(install, each) for install, each in self.waiting if not each.later]


class FrozenLeaves:
    """Elements of the leaves that the run calls frozen; each hand-over looks at a few leaves in turn.

    Nobody hands them over. Training that moves one all the same would leave the run with other values than the island.

    Args:
        params: As training begins with them; waits until a device has computed them.
        parameters: Of the island.
    """

    def __init__(self, params: Tree, parameters: Parameters) -> None:
        self._parameters = parameters
        self._began: list[tuple[str, Leaf, persistence.Array]] = []  # (name, places, the elements there)
        self._next = 0
        names = parameters.frozen
        for name, leaf in zip(names, parameters.of_names(params, names), strict=True):
            shape = placement.sampled_shape(leaf)
            if 0 not in shape:
                places = placement.placed_positions(leaf, persistence.evenly(shape))
                (elements,) = placement.sample([leaf], [places])
                self._began.append((name, places, np.array(placement.to_host(elements))))

    def look(self, params: Tree) -> tuple[Frozen, ...]:
        """Returns copies of elements of the next few, with what they were."""
        chosen = self._began[self._next : self._next + FROZEN_AT_ONCE]
        self._next = self._next + FROZEN_AT_ONCE if self._next + FROZEN_AT_ONCE < len(self._began) else 0
        leaves = self._parameters.of_names(params, [name for name, _, _ in chosen])
        return tuple(
            Frozen(name, began, placement.sample([leaf], [places])[0])
            for (name, places, began), leaf in zip(chosen, leaves, strict=True)
        )


def sample(leaves: Sequence[Leaf], install: Install) -> tuple[Leaf, ...]:
    """Returns copies of a few elements of a fragment, those that an adoption moves most."""
    places = install.places
    return tuple(placement.sample([leaves[i] for i in places], [places[i] for i in places]))
