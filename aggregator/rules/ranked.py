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
        middle: The lower median of the numbers; 0 without any.
    """

    __slots__ = ("middle", "order", "value")

    def __init__(self) -> None:
        self.value: dict[str, float] = {}
        self.order: list[tuple[float, str]] = []
        self.middle = 0.0

    def put(self, name: str, value: float) -> None:
        """Sets the number of an item."""
        before, order = self.value.get(name), self.order
        if before == value:
            return
        if before is not None:
            del order[bisect_left(order, (before, name))]
        self.value[name] = value
        insort(order, (value, name))
        self.middle = order[(len(order) - 1) // 2][0]

    def drop(self, name: str) -> None:
        """Takes an item out, if it is there."""
        before, order = self.value.pop(name, None), self.order
        if before is not None:
            del order[bisect_left(order, (before, name))]
            self.middle = order[(len(order) - 1) // 2][0] if order else 0.0

    def below(self, value: float) -> int:
        """Returns how many items have a lower number; those with ``value`` come next."""
        return bisect_left(self.order, (value, ""))
