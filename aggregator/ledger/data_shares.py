"""Data shares: their owners, takeover, hand-back and the next batch of each (design, section 8).

The data is cut into as many shares as islands are expected, and each share into batches that are numbered from 0 (a
batch is what one inner step trains). The first islands that join have a share each, their *home*; one beyond the
expected number gets a home in a further pass over the data, in another order (``lane``), which nobody takes over.

*One owner at a time.* A share belongs to one life of one island under one ``share_epoch``. Each change of hands (a new
life, a takeover, a hand-back) raises the epoch, and is durable before the new owner hears of it. A contribution says
which batches it was trained on; one that names a share under another epoch than that of now is refused
(``share_moved``), whatever else is in it. So an owner that was merely cut off cannot double what its successor trains.

*From where on.* A new owner starts at the furthest batch of the share that was merged, or arrived and waits to be, on
any fragment. Nothing below is trained again, so no batch is merged twice into a fragment. Every batch below was trained
by an owner before, so none is skipped: what was not merged of it stands in the ledger of that island's life, by cause
(lost with the island, overwritten, stale, moved, ..). Fragments are handed over at different times: one that was behind
loses the batches between, as it loses an island's last steps when that dies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aggregator.ledger.batch_books import BatchBooks, batches_of
from aggregator.ledger.ownership import Ownership
from aggregator.ledger.presence import Presence, Told
from broker.wire import messages
from broker.wire.messages import DataRange, Reason, Share
from broker.wire.schema import MAX_DATA_RANGES

#: Shares in one island's hands, at most: a contribution names them all. What is beyond waits for another heir.
MOST_OWNED = MAX_DATA_RANGES // 2


@dataclass(frozen=True, slots=True)
class Tenure:
    """A share in one island's hands: from batch ``cursor`` on, under ``share_epoch``."""

    owner: str
    share_epoch: int
    cursor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A share has changed hands."""

    share: int
    before: str
    tenure: Tenure
    because: str

    def note(self) -> tuple[str, dict[str, Any]]:
        """Returns its name and fields for the tape."""
        fields = {"share": self.share, "before": self.before, "owner": self.tenure.owner}
        epoch = {"share_epoch": self.tenure.share_epoch, "cursor": self.tenure.cursor}
        return "share.moved", {**fields, **epoch, "reason": self.because}


class DataShares:
    """Every share of a run: its owner, and what was merged of it.

    With several aggregator shards a share changes hands in two steps (:mod:`aggregator.rounds.roster`): first it is
    nobody's, and when every shard knows that and has said how far it was trained, it is the new owner's.

    Args:
        count: Shares of one pass over the data.
        takeover_s: Absence after which an island's share goes to another; 0: never.
        now_s: Monotonic seconds.
        alone: Whether there is one aggregator shard.

    Attributes:
        books: What was merged, and waits to be.
    """

    def __init__(self, count: int, takeover_s: float, now_s: float, *, alone: bool = True) -> None:
        self.books = BatchBooks()
        self._count = count
        self._alone = alone
        self._takeover_s = takeover_s
        self._began_s = now_s
        self._owners: Ownership[Tenure] = Ownership()
        self._waits = False  # something is to go to another island, and there was none to take it
        self._taken = False  # something is nobody's that was somebody's when all were looked at

    # --- changing hands ---------------------------------------------------------------------------------------

    def join(self, island_id: str, home: int, batch_tokens: int = 0) -> list[Moved]:
        """Gives a new life its home share alone; an earlier life's other shares go to nobody for now."""
        for share in self._owners.of(island_id):
            if share != home:
                self._take(share)
        self._move(home, island_id)
        return []

    def resume(self, island_id: str, home: int, batch_tokens: int = 0) -> list[Moved]:
        """A life goes on after a pause: where its home has moved meanwhile and may, it is its own at once."""
        tenure = self._owners.now.get(home)
        if (tenure is not None and tenure.owner == island_id) or not self._free(home):
            return []
        self._taken = True  # from one who may have room for another now
        return [self._moved(home, island_id, "its island is back")]

    def leave(self, island_id: str, home: int) -> None:
        """Takes an island's shares and its home from it: the first step of joining with several shards."""
        for share, tenure in list(self._owners.now.items()):
            if tenure.owner and (tenure.owner == island_id or share == home):
                self._take(share)

    def settle(self, present: Sequence[Presence], now_s: float) -> list[Moved]:
        """Hands shares back to islands that returned, and those of absent ones to others; returns the moves."""
        moved: list[Moved] = []
        self._waits = self._taken = False
        at_home = {p.home: p for p in present}
        by_id = {p.island_id: p for p in present}
        able = [p for p in present if p.able]
        for share in range(self._count):
            tenure = self._owners.now.get(share, Tenure("", 0, 0))
            if share in self._owners.now and not tenure.owner and not self._free(share):
                continue  # on its way: not every shard knows yet that it is nobody's
            home, owner = at_home.get(share), by_id.get(tenure.owner)
            if home is not None and home.able:
                if tenure.owner != home.island_id:
                    moved.append(self._moved(share, home.island_id, "its island is back"))
                continue
            useless = owner is not None and owner is not home and owner.quarantined
            if owner is not None and not self._away(owner.away_s) and not useless:
                continue
            away_s = home.away_s if home is not None else now_s - self._began_s
            because = "its island has left" if away_s == float("inf") else f"its island is away for {away_s:.0f} s"
            if home is not None and home.quarantined and not self._away(away_s):
                because = "its island is quarantined"
            elif not self._away(away_s):
                continue
            heir = min(able, key=lambda p: (self._owners.num_of(p.island_id), p.home), default=None)
            if heir is None or self._owners.num_of(heir.island_id) >= MOST_OWNED:
                self._waits = True
                continue
            moved.append(self._moved(share, heir.island_id, because))
        return moved

    def settle_some(self, changed: Sequence[Presence]) -> list[Moved] | None:
        """Returns the data that change hands after these islands alone have changed, or are away for too long.

        Returns:
            Nothing, if nothing can move for that; None if that takes :meth:`settle`, with everybody.
        """
        if self._taken:
            return None
        for p in changed:
            tenure = self._owners.now.get(p.home)
            if p.able and ((tenure is not None and tenure.owner != p.island_id) or self._waits):
                return None
            if not p.able and (self._owners.num_of(p.island_id) or self._away(p.away_s)):
                return None
        return []

    def saving(self, serial: int) -> dict[str, list[Any]]:
        """Returns what belongs into the run record of that serial, as plain data."""
        self._owners.saving(serial)
        return {str(n): [t.owner, t.share_epoch, t.cursor] for n, t in sorted(self._owners.now.items())}

    def saved(self, serial: int) -> None:
        """The run record of that serial is durable, in every shard: what it says may be told."""
        self._owners.saved(serial)

    def nobodys(self) -> list[int]:
        """Returns the shares that belong to nobody now."""
        return self._owners.nobodys()

    def reached_elsewhere(self, share: int, batch: int) -> None:
        """Another shard has merged, or holds, a share of nobody up to this batch."""
        self._owners.reached_elsewhere(share, batch)

    def tenures(self) -> tuple[messages.Tenure, ...]:
        """Returns who has what for other shards."""
        return tuple(
            messages.Tenure(share=n, owner=t.owner, share_epoch=t.share_epoch, cursor=t.cursor)
            for n, t in sorted(self._owners.now.items())
        )

    def adopt(self, tenures: Iterable[messages.Tenure]) -> None:
        """Takes over who has what from shard 0."""
        self._owners.adopt({t.share: Tenure(t.owner, t.share_epoch, t.cursor) for t in tenures})

    # --- telling ----------------------------------------------------------------------------------------------

    def told(self, island_id: str, home: int) -> Told:
        """Returns what an island is told: its home, and what it has taken over.

        While its home is not its own (it is on the way back), the epoch is an earlier one: what it trains until then
        will be refused, and what it has is not to be replaced.
        """
        tenure = self._owners.durable.get(home, Tenure("", 0, 0))
        mine = tenure.owner == island_id
        epoch = tenure.share_epoch if mine else max(0, tenure.share_epoch - 1)
        others = (self._share(n, self._owners.durable[n]) for n in self._owners.told(island_id) if n != home)
        return Told(self._share(home, Tenure(island_id, epoch, tenure.cursor)), tuple(others))

    def refusal(
        self, island_id: str, home: int, fragment_id: int, data: Sequence[DataRange], steps: int, most_batches: int
    ) -> tuple[Reason, str] | None:
        """Returns the reason to refuse a contribution's data: impossible, or not its island's; None if fine.

        One that does not say what it was trained on is taken while its island's home has not moved.

        Args:
            island_id: Who trained.
            home: Number of its own share.
            fragment_id: Of the contribution.
            data: As it says.
            steps: Inner steps in it, each of one batch.
            most_batches: Of one share, that this life can have trained so far.
        """
        if not data:
            tenure = self._owners.now.get(home)
            if tenure is None or tenure.owner == island_id:
                return None
            return Reason.SHARE_MOVED, f"share {home} is in the hands of another"
        batches = sum(d.to_batch - d.from_batch for d in data)
        if batches != steps:
            return Reason.IMPLAUSIBLE, f"it names {batches} batches for {steps} steps"
        for d in data:
            tenure = self._owners.now.get(d.share)
            if tenure is None or (tenure.owner, tenure.share_epoch) != (island_id, d.share_epoch):
                now = "nobody" if tenure is None else f"{tenure.owner or 'nobody'} under epoch {tenure.share_epoch}"
                return Reason.SHARE_MOVED, f"share {d.share} under epoch {d.share_epoch}: it belongs to {now}"
            if d.from_batch < tenure.cursor or d.to_batch > tenure.cursor + most_batches:
                return Reason.IMPLAUSIBLE, f"{batches_of(d)}: this tenure began at {tenure.cursor}"
        overlap = self.books.overlap(fragment_id, data)
        return (Reason.OVERLAP, overlap) if overlap else None

    # --- the record -------------------------------------------------------------------------------------------

    def restore(
        self, record: Mapping[str, Sequence[Any]], slices: Mapping[int, Mapping[str, Any]], epoch: int = 0
    ) -> None:
        """Reads a run record's part and the fragments' slices back."""
        self._owners.restore({int(n): Tenure(*row) for n, row in record.items()})
        self.books.restore(slices)

    # --- parts ------------------------------------------------------------------------------------------------

    def _moved(self, share: int, to: str, because: str) -> Moved:
        before = self._owners.now.get(share, Tenure("", 0, 0)).owner
        return Moved(share=share, before=before, tenure=self._move(share, to), because=because)

    def _move(self, share: int, to: str) -> Tenure:
        known = self._owners.now.get(share)
        if known is not None and not self._free(share):
            return self._take(share)
        epoch = 0 if known is None else known.share_epoch + 1
        cursor = max(self.books.reached(share), self._owners.elsewhere(share))
        self._owners.give(share, Tenure(to, epoch, cursor))
        return self._owners.now[share]

    def _take(self, share: int) -> Tenure:
        tenure = Tenure("", self._owners.now[share].share_epoch + 1, self.books.reached(share))
        self._owners.give(share, tenure)
        self._taken = True
        return tenure

    def _free(self, share: int) -> bool:
        """Whether a share may be given: what its last owner trained is known in every shard."""
        return self._alone or self._owners.is_agreed(share)

    def _away(self, away_s: float) -> bool:
        return bool(self._takeover_s) and away_s >= self._takeover_s

    def _share(self, number: int, tenure: Tenure) -> Share:
        lane, index = divmod(number, self._count)
        return Share(index=index, count=self._count, lane=lane, share_epoch=tenure.share_epoch, cursor=tenure.cursor)
