"""The status of a run, from its records in Redis: islands, fragments, totals.

:func:`status_of` is pure: what stands in Redis and the time there make a :class:`Status`. No process of the run is
asked, so it answers during a run, after it, and while half of it is down; how old its knowledge is, it says itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from broker.routing.liveness import Liveness, LivenessConfig, liveness
from broker.wire.messages import Phase
from broker.wire.records import Snapshot
from ops.story.curve import Point
from ops.story.shards import one_total
from ops.text import age


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandStatus:
    """One island.

    Attributes:
        tokens: Trained by all its lives, as ``bytes_up`` and ``bytes_down`` are of all; ``inner_step`` is where it is.
        broker: The one it was last heard by.
        link: Its link and the use of it (:class:`broker.wire.messages.LinkUse`), once reported.
        optimizer: Start of its inner optimizer: pending, checkpoint, donor or fresh; empty while not heard.
        refusals: Reason -> its messages that brokers and aggregator refused.
        revoked: Its key was taken off the broker's allow list.
    """

    state: Liveness
    incarnation: int = 0
    inner_step: int = 0
    tokens: int = 0
    loss: float | None = None
    step_time_s: float | None = None
    last_seen_s: float
    sync_share: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    refusals: Mapping[str, int]
    broker: str = ""
    optimizer: str = ""
    link: Mapping[str, Any] | None = None
    revoked: bool = False


#: What is shown of an island as brokers have written it.
_REPORTED = {each.name for each in fields(IslandStatus)} - {"state", "last_seen_s", "refusals"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerStatus:
    """One broker: the time since it last wrote, and the number of live islands last heard by it."""

    age_s: float
    silent: bool
    islands: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentStatus:
    """One fragment; ``contributors`` are the islands in its newest version."""

    version: int
    age_s: float
    contributors: tuple[str, ...]
    merged_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """The leader of one shard of the fragments, by its lease.

    Attributes:
        leader: Name of the aggregator that holds the lease.
        age_s: Since it renewed the lease.
        in_sync: Aggregators with every published version, the leader among them; they alone may take over.
        standbys: The other aggregators that the leader hears, in sync or not.
        ended: The leader has ended the run.
    """

    leader: str
    epoch: int
    age_s: float
    in_sync: tuple[str, ...]
    standbys: tuple[str, ...]
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A run as Redis knows it.

    Attributes:
        broker_age_s: Since a broker last wrote; None if none ever did. Ages of islands are no younger than this.
        brokers: Name -> how it is.
        totals: The aggregator's counts, with ``islands`` (state -> how many), ``refusals`` (reason -> messages of all
            senders) and ``broker_age_s``.
        shards: Shard -> who leads it, of those that anybody ever led.
        evaluation: The newest evaluation of the global model; None where nobody evaluates it.
        stopped: Its processes are gone, and it has not ended: :func:`stopped`.
    """

    run_id: str
    islands: Mapping[str, IslandStatus]
    fragments: Mapping[int, FragmentStatus]
    totals: Mapping[str, Any]
    broker_age_s: float | None
    broker_is_silent: bool
    brokers: Mapping[str, BrokerStatus] = field(default_factory=dict)
    shards: Mapping[int, ShardStatus] = field(default_factory=dict)
    evaluation: Point | None = None
    stopped: bool = False


def status_of(snapshot: Snapshot, now_s: float) -> Status:
    """Returns the status of a run at ``now_s``, by the clock of Redis, from its records there."""
    allowances = LivenessConfig()
    # Brokers of one run have one configuration; after a change the one that wrote last counts.
    newest = max(snapshot.brokers.values(), key=lambda each: each.get("written_at", 0.0), default={})
    suspect_s = newest.get("suspect_after_s", allowances.suspect_after_s)
    dead_s = newest.get("dead_after_s", allowances.dead_after_s)
    # Only the two limits matter here; the interval merely has to fit them.
    allowances = LivenessConfig(
        heartbeat_interval_s=min(suspect_s / 2, dead_s / 3), suspect_after_s=suspect_s, dead_after_s=dead_s
    )
    refusals = _refusals_by_sender(snapshot)
    total = one_total(snapshot.totals) if snapshot.totals else {}
    earlier = total.pop("earlier", {})
    islands = {
        island_id: _island(
            snapshot.members.get(island_id, {}),
            earlier.get(island_id, {}),
            now_s - heard_at_s,
            allowances,
            refusals.get(island_id, {}),
        )
        for island_id, heard_at_s in sorted(snapshot.heard_at_s.items())
    }
    fragments = {
        p: FragmentStatus(
            version=int(held["version"]),
            age_s=max(0.0, now_s - float(held["committed_at"])),
            contributors=tuple(held["contributors"]),
            merged_tokens=int(held["merged_tokens"]),
        )
        for p, held in sorted(snapshot.fragments.items())
    }
    ages_s = {name: max(0.0, now_s - each["written_at"]) for name, each in snapshot.brokers.items() if each}
    broker_age_s = min(ages_s.values(), default=None)
    live = (Liveness.ALIVE, Liveness.SUSPECT)
    speaking = Counter(each.broker for each in islands.values() if each.state in live)
    brokers = {
        name: BrokerStatus(age_s=age_s, silent=age_s >= dead_s, islands=speaking[name])
        for name, age_s in sorted(ages_s.items())
    }
    shards = {
        shard: ShardStatus(
            leader=lease.holder,
            epoch=lease.epoch,
            age_s=max(0.0, now_s - snapshot.now_s + lease.age_s),
            in_sync=tuple(sorted(lease.in_sync)),
            standbys=tuple(sorted(lease.standbys)),
            ended=lease.ended,
        )
        for shard, lease in sorted(snapshot.leases.items())
    }
    states = Counter(str(each.state) for each in islands.values())
    totals = {
        **total,
        "islands": {str(state): states[str(state)] for state in Liveness},
        "refusals": dict(sorted(sum(refusals.values(), Counter[str]()).items())),
        "broker_age_s": broker_age_s,
    }
    return Status(
        run_id=snapshot.run_id,
        islands=islands,
        fragments=fragments,
        totals=totals,
        broker_age_s=broker_age_s,
        broker_is_silent=broker_age_s is None or broker_age_s >= dead_s,
        brokers=brokers,
        shards=shards,
        evaluation=Point.of(snapshot.evaluation),
    )


def stopped(status: Status) -> Status:
    """Returns the status of a run whose processes are all gone; one that has ended stays as it is."""
    if status.totals.get("phase") == Phase.ENDED:
        return status
    return replace(status, stopped=True, totals={**status.totals, "phase": "stopped"})


def is_current(status: Status, since_s: float) -> bool:
    """Returns True if every shard was led in ``since_s`` seconds, and the present leader counted.

    A Redis that comes back from a file has those of an earlier life of the run at first.
    """
    led = bool(status.shards) and all(each.age_s <= since_s for each in status.shards.values())
    return led and status.totals.get("epoch") == next(iter(status.shards.values())).epoch


def leaderless(status: Status, within_s: float) -> str:
    """Returns why a shard has no leader that renewed its lease in ``within_s``; empty if each has one."""
    if not status.shards:
        return f"run {status.run_id} has no leader: no aggregator has taken its lease"
    for shard, each in status.shards.items():
        if each.age_s > within_s:
            what = f"run {status.run_id}" if len(status.shards) == 1 else f"shard {shard} of run {status.run_id}"
            since = f"{age(each.age_s)} ago, the limit is {age(within_s)}"
            return f"{what} has no leader: aggregator {each.leader} renewed its lease {since}"
    return ""


def brokerless(status: Status, within_s: float) -> str:
    """Returns an error if no broker of a run wrote to Redis within ``within_s``; empty if one did."""
    if status.broker_age_s is None:
        return f"run {status.run_id} has no broker: none has written to Redis"
    if status.broker_age_s > within_s:
        since = f"{age(status.broker_age_s)} ago, the limit is {age(within_s)}"
        return f"run {status.run_id} has no broker: the last one wrote to Redis {since}"
    return ""


def _refusals_by_sender(snapshot: Snapshot) -> dict[str, Counter[str]]:
    summed: dict[str, Counter[str]] = {}
    for by_sender in snapshot.refusals.values():
        for sender, reasons in by_sender.items():
            summed.setdefault(sender, Counter()).update(reasons)
    return summed


def _island(
    member: Mapping[str, Any],
    earlier: Mapping[str, int],
    silent_s: float,
    allowances: LivenessConfig,
    refusals: Mapping[str, int],
) -> IslandStatus:
    known = {name: member[name] for name in _REPORTED if name in member}
    known |= {name: known.get(name, 0) + count for name, count in earlier.items() if name in _REPORTED}
    last_seen_s = max(0.0, silent_s)
    state = Liveness.LEFT if member.get("left") else liveness(last_seen_s, allowances)
    return IslandStatus(**known, state=state, last_seen_s=last_seen_s, refusals=dict(sorted(refusals.items())))
