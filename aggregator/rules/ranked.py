"""Numbers of many items, kept in order: the k-th smallest is found at once. Pure.

A sorted list and the number of each item. To put one in its place moves the references behind it, which for ten
thousand items takes a microsecond; nothing is sorted again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator


class Ranked:
    """One number per item, by the item's name; items of equal number are in the order of their names."""

    __slots__ = ("_order", "_value")

    def __init__(self) -> None:
        self._value: dict[str, float] = {}
        self._order: list[tuple[float, str]] = []

    def __len__(self) -> int:
        """Returns the number of items."""
        return len(self._order)

    def __iter__(self) -> Iterator[tuple[float, str]]:
        """Goes through numbers and items, the lowest first."""
        return iter(self._order)

    def __getitem__(self, rank: int) -> tuple[float, str]:
        """Returns number and item of a rank, 0 for the lowest; raises IndexError beyond the highest."""
        return self._order[rank]

    def get(self, name: str) -> float | None:
        """Returns the number of an item; None if it has none."""
        return self._value.get(name)

    def put(self, name: str, value: float) -> None:
        """Sets the number of an item."""
        before = self._value.get(name)
        if before == value:
            return
        if before is not None:
            del self._order[bisect_left(self._order, (before, name))]
        self._value[name] = value
        insort(self._order, (value, name))

    def drop(self, name: str) -> None:
        """Takes an item out, if it is there."""
        before = self._value.pop(name, None)
        if before is not None:
            del self._order[bisect_left(self._order, (before, name))]

    def between(self, first: int, end: int) -> list[tuple[float, str]]:
        """Returns numbers and items from one rank up to another, which is left out."""
        return self._order[first:end]

    def up_to(self, value: float) -> int:
        """Returns how many items have that number or a lower one."""
        return bisect_right(self._order, value, key=_number)

    def below(self, value: float) -> int:
        """Returns how many items have a lower number."""
        return bisect_left(self._order, value, key=_number)


def _number(item: tuple[float, str]) -> float:
    return item[0]
