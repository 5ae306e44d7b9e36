"""A peer of hivemind's averager. Runs in an environment that has hivemind, without Atoll's packages.

Every peer averages its parameters with the others' after an interval, in the foreground: the averager has no outer
optimizer of its own. The first peer is where others find the network (its DHT).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import hivemind
import torch

from benchmarks.peers.loop import COLUMNS, TENSORS, Lines, System, resting_bytes, rows_of, train

#: Of one averaging: who is alone gives up then, and trains on.
AVERAGE_WITHIN_S = 60.0


class Averager(System):
    """One peer; its matchmaking takes two seconds or more, the least that its request time-out allows."""

    def __init__(self, args: argparse.Namespace, lines: Lines) -> None:
        torch.set_num_threads(1)
        rows = rows_of(args.parameters)
        tensors = [torch.zeros(rows, COLUMNS) for _ in range(TENSORS)]
        lines.say("resting", bytes=resting_bytes())
        known = Path(args.coordinator)  # a file with the address of the peer that was there first
        peers = known.read_text(encoding="utf-8").split() if args.number else []
        self._dht = hivemind.DHT(initial_peers=peers, start=True)
        if not args.number:
            temporary = known.with_suffix(".tmp")
            temporary.write_text("\n".join(map(str, self._dht.get_visible_maddrs())), encoding="utf-8")
            temporary.rename(known)
        self._averager = hivemind.averaging.DecentralizedAverager(
            tensors,
            self._dht,
            start=True,
            prefix="benchmark",
            target_group_size=2,
            min_matchmaking_time=2.0,
            request_timeout=1.0,
            allreduce_timeout=AVERAGE_WITHIN_S,
        )
        self._interval, self._steps, self._lines = args.interval, 0, lines

    def change(self) -> None:
        with self._averager.get_tensors() as tensors, torch.no_grad():
            for each in tensors:
                each[0] -= 1e-3

    def step(self) -> None:
        self._steps += 1
        if self._steps % self._interval:
            return
        began_s = time.monotonic()
        try:
            gathered = self._averager.step(timeout=AVERAGE_WITHIN_S, allow_retries=False)
        except Exception as err:  # noqa: BLE001 (whatever a peer's loss makes of it, training goes on)
            self._lines.say("unsynced", error=f"{type(err).__name__}: {err}"[:200])
            return
        taking = len(gathered) if gathered else 0
        self._lines.say("synced", fragment=0, capture_s=began_s, committed=taking > 1, peers=taking)

    def poison(self) -> None:
        with self._averager.get_tensors() as tensors, torch.no_grad():
            for each in tensors:
                each.fill_(float("nan"))

    def finite(self) -> bool:
        with self._averager.get_tensors() as tensors:
            return all(bool(torch.isfinite(each[-1, -1])) for each in tensors)


if __name__ == "__main__":
    train(Averager)
