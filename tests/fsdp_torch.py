"""An island of PyTorch on one or several processes, as a program of its own.

    python -m tests.fsdp_torch '{"address": ..., "island": "a", "processes": 2, "process": 0, "port": 4321, ...}'

The processes train one small network together: ``spread`` is "fsdp" (its parameters are spread over them) or "ddp"
(each has all of them). It prints a line of JSON for each step, as :mod:`tests.fsdp_island` does. ``device`` is "cpu" or
"cuda": by NCCL where there is a GPU for each process, else by gloo on the one that they share.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
import torch
import torch.distributed
from torch import nn
from torch.distributed.fsdp import fully_shard

import islands.torch
from broker.process import logs
from tests.fsdp_island import say

ROWS, WIDTH, HIDDEN = 16, 8, 41  # an odd width: ranks have shards of different sizes


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)
    )


def rows_of(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.from_numpy(np.random.default_rng(batch).standard_normal((ROWS, WIDTH), np.float32))
    return inputs, 0.5 * inputs.sum(1, keepdim=True)


def main(spec: dict) -> None:
    torch.set_num_threads(1)
    logs.configure(f"{spec['island']}.{spec['process']}")
    processes, process, device = spec["processes"], spec["process"], spec.get("device", "cpu")
    together = processes > 1 or device == "cuda"
    if together:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(spec["port"])}
        own_gpu = device == "cuda" and torch.cuda.device_count() >= processes
        if own_gpu:
            torch.cuda.set_device(process)
        backend = "cpu:gloo,cuda:nccl" if own_gpu else "gloo"
        torch.distributed.init_process_group(backend, rank=process, world_size=processes)
    model = network().to(device)
    if together and spec["spread"] == "fsdp":
        mesh = torch.distributed.device_mesh.init_device_mesh(device, (processes,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif together:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with islands.torch.join(
        spec["address"],
        model,
        optimizer,
        run=spec["run"],
        island_id=spec["island"],
        tokens_per_step=ROWS,
        state_dir=spec.get("state_dir"),
        checkpoint_interval_s=spec.get("checkpoint_interval_s", 60.0),
        donor_wait_s=0.0,
        timeout_s=60.0,
    ) as island:
        say(event="restored", source=island.restored, step=island.inner_step, cursor=island.restored_cursor)
        while not island.done:
            at_s = time.perf_counter()
            inputs, wanted = (rows.to(device) for rows in rows_of(island.share.take()))
            each = slice(process * ROWS // processes, (process + 1) * ROWS // processes)
            optimizer.zero_grad()
            loss = (model(inputs[each]) - wanted[each]).square().mean()
            loss.backward()
            optimizer.step()
            time.sleep(max(0.0, spec.get("pace_s", 0.0) - (time.perf_counter() - at_s)))
            island.step(tokens=ROWS, loss=loss)
            say(
                event="step",
                step=island.inner_step,
                loss=loss.item(),
                versions=island.versions,
                done=island.done,
                cursor=island.share.cursor,
                schedule=island.schedule_step,
                sync=island.sync_share,
            )
    with torch.no_grad():
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        total = float(sum(p.double().sum() for p in whole))
    say(event="ended", step=island.inner_step, versions=island.versions, sum=total, sync=island.sync_share)
    if together:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
