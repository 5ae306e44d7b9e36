"""The broker's queues: the newest version of each fragment, and contributions for aggregators.

Both are pure containers with their rules; :mod:`broker.routing.deliveries` decides when to use them. Everything kept
here is counted in bytes, because a broker that runs out of memory takes the whole run's traffic with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from broker.wire.messages import Contribution, Encoded, Envelope, HostPart, Seed, Stored, Version
from broker.wire.tensors import payload_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldVersion:
    """A version as it came from its aggregator, ready to be sent to any island.

    Attributes:
        envelope: Its message is ``version``; the payload is never looked into, nor copied.
        size_bytes: Header and buffers on the wire.
        number: Counts the versions put on the shelf: a smaller one has lain there longer.
    """

    envelope: Envelope
    version: Version
    size_bytes: int
    number: int


class VersionShelf:
    """The newest version of each fragment: at most one model, whatever the number of islands."""

    __slots__ = ("_held", "_numbers", "held_bytes")

    def __init__(self) -> None:
        self._held: dict[int, HeldVersion] = {}
        self._numbers = 0
        self.held_bytes = 0

    def offer(self, envelope: Envelope, version: Version, size_bytes: int) -> bool:
        """Takes a version if it is newer, by (epoch, fragment version), than the one held; says whether it was."""
        held = self._held.get(version.fragment_id)
        if held is not None:
            if (version.epoch, version.fragment_version) <= (held.version.epoch, held.version.fragment_version):
                return False
            self.held_bytes -= held.size_bytes
        self._numbers += 1
        self._held[version.fragment_id] = HeldVersion(
            envelope=envelope, version=version, size_bytes=size_bytes, number=self._numbers
        )
        self.held_bytes += size_bytes
        return True

    def versions(self, num_fragments: int) -> tuple[int, ...]:
        """The fragment version held of each of the first ``num_fragments`` fragments, -1 for none."""
        return tuple(
            held.version.fragment_version if (held := self._held.get(p)) is not None else -1
            for p in range(num_fragments)
        )

    def stored(self, among: Callable[[int], bool]) -> tuple[Stored, ...]:
        """Returns the stored versions of some fragments, with their digests."""
        return tuple(
            Stored(fragment_id=p, fragment_version=held.version.fragment_version, digest=held.version.digest)
            for p, held in sorted(self._held.items())
            if among(p)
        )

    def choose(
        self, versions: tuple[int, ...], served: dict[int, int], under_way: Container[int] = ()
    ) -> HeldVersion | None:
        """Picks what an island is sent next, or None while it has everything.

        Among the fragments of which something newer is held, the one goes first that this island was sent the longest
        ago (never counts as longest), and among these the one that has lain here longest. So no fragment
        is starved, not even for an island whose link is slower than versions appear.

        Args:
            versions: Fragment version that the island has, by fragment; missing ones count as -1.
            served: Fragment -> number of this island's transfer that carried it last.
            under_way: Fragments of which something is being sent to it already.
        """
        newer = [
            held
            for p, held in self._held.items()
            if p not in under_way and held.version.fragment_version > (versions[p] if p < len(versions) else -1)
        ]
        return min(newer, key=lambda held: (served.get(held.version.fragment_id, 0), held.number), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A contribution or a seed that waits until its aggregator takes more."""

    envelope: Envelope
    size_bytes: int

    @property
    def least_bytes(self) -> int:
        """Returns the smallest size on the wire, in bytes: headers are packed anew, and may have been longer before."""
        payload = getattr(self.envelope.message, "payload", None)
        if not isinstance(payload, tuple) or not all(isinstance(each, Encoded) for each in payload):
            return self.size_bytes  # virtual time has stand-ins for buffers, and a size for them
        return payload_bytes(payload)

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for two copies of the same thing: the second needs no place in the queue."""
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
    """The queue for one aggregator shard; ``returned`` messages could not be sent, and go first."""

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
        """Whether a copy of ``item`` waits already."""
        return item.identity in self._identities

    def full_for(self, item: Queued) -> str | None:
        """Says which bound ``item`` would break, or None when there is room."""
        own = self._by_sender.get(item.envelope.sender, 0)
        if own and own + item.size_bytes > self._per_sender_bytes:
            return f"{own} bytes of this sender wait already, the limit is {self._per_sender_bytes}"
        if self.queued_bytes and self.queued_bytes + item.size_bytes > self._total_bytes:
            return f"{self.queued_bytes} bytes wait already, the limit is {self._total_bytes}"
        return None

    def push(self, shard: int, item: Queued) -> None:
        """Puts ``item`` at the end of the shard's lane; the caller has asked :meth:`full_for`."""
        self._lane(shard).waiting.append(self._counted(item))

    def put_back(self, shard: int, item: Queued) -> None:
        """Puts an item that was popped and could not be sent before all others, after those put back earlier."""
        self._lane(shard).returned.append(self._counted(item))

    def waits(self, shard: int) -> bool:
        """Whether anything waits for a shard."""
        return shard in self._lanes

    def take(self, shard: int, most: int | None = None) -> list[Queued]:
        """Takes what waits for a shard, oldest first: at most so many, everything without a number."""
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

    def _lane(self, shard: int) -> _Lane:
        return self._lanes.setdefault(shard, _Lane())

    def _counted(self, item: Queued) -> Queued:
        sender = item.envelope.sender
        self._identities.add(item.identity)
        self.queued_bytes += item.size_bytes
        self._by_sender[sender] = self._by_sender.get(sender, 0) + item.size_bytes
        return item
