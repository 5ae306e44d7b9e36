"""The rights of each role: its messages, by channel and shard. Pure.

Whether the sender is who it says is another question: :mod:`broker.routing.bindings` asks the key of its connection,
:mod:`broker.routing.presence` asks what has been heard before.
"""

from __future__ import annotations

from broker.routing.directory import JOINING, OBSERVING, STANDBY
from broker.routing.events import Received, Refusal
from broker.wire import messages as m
from broker.wire.fragments import shard_of
from broker.wire.messages import AGGREGATOR, BROKER, Reason, Role, kind_of


def improper(event: Received, *, run_id: str) -> Refusal | None:
    """Says why this sender may not send this kind over this channel in this run; None if it may."""
    envelope, kind = event.envelope, type(event.envelope.message)
    sender = envelope.sender
    if envelope.run_id != run_id and kind not in (m.Observe, m.Probe):  # whose answers say which run this is
        return Reason.WRONG_RUN, f"run is {envelope.run_id}, this broker serves {run_id}"
    if sender == BROKER:
        return Reason.WRONG_ROLE, f"sender is {BROKER}, a name that no peer may have"
    role = Role.STANDBY if sender.startswith(STANDBY) else Role.ISLAND
    role = Role.OBSERVER if sender.startswith(OBSERVING) else role
    role = Role.AGGREGATOR if sender == AGGREGATOR else role
    may_send = kind.role is role or (kind is m.Refused and role is Role.AGGREGATOR)
    if not may_send:
        return Reason.WRONG_ROLE, f"{kind_of(kind)} may not come from {sender}"
    if kind.channel is not event.channel:
        return Reason.WRONG_ROLE, f"{kind_of(kind)} belongs on the {kind.channel} port, not on {event.channel}"
    if kind is m.Probe and not sender.startswith(JOINING):
        return (
            Reason.WRONG_ROLE,
            f"{kind_of(kind)} takes no part in the run: send it as {JOINING}NONCE, not as {sender}",
        )
    if sender.startswith(JOINING) and kind not in (m.Join, m.Probe):
        return Reason.UNKNOWN_ISLAND, f"{kind_of(kind)} needs an island id: join first"
    return None


def speaks_for(message: m.Message, shards: int) -> int | None:
    """Returns the one shard, of so many, whose aggregator may say this; None: that of any."""
    match message:
        case m.Version(fragment_id=p) | m.WantBack(fragment_id=p):
            return shard_of(p, shards)
        case m.Welcome() | m.Donor() | m.Roster():
            return 0
        case m.FleetState(shard=shard) | m.Rostered(shard=shard):
            return shard
        case m.Replica(shard=shard) | m.ReplicaRun(shard=shard):
            return shard
        case _:
            return None
