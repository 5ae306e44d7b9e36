"""The directory of connected islands and aggregators, with the connection of each.

A peer is known by its name, and reached by the routing ids that ZeroMQ gave its connections: one on each channel,
random, new after every reconnect. The directory keeps both maps in step. It learns only from messages that
:mod:`broker.routing.senders` has admitted, and never holds more than ``max_peers`` names.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from broker.routing.window import Window
from broker.wire.messages import AGGREGATOR, Channel, Follow, Standing, joining, newness, observing, standing_by

#: The name under which refusals are counted while the sender is not known.
UNKNOWN = "(unknown)"

#: Shards are small numbers; the bound keeps a wrong one from making entries without end.
MAX_SHARDS = 64

JOINING = joining("")
STANDBY = standing_by("")
OBSERVING = observing("")
#: So far behind the highest number one that is new is still known to be new; one further behind counts as seen.
WINDOW = 4096


class Seen:
    """The sequence numbers of one connection, in half a kilobyte, to detect replayed messages.

    A sender counts its messages, on both channels together, and never sends one number twice. Nor does anything between
    it and its broker deliver twice what it sent once over one connection: what is lost is said again, under a new
    number. Order is not looked at: what an island gives of its optimizer's state lets its contributions go first.
    """

    __slots__ = ("_highest", "_recent")

    def __init__(self) -> None:
        self._highest = -1
        self._recent = 0  # bit i: number highest - i has come

    def repeats(self, sequence: int) -> bool:
        """Returns whether a number was seen before, and marks it as seen."""
        ahead = sequence - self._highest
        if ahead > 0:
            self._recent = 1 if ahead >= WINDOW else (self._recent << ahead | 1) & ((1 << WINDOW) - 1)
            self._highest = sequence
            return False
        if -ahead >= WINDOW or self._recent >> -ahead & 1:
            return True
        self._recent |= 1 << -ahead
        return False


@dataclass(slots=True, kw_only=True)
class Peer:
    """One incarnation of an island, a process that asks to become one (``join:NONCE``), or a standby."""

    name: str
    incarnation: int
    heard_s: float
    routes: dict[Channel, bytes] = field(default_factory=dict)  # routing ids; none until it was heard on a channel
    window: Window = field(default_factory=Window)  # versions under way to it
    served: dict[int, int] = field(default_factory=dict)  # fragment -> number of the transfer that carried it last
    transfers: int = 0  # versions sent to it
    asked_s: float | None = None  # when it first sent what an aggregator is to answer; None: nothing is owed
    seen: dict[Channel, Seen] = field(default_factory=lambda: defaultdict(Seen))
    host_seen: dict[bytes, Seen] = field(default_factory=lambda: defaultdict(Seen))  # by connection of its other hosts
    follow: Follow | None = None  # what a standby said last

    @property
    def is_joining(self) -> bool:
        """Returns whether the peer has no island id yet."""
        return self.name.startswith(JOINING)


@dataclass(slots=True, kw_only=True)
class Leader:
    """The aggregator of one shard, under the highest epoch seen.

    ``leads`` turns False when it falls silent; the epoch stays, so that an earlier leader cannot come back.
    ``ended``: it has said that the run is over.
    """

    shard: int
    epoch: int
    shards: int  # how many there are, as it says
    heard_s: float
    routes: dict[Channel, bytes] = field(default_factory=dict)
    leads: bool = True
    ended: bool = False
    name: str = AGGREGATOR
    seen: dict[Channel, Seen] = field(default_factory=lambda: defaultdict(Seen))


class Directory:
    """Peers by name, aggregators by shard, and the name behind each connection.

    ``shards`` is how many there are, as the aggregator that attached last said.
    """

    __slots__ = ("_max_peers", "_names", "leaders", "peers", "shards")

    def __init__(self, *, max_peers: int) -> None:
        self._max_peers = max_peers
        self.peers: dict[str, Peer] = {}
        self.leaders: dict[int, Leader] = {}
        self.shards = 1
        self._names: dict[tuple[Channel, bytes], str] = {}

    @property
    def full(self) -> bool:
        """Returns whether there is no room for another name."""
        return len(self.peers) >= self._max_peers

    def name_of(self, channel: Channel, route: bytes) -> str | None:
        """Returns the name that spoke last over a connection."""
        return self._names.get((channel, route))

    def route_to(self, name: str, channel: Channel) -> bytes | None:
        """Returns a peer's connection on a channel; None if the peer is unknown or not connected."""
        peer = self.peers.get(name)
        return peer.routes.get(channel) if peer is not None else None

    def control_beside(self, channel: Channel, route: bytes) -> bytes | None:
        """Returns the control connection of the peer behind a connection; None if unknown."""
        who = self.leader_behind(channel, route) or self.peers.get(self._names.get((channel, route), ""))
        return who.routes.get(Channel.CONTROL) if who is not None else None

    def leading(self, shard: int) -> Leader | None:
        """Returns the leader of a shard; None if it has none."""
        leader = self.leaders.get(shard)
        return leader if leader is not None and leader.leads else None

    def newest_standby(self, shard: int, *, beside: str, since_s: float) -> Standing | None:
        """Returns the recently heard standby of a shard with the newest store, other than ``beside``."""
        heard = [
            Standing(name=each.name.removeprefix(STANDBY), made_under=each.follow.made_under, stored=each.follow.stored)
            for each in self.peers.values()
            if each.follow is not None and each.follow.shard == shard and each.name != beside and each.heard_s > since_s
        ]
        return max(heard, key=lambda each: (newness(each.made_under, each.stored), each.name), default=None)

    def leader_behind(self, channel: Channel, route: bytes) -> Leader | None:
        """Returns the leader that is attached over a connection."""
        return next((each for each in self.leaders.values() if each.routes.get(channel) == route), None)

    def enter(self, name: str, incarnation: int, now_s: float) -> Peer:
        """Adds and returns a peer; it replaces an earlier incarnation of the same name."""
        old = self.peers.get(name)
        if old is not None:
            self.forget(old)
        peer = self.peers[name] = Peer(name=name, incarnation=incarnation, heard_s=now_s)
        return peer

    def forget(self, peer: Peer) -> None:
        """Removes a peer and its connections."""
        self.disconnect_all(peer)
        self.peers.pop(peer.name, None)

    def forget_silent(self, now_s: float, after_s: float) -> list[Peer]:
        """Removes and returns all peers that were last heard ``after_s`` ago or earlier."""
        silent = [peer for peer in self.peers.values() if now_s >= peer.heard_s + after_s]
        for peer in silent:
            self.forget(peer)
        return silent

    def connect(self, who: Peer | Leader, channel: Channel, route: bytes) -> bool:
        """Assigns a connection to ``who``, in place of an earlier one; returns whether it is new."""
        new = who.routes.get(channel) != route
        if new:
            self.disconnect(who, channel)
            who.routes[channel] = route
            who.seen.pop(channel, None)
        self._names[channel, route] = who.name
        return new

    def disconnect(self, who: Peer | Leader, channel: Channel) -> None:
        """Drops a connection, unless another name has it by now: a joiner continues under its island id."""
        route = who.routes.pop(channel, None)
        if channel is Channel.BULK and isinstance(who, Peer):
            who.window.close()
        if route is not None and self._names.get((channel, route)) == who.name:
            del self._names[channel, route]

    def disconnect_all(self, who: Peer | Leader) -> None:
        """Drops a peer's connections on both channels."""
        for channel in Channel:
            self.disconnect(who, channel)

    def close(self, channel: Channel, route: bytes) -> None:
        """Drops a lost connection from the directory."""
        leader = self.leader_behind(channel, route)
        if leader is not None:
            self.disconnect(leader, channel)
        peer = self.peers.get(self._names.get((channel, route), ""))
        if peer is not None and peer.routes.get(channel) == route:
            self.disconnect(peer, channel)
