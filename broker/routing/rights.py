"""Checks a sender's rights: by its role, channel and shard, and by its key. Pure.

:class:`Bindings` asks the key of a connection whether the sender is who it says; :mod:`broker.routing.senders` asks
what has been heard before.
"""

from __future__ import annotations

from broker.routing.directory import JOINING, OBSERVING, STANDBY
from broker.routing.events import Received, Refusal
from broker.wire import messages as m
from broker.wire.fragments import shard_of
from broker.wire.identity import ANY, AllowList, KeyRole
from broker.wire.messages import AGGREGATOR, BROKER, Reason, Role, kind_of


def improper(event: Received, *, run_id: str) -> Refusal | None:
    """Returns why this sender may not send this kind over this channel in this run; None if it may."""
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
        detail = f"{kind_of(kind)} takes no part in the run: send it as {JOINING}NONCE, not as {sender}"
        return Reason.WRONG_ROLE, detail
    if sender.startswith(JOINING) and kind not in (m.Join, m.Probe):
        return Reason.UNKNOWN_ISLAND, f"{kind_of(kind)} needs an island id: join first"
    return None


def speaks_for(message: m.Message, shards: int) -> int | None:
    """Returns the only shard whose aggregator may send this message; None: any shard's may."""
    match message:
        case m.Version(fragment_id=p) | m.WantBack(fragment_id=p):
            return shard_of(p, shards)
        case m.Welcome() | m.Donor() | m.Roster() | m.FetchFiles():
            return 0
        case m.FleetState(shard=shard) | m.Rostered(shard=shard) | m.Standings(shard=shard):
            return shard
        case m.Replica(shard=shard) | m.ReplicaRun(shard=shard):
            return shard
        case _:
            return None


class Bindings:
    """The current allow list; without one senders' names are believed."""

    def __init__(self) -> None:
        self._allowed: AllowList | None = None

    def replace(self, allowed: AllowList) -> None:
        """Replaces the list, for all later messages."""
        self._allowed = allowed

    def refusal(self, key: str, sender: str, message: m.Message) -> tuple[Reason, str] | None:
        """Returns why a message may not come under this key; None if it may."""
        if self._allowed is None:
            return None
        identity = self._allowed.get(key)
        if identity is None:
            return Reason.WRONG_KEY, "the key of this connection is not on the allow list, or not any more"
        if isinstance(message, m.Probe) and sender.startswith(JOINING):
            return None  # any key that may connect may measure
        if not identity.may_speak_as(sender):
            return Reason.WRONG_KEY, f"the key of this connection is that of {identity}, which is not {sender}"
        if isinstance(message, m.Join) and not identity.may_be(message.island_id):
            asked = message.island_id or "an id of the run's choice"
            return Reason.WRONG_KEY, f"it asks for {asked}, and its key is that of {identity}: ask for that id"
        return None

    def blamed(self, key: str, claimed: str) -> str:
        """Returns the name under which a refusal is counted: the key's owner, else the claimed sender."""
        if self._allowed is None:
            return claimed
        identity = self._allowed.get(key)
        if identity is None:
            return ""
        one = identity.role is KeyRole.ISLAND and identity.name != ANY
        return claimed if identity.may_speak_as(claimed) and not one else identity.name

    def anyone_may_be(self, sender: str) -> bool:
        """Returns whether some key may speak as ``sender``."""
        return self._allowed is None or any(each.may_speak_as(sender) for each in self._allowed.values())
