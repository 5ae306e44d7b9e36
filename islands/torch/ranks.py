"""The ranks of an island of PyTorch: processes that train a module together, by DDP or FSDP2. Shell.

On one machine :func:`started` starts them, each with a GPU of its own; for several machines torchrun does. The
environment says which rank a process is, by the names that torchrun has for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from broker.base.errors import ConfigError, RunEnded, Unavailable
from broker.process.signals import Interrupted
from islands.hosts.loss import STATUS, lost

#: Ways to train one module in several processes.
DDP, FSDP = "ddp", "fsdp"
#: How long the other ranks of a run that has ended may take to end, too.
ENDED_WITHIN_S = 10.0


@contextlib.contextmanager
def started(count: int) -> Iterator[int]:
    """Starts the island's other ranks on this machine; yields this process's rank.

    They have the command line of this process, which is rank 0. Where torchrun has started it, it has the rank that
    torchrun says, and nothing is started.

    Args:
        count: Number of ranks; 0: one for each GPU, or one without GPUs.

    Raises:
        ConfigError: There are fewer GPUs. Unavailable: One of the other ranks was lost.
    """
    if "RANK" in os.environ:
        yield int(os.environ["RANK"])
        _part()
        return
    gpus = torch.cuda.device_count()
    if gpus and count > gpus:
        raise ConfigError("task.ranks", count, f"must be at most {gpus}, the GPUs that are here; 0: one for each")
    count = count or max(1, gpus)
    if count == 1:
        yield 0
        return
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # here, so that no port is guessed
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    job |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    others = [_Other(rank, os.environ | job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(1, count)]
    os.environ.update(job | {"RANK": "0", "LOCAL_RANK": "0"})
    try:
        yield 0
        _part()
        for other in others:
            other.ended(ENDED_WITHIN_S)
    except (ConfigError, RunEnded, Interrupted):
        raise
    except Exception as err:  # of a collective, perhaps, which does not name the lost rank
        lost_one = next(filter(None, (other.ended(0.5) for other in others)), None)
        if lost_one is not None:
            raise lost_one from err
        raise
    finally:
        for other in others:
            other.kill()
        for name in (*job, "RANK", "LOCAL_RANK"):
            del os.environ[name]


def _part() -> None:
    """Destroys the process group; NCCL warns if nobody does."""
    if dist.is_initialized():
        dist.destroy_process_group()


class _Other(threading.Thread):
    """Another rank of this island; if it ends during training, this process ends, too."""

    def __init__(self, rank: int, environment: dict[str, str]) -> None:
        super().__init__(name=f"atoll-rank-{rank}", daemon=True)
        self._error: Unavailable | None = None
        self._rank, self._killed = rank, False
        command = [sys.executable, *sys.orig_argv[1:]]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        self.start()

    def run(self) -> None:
        status = self._process.wait()
        # It has told the speaker of signals, and of ranks that it has lost itself.
        if status not in (0, STATUS) and status < 128 and not self._killed:
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            self._error = lost(f"rank {self._rank} of this island, process {self._process.pid}, {how}")

    def ended(self, within_s: float) -> Unavailable | None:
        """Waits for its end; returns an error if it came before the run's end."""
        self.join(within_s)
        return self._error

    def kill(self) -> None:
        """Ends it, if it has not ended."""
        self._killed = True
        self._process.kill()


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that train a task's module together; a single one by default.

    Attributes:
        rank: The rank of this process.
        count: Number of ranks.
        device: That this process trains on.
    """

    rank: int
    count: int
    device: torch.device

    @classmethod
    def begin(cls, device: str = "") -> Ranks:
        """Joins the ranks of the environment, by NCCL or on the CPU by gloo, and returns them.

        Args:
            device: To train on; empty: the GPU of this rank, or the CPU where there is none.

        Raises:
            ConfigError: This machine has fewer GPUs than ranks.
        """
        count = world()
        if count == 1:
            return cls(0, 1, torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
        rank, local, here = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        gpus = 0 if device == "cpu" else torch.cuda.device_count()
        if gpus and gpus < here:
            raise ConfigError("ranks", here, f"must be at most {gpus}, the GPUs that are here")
        if not dist.is_initialized():
            if gpus:
                torch.cuda.set_device(local)
            elif "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(max(1, torch.get_num_threads() // here))
            dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
            torch.manual_seed(torch.initial_seed() + rank)  # each has dropout and masks of its own
        return cls(rank, count, torch.device("cuda", local) if gpus else torch.device("cpu"))

    def shard(self, module: nn.Module) -> None:
        """Shards a module's parameters over the ranks by FSDP2, each layer of a list of layers by itself."""
        from torch.distributed.fsdp import fully_shard  # takes a while to load

        mesh, on_gpu = _mesh(self.device.type, self.count), self.device.type == "cuda"
        # The device of a thread that has chosen none is the first one.
        with torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext():
            for each in [*dict.fromkeys(_layers_of(module)), module]:
                fully_shard(each, mesh=mesh)

    def replicate(self, module: nn.Module) -> DistributedDataParallel:
        """Returns a module whose backward pass averages gradients over the ranks (DDP)."""
        # Some modules have parameters that a loss may not depend on: the pooler of BERT, experts that no token chose.
        return DistributedDataParallel(module, find_unused_parameters=True)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the mean of a value over the ranks."""
        if self.count > 1:
            dist.all_reduce(value)
            value /= self.count
        return value


def world() -> int:
    """Returns the number of ranks from the environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def gathered(rows: torch.Tensor) -> torch.Tensor:
    """Returns the rows of all ranks in rank order, for a loss that every rank computes over all rows."""
    if world() == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(world())]
    dist.all_gather(parts, rows.detach())
    own = rows.clone()
    own.register_hook(lambda gradient: gradient * world())  # no other rank has it, and the mean of all is taken
    parts[dist.get_rank()] = own
    return torch.cat(parts)


def _layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the layers of a module's outermost layer lists."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers_of(child)


@functools.cache
def _mesh(device: str, count: int) -> DeviceMesh:
    """Returns the mesh of all ranks, made once, since making it is a collective operation."""
    return init_device_mesh(device, (count,))
