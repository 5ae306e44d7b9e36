"""The records of a run in Redis, as plain dataclasses.

The keys and the operations are in :mod:`broker.registry.registry`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from broker.base.errors import Unavailable

#: An aggregator renews its lease about twice a second; one that did not for so long has ended, hangs, or lost Redis.
LEADER_WITHIN_S = 10.0
#: A broker writes its record about twice a second; one that did not for so long has ended, hangs, or lost Redis.
BROKER_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """An island's state from its last heartbeat or ``leave``, ``heard_ago_s`` seconds ago."""

    island_id: str
    incarnation: int
    inner_step: int
    tokens: int
    loss: float | None = None
    step_time_s: float | None = None
    sync_share: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    stopped: bool = False
    left: bool = False
    revoked: bool = False  # no key is good for its name any more
    optimizer: str = ""  # what its inner optimizer started from, as :class:`broker.wire.messages.StateSource` spells it
    heard_ago_s: float = 0.0
    link: Mapping[str, Any] | None = None  # as :class:`broker.wire.messages.LinkUse`


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentRecord:
    """The newest durable version of a fragment, committed ``committed_ago_s`` seconds ago.

    ``merged_tokens`` counts all versions so far; ``contributors`` are the islands of this one, none for version 0.
    """

    fragment_id: int
    version: int
    epoch: int
    digest: str
    merged_tokens: int
    contributors: tuple[str, ...]
    committed_ago_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """The totals of a run in tokens: ``trained = merged + wasted + in flight``.

    Attributes:
        wasted_tokens: Cause -> tokens.
        rounds: Number of contributors -> number of rounds that closed with it.
        loss: Mean of the islands' training losses, None while there is none.
        progress: Part of ``target_tokens`` that is trained, 0 to 1; 0 for a run without an end.
        participation: Mean share of the live islands in a version, None before the first.
        staleness_mean: Mean staleness of merged contributions, in versions; None before the first.
        agreement: Cosine by which islands agree, a mean over the last versions; None before two were merged together.
        momentum_cosine: Cosine of a merge with the momentum before it, averaged in the same way.
        trust: Island that has not all of its weight -> ``trust``, the share that it has, its own ``agreement``, the
            ``usual`` one that is expected of it (both None before it was compared), and whether it is ``new``.
        interval: Where rounds are farther apart than the recipe's sync_interval: by how many inner ``steps``, and
            ``because`` of what; empty elsewhere.
        journey: Inner ``steps`` that a fragment is on its way, ``of`` those of an interval, and the ``cost``, by which
            share of itself that raises the loss. Empty where it is below one in a hundred.
        quarantined: Island -> for how many seconds more (``for_s``), for which ``reason``, how many ``times`` in a row.
        troubles: Problems that the aggregator cannot solve by itself, each with its cure.
        books: The same tokens exactly, in parts of a token, for sums over shards.
        recipe: Setting -> value of the recipe, without settings that are open until the first island joins.
        epoch: Of the life of the aggregator that has counted.
        earlier: Island -> ``tokens``, ``bytes_up`` and ``bytes_down`` of its earlier lives, to be added to the counters
            of its heartbeats; islands with nothing to add are not in it.
    """

    phase: str
    trained_tokens: int
    merged_tokens: int
    in_flight_tokens: int
    target_tokens: int
    progress: float
    loss: float | None = None
    model_version: int = 0
    wasted_tokens: Mapping[str, int] = field(default_factory=dict)
    rounds: Mapping[int, int] = field(default_factory=dict)
    participation: float | None = None
    staleness_mean: float | None = None
    agreement: float | None = None
    momentum_cosine: float | None = None
    trust: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    interval: Mapping[str, Any] = field(default_factory=dict)
    journey: Mapping[str, Any] = field(default_factory=dict)
    quarantined: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    troubles: tuple[str, ...] = ()
    books: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    epoch: int = 0
    earlier: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRecord:
    """A broker's counters since its start, and the time limits by which status judges silence."""

    suspect_after_s: float
    dead_after_s: float
    peers: int
    received_messages: int
    received_bytes: int
    sent_messages: int
    sent_bytes: int
    queued_bytes: int
    held_bytes: int
    repeated_messages: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """The current lease.

    Attributes:
        holder: Name of the leader; empty if there is no key.
        epoch: Under which it leads; 0 if there is no key.
        in_sync: The stores with every published version, which may take over, the leader included. Empty if an earlier
            release wrote it, without failover.
        synced: The epoch under which they were in sync: that of the leader before, until a successor has renewed. 0:
            none, because there was no lease before, or none that said anything.
        standbys: Other standbys known to the leader at its last renewal, in sync or not.
        age_s: Since it was renewed, by the clock of Redis; below 0 where that clock was set back.
        ended: Its holder has ended the run, and nobody need take over.
    """

    holder: str = ""
    epoch: int = 0
    in_sync: frozenset[str] = frozenset()
    synced: int = 0
    standbys: frozenset[str] = frozenset()
    age_s: float = 0.0
    ended: bool = False

    @classmethod
    def of(cls, held: Mapping[str, str], now_s: float) -> Self:
        """Returns the lease from the fields of its key.

        Raises:
            Unavailable: They are those of no lease, which is as bad as no answer.
        """
        if not held:
            return cls()
        try:
            return cls(
                holder=held["holder"],
                epoch=int(held["epoch"]),
                in_sync=frozenset(json.loads(held.get("in_sync", "[]"))),
                synced=int(held.get("synced", held["epoch"])),
                standbys=frozenset(json.loads(held.get("standbys", "[]"))),
                age_s=now_s - float(held["renewed_at"]),
                ended=held.get("ended") == "1",
            )
        except (ValueError, KeyError, TypeError) as err:
            cure = "delete that key; the leader writes it again"
            raise Unavailable(f"the value in Redis is no lease: {err!r}; {cure}", definite=True) from err

    def expired(self, lease_s: float) -> bool:
        """Returns True if the lease has run out; a clock that was set back counts against the holder."""
        return self.age_s >= lease_s or self.age_s < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All records of a run in Redis; times are seconds of the clock of Redis."""

    run_id: str
    now_s: float
    heard_at_s: Mapping[str, float]
    members: Mapping[str, Mapping[str, Any]]
    fragments: Mapping[int, Mapping[str, Any]]
    totals: Sequence[Mapping[str, Any]]  # of each shard; empty before the first has said anything
    brokers: Mapping[str, Mapping[str, Any]]
    refusals: Mapping[str, Mapping[str, Mapping[str, int]]]  # source -> island -> reason -> count
    leases: Mapping[int, LeaseView]  # those that somebody ever took
    evaluation: Mapping[str, Any] = field(default_factory=dict)  # the newest, if anybody evaluates the run

    @property
    def empty(self) -> bool:
        """True if Redis has nothing about this run."""
        return not (self.heard_at_s or self.fragments or self.totals or self.brokers)


#: The place of an event in the stream of a run: milliseconds by the clock of Redis, and a count within one of them.
EventNumber = tuple[int, int]
NumberedEvent = tuple[EventNumber, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptVersion:
    """One version of a fragment in Redis, which keeps the newest ones with contributions."""

    fragment_id: int
    found: Mapping[str, Any] | None  # what its aggregator noted when it was made; None: this version is not there
    known: Sequence[int]  # the versions of this fragment that are there, in order
