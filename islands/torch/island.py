"""An island of a PyTorch loop: :class:`islands.Island` for a module whose parameters change in place."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from broker.base.errors import ConfigError
from broker.process import clocks, logs
from islands import DataShare, Island, Schedule
from islands.interface import arguments
from islands.torch.copies import CopyThread
from islands.torch.optimizer_state import OptimizerState
from islands.torch.tensors import TensorLeaf, loss_leaf

log = logs.get(__name__)

#: Between two losses that are copied on a GPU: a copy costs the training thread more than the rest of a usual step.
LOSS_EVERY_S = 0.25


class TorchIsland:
    """The island of a PyTorch loop; made by :func:`islands.torch.join`. For one thread.

    Versions are written into the module's parameters in :meth:`step`; the objects stay the same. As a context manager
    it closes on the way out (:meth:`close`); where an exception ends the loop it leaves, so that nobody waits for it.

    Args:
        island: That has joined with ``leaves``.
        leaves: The leaves of the module.
        state: The state of the optimizers.
        copies: The thread that makes copies on the CPU, if there is one.
        model: That the leaves are of.

    Attributes:
        reset_optimizer: The last :meth:`step` replaced spoilt parameters, and let the optimizers begin afresh.
        sync_share: As in :class:`islands.Island`, with waits for copies. All other attributes are the same there.
    """

    id: str
    share: DataShare
    restored: str | None
    restored_cursor: int | None
    reset_optimizer: bool
    inner_step: int
    tokens: int
    done: bool
    schedule: Schedule
    schedule_step: int
    versions: tuple[int, ...]
    sync_share: float
    heard_ago_s: float | None

    def __init__(
        self,
        island: Island,
        leaves: Mapping[str, TensorLeaf],
        state: OptimizerState,
        copies: CopyThread | None,
        model: torch.nn.Module,
    ) -> None:
        self._island = island
        self._leaves = dict(leaves)
        self._state = state
        self._copies = copies
        self._model = model
        self._joined = {id(leaf.given) for leaf in leaves.values()}  # which stay the same objects
        #: Optimizers of this process, how many parameters they had when they were looked at, and whether of these.
        self._seen: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = WeakKeyDictionary()
        self._next_loss_s = 0.0
        for each in state.optimizers:
            self._look_at(each)
        island.restore(self._leaves, state)
        self._hooks = [register_optimizer_step_pre_hook(self._before_step)]

    # --- the loop ---------------------------------------------------------------------------------------------

    def step(self, loss: Any = None, *, tokens: int | None = None, cursor: int | None = None) -> None:
        """Counts an inner step, after ``optimizer.step()``; installs versions that have arrived.

        Never waits for the network. After spoilt parameters (not finite) were replaced by the global ones, the
        optimizers' state and the scaler begin afresh: ``reset_optimizer`` says so until the next step.

        Args:
            loss: The loss of this step, for reports: a number, or a tensor of one element that is read later.
            tokens: Trained in this step; None: ``tokens_per_step`` of the join.
            cursor: A place in the caller's data, which ``restored_cursor`` gives back; None: the number of steps.

        Raises:
            ConfigError: An argument is not as described here, a parameter was replaced by another object, or the run
                has thrown this island out.
            LocalProtocolError: The island has left.
        """
        island = self._island
        if isinstance(loss, torch.Tensor):
            loss = self._for_reports(loss)
        cursor = island.inner_step + 1 if cursor is None else cursor
        island.step(self._leaves, tokens=tokens, loss=loss, state=(self._state, cursor))
        if island.reset_optimizer:
            self._state.reset()

    def _for_reports(self, loss: torch.Tensor) -> Any:
        """Returns a loss for reports; None on a GPU whose loss was copied less than ``LOSS_EVERY_S`` ago."""
        if loss.is_cuda:
            now_s = clocks.monotonic()
            if now_s < self._next_loss_s:
                return None
            self._next_loss_s = now_s + LOSS_EVERY_S
        return loss_leaf(loss)

    def close(self) -> None:
        """Ends training: hands over the rest, leaves; the module then has the run's final parameters.

        Before the run is :attr:`done` it leaves as soon as the aggregator has the rest.
        """
        self._island.close(self._leaves)
        self._end()

    def pause(self, cursor: int | None = None, *, reason: str = "paused") -> None:
        """Leaves for a while: the island's next process continues as if this one had only been silent.

        Args:
            cursor: As in :meth:`step`.
            reason: For people.
        """
        at = self._island.inner_step if cursor is None else cursor
        self._island.pause(self._leaves, (self._state, at), reason=reason)
        self._end()

    def save(self, cursor: int | None = None) -> None:
        """Writes a checkpoint now; without ``state_dir``, or before a step, does nothing."""
        self._island.save(self._leaves, (self._state, self._island.inner_step if cursor is None else cursor))

    def leave(self, reason: str = "the process ends") -> None:
        """Says goodbye, if not done yet; nobody waits for this island after that."""
        self._island.leave(reason)
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc is None:
            self.close()
        self._island.__exit__(exc_type, exc, trace)
        self._end()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Waits for pending copies of an optimizer's parameters, before it writes to them."""
        seen, copies = self._seen.get(optimizer), self._copies
        if seen is None or seen[0] != _num_parameters(optimizer):
            seen = self._look_at(optimizer)
        if copies is None or not copies.under_way or not seen[1]:  # as before most steps
            return
        before_s = copies.waited_s
        copies.settle()
        self._island.waited(copies.waited_s - before_s)

    def _look_at(self, optimizer: torch.optim.Optimizer) -> tuple[int, bool]:
        """Notes an optimizer's parameters; returns their number, and whether some are this island's.

        Raises:
            ConfigError: It steps a parameter of the model that was not there at the join.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        others = [parameter for parameter in parameters if id(parameter) not in self._joined]
        names = {id(parameter): name for name, parameter in self._model.named_parameters()} if others else {}
        for parameter in others:
            if id(parameter) in names:
                cure = "was not in the model when it joined, so no island hands it over: build the whole model before "
                cure += "the join; what is to be trained later may be without a gradient until then, with its kind in "
                raise ConfigError(f"params {names[id(parameter)]}", arguments.shown(parameter), f"{cure}kinds=")
        joined = any(each is optimizer for each in self._state.optimizers)
        found = self._seen[optimizer] = len(parameters), len(others) < len(parameters)
        if joined and others:
            detail = f"the optimizer steps {len(others)} tensors that are not in the model: none of them is merged"
            log.warning("island.not_merged", first=arguments.shown(others[0]), detail=detail)
        elif found[1] and not joined and self._state.optimizers:
            detail = f"another {type(optimizer).__name__} than those of the join steps the model's parameters: its "
            detail += "state is in no checkpoint, and goes to no other island; give all of them to join"
            log.warning("island.optimizer_differs", detail=detail)
        return found

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._copies is not None:
            self._copies.close()
            self._copies = None

    # --- figures for the loop ---------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the inner island that this class declares."""
        if name not in type(self).__annotations__:
            raise AttributeError(f"a TorchIsland has no attribute {name!r}")
        return getattr(self._island, name)


def _num_parameters(optimizer: torch.optim.Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
