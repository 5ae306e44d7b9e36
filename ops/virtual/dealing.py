"""The data dealt in a simulated run: invariant 2 (reference.md, section 10).

An observer, like :mod:`ops.virtual.invariants`: of what aggregators give, what islands are told, and what they train.
All islands of a simulated run have batches of the same size, so a place in the data is the number of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aggregator.ledger.data_blocks import DataBlocks
from broker.wire.messages import OWN_PASS, Block, DataRange
from broker.wire.ranges import IntervalSet
from islands.protocol.data_shares import TrainedBatch


class Dealing:
    """The observer. Each method returns in words what does not hold, and an empty text where all is well.

    Attributes:
        blocks: Number -> who was told of it, and its batches.
        own: Batches that islands trained in passes of their own.
        most_given: Blocks that were in use at the same time, at most.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[str, Block]] = {}
        self.own = self.most_given = 0
        self._places = IntervalSet()  # trained by anybody
        self._trained: dict[int, int] = {}  # block -> one past the furthest batch
        self._seen: dict[str, tuple[list[tuple[int, int]], int]] = {}  # life -> what was left, and the end

    def told(self, island_id: str, blocks: Sequence[Block]) -> str:
        """An island is told its blocks: the number of a block stands for one island and one end."""
        for block in blocks:
            owner, first = self.blocks.setdefault(block.number, (island_id, block))
            if (owner, first.to_batch) != (island_id, block.to_batch):
                return f"{island_id} is told of {block}, which is {first} of {owner}"
        return ""

    def trained(self, taken: TrainedBatch) -> str:
        """An island has trained a batch: the next one of a block, or one of a pass of its own."""
        if taken.batch >= OWN_PASS:
            self.own += 1
            return ""
        if taken.block not in self.blocks:
            return f"batch {taken.batch} is of block {taken.block}, which nobody was told of"
        owner, block = self.blocks[taken.block]
        known = self._trained.get(taken.block, block.from_batch)
        if not block.from_batch <= taken.batch < block.to_batch or taken.batch > known:
            return f"{owner} trains batch {taken.batch} of {block}, where {known} comes next"
        if taken.batch == known:
            self._trained[taken.block] = known + 1
            _add(self._places, taken.batch, taken.batch + 1)
        return ""

    def merged(self, data: DataRange) -> str:
        """Batches are merged: they must have been trained."""
        if data.from_batch >= OWN_PASS or data.to_batch <= self._trained.get(data.share, 0):
            return ""
        return f"{data} was never trained"

    def dealt(self, life: str, blocks: DataBlocks) -> str:
        """Nothing new was given out while something was left of what had been lost."""
        left, end = self._seen.get(life, ([], blocks.end))
        self._seen[life] = (list(blocks.left), blocks.end)
        self.most_given = max(self.most_given, len(blocks.decided))
        if blocks.end > end and any(piece in blocks.left for piece in left):
            return f"batches from {end} on are given out while {blocks.left} are left"
        return ""

    def passed_over(self, blocks: DataBlocks) -> str:
        """At the end: what was given out was trained, is in somebody's hands, or is there to be given."""
        every = IntervalSet(self._places)
        held = ((t.cursor, t.to_batch) for t in blocks.tenures())
        unit = max(1, blocks.unit or 0)
        for start, end in (*held, *((a // unit, b // unit) for a, b in blocks.left)):
            _add(every, start, end)
        lacking = "" if not blocks.end else f"of {blocks.end // unit} batches only {every} are accounted for"
        return "" if every.covers(0, blocks.end // unit) else lacking


def _add(known: IntervalSet, start: int, end: int) -> None:
    """Adds a range, but for its parts that are there already."""
    for a, b in list(_missing(known, start, end)):
        known.add(a, b)


def _missing(known: IntervalSet, start: int, end: int) -> Iterable[tuple[int, int]]:
    for a, b in known:
        if b <= start:
            continue
        if a >= end:
            break
        if start < a:
            yield start, a
        start = max(start, b)
    if start < end:
        yield start, end
