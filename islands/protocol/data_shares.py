"""The island's side of data shares and blocks: the next batch, and the batches of each step. Pure.

Where the data go out in blocks, an island trains one after the other. Where each island has a share for the whole run,
it trains its own and, in turn, those that it has taken over from islands that are away: a few batches of one, then of
the next. Which batch a step was trained on is written down, so that each contribution can say it: that is
how the run knows from where on a share goes to its next owner, and that no batch is merged twice
(:mod:`aggregator.ledger.data_shares`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import SupportsIndex

from broker.wire.errors import LocalProtocolError
from broker.wire.messages import OWN_PASS, Block, DataRange, Share
from broker.wire.schema import MAX_DATA_RANGES

#: Between the orders of two passes over the data: far from the seeds that people choose.
LANE_SEED = 1_000_003
#: Batches of a pass of one's own after one block, at most, and blocks after which their numbers come again: the product
#: with the tokens of a batch is far below 2**63, so that no task's arithmetic overflows.
_OWN_BATCHES, _OWN_PASSES = 1 << 20, 1 << 16
#: Batches of one share in a row, where there are several: what is written down stays short.
IN_A_ROW = 8


@dataclass(frozen=True, slots=True)
class TrainedBatch:
    """One batch: number ``batch`` of share number ``share``, which is this island's under ``share_epoch``."""

    share: int
    share_epoch: int
    batch: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """The next batch of a share under one ``share_epoch``: all before ``batch`` are trained."""

    share: int
    share_epoch: int
    batch: int


def number_of(share: Share | Block) -> int:
    """Returns the number by which a share or a block is known to all."""
    return share.number if isinstance(share, Block) else share.lane * share.count + share.index


def _identity(share: Share | Block) -> tuple[int, int]:
    return number_of(share), 0 if isinstance(share, Block) else share.share_epoch


@dataclass(slots=True, kw_only=True)
class DataShare:
    """The next batches to train: a live view, written by the island's loop and read by data generators.

    Batch number ``cursor`` of part ``index`` of ``count`` is always the same batch. A generator either calls
    :meth:`take` for each batch, and may then be ahead of training; or it reads ``index``, ``count``, ``cursor`` and
    ``seed`` anew at each batch, not ahead. One that counts by itself trains the right data only until the cursor jumps
    (:attr:`jumps`): to the next block of data, or to the part of an island that stays away, and back.

    Where the data go out in blocks, the part is all of the data: number 0 of 1. An island trains the blocks that it has
    one after the other. If there is none left it does not wait: it goes on in a pass of its own, with batches from
    :data:`~broker.wire.messages.OWN_PASS` on.

    The loop changes the fields between two batches, on the thread that trains: nobody sees half a change.

    Attributes:
        index: Which part, from 0.
        count: How many parts there are.
        share_epoch: Grows whenever this part changes hands.
        cursor: The next batch of it.
        seed: Of the data order; the same on all islands, but for those beyond the expected number that have a share.
        jumps: How often the next batch was not the one after the last one.
        takes: The generator calls :meth:`take`.
    """

    index: int
    count: int
    share_epoch: int = 0
    cursor: int = 0
    seed: int = 0
    jumps: int = 0
    takes: bool = False
    #: What it owns: shares, of which the first is at hand; or blocks that come after the one at hand.
    _held: list[Share | Block] = field(default_factory=list, repr=False)
    _in_a_row: int = field(default=0, repr=False)
    _ahead: deque[TrainedBatch] = field(default_factory=deque, repr=False)  # taken, and not trained yet
    _run_seed: int = field(default=0, repr=False)
    _by_blocks: bool = field(default=False, repr=False)
    _block: int = field(default=0, repr=False)  # number of the one that was begun last
    _block_ends: int = field(default=0, repr=False)  # its last batch, and one; there is none in a pass of one's own
    _at_hand: int = field(default=0, repr=False)  # number of the block that was trained last
    _asked_from: int = field(default=0, repr=False)
    _life: int = field(default=0, repr=False)
    _elsewhere: LocalProtocolError | None = field(default=None, repr=False)  # who goes on with the share is not here

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Returns what a copy is made of; an island's share has none, as only the island moves it on.

        Raises:
            LocalProtocolError: It is an island's.
        """
        if self._held or self._by_blocks:
            cure = "take batches where you join; of torch's DataLoader num_workers=0, or numbers as its batch_sampler"
            raise LocalProtocolError(f"a copy of island.share would stay where it is: {cure}")
        return object.__reduce_ex__(self, protocol)

    @classmethod
    def of(cls, shares: Sequence[Share | Block], seed: int, *, life: int = 0, by_blocks: bool = False) -> DataShare:
        """Returns the view of an island that owns these; the run's seed orders the data."""
        made = cls(index=0, count=1, seed=seed)
        made._run_seed = seed
        made._life, made._by_blocks = life, by_blocks
        made.hold(shares, life)
        made.jumps = 0
        return made

    def lose(self, error: LocalProtocolError) -> None:
        """This process was forked from the island's, and the share does not go on in it: :meth:`take` raises."""
        self._elsewhere = error

    def hold(self, shares: Sequence[Share | Block], life: int = 0) -> None:
        """Owns just these from now on; one that is held already, under the same epoch, goes on where it is.

        Args:
            shares: Shares; or blocks, of which there may be none.
            life: Incarnation of the island: numbers of blocks are those of one life.
        """
        if self._by_blocks:
            self._hold_blocks([each for each in shares if isinstance(each, Block)], life)
            return
        self._put_back()
        held = {_identity(share): share for share in self._held}
        at_hand = number_of(self._held[0]) if self._held else -1
        self._held = [held.get(_identity(share), share) for share in shares]
        self._held.sort(key=lambda share: number_of(share) != at_hand)
        self._show()

    def _hold_blocks(self, blocks: Sequence[Block], life: int) -> None:
        """The one at hand is trained on while it is among these; then come those that were not begun."""
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
            assert isinstance(block, Block)
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
        if self._by_blocks:
            batch = TrainedBatch(self._block, 0, self.cursor)
            self.cursor += 1
            if self.cursor == self._block_ends:
                self._next_block()
            return batch
        number = number_of(self._held[0]) if self._held else self.index
        batch = TrainedBatch(number, self.share_epoch, self.cursor)
        self.cursor += 1
        self._in_a_row += 1
        if len(self._held) > 1 and self._in_a_row >= IN_A_ROW:
            self._put_back()
            self._held.append(self._held.pop(0))
            self._show()
        return batch

    def trained(self) -> TrainedBatch:
        """A step was run: returns the batch it was trained on, which is the oldest taken, else the next one."""
        batch = self._ahead.popleft() if self._ahead else self._next()
        self._at_hand = batch.share
        return batch

    def runs_short(self) -> bool:
        """Returns True once for each block that is trained while no other one is known."""
        if not self._by_blocks or self._held or self._at_hand in (self._asked_from, 0):
            return False
        self._asked_from = self._at_hand
        return True

    def _put_back(self) -> None:
        if self._held:
            first = self._held[0]
            assert isinstance(first, Share)
            self._held[0] = replace(first, cursor=self.cursor)

    def _show(self) -> None:
        first = self._held[0]
        assert isinstance(first, Share)
        self.jumps += self.cursor != first.cursor or self.index != first.index
        self.index, self.count, self.share_epoch, self.cursor = (
            first.index,
            first.count,
            first.share_epoch,
            first.cursor,
        )
        self.seed, self._in_a_row = self._run_seed + first.lane * LANE_SEED, 0


class Trail:
    """The batches of each inner step that was not handed over yet."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, TrainedBatch, int]] = []  # (first step, its batch, how many of both in a row)
        self._ends_at = 0

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def shares(self) -> set[int]:
        """Numbers of the shares or blocks of these batches."""
        return {taken.share for _, taken, _ in self._runs}

    def add(self, step: int, taken: TrainedBatch) -> None:
        """Step number ``step`` (from 0) was trained on a batch; steps come in order."""
        if self._runs and step == self._ends_at:
            first, begun, num = self._runs[-1]
            if TrainedBatch(begun.share, begun.share_epoch, begun.batch + num) == taken:
                self._runs[-1] = first, begun, num + 1
                self._ends_at = step + 1
                return
        self._runs.append((step, taken, 1))
        self._ends_at = step + 1

    def data_of(self, from_step: int, to_step: int) -> tuple[DataRange, ...]:
        """Returns the batches of steps ``[from_step, to_step)``, by share; empty where not all are known.

        Also empty where they are in more pieces than a contribution may name, which no loop brings about that trains
        its shares in turn.
        """
        spans: dict[tuple[int, int], list[list[int]]] = {}
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
            so_far = spans.setdefault((taken.share, taken.share_epoch), [])
            if so_far and so_far[-1][1] == begins:
                so_far[-1][1] = ends
            else:
                so_far.append([begins, ends])
        if known != to_step - from_step or sum(map(len, spans.values())) > MAX_DATA_RANGES:
            return ()
        return tuple(
            DataRange(share=share, share_epoch=epoch, from_batch=a, to_batch=b)
            for (share, epoch), ranges in spans.items()
            for a, b in ranges
        )

    def forget(self, before_step: int) -> None:
        """Drops what is known of steps that nobody asks about any more."""
        del self._runs[: bisect_right(self._runs, before_step, key=lambda run: run[0] + run[2])]
