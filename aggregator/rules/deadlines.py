"""Deadlines of many items, and the set of live islands, each with a deadline. Pure.

The earliest deadline is known at once, and a change takes logarithmic time. A heap with lazy deletion: what is moved or
dropped leaves its old entry behind, which is thrown away when it comes to the top. Where most entries are old ones the
heap is built anew, so that it is never more than twice as long as it need be.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

#: Of a sum of times: so much earlier than by the sum it is looked whether something has happened.
ROUNDING_S = 1e-6
#: With fewer entries than this it is not worth while to build the heap anew.
FEW = 64


class Deadlines:
    """The deadline of each item, by the name of the item; at most one each."""

    __slots__ = ("_at_s", "_heap")

    def __init__(self) -> None:
        self._at_s: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __contains__(self, name: str) -> bool:
        return name in self._at_s

    def get(self, name: str) -> float | None:
        """Returns the deadline of an item; None if it has none."""
        return self._at_s.get(name)

    def put(self, name: str, at_s: float) -> None:
        """Sets the deadline of an item, in place of the one that it has."""
        if self._at_s.get(name) == at_s:
            return
        self._at_s[name] = at_s
        heappush(self._heap, (at_s, name))
        if len(self._heap) > FEW and len(self._heap) > 2 * len(self._at_s):
            self._heap = [(each_s, each) for each, each_s in self._at_s.items()]
            heapify(self._heap)

    def drop(self, name: str) -> None:
        """Takes the deadline of an item away, if it has one."""
        self._at_s.pop(name, None)

    def first(self) -> tuple[float, str] | None:
        """Returns the earliest deadline and its item, of equal ones the first by name; None without any."""
        while self._heap:
            at_s, name = self._heap[0]
            if self._at_s.get(name) == at_s:
                return at_s, name
            heappop(self._heap)
        return None

    def due(self, now_s: float) -> list[str]:
        """Takes out the items whose deadline is ``now_s`` or earlier, and returns them, the earliest first."""
        found: list[str] = []
        if not self._heap or self._heap[0][0] > now_s:
            return found
        while (first := self.first()) is not None and first[0] <= now_s:
            heappop(self._heap)
            del self._at_s[first[1]]
            found.append(first[1])
        return found


class Living:
    """The names of the live members.

    A member that is silent for too long is dead, and no message tells so: each live member has a deadline. It moves
    with every message, and is looked at only when it comes first.

    Args:
        lives: Says exactly whether a member lives at a time.
        dies_at_s: Returns when a live member is dead if it stays silent, give or take the rounding of a sum.
    """

    def __init__(self, lives: Callable[[str, float], bool], dies_at_s: Callable[[str], float]) -> None:
        self._lives = lives
        self._dies_at_s = dies_at_s
        self._known: set[str] = set()  # those of whom it ever was asked
        self._unseen: set[str] = set()  # that have changed since
        self._living: set[str] = set()
        self._ids: frozenset[str] | None = None  # the same, made when it is asked for
        self._deaths = Deadlines()  # of those that live: not before that
        self._asked_at_s = float("-inf")

    def changed(self, name: str) -> None:
        """Notes that a member is new, was heard, or has come or gone."""
        self._unseen.add(name)

    def ids(self, now_s: float) -> frozenset[str]:
        """Returns the names of the live members; the same object while they stay the same."""
        if now_s != self._asked_at_s or self._unseen:
            self._look(now_s)
        if self._ids is None:
            self._ids = frozenset(self._living)
        return self._ids

    def next_death_s(self, now_s: float) -> float | None:
        """Returns when the next member would be dead if it stayed silent; None if nobody lives."""
        if now_s != self._asked_at_s or self._unseen:
            self._look(now_s)
        while (first := self._deaths.first()) is not None:
            at_s, name = first
            dies_at_s = self._dies_at_s(name)
            if dies_at_s <= at_s:
                return dies_at_s
            self._deaths.put(name, dies_at_s)  # it was heard since
        return None

    def _look(self, now_s: float) -> None:
        if now_s < self._asked_at_s:  # of an earlier moment: some may have lived then
            self._unseen |= self._known
        self._asked_at_s = now_s
        self._unseen.update(self._deaths.due(now_s + ROUNDING_S))
        for name in self._unseen:
            self._look_at(name, now_s)
        self._unseen.clear()

    def _look_at(self, name: str, now_s: float) -> None:
        self._known.add(name)
        lives = self._lives(name, now_s)
        if lives != (name in self._living):
            (self._living.add if lives else self._living.remove)(name)
            self._ids = None
        if not lives:
            self._deaths.drop(name)
            return
        known_s, dies_at_s = self._deaths.get(name), self._dies_at_s(name)
        if known_s is None or dies_at_s < known_s:  # one that is too early costs a look
            self._deaths.put(name, dies_at_s)
