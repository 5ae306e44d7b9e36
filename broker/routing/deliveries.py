"""Delivers large messages: versions to islands, contributions and seeds to aggregators. Pure.

*Backpressure.* The driver sends or, at a high-water mark, answers a :class:`~broker.routing.events.Send` with
:class:`~broker.routing.events.Blocked`. A contribution then waits in a queue bounded in bytes; a version does not wait
at all: there is room in the island's window again (:mod:`broker.routing.window`), and whatever is the newest when the
island takes more is what it gets. The driver says when a connection takes more (:class:`~broker.routing.events.Room`);
those of which it has said nothing are tried again after a long pause.

Islands send a contribution again when they have heard nothing of it for a while, and cannot see that it waits here,
behind others, for an aggregator's slow link. A copy would queue behind its own first one, and each copy makes the wait
of the next contribution longer, until the link carries nothing else. So it is dropped while the first one waits in the
queue here, or is not known to have reached the aggregator (:class:`~broker.routing.events.Delivered`). After that the
next one passes: the first may have been lost. So does one that comes at once: nobody is impatient yet, so the first has
arrived and was not what it should be.

What waits for an aggregator that has gone waits for its next connection, or is given back when the aggregator is given
up. The containers with their bounds are in :mod:`broker.routing.queues`; which aggregator and which islands there are
is known to the :class:`~broker.routing.directory.Directory`.
"""

from __future__ import annotations

from collections.abc import Hashable

from broker.routing.actions import Actions
from broker.routing.directory import Directory, Leader, Peer
from broker.routing.events import Blocked, Delivered, Refusal, RelayConfig, Room, Unreachable
from broker.routing.queues import ContributionQueue, Queued, VersionShelf
from broker.routing.resending import PATIENT_S, Backoff
from broker.wire import messages as m
from broker.wire.fragments import shard_of
from broker.wire.messages import AGGREGATOR, Channel, Envelope, Reason

#: So many of what waits for an aggregator are tried at a time: each that a full connection does not take costs as much
#: as one that it takes, and there may be hundreds. A connection takes four (``broker.clients.flows.MOST_WAITING``).
BURST = 4
#: A whole version that was asked for is asked for again after this, and then ever more seldom: it may be large.
WHOLE_AGAIN_S, WHOLE_SELDOM_S = 2.0, 64.0
#: A connection that took nothing is tried again after this, if nothing was heard of room by then. An aggregator's was
#: tried every 2 ms: half of a broker's time, while 16 islands handed over 50 MB each.
ROOM_S = 0.5
#: A copy that comes sooner than this after the first one passes.
AT_ONCE_S = 0.5


class Deliveries:
    """The queues for islands and aggregators, and the connections that are blocked."""

    def __init__(self, config: RelayConfig, who: Directory, out: Actions) -> None:
        self.shelf = VersionShelf()
        self.queue = ContributionQueue(per_sender_bytes=config.peer_queue_bytes, total_bytes=config.total_queue_bytes)
        self.retry_at_s: float | None = None  # when :meth:`retry` is due; None while no connection is blocked
        self._retry_s = config.retry_s
        self._who = who
        self._out = out
        self._wanted: dict[int, Backoff] = {}  # fragments of which a whole version was asked for
        # Whose bulk connection takes nothing now, and when it is tried again if nothing is heard of room.
        self._blocked_peers: dict[str, float] = {}
        self._blocked_shards: dict[int, float] = {}
        # Over the present connection of each shard's aggregator: what, and since when.
        self._under_way: dict[int, dict[Hashable, float]] = {}

    # --- towards islands ---

    def publish(self, envelope: Envelope, version: m.Version, size_bytes: int, now_s: float) -> None:
        """Keeps a version if it is newer than the held one, and sends it to all islands with room."""
        if self.shelf.offer(envelope, version, size_bytes):
            if version.base is None:
                self._wanted.pop(version.fragment_id, None)
            for peer in self._who.peers.values():
                self._serve(peer, now_s)
        else:
            self._out.counters.dropped["old_version"] += 1

    def grant(self, peer: Peer, versions: tuple[int, ...], now_s: float, sequence: int) -> None:
        """Sends a peer versions newer than ``versions``, as far as its window allows."""
        peer.window.wants(versions, now_s, sequence)
        self._serve(peer, now_s)

    def adopted(self, peer: Peer, versions: tuple[int, ...], now_s: float, sequence: int) -> None:
        """Makes room in the window of a peer that reports training with these versions."""
        peer.window.adopted(versions, now_s, sequence)
        self._serve(peer, now_s)

    def _serve(self, peer: Peer, now_s: float) -> None:
        """Sends a peer newer versions until its window is full."""
        route, window = peer.routes.get(Channel.BULK), peer.window
        while route is not None and window.is_open and peer.name not in self._blocked_peers:
            assert window.versions is not None
            way = self.shelf.choose(window.versions, peer.served, window.under_way)
            if not way:
                break
            newest = way[-1].version
            peer.transfers += 1
            peer.served[newest.fragment_id] = peer.transfers
            window.sent(newest.fragment_id, newest.fragment_version, now_s)
            for held in way:
                self._out.send(Channel.BULK, route, *held.for_island(peer.name))
        if route is not None and window.versions is not None:
            for p in self.shelf.without_base(window.versions, window.under_way):
                self._want_whole(p, now_s)

    def _want_whole(self, p: int, now_s: float) -> None:
        """Asks the aggregator for a whole version of a fragment, at growing intervals."""
        backoff = self._wanted.setdefault(p, Backoff(WHOLE_AGAIN_S, WHOLE_SELDOM_S))
        leader = self._who.leading(shard_of(p, self._who.shards))
        route = None if leader is None else leader.routes.get(Channel.CONTROL)
        if route is not None and backoff.due(now_s):
            backoff.tried(now_s)
            self._out.reply(Channel.CONTROL, route, AGGREGATOR, m.WantWhole(fragment_id=p))

    def unblock_peer(self, name: str) -> None:
        """Forgets the blocked state of a peer that has gone or has a new, empty connection."""
        self._blocked_peers.pop(name, None)

    # --- towards aggregators ---

    def give_back(self, leader: Leader, p: int) -> None:
        """Sends an aggregator the newest version of a fragment, if the broker holds it whole."""
        held, route = self.shelf.whole(p), leader.routes.get(Channel.BULK)
        if held is not None and route is not None:
            self._out.send(Channel.BULK, route, *held.for_island(AGGREGATOR))

    def contribute(self, shard: int, item: Queued, now_s: float) -> Refusal | None:
        """Forwards or queues a contribution; returns why it is refused, None if it is not."""
        leader = self._who.leading(shard)
        if leader is None:
            return Reason.NOT_LEADER, f"no aggregator leads shard {shard} now: send it again later"
        if self.queue.holds(item):
            self._out.counters.dropped["copy_in_queue"] += 1
            return None
        since_s = self._under_way.get(shard, {}).get(item.identity)
        if since_s is not None and AT_ONCE_S <= now_s - since_s < PATIENT_S:
            self._out.counters.dropped["copy_under_way"] += 1
            return None
        route = leader.routes.get(Channel.BULK)
        if route is not None and shard not in self._blocked_shards:
            self._send_on(shard, route, item, now_s)
            return None
        full = self.queue.full_for(item)
        if full is not None:
            return Reason.QUEUE_FULL, full
        self.queue.push(shard, item)
        return None

    def delivered(self, event: Delivered) -> None:
        """Notes that a message has reached an aggregator."""
        leader = self._who.leader_behind(event.channel, event.peer)
        if leader is not None and isinstance(event.envelope.message, m.Contribution | m.Seed | m.HostPart):
            self._arrived(leader.shard, Queued(envelope=event.envelope, size_bytes=0))

    def forward_queue(self, leader: Leader, now_s: float) -> None:
        """Sends an aggregator its queued messages, a burst at a time, while its connection has room."""
        route = leader.routes.get(Channel.BULK)
        if route is None or leader.shard in self._blocked_shards:
            return
        for item in self.queue.take(leader.shard, BURST):
            self._send_on(leader.shard, route, item, now_s)
        if self.queue.waits(leader.shard):
            self._blocked_shards[leader.shard] = now_s + self._retry_s  # so that what comes stays behind what waits
            self._retry_at(now_s + self._retry_s)

    def _retry_at(self, at_s: float) -> None:
        self.retry_at_s = at_s if self.retry_at_s is None else min(self.retry_at_s, at_s)

    def _send_on(self, shard: int, route: bytes, item: Queued, now_s: float) -> None:
        self._under_way.setdefault(shard, {})[item.identity] = now_s
        self._out.send(Channel.BULK, route, item.envelope, item.size_bytes)

    def _arrived(self, shard: int, item: Queued) -> None:
        """Forgets a message that is no longer under way."""
        self._under_way.get(shard, {}).pop(item.identity, None)

    def unblock_shard(self, shard: int) -> None:
        """Forgets the blocked state of a shard whose aggregator has a new, empty connection."""
        self._blocked_shards.pop(shard, None)
        self._under_way.pop(shard, None)

    def withdraw(self, shard: int) -> list[Queued]:
        """Takes back all messages under way to an aggregator that has gone."""
        self.unblock_shard(shard)
        return self.queue.take(shard)

    # --- what could not be sent ---

    def put_back(self, event: Blocked, now_s: float) -> None:
        """Takes back a large message from a full connection; drops small ones, which senders repeat."""
        match event.envelope.message:
            case m.Version(fragment_id=p):
                peer = self._who.peers.get(self._who.name_of(event.channel, event.peer) or "")
                if peer is None:
                    return
                peer.window.took_back(p)
                peer.served.pop(p, None)  # it still comes first
                self._blocked_peers[peer.name] = now_s + ROOM_S
                self._retry_at(now_s + ROOM_S)
            case m.Contribution(fragment_id=p) | m.Seed(fragment_id=p) | m.HostPart(fragment_id=p):
                shard = shard_of(p, self._who.shards)
                item = Queued(envelope=event.envelope, size_bytes=event.size_bytes)
                self._arrived(shard, item)
                self.queue.push(shard, item, back=True)
                self._blocked_shards[shard] = now_s + ROOM_S
                self._retry_at(now_s + ROOM_S)
            case _:
                self._out.counters.dropped["blocked"] += 1

    def give_up(self, event: Unreachable) -> None:
        """Handles a lost connection: contributions wait for the aggregator's next one, islands ask again."""
        match event.envelope.message:
            case m.Contribution(fragment_id=p) | m.Seed(fragment_id=p) | m.HostPart(fragment_id=p):
                shard = shard_of(p, self._who.shards)
                item = Queued(envelope=event.envelope, size_bytes=event.size_bytes)
                self._under_way.pop(shard, None)  # it went with the connection
                self.queue.push(shard, item, back=True)
            case _:
                self._out.counters.dropped["unreachable"] += 1

    def go_on(self, event: Room, now_s: float) -> None:
        """Sends queued messages to a connection that has room again."""
        leader = self._who.leader_behind(event.channel, event.peer)
        if leader is not None:
            self._blocked_shards.pop(leader.shard, None)
            self.forward_queue(leader, now_s)
            return
        name = self._who.name_of(event.channel, event.peer) or ""
        if name in self._blocked_peers:
            del self._blocked_peers[name]
            self._serve(self._who.peers[name], now_s)

    def retry(self, now_s: float) -> None:
        """Tries blocked connections again, once that is due."""
        if self.retry_at_s is None or now_s < self.retry_at_s:
            return
        self.retry_at_s = None
        for name in [name for name, at_s in self._blocked_peers.items() if at_s <= now_s]:
            del self._blocked_peers[name]
            self._serve(self._who.peers[name], now_s)
        for shard in [shard for shard, at_s in self._blocked_shards.items() if at_s <= now_s]:
            del self._blocked_shards[shard]
            leader = self._who.leaders.get(shard)
            if leader is not None:  # else what waits is for a shard of another count, which has not attached yet
                self.forward_queue(leader, now_s)
        for at_s in (*self._blocked_peers.values(), *self._blocked_shards.values()):
            self._retry_at(at_s)
