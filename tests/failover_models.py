"""What failover runs on, as models: the lease in Redis, a broker, a store and its process, and what is sent."""

from dataclasses import dataclass, field, replace

from aggregator.interface.events import Commit
from broker.wire.messages import Following, Replica, Standing, Stored, newness
from broker.wire.records import LeaseView

LEASE_S, LAG_S = 1.0, 1.0
NAMES = ("a", "b", "c")
#: The broker's answer to a standby: it comes or is lost, but what it says is not old.
FOLLOWING = "following"


class ModelLease:
    """The rules of :mod:`aggregator.process.lease`, without Redis."""

    EMPTY = LeaseView(), 0.0, 0

    def __init__(self):
        self.key = self.EMPTY  # what it says, when it was renewed by its own clock, and the renewal's number
        self.offset_s = 0.0  # of its clock

    def read(self, now_s):
        view, renewed_at_s, _ = self.key
        return replace(view, age_s=now_s + self.offset_s - renewed_at_s) if view.holder else view

    def take(self, now_s, *, holder, expected_epoch, epoch, store_epoch):
        view = self.read(now_s)
        in_sync, synced, may = {holder}, 0, True
        if view.holder:
            older = view.epoch < store_epoch
            may = older or (holder in view.in_sync and view.expired(LEASE_S))
            if not older:
                in_sync, synced = view.in_sync, view.synced
        granted = may and view.epoch == expected_epoch
        if granted:
            self._write(now_s, holder, epoch, in_sync, synced, 0)
        return granted

    def renew(self, now_s, *, holder, epoch, in_sync, number, confirmed):
        view, _, renewal = self.key
        granted = confirmed and (not view.holder or view.epoch < epoch)
        if (view.holder, view.epoch) == (holder, epoch):
            granted = renewal < number
        if granted:
            self._write(now_s, holder, epoch, {holder, *in_sync}, epoch, number)
        return granted, self.key[0].holder, self.key[0].epoch

    def give_up(self, to):
        self._write(-1000.0, to, self.key[0].epoch, {to}, 0, 0)

    def _write(self, now_s, holder, epoch, in_sync, synced, number):
        view = LeaseView(holder=holder, epoch=epoch, in_sync=frozenset(in_sync), synced=synced)
        self.key = view, now_s + self.offset_s, number


@dataclass
class Broker:
    """As much of a relay as failover sees."""

    epoch: int = 0
    heard_at_s: float | None = None
    held: dict = field(default_factory=dict)  #: fragment -> (epoch, version, digest)
    follows: dict = field(default_factory=dict)  #: standby -> what it said last

    def attach(self, epoch, now_s):
        if epoch >= self.epoch:
            self.epoch, self.heard_at_s = epoch, now_s

    def offer(self, epoch, p, key):
        if epoch >= self.epoch and (epoch, key[0]) > self.held.get(p, (-1, -1, ""))[:2]:
            self.held[p] = epoch, *key

    def following(self, name, follow, now_s):
        self.follows[name] = now_s, follow
        others = [
            Standing(name=each, made_under=said.made_under, stored=said.stored)
            for each, (at_s, said) in self.follows.items()
            if each != name and now_s < at_s + 2.0
        ]
        newest = max(others, key=lambda each: newness(each.made_under, each.stored), default=None)
        ago_s = None if self.heard_at_s is None else now_s - self.heard_at_s
        stored = tuple(Stored(fragment_id=p, fragment_version=v, digest=d) for p, (_, v, d) in self.held.items())
        return Following(epoch=self.epoch, leader_heard_ago_s=ago_s, stored=stored, newest=newest)


class Node:
    """One store, and the process that has it open, if one does."""

    def __init__(self, name):
        self.name = name
        self.stored, self.run_epoch, self.foundings = {}, 0, ()  # the disk
        self.life = 0
        self.stop()

    def stop(self):
        self.life += 1
        self.candidate = self.replication = None
        self.writes = []  # in the order in which the disk does them
        self.attached, self.serial, self.run_durable, self.next = False, 0, 0, {}
        self.renewals, self.confirmed = 0, False
        self.line = ()  # foundings of a leader

    @property
    def up(self):
        return self.candidate is not None or self.replication is not None


def commit_of(p, key, epoch):
    return Commit(
        fragment_id=p, fragment_version=key[0], epoch=epoch, digest=key[1], round_id=key[0], contributions=(), ledger={}
    )


def replica(commit, epoch):
    return Replica(
        shard=0,
        epoch=epoch,
        fragment_id=commit.fragment_id,
        fragment_version=commit.fragment_version,
        digest=commit.digest,
        round_id=commit.round_id,
        commit=b"",
        payload=(),
    )
