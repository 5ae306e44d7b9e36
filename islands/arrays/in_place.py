"""Leaves that change in place: tensors of a framework whose optimizer writes to its parameters.

JAX returns new arrays from each step, and so does a loop in numpy. Elsewhere a parameter is an object that others hold
too: the module, the optimizer, a gradient's graph. A version is then written into it, and the leaf stays what it is.
Whatever must outlive that, or the optimizer's next step, is copied before. The frameworks themselves are elsewhere
(:mod:`islands.torch`); nothing here imports one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from islands.arrays import persistence

Array = npt.NDArray[Any]


class InPlaceLeaf(ABC):
    """A tensor as a leaf of a tree; its identity, shape and dtype never change.

    What is called on the training thread (``copies``, ``install``, ``sample``) only dispatches where it can.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its elements, as numpy calls it."""

    @property
    def nbytes(self) -> int:
        """The size of its elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @abstractmethod
    def copies(self, leaves: Sequence[InPlaceLeaf]) -> list[InPlaceLeaf]:
        """Returns copies of leaves of this sort, of the values that they have until the optimizer's next step."""

    @abstractmethod
    def before(self, leaves: Sequence[InPlaceLeaf], placed: Sequence[Any]) -> list[InPlaceLeaf]:
        """Returns copies of leaves of this sort, which are about to be written to, in the room that was placed."""

    @abstractmethod
    def install(self, leaves: Sequence[InPlaceLeaf], placed: Sequence[Any], keep: float) -> None:
        """Writes ``keep * leaf + placed`` into leaves of this sort, or ``placed`` itself with ``keep = 0``."""

    @abstractmethod
    def place(self, value: Array) -> Any:
        """Puts an array beside the tensor, on its device, with room for what it replaces; not for the training thread.

        Args:
            value: Of the tensor's shape; not written to afterwards.
        """

    @abstractmethod
    def place_positions(self, positions: npt.NDArray[np.int32]) -> Any:
        """Puts positions, (dimensions, elements), where :meth:`sample` takes them; not for the training thread."""

    @abstractmethod
    def sample(self, positions: Any) -> InPlaceLeaf:
        """Returns a copy of a few elements, at what :meth:`place_positions` returned."""

    @abstractmethod
    def to_host(self) -> Array:
        """Returns the elements as a numpy array, perhaps a view of them; waits until a device has computed them."""

    @abstractmethod
    def written(self, value: Array) -> InPlaceLeaf:
        """Writes an array into the tensor; returns the leaf."""


class InPlaceState(ABC):
    """An inner optimizer's state that changes in place, as a tree when one is asked for.

    Most optimizers make their state in the first step. So its form must be known without it: a checkpoint is restored
    before.
    """

    @abstractmethod
    def form(self) -> Any:
        """Returns the tree that a trained state has; only names, sorts and shapes of its leaves count."""

    @abstractmethod
    def tree(self) -> Any:
        """Returns the tree that the state is now."""

    @abstractmethod
    def load(self, tree: Any) -> None:
        """Takes over a tree of that form."""


def is_in_place(leaf: Any) -> TypeGuard[InPlaceLeaf]:
    """Whether a leaf changes in place."""
    return isinstance(leaf, InPlaceLeaf)


class InPlacePlacement:
    """The placement of leaves that change in place, all of one framework: :class:`islands.arrays.placement.Placement`.

    Args:
        leaves: At least one.
    """

    def __init__(self, leaves: Sequence[InPlaceLeaf]) -> None:
        self._leaves = tuple(leaves)

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """Of the leaves."""
        return tuple(leaf.dtype for leaf in self._leaves)

    def copy(self, leaves: Sequence[InPlaceLeaf]) -> list[InPlaceLeaf]:
        """Returns copies that stay valid when the originals are written to by the optimizer."""
        return self._leaves[0].copies(leaves)

    def before(self, leaves: Sequence[InPlaceLeaf], placed: Sequence[Any]) -> list[InPlaceLeaf]:
        """Returns copies of what an installation is about to replace."""
        return self._leaves[0].before(leaves, placed)

    def install(self, leaves: Sequence[InPlaceLeaf], placed: Sequence[Any], keep: float) -> list[InPlaceLeaf]:
        """Writes a version into the leaves, and returns them."""
        self._leaves[0].install(leaves, placed, keep)
        return list(leaves)

    def place(self, values: Sequence[Array], keep: float) -> list[Any]:
        """Puts what is to be installed beside the parameters; not for the training thread.

        Args:
            values: From :meth:`islands.arrays.reference.Reference.shift`; not written to afterwards.
            keep: 0: the values replace the parameters, and are cast to their dtype. Else they are shifts, kept wide.
        """
        placed = []
        for leaf, value in zip(self._leaves, values, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                cast = np.array(value, leaf.dtype) if keep == 0 else np.asarray(value)
            placed.append(leaf.place(cast))
        return placed

    def places(self, movements: Sequence[Array]) -> dict[int, Any]:
        """Returns which tensors to sample, by number, and where: the largest, at the elements that move most."""
        sampled = [i for i, movement in enumerate(movements) if movement.shape and movement.size]
        sampled = sorted(sampled, key=lambda i: -movements[i].size)[: persistence.TENSORS]
        return {i: self._leaves[i].place_positions(persistence.positions(movements[i])) for i in sorted(sampled)}

    def warm_up(self, leaves: Sequence[InPlaceLeaf], keep: float) -> None:
        """Makes one copy: there is nothing to compile, but a device's libraries are loaded with the first use."""
        self.copy(leaves)
