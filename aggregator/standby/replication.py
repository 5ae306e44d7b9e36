"""Replication: sends standbys what they lack, and tells when a commit is durable at all of them. Pure.

A version is published once durable in this store *and* at all standbys in the in-sync set (reference.md, section 5.6).
That set is what the lease says: only its members may take over, so whatever was published is with whoever leads next.

Two orders keep it so. A standby that has caught up is waited for **before** the lease names it, since from then on it
may lead. A standby that lags is waited for **until** the lease names it no more; while Redis is away that cannot be
asked, and then nothing is published. Requests whose outcome is unknown count as granted for both purposes.

And nothing is said at all before the lease was renewed once: between taking it and speaking lies the loading of a
store, or a process that was frozen, and a Redis that was emptied meanwhile may have given the same epoch to somebody
else.

A leader that no broker answers any more lets the lease run out, with the in-sync set as it is.

Nothing here is an edge: a standby says again and again what it has (:class:`broker.wire.messages.Follow`), and is sent
what differs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aggregator.interface.events import Commit, Completion, MergeFailed, Persisted, RunSaved
from aggregator.interface.leader_notes import (
    LeaseBack,
    LeaseGivenUp,
    LeaseUnknown,
    StandbyCame,
    StandbyInSync,
    StandbyLags,
    StandbyLost,
    StandbyNamesake,
)
from aggregator.standby.replication_events import (
    Deliver,
    Deposed,
    Followed,
    GiveUp,
    Local,
    Outranked,
    Renew,
    Renewed,
    RenewFailed,
    Replicate,
    ReplicateRun,
    ReplicationAction,
    ReplicationEvent,
)
from aggregator.state.founding import Founding, Key
from broker.routing.resending import REPUBLISH_S, SILENT_S, Backoff, Patience
from broker.wire.messages import Follow, newness

#: Replicas on their way to one standby: enough to keep a link busy while the last one is being written.
IN_FLIGHT = 2
#: A leader that no broker has answered for so many leases lets its own run out.
UNREACHED_LEASES = 3
#: A standby that was silent for so long is forgotten; it is sent nothing meanwhile.
FORGET_S = 10.0

#: What is noted here. It stands on the tape beside what the core decides, and no replay of the core can give it.
NOTES = (
    *(StandbyCame, StandbyLost, StandbyInSync, StandbyLags, StandbyNamesake),
    *(LeaseUnknown, LeaseBack, LeaseGivenUp),
)


@dataclass(slots=True)
class _Sent:
    """A replica on its way."""

    key: Key | int
    at_s: float
    backoff: Backoff


@dataclass(slots=True)
class _Standby:
    """One standby, as it was last heard."""

    heard_at_s: float
    was_silent: bool = False  #: for long, before that
    follows: bool = False  #: this leader, under this epoch
    stored: dict[int, Key] = field(default_factory=dict)
    run_serial: int = -1
    sent: dict[int, _Sent] = field(default_factory=dict)  #: fragment -> replica on its way; -1 for the run record
    patience: Patience = field(default_factory=lambda: Patience(REPUBLISH_S))


@dataclass(slots=True)
class _Waiting:
    """A commit that is not durable everywhere yet."""

    commit: Commit
    local_at_s: float | None = None  #: when this store had it


_RUN = -1


class Replication:
    """One leader's dealings with its standbys and the lease.

    Args:
        name: Of this aggregator.
        epoch: Under which it leads.
        lease_s: Of the lease, which is renewed four times as often.
        standby_lag_s: How long a commit waits for a standby before that is no longer in sync.
        commits: The newest durable commit of each fragment at the start.
        foundings: Of the run record, this leader's own included.
        now_s: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        name: str,
        epoch: int,
        lease_s: float,
        standby_lag_s: float,
        commits: Mapping[int, Commit],
        now_s: float,
        foundings: Sequence[Founding] = (),
    ) -> None:
        self._foundings = tuple(foundings)
        self.name, self.epoch = name, epoch
        self.in_sync: frozenset[str] = frozenset()  #: standbys that the lease names
        self.deposed = False
        self._interval_s, self._lag_s = lease_s / 4, standby_lag_s
        self._newest: dict[int, Commit] = dict(commits)
        self._published = {p: _key(commit) for p, commit in commits.items()}
        self._waiting: dict[int, _Waiting] = {}
        self._standbys: dict[str, _Standby] = {}
        self._began_at_s = now_s
        self._namesake = False  # a standby of this leader's own name was heard
        self._reached_at_s = now_s  # when a broker answered last,
        self._reached_since_s = now_s  # .. and since when without a pause: a standby is heard through brokers alone
        self._confirmed = False  # the lease was renewed under this epoch
        self._asked: frozenset[str] | None = None  # the request on its way
        self._unsure: frozenset[str] = frozenset()  # named in requests whose outcome is unknown
        self._renew_at_s = self._advanced_at_s = now_s
        self._serial = 0  # of the newest run record in this store
        self._delivered_serial = 0
        self._saved: deque[tuple[int, float]] = deque()  # run records of the last lag_s: serial, and when it was here
        self._due_serial = 0  # of the newest run record that has been here for longer
        self._redis_lost = False
        self._actions: list[ReplicationAction] = []

    # --- what the driver calls ----------------------------------------------------------------------------------

    def persist(self, commit: Commit, now_s: float) -> list[ReplicationAction]:
        """The core asks for a commit: it goes to the standbys while it goes to the disk."""
        self._newest[commit.fragment_id] = commit
        self._waiting[commit.fragment_id] = _Waiting(commit)
        return self.tick(now_s)

    def handle(self, event: ReplicationEvent, now_s: float) -> list[ReplicationAction]:
        """Takes one event in and returns what to do, in order; nothing once it is deposed."""
        if self.deposed:
            return []
        match event:
            case Local(event=done):
                self._local(done, now_s)
            case Followed(name=name, follow=follow):
                self._followed(name, follow, now_s)
            case Outranked():
                self.deposed = True
                self._actions.append(Deposed(holder="another aggregator", epoch=self.epoch + 1))
            case Renewed():
                self._renewed(event)
            case RenewFailed():
                self._unsure |= self._asked or frozenset()
                self._asked = None
                if not self._redis_lost:
                    self._actions.append(LeaseUnknown(detail=event.detail))
                self._redis_lost = True
        return self.tick(now_s)

    def reached(self, now_s: float) -> None:
        """A broker has answered: this process leads somebody. To be called with each answer."""
        if now_s - self._reached_at_s >= self._lag_s:  # a shorter pause is one of a busy machine
            self._reached_since_s = now_s
        self._reached_at_s = now_s

    def next_deadline_s(self) -> float:
        """Returns when to call :meth:`tick`: with each renewal, or as often while none may be asked for."""
        renews = self._asked is None and self._renew_at_s > self._advanced_at_s
        return self._renew_at_s if renews else self._advanced_at_s + self._interval_s

    @property
    def standbys(self) -> tuple[str, ...]:
        """Names of all standbys heard of lately."""
        return tuple(sorted(self._standbys))

    @property
    def required(self) -> frozenset[str]:
        """Returns the standbys that must have a commit before it is published."""
        return self.in_sync | self._unsure | (self._asked or frozenset())

    # --- events -------------------------------------------------------------------------------------------------

    def _local(self, done: Completion, now_s: float) -> None:
        match done:
            case Persisted(fragment_id=p, fragment_version=version):
                waiting = self._waiting.get(p)
                if waiting is not None and waiting.commit.fragment_version == version:
                    waiting.local_at_s = now_s
            case RunSaved(serial=serial):
                if not self._serial:
                    self._renew_at_s = now_s
                self._saved.append((serial, now_s))
                self._serial = max(self._serial, serial)
            case MergeFailed() if self.in_sync:
                # That one has all that was published, and mends this store when it leads.
                to = min(self.in_sync)
                self.deposed = True
                self._actions.append(LeaseGivenUp(to=to, detail=done.detail))
                self._actions.append(Deposed(holder=to, epoch=self.epoch))
            case _:
                self._actions.append(Deliver(event=done))

    def _followed(self, name: str, follow: Follow, now_s: float) -> None:
        if self._gives_way(name, follow):
            self.deposed = True
            why = f"the store of {name} is newer, and nothing was made since"
            self._actions += [
                LeaseGivenUp(to=name, detail=why),
                GiveUp(to=name),
                Deposed(holder=name, epoch=self.epoch),
            ]
            return
        if follow.epoch > self.epoch:
            return  # it has another leader; the lease will say so
        if name == self.name:
            if now_s >= self._began_at_s + FORGET_S and not self._namesake:  # else sent while this store stood by
                self._namesake = True
                cure = "is its store a copy of this one? remove the file `name` in it, and start it again"
                detail = f"another process stands by as {name}; {cure}"
                self._actions.append(StandbyNamesake(standby=name, detail=detail))
            return
        if name not in self._standbys:
            self._actions.append(StandbyCame(standby=name))
        standby = self._standbys.setdefault(name, _Standby(now_s))
        standby.was_silent, standby.heard_at_s = now_s - standby.heard_at_s > SILENT_S, now_s
        standby.follows = follow.epoch == self.epoch
        standby.stored = {s.fragment_id: (s.fragment_version, s.digest) for s in follow.stored}
        standby.run_serial = follow.run_serial if follow.run_epoch == self.epoch else -1

    def _gives_way(self, name: str, follow: Follow) -> bool:
        """Returns True if a standby should lead instead: this one began without a lease, and made nothing.

        The standby came late: its store is newer, and does not follow one that is not.
        """
        if name == self.name or follow.run_epoch == self.epoch or not self._foundings:
            return False
        founding = self._foundings[-1]
        if not founding.holds({p: _key(commit) for p, commit in self._newest.items()}):
            return False
        stored = {s.fragment_id: (s.fragment_version, s.digest) for s in follow.stored}
        own = founding.after, sum(version + 1 for version, _ in founding.base.values())
        return newness(follow.made_under, follow.stored) > own and not founding.holds(stored)

    def _renewed(self, event: Renewed) -> None:
        asked, self._asked = self._asked or frozenset(), None
        if not event.granted:
            self.deposed = True
            self._actions.append(Deposed(holder=event.holder, epoch=event.epoch))
            return
        if self._redis_lost:
            self._actions.append(LeaseBack())
        self._redis_lost, self._unsure, self._confirmed = False, frozenset(), True
        for name in sorted(asked ^ self.in_sync):
            self._actions.append((StandbyInSync if name in asked else StandbyLags)(standby=name))
        self.in_sync = asked

    # --- what follows -------------------------------------------------------------------------------------------

    def tick(self, now_s: float) -> list[ReplicationAction]:
        """Handles deadlines; returns the actions in order."""
        self._advanced_at_s = now_s
        while self._saved and now_s >= self._saved[0][1] + self._lag_s:
            self._due_serial = max(self._due_serial, self._saved.popleft()[0])
        if not self.deposed:
            for name in [n for n, s in self._standbys.items() if now_s >= s.heard_at_s + FORGET_S]:
                del self._standbys[name]
                self._actions.append(StandbyLost(standby=name))
            for name, standby in sorted(self._standbys.items()) if self._confirmed else ():
                self._send_missing(name, standby, now_s)
            self._deliver()
            self._renew(now_s)
        actions, self._actions = self._actions, []
        return actions

    def _send_missing(self, name: str, standby: _Standby, now_s: float) -> None:
        wanted: dict[int, Key | int] = {_RUN: self._serial} if self._serial else {}
        wanted |= {p: _key(c) for p, c in sorted(self._newest.items())}
        for p, key in wanted.items():
            if p != _RUN and standby.run_serial < 0:
                break  # the run record first: by that it knows whether it may follow
            has = standby.run_serial if p == _RUN else standby.stored.get(p)
            if has == key and standby.follows:
                arrived = standby.sent.pop(p, None)
                once = arrived is not None and arrived.key == key and arrived.backoff.attempts == 1
                if arrived is not None and once and p != _RUN and not standby.was_silent:
                    standby.patience.took(standby.heard_at_s - arrived.at_s)  # a run record is small, and says nothing
                continue
            if has == key and p != _RUN:
                continue  # the run record tells it under which epoch all this stands
            sent = standby.sent.get(p)
            if sent is not None and sent.key == key:
                if not sent.backoff.due(standby.heard_at_s):
                    continue  # only one that was heard since, and still lacks it, has missed it
                sent.backoff.tried(now_s)
                if not standby.was_silent:
                    standby.patience.in_vain(sent.backoff)
            elif len(standby.sent) - (sent is not None) >= IN_FLIGHT and p != _RUN:
                continue
            else:
                backoff = standby.patience.backoff()
                backoff.tried(now_s)
                standby.sent[p] = _Sent(key, now_s, backoff)
            if p == _RUN:
                self._actions.append(ReplicateRun(to=name, serial=self._serial))
            else:
                self._actions.append(Replicate(to=name, commit=self._newest[p]))

    def _deliver(self) -> None:
        if not self._confirmed:
            return
        for p, waiting in list(self._waiting.items()):
            if waiting.local_at_s is not None and self._everywhere(p, _key(waiting.commit)):
                del self._waiting[p]
                self._published[p] = _key(waiting.commit)
                done = Persisted(fragment_id=p, fragment_version=waiting.commit.fragment_version)
                self._actions.append(Deliver(event=done))
        serials = [s.run_serial if (s := self._standbys.get(name)) else -1 for name in self.required]
        durable = min([self._serial, *serials])
        if durable > self._delivered_serial:
            self._delivered_serial = durable
            self._actions.append(Deliver(event=RunSaved(serial=durable)))

    def _everywhere(self, p: int, key: Key) -> bool:
        return all((s := self._standbys.get(name)) and s.follows and s.stored.get(p) == key for name in self.required)

    def _renew(self, now_s: float) -> None:
        silent_s = now_s - self._reached_at_s
        # Before the first renewal it has said nothing that a broker could have answered.
        unreached = self._confirmed and silent_s >= UNREACHED_LEASES * 4 * self._interval_s
        if self._asked is not None or unreached:
            return  # cut off from every broker, it leads nobody: somebody who is not may take over
        if not self._serial:  # the lease names an epoch only when a store has it (aggregator.process.lease, ``synced``)
            self._renew_at_s = now_s + self._interval_s / 4
            return
        heard = silent_s < 2 * self._interval_s and now_s >= self._reached_since_s + self._lag_s
        late = self._lagging(now_s) if heard else frozenset()  # or it is we who are, or were, cut off
        wanted = (self.in_sync | self._caught_up(now_s)) - late
        if wanted == self.in_sync and not self._unsure and now_s < self._renew_at_s:
            return
        if self._redis_lost and now_s < self._renew_at_s:
            return
        self._asked, self._renew_at_s = wanted, now_s + self._interval_s
        self._actions.append(Renew(in_sync=tuple(sorted(wanted))))

    def _caught_up(self, now_s: float) -> frozenset[str]:
        """Returns the standbys that have everything published; once in the lease, later commits await them."""
        return frozenset(
            name
            for name, s in self._standbys.items()
            if s.follows
            and s.run_serial >= max(1, self._delivered_serial)
            and now_s < s.heard_at_s + self._lag_s
            and all(s.stored.get(p) in (key, _key(self._newest[p])) for p, key in self._published.items())
        )

    def _lagging(self, now_s: float) -> frozenset[str]:
        """Returns the standbys for which a durable commit waits too long."""
        late: set[str] = set()
        for name in self.required:
            standby = self._standbys.get(name)
            for p, waiting in self._waiting.items():
                if waiting.local_at_s is None or now_s < waiting.local_at_s + self._lag_s:
                    continue
                if standby is None or standby.stored.get(p) != _key(waiting.commit):
                    late.add(name)
            # Each record has its own time: where one follows another, the newest is always on its way.
            overdue = self._due_serial > self._delivered_serial
            if overdue and (standby is None or standby.run_serial < self._due_serial):
                late.add(name)
        return frozenset(late)


def _key(commit: Commit) -> Key:
    return commit.fragment_version, commit.digest
