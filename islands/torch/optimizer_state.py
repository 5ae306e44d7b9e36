"""The state of optimizers, gradient scaler and scheduler as a tree, for checkpoints and donors.

``optimizers``: of each what it keeps per parameter, in the order of its groups, and the numbers of its groups (learning
rate, betas); flags such as ``foreach`` stay those of the script. ``scaler`` and ``scheduler``: what their
``state_dict`` has. Nothing passes through ``load_state_dict`` of an optimizer, which would cast float32 moments of
bfloat16 parameters to bfloat16.

Optimizers make their state in the first step, and a checkpoint is restored before. So its form is found by a step of
the same optimizer on one parameter of zeros after another: on the CPU, or a large one on the meta device.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from broker.base.errors import ConfigError
from broker.process import logs
from islands.arrays.in_place import InPlaceState
from islands.torch.conversion import numpy_dtype
from islands.torch.shards import is_spread
from islands.torch.tensors import Blank, Copier, TensorLeaf

log = logs.get(__name__)

#: A parameter of zeros that is larger has no memory; loading what computes shapes alone takes seconds.
LARGE_BYTES = 64 << 20
#: Settings of a group that choose an implementation, and keep the form: none of them works on every device.
_PLAIN_IMPLEMENTATION = {"foreach": False, "fused": None, "capturable": False, "differentiable": False}
_CARRIED = (bool, int, float, str, bytes, type(None))


class OptimizerState(InPlaceState):
    """The state of a training loop's optimizers, scaler and scheduler.

    Args:
        optimizers: In the order of the tree; wrappers of one are looked through.
        scaler: A gradient scaler, if there is one.
        scheduler: A learning-rate scheduler, if there is one.
        copier: Makes copies of the state's tensors beside the training thread.

    Raises:
        ConfigError: One of them is not what it should be.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: Any = None,
        *,
        scheduler: Any = None,
        copier: Copier | None = None,
    ) -> None:
        for each in optimizers:
            if not isinstance(each, torch.optim.Optimizer):
                cure = "must be a torch.optim.Optimizer, several of them in a list, or None"
                raise ConfigError("optimizer", type(each).__name__, cure)
        like = {"scaler": "a gradient scaler such as torch.amp.GradScaler()", "scheduler": "a torch.optim.lr_scheduler"}
        for name, given in (("scaler", scaler), ("scheduler", scheduler)):
            if given is not None and not (hasattr(given, "state_dict") and hasattr(given, "load_state_dict")):
                raise ConfigError(name, type(given).__name__, f"must be {like[name]}, or None")
        self.optimizers = tuple(map(_inner, optimizers))
        self.scaler, self.scheduler = scaler, scheduler
        self._copier = copier
        self._forms = [_form_of(each) for each in self.optimizers]
        self._scaler_began = self._scaler_now()

    def form(self) -> Any:
        """Returns the tree of a trained state, with blank tensors."""
        return {
            "optimizers": [
                {"groups": self._groups(each), "state": form}
                for each, form in zip(self.optimizers, self._forms, strict=True)
            ],
            **self._beside(),
        }

    def tree(self) -> Any:
        """Returns the current tree, with the optimizers' own tensors.

        A parameter without a gradient so far has no state, which is as good as zeros.
        """
        return {
            "optimizers": [
                {"groups": self._groups(each), "state": form | self._state(each)}
                for each, form in zip(self.optimizers, self._forms, strict=True)
            ],
            **self._beside(),
        }

    def load(self, tree: Any) -> None:
        """Loads a tree of the same form."""
        for optimizer, saved in zip(self.optimizers, tree["optimizers"], strict=True):
            for group, numbers in zip(optimizer.param_groups, saved["groups"], strict=True):
                for key, value in numbers.items():
                    if isinstance(group[key], torch.Tensor):
                        group[key].copy_(_values(value))
                    else:
                        group[key] = value
            for number, parameter in _numbered(optimizer):
                if number in saved["state"]:
                    optimizer.state[parameter] = _values(saved["state"][number])
        if tree["scaler"]:
            self.scaler.load_state_dict(tree["scaler"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(_values(tree["scheduler"]))

    def reset(self) -> None:
        """Resets the optimizers to no steps, and the scaler to its first scale."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        if self._scaler_began:
            self.scaler.load_state_dict(self._scaler_began)

    def _state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {n: self._leaves(dict(optimizer.state[p])) for n, p in _numbered(optimizer) if optimizer.state.get(p)}

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Returns the numbers of each group, such as learning rates; flags, names and None are left out."""
        return [
            {key: self._leaves(value) for key, value in group.items() if key != "params" and _is_numeric(value)}
            for group in optimizer.param_groups
        ]

    def _leaves(self, value: Any) -> Any:
        return _mapped(value, lambda tensor: TensorLeaf(tensor.detach(), copier=self._copier))

    def _beside(self) -> dict[str, Any]:
        """Returns the state of scaler and scheduler."""
        found = {"scaler": self._scaler_now()}
        if self.scheduler is not None:
            found["scheduler"] = self._leaves(dict(self.scheduler.state_dict()))
        return found

    def _scaler_now(self) -> dict[str, Any]:
        """Returns the scaler's numbers; waits for a device, as the scaler did in the step before."""
        return {} if self.scaler is None else dict(self.scaler.state_dict())


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer inside a wrapper that shares its state and groups, such as Accelerate's.

    Hooks before a step, and the form of the state, belong to the inner one. What has a state of its own stays as it is.
    """
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer):
        return optimizer
    shown = optimizer.state is inner.state and optimizer.param_groups is inner.param_groups
    return _inner(inner) if shown else optimizer


def _numbered(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (number, parameter) over all groups; numbers are text of equal length, for sorting in trees."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return ((f"{number:06}", parameter) for number, parameter in enumerate(parameters))


def _is_numeric(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_is_numeric, value))
    return isinstance(value, torch.Tensor) or (isinstance(value, int | float) and not isinstance(value, bool))


def _mapped(value: Any, leaf_of: Any) -> Any:
    """Returns a value of an optimizer's state with its tensors replaced by leaves.

    Raises:
        ConfigError: It holds something that no checkpoint carries.
    """
    if isinstance(value, dict):
        return {str(key): _mapped(each, leaf_of) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, leaf_of) for each in value)
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) or is_spread(value)
    if plain and value.layout is torch.strided and numpy_dtype(value.dtype) is not None:
        return leaf_of(value)
    if type(value) in _CARRIED:
        return value
    cure = "is in the optimizer's state, and no checkpoint carries it: join with optimizer=None to leave it out"
    raise ConfigError("optimizer", type(value).__name__, cure)


def _values(value: Any) -> Any:
    """Returns a tree of leaves as one of tensors."""
    if isinstance(value, dict):
        return {key: _values(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_values, value))
    return value.given if isinstance(value, TensorLeaf) else value


def _form_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the form of an optimizer's state for each trained parameter; empty if unknown."""
    numbers = iter(_numbered(optimizer))
    forms: dict[str, Any] = {}
    known: dict[Any, dict[str, Any]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            number, _ = next(numbers)
            if not parameter.requires_grad:
                continue
            key = index, parameter.shape, parameter.dtype, parameter.device
            if key not in known:
                try:
                    known[key] = optimizer.state.get(parameter) or _after_a_step(optimizer, group, parameter)
                except Exception as err:  # noqa: BLE001 (any optimizer's own; training does without)
                    detail = f"{type(optimizer).__name__} cannot step for one parameter of zeros: {err}"
                    log.warning("island.optimizer_form", detail=f"{detail}; its state is not restored")
                    return {}
            forms[number] = _blank(known[key], parameter, group)
    return forms


def _after_a_step(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Returns a parameter's state after a step of such an optimizer; tensors on any device."""
    if parameter.nbytes <= LARGE_BYTES:
        return _stepped(optimizer, group, parameter, "cpu")
    try:
        return _stepped(optimizer, group, parameter, "meta")
    except Exception:  # noqa: BLE001 (it reads values, or has no such kernel)
        return _stepped(optimizer, group, parameter, "cpu")


def _stepped(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor, device: str
) -> dict[str, Any]:
    like = torch.nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=device))
    like.grad = torch.zeros_like(like)
    settings = {key: value for key, value in _PLAIN_IMPLEMENTATION.items() if key in group}
    shadow: torch.optim.Optimizer = object.__new__(type(optimizer))
    # Its own state, group and hooks; whatever else a class keeps is shared. A schedule that counts steps counts calls
    # of the object's method, not of the class's.
    shadow.__dict__.update(vars(optimizer))
    shadow.__dict__.update({key: OrderedDict() for key in vars(optimizer) if key.endswith("_hooks")})
    shadow.state = defaultdict(dict)
    shadow.param_groups = [{**group, **settings, "params": [like]}]
    type(optimizer).step(shadow)
    return dict(shadow.state[like])


def _blank(state: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> Any:
    """Returns a state's form: scalars on the CPU unless the group differs, the rest as the parameter."""
    on_device = bool(group.get("fused") or group.get("capturable"))

    def leaf(tensor: torch.Tensor) -> Blank:
        by_parameter = tensor.ndim or on_device
        device = parameter.device if by_parameter else torch.device("cpu")
        like = parameter if is_spread(parameter) and tensor.shape == parameter.shape else None
        return Blank(tensor.shape, tensor.dtype, device, like)

    return _mapped(state, leaf)
