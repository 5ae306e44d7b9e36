"""Reports to Redis: model versions and their islands, totals, refusals, the lease and events.

Shell. Redis is a place to look, never a step on anyone's way: a task of its own writes what has changed, coalesced, and
everything every few seconds and after an outage, so that a Redis that was away or came back empty ends up right.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aggregator.process.lease import LeaseKey
from broker.base.errors import Unavailable
from broker.process import logs
from broker.registry.registry import Registry, aggregator_source
from broker.wire.records import LEADER_WITHIN_S, FragmentRecord, RunTotals

log = logs.get(__name__)

#: Everything is written this often, changed or not: an emptied Redis may look exactly like one that was never gone.
REWRITE_S = 5.0
#: Two writes are at least so far apart, however much changes.
PAUSE_S = 0.1
#: Events kept while Redis is away; the oldest are dropped.
MAX_EVENTS = 1000
#: Likewise of versions.
MAX_VERSIONS = 200
#: Contributions that are told of one version; of more the lightest are only counted.
MAX_CONTRIBUTIONS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The records for Redis, collected at one moment."""

    epoch: int
    fragments: Sequence[FragmentRecord]
    totals: RunTotals
    refusals: Mapping[str, Mapping[str, int]]


class Reporter:
    """Writes snapshots until it is cancelled.

    Args:
        registry: Of the run.
        collect: Returns the state of the moment.
        shard: Of this aggregator.
        lease: To say in it who leads; None where :mod:`aggregator.process.lease` keeps the lease itself.
        holder: Names this aggregator there.
        clock: Monotonic seconds.
        interval_s: Between two writes, while nothing asks for an earlier one.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        collect: Callable[[], Snapshot],
        shard: int = 0,
        lease: LeaseKey | None,
        holder: str,
        clock: Callable[[], float],
        interval_s: float = 0.5,
    ) -> None:
        self._registry = registry
        self._collect = collect
        self._shard = shard
        self._lease = lease
        self._holder = holder
        self._clock = clock
        self._interval_s = interval_s
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._versions: deque[dict[str, Any]] = deque(maxlen=MAX_VERSIONS)
        self._number = 0
        self._written: dict[int, int] = {}  # fragment -> version that stands there
        self._changed = asyncio.Event()
        self._lost = False
        self._leased: bool | None = None  # None before the first answer
        self._held_s = -math.inf  # age of another one's lease, when it was looked at last
        self._complete_at_s = clock()  # when everything is due again

    def note(self, name: str, fields: Mapping[str, Any]) -> None:
        """Remembers an event for the stream; numbered, since an outage may leave a copy there."""
        self._number += 1
        self._events.append({"n": self._number, "event": name, **fields})

    def committed(self, fields: Mapping[str, Any]) -> None:
        """Remembers the contributors of a version."""
        everybody = fields["contributions"]
        heaviest = sorted(range(len(everybody)), key=lambda i: -everybody[i]["merge_weight"])[:MAX_CONTRIBUTIONS]
        told = [everybody[i] for i in sorted(heaviest)]
        self._versions.append({**fields, "contributions": told, "left_out": len(everybody) - len(told)})

    def changed(self) -> None:
        """Asks for a write soon."""
        self._changed.set()

    async def run(self) -> None:
        """Writes now, every ``interval_s``, and sooner after a change."""
        while True:
            await self.write()
            await asyncio.sleep(PAUSE_S)
            try:
                async with asyncio.timeout(self._interval_s - PAUSE_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._changed.clear()

    async def write(self) -> bool:
        """Writes what is due; says whether Redis took it. A failure is logged when it begins and when it ends."""
        started_s = self._clock()
        everything = self._lost or started_s >= self._complete_at_s
        now = self._collect()
        due = [each for each in now.fragments if everything or self._written.get(each.fragment_id) != each.version]
        events, versions = list(self._events), list(self._versions)
        try:
            if self._lease is not None:
                await self._lead(self._lease, now.epoch)
            taken = await self._registry.write_fragments(due)
            await self._registry.write_totals(now.totals, self._shard)
            await self._registry.write_refusals(aggregator_source(self._shard), now.refusals)
            await self._registry.write_versions([{**each, "epoch": now.epoch} for each in versions])
            await self._registry.append_events(events)
        except Unavailable as err:
            if not self._lost:
                log.warning("redis.lost", detail=str(err), cure="training goes on; status is blind until it is back")
            self._lost = True
            return False
        if self._lost:
            log.info("redis.back", address=self._registry.address)
        self._lost = False
        last = events[-1]["n"] if events else 0
        while self._events and self._events[0]["n"] <= last:
            self._events.popleft()
        while self._versions and any(self._versions[0] is each for each in versions):
            self._versions.popleft()
        if taken == len(due):
            self._written.update({each.fragment_id: each.version for each in due})
        if everything:
            self._complete_at_s = started_s + REWRITE_S
        return True

    async def _lead(self, lease: LeaseKey, epoch: int) -> None:
        """Takes or renews the lease, as a fact to report: routing goes by the epoch at the broker."""
        granted, holder, their_epoch = await lease.lead(holder=self._holder, epoch=epoch)
        if not granted and self._leased is not False:
            age_s, before_s = (await lease.read()).age_s, self._held_s
            self._held_s, lives = age_s, age_s < before_s
            if not lives and age_s <= LEADER_WITHIN_S:
                return  # later looks show whether anybody renews it
            # One that has ended stays the leader by its lease: its store held something newer than ours does.
            ended = (
                "it has ended, perhaps as this one's former life, and knew more than this store: restore that store; "
                "or give a new run another --run; status names the other until then"
            )
            cure = "end the other aggregator" if lives else ended
            facts = {"holder": holder, "epoch": their_epoch, "our_epoch": epoch, "renewed_s_ago": round(age_s)}
            log.warning("lease.held", **facts, cure=cure)
        elif granted and not self._leased:
            log.info("lease.taken", holder=holder, epoch=epoch)
        self._leased = granted
