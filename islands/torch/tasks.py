"""Tasks of PyTorch: :func:`task` makes an :class:`islands.Task` of a module, an optimizer and a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from broker.base.errors import ConfigError
from broker.process.demands import has_base
from broker.wire.fragments import Kind
from islands.arrays.partition import OF_BASE
from islands.interface import arguments
from islands.tasks.task import Batch, DataShare, Schedule, Task
from islands.torch.modules import PlacedLeaf, kinds_of, leaves_of
from islands.torch.optimizer_state import OptimizerState
from islands.torch.ranks import DDP, FSDP, Ranks
from islands.torch.tensors import loss_leaf

Params = Mapping[str, PlacedLeaf]


@dataclass(slots=True)
class _Training:
    """One module with its optimizer; its leaves name it as their owner."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    state: OptimizerState
    replica: DistributedDataParallel | None = None  # that averages the gradients of several ranks, once it trains


def task(
    *,
    model: Callable[[], torch.nn.Module],
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor],
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
    data: Callable[[DataShare], Iterator[Batch]],
    evaluate: Callable[[torch.nn.Module], float | Mapping[str, float]],
    tokens_per_step: int,
    learning_rate: Callable[[Schedule], float] | None = None,
    kinds: Mapping[str, str] | None = None,
    unit_axes: Mapping[str, int] | None = None,
    device: str = "",
    describe: str = "",
    metrics: Mapping[str, str] | None = None,
    inputs: Mapping[str, str] | None = None,
    accumulation: int = 1,
    spread: str = DDP,
    save: Callable[..., None] | None = None,
    benchmarks: Mapping[str, Callable[[str], Callable[[torch.nn.Module], Any]]] | None = None,
) -> Task:
    """Returns a task that trains a module.

    In a job of several processes, as torchrun starts them, these train it together, as one island: each computes its
    part of every batch, of which all have the whole.

    Args:
        model: Builds the module; torch's random generators have the run's seed then.
        loss: (module, batch) -> mean loss, a tensor of one element. Batches are moved to the device here.
        optimizer: module -> its optimizer.
        data: share -> batches, as for :class:`islands.Task`.
        evaluate: module -> held-out loss, or named metrics; without gradients, the module in evaluation mode.
        tokens_per_step: Tokens in one batch.
        learning_rate: Progress of the whole run -> rate of all groups; None: that of the optimizer stays.
        kinds: As for :func:`islands.torch.join`.
        unit_axes: Likewise.
        device: Where to train. Empty: the CUDA device of this process, or the CPU where there is none.
        describe: One line; empty: the number of parameters.
        metrics: As for :class:`islands.Task`.
        accumulation: Parts that a batch is cut into along its first axis, whose gradients are added up.
        spread: How several processes train: ``ddp`` has all parameters in each, and ``loss`` must call the module
            itself; ``fsdp`` spreads parameters, gradients and the optimizer's state over them.
        save: As for :class:`islands.Task`.
        benchmarks: As for :func:`islands.jax_task`; their functions take the module, as ``evaluate`` does.
        inputs: Likewise. Parameters without a gradient are of the base where tensors of one are among them.

    Raises:
        ConfigError: ``spread`` is neither, or this machine has fewer GPUs than processes of the job.
    """
    for name, function in (("model", model), ("loss", loss), ("optimizer", optimizer)):
        arguments.function(name, function, "must be a function: see islands.torch.task")
    if spread not in (DDP, FSDP):
        raise ConfigError("spread", spread, f"must be {DDP} or {FSDP}")
    ranks = Ranks.begin(device)
    where = ranks.device

    def build(seed: int) -> _Training:
        with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []):
            torch.manual_seed(seed)
            module = model()
            if ranks.count > 1 and spread == FSDP:
                ranks.shard(module)  # before it is on a GPU, which never has all of it
            module.to(where)
        made = optimizer(module)
        return _Training(module, made, OptimizerState([made]))

    ready = {0: build(0)}  # whose names and kinds are the task's; the first that is asked for

    def init(seed: int) -> tuple[Params, OptimizerState]:
        training = ready.pop(seed, None) or build(seed)
        return leaves_of(training.module, together=ranks.count > 1, owner=training), training.state

    def train(
        params: Params, state: OptimizerState, batch: Batch, schedule: Schedule
    ) -> tuple[Params, OptimizerState, Any]:
        training = _of(params)
        if learning_rate is not None:
            for group in training.optimizer.param_groups:
                group["lr"] = learning_rate(schedule)
        training.module.train()
        training.optimizer.zero_grad(set_to_none=True)
        if ranks.count > 1 and spread == DDP and training.replica is None:
            training.replica = ranks.replicate(training.module)
        replica, values = training.replica, []
        for i in range(accumulation):
            part = _part(batch, i * ranks.count + ranks.rank, accumulation * ranks.count)
            with replica.no_sync() if replica is not None and i + 1 < accumulation else contextlib.nullcontext():
                value = loss(replica or training.module, _moved(part, where)) / accumulation
                value.backward()
            values.append(value.detach())
        training.optimizer.step()
        return params, state, loss_leaf(ranks.mean(torch.stack(values).sum() if accumulation > 1 else values[0]))

    def judging(judge: Callable[[torch.nn.Module], Any]) -> Callable[[Params], Any]:
        def judged(params: Params) -> Any:
            module = _of(params).module
            module.eval()
            with torch.no_grad():
                return judge(module)

        return judged

    def fresh_optimizer(params: Params) -> OptimizerState:
        state = _of(params).state
        state.reset()
        return state

    first = ready[0]
    num_parameters = sum(parameter.numel() for parameter in first.module.parameters())
    return Task(
        init=init,
        train=train,
        data=data,
        evaluate=judging(evaluate),
        tokens_per_step=tokens_per_step,
        fresh_optimizer=fresh_optimizer,
        kinds=kinds_of(first.module, kinds, frozen=OF_BASE if has_base(inputs or {}) else str(Kind.FROZEN)),
        unit_axes=unit_axes or {},
        describe=describe or f"{num_parameters:,} parameters, {tokens_per_step} tokens per step, on {where}",
        metrics=metrics or {},
        inner_optimizer=type(first.optimizer).__name__.lower(),
        inputs=inputs or {},
        save=save,
        benchmarks={
            name: lambda text, make=make: judging(make(text))  # type: ignore[misc]
            for name, make in (benchmarks or {}).items()
        },
    )


def _of(params: Params) -> _Training:
    training = next(iter(params.values())).owner
    assert isinstance(training, _Training)
    return training


def _moved(batch: Any, device: torch.device) -> Any:
    """Returns a batch on the device: tensors and numpy arrays in nested tuples, lists and dicts."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: _moved(value, device) for key, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(_moved(value, device) for value in batch)
    return torch.from_numpy(batch).to(device) if hasattr(batch, "__array_interface__") else batch


def _part(batch: Any, number: int, count: int) -> Any:
    """Returns one of ``count`` parts of a batch, cut along the first axis of its arrays."""
    if count == 1:
        return batch
    if isinstance(batch, dict):
        return {key: _part(value, number, count) for key, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(_part(value, number, count) for value in batch)
    rows, left = divmod(len(batch), count)
    if left:
        raise ConfigError("batch", f"{len(batch)} rows", f"must be a multiple of accumulation and ranks: of {count}")
    return batch[number * rows : (number + 1) * rows]
