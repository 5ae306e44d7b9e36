"""The broker's decisions, without sockets and without a clock: who is who, what goes where, what is refused.

The driver (:mod:`broker.server`, or the simulator) turns what happens into events, hands them to :meth:`Relay.handle`
with the time, and carries out the actions that come back, in order. It calls again with :class:`Tick` at
:meth:`Relay.next_deadline_s`. Same events, same actions.

*Peers.* A peer is a sender's newest incarnation, with the routing id of its connection on each channel. Ids are
learned from what arrives, so a broker that starts empty knows everyone again after one heartbeat each, and
a peer that reconnects under a new routing id replaces its half-open predecessor. A lower incarnation is fenced.
Aggregators are known by :class:`~broker.messages.Attach`: what comes as ``aggregator`` over a connection that is not
attached under the highest epoch seen is refused.

*Keys.* Once :class:`AllowListChanged` has come, each message must also fit the key of its connection: the sender is who
the key belongs to, and an island joins under no other name. Without keys a sender's name is believed.

*Ways.* Every kind has one way; the sender chooses nothing but the island that it addresses::

    Join AskDonor                  island -> aggregator of shard 0      control   repeated; dropped if nobody takes it
    Heartbeat Leave                island -> aggregator of each shard   control   likewise
    Nothing                        island -> the fragment's shard       control   likewise
    Seed Contribution              island -> the fragment's shard       bulk      queued in bytes; beyond that refused
    Want                           island -> here: credit for one       bulk
    FetchState StatePart           island -> the island in ``to``      both      asked for again; dropped if it is gone
    Version                        aggregator -> here: kept             bulk      the newest of each fragment
    Attach AttachBulk              aggregator -> here: who leads        both
    Welcome FleetState Donor
    Refused                        aggregator -> the island in ``to``   control   repeated; dropped if nobody takes it
    Roster Rostered                shard 0 -> another shard, and back   control   likewise
    Follow FollowBulk              standby -> here and the leader       both      repeated
    Replica ReplicaRun             leader -> the standby in ``to``      bulk      repeated; dropped if nobody takes it

*Backpressure.* The driver sends or, at a high-water mark, answers a :class:`Send` with :class:`Blocked`. A contribution
then waits in a queue bounded in bytes; a version does not wait at all: the island's credit stands again, and whatever
version is the newest when the island takes more is what it gets. Control messages never wait behind bulk bytes: what
cannot be sent is dropped and counted, since all of them are repeated; so is what one island gives another of its
optimizer's state, which the receiver asks for part by part. Nothing a peer sends makes this object grow
beyond its limits.
"""

from __future__ import annotations

from collections import Counter

from broker import messages as m
from broker.bindings import Bindings
from broker.codec import kind_of
from broker.directory import JOINING, MAX_SHARDS, STANDBY, UNKNOWN, Directory, Leader, Peer
from broker.fragments import shard_of
from broker.identity import AllowList
from broker.messages import AGGREGATOR, BROKER, Channel, Envelope, Reason, Role
from broker.queues import ContributionQueue, Queued, VersionShelf
from broker.relay_events import (
    AllowListChanged,
    Blocked,
    Note,
    Observe,
    Received,
    Rejected,
    RelayAction,
    RelayConfig,
    RelayCounters,
    RelayEvent,
    Send,
    Tick,
    TurnedAway,
    Unreachable,
)
from broker.replays import Seen

__all__ = [
    "Relay",
    "RelayConfig",
    "RelayCounters",
    "RelayEvent",
    "Received",
    "Rejected",
    "Blocked",
    "Unreachable",
    "Tick",
    "AllowListChanged",
    "TurnedAway",
    "RelayAction",
    "Send",
    "Observe",
    "Note",
]

#: Why a message is refused: the reason, and a detail for people. None: it is taken.
Refusal = tuple[Reason, str] | None

#: An aggregator that has not answered an island for so long leaves it to the broker to say that somebody is there;
#: shorter than the interval of heartbeats, so that it is said in time.
ANSWER_LATE_S = 0.4

#: Where a refusal is addressed whose sender could not be read.
NOBODY = m.joining("unknown")


class Relay:
    """Routes the messages of one run; see the module's docstring for the rules."""

    def __init__(self, config: RelayConfig) -> None:
        self.config = config
        self.counters = RelayCounters()
        self._who = Directory(max_peers=config.max_peers)
        self._bindings = Bindings()
        self._shards = 1  # how many there are, as the last Attach said
        self._shelf = VersionShelf()
        self._queue = ContributionQueue(per_sender_bytes=config.peer_queue_bytes, total_bytes=config.total_queue_bytes)
        self._blocked_peers: dict[str, None] = {}  # a set in order: whose bulk connection takes nothing now
        self._blocked_shards: dict[int, None] = {}
        self._retry_at_s: float | None = None
        self._sweep_at_s: float | None = None
        self._sequence = 0
        self._actions: list[RelayAction] = []

    # --- what the driver calls ---

    def handle(self, event: RelayEvent, now_s: float) -> list[RelayAction]:
        """Takes in one event and returns what to do about it, in order."""
        match event:
            case Received():
                self.counters.received_messages += 1
                self.counters.received_bytes += event.size_bytes
                refusal = self._receive(event, now_s)
                if refusal is not None:
                    claimed, kind = event.envelope.sender, kind_of(event.envelope.message)
                    sender = self._bindings.blamed(event.key, claimed)
                    self._refuse(event.channel, event.peer, sender, kind, event.envelope.sequence, refusal, claimed)
            case Rejected():
                refusal = event.reason, event.detail
                sender = self._bindings.blamed(event.key, event.sender)
                self._refuse(event.channel, event.peer, sender, event.kind, event.sequence, refusal, event.sender)
            case Blocked():
                self._unsend(event)
                self._put_back(event, now_s)
            case Unreachable():
                self._unsend(event)
                self._who.close(event.channel, event.peer)
                self._give_up(event)
            case AllowListChanged(allowed=allowed):
                self._allow(allowed)
            case TurnedAway():
                self._turn_away(event)
            case Tick():
                pass
        self._advance(now_s)
        actions, self._actions = self._actions, []
        return actions

    def next_deadline_s(self) -> float | None:
        """When to call with :class:`Tick` at the latest; None when nothing is waited for."""
        due = [each for each in (self._retry_at_s, self._sweep_at_s) if each is not None]
        due += [each.heard_s + self.config.leader_silent_s for each in self._who.leaders.values() if each.leads]
        return min(due, default=None)

    @property
    def queued_bytes(self) -> int:
        """Bytes of contributions that wait for an aggregator."""
        return self._queue.queued_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of versions that are kept: about one model."""
        return self._shelf.held_bytes

    @property
    def num_peers(self) -> int:
        """Islands known, and those joining."""
        return len(self._who.peers)

    # --- what arrives ---

    def _receive(self, event: Received, now_s: float) -> Refusal:
        refusal = self._improper(event)
        if refusal is not None:
            return refusal
        match event.envelope.message:
            case m.Attach() | m.AttachBulk() as attach:
                return self._attach(event, attach, now_s)
            case _ if event.envelope.sender == AGGREGATOR:
                return self._from_aggregator(event, now_s)
            case m.Follow() | m.FollowBulk() as follow:
                return self._follow(event, follow, now_s)
            case _:
                return self._from_island(event, now_s)

    def _improper(self, event: Received) -> Refusal:
        """Says why this sender may not send this kind over this channel in this run."""
        envelope, kind = event.envelope, type(event.envelope.message)
        sender = envelope.sender
        refusal = self._bindings.refusal(event.key, sender, envelope.message)
        if refusal is not None:
            return refusal
        if envelope.run_id != self.config.run_id:
            return Reason.WRONG_RUN, f"run is {envelope.run_id}, this broker serves {self.config.run_id}"
        if sender == BROKER:
            return Reason.WRONG_ROLE, f"sender is {BROKER}, a name that no peer may have"
        role = Role.STANDBY if sender.startswith(STANDBY) else Role.ISLAND
        role = Role.AGGREGATOR if sender == AGGREGATOR else role
        may_send = kind.role is role or (kind is m.Refused and role is Role.AGGREGATOR)
        if not may_send:
            return Reason.WRONG_ROLE, f"{kind_of(kind)} may not come from {sender}"
        if kind.channel is not event.channel:
            return Reason.WRONG_ROLE, f"{kind_of(kind)} belongs on the {kind.channel} port, not on {event.channel}"
        if sender.startswith(JOINING) and kind is not m.Join:
            return Reason.UNKNOWN_ISLAND, f"{kind_of(kind)} needs an island id: join first"
        return None

    def _allow(self, allowed: AllowList) -> None:
        """Takes a new allow list; islands that nobody may be any more are forgotten with all their connections."""
        self._bindings.replace(allowed)
        for peer in [each for each in self._who.peers.values() if not self._bindings.anyone_may_be(each.name)]:
            self._who.forget(peer)
            self._blocked_peers.pop(peer.name, None)
            self._actions.append(Note(event="relay.island_revoked", fields={"island": peer.name}, warning=True))

    def _turn_away(self, event: TurnedAway) -> None:
        if event.reason is None:
            self.counters.dropped["silent_connection"] += 1
            return
        times = self._count_refusal(UNKNOWN, event.reason)
        if _is_power_of_ten(times):
            fields = {"channel": event.channel, "reason": event.reason, "times": times, "detail": event.detail}
            self._actions.append(Note(event="relay.turned_away", fields=fields, warning=True))

    def _replayed(self, who: Peer | Leader, event: Received) -> Refusal:
        """Says of a message that has come over its connection before that it has."""
        if not who.seen.setdefault(event.channel, Seen()).repeats(event.envelope.sequence):
            return None
        self.counters.repeated_messages += 1
        return Reason.REPLAYED, f"message {event.envelope.sequence} has come over this connection before"

    def _from_island(self, event: Received, now_s: float) -> Refusal:
        envelope = event.envelope
        name, incarnation = envelope.sender, envelope.incarnation
        peer = self._who.peers.get(name)
        if peer is not None and incarnation < peer.incarnation:
            return Reason.FENCED, f"incarnation {incarnation} of {name} has ended: {peer.incarnation} has joined"
        if peer is None and self._who.full:
            return Reason.QUEUE_FULL, f"the broker knows {self.num_peers} peers and takes no more (max_peers)"
        if peer is None or incarnation > peer.incarnation:
            peer = self._enter(name, incarnation, now_s)
        if self._who.connect(peer, event.channel, event.peer):
            self._blocked_peers.pop(name, None)  # a new connection starts empty
        replayed = self._replayed(peer, event)
        if replayed is not None:
            return replayed
        peer.heard_s = now_s
        match envelope.message:
            case m.Want(versions=versions):
                peer.want, peer.credit = versions, True
                self._serve(peer)
            case m.Contribution(fragment_id=p) | m.Seed(fragment_id=p):
                # One that does not exist is refused for good by whose it would be, and who knows the manifest.
                shard = shard_of(p, self._shards)
                return self._contribute(shard, Queued(envelope=envelope, size_bytes=event.size_bytes))
            case m.FetchState() | m.StatePart():
                route = self._who.route_to(envelope.to, event.channel)
                if route is None:
                    self.counters.dropped["no_such_peer"] += 1
                else:
                    self._send(event.channel, route, envelope, event.size_bytes)
            case m.Nothing(fragment_id=p):
                self._to_shard(shard_of(p, self._shards), event)
            case m.Heartbeat() | m.Leave():
                self._actions.append(Observe(envelope=envelope))
                led = self._to_shard(0, event)
                for shard in range(1, self._shards):
                    self._to_shard(shard, event)
                if isinstance(envelope.message, m.Heartbeat):
                    self._answer_for_nobody(event, peer, now_s, led=led)
            case m.Join():
                self._answer_for_nobody(event, peer, now_s, led=self._to_shard(0, event))  # which keeps membership
            case _:
                self._to_shard(0, event)
        return None

    def _to_shard(self, shard: int, event: Received) -> bool:
        """Passes a small message on to the aggregator of a shard; says whether there is one."""
        leader = self._who.leading(shard)
        route = leader.routes.get(Channel.CONTROL) if leader is not None else None
        self._send_control(route, event.envelope, event.size_bytes, missing="no_leader")
        return route is not None

    def _answer_for_nobody(self, event: Received, peer: Peer, now_s: float, *, led: bool) -> None:
        """Tells an island that no aggregator answers that the broker lives (:mod:`islands.brokers`)."""
        if peer.asked_s is None:
            peer.asked_s = now_s
        if not led or now_s - peer.asked_s >= ANSWER_LATE_S:
            detail = "the aggregator has not answered yet" if led else "no aggregator leads shard 0 now"
            envelope = event.envelope
            refused = m.Refused(
                kind=kind_of(envelope.message), sequence=envelope.sequence, reason=Reason.NOT_LEADER, detail=detail
            )
            self._reply(event.channel, event.peer, envelope.sender, refused)

    def _from_aggregator(self, event: Received, now_s: float) -> Refusal:
        envelope, message = event.envelope, event.envelope.message
        leader = self._who.leader_behind(event.channel, event.peer)
        speaks_for = self._speaks_for(message)
        of = leader or self._who.leaders.get(speaks_for or 0)
        highest = of.epoch if of is not None else 0
        epoch = getattr(message, "epoch", highest)  # a refusal carries none
        if epoch < highest:
            return Reason.FENCED, f"epoch {epoch} has ended, {highest} leads"
        if leader is None:
            return (
                Reason.NOT_LEADER,
                f"nobody is attached over this connection: attach on the {event.channel} port first",
            )
        if speaks_for not in (None, leader.shard):
            return Reason.WRONG_ROLE, f"shard {leader.shard} speaks for itself alone"
        replayed = self._replayed(leader, event)
        if replayed is not None:
            return replayed
        leader.heard_s = now_s
        match message:
            case m.Version():
                if self._shelf.offer(envelope, message, event.size_bytes):
                    for peer in self._who.peers.values():
                        self._serve(peer)
                else:
                    self.counters.dropped["old_version"] += 1
                return None
            case m.Roster(to_shard=shard):
                self._to_shard(shard, event)
                return None
            case m.Rostered():
                self._to_shard(0, event)
                return None
            case m.Welcome(island_id=island_id, incarnation=incarnation):
                known = self._who.peers.get(island_id)
                if known is not None and incarnation > known.incarnation:
                    self._enter(island_id, incarnation, now_s)  # from here on its earlier lives are fenced
                self._actions.append(Observe(envelope=envelope))
            case _:
                pass
        addressee = self._who.peers.get(envelope.to)
        if addressee is not None:
            addressee.asked_s = None
        route = self._who.route_to(envelope.to, event.channel)
        if route is None:
            self.counters.dropped["no_such_peer"] += 1
        else:
            self._send(event.channel, route, envelope, event.size_bytes)
        return None

    def _speaks_for(self, message: m.Message) -> int | None:
        """Returns the one shard whose aggregator may say this; None: that of any."""
        match message:
            case m.Version(fragment_id=p):
                return shard_of(p, self._shards)
            case m.Welcome() | m.Donor() | m.Roster():
                return 0
            case m.FleetState(shard=shard) | m.Rostered(shard=shard):
                return shard
            case m.Replica(shard=shard) | m.ReplicaRun(shard=shard):
                return shard
            case _:
                return None

    def _follow(self, event: Received, message: m.Follow | m.FollowBulk, now_s: float) -> Refusal:
        """Passes a standby's heartbeat on to the leader, and tells it what is known here."""
        name, shard = event.envelope.sender, message.shard
        if shard >= MAX_SHARDS:
            return Reason.IMPLAUSIBLE, f"shard is {shard}, must be below {MAX_SHARDS}"
        peer = self._who.peers.get(name)
        if peer is None and self._who.full:
            return Reason.QUEUE_FULL, f"the broker knows {self.num_peers} peers and takes no more (max_peers)"
        peer = peer or self._enter(name, 0, now_s)
        self._who.connect(peer, event.channel, event.peer)
        replayed = self._replayed(peer, event)
        if replayed is not None:
            return replayed
        peer.heard_s = now_s
        if isinstance(message, m.FollowBulk):
            return None
        peer.follow = message
        known, leader = self._who.leaders.get(shard), self._who.leading(shard)
        following = m.Following(
            epoch=known.epoch if known is not None else 0,
            leader_heard_ago_s=now_s - leader.heard_s if leader is not None else None,
            stored=self._shelf.stored(lambda p: shard_of(p, self._shards) == shard),
            newest=self._who.newest_standby(shard, beside=name, since_s=now_s - self.config.leader_silent_s),
        )
        self._reply(event.channel, event.peer, name, following)
        self._to_shard(shard, event)
        return None

    # --- towards aggregators ---

    def _attach(self, event: Received, message: m.Attach | m.AttachBulk, now_s: float) -> Refusal:
        shard, epoch = message.shard, message.epoch
        if shard >= MAX_SHARDS:
            return Reason.IMPLAUSIBLE, f"shard is {shard}, must be below {MAX_SHARDS}"
        if isinstance(message, m.Attach) and not shard < message.shards <= MAX_SHARDS:
            return Reason.IMPLAUSIBLE, f"shards is {message.shards}, must be above {shard} and at most {MAX_SHARDS}"
        leader = self._who.leaders.get(shard)
        if leader is not None and epoch < leader.epoch:
            return Reason.FENCED, f"epoch {epoch} of shard {shard} has ended, {leader.epoch} leads"
        if isinstance(message, m.Attach):
            for other in self._who.leaders.values():
                if other.shard != shard and other.leads and other.shards not in (0, message.shards):
                    counts = f"shards is {message.shards}, and shard {other.shard} leads as one of {other.shards}"
                    return Reason.IMPLAUSIBLE, f"{counts}: start all aggregators of a run with the same number"
        if leader is None or epoch > leader.epoch or not leader.leads:
            if leader is not None:
                self._who.disconnect_all(leader)
            leader = self._who.leaders[shard] = Leader(shard=shard, epoch=epoch, heard_s=now_s)
            self._actions.append(Note(event="relay.leader_attached", fields={"shard": shard, "epoch": epoch}))
        is_new = self._who.connect(leader, event.channel, event.peer)
        replayed = self._replayed(leader, event)
        if replayed is not None:
            return replayed
        leader.heard_s = now_s
        match message:
            case m.Attach(versions=versions):
                self._shards = leader.shards = message.shards
                held = m.Attached(versions=self._shelf.versions(len(versions)))
                self._reply(event.channel, event.peer, AGGREGATOR, held)
            case m.AttachBulk():
                if is_new:
                    self._blocked_shards.pop(shard, None)
                self._forward_queue(leader)
        return None

    def _contribute(self, shard: int, item: Queued) -> Refusal:
        """Sends a contribution on or queues it; or says why neither."""
        leader = self._who.leading(shard)
        if leader is None:
            return Reason.NOT_LEADER, f"no aggregator leads shard {shard} now: send it again later"
        if self._queue.holds(item):
            self.counters.dropped["copy_in_queue"] += 1
            return None
        route = leader.routes.get(Channel.BULK)
        if route is not None and shard not in self._blocked_shards:
            self._send(Channel.BULK, route, item.envelope, item.size_bytes)
            return None
        full = self._queue.full_for(item)
        if full is not None:
            return Reason.QUEUE_FULL, full
        self._queue.push(shard, item)
        return None

    def _forward_queue(self, leader: Leader) -> None:
        route = leader.routes.get(Channel.BULK)
        if route is not None and leader.shard not in self._blocked_shards:
            for item in self._queue.drain(leader.shard):
                self._send(Channel.BULK, route, item.envelope, item.size_bytes)

    def _lose(self, leader: Leader) -> None:
        """Gives up on a silent aggregator: whoever waits for it is told, and sends again to the next one."""
        leader.leads = False
        self._who.disconnect_all(leader)
        self._blocked_shards.pop(leader.shard, None)
        waiting = self._queue.drain(leader.shard)
        fields = {"shard": leader.shard, "epoch": leader.epoch, "waiting": len(waiting)}
        self._actions.append(Note(event="relay.leader_lost", fields=fields, warning=True))
        refusal = Reason.NOT_LEADER, f"the aggregator of shard {leader.shard} fell silent: send it again later"
        for item in waiting:
            route = self._who.route_to(item.envelope.sender, Channel.CONTROL)
            if route is not None:
                self._refuse_message(Channel.CONTROL, route, item.envelope, refusal)

    # --- towards islands ---

    def _enter(self, name: str, incarnation: int, now_s: float) -> Peer:
        """Makes a peer, in place of its earlier incarnation if it has one."""
        old = self._who.peers.get(name)
        if old is not None:
            fields = {"island": name, "ended": old.incarnation, "incarnation": incarnation}
            self._actions.append(Note(event="relay.island_fenced", fields=fields))
        self._blocked_peers.pop(name, None)
        if self._sweep_at_s is None:
            self._sweep_at_s = now_s + self.config.forget_after_s
        return self._who.enter(name, incarnation, now_s)

    def _serve(self, peer: Peer) -> None:
        """Spends a peer's credit, if there is anything new to spend it on."""
        route = peer.routes.get(Channel.BULK)
        if not peer.credit or route is None or peer.name in self._blocked_peers:
            return
        held = self._shelf.choose(peer.want, peer.served)
        if held is None:
            return
        peer.credit = False
        peer.transfers += 1
        peer.served[held.version.fragment_id] = peer.transfers
        self._send(Channel.BULK, route, held.envelope, held.size_bytes)

    # --- what could not be sent, and time ---

    def _put_back(self, event: Blocked, now_s: float) -> None:
        match event.envelope.message:
            case m.Version(fragment_id=p):
                peer = self._who.peers.get(self._who.name_of(event.channel, event.peer) or "")
                if peer is None:
                    return
                peer.credit = True
                peer.served.pop(p, None)  # it still comes first
                self._blocked_peers[peer.name] = None
            case m.Contribution(fragment_id=p) | m.Seed(fragment_id=p):
                shard = shard_of(p, self._shards)
                self._queue.put_back(shard, Queued(envelope=event.envelope, size_bytes=event.size_bytes))
                self._blocked_shards[shard] = None
            case _:
                self.counters.dropped["blocked"] += 1
                return
        if self._retry_at_s is None:
            self._retry_at_s = now_s + self.config.retry_s

    def _give_up(self, event: Unreachable) -> None:
        """A contribution waits for the aggregator's next connection; an island asks again over its own."""
        match event.envelope.message:
            case m.Contribution(fragment_id=p) | m.Seed(fragment_id=p):
                item = Queued(envelope=event.envelope, size_bytes=event.size_bytes)
                self._queue.put_back(shard_of(p, self._shards), item)
            case _:
                self.counters.dropped["unreachable"] += 1

    def _advance(self, now_s: float) -> None:
        """Does what has fallen due."""
        for leader in self._who.leaders.values():
            if leader.leads and now_s >= leader.heard_s + self.config.leader_silent_s:
                self._lose(leader)
        if self._retry_at_s is not None and now_s >= self._retry_at_s:
            self._retry_at_s = None
            peers, self._blocked_peers = self._blocked_peers, {}
            for name in peers:
                self._serve(self._who.peers[name])
            shards, self._blocked_shards = self._blocked_shards, {}
            for shard in shards:
                self._forward_queue(self._who.leaders[shard])
        if self._sweep_at_s is not None and now_s >= self._sweep_at_s:
            for peer in self._who.forget_silent(now_s, self.config.forget_after_s):
                self._blocked_peers.pop(peer.name, None)
                self.counters.refused.pop(peer.name, None)
                if not peer.is_joining:
                    fields = {"island": peer.name, "silent_s": round(now_s - peer.heard_s, 1)}
                    self._actions.append(Note(event="relay.island_forgotten", fields=fields))
            # Often enough that nobody is remembered for more than a quarter longer than configured.
            self._sweep_at_s = now_s + self.config.forget_after_s / 4 if self._who.peers else None

    # --- sending and refusing ---

    def _send(self, channel: Channel, peer: bytes, envelope: Envelope, size_bytes: int) -> None:
        self.counters.sent_messages += 1
        self.counters.sent_bytes += size_bytes
        self._actions.append(Send(channel=channel, peer=peer, envelope=envelope, size_bytes=size_bytes))

    def _unsend(self, event: Blocked | Unreachable) -> None:
        self.counters.sent_messages -= 1
        self.counters.sent_bytes -= event.size_bytes

    def _send_control(self, route: bytes | None, envelope: Envelope, size_bytes: int, *, missing: str) -> None:
        if route is None:
            self.counters.dropped[missing] += 1
        else:
            self._send(Channel.CONTROL, route, envelope, size_bytes)

    def _reply(self, channel: Channel, peer: bytes, to: str, message: m.Message) -> None:
        self._sequence += 1
        envelope = Envelope(
            run_id=self.config.run_id, sender=BROKER, incarnation=0, sequence=self._sequence, to=to, message=message
        )
        self._send(channel, peer, envelope, 0)

    def _refuse_message(self, channel: Channel, peer: bytes, envelope: Envelope, refusal: tuple[Reason, str]) -> None:
        self._refuse(channel, peer, envelope.sender, kind_of(envelope.message), envelope.sequence, refusal)

    def _refuse(
        self,
        channel: Channel,
        peer: bytes,
        claimed: str,
        kind: str,
        sequence: int,
        refusal: tuple[Reason, str],
        to: str = "",
    ) -> None:
        """Counts a refusal, notes it now and then, and tells the sender why.

        Args:
            channel: Where the message came from, with ``peer``.
            peer: Routing id.
            claimed: Who sent it, as far as that is known: believed only if it is a known peer.
            kind: Of the message, or empty.
            sequence: Of the message, or -1.
            refusal: Reason and detail.
            to: The address on the answer, if not ``claimed``: what the message named as its sender.
        """
        reason, detail = refusal
        name = self._who.name_of(channel, peer) or (claimed if claimed in self._who.peers else UNKNOWN)
        times = self._count_refusal(name, reason)
        if _is_power_of_ten(times):
            fields = {"sender": name, "kind": kind, "reason": reason, "times": times, "detail": detail}
            self._actions.append(Note(event="relay.refused", fields=fields, warning=True))
        if kind == kind_of(m.Refused):
            return  # two peers must not refuse each other's refusals for ever
        control = self._who.control_beside(channel, peer)
        if control is not None:
            channel, peer = Channel.CONTROL, control
        refused = m.Refused(kind=kind, sequence=sequence, reason=reason, detail=detail)
        self._reply(channel, peer, to or claimed or (name if name != UNKNOWN else NOBODY), refused)

    def _count_refusal(self, name: str, reason: Reason) -> int:
        counts = self.counters.refused.setdefault(name, Counter())
        counts[reason] += 1
        return counts[reason]


def _is_power_of_ten(n: int) -> bool:
    return str(n).rstrip("0") == "1"
