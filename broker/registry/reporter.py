"""The broker's reports to Redis, membership on behalf of islands and its counters, and its metrics.

Redis is a place to look, never a step on anyone's way. The relay's observations are noted here in memory, the newest
of each island; a task of its own writes what has changed twice a second and everything every few seconds, so that a
Redis that was away, was slow, or came back empty ends up right without anyone asking why.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from broker.base.errors import Unavailable
from broker.metrics.family import Families, Family
from broker.process import clocks, logs
from broker.registry.registry import Registry
from broker.routing.directory import JOINING
from broker.routing.liveness import Liveness, LivenessConfig, liveness
from broker.routing.relay import Relay
from broker.wire.messages import Envelope, Heartbeat, Leave, Welcome
from broker.wire.records import BrokerRecord, MemberRecord

log = logs.get(__name__)

#: Everything is written this often, changed or not: an emptied Redis may look exactly like one that was never gone.
REWRITE_S = 5.0
#: In the place of the names of processes that ask to become an island: each has a new one.
_JOINING = "(joining)"


@dataclass(slots=True)
class _Noted:
    """An island's newest record and when it was heard, by the broker's clock."""

    record: MemberRecord
    heard_s: float
    sequence: int  # of the message it comes from
    written: bool = False


class MembersSeen:
    """The records of islands that are to be written to Redis, at most ``max_islands``. Pure."""

    def __init__(self, *, max_islands: int) -> None:
        self._max_islands = max_islands
        self._noted: dict[str, _Noted] = {}

    def observe(self, envelope: Envelope, now_s: float) -> None:
        """Notes a message that the relay let pass; later lives of an island replace earlier ones."""
        match envelope.message:
            case Heartbeat() as beat:
                record = MemberRecord(
                    island_id=envelope.sender,
                    incarnation=envelope.incarnation,
                    inner_step=beat.inner_step,
                    tokens=beat.tokens,
                    loss=beat.loss,
                    step_time_s=beat.step_time_s,
                    sync_share=beat.sync_share,
                    bytes_up=beat.bytes_up,
                    bytes_down=beat.bytes_down,
                    stopped=beat.stopped,
                    optimizer=beat.optimizer,
                    link=None if beat.link is None else dataclasses.asdict(beat.link),
                )
            case Leave() as leave:
                sender, life = envelope.sender, envelope.incarnation
                known = self._noted.get(sender)
                record = MemberRecord(island_id=sender, incarnation=life, inner_step=0, tokens=0)
                if known is not None and known.record.incarnation == life:
                    record = known.record
                record = dataclasses.replace(record, inner_step=leave.inner_step, tokens=leave.tokens, left=True)
            case Welcome() as welcome:
                record = MemberRecord(
                    island_id=welcome.island_id,
                    incarnation=welcome.incarnation,
                    inner_step=welcome.start_step,
                    tokens=welcome.start_tokens,
                )
            case _:
                return
        known = self._noted.pop(record.island_id, None)  # those heard last stand last
        if known is not None and not _replaces(record, known, envelope):
            self._noted[record.island_id] = known
            return
        if len(self._noted) >= self._max_islands:
            del self._noted[next(iter(self._noted))]
        self._noted[record.island_id] = _Noted(record=record, heard_s=now_s, sequence=envelope.sequence)

    def allow(self, may_be: Callable[[str], bool]) -> None:
        """Applies a change of the allow list: marks islands that lost their key, or have one again."""
        for island_id, noted in self._noted.items():
            revoked = not may_be(island_id)
            if revoked is not noted.record.revoked:
                noted.record, noted.written = dataclasses.replace(noted.record, revoked=revoked), False

    def due(self, now_s: float, *, everything: bool) -> list[MemberRecord]:
        """Returns the records changed since :meth:`written`, or all of them, with their ages at ``now_s``."""
        return [
            dataclasses.replace(noted.record, heard_ago_s=now_s - noted.heard_s)
            for noted in self._noted.values()
            if everything or not noted.written
        ]

    def written(self, records: list[MemberRecord], started_s: float) -> None:
        """Notes that ``records``, collected at ``started_s``, are in Redis."""
        for record in records:
            noted = self._noted.get(record.island_id)
            if noted is not None and noted.heard_s <= started_s:
                noted.written = True


def _replaces(record: MemberRecord, known: _Noted, envelope: Envelope) -> bool:
    if record.incarnation != known.record.incarnation:
        return record.incarnation > known.record.incarnation
    if isinstance(envelope.message, Welcome):
        return False  # a repeated welcome says less than the heartbeats since
    if record.left or not known.record.left:
        return True
    # A heartbeat that Leave has overtaken does not bring an island back; one of the process that goes on does.
    return envelope.sequence > known.sequence


class Reporter:
    """Writes membership and the relay's counters to Redis until it is cancelled."""

    def __init__(
        self,
        registry: Registry,
        relay: Relay,
        *,
        name: str,
        liveness: LivenessConfig,
        interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.membership = MembersSeen(max_islands=relay.config.max_peers)
        self._registry = registry
        self._relay = relay
        self.name = name  #: of this broker, in Redis
        self._liveness = liveness
        self._interval_s = interval_s
        self._clock = clock
        self._lost = False
        self._complete_at_s = clock()  # when everything is due again

    async def run(self) -> None:
        """Writes now and every ``interval_s``; a failure is logged when it begins and when it ends."""
        while True:
            await self.write()
            await asyncio.sleep(self._interval_s)

    async def write(self) -> bool:
        """Writes the records that are due; returns True if Redis took them."""
        started_s = self._clock()
        everything = self._lost or started_s >= self._complete_at_s
        records = self.membership.due(started_s, everything=everything)
        # Copied now: while Redis thinks, the relay goes on counting.
        refused = self._refused()
        try:
            await self._registry.write_broker(self.name, self._record())
            await self._registry.write_refusals(f"broker:{self.name}", refused)
            await self._registry.write_members(self.name, records)
        except Unavailable as err:
            if not self._lost:
                log.warning("redis.lost", detail=str(err), cure="training goes on; status is blind until it is back")
            self._lost = True
            return False
        if self._lost:
            log.info("redis.back", address=self._registry.address, islands=len(records))
        self._lost = False
        self.membership.written(records, started_s)
        if everything:
            self._complete_at_s = started_s + REWRITE_S
        return True

    def snapshot(self) -> BrokerSnapshot:
        """Returns the figures of the moment, for metrics."""
        return BrokerSnapshot(
            run_id=self._registry.run_id,
            name=self.name,
            record=self._record(),
            members=self.membership.due(self._clock(), everything=True),
            refused=self._refused(),
            liveness=self._liveness,
            redis_connected=not self._lost,
            wall_s=clocks.wall(),
        )

    def _refused(self) -> dict[str, dict[str, int]]:
        """Returns a copy of sender -> reason -> messages refused."""
        refused = self._relay.counters.refused
        return {sender: {str(reason): n for reason, n in reasons.items()} for sender, reasons in refused.items()}

    def _record(self) -> BrokerRecord:
        counters = self._relay.counters
        return BrokerRecord(
            suspect_after_s=self._liveness.suspect_after_s,
            dead_after_s=self._liveness.dead_after_s,
            peers=self._relay.num_peers,
            received_messages=counters.received_messages,
            received_bytes=counters.received_bytes,
            sent_messages=counters.sent_messages,
            sent_bytes=counters.sent_bytes,
            queued_bytes=self._relay.queued_bytes,
            held_bytes=self._relay.held_bytes,
            repeated_messages=counters.repeated_messages,
            dropped=dict(counters.dropped),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSnapshot:
    """A broker at one moment."""

    run_id: str
    name: str
    record: BrokerRecord
    members: Sequence[MemberRecord]  # the islands that it has heard
    refused: Mapping[str, Mapping[str, int]]  # sender -> reason -> messages
    liveness: LivenessConfig
    redis_connected: bool  # its last report to Redis was taken
    wall_s: float  # since 1970


def families_of(now: BrokerSnapshot) -> list[Family]:
    """Returns the metrics of a broker."""
    own, record = Families("atoll_broker", run=now.run_id, broker=now.name), now.record
    refused: Counter[tuple[str, str]] = Counter()
    for sender, reasons in now.refused.items():
        for reason, count in reasons.items():
            refused[_JOINING if sender.startswith(JOINING) else sender, reason] += count
    states = {
        each.island_id: Liveness.LEFT if each.left else liveness(each.heard_ago_s, now.liveness) for each in now.members
    }
    heard = {each.island_id: now.wall_s - each.heard_ago_s for each in now.members}

    own.gauge("peers", "Islands, standbys and processes about to join that the broker knows.", record.peers)
    own.counter("received_messages", "Messages received.", record.received_messages)
    own.counter("received_bytes", "Bytes of messages received.", record.received_bytes)
    own.counter("sent_messages", "Messages sent.", record.sent_messages)
    own.counter("sent_bytes", "Bytes of messages sent.", record.sent_bytes)
    own.counter("repeated_messages", "Messages refused because they had come before.", record.repeated_messages)
    own.counter("refused_messages", "Messages refused, by sender and reason.", refused, "sender", "reason")
    own.counter("dropped_messages", "Messages that went nowhere, by cause.", record.dropped, "cause")
    own.gauge("queued_bytes", "Bytes of contributions that wait for an aggregator.", record.queued_bytes)
    own.gauge("held_bytes", "Bytes of versions and other messages that the broker holds.", record.held_bytes)
    own.gauge("redis_connected", "1 if Redis took the last report, else 0.", float(now.redis_connected))
    own.state("island_state", "1 in the state of the island by its silence at this broker.", states, Liveness, "island")
    own.gauge("island_heard_timestamp_seconds", "When this broker heard the island last.", heard, "island")
    return own.all
