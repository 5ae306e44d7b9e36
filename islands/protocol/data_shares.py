"""The island's side of blocks of data: the next batch, and the batches of each step. Pure.

An island trains one block after the other. Which batch a step was trained on is written down, so that each contribution
can say it: that is how the run knows what is left of a block, and that no batch is merged twice
(:mod:`aggregator.ledger.data_blocks`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex

from broker.base.errors import LocalProtocolError
from broker.wire.messages import OWN_PASS, Block, DataRange
from broker.wire.schema import MAX_DATA_RANGES

#: Batches of a pass of one's own after one block, at most, and blocks after which their numbers come again: the product
#: with the tokens of a batch is far below 2**63, so that no task's arithmetic overflows.
_OWN_BATCHES, _OWN_PASSES = 1 << 20, 1 << 16


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """One batch, of a block of this island's."""

    block: int
    batch: int


@dataclass(slots=True, kw_only=True)
class DataShare:
    """The next batches to train: a live view, written by the island's loop and read by data generators.

    Batch number ``cursor`` of part ``index`` of ``count`` is always the same batch. A generator either calls
    :meth:`take` for each batch, and may then be ahead of training; or it reads ``index``, ``count``, ``cursor`` and
    ``seed`` anew at each batch, not ahead. One that counts by itself trains the right data only until the cursor jumps
    (:attr:`jumps`) to the next block.

    The part of an island is all of the data: number 0 of 1. An island trains the blocks that it has one after the
    other. If there is none left it does not wait: it goes on in a pass of its own, with batches from
    :data:`~broker.wire.messages.OWN_PASS` on.

    The loop changes the fields between two batches, on the thread that trains: nobody sees half a change.

    Attributes:
        index: Which part, from 0.
        count: How many parts there are.
        cursor: The next batch of it.
        seed: Of the data order; the same on all islands.
        own: The next batch of data that this island alone has: one more with each batch, from one life to the next.
        jumps: How often the next batch was not the one after the last one.
        takes: The generator calls :meth:`take`.
    """

    index: int
    count: int
    cursor: int = 0
    seed: int = 0
    own: int = 0
    jumps: int = 0
    takes: bool = False
    _held: list[Block] = field(default_factory=list, repr=False)  # that come after the one at hand
    _ahead: deque[TrainedBatch] = field(default_factory=deque, repr=False)  # taken, and not trained yet
    _block: int = field(default=0, repr=False)  # number of the one that was begun last
    _block_ends: int = field(default=0, repr=False)  # its last batch, and one; there is none in a pass of one's own
    _at_hand: int = field(default=0, repr=False)  # number of the block that was trained last
    _asked_from: int = field(default=0, repr=False)
    _life: int = field(default=0, repr=False)  # of the island; 0: it is no island's
    _elsewhere: LocalProtocolError | None = field(default=None, repr=False)  # who goes on with the share is not here

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Refuses copies: only the island itself may move its share on.

        Raises:
            LocalProtocolError: It is an island's.
        """
        if self._life:
            cure = "take batches where you join; of torch's DataLoader num_workers=0, or numbers as its batch_sampler"
            raise LocalProtocolError(f"a copy of island.share would stay where it is: {cure}")
        return object.__reduce_ex__(self, protocol)

    @classmethod
    def of(cls, blocks: Sequence[Block], seed: int, *, life: int, own: int = 0) -> DataShare:
        """Returns the view of an island that owns these; the run's seed orders the data.

        Args:
            blocks: As for :meth:`hold`, with the ``life``.
            seed: Of the run.
            life: Incarnation of the island.
            own: Inner steps of its lives before.
        """
        made = cls(index=0, count=1, seed=seed, own=own)
        made.hold(blocks, life)
        made.jumps = 0
        return made

    def lose(self, error: LocalProtocolError) -> None:
        """Makes :meth:`take` raise, in a process that was forked from the island's."""
        self._elsewhere = error

    def hold(self, blocks: Sequence[Block], life: int) -> None:
        """Owns just these from now on: the one at hand, while it is among them, then those not begun.

        Args:
            blocks: There may be none.
            life: Incarnation of the island: numbers of blocks are those of one life.
        """
        if life != self._life:
            self._life, self._block = life, 0
        kept = any(block.number == self._block for block in blocks)
        self._held = [block for block in blocks if block.number > self._block]
        if not kept or self.cursor >= OWN_PASS:
            self._next_block()

    def _next_block(self) -> None:
        """Goes on to the next block that was not trained to its end, or else to a pass of one's own."""
        own = OWN_PASS + self._block % _OWN_PASSES * _OWN_BATCHES
        while self._held:
            block = self._held.pop(0)
            self._block, self._block_ends = block.number, block.to_batch
            if block.from_batch < block.to_batch:
                self._jump(block.from_batch)
                return
            own = max(block.from_batch, OWN_PASS + self._block % _OWN_PASSES * _OWN_BATCHES)
        if self.cursor < OWN_PASS:
            self._jump(own)

    def _jump(self, cursor: int) -> None:
        self.jumps += cursor != self.cursor
        self.cursor = cursor

    def take(self) -> tuple[int, int, int, int]:
        """Returns index, count, cursor and seed of the next batch, and goes on to the one after it.

        Raises:
            LocalProtocolError: This process was forked from the island's.
        """
        if self._elsewhere is not None:
            raise self._elsewhere
        self.takes = True
        taken = self.index, self.count, self.cursor, self.seed
        self._ahead.append(self._next())
        return taken

    def _next(self) -> TrainedBatch:
        """Returns the next batch, and goes on to the one after it."""
        batch = TrainedBatch(self._block, self.cursor)
        self.cursor += 1
        self.own += 1
        if self.cursor == self._block_ends:
            self._next_block()
        return batch

    def trained(self) -> TrainedBatch:
        """Returns the batch that a step was trained on: the oldest one taken, else the next one."""
        batch = self._ahead.popleft() if self._ahead else self._next()
        self._at_hand = batch.block
        return batch

    def runs_short(self) -> bool:
        """Returns True once for each block that is trained while no other one is known."""
        if self._held or self._at_hand in (self._asked_from, 0):
            return False
        self._asked_from = self._at_hand
        return True


class Trail:
    """The batches of each inner step that was not handed over yet."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, TrainedBatch, int]] = []  # (first step, its batch, how many of both in a row)
        self._ends_at = 0

    @property
    def blocks(self) -> set[int]:
        """Numbers of the blocks of these batches."""
        return {taken.block for _, taken, _ in self._runs}

    def add(self, step: int, taken: TrainedBatch) -> None:
        """Notes the batch of step number ``step`` (from 0); steps come in order."""
        if self._runs and step == self._ends_at:
            first, begun, num = self._runs[-1]
            if TrainedBatch(begun.block, begun.batch + num) == taken:
                self._runs[-1] = first, begun, num + 1
                self._ends_at = step + 1
                return
        self._runs.append((step, taken, 1))
        self._ends_at = step + 1

    def data_of(self, from_step: int, to_step: int) -> tuple[DataRange, ...]:
        """Returns the batches of steps ``[from_step, to_step)``, by block; empty where not all are known.

        Also empty where they are in more pieces than a contribution may name, which no loop brings about that trains
        one block after the other.
        """
        spans: dict[int, list[list[int]]] = {}
        known = 0
        runs = self._runs
        for i in range(max(0, bisect_right(runs, from_step, key=lambda run: run[0]) - 1), len(runs)):
            first, taken, num = runs[i]
            if first >= to_step:
                break
            a, b = max(first, from_step), min(first + num, to_step)
            if a >= b:
                continue
            known += b - a
            begins, ends = taken.batch + a - first, taken.batch + b - first
            so_far = spans.setdefault(taken.block, [])
            if so_far and so_far[-1][1] == begins:
                so_far[-1][1] = ends
            else:
                so_far.append([begins, ends])
        if known != to_step - from_step or sum(map(len, spans.values())) > MAX_DATA_RANGES:
            return ()
        return tuple(
            DataRange(share=block, share_epoch=0, from_batch=a, to_batch=b)
            for block, ranges in spans.items()
            for a, b in ranges
        )

    def forget(self, before_step: int) -> None:
        """Drops the data ranges of steps that are no longer needed."""
        del self._runs[: bisect_right(self._runs, before_step, key=lambda run: run[0] + run[2])]
