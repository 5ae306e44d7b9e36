"""Owners of blocks of the data: now, in records being written, and as every shard knows them. Pure.

An owner hears of its block once that is durable. One that was taken from somebody ends once every shard knows that it
is nobody's and has said how far it was trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Batches ``[from_batch, to_batch)`` of ``tokens`` each, an island's; empty ``owner``: about to end."""

    owner: str
    from_batch: int
    to_batch: int
    tokens: int


class Ownership:
    """The owner of each block, by its number.

    Attributes:
        now: As it is decided.
        durable: As islands may be told.
    """

    def __init__(self) -> None:
        self.now: Mapping[int, Given] = {}
        self.durable: Mapping[int, Given] = {}
        self._now: dict[int, Given] = {}
        self._by_owner: dict[str, set[int]] = {}  # of what is decided
        self._told: dict[str, list[int]] = {}  # likewise of what is durable
        self._told_of: Mapping[int, Given] | None = None
        self.adopt({})
        self._saving: list[tuple[int, dict[int, Given]]] = []  # serial of a run record -> what it says
        self._free_at: dict[int, int] = {}  # block of nobody -> serial of the record that says so first
        self._agreed_serial = 0
        self._elsewhere: dict[int, int] = {}  # block -> furthest batch on the fragments of other shards

    def adopt(self, now: Mapping[int, Given]) -> None:
        """Goes on from what somebody else has decided."""
        self._now = dict(now)
        self.now = self._now
        self._by_owner = _by_owner(now)

    def give(self, n: int, block: Given) -> None:
        """A block is in other hands from now on, or in nobody's."""
        known = self._now.get(n)
        if known is not None and known.owner != block.owner:
            self._by_owner[known.owner].discard(n)
        self._now[n] = block  # at the place that it had in the order
        self._by_owner.setdefault(block.owner, set()).add(n)

    def end(self, n: int) -> None:
        """There is no such block any more, if there was one."""
        if n in self._now:
            owner = self._now.pop(n).owner
            self._by_owner[owner].discard(n)
            if not self._by_owner[owner]:
                del self._by_owner[owner]

    def saving(self, serial: int) -> None:
        """The run record of that serial says what holds now."""
        if not self._saving or self._saving[-1][1] != self.now:  # else that one says it, with an earlier serial
            self._saving.append((serial, dict(self.now)))
        self._free_at = {n: self._free_at.get(n, serial) for n in self.nobodys()}

    def saved(self, serial: int) -> set[int]:
        """That record is durable, in every shard; returns the blocks that are still spoken of anywhere."""
        self._agreed_serial = serial
        while self._saving and self._saving[0][0] <= serial:
            _, self.durable = self._saving.pop(0)
        known = {*self.now, *self.durable, *(n for _, then in self._saving for n in then)}
        self._elsewhere = {n: batch for n, batch in self._elsewhere.items() if n in known}
        return known

    def restore(self, now: dict[int, Given]) -> None:
        """Goes on from a durable record."""
        self.adopt(now)
        self.durable = dict(now)

    def of(self, island_id: str) -> list[int]:
        """Returns the blocks that an island has, in order."""
        return sorted(self._by_owner.get(island_id, ()))

    def told(self, island_id: str) -> list[int]:
        """Returns the blocks of which an island may be told that it has them, in order."""
        if self._told_of is not self.durable:
            self._told_of = self.durable
            self._told = {owner: sorted(blocks) for owner, blocks in _by_owner(self.durable).items()}
        return self._told.get(island_id, [])

    def nobodys(self) -> list[int]:
        """Returns the blocks that belong to nobody now, in order."""
        return self.of("")

    def is_agreed(self, n: int) -> bool:
        """Returns True once every shard knows that a block is nobody's."""
        return self._free_at.get(n, math.inf) <= self._agreed_serial

    def reached_elsewhere(self, n: int, batch: int) -> None:
        """Another shard has merged, or holds, a block up to this batch."""
        self._elsewhere[n] = max(batch, self.elsewhere(n))

    def elsewhere(self, n: int) -> int:
        """Returns the furthest batch of a block in other shards; 0 if none was told."""
        return self._elsewhere.get(n, 0)


def _by_owner(blocks: Mapping[int, Given]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for n, block in blocks.items():
        found.setdefault(block.owner, set()).add(n)
    return found
