"""The broker's queues: newest versions for islands, contributions for aggregators.

Both are pure containers with their rules; :mod:`broker.routing.deliveries` decides when to use them. Everything kept
here is counted in bytes, because a broker that runs out of memory takes the whole run's traffic with it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from typing import Self

from broker.wire.messages import Contribution, Envelope, HostPart, Merged, Seed, Stored, Version
from broker.wire.number_formats import MERGED_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldVersion:
    """A version from its aggregator; the payload is neither read nor copied.

    An island is told of its own contributions alone. With those of all the bytes of a round would grow with the square
    of the number of islands.
    """

    version: Version  # with the contributions of all
    size_bytes: int  # header and buffers on the wire, without contributions
    number: int  # counts the versions put on the shelf: a smaller one has lain there longer
    _bare: Envelope
    _merged: dict[str, list[Merged]]

    @classmethod
    def of(cls, envelope: Envelope, version: Version, size_bytes: int, number: int) -> Self:
        """Returns the version in an envelope, with its bytes of header and buffers."""
        merged: dict[str, list[Merged]] = {}
        for each in version.contributions:
            merged.setdefault(each.island_id, []).append(each)
        bare = replace(envelope, message=replace(version, contributions=()))
        size_bytes = max(0, size_bytes - MERGED_BYTES * len(version.contributions))
        return cls(version=version, size_bytes=size_bytes, number=number, _bare=bare, _merged=merged)

    def for_island(self, island_id: str) -> tuple[Envelope, int]:
        """Returns the message for an island, and its approximate bytes."""
        own = self._merged.get(island_id)
        if own is None:
            return self._bare, self.size_bytes
        envelope = replace(self._bare, message=replace(self.version, contributions=tuple(own)))
        return envelope, self.size_bytes + MERGED_BYTES * len(own)


@dataclass(slots=True)
class _Trail:
    """The versions of one fragment: successive differences ``steps``, and ``whole`` before or among them."""

    whole: HeldVersion | None = None
    steps: list[HeldVersion] = field(default_factory=list)

    @property
    def newest(self) -> HeldVersion:
        """The newest version of the fragment; at least one is held."""
        newest = self.steps[-1] if self.steps else self.whole
        assert newest is not None
        return newest

    @property
    def held_bytes(self) -> int:
        """Bytes of all versions held."""
        return _bytes_of(self.steps) + (0 if self.whole is None else self.whole.size_bytes)

    def offer(self, held: HeldVersion) -> bool:
        """Adds a version that leads to the newest one or beyond; returns whether it did."""
        version, empty = held.version, self.whole is None and not self.steps
        newer = empty or _age(held) > _age(self.newest)
        if version.base is None:
            if newer:
                self.whole, self.steps = held, []
            elif self._leads(held) and (self.whole is None or _age(held) > _age(self.whole)):
                self.whole = held
            return self.whole is held
        if not newer:
            return False
        if not empty and self.newest.version.fragment_version == version.base:
            self.steps.append(held)
        else:  # those between were lost
            self.whole, self.steps = None, [held]
        while len(self.steps) > 1 and _bytes_of(self.steps) > _most_step_bytes(version):
            del self.steps[0]
        if self.whole is not None and not self._leads(self.whole):
            self.whole = None
        return True

    def _leads(self, whole: HeldVersion) -> bool:
        """Returns whether the differences start at a whole version, or reach it."""
        version = whole.version.fragment_version
        return any(version in (each.version.base, each.version.fragment_version) for each in self.steps)

    def way(self, version: int) -> list[HeldVersion] | None:
        """Returns the messages with the fewest bytes from a version to the newest; None if there are none.

        Empty for the newest itself.
        """
        if version >= self.newest.version.fragment_version:
            return []
        ways = []
        if self.whole is not None and self.whole.version.fragment_version > version:
            ways.append([self.whole, *(each for each in self.steps if _age(each) > _age(self.whole))])
        begin = next((n for n, each in enumerate(self.steps) if each.version.base == version), None)
        if begin is not None:
            ways.append(self.steps[begin:])
        return min(ways, key=_bytes_of, default=None)


def _bytes_of(held: Iterable[HeldVersion]) -> int:
    return sum(each.size_bytes for each in held)


def _age(held: HeldVersion) -> tuple[int, int]:
    return held.version.epoch, held.version.fragment_version


def _most_step_bytes(version: Version) -> int:
    """Returns the limit for a fragment's held differences, in bytes: half of a whole version."""
    if not isinstance(version.payload, tuple):
        return 0  # virtual time has stand-ins for buffers: the newest alone
    elements: int = sum(math.prod(encoded.shape) for encoded in version.payload)
    return 2 * elements


class VersionShelf:
    """The newest version of each fragment and differences to it; at most 1.5 times the model.

    It holds whole versions, or differences as long as they are few, and the whole version that the first of these
    builds on, once somebody has needed it.
    """

    __slots__ = ("_numbers", "_trails", "held_bytes")

    def __init__(self) -> None:
        self._trails: dict[int, _Trail] = {}
        self._numbers = 0
        self.held_bytes = 0

    def offer(self, envelope: Envelope, version: Version, size_bytes: int) -> bool:
        """Adds a version if it is newer, by (epoch, fragment version); returns whether it was.

        Also a whole one that is not newer, where differences alone are held that lead on from it.
        """
        self._numbers += 1
        held = HeldVersion.of(envelope, version, size_bytes, self._numbers)
        trail = self._trails.get(version.fragment_id, _Trail())
        before_bytes = trail.held_bytes
        if not trail.offer(held):
            return False
        self._trails[version.fragment_id] = trail
        self.held_bytes += trail.held_bytes - before_bytes
        return True

    def versions(self, num_fragments: int) -> tuple[int, ...]:
        """Returns the held version of each of the first ``num_fragments`` fragments, -1 for none."""
        return tuple(
            trail.newest.version.fragment_version if (trail := self._trails.get(p)) is not None else -1
            for p in range(num_fragments)
        )

    def whole(self, fragment_id: int) -> HeldVersion | None:
        """Returns the newest version of a fragment if it is held whole, else None."""
        trail = self._trails.get(fragment_id)
        return None if trail is None or trail.steps else trail.whole

    def stored(self, among: Callable[[int], bool]) -> tuple[Stored, ...]:
        """Returns the stored versions of some fragments, with their digests."""
        newest = {p: trail.newest.version for p, trail in sorted(self._trails.items()) if among(p)}
        return tuple(
            Stored(fragment_id=p, fragment_version=version.fragment_version, digest=version.digest)
            for p, version in newest.items()
        )

    def choose(
        self, versions: tuple[int, ...], served: dict[int, int], under_way: Container[int] = ()
    ) -> list[HeldVersion]:
        """Returns the next messages for an island, in order; empty if it has the newest versions.

        Among the fragments of which something newer is held, the one goes first that this island was sent the longest
        ago (never counts as longest), and among these the one that has lain here longest. So no fragment
        is starved, not even for an island whose link is slower than versions appear.

        Args:
            versions: Fragment version that the island has, by fragment; missing ones count as -1.
            served: Fragment -> number of this island's transfer that carried it last.
            under_way: Fragments of which something is being sent to it already.
        """
        ways = [self._way(p, versions) for p in self._trails if p not in under_way]
        newer = [way for way in ways if way]
        return min(newer, key=lambda way: (served.get(way[-1].version.fragment_id, 0), way[-1].number), default=[])

    def without_base(self, versions: tuple[int, ...], under_way: Container[int] = ()) -> list[int]:
        """Returns the fragments with a newer version that no held difference leads to; see :meth:`choose`."""
        return [
            p
            for p, trail in self._trails.items()
            if trail.whole is None and p not in under_way and self._way(p, versions) is None
        ]

    def _way(self, p: int, versions: tuple[int, ...]) -> list[HeldVersion] | None:
        return self._trails[p].way(versions[p] if p < len(versions) else -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A contribution or a seed that waits for room at its aggregator."""

    envelope: Envelope
    size_bytes: int

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for two copies of one message, of which only one is queued."""
        match self.envelope.message:
            case Contribution(fragment_id=p, steps=steps):
                what: tuple[object, ...] = ("contribution", p, steps.from_step, steps.to_step)
            case Seed(fragment_id=p):
                what = ("seed", p)
            case HostPart(fragment_id=p, host=host):
                what = ("part", p, self.envelope.message.from_step, self.envelope.message.to_step, host)
            case other:
                raise AssertionError(f"{type(other).__name__} does not queue")
        return (self.envelope.sender, self.envelope.incarnation, *what)


@dataclass(slots=True)
class _Lane:
    """The queue of one shard; ``returned`` messages could not be sent, and go first."""

    returned: deque[Queued] = field(default_factory=deque)
    waiting: deque[Queued] = field(default_factory=deque)


class ContributionQueue:
    """Contributions and seeds in the order of arrival, by aggregator shard, bounded in bytes.

    Two bounds hold: per sender, so that one island with a backlog leaves room for the others, and in total. A sender
    of which nothing waits may always put in one message while the total allows it, so that a limit below
    the size of a contribution delays an island but never shuts it out.
    """

    __slots__ = ("_by_sender", "_identities", "_lanes", "_per_sender_bytes", "_total_bytes", "queued_bytes")

    def __init__(self, *, per_sender_bytes: int, total_bytes: int) -> None:
        self._per_sender_bytes = per_sender_bytes
        self._total_bytes = total_bytes
        self._lanes: dict[int, _Lane] = {}
        self._identities: set[tuple[object, ...]] = set()
        self._by_sender: dict[str, int] = {}
        self.queued_bytes = 0

    def holds(self, item: Queued) -> bool:
        """Returns whether a copy of ``item`` is queued already."""
        return item.identity in self._identities

    def full_for(self, item: Queued) -> str | None:
        """Returns the limit that ``item`` would exceed, or None if there is room."""
        own = self._by_sender.get(item.envelope.sender, 0)
        if own and own + item.size_bytes > self._per_sender_bytes:
            return f"{own} bytes of this sender wait already, the limit is {self._per_sender_bytes}"
        if self.queued_bytes and self.queued_bytes + item.size_bytes > self._total_bytes:
            return f"{self.queued_bytes} bytes wait already, the limit is {self._total_bytes}"
        return None

    def push(self, shard: int, item: Queued, *, back: bool = False) -> None:
        """Appends ``item`` to the shard's lane; the caller has checked :meth:`full_for`.

        One that was taken and comes ``back``, since it could not be sent, goes before all others, after those that came
        back earlier.
        """
        lane, sender = self._lanes.setdefault(shard, _Lane()), item.envelope.sender
        (lane.returned if back else lane.waiting).append(item)
        self._identities.add(item.identity)
        self.queued_bytes += item.size_bytes
        self._by_sender[sender] = self._by_sender.get(sender, 0) + item.size_bytes

    def waits(self, shard: int) -> bool:
        """Returns whether anything waits for a shard."""
        return shard in self._lanes

    def take(self, shard: int, most: int | None = None) -> list[Queued]:
        """Removes and returns a shard's queued messages, oldest first: at most ``most``, or all."""
        lane = self._lanes.get(shard)
        if lane is None:
            return []
        both = len(lane.returned) + len(lane.waiting)
        items = [(lane.returned or lane.waiting).popleft() for _ in range(both if most is None else min(most, both))]
        if len(items) == both:
            del self._lanes[shard]
        for item in items:
            sender = item.envelope.sender
            self._identities.discard(item.identity)
            self.queued_bytes -= item.size_bytes
            left = self._by_sender.pop(sender, 0) - item.size_bytes
            if left > 0:
                self._by_sender[sender] = left
        return items
