"""PyTorch tensors as leaves that change in place: copies, installation, conversion to and from numpy.

On a GPU copies are made on the caller's stream, with an event behind them; a worker thread takes them to the host on a
stream of its own. So the training thread dispatches and continues, and its stream never waits for the host's memory. On
the CPU larger copies are made by a thread, while the next step computes its gradients (:mod:`islands.torch.copies`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from islands.arrays.in_place import InPlaceLeaf, Part
from islands.arrays.regions import Spread, part_of
from islands.torch.conversion import as_array, as_tensor, numpy_dtype
from islands.torch.copies import SMALL_BYTES
from islands.torch.shards import local_of, part_of_dtensor, spread_like

Array = npt.NDArray[Any]


class Copier(Protocol):
    """The interface of a thread that copies tensors on the CPU beside training."""

    def take(self, tensors: Sequence[torch.Tensor]) -> list[Future[torch.Tensor]]:
        """Returns copies of the current values, which may be made later."""

    def settle(self) -> None:
        """Waits until the tensors may be written to."""


class Placed(NamedTuple):
    """The values to install into a tensor, on its device.

    A copy into new memory costs the training thread eight times as much, as the kernel has to find the pages.
    """

    value: torch.Tensor
    room: torch.Tensor | None  # for the replaced values, on the CPU; written to once, so that its pages exist


class TensorLeaf(InPlaceLeaf):
    """A tensor as a leaf.

    Args:
        tensor: Of a dtype that numpy has (:func:`numpy_dtype`).
        copier: Makes its larger copies on the CPU; None: the training thread does.
        owner: The object that it is part of, for callers that find the leaf in a tree.
    """

    __slots__ = ("_part", "_tensor", "copier", "owner")

    def __init__(
        self,
        tensor: torch.Tensor,
        *,
        copier: Copier | None = None,
        owner: Any = None,
        part: Part | None = None,
    ) -> None:
        self._tensor = tensor
        self._part = part or part_of_dtensor(tensor)
        self.copier = copier
        self.owner = owner

    @property
    def given(self) -> torch.Tensor:
        """The tensor in the module; a DTensor if it is spread over processes."""
        return self._tensor

    @property
    def tensor(self) -> torch.Tensor:
        """This process's part of the tensor."""
        return local_of(self.given)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self._tensor.shape) if self._part is None else self._part.shape

    @property
    def part(self) -> Part | None:
        """This process's part of the tensor; None if all of it is here."""
        return self._part

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype as a numpy dtype."""
        found = numpy_dtype(self._tensor.dtype)
        assert found is not None, self._tensor.dtype
        return found

    def copies(self, leaves: Sequence[InPlaceLeaf]) -> list[InPlaceLeaf]:
        """Returns copies; on a device they are dispatched, on the CPU made by the copier if there is one."""
        return _copies(leaves)

    def before(self, leaves: Sequence[InPlaceLeaf], placed: Sequence[Placed]) -> list[InPlaceLeaf]:
        """Returns copies; on the CPU in reserved memory, whose pages exist already."""
        tensors = [_tensor_of(leaf).detach() for leaf in leaves]
        if any(each.room is None for each in placed):
            return _copies([TensorLeaf(tensor) for tensor in tensors])
        rooms = [each.room for each in placed if each.room is not None]
        torch._foreach_copy_(rooms, tensors)
        return [TensorLeaf(room) for room in rooms]

    def install(self, leaves: Sequence[InPlaceLeaf], placed: Sequence[Placed], keep: float) -> None:
        """Writes a version into the tensors; only dispatched on a device."""
        for copier in {id(each): each for each in map(_copier_of, leaves) if each is not None}.values():
            copier.settle()
        tensors = [_tensor_of(leaf) for leaf in leaves]
        with torch.no_grad():
            for numbers in _by_device(tensors):
                here, theirs = [tensors[i] for i in numbers], [placed[i].value for i in numbers]
                if here[0].is_cuda:
                    for each in theirs:  # their memory is another stream's
                        each.record_stream(torch.cuda.current_stream(each.device))
                _install(here, theirs, keep)

    def place(self, value: Array, *, room: bool = True) -> Placed:
        """Puts an array on the tensor's device; waits for the transfer."""
        placed, like = self._put(value), self._tensor
        here = room and like.device.type == "cpu"
        return Placed(placed, torch.ones(value.shape, dtype=like.dtype, device="cpu") if here else None)

    def _put(self, value: Array) -> torch.Tensor:
        tensor, device = as_tensor(value), self._tensor.device  # of the join: a step may be under way just now
        if device.type == "cpu":
            return tensor
        stream = _stream_of(device)
        with torch.cuda.stream(stream):
            placed = tensor.to(device)
        stream.synchronize()
        return placed

    def place_positions(self, positions: npt.NDArray[np.int32]) -> tuple[torch.Tensor, ...]:
        """Returns the positions as indices on the tensor's device."""
        return tuple(self._put(row) for row in positions.astype(np.int64))

    def sample(self, positions: tuple[torch.Tensor, ...]) -> InPlaceLeaf:
        """Returns a copy of a few elements."""
        found = self.tensor.detach()[positions]
        if not found.is_cuda:
            return TensorLeaf(found)
        for each in positions:  # of another stream
            each.record_stream(torch.cuda.current_stream(each.device))
        return DeviceCopy(found, _event_of(found))

    def to_host(self) -> Array:
        """Returns the elements; a view if they are on the CPU."""
        tensor = self.tensor.detach()
        return as_array(tensor if tensor.device.type == "cpu" else tensor.cpu())

    def rows(self, start: int, stop: int) -> InPlaceLeaf:
        """Returns some rows as a leaf."""
        return Rows(self, start, stop)

    def written(self, value: Array | Spread) -> InPlaceLeaf:
        """Writes an array into the tensor; returns the leaf."""
        if self.copier is not None:
            self.copier.settle()
        with torch.no_grad():
            self.tensor.copy_(as_tensor(_here(value, self._part).reshape(self.tensor.shape)))
        return self


class Rows(TensorLeaf):
    """Some rows of another leaf's tensor.

    Args:
        of: The leaf.
        start: The first row.
        stop: The one behind the last.
    """

    __slots__ = ("_of", "_rows")

    def __init__(self, of: TensorLeaf, start: int, stop: int) -> None:
        super().__init__(of.tensor.detach()[start:stop], copier=of.copier, owner=of.owner)
        self._of, self._rows = of, slice(start, stop)

    @property
    def tensor(self) -> torch.Tensor:
        """A view of rows of the leaf's current tensor."""
        return self._of.tensor.detach()[self._rows]


class DeviceCopy(TensorLeaf):
    """A copy on a GPU, perhaps still under way there.

    Args:
        tensor: On the device.
        event: On the stream that makes it, behind it.
    """

    __slots__ = ("_event",)

    def __init__(self, tensor: torch.Tensor, event: Any, *, part: Part | None = None) -> None:
        super().__init__(tensor, part=part)
        self._event = event

    def to_host(self) -> Array:
        """Returns the elements, copied on a separate stream that does not wait for later steps."""
        stream = _stream_of(self.tensor.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._event)
            here = torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device="cpu", pin_memory=True)
            here.copy_(self.tensor, non_blocking=True)
            done = _event_of(self.tensor)
        done.synchronize()
        return as_array(here)

    # --- as a loss: what islands.session.exchange asks of a value on a device -----------------------------------

    def is_ready(self) -> bool:
        """Returns whether the copy is computed."""
        ready: bool = self._event.query()
        return ready

    def block_until_ready(self) -> None:
        """Waits until the copy is computed."""
        self._event.synchronize()

    def __float__(self) -> float:
        return float(self.to_host())


class LateCopy(TensorLeaf):
    """A copy on the CPU that a thread makes.

    Args:
        like: A leaf with the shape and dtype of the copy.
        future: The thread's result, the copy.
    """

    __slots__ = ("_future",)

    def __init__(self, like: torch.Tensor, future: Future[torch.Tensor], *, part: Part | None = None) -> None:
        super().__init__(like, part=part)
        self._future = future

    @property
    def tensor(self) -> torch.Tensor:
        """The copied tensor; waits until it is made."""
        return self._future.result()


class Blank(InPlaceLeaf):
    """A placeholder for a future tensor: shape and dtype without values.

    Args:
        shape: The shape of the tensor.
        dtype: The dtype, of torch.
        device: Where it will be.
        like: Another tensor, over whose processes it will be spread alike; None: it will be whole.
    """

    __slots__ = ("_device", "_dtype", "_like", "_part", "_shape")

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, like: torch.Tensor | None = None
    ) -> None:
        self._shape, self._dtype, self._device = tuple(shape), dtype, device
        self._like = like
        self._part = None if like is None else part_of_dtensor(like)

    @property
    def part(self) -> Part | None:
        """This process's part of the tensor; None if all of it will be here."""
        return self._part

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype as a numpy dtype."""
        found = numpy_dtype(self._dtype)
        assert found is not None
        return found

    def copies(self, leaves: Sequence[InPlaceLeaf]) -> list[InPlaceLeaf]:
        """Returns the placeholders themselves: they have no values to copy."""
        return _copies(leaves)

    def _never(self, *_: Any, **__: Any) -> Any:
        """Raises: no parameter is blank, so nobody calls it."""
        raise TypeError("a blank leaf has no values")

    before = install = place_positions = sample = _never

    def place(self, value: Array, *, room: bool = True) -> Placed:
        """Returns an array as a tensor on the device."""
        del room
        return Placed(as_tensor(value, self._dtype).to(self._device), None)

    def to_host(self) -> Array:
        """Returns zeros that share the memory of one element."""
        return np.broadcast_to(np.zeros((), self.dtype), self._shape if self._part is None else self._part.region.shape)

    def rows(self, start: int, stop: int) -> InPlaceLeaf:
        """Returns a placeholder for some rows."""
        return Blank((stop - start, *self._shape[1:]), self._dtype, self._device)

    def written(self, value: Array | Spread) -> InPlaceLeaf:
        """Returns a leaf with a new tensor of these values."""
        here = self.place(np.array(_here(value, self._part))).value
        if self._part is None or self._like is None:
            return TensorLeaf(here.reshape(self._shape))
        return TensorLeaf(spread_like(here, self._like))


def loss_leaf(loss: torch.Tensor) -> Any:
    """Returns a loss that another thread can read later; never waits for a device."""
    if loss.numel() != 1:
        return loss  # for others to refuse
    if not loss.is_cuda:
        return loss.item()
    value = loss.detach()
    return DeviceCopy(value.clone(), _event_of(value))


def _copies(leaves: Sequence[InPlaceLeaf]) -> list[InPlaceLeaf]:
    found: dict[int, InPlaceLeaf] = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Blank)}
    tensors = {i: _tensor_of(leaf) for i, leaf in enumerate(leaves) if i not in found}
    on_host = [i for i, tensor in tensors.items() if not tensor.is_cuda]
    late = [i for i in on_host if _copier_of(leaves[i]) is not None]
    if sum(tensors[i].nbytes for i in late) < SMALL_BYTES:
        late = []
    for i in set(on_host).difference(late):
        found[i] = TensorLeaf(tensors[i].detach().clone(), part=leaves[i].part)
    if late:
        copier = _copier_of(leaves[late[0]])
        assert copier is not None
        copies = copier.take([tensors[i] for i in late])
        found |= {i: LateCopy(tensors[i], copy, part=leaves[i].part) for i, copy in zip(late, copies, strict=True)}
    on_device = [i for i, tensor in tensors.items() if tensor.is_cuda]
    for group in _by_device([tensors[i] for i in on_device]):
        numbers = [on_device[i] for i in group]
        parts = [leaves[i].part for i in numbers]
        found.update(zip(numbers, _copies_on([tensors[i] for i in numbers], parts), strict=True))
    return [found[i] for i in range(len(leaves))]


def _here(value: Array | Spread, part: Part | None) -> Array:
    """Returns this process's part of a value."""
    if part is not None:
        return part_of(value, part.region)
    assert not isinstance(value, Spread), "what is whole here comes as a whole"
    return np.asarray(value)


def _tensor_of(leaf: InPlaceLeaf) -> torch.Tensor:
    assert isinstance(leaf, TensorLeaf), type(leaf)
    return leaf.tensor


def _copier_of(leaf: InPlaceLeaf) -> Copier | None:
    return leaf.copier if isinstance(leaf, TensorLeaf) else None


def _by_device(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Returns the numbers of the tensors on each device."""
    groups: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(i)
    return list(groups.values())


def _copies_on(tensors: Sequence[torch.Tensor], parts: Sequence[Part | None]) -> list[InPlaceLeaf]:
    """Dispatches copies of tensors on one GPU, grouped by dtype."""
    copies: list[torch.Tensor] = [torch.empty_like(x, requires_grad=False) for x in tensors]
    with torch.no_grad():
        torch._foreach_copy_(copies, [x.detach() for x in tensors])
    event = _event_of(tensors[0])
    return [DeviceCopy(x, event, part=part) for x, part in zip(copies, parts, strict=True)]


def _install(tensors: Sequence[torch.Tensor], placed: Sequence[torch.Tensor], keep: float) -> None:
    if keep == 0:
        torch._foreach_copy_(list(tensors), list(placed))
        return
    alike = [i for i, (x, move) in enumerate(zip(tensors, placed, strict=True)) if x.dtype == move.dtype]
    if alike:
        ours = [tensors[i] for i in alike]
        if keep != 1:
            torch._foreach_mul_(ours, keep)  # and no fused product: the host computes the same sum once more
        torch._foreach_add_(ours, [placed[i] for i in alike])
    for i in set(range(len(tensors))).difference(alike):
        wide = tensors[i].to(placed[i].dtype)
        if keep != 1:
            wide.mul_(keep)
        tensors[i].copy_(wide.add_(placed[i]))


def _event_of(tensor: torch.Tensor) -> Any:
    """Returns an event after all work queued so far on the current stream of the tensor's device."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return event


@functools.cache
def _stream_of(device: torch.device) -> Any:
    """Returns the stream for copies to and from the host."""
    return torch.cuda.Stream(device)
