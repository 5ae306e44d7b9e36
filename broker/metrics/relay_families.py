"""The metrics of a broker, from its reports to Redis and the members that it hears. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from broker.metrics.family import Families, Family
from broker.routing.directory import JOINING
from broker.routing.liveness import Liveness, LivenessConfig, liveness
from broker.wire.records import BrokerRecord, MemberRecord

#: In the place of the names of processes that ask to become an island: each has a new one.
_JOINING = "(joining)"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSnapshot:
    """A broker at one moment.

    Attributes:
        run_id: Of its run.
        name: Its own.
        record: Its counters.
        members: The islands that it has heard.
        refused: Sender -> reason -> messages.
        liveness: The allowances for silence.
        redis_connected: Whether its last report to Redis was taken.
        wall_s: Seconds since 1970.
    """

    run_id: str
    name: str
    record: BrokerRecord
    members: Sequence[MemberRecord]
    refused: Mapping[str, Mapping[str, int]]
    liveness: LivenessConfig
    redis_connected: bool
    wall_s: float


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
