"""Joins a run with a PyTorch module: :func:`join`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Unpack

import torch

import islands
from broker.base.errors import ConfigError
from broker.process import logs
from broker.wire.fragments import Kind
from islands.arrays.partition import OF_BASE
from islands.interface.config import JoinOptions, refuse_unknown
from islands.torch.copies import CopyThread
from islands.torch.island import TorchIsland
from islands.torch.modules import kinds_of, leaves_of, unsaid_statistics, unwrapped
from islands.torch.optimizer_state import OptimizerState
from islands.torch.shards import is_spread

log = logs.get(__name__)


def join(
    address: str | os.PathLike[str] | Sequence[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    scaler: Any = None,
    scheduler: Any = None,
    init: str | os.PathLike[str] | None = None,
    background_copies: bool = True,
    **options: Unpack[JoinOptions],
) -> TorchIsland:
    """Joins a run; puts the run's parameters, and an optimizer state if there is one, in place.

        with islands.torch.join("paris.join", model, optimizer, tokens_per_step=4096) as island:
            for batch in islands.batches(dataset, island, batch=32):
                ...
                optimizer.step()
                island.step(loss)
        # The module has the run's final parameters.

    Where the model is wrapped in DistributedDataParallel, or its
    parameters are spread by ``fully_shard``, the processes of torch.distributed are the hosts of one island: each of
    them calls this, and every method of what it returns, at the same steps.

    Args:
        address: The broker's control address, or several; or the path of a join file.
        model: On the CPU or on CUDA devices. Parameters without a gradient are frozen, or of the ``base`` where that is
            given; buffers are local: each island's own, in its checkpoint. If this island is the first, its values
            become version 0.
        optimizer: One that steps the model's parameters, or several in a list; wrappers such as Accelerate's are
            looked through. Its state is in checkpoints, and may come from another island that has the same optimizer.
            None: it is in neither.
        scaler: The gradient scaler, if there is one; restored, too.
        scheduler: A learning-rate scheduler of ``torch.optim.lr_scheduler``; restored, too. For a rate that follows the
            whole run, and not this island's optimizer, use ``island.schedule_step``.
        init: Path of a trained model that version 0 comes from, as for :func:`islands.join`. A module that was made by
            ``from_pretrained`` has its values already, and needs this for the digest alone.
        background_copies: On the CPU, larger fragments are copied by a thread while the next gradients are computed.
            Parameters must then change between two calls of :meth:`TorchIsland.step` in ``optimizer.step`` alone.
            False: for loops that write to them at other times too, such as averages that take their place.
        **options: As in :func:`islands.join`. Without ``inner_optimizer`` its name is that of the class, such as
            ``adamw``.

    Raises:
        ConfigError: The run refused this island, or an argument cannot work; names the tensor or field and the cure.
        RunEnded: The run is over, and its aggregator has gone.
        Unavailable: The run stayed silent, or for all that time had no room or no leader.
    """
    refuse_unknown(options)
    together = _together(model)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(_sequence(optimizer))
    plain = unwrapped(model)
    copies = CopyThread() if background_copies and optimizers else None
    leaves = leaves_of(plain, together=together, copier=copies)
    state = OptimizerState(optimizers, scaler, scheduler=scheduler, copier=copies)
    own = unsaid_statistics(plain, options.get("kinds"))
    if own:
        detail = "each island's own, and in no export, where strict=False hides that they are missing: after loading "
        detail += "compute them from data (torch.optim.swa_utils.update_bn); kinds={'PATTERN': 'local'} is silent"
        log.warning("island.not_merged", buffers=len(own), first=own[0], detail=detail)
    frozen = Kind.FROZEN if options.get("base") is None else OF_BASE
    options["kinds"] = kinds_of(plain, options.get("kinds"), frozen=str(frozen))
    options["inner_optimizer"] = options.get("inner_optimizer") or _name_of(state.optimizers)
    island = islands.join(address, leaves, init=init, **options)
    try:
        return TorchIsland(island, leaves, state, copies, plain)
    except BaseException as err:
        island.leave(f"failed: {type(err).__name__}")
        raise


def _sequence(optimizer: Any) -> Sequence[Any]:
    if optimizer is None:
        return ()
    return optimizer if isinstance(optimizer, list | tuple) else (optimizer,)


def _name_of(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Returns the optimizers' name that settles a recipe: ``muon`` if one is, else the first one's."""
    names = [type(each).__name__.lower() for each in optimizers]
    return "muon" if "muon" in names else next(iter(names), "")


def _together(model: torch.nn.Module) -> bool:
    """Returns whether all processes of torch.distributed are hosts of one island.

    Raises:
        ConfigError: There are several, and nothing says that they do.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return False
    inner = getattr(model, "_orig_mod", model)
    if type(inner).__name__ == "FullyShardedDataParallel":
        cure = "has flat parameters, which belong to no tensor of the model: use fully_shard (FSDP2)"
        raise ConfigError("model", "FullyShardedDataParallel", cure)
    if isinstance(inner, torch.nn.parallel.DistributedDataParallel) or any(map(is_spread, inner.parameters())):
        return True
    cure = "an island of several processes trains one model: wrap it in DistributedDataParallel or fully_shard it; or"
    cure += " let each process join as an island of its own, without torch.distributed"
    raise ConfigError("torch.distributed", f"a world of {distributed.get_world_size()} processes", cure)
