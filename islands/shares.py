"""Which batch is trained next, and what was trained in which step: an island's side of its data shares. Pure.

An island trains its own share and, in turn, those that it has taken over from islands that are away: a few batches of
one, then of the next. Which batch a step was trained on is written down, so that each contribution can say it: that is
how the run knows from where on a share goes to its next owner, and that no batch is merged twice
(:mod:`aggregator.shares`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from broker.messages import DataRange, Share

#: Batches of one share in a row, where there are several: what is written down stays short.
IN_A_ROW = 8


@dataclass(frozen=True, slots=True)
class Taken:
    """One batch: number ``batch`` of share number ``share``, which is this island's under ``share_epoch``."""

    share: int
    share_epoch: int
    batch: int


def number_of(share: Share) -> int:
    """Returns the number by which a share is known to all."""
    return share.lane * share.count + share.index


class Trail:
    """What was trained on in each inner step, until it has been handed over."""

    def __init__(self) -> None:
        self._runs: deque[tuple[int, Taken, int]] = deque()  # (first step, its batch, how many of both in a row)
        self._ends_at = 0

    def add(self, step: int, taken: Taken) -> None:
        """Step number ``step`` (from 0) was trained on a batch; steps come in order."""
        if self._runs and step == self._ends_at:
            first, begun, num = self._runs[-1]
            if Taken(begun.share, begun.share_epoch, begun.batch + num) == taken:
                self._runs[-1] = first, begun, num + 1
                self._ends_at = step + 1
                return
        self._runs.append((step, taken, 1))
        self._ends_at = step + 1

    def data_of(self, from_step: int, to_step: int) -> tuple[DataRange, ...]:
        """Returns the batches of steps ``[from_step, to_step)``, by share; empty where not all are known."""
        spans: dict[tuple[int, int], list[list[int]]] = {}
        known = 0
        runs: Sequence[tuple[int, Taken, int]] = list(self._runs)
        for first, taken, num in runs[max(0, bisect_right(runs, from_step, key=lambda run: run[0]) - 1) :]:
            a, b = max(first, from_step), min(first + num, to_step)
            if a >= b:
                continue
            known += b - a
            begins, ends = taken.batch + a - first, taken.batch + b - first
            so_far = spans.setdefault((taken.share, taken.share_epoch), [])
            if so_far and so_far[-1][1] == begins:
                so_far[-1][1] = ends
            else:
                so_far.append([begins, ends])
        if known != to_step - from_step:
            return ()
        return tuple(
            DataRange(share=share, share_epoch=epoch, from_batch=a, to_batch=b)
            for (share, epoch), ranges in spans.items()
            for a, b in ranges
        )

    def forget(self, before_step: int) -> None:
        """Drops what is known of steps that nobody asks about any more."""
        while self._runs and self._runs[0][0] + self._runs[0][2] <= before_step:
            self._runs.popleft()
