"""Numbers of many items, kept in order: the k-th smallest is found at once. Pure.

A sorted list and the number of each item. To put one in its place moves the references behind it, which for ten
thousand items takes a microsecond; nothing is sorted again.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class Ranked:
    """One number per item, by the item's name; items of equal number are in the order of their names.

    Attributes:
        value: The number of each item, to read.
        order: Numbers and items, the lowest first, to read: rank 0 is the lowest.
    """

    __slots__ = ("order", "value")

    def __init__(self) -> None:
        self.value: dict[str, float] = {}
        self.order: list[tuple[float, str]] = []

    def put(self, name: str, value: float) -> None:
        """Sets the number of an item."""
        before, order = self.value.get(name), self.order
        if before == value:
            return
        if before is not None:
            del order[bisect_left(order, (before, name))]
        self.value[name] = value
        insort(order, (value, name))

    def drop(self, name: str) -> None:
        """Takes an item out, if it is there."""
        before = self.value.pop(name, None)
        if before is not None:
            del self.order[bisect_left(self.order, (before, name))]

    def lower_median(self) -> float:
        """Returns the lower median of the numbers; 0 without any."""
        return self.order[(len(self.order) - 1) // 2][0] if self.order else 0.0

    def below(self, value: float) -> int:
        """Returns how many items have a lower number; those with ``value`` come next."""
        return bisect_left(self.order, (value, ""))
