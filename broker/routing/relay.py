"""The broker's state machine: routes messages, refuses those that break a rule. No sockets, no clock.

The driver (:mod:`broker.server`, or the simulator) turns what happens into events, hands them to :meth:`Relay.handle`
with the time, and carries out the actions that come back, in order. It calls again with :class:`Tick` at
:meth:`Relay.next_deadline_s`. Same events, same actions.

This module says which way a message goes. Three modules decide whether it goes at all:
:mod:`broker.routing.rights` (kinds and keys), :mod:`broker.routing.senders` (replaced or silent senders), and
:mod:`broker.routing.observers` (questions). :mod:`broker.routing.deliveries` keeps large messages for their receivers,
and :mod:`broker.routing.actions` collects the actions, counts them, and words refusals.

*Keys.* Once :class:`AllowListChanged` has come, each message must also fit the key of its connection: the sender is who
the key belongs to, and an island joins under no other name. Without keys a sender's name is believed.

*Ways.* Every kind has one way; the sender chooses nothing but the island that it addresses::

    Join AskDonor                  island -> aggregator of shard 0      control   repeated; dropped if nobody takes it
    Heartbeat Leave                island -> aggregator of each shard   control   likewise
    Nothing                        island -> the fragment's shard       control   likewise
    Seed Contribution HostPart     island -> the fragment's shard       bulk      queued in bytes; beyond that refused;
                                                                                  copies of what is still here dropped
    Want                           island -> here: opens its window     bulk
    FetchState StatePart           island -> the island in ``to``      both      asked for again; dropped if it is gone
    FilesPart                      island -> aggregator of shard 0      bulk      asked for again; dropped if none leads
    Version                        aggregator -> here: kept             bulk      the newest of each fragment
    WantBack                       aggregator -> here: given back       control   asked again
    Attach AttachBulk              aggregator -> here: who leads        both
    Welcome FleetState Donor
    FetchFiles Refused             aggregator -> the island in ``to``   control   repeated; dropped if nobody takes it
    Roster Rostered                shard 0 -> another shard, and back   control   likewise
    Standings                      a shard -> every other one          control   said again with each merge
    Follow FollowBulk              standby -> here and the leader       both      repeated
    Probe                          anybody -> here: answered            bulk      asked again
    Replica ReplicaRun             leader -> the standby in ``to``      bulk      repeated; dropped if nobody takes it
    Observe                        observer -> here: to be looked up    bulk      asked again; too often is refused

Control messages never wait behind bulk bytes: what cannot be sent is dropped and counted, since all of them are
repeated; so is what one island gives another of its optimizer's state, which the receiver asks for part by part.
Nothing a peer sends makes this object grow beyond its limits.
"""

from __future__ import annotations

from broker.routing.actions import Actions
from broker.routing.deliveries import Deliveries
from broker.routing.directory import Directory, Leader, Peer
from broker.routing.events import (
    AllowListChanged,
    Blocked,
    Delivered,
    LookedUp,
    LookUp,
    Received,
    Refusal,
    Rejected,
    RelayAction,
    RelayConfig,
    RelayEvent,
    Report,
    Room,
    Tick,
    TurnedAway,
    Unreachable,
)
from broker.routing.observers import Observers
from broker.routing.queues import Queued
from broker.routing.rights import Bindings, improper
from broker.routing.senders import Senders
from broker.wire import messages as m
from broker.wire.fragments import shard_of
from broker.wire.messages import AGGREGATOR, Channel, Reason, kind_of

#: An aggregator that has not answered an island for so long leaves it to the broker to say that somebody is there;
#: shorter than the interval of heartbeats, so that it is said in time.
ANSWER_LATE_S = 0.4
#: A relay that is called so long after the moment that it asked for was held up, if it had no other call for a second.
LATE_S, HELD_UP_S = 0.25, 1.0


class Relay:
    """Routes the messages of one run; see the module's docstring for the rules."""

    def __init__(self, config: RelayConfig) -> None:
        self.config = config
        self._who = Directory(max_peers=config.max_peers)
        self._bindings = Bindings()
        self._out = Actions(run_id=config.run_id, who=self._who)
        self.counters = self._out.counters
        self._deliveries = Deliveries(config, self._who, self._out)
        self._senders = Senders(config, self._who, self._deliveries, self._out)
        self._observers = Observers()
        self._called_at_s: float | None = None

    # --- called by the driver ---

    def handle(self, event: RelayEvent, now_s: float) -> list[RelayAction]:
        """Handles one event; returns the actions in order."""
        self._excuse(now_s)
        match event:
            case Received():
                self.counters.received_messages += 1
                self.counters.received_bytes += event.size_bytes
                refusal = self._receive(event, now_s)
                if refusal is not None:
                    claimed, kind = event.envelope.sender, kind_of(event.envelope.message)
                    sender = self._bindings.blamed(event.key, claimed)
                    self._out.refuse(event.channel, event.peer, sender, kind, event.envelope.sequence, refusal, claimed)
            case Rejected():
                refusal = event.reason, event.detail
                sender = self._bindings.blamed(event.key, event.sender)
                self._out.refuse(event.channel, event.peer, sender, event.kind, event.sequence, refusal, event.sender)
            case Blocked():
                self._out.unsend(event)
                self._deliveries.put_back(event, now_s)
            case Unreachable():
                self._out.unsend(event)
                self._who.close(event.channel, event.peer)
                self._observers.forget(event.peer)
                self._deliveries.give_up(event)
            case Delivered():
                self._deliveries.delivered(event)
            case Room():
                self._deliveries.go_on(event, now_s)
            case AllowListChanged(allowed=allowed):
                self._bindings.replace(allowed)
                self._senders.revoke(self._bindings)
            case TurnedAway():
                self._out.turn_away(event)
            case LookedUp(peer=peer, to=to, message=answer):
                self._out.reply(Channel.BULK, peer, to, answer, len(answer.record))
            case Tick():
                pass
        self._senders.lose_silent_leaders(now_s)
        self._deliveries.retry(now_s)
        self._senders.forget_silent_peers(now_s)
        return self._out.take()

    def _excuse(self, now_s: float) -> None:
        """Ignores silence during a time in which this process stood still: messages of that time arrive now."""
        passed_s = 0.0 if self._called_at_s is None else now_s - self._called_at_s
        self._called_at_s = now_s
        due_s = self._senders.next_deadline_s() if passed_s > HELD_UP_S else None
        if due_s is not None and now_s > due_s + LATE_S:
            self._senders.held_up(passed_s)

    def next_deadline_s(self) -> float | None:
        """Returns the time of the next :class:`Tick`; None if none is needed."""
        due = (self._deliveries.retry_at_s, self._senders.next_deadline_s())
        return min((each for each in due if each is not None), default=None)

    def anyone_may_be(self, sender: str) -> bool:
        """Returns True if some key may speak as ``sender``, or keys are not in use."""
        return self._bindings.anyone_may_be(sender)

    @property
    def queued_bytes(self) -> int:
        """Bytes of contributions that wait for an aggregator."""
        return self._deliveries.queue.queued_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of held versions: about one model."""
        return self._deliveries.shelf.held_bytes

    @property
    def num_peers(self) -> int:
        """Number of known and joining islands."""
        return len(self._who.peers)

    # --- what arrives ---

    def _receive(self, event: Received, now_s: float) -> Refusal | None:
        """Forwards a message, or returns why it is refused."""
        envelope = event.envelope
        refusal = self._bindings.refusal(event.key, envelope.sender, envelope.message)
        refusal = refusal or improper(event, run_id=self.config.run_id)
        if refusal is not None:
            return refusal
        match envelope.message:
            case m.Probe() as probe:
                self._answer_probe(event, probe)
                return None
            case m.Attach() | m.AttachBulk() as attach:
                return self._attach(event, attach, now_s)
            case _ if envelope.sender == AGGREGATOR:
                return self._from_aggregator(event, now_s)
            case m.Follow() | m.FollowBulk() as follow:
                return self._follow(event, follow, now_s)
            case m.Observe():
                return self._observe(event, now_s)
            case _:
                return self._from_island(event, now_s)

    def _answer_probe(self, event: Received, probe: m.Probe) -> None:
        """Answers a probe over its own connection; the sender does not become a peer."""
        answer = m.Probed(
            answers=event.envelope.sequence,
            release=self.config.release,
            clock_s=event.wall_s,
            payload=m.probe_payload(probe.answer_buffers),
        )
        self._out.reply(event.channel, event.peer, event.envelope.sender, answer)

    # --- from islands ---

    def _from_island(self, event: Received, now_s: float) -> Refusal | None:
        envelope, peer = event.envelope, self._senders.hear_island(event, now_s)
        if not isinstance(peer, Peer):
            return peer
        match envelope.message:
            case m.Want(versions=versions):
                self._deliveries.grant(peer, versions, now_s, envelope.sequence)
            case m.Contribution(fragment_id=p) | m.Seed(fragment_id=p) | m.HostPart(fragment_id=p):
                # One that does not exist is refused for good by whose it would be, and who knows the manifest.
                item = Queued(envelope=envelope, size_bytes=event.size_bytes)
                return self._deliveries.contribute(shard_of(p, self._who.shards), item, now_s)
            case m.FetchState() | m.StatePart():
                self._to_peer(event)
            case m.Nothing(fragment_id=p):
                self._to_shard(shard_of(p, self._who.shards), event)
            case m.Heartbeat() | m.Leave():
                self._out.add(Report(envelope=envelope))
                led = self._to_shard(0, event)
                for shard in range(1, self._who.shards):
                    self._to_shard(shard, event)
                if isinstance(envelope.message, m.Heartbeat):
                    self._deliveries.adopted(peer, envelope.message.versions, now_s, envelope.sequence)
                    self._answer_for_nobody(event, peer, now_s, led=led)
            case m.Join():
                self._answer_for_nobody(event, peer, now_s, led=self._to_shard(0, event))  # which keeps membership
            case _:
                self._to_shard(0, event)
        return None

    def _answer_for_nobody(self, event: Received, peer: Peer, now_s: float, *, led: bool) -> None:
        """Tells an island that the broker lives, although no aggregator answers.

        An island chooses its broker by that (:mod:`islands.protocol.broker_choice`). One that was away when the run
        ended, or comes later, hears that it has ended: it would train on, or wait, for ever.
        """
        if peer.asked_s is None:
            peer.asked_s = now_s
        if not led or now_s - peer.asked_s >= ANSWER_LATE_S:
            envelope, reason = event.envelope, Reason.NOT_LEADER
            detail = "the aggregator has not answered yet" if led else "no aggregator leads shard 0 now"
            last = self._who.leaders.get(0)
            if last is not None and last.ended and not last.leads:
                reason, detail = Reason.RUN_ENDED, "the run has ended, and its aggregator has gone"
            kind = kind_of(envelope.message)
            refused = m.Refused(kind=kind, sequence=envelope.sequence, reason=reason, detail=detail)
            self._out.reply(event.channel, event.peer, envelope.sender, refused)

    # --- from aggregators ---

    def _attach(self, event: Received, message: m.Attach | m.AttachBulk, now_s: float) -> Refusal | None:
        leader = self._senders.attach(event, message, now_s)
        if not isinstance(leader, Leader):
            return leader
        if isinstance(message, m.AttachBulk):
            self._deliveries.forward_queue(leader, now_s)
            return None
        leader.ended = leader.ended or message.ended
        held = m.Attached(versions=self._deliveries.shelf.versions(len(message.versions)))
        self._out.reply(event.channel, event.peer, AGGREGATOR, held)
        return None

    def _from_aggregator(self, event: Received, now_s: float) -> Refusal | None:
        envelope, leader = event.envelope, self._senders.hear_aggregator(event, now_s)
        if not isinstance(leader, Leader):
            return leader
        match envelope.message:
            case m.Version() as version:
                self._deliveries.publish(envelope, version, event.size_bytes, now_s)
                return None
            case m.WantBack(fragment_id=p):
                self._deliveries.give_back(leader, p)
                return None
            case m.Roster(to_shard=shard):
                self._to_shard(shard, event)
                return None
            case m.Rostered():
                self._to_shard(0, event)
                return None
            case m.Standings(shard=shard):
                for other in set(range(self._who.shards)) - {shard}:
                    self._to_shard(other, event)
                return None
            case m.Welcome(island_id=island_id, incarnation=incarnation):
                known = self._who.peers.get(island_id)
                if known is not None and incarnation > known.incarnation:
                    self._senders.enter(island_id, incarnation, now_s)  # from here on its earlier lives are fenced
                self._out.add(Report(envelope=envelope))
            case m.FleetState(phase=m.Phase.ENDED):
                leader.ended = True
            case _:
                pass
        addressee = self._who.peers.get(envelope.to)
        if addressee is not None:
            addressee.asked_s = None
        self._to_peer(event)
        return None

    def _follow(self, event: Received, message: m.Follow | m.FollowBulk, now_s: float) -> Refusal | None:
        """Forwards a standby's heartbeat to the leader, and answers with the broker's own knowledge."""
        shard = message.shard
        peer = self._senders.hear_standby(event, shard, now_s)
        if not isinstance(peer, Peer):
            return peer
        if isinstance(message, m.FollowBulk):
            return None
        peer.follow = message
        known, leader = self._who.leaders.get(shard), self._who.leading(shard)
        following = m.Following(
            epoch=known.epoch if known is not None else 0,
            leader_heard_ago_s=now_s - leader.heard_s if leader is not None else None,
            stored=self._deliveries.shelf.stored(lambda p: shard_of(p, self._who.shards) == shard),
            newest=self._who.newest_standby(shard, beside=peer.name, since_s=now_s - self.config.leader_silent_s),
        )
        self._out.reply(event.channel, event.peer, peer.name, following)
        self._to_shard(shard, event)
        return None

    def _observe(self, event: Received, now_s: float) -> Refusal | None:
        """Orders the look-up of an observer's question, unless it asks too often."""
        refusal = self._observers.hear(event.peer, event.envelope.sequence, now_s)
        if refusal is None:
            self._out.add(LookUp(peer=event.peer, envelope=event.envelope))
        elif refusal[0] is Reason.REPLAYED:
            self.counters.repeated_messages += 1
        return refusal

    def _to_shard(self, shard: int, event: Received) -> bool:
        """Forwards a repeated message to the aggregator of a shard; returns whether there is one."""
        leader = self._who.leading(shard)
        route = leader.routes.get(event.channel) if leader is not None else None
        self._out.send_or_drop(event.channel, route, event.envelope, event.size_bytes, missing="no_leader")
        return route is not None

    def _to_peer(self, event: Received) -> None:
        """Forwards a message to the island or standby in ``to``."""
        route = self._who.route_to(event.envelope.to, event.channel)
        self._out.send_or_drop(event.channel, route, event.envelope, event.size_bytes, missing="no_such_peer")
