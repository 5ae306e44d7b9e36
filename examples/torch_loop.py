"""A PyTorch training loop that joins a run: the lines marked ``# atoll`` are all that it needed.

    python3 -m ops aggregator ... and broker, as in docs/quickstart.md, or an `up` that is running
    python -m examples.torch_loop tcp://127.0.0.1:7001     # here, and anywhere else

It learns to continue bytes of Python's own standard library. Without the marked lines it is a loop for one machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import islands.torch  # atoll

HISTORY, BATCH = 16, 256


def network() -> nn.Module:
    """Returns a neural probabilistic language model (Bengio et al., 2003) of bytes."""
    return nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(HISTORY * 32, 256), nn.Tanh(), nn.Linear(256, 256)
    )


def windows() -> Any:
    """Returns the examples, (N, HISTORY + 1) bytes each: every place in the sources of Python's library."""
    sources = sorted(Path(argparse.__file__).parent.glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in sources)[:2_000_000], np.uint8)
    return np.lib.stride_tricks.sliding_window_view(text, HISTORY + 1)


def batch_of(rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns examples as a batch: (N, HISTORY) bytes, and the one that follows each."""
    batch = torch.from_numpy(rows.astype(np.int64))
    return batch[:, :-1], batch[:, -1]


def main() -> None:
    """Trains until the run ends."""
    parser = argparse.ArgumentParser(description="A PyTorch loop as an island.")
    parser.add_argument("address", help="the broker, such as tcp://127.0.0.1:7001")
    parser.add_argument("--run", default="atoll", help="the run's name (default: %(default)s)")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    loss = torch.zeros(())
    examples = windows()
    with islands.torch.join(args.address, model, optimizer, run=args.run, tokens_per_step=BATCH) as island:  # atoll
        for rows in islands.batches(examples, island, batch=BATCH):  # atoll: in place of its own data
            history, following = batch_of(rows)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(history.to(device)), following.to(device))
            loss.backward()
            optimizer.step()
            island.step(loss)  # atoll
    print(f"done: loss {float(loss):.3f} nats per byte")


if __name__ == "__main__":
    main()
