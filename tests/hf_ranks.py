"""Trains tasks of Hugging Face for some steps each, in one or several ranks, as a program of its own.

    python -m tests.hf_ranks '{"ranks": 2, "steps": 6, "tasks": {"whole": {"model": ..}}, "out": "FOLDER"}'

Of each task rank 0 writes the losses, and the parameters that a run would have, put together from all ranks.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from islands.protocol.data_shares import DataShare
from islands.tasks.task import Schedule, endless_batches, load_task
from islands.torch import ranks


def main(spec: dict) -> None:
    torch.set_num_threads(1)
    with ranks.started(spec["ranks"]) as rank:
        for name, options in spec["tasks"].items():
            found = trained(options, spec["steps"])
            if rank == 0:
                np.savez(Path(spec["out"]) / f"{name}.npz", **found)


def trained(options: dict, steps: int) -> dict:
    task = load_task("islands.hf:task", options)
    params, state = task.init(0)
    losses = []
    for step, batch in enumerate(islice(endless_batches(task, DataShare(index=0, count=1)), steps)):
        params, state, loss = task.train(params, state, batch, Schedule(step, steps))
        losses.append(float(loss))
    given = {name: leaf.given.detach() for name, leaf in params.items()}
    whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in given.items()}
    return {"losses": np.array(losses)} | {name: tensor.float().numpy() for name, tensor in whole.items()}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
