"""Deadlines of many items: the earliest at once, a change in logarithmic time. Pure.

A heap with lazy deletion: what is moved or dropped leaves its old entry behind, which is thrown away when it comes to
the top. Where most entries are old ones the heap is built anew, so that it is never more than twice as long as it need
be.
"""

from __future__ import annotations

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

    def __len__(self) -> int:
        """Returns the number of items that have a deadline."""
        return len(self._at_s)

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
        while (first := self.first()) is not None and first[0] <= now_s:
            heappop(self._heap)
            del self._at_s[first[1]]
            found.append(first[1])
        return found
