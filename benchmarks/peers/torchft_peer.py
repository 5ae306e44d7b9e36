"""A replica of torchft's DiLoCo, on CPU with gloo. Runs in an environment with torchft alone."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from benchmarks.peers.loop import COLUMNS, TENSORS, Lines, System, resting_bytes, rows_of, train


class Replica(System):
    """One replica; every time-out is the default."""

    def __init__(self, args: argparse.Namespace, lines: Lines) -> None:
        torch.set_num_threads(1)
        rows = rows_of(args.parameters)
        each = TENSORS // args.fragments
        self.model = nn.ModuleList(
            nn.ParameterList([torch.zeros(rows, COLUMNS) for _ in range(each)]) for _ in range(args.fragments)
        )
        parameters = list(self.model.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[0] = 1.0
        self._inner = torch.optim.SGD(parameters, lr=1e-3)
        lines.say("resting", bytes=resting_bytes())
        store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
        self._manager: Any = Manager(
            pg=ProcessGroupGloo(),
            min_replica_size=1,
            use_async_quorum=False,
            load_state_dict=lambda state: self.model.load_state_dict(state),
            state_dict=lambda: self.model.state_dict(),
            replica_id=f"peer-{args.number}",
            lighthouse_addr=args.coordinator,
            store_addr="127.0.0.1",
            store_port=store.port,
            rank=0,
            world_size=1,
        )
        self._store = store
        outer: Any = [
            torch.optim.SGD(list(part.parameters()), lr=0.7, momentum=0.9, nesterov=True) for part in self.model
        ]
        self._diloco: Any = DiLoCo(
            self._manager,
            list(self.model),
            self._inner,
            outer,
            sync_every=args.interval,
            use_bucketization=True,
            fragment_sync_delay=args.delay,
        )
        self._watch(lines)
        self._diloco.__enter__()

    def _watch(self, lines: Lines) -> None:
        """Notes when a sync begins, with its quorum, and when what came of it is in the parameters."""
        begin, began_s = self._manager.start_quorum, [0.0]

        def start_quorum(*args: Any, **kwargs: Any) -> Any:
            began_s[0] = time.monotonic()
            return begin(*args, **kwargs)

        self._manager.start_quorum = start_quorum
        for number, fragment in enumerate(self._diloco._fragments):
            perform = fragment.perform_sync

            def perform_sync(perform: Any = perform, number: int = number) -> bool:
                committed = bool(perform())
                taking = self._manager.num_participants()
                lines.say("synced", fragment=number, capture_s=began_s[0], committed=committed, peers=taking)
                return committed

            fragment.perform_sync = perform_sync

    def change(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                parameter.grad[0] = 1.0

    def step(self) -> None:
        self._inner.step()

    def poison(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(float("nan"))

    def finite(self) -> bool:
        return all(bool(torch.isfinite(each[-1, -1])) for each in self.model.parameters())


if __name__ == "__main__":
    train(Replica)
