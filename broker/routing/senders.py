"""Tracks senders: new ones, later lives that replace earlier ones, silence and removal. Pure.

A peer is a sender's newest incarnation, with the routing id of its connection on each channel. Ids are learned from
what arrives, so a broker that starts empty knows everyone again after one heartbeat each, and a peer that reconnects
under a new routing id replaces its half-open predecessor. A lower incarnation is fenced. Aggregators are known by
:class:`~broker.wire.messages.Attach`: what comes as ``aggregator`` over a connection that is not attached under the
highest epoch seen is refused.

Three questions are asked of every message: is a later life or leader known, over which connection does it come, and has
its number come over that connection before. A sender that passes is present until it has been silent for too long:
then an aggregator no longer leads, and any other peer is forgotten.
"""

from __future__ import annotations

from typing import TypeVar

from broker.routing.actions import Actions
from broker.routing.deliveries import Deliveries
from broker.routing.directory import MAX_SHARDS, Directory, Leader, Peer, Seen
from broker.routing.events import Note, Received, Refusal, RelayConfig
from broker.routing.rights import Bindings, speaks_for
from broker.wire import messages as m
from broker.wire.messages import Channel, Reason
from broker.wire.schema import MAX_HOSTS

#: The type of a sender, the same in and out.
Speaker = TypeVar("Speaker", Peer, Leader)


class Senders:
    """Keeps the directory; each ``hear`` method returns the sender, or why its message is refused."""

    def __init__(self, config: RelayConfig, who: Directory, deliveries: Deliveries, out: Actions) -> None:
        self._config = config
        self._who = who
        self._deliveries = deliveries
        self._out = out
        self._sweep_at_s: float | None = None

    # --- islands and standbys ---

    def hear_island(self, event: Received, now_s: float) -> Peer | Refusal:
        """Notes a message of an island, or of a process that asks to become one."""
        name, incarnation = event.envelope.sender, event.envelope.incarnation
        peer = self._who.peers.get(name)
        if peer is not None and incarnation < peer.incarnation:
            return Reason.FENCED, f"incarnation {incarnation} of {name} has ended: {peer.incarnation} has joined"
        if isinstance(event.envelope.message, m.HostPart):
            return self._hear_host(peer, event)
        self._end_joiner(event)
        if peer is None and self._who.full:
            return self._no_room()
        if peer is None or incarnation > peer.incarnation:
            peer = self.enter(name, incarnation, now_s)
        if self._who.connect(peer, event.channel, event.peer):
            self._deliveries.unblock_peer(name)  # a new connection starts empty
        return self._admit(peer, event, now_s)

    def _hear_host(self, peer: Peer | None, event: Received) -> Peer | Refusal:
        """Notes a message of another host of an island, over its own connection; returns the island's peer."""
        name, incarnation = event.envelope.sender, event.envelope.incarnation
        if peer is None or incarnation > peer.incarnation:
            return Reason.UNKNOWN_ISLAND, f"incarnation {incarnation} of {name} was not heard yet"
        while len(peer.host_seen) >= MAX_HOSTS and event.peer not in peer.host_seen:
            del peer.host_seen[next(iter(peer.host_seen))]
        return self._repeated(peer.host_seen[event.peer], event) or peer

    def _end_joiner(self, event: Received) -> None:
        """Forgets the joiner on a connection, once another name comes over it.

        Either it has become that island, or it asks anew. Any key may draw nonces without end: without this the holder
        of one could fill the directory, and keep out everybody else.
        """
        before = self._who.peers.get(self._who.name_of(event.channel, event.peer) or "")
        if before is not None and before.is_joining and before.name != event.envelope.sender:
            self._who.forget(before)
            self._deliveries.unblock_peer(before.name)
            self._out.counters.refused.pop(before.name, None)

    def hear_standby(self, event: Received, shard: int, now_s: float) -> Peer | Refusal:
        """Notes a message of a standby of a shard."""
        if shard >= MAX_SHARDS:
            return Reason.IMPLAUSIBLE, f"shard is {shard}, must be below {MAX_SHARDS}"
        name = event.envelope.sender
        peer = self._who.peers.get(name)
        if peer is None and self._who.full:
            return self._no_room()
        peer = peer or self.enter(name, 0, now_s)
        self._who.connect(peer, event.channel, event.peer)
        return self._admit(peer, event, now_s)

    def enter(self, name: str, incarnation: int, now_s: float) -> Peer:
        """Adds a peer; it replaces its earlier incarnation if there is one."""
        old = self._who.peers.get(name)
        if old is not None:
            fields = {"island": name, "ended": old.incarnation, "incarnation": incarnation}
            self._out.add(Note(event="relay.island_fenced", fields=fields))
        self._deliveries.unblock_peer(name)
        if self._sweep_at_s is None:
            self._sweep_at_s = now_s + self._config.forget_after_s
        return self._who.enter(name, incarnation, now_s)

    def revoke(self, bindings: Bindings) -> None:
        """Forgets islands whose keys were removed from the allow list, with their connections."""
        for peer in [each for each in self._who.peers.values() if not bindings.anyone_may_be(each.name)]:
            self._who.forget(peer)
            self._deliveries.unblock_peer(peer.name)
            self._out.add(Note(event="relay.island_revoked", fields={"island": peer.name}, warning=True))

    # --- aggregators ---

    def attach(self, event: Received, message: m.Attach | m.AttachBulk, now_s: float) -> Leader | Refusal:
        """Notes an aggregator's claim to lead a shard."""
        shard, epoch = message.shard, message.epoch
        if shard >= MAX_SHARDS:
            return Reason.IMPLAUSIBLE, f"shard is {shard}, must be below {MAX_SHARDS}"
        if not shard < message.shards <= MAX_SHARDS:
            return Reason.IMPLAUSIBLE, f"shards is {message.shards}, must be above {shard} and at most {MAX_SHARDS}"
        leader = self._who.leaders.get(shard)
        if leader is not None and epoch < leader.epoch:
            return Reason.FENCED, f"epoch {epoch} of shard {shard} has ended, {leader.epoch} leads"
        for other in self._who.leaders.values():
            if other.shard != shard and other.leads and other.shards != message.shards:
                counts = f"shards is {message.shards}, and shard {other.shard} leads as one of {other.shards}"
                return Reason.IMPLAUSIBLE, f"{counts}: start all aggregators of a run with the same number"
        if leader is None or epoch > leader.epoch or not leader.leads:
            if leader is not None:
                self._who.disconnect_all(leader)
            leader = self._who.leaders[shard] = Leader(shard=shard, epoch=epoch, shards=message.shards, heard_s=now_s)
            self._out.add(Note(event="relay.leader_attached", fields={"shard": shard, "epoch": epoch}))
        self._who.shards = leader.shards
        if self._who.connect(leader, event.channel, event.peer) and event.channel is Channel.BULK:
            self._deliveries.unblock_shard(shard)
        return self._admit(leader, event, now_s)

    def hear_aggregator(self, event: Received, now_s: float) -> Leader | Refusal:
        """Notes a message of a shard's leader."""
        message = event.envelope.message
        leader = self._who.leader_behind(event.channel, event.peer)
        shard = speaks_for(message, self._who.shards)
        of = leader or self._who.leaders.get(shard or 0)
        highest = of.epoch if of is not None else 0
        epoch = getattr(message, "epoch", highest)  # a refusal carries none
        if epoch < highest:
            return Reason.FENCED, f"epoch {epoch} has ended, {highest} leads"
        if leader is None:
            detail = f"nobody is attached over this connection: attach on the {event.channel} port first"
            return Reason.NOT_LEADER, detail
        if shard not in (None, leader.shard):
            return Reason.WRONG_ROLE, f"shard {leader.shard} speaks for itself alone"
        return self._admit(leader, event, now_s)

    def _lose(self, leader: Leader) -> None:
        """Drops a silent aggregator; waiting islands are told, and send again to its successor."""
        leader.leads = False
        self._who.disconnect_all(leader)
        waiting = self._deliveries.withdraw(leader.shard)
        fields = {"shard": leader.shard, "epoch": leader.epoch, "waiting": len(waiting)}
        self._out.add(Note(event="relay.leader_lost", fields=fields, warning=True))
        refusal = Reason.NOT_LEADER, f"the aggregator of shard {leader.shard} fell silent: send it again later"
        for item in waiting:
            route = self._who.route_to(item.envelope.sender, Channel.CONTROL)
            if route is not None:
                self._out.refuse_message(Channel.CONTROL, route, item.envelope, refusal)

    # --- time ---

    def next_deadline_s(self) -> float | None:
        """Returns the next time at which a peer's silence becomes too long; None without peers."""
        due = [each.heard_s + self._config.leader_silent_s for each in self._who.leaders.values() if each.leads]
        return min(due if self._sweep_at_s is None else [self._sweep_at_s, *due], default=None)

    def held_up(self, by_s: float) -> None:
        """Excludes from all silences a time in which the broker stood still, or its clock jumped."""
        everybody: list[Peer | Leader] = [*self._who.leaders.values(), *self._who.peers.values()]
        for each in everybody:
            each.heard_s += by_s
            if isinstance(each, Peer) and each.asked_s is not None:
                each.asked_s += by_s
        if self._sweep_at_s is not None:
            self._sweep_at_s += by_s

    def lose_silent_leaders(self, now_s: float) -> None:
        """Drops aggregators that have been silent for too long."""
        for leader in self._who.leaders.values():
            if leader.leads and now_s >= leader.heard_s + self._config.leader_silent_s:
                self._lose(leader)

    def forget_silent_peers(self, now_s: float) -> None:
        """Forgets peers that have been silent for too long, with their counts of refusals."""
        if self._sweep_at_s is None or now_s < self._sweep_at_s:
            return
        for peer in self._who.forget_silent(now_s, self._config.forget_after_s):
            self._deliveries.unblock_peer(peer.name)
            self._out.counters.refused.pop(peer.name, None)
            if not peer.is_joining:
                fields = {"island": peer.name, "silent_s": round(now_s - peer.heard_s, 1)}
                self._out.add(Note(event="relay.island_forgotten", fields=fields))
        # Often enough that nobody is remembered for more than a quarter longer than configured.
        self._sweep_at_s = now_s + self._config.forget_after_s / 4 if self._who.peers else None

    def _admit(self, who: Speaker, event: Received, now_s: float) -> Speaker | Refusal:
        """Marks the sender as heard and returns it; or refuses a message that its connection brought before."""
        refusal = self._repeated(who.seen[event.channel], event)
        if refusal is None:
            who.heard_s = now_s
        return refusal or who

    def _repeated(self, seen: Seen, event: Received) -> Refusal | None:
        if not seen.repeats(event.envelope.sequence):
            return None
        self._out.counters.repeated_messages += 1
        return Reason.REPLAYED, f"message {event.envelope.sequence} has come over this connection before"

    def _no_room(self) -> Refusal:
        return Reason.QUEUE_FULL, f"the broker knows {len(self._who.peers)} peers and takes no more (max_peers)"
