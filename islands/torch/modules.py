"""A module's parameters and buffers as a tree of leaves, by the names of its ``state_dict``.

The tree is flat: ``{"layers.0.weight": leaf, ...}``, without the names of wrappers such as ``torch.compile``'s. So an
exported model loads with ``load_state_dict``, and an island of JAX or numpy whose tree is a dict of these names and
shapes has the same manifest. A tensor with two names (tied weights) is one leaf. Parameters without a gradient are
frozen, buffers are local; ``kinds`` overrides both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from broker.base.errors import ConfigError
from broker.wire.fragments import Kind
from islands.interface import arguments
from islands.torch.conversion import numpy_dtype
from islands.torch.shards import is_spread
from islands.torch.tensors import Copier, TensorLeaf

#: Attributes of wrappers around a layer: of ``torch.compile``, and of what computes its activations anew.
_WRAPPING = "_orig_mod", "_checkpoint_wrapped_module"


class PlacedLeaf(TensorLeaf):
    """A parameter or buffer of a module, under one or more names.

    Args:
        tensor: The tensor at the join.
        places: Modules that hold it, with the attribute's name in each.
        together: All processes of torch.distributed train it.
        buffer: Modules may replace their buffers by others of the same form; parameters stay the same objects.
        copier: The island's copying thread.
        owner: As in :class:`islands.torch.tensors.TensorLeaf`.
    """

    __slots__ = ("_buffer", "_name", "_places", "_together")

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        *,
        buffer: bool,
        together: bool = False,
        copier: Copier | None = None,
        owner: Any = None,
    ) -> None:
        super().__init__(tensor, copier=None if buffer else copier, owner=owner)  # a forward pass writes to buffers
        self._buffer, self._name, self._together = buffer, name, together
        self._places: list[tuple[torch.nn.Module, str]] = []

    def stands_in(self, module: torch.nn.Module, attribute: str) -> None:
        """Notes one module attribute that holds the tensor."""
        self._places.append((module, attribute))

    def processes(self) -> tuple[int, int, Callable[[bytes], bytes]] | None:
        """Returns rank, world size and broadcast of torch.distributed if all train one model, else None."""
        if not self._together:
            return None
        distributed = torch.distributed

        def broadcast(said: bytes) -> bytes:
            told = [said]
            distributed.broadcast_object_list(told, src=0)
            return told[0]

        return distributed.get_rank(), distributed.get_world_size(), broadcast

    @property
    def given(self) -> torch.Tensor:
        """The module's current tensor.

        Raises:
            ConfigError: It has another parameter than at the join, or a buffer of another form.
        """
        for module, attribute in self._places:
            found: Any = getattr(module, attribute, None)
            if found is self._tensor:
                continue
            alike = isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (self.shape, self._tensor.dtype)
            if self._buffer and alike:
                return found
            cure = "is another object than at the join: write into parameters (p.copy_, p.data), never replace them"
            raise ConfigError(f"params {self._name}", arguments.shown(found), cure)
        return self._tensor


def unwrapped(model: Any) -> torch.nn.Module:
    """Returns the user's module, without wrappers for compilation or several processes.

    Raises:
        ConfigError: It is no module.
    """
    if not isinstance(model, torch.nn.Module):
        cure = "must be a torch.nn.Module; a tree of numpy or JAX arrays joins with islands.join"
        raise ConfigError("model", type(model).__name__, cure)
    if hasattr(model, "_orig_mod"):
        return unwrapped(model._orig_mod)
    if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        return unwrapped(model.module)
    return model


def leaves_of(
    model: torch.nn.Module, *, together: bool = False, copier: Copier | None = None, owner: Any = None
) -> dict[str, PlacedLeaf]:
    """Returns a module's parameters and persistent buffers as leaves; ``together``: of several processes.

    Raises:
        ConfigError: One has no values here, or is of a sort that does not join; names it and the cure.
    """
    leaves: dict[str, PlacedLeaf] = {}
    known: dict[int, PlacedLeaf] = {}
    for name, module, attribute, tensor, buffer in _tensors_of(model):
        _check(name, tensor)
        if id(tensor) not in known:
            known[id(tensor)] = PlacedLeaf(name, tensor, buffer=buffer, together=together, copier=copier, owner=owner)
        leaf = leaves[name] = known[id(tensor)]
        leaf.stands_in(module, attribute)
    return leaves


def kinds_of(
    model: torch.nn.Module, kinds: Mapping[str, str] | None, *, frozen: str = str(Kind.FROZEN)
) -> dict[str, str]:
    """Returns the kinds of a join: those given, local buffers, ``frozen`` for parameters without gradient."""
    found, names = arguments.mapping("kinds", kinds), dict[int, list[str]]()
    tensors = list(_tensors_of(model))
    for name, _, _, tensor, _ in tensors:
        names.setdefault(id(tensor), []).append(re.escape(name))
    for _, _, _, tensor, buffer in tensors:
        if buffer or not tensor.requires_grad:
            # Tied tensors are one leaf, by one of their names.
            found.setdefault(f"^({'|'.join(names[id(tensor)])})$", str(Kind.LOCAL) if buffer else frozen)
    return found


def unsaid_statistics(model: torch.nn.Module, kinds: Mapping[str, str] | None) -> list[str]:
    """Returns the floating buffers without a given kind; they are local and are not exported."""
    buffers = (n for n, _, _, tensor, buffer in _tensors_of(model) if buffer and tensor.is_floating_point())
    return [name for name in buffers if not any(re.search(pattern, name) for pattern in kinds or ())]


def _tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str, torch.Tensor, bool]]:
    """Yields (name, module, attribute, tensor, is a buffer); a tied tensor under each of its names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = "".join(f"{part}." for part in prefix.split(".") if part and part not in _WRAPPING)
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield dot + attribute, module, attribute, parameter, False
        for attribute, buffer in module._buffers.items():
            if buffer is not None and attribute not in module._non_persistent_buffers_set:
                yield dot + attribute, module, attribute, buffer, True


def _check(name: str, tensor: torch.Tensor) -> None:
    field, shown = f"params {name}", arguments.shown(tensor) if not _is_lazy(tensor) else type(tensor).__name__
    if _is_lazy(tensor):
        raise ConfigError(field, shown, "has no shape yet: call the model with one batch before the join")
    if tensor.is_meta:
        cure = "is on the meta device and has no values: model.to_empty(device=...) and initialise or load it first"
        raise ConfigError(field, shown, cure)
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) or is_spread(tensor)
    if not plain or tensor.layout is not torch.strided:
        cure = (
            "is no plain tensor, and none is made of it: freeze nothing of it into the module, or dequantise it first"
        )
        raise ConfigError(field, f"{type(tensor).__name__} {shown}", cure)
    if numpy_dtype(tensor.dtype) is None:
        raise ConfigError(field, shown, "has a dtype that no array has: convert it, such as tensor.to(torch.bfloat16)")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(field, f"{shown} on {tensor.device}", "must be on a CPU or a CUDA device: model.to('cuda')")


def _is_lazy(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)
