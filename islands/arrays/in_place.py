"""Leaves that change in place: tensors of a framework whose optimizer writes to its parameters.

JAX returns new arrays from each step, and so does a loop in numpy. Elsewhere a parameter is an object that others hold
too: the module, the optimizer, a gradient's graph. A version is then written into it, and the leaf stays what it is.
Whatever must outlive that, or the optimizer's next step, is copied before. The frameworks themselves are elsewhere
(:mod:`islands.torch`); nothing here imports one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from broker.wire.fragments import Region, whole
from islands.arrays import persistence
from islands.arrays.reference import Parts, is_narrow
from islands.arrays.regions import Spread

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One host's part of a tensor that is spread over several hosts.

    Attributes:
        shape: The shape of the whole tensor.
        region: The part of it that is here; perhaps empty.
        owned: Whether this host hands it over, and not another one that has it, too.
    """

    shape: tuple[int, ...]
    region: Region
    owned: bool


class InPlaceLeaf(ABC):
    """A tensor as a leaf of a tree; its identity, shape and dtype never change.

    What is called on the training thread (``copies``, ``install``, ``sample``) only dispatches where it can. Of a
    tensor that several hosts share, all but ``shape`` is about the part that is here.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""

    @property
    def part(self) -> Part | None:
        """This host's part of the tensor; None if all of it is here."""
        return None

    def processes(self) -> tuple[int, int, Callable[[bytes], bytes]] | None:
        """Returns this process's rank, the number of processes, and the broadcast from rank 0.

        None if this process alone trains the model.
        """
        return None

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
        """Returns copies of leaves of this type, with their values before the optimizer's next step."""

    @abstractmethod
    def before(self, leaves: Sequence[InPlaceLeaf], placed: Sequence[Any]) -> list[InPlaceLeaf]:
        """Returns copies of leaves that are about to be overwritten, in memory that :meth:`place` reserved."""

    @abstractmethod
    def install(self, leaves: Sequence[InPlaceLeaf], placed: Sequence[Any], keep: float) -> None:
        """Writes ``keep * leaf + placed`` into leaves of this type, or ``placed`` itself with ``keep = 0``."""

    @abstractmethod
    def place(self, value: Array, *, room: bool = True) -> Any:
        """Puts an array beside the tensor, on its device; not for the training thread.

        Args:
            value: In the shape of this host's part; not written to afterwards.
            room: Whether to reserve memory for the copy of the replaced values by :meth:`before`.
        """

    @abstractmethod
    def place_positions(self, positions: npt.NDArray[np.int32]) -> Any:
        """Puts positions (dimensions, elements) where :meth:`sample` takes them; not for the training thread."""

    @abstractmethod
    def sample(self, positions: Any) -> InPlaceLeaf:
        """Returns a copy of a few elements, at the positions from :meth:`place_positions`."""

    @abstractmethod
    def to_host(self) -> Array:
        """Returns the elements as a numpy array, or a view of them; waits until a device has computed them."""

    @abstractmethod
    def written(self, value: Array | Spread) -> InPlaceLeaf:
        """Writes an array into the tensor; returns the leaf."""

    @abstractmethod
    def rows(self, start: int, stop: int) -> InPlaceLeaf:
        """Returns some rows of the first axis as a leaf; writing to it writes to the tensor."""


class InPlaceState(ABC):
    """The state of an inner optimizer that changes in place; :meth:`tree` shows it as a tree.

    Most optimizers make their state in the first step. So its form must be known without it: a checkpoint is restored
    before.
    """

    @abstractmethod
    def form(self) -> Any:
        """Returns the tree of a trained state; only names, types and shapes of its leaves count."""

    @abstractmethod
    def tree(self) -> Any:
        """Returns the current state as a tree."""

    @abstractmethod
    def load(self, tree: Any) -> None:
        """Replaces the state by a tree of the same form."""


def rows_of(leaf: InPlaceLeaf, start: int, stop: int) -> InPlaceLeaf:
    """Returns a section of a leaf that the run has cut, as in :mod:`islands.arrays.placement`."""
    return leaf.rows(start, stop)


def with_rows(leaf: InPlaceLeaf, sections: Sequence[tuple[int, InPlaceLeaf]]) -> InPlaceLeaf:
    """Returns the leaf itself: writing to its sections has already changed it."""
    del sections
    return leaf


def is_in_place(leaf: Any) -> TypeGuard[InPlaceLeaf]:
    """Returns True if a leaf is written to in place, as in PyTorch, and not replaced by a new array."""
    return isinstance(leaf, InPlaceLeaf)


class InPlacePlacement:
    """The :class:`islands.arrays.placement.Placement` of leaves of one framework that change in place.

    Args:
        leaves: At least one.
        handed: With several hosts: for each leaf, the regions that this host hands over.
    """

    def __init__(self, leaves: Sequence[InPlaceLeaf], handed: Sequence[frozenset[Region]] | None = None) -> None:
        regions = [region_here(leaf) for leaf in leaves]
        self._numbers = [i for i, region in enumerate(regions) if handed is None or region.size]
        self._leaves = self._of(leaves)  # perhaps none: nothing of them is here
        self.parts = Parts()
        if handed is not None:
            numbers = self._numbers
            self.parts = Parts([(i, regions[i]) for i in numbers], [regions[i] in handed[i] for i in numbers])

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """The dtypes of this host's parts."""
        return tuple(leaf.dtype for leaf in self._leaves)

    def values(self, leaves: Sequence[InPlaceLeaf]) -> list[Array]:
        """Returns this host's parts as numpy arrays; waits for devices."""
        return [leaf.to_host() for leaf in self._of(leaves)]

    def copy(self, leaves: Sequence[InPlaceLeaf]) -> list[InPlaceLeaf]:
        """Returns copies that stay valid when the optimizer writes to the originals."""
        return self._leaves[0].copies(self._of(leaves)) if self._leaves else []

    def before(self, leaves: Sequence[InPlaceLeaf], placed: Sequence[Any]) -> list[InPlaceLeaf]:
        """Returns copies of the values that an installation is about to replace."""
        return self._leaves[0].before(self._of(leaves), placed) if self._leaves else []

    def install(self, leaves: Sequence[InPlaceLeaf], placed: Sequence[Any], keep: float) -> list[InPlaceLeaf]:
        """Writes a version into the leaves, and returns them."""
        if self._leaves:
            self._leaves[0].install(self._of(leaves), placed, keep)
        return list(leaves)

    def place(self, values: Sequence[Array], keep: float) -> list[Any]:
        """Puts the values to install beside the parameters; not for the training thread.

        Args:
            values: From :meth:`islands.arrays.reference.Reference.shift`; not written to afterwards.
            keep: 0: the values replace the parameters, and are cast to their dtype. Else they are shifts, kept wide.
        """
        placed = []
        for leaf, value in zip(self._leaves, values, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                cast = np.array(value, leaf.dtype) if keep == 0 else np.asarray(value)
            placed.append(leaf.place(cast, room=keep != 0 and is_narrow(leaf.dtype)))
        return placed

    def places(self, movements: Sequence[Array]) -> dict[int, Any]:
        """Returns which leaves to sample, by number, and where: the largest, at the elements that move most."""
        sampled = [i for i, movement in enumerate(movements) if movement.shape and movement.size]
        sampled = sorted(sampled, key=lambda i: -movements[i].size)[: persistence.TENSORS]
        placed = {i: self._leaves[i].place_positions(persistence.positions(movements[i])) for i in sorted(sampled)}
        return {self._numbers[i]: positions for i, positions in placed.items()}

    def warm_up(self, leaves: Sequence[InPlaceLeaf], keep: float) -> None:
        """Makes one copy: nothing is compiled, but the first use loads a device's libraries."""
        self.copy(leaves)

    def _of(self, leaves: Sequence[InPlaceLeaf]) -> list[InPlaceLeaf]:
        return [leaves[i] for i in self._numbers]


def region_here(leaf: InPlaceLeaf) -> Region:
    """Returns the region of a leaf on this host."""
    return whole(leaf.shape) if leaf.part is None else leaf.part.region
