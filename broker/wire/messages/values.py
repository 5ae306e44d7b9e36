"""Types shared by messages: channels, phases, fates, reasons, tensors, shares, addresses."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from broker.wire.number_formats import Codec
from broker.wire.ranges import StepRange

PROTOCOL_VERSION = 10


class Channel(StrEnum):
    """The broker's two ports. Small messages never queue behind tensors."""

    CONTROL = "control"
    BULK = "bulk"


class Role(StrEnum):
    """The role of a sender; the broker refuses messages from the wrong role."""

    ISLAND = "island"
    AGGREGATOR = "aggregator"
    STANDBY = "standby"
    BROKER = "broker"
    OBSERVER = "observer"


class Phase(StrEnum):
    """The phase of the run, for islands."""

    SEEDING = "seeding"  # version 0 is not complete yet
    RUNNING = "running"
    FLUSHING = "flushing"  # stop stepping, hand over everything: the last rounds are open
    ENDED = "ended"  # every fragment is flushed and durable


class StateSource(StrEnum):
    """The source of an island's optimizer state in its present life."""

    PENDING = "pending"  # not decided yet
    CHECKPOINT = "checkpoint"  # its own
    DONOR = "donor"  # another island's
    FRESH = "fresh"  # an optimizer that has seen no step


class Reason(StrEnum):
    """The reason of a refusal: one word for the sender, the log, the counters and status."""

    # the message itself (any kind)
    MALFORMED = "malformed"  # cannot be parsed, or a field is missing, unknown or of the wrong type
    PROTOCOL_VERSION = "protocol_version"
    UNKNOWN_KIND = "unknown_kind"
    WRONG_RUN = "wrong_run"
    OVERSIZE = "oversize"
    CHECKSUM = "checksum"
    WRONG_ROLE = "wrong_role"  # this kind may not come from that sender, or not on that channel
    WRONG_KEY = "wrong_key"  # the key of the connection is bound to another sender, or was revoked
    REPLAYED = "replayed"  # this sequence number has come over this connection before
    # joining
    UNKNOWN_ISLAND = "unknown_island"  # not a member: join (again) first
    FENCED = "fenced"  # a later incarnation of this island has joined
    MANIFEST = "manifest"  # the tensors differ from those of the run
    RECIPE = "recipe"  # it insists on a setting that the run's recipe has otherwise
    # a contribution, finally
    UNKNOWN_FRAGMENT = "unknown_fragment"
    WRONG_SHAPE = "wrong_shape"
    WRONG_DTYPE = "wrong_dtype"
    FUTURE_VERSION = "future_version"  # claims to have trained on a version that does not exist
    STALE = "stale"
    OVERLAP = "overlap"  # some of these steps were handed over already
    NOT_FINITE = "not_finite"
    OUTLIER = "outlier"  # far longer than what the fleet sends: its norm per step
    IMPLAUSIBLE = "implausible"  # counters that do not fit each other or the declared tokens per step
    QUARANTINED = "quarantined"  # the island has offended again and again: not looked at for a while
    LATE = "late"  # its round has closed, and the recipe holds none for the next one
    SHARE_MOVED = "share_moved"  # trained on data that is in the hands of another island by now
    RUN_ENDED = "run_ended"  # the run is over: nothing is merged any more
    # a contribution, for now: send it again
    QUEUE_FULL = "queue_full"
    NOT_LEADER = "not_leader"
    # waste that nobody refused
    OVERWRITTEN = "overwritten"  # steps dropped by adopting with keep = 0
    ISLAND_LOST = "island_lost"  # trained by an incarnation that ended before handing them over
    UNRECORDED = "unrecorded"  # a gap whose cause was lost with an aggregator
    STORE_LOST = "store_lost"  # merged into versions that were lost with a store, and given up by the operator
    ROLLED_BACK = "rolled_back"  # merged into versions that the operator went back behind, to a snapshot


RETRY_REASONS = frozenset({Reason.CHECKSUM, Reason.QUEUE_FULL, Reason.NOT_LEADER})


class Fate(StrEnum):
    """The fate of a contribution."""

    MERGED = "merged"
    REFUSED = "refused"  # final: its tokens are wasted, by the reason given
    RETRY = "retry"  # not taken, send again
    WAITING = "waiting"  # arrived: in the open round, held for the next one, or being merged
    UNKNOWN = "unknown"  # never seen here, or lost with a restart: send (again)


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Encoded:
    """One tensor on the wire."""

    codec: Codec
    shape: tuple[int, ...]
    checksum: int  # xxh3_64 of ``data``, unsigned
    data: Any  # bytes-like, often a view of a received frame; never copied on the way through the broker
    #: Its entry in a header, once it was checked and packed: a version goes to every island with the same ones.
    entry: bytes = field(default=b"", init=False, repr=False, compare=False)


#: One entry per tensor of the fragment, in manifest order. In virtual time it is whatever the driver merges.
Payload = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedOn:
    """``steps`` inner steps were run on ``fragment_version``."""

    fragment_version: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A buffer's place in a fragment: tensor, and first element of a region with the buffer's shape."""

    tensor: int
    start: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of the data in messages; always :data:`WHOLE`, since data go out in blocks."""

    index: int
    count: int
    share_epoch: int
    lane: int = 0
    cursor: int = 0


#: All of the data: what every island is told, since data go out in blocks of it.
WHOLE = Share(index=0, count=1, share_epoch=0)

#: Batches from here on are of a pass over the data of an island's own: no block reaches as far.
OWN_PASS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Batches ``[from_batch, to_batch)`` of the data as one island's block; ``number`` counts from 1.

    A number belongs to one life of one island, and never comes again. Batches are counted in the size that the island
    has declared, in one order that all islands share; it goes on through one pass over the data after the other.
    """

    number: int
    from_batch: int
    to_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRange:
    """Batches ``[from_batch, to_batch)`` of the block with number ``share``; ``share_epoch`` is 0.

    From :data:`OWN_PASS` on batches are of a pass of the island's own, which it trained after the block because it knew
    of no other one.
    """

    share: int
    share_epoch: int
    from_batch: int
    to_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """One contribution in a version: island, steps and weight."""

    island_id: str
    incarnation: int
    steps: StepRange
    staleness: float
    token_weight: float  # n * n / s, with n / s near the fleet's; of three or more at most half of the sum
    staleness_weight: float  # (1 + staleness) ** -a, times (share of live islands in the round) ** b, and less if cut
    merge_weight: float  # their product over the sum of token weights
    fresh: bool  # False: held over from an earlier round
    data: tuple[DataRange, ...] = ()  # what the steps were trained on


AGGREGATOR, BROKER = "aggregator", "broker"


def standing_by(name: str) -> str:
    """Returns the address of a standby aggregator."""
    return f"standby:{name}"


def observing(name: str) -> str:
    """Returns the address of an observer, which takes no part in the run."""
    return f"observer:{name}"


def joining(nonce: str) -> str:
    """Returns the address of a joining island without an id."""
    return f"join:{nonce}"
