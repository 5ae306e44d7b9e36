"""The invariants (reference.md, section 10): predicates over versions, ranges, books and epochs. Pure.

:mod:`ops.chaos.verify` applies them to the files of a run, :mod:`ops.virtual.invariants` to the live objects of a
simulated one. A predicate returns in words what does not hold, and an empty text where all is well.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence

from broker.wire.messages import Reason
from broker.wire.ranges import IntervalSet

#: A fragment and its version.
Key = tuple[int, int]

_REASONS = frozenset(Reason)


def grows(what: str, before: int, now: int, *, or_stays: bool = False) -> str:
    """Invariants 1 and 5: versions and epochs only grow."""
    return "" if now > before or (or_stays and now == before) else f"{what} goes from {before} to {now}"


class Contents:
    """Invariant 1: a version names one byte string, in every store and for every publisher.

    Attributes:
        digests: Of each version, as it was named first.
    """

    def __init__(self) -> None:
        self.digests: dict[Hashable, str] = {}

    def name(self, version: Hashable, digest: str) -> str:
        """A version has these bytes."""
        known = self.digests.setdefault(version, digest)
        return "" if known == digest else f"version {version} names two contents, {known} and {digest}"


class MergedRanges:
    """Invariant 2: each range of an island's steps, or of the data, is merged at most once.

    Ranges are kept under keys: who trained them, and the fragment that they were merged into.
    """

    def __init__(self) -> None:
        self._ranges: dict[Hashable, IntervalSet] = defaultdict(IntervalSet)

    def merge(self, key: Hashable, start: int, end: int) -> str:
        """The range ``[start, end)`` is merged."""
        known = self._ranges[key]
        if start >= end or known.overlaps(start, end):
            return f"[{start}, {end}) of {key} is merged twice, or empty"
        known.add(start, end)
        return ""

    def take_back(self, key: Hashable, start: int, end: int) -> None:
        """The version that ``[start, end)`` was merged into was dropped before anybody saw it."""
        kept = [(a, b) for a, b in self._ranges[key] if not a <= start < b]
        a, b = next((a, b) for a, b in self._ranges[key] if a <= start < b)
        self._ranges[key] = IntervalSet([*kept, *((x, y) for x, y in ((a, start), (end, b)) if x < y)])


class InOrder:
    """Invariant 2: batches are given out in order, and lost ones again before any new ones.

    Args:
        end: The first place in the data that was never given out, in tokens.
        left: Places that were given out and lost.
    """

    def __init__(self, end: int = 0, left: Iterable[Sequence[int]] = ()) -> None:
        self._end = end
        self._left = sorted((start, stop) for start, stop in left)

    def end_block(self, reached: int, to_batch: int, tokens: int) -> None:
        """Ends a block: its batches from ``reached`` on are lost; ``tokens`` are those of a batch."""
        if reached < to_batch:
            insort(self._left, (reached * tokens, to_batch * tokens))

    def give(self, from_batch: int, to_batch: int, tokens: int) -> str:
        """The batches ``[from_batch, to_batch)`` are given to somebody."""
        start, stop = from_batch * tokens, to_batch * tokens
        while self._left and -(-self._left[0][0] // tokens) >= self._left[0][1] // tokens:
            self._left.pop(0)  # less than a batch of that island
        lost, until = self._left.pop(0) if self._left else (self._end, stop)
        if stop < until:
            self._left.insert(0, (stop, until))
        self._end = max(self._end, stop)
        fits = lost <= start < lost + tokens and stop <= until
        return "" if fits else f"batches [{from_batch}, {to_batch}) are given out, {lost / tokens:g} comes next"


def weights_fit(key: Key, weights: Collection[float]) -> str:
    """Invariant 2: no merge weight of a version is negative, and together they are at most 1."""
    fits = min(weights, default=0.0) >= 0 and sum(weights) <= 1 + 1e-9
    return "" if fits else f"the merge weights of {key} are {list(weights)}"


def durable_before(key: Key, durable: int, what: str) -> str:
    """Invariant 3: a published version is durable; ``durable`` is the newest durable one of its fragment."""
    return "" if key[1] <= durable else f"version {key[1]} of fragment {key[0]} is {what}, {durable} is durable"


def balanced(trained: int, merged: int, wasted: Iterable[int], in_flight: int) -> str:
    """Invariant 4: trained = merged + wasted + in flight."""
    lost = sum(wasted)
    if trained == merged + lost + in_flight and merged >= 0 <= in_flight:
        return ""
    return f"{trained} trained, but {merged} merged, {lost} wasted and {in_flight} in flight"


class Epochs:
    """Invariant 5: each epoch of a shard belongs to one life of one aggregator.

    Attributes:
        lives: (shard, epoch) -> who spoke under it.
    """

    def __init__(self) -> None:
        self.lives: dict[tuple[int, int], str] = {}

    def speak(self, shard: int, epoch: int, life: str) -> str:
        """A life of an aggregator says something under its epoch."""
        first = self.lives.setdefault((shard, epoch), life)
        return "" if first == life else f"{life} speaks under epoch {epoch} of shard {shard}, as {first} did"


def has_reason(what: str, reason: object) -> str:
    """Invariant 8: every refusal has a reason that exists."""
    return "" if reason in _REASONS else f"{what} for {reason!r}"
