"""Blocks of data: owners, sizes, and the fate of lost ones (reference.md, section 8.7).

The whole data is one sequence of batches, pass after pass, in an order that all islands share. It goes out in *blocks*
of some seconds of training each, as islands ask for them: who is twice as fast is given twice the data, and who joins
in mid-run what nobody had yet. An island has a block to train and the next one, so that it never waits.

*One owner, ever.* A block's number belongs to one life of one island. It ends when its island needs it no more, or is
away for long, has left or begins a new life. What was not merged of it then, from the furthest batch
on that was merged or waits to be, goes out again under another number, and before anything new: so nobody trains a
batch of the next pass before all of the present one were handed out. What is trained under a number that has ended is
refused (``share_moved``). A block is durable before its island hears of it, and the books of one that has ended stay
until that is durable.

*Unlike batches.* Places in the sequence are counted in tokens where the first island says how many a batch has, else
in batches. Each island counts batches of its own size from the beginning of the sequence. Between blocks of islands
with unlike batches up to one batch is left out of a pass.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aggregator.interface.notes import BlockEnded, BlockGiven
from aggregator.ledger.batch_books import BatchBooks, batches_of
from broker.wire import messages
from broker.wire.messages import OWN_PASS, Block, DataRange, Reason

#: A block has at least the batches of so many parts of a sync interval: a contribution names all that it spans.
PIECES = 16
#: Batches of one block, at most.
MOST_BATCHES = 1 << 20
#: Numbers of the blocks that are given under one epoch: what is not durable, or given up with a lineage, is not reused.
NUMBERS_PER_EPOCH = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Batches ``[from_batch, to_batch)`` of ``tokens`` each, an island's; empty ``owner``: about to end."""

    owner: str
    from_batch: int
    to_batch: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """One island, as far as its data are concerned.

    Attributes:
        away_s: Seconds since it was heard; infinite once it has left.
        able: It trains now, and what it trains is merged, so it can be given a block.
        batch_tokens: Tokens in one of its batches; 0: it has not said.
        step_time_s: Of its inner steps; None: not known yet.
        block: Number of the block that it trains.
        released: Numbers of blocks that it needs no more.
    """

    island_id: str
    away_s: float
    able: bool
    batch_tokens: int = 0
    step_time_s: float | None = None
    block: int = 0
    released: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """A block was given to an island, or has ended: batches from ``reached`` on can be given again."""

    block: int
    given: Given
    reached: int = 0
    because: str = ""

    def note(self) -> BlockGiven | BlockEnded:
        """Returns it for the tape."""
        given = self.given
        if not self.because:
            return BlockGiven(
                block=self.block,
                to_batch=given.to_batch,
                batch_tokens=given.tokens,
                from_batch=given.from_batch,
                owner=given.owner,
            )
        return BlockEnded(
            block=self.block,
            to_batch=given.to_batch,
            batch_tokens=given.tokens,
            reached=self.reached,
            before=given.owner,
            reason=self.because,
        )


class DataBlocks:
    """Every block of a run that is in use, and what of the data was not given to anybody yet.

    Args:
        ahead_s: Seconds of training for which an island is to have data, in two blocks.
        sync_interval: Inner steps between two merges of a fragment: the length of the first blocks of an island.
        takeover_s: Absence after which an island's blocks end; 0: never.
        alone: Whether there is one aggregator shard. With several a block ends in two steps
            (:mod:`aggregator.rounds.roster`): first it is nobody's, and when every shard knows that and has said how
            far it was trained, what is left of it may be given.

    Attributes:
        batches: Those that were merged, and that wait to be.
        decided: Block -> who has it, from now on.
        durable: Block -> who has it, as islands may be told.
        left: Places that were given and lost, [from, to), in order: they go out before anything new.
        end: The first place that was never given to anybody.
        unit: Tokens in a batch of the first island; 0: it does not say; None: none has come.
    """

    def __init__(self, ahead_s: float, sync_interval: int, takeover_s: float, *, alone: bool = True) -> None:
        self.batches = BatchBooks()
        self.left: list[tuple[int, int]] = []
        self.end = 0
        self._block_s = ahead_s / 2
        self._interval = sync_interval
        self._takeover_s = takeover_s
        self._alone = alone
        self.unit: int | None = None
        self._next = 1
        self.decided: dict[int, Given] = {}
        self.durable: Mapping[int, Given] = {}
        self._by_owner: dict[str, set[int]] = {}  # of what is decided
        self._durable_of: dict[str, set[int]] = {}  # likewise, of what is durable
        self._told: dict[str, tuple[Block, ...]] = {}  # what islands are told of that, once they have asked
        self._saving: list[tuple[int, dict[int, Given]]] = []  # serial of a run record -> what it says
        self._free_at: dict[int, int] = {}  # block of nobody -> serial of the record that says so first
        self._agreed_serial = 0
        self._elsewhere: dict[int, int] = {}  # block -> furthest batch on the fragments of other shards

    # --- dealing ----------------------------------------------------------------------------------------------

    def join(self, island_id: str, batch_tokens: int = 0) -> list[Dealt]:
        """A new life of an island begins with a block; those of an earlier life end."""
        dealt = [each for n in self._of(island_id) for each in self._end(n, "its island begins a new life")]
        return [*dealt, self._give(island_id, batch_tokens, self._interval)]

    def resume(self, island_id: str, batch_tokens: int = 0) -> list[Dealt]:
        """Gives a life that goes on after a pause a block to begin with, if its own have ended."""
        return [] if self._of(island_id) else [self._give(island_id, batch_tokens, self._interval)]

    def leave(self, island_id: str) -> None:
        """Takes an island's blocks away, the first step of its joining with several shards."""
        for n in self._of(island_id):
            self._end(n, "its island begins a new life")

    def settle(self, present: Sequence[Presence]) -> list[Dealt]:
        """Ends blocks that are no longer needed or trained, and gives new ones to islands on their last one."""
        agreed = [n for n in self.nobodys() if self._free_at.get(n, math.inf) <= self._agreed_serial]
        dealt = [self._finish(n, self.decided[n], "every shard knows") for n in agreed]
        by_id = {p.island_id: p for p in present}
        dealt += self._end_of([n for n, given in self.decided.items() if given.owner], by_id)
        return dealt + self._give_to(present)

    def settle_some(self, changed: Sequence[Presence]) -> list[Dealt]:
        """Settles as :meth:`settle`, for these islands alone: changed, or away for longer than they may be."""
        numbers = sorted(n for p in changed for n in self._of(p.island_id))
        dealt = self._end_of(numbers, {p.island_id: p for p in changed})
        return dealt + self._give_to(sorted(changed, key=lambda p: p.island_id))

    def _end_of(self, numbers: Iterable[int], by_id: Mapping[str, Presence]) -> list[Dealt]:
        dealt: list[Dealt] = []
        for n in numbers:
            because = self._why_ended(n, by_id.get(self.decided[n].owner))
            dealt += self._end(n, because) if because else []
        return dealt

    def _give_to(self, present: Iterable[Presence]) -> list[Dealt]:
        return [
            self._give(p.island_id, p.batch_tokens, self._batches(p.step_time_s))
            for p in present
            if p.able and max(self._of(p.island_id), default=0) <= p.block
        ]

    def _why_ended(self, n: int, owner: Presence | None) -> str:
        """Says why a block ends now; empty if it does not."""
        if owner is None or n in owner.released:
            return "its island needs it no more"
        if not self._takeover_s or owner.away_s < self._takeover_s:
            return ""
        return "its island has left" if math.isinf(owner.away_s) else f"its island is away for {owner.away_s:.0f} s"

    def _batches(self, step_time_s: float | None) -> int:
        """Returns how many batches the next block of an island has."""
        if not step_time_s:
            return self._interval
        return min(MOST_BATCHES, max(math.ceil(self._interval / PIECES), math.ceil(self._block_s / step_time_s)))

    def _give(self, island_id: str, batch_tokens: int, batches: int) -> Dealt:
        """Gives an island the next batches: the rests of ended blocks first, then new ones."""
        if self.unit is None:
            self.unit = batch_tokens
        tokens = (batch_tokens or self.unit) if self.unit else 1
        from_batch, to_batch = self._cut(tokens, batches)
        n, self._next = self._next, self._next + 1
        given = Given(owner=island_id, from_batch=from_batch, to_batch=to_batch, tokens=tokens)
        self._put(n, given)
        return Dealt(block=n, given=given)

    def _cut(self, tokens: int, batches: int) -> tuple[int, int]:
        while self.left:
            start, end = self.left.pop(0)
            first = -(-start // tokens)
            last = min(first + batches, end // tokens)
            if first < last:
                if last * tokens < end:
                    self.left.insert(0, (last * tokens, end))
                return first, last
        first = -(-self.end // tokens)
        self.end = (first + batches) * tokens
        return first, first + batches

    def _end(self, n: int, because: str) -> list[Dealt]:
        """Ends a block; where there are other shards, as far as this one is concerned."""
        given = self.decided[n]
        if self._alone:
            return [self._finish(n, given, because)]
        self._put(n, replace(given, owner=""))
        return []

    def _finish(self, n: int, given: Given, because: str) -> Dealt:
        """Frees the untrained rest of a block that has ended in every shard."""
        reached = max(given.from_batch, self.batches.reached(n), self._elsewhere.get(n, 0))
        if reached < given.to_batch:
            insort(self.left, (reached * given.tokens, given.to_batch * given.tokens))
        del self.decided[n]
        self._by_owner[given.owner].discard(n)
        return Dealt(block=n, given=given, reached=reached, because=because)

    def _put(self, n: int, block: Given) -> None:
        """A block is in other hands from now on, or in nobody's."""
        known = self.decided.get(n)
        if known is not None and known.owner != block.owner:
            self._by_owner[known.owner].discard(n)
        self.decided[n] = block  # at the place that it had in the order
        self._by_owner.setdefault(block.owner, set()).add(n)

    def _of(self, island_id: str) -> list[int]:
        """Returns the blocks that an island has, in order."""
        return sorted(self._by_owner.get(island_id, ()))

    # --- the record -------------------------------------------------------------------------------------------

    def saving(self, serial: int) -> dict[str, Any]:
        """Returns what belongs into the run record of that serial, as plain data."""
        if not self._saving or self._saving[-1][1] != self.decided:  # else that one says it, with an earlier serial
            self._saving.append((serial, dict(self.decided)))
        self._free_at = {n: self._free_at.get(n, serial) for n in self.nobodys()}
        return {
            "unit": self.unit,
            "next": self._next,
            "end": self.end,
            "left": [list(piece) for piece in self.left],
            "given": {str(n): [g.owner, g.from_batch, g.to_batch, g.tokens] for n, g in sorted(self.decided.items())},
        }

    def saved(self, serial: int) -> None:
        """Notes that the run record of a serial is durable in every shard: islands may be told, old books go."""
        self._agreed_serial = serial
        while self._saving and self._saving[0][0] <= serial:
            self._may_tell(self._saving.pop(0)[1])
        known = {*self.decided, *self.durable, *(n for _, then in self._saving for n in then)}
        self._elsewhere = {n: batch for n, batch in self._elsewhere.items() if n in known}
        self.batches.keep(known)

    def restore(self, record: Mapping[str, Any], slices: Mapping[int, Mapping[str, Any]], epoch: int) -> None:
        """Reads a run record's part and the fragments' slices back, to go on under another epoch."""
        if record:
            self.unit, self.end = record["unit"], record["end"]
            self._next = max(record["next"], epoch * NUMBERS_PER_EPOCH)
            self.left = [(a, b) for a, b in record["left"]]
            rows = record["given"].items()
            self._go_on_from(
                {
                    int(n): Given(owner=owner, from_batch=a, to_batch=b, tokens=tokens)
                    for n, (owner, a, b, tokens) in rows
                }
            )
            self._may_tell(dict(self.decided))
        self.batches.restore(slices)
        self.batches.keep(self.decided)

    def nobodys(self) -> list[int]:
        """Returns the numbers of blocks that belong to nobody now."""
        return self._of("")

    def reached_elsewhere(self, n: int, batch: int) -> None:
        """Another shard has merged, or holds, a block of nobody up to this batch."""
        self._elsewhere[n] = max(batch, self._elsewhere.get(n, 0))

    def tenures(self) -> tuple[messages.Tenure, ...]:
        """Returns all blocks and their islands, for other shards."""
        return tuple(
            messages.Tenure(
                share=n, owner=g.owner, share_epoch=0, cursor=g.from_batch, to_batch=g.to_batch, batch_tokens=g.tokens
            )
            for n, g in sorted(self.decided.items())
        )

    def adopt(self, tenures: Iterable[messages.Tenure]) -> None:
        """Takes over blocks and their islands from shard 0."""
        self._go_on_from(
            {
                t.share: Given(owner=t.owner, from_batch=t.cursor, to_batch=t.to_batch, tokens=t.batch_tokens)
                for t in tenures
            }
        )

    def _go_on_from(self, now: dict[int, Given]) -> None:
        self.decided = now
        self._by_owner = _by_owner(now)

    def _may_tell(self, durable: Mapping[int, Given]) -> None:
        self.durable = durable
        self._durable_of, self._told = _by_owner(durable), {}

    # --- telling ----------------------------------------------------------------------------------------------

    def told(self, island_id: str) -> tuple[Block, ...]:
        """Returns an island's blocks, in the order in which it trains them."""
        if island_id not in self._told:
            own = [(n, self.durable[n]) for n in sorted(self._durable_of.get(island_id, ()))]
            blocks = [Block(number=n, from_batch=g.from_batch, to_batch=g.to_batch) for n, g in own]
            self._told[island_id] = tuple(blocks)
        return self._told[island_id]

    def refusal(
        self, island_id: str, fragment_id: int, data: Sequence[DataRange], steps: int
    ) -> tuple[Reason, str] | None:
        """Returns the reason to refuse a contribution's data: impossible, or not its island's; None if fine.

        One that does not say what it was trained on is taken while its island has a block.
        """
        if not data:
            return None if self._of(island_id) else (Reason.SHARE_MOVED, f"{island_id} has no block")
        batches = sum(d.to_batch - d.from_batch for d in data)
        if batches != steps:
            return Reason.IMPLAUSIBLE, f"it names {batches} batches for {steps} steps"
        for d in data:
            given = self.decided.get(d.share)
            if given is None or given.owner != island_id:
                now = "has ended" if given is None else f"belongs to {given.owner or 'nobody'}"
                return Reason.SHARE_MOVED, f"{batches_of(d)}: it is a block that {now}"
            if not (d.from_batch >= OWN_PASS or given.from_batch <= d.from_batch < d.to_batch <= given.to_batch):
                return Reason.IMPLAUSIBLE, f"{batches_of(d)}: it has [{given.from_batch}, {given.to_batch})"
        overlap = self.batches.overlap(fragment_id, data)
        return (Reason.OVERLAP, overlap) if overlap else None


def _by_owner(blocks: Mapping[int, Given]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for n, block in blocks.items():
        found.setdefault(block.owner, set()).add(n)
    return found
