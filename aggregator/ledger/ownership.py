"""Owners of parts of the data: now, in records being written, and as every shard knows them. Pure.

Shares and blocks change hands by the same rules: an owner hears of its part once that is durable, and a part that was
taken from somebody is given on once every shard knows it is nobody's and has said how far it was trained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar


class Owned(Protocol):
    """A part of the data in somebody's hands."""

    @property
    def owner(self) -> str:
        """Its island; empty: nobody."""


T = TypeVar("T", bound=Owned)


class Ownership(Generic[T]):
    """The owner of each part, by the number of the part.

    Attributes:
        now: As it is decided.
        durable: As islands may be told.
    """

    def __init__(self) -> None:
        self.now: Mapping[int, T] = {}
        self.durable: Mapping[int, T] = {}
        self._now: dict[int, T] = {}
        self._by_owner: dict[str, set[int]] = {}  # of what is decided
        self._told: dict[str, list[int]] = {}  # likewise of what is durable
        self._told_of: Mapping[int, T] | None = None
        self.adopt({})
        self._saving: list[tuple[int, dict[int, T]]] = []  # serial of a run record -> what it says
        self._free_at: dict[int, int] = {}  # part of nobody -> serial of the record that says so first
        self._agreed_serial = 0
        self._elsewhere: dict[int, int] = {}  # part -> furthest batch on the fragments of other shards

    def adopt(self, now: Mapping[int, T]) -> None:
        """Goes on from what somebody else has decided."""
        self._now = dict(now)
        self.now = self._now
        self._by_owner = _by_owner(now)

    def give(self, n: int, part: T) -> None:
        """A part is in other hands from now on, or in nobody's."""
        known = self._now.get(n)
        if known is not None and known.owner != part.owner:
            self._by_owner[known.owner].discard(n)
        self._now[n] = part  # at the place that it had in the order
        self._by_owner.setdefault(part.owner, set()).add(n)

    def end(self, n: int) -> None:
        """There is no such part any more, if there was one."""
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
        """That record is durable, in every shard; returns the parts that are still spoken of anywhere."""
        self._agreed_serial = serial
        while self._saving and self._saving[0][0] <= serial:
            _, self.durable = self._saving.pop(0)
        known = {*self.now, *self.durable, *(n for _, then in self._saving for n in then)}
        self._elsewhere = {n: batch for n, batch in self._elsewhere.items() if n in known}
        return known

    def restore(self, now: dict[int, T]) -> None:
        """Goes on from a durable record."""
        self.adopt(now)
        self.durable = dict(now)

    def of(self, island_id: str) -> list[int]:
        """Returns the parts that an island has, in order."""
        return sorted(self._by_owner.get(island_id, ()))

    def num_of(self, island_id: str) -> int:
        """Returns how many these are."""
        return len(self._by_owner.get(island_id, ()))

    def told(self, island_id: str) -> list[int]:
        """Returns the parts of which an island may be told that it has them, in order."""
        if self._told_of is not self.durable:
            self._told_of = self.durable
            self._told = {owner: sorted(parts) for owner, parts in _by_owner(self.durable).items()}
        return self._told.get(island_id, [])

    def nobodys(self) -> list[int]:
        """Returns the parts that belong to nobody now, in order."""
        return self.of("")

    def is_agreed(self, n: int) -> bool:
        """Whether every shard knows that a part is nobody's."""
        return self._free_at.get(n, math.inf) <= self._agreed_serial

    def reached_elsewhere(self, n: int, batch: int) -> None:
        """Another shard has merged, or holds, a part up to this batch."""
        self._elsewhere[n] = max(batch, self.elsewhere(n))

    def elsewhere(self, n: int) -> int:
        """Returns the furthest batch of a part in other shards; 0 if none was told."""
        return self._elsewhere.get(n, 0)


def _by_owner(parts: Mapping[int, T]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for n, part in parts.items():
        found.setdefault(part.owner, set()).add(n)
    return found
