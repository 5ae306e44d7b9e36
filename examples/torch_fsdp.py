"""Two PyTorch processes with FSDP2 as one island: the lines marked ``# atoll`` are all it takes.

    python -m examples.torch_fsdp                        # a hub, and one island of two processes on this machine
    python -m examples.torch_fsdp tcp://127.0.0.1:7001   # another island, or any run that is there
    torchrun --nproc-per-node 2 -m examples.torch_fsdp tcp://hub:7001    # the same as your cluster starts it

Model and data are those of :mod:`examples.torch_loop`. ``fully_shard`` spreads parameters and the optimizer's state.
Each process calls ``join`` and ``step``, and all of them see the same share of the data: each takes its rows of the
batch. On a machine without a GPU for each process it trains on the CPU.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import fully_shard

import islands.torch  # atoll
from examples import local_hub
from examples.torch_loop import BATCH, batch_of, network, windows

PROCESSES = 2


def spread(model: nn.Module, device: str) -> nn.Module:
    """Returns the model with its parameters spread over all processes: layer by layer, then what is left."""
    mesh = torch.distributed.init_device_mesh(device, (torch.distributed.get_world_size(),))
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main(address: str) -> None:
    """Trains until the run ends, as one process of several."""
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= here else "cpu"
    if device == "cuda":
        torch.cuda.set_device(local)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    torch.manual_seed(0)
    model = spread(network().to(device), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(history: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(history.to(device)), following.to(device))

    sample = batch_of(windows()[::1000])
    with torch.no_grad():
        before = loss_of(*sample).item()
    with islands.torch.join(address, model, optimizer, tokens_per_step=BATCH) as island:  # atoll
        for rows in islands.batches(windows(), island, batch=BATCH):  # atoll: in place of its own data
            history, following = batch_of(rows)
            optimizer.zero_grad()
            loss = loss_of(history[rank::ranks], following[rank::ranks])  # FSDP averages the gradients
            loss.backward()
            optimizer.step()
            island.step(loss)  # atoll
    with torch.no_grad():
        after = loss_of(*sample).item()  # on every process, as each has a part of the model
    if rank == 0:
        print(f"loss on a sample: {before:.3f} before, {after:.3f} after", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = local_hub.parser(__doc__)
    args = parser.parse_args()
    if "RANK" in os.environ:  # torchrun has started this process
        if not args.address:
            parser.error("torchrun starts no hub: give the address of a broker, such as tcp://hub:7001")
        main(args.address)
    else:
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES))
        with local_hub.at(args.address, tokens=60 * BATCH) as found:
            done = subprocess.run((*torchrun, "-m", "examples.torch_fsdp", found), check=False)
        sys.exit(done.returncode)
