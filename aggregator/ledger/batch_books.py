"""Batches that were merged or wait to be: by fragment and block of the data. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

from broker.wire.messages import OWN_PASS, DataRange
from broker.wire.ranges import IntervalSet

#: Intervals kept of one block on one fragment, as of one island (:mod:`aggregator.ledger.lives`).
MOST_INTERVALS = 32


class BatchBooks:
    """Books of numbered blocks of the data, each of numbered batches.

    What islands train in a pass of their own is in none: no such batch is anybody else's.
    """

    def __init__(self) -> None:
        self._merged: dict[tuple[int, int], IntervalSet] = {}  # (fragment, block) -> batches
        self._waiting: dict[tuple[int, int], set[tuple[int, int]]] = {}
        self._fragments: set[int] = set()  # of which any batch is known

    def overlap(self, fragment_id: int, data: Iterable[DataRange]) -> str:
        """Says which batches were merged before, wait to be, or are named twice; empty if none."""
        own: dict[int, IntervalSet] = {}
        for d in _given(data):
            merged = self._merged.get((fragment_id, d.share), IntervalSet())
            here = own.setdefault(d.share, IntervalSet())
            known = merged.overlaps(d.from_batch, d.to_batch) or here.overlaps(d.from_batch, d.to_batch)
            if known or self._waits(fragment_id, d.share, d.from_batch, d.to_batch):
                return f"{batches_of(d)} were handed over before, in part"
            here.add(d.from_batch, d.to_batch)
        return ""

    def wait(self, fragment_id: int, data: Iterable[DataRange]) -> None:
        """Takes note of batches that arrived."""
        self._fragments.add(fragment_id)
        for d in _given(data):
            self._waiting.setdefault((fragment_id, d.share), set()).add((d.from_batch, d.to_batch))

    def refuse(self, fragment_id: int, data: Iterable[DataRange]) -> None:
        """Frees the batches of a waiting contribution that is refused after all."""
        for d in data:
            self._waiting.get((fragment_id, d.share), set()).discard((d.from_batch, d.to_batch))

    def merge(self, fragment_id: int, data: Iterable[DataRange]) -> None:
        """Books batches as merged into a fragment; a second time would be a bug here, and ends in an error."""
        self._fragments.add(fragment_id)
        data = _given(data)
        if not data:
            return
        self.refuse(fragment_id, data)
        for d in data:
            self._merged.setdefault((fragment_id, d.share), IntervalSet()).add(d.from_batch, d.to_batch)
        for n in {d.share for d in data}:
            self._merged[fragment_id, n].close_gaps(MOST_INTERVALS, partial(self._waits, fragment_id, n))

    def reached(self, n: int) -> int:
        """Returns the furthest batch of a block that was merged or waits to be, on any fragment: one past it."""
        ends = [self._merged[p, n].end for p in self._fragments if (p, n) in self._merged]
        ends += [end for p in self._fragments for _, end in self._waiting.get((p, n), ())]
        return max([0, *ends])

    def keep(self, blocks: Collection[int]) -> None:
        """Forgets all blocks but these."""
        self._merged = {key: batches for key, batches in self._merged.items() if key[1] in blocks}
        self._waiting = {key: batches for key, batches in self._waiting.items() if key[1] in blocks}

    def slice(self, fragment_id: int) -> dict[str, list[list[int]]]:
        """Returns the batches merged into one fragment, by block, as plain data for its commit."""
        return {
            str(n): list(map(list, self._merged[fragment_id, n]))
            for n in sorted(n for p, n in self._merged if p == fragment_id)
        }

    def restore(self, slices: Mapping[int, Mapping[str, Any]]) -> None:
        """Reads the fragments' slices back."""
        for p, rows in slices.items():
            self._fragments.add(p)
            for n, intervals in rows.items():
                self._merged[p, int(n)] = IntervalSet((a, b) for a, b in intervals)

    def _waits(self, fragment_id: int, n: int, from_batch: int, to_batch: int) -> bool:
        """Whether a contribution that waits to be merged was trained on any of these batches."""
        return any(a < to_batch and from_batch < b for a, b in self._waiting.get((fragment_id, n), ()))


def _given(data: Iterable[DataRange]) -> tuple[DataRange, ...]:
    return tuple([d for d in data if d.from_batch < OWN_PASS])


def batches_of(data: DataRange) -> str:
    """Names a range for people."""
    return f"batches [{data.from_batch}, {data.to_batch}) of share {data.share}"
