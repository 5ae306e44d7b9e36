"""Ranges of inner steps, and sets of ranges that detect steps handed over twice."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StepRange:
    """Inner steps ``[from_step, to_step)`` of one island, with its token counter at both ends.

    Both counters run over all lives of an island: a new incarnation continues at the highest known ``to_step``.
    """

    from_step: int
    to_step: int
    from_tokens: int
    to_tokens: int

    @property
    def steps(self) -> int:
        """Inner steps in the range (s in the paper)."""
        return self.to_step - self.from_step

    @property
    def tokens(self) -> int:
        """Tokens in the range (n in the paper)."""
        return self.to_tokens - self.from_tokens


class IntervalSet:
    """A set of integers kept as sorted, disjoint, half-open intervals; adjacent ones are joined."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in intervals:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        """Adds every integer in ``[start, end)``; raises ValueError if there is none, or one is in the set."""
        if start >= end:
            raise ValueError(f"empty interval [{start}, {end})")
        if self.overlaps(start, end):
            raise ValueError(f"[{start}, {end}) overlaps {self}")
        i = bisect_left(self._starts, start)
        joins_left = i > 0 and self._ends[i - 1] == start
        joins_right = i < len(self._starts) and self._starts[i] == end
        if joins_left and joins_right:
            self._ends[i - 1] = self._ends[i]
            del self._starts[i], self._ends[i]
        elif joins_left:
            self._ends[i - 1] = end
        elif joins_right:
            self._starts[i] = start
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)

    def close_gaps(self, most: int, keep: Callable[[int, int], bool]) -> None:
        """Fills the lowest gaps, except where ``keep(start, end)``, until at most ``most`` intervals remain."""
        beyond = len(self._starts) - most
        if beyond > 0:
            gaps = zip(self._ends[:-1], self._starts[1:], strict=True)
            for start, end in [gap for gap in gaps if not keep(*gap)][:beyond]:
                self.add(start, end)

    def overlaps(self, start: int, end: int) -> bool:
        """Returns whether any integer of ``[start, end)`` is in the set."""
        i = bisect_right(self._ends, start)
        return start < end and i < len(self._starts) and self._starts[i] < end

    def covers(self, start: int, end: int) -> bool:
        """Returns whether every integer of ``[start, end)`` is in the set."""
        i = bisect_right(self._starts, start) - 1
        return start >= end or (i >= 0 and end <= self._ends[i])

    @property
    def end(self) -> int:
        """One past the largest member; 0 if the set is empty."""
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(zip(self._starts, self._ends, strict=True))

    def __len__(self) -> int:
        """Returns the number of integers in the set."""
        return sum(self._ends) - sum(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntervalSet) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return "{" + ", ".join(f"[{s}, {e})" for s, e in self) + "}"
