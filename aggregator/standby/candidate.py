"""A standby aggregator: it follows the leader's commits, and takes over when it may. Pure.

::

    FOLLOWING --the lease has run out, and nothing speaks against it--> TAKING --granted--> LEADING (this machine ends)
        ^                                                                  |
        '------------------------- refused ---------------------------------'

While TAKING it stops storing what the leader sends, and so acknowledging it: from the moment at which it may lead,
nothing that it does not have can be published (reference.md, section 5.6).

What speaks against leading:

* a broker holds a newer version than this store, or other bytes under the same one: leading would part the run from
  what islands have seen (``behind``);
* no broker was heard at all: there is nobody to lead;
* a broker heard the leader within ``lease_s``: it is Redis that it cannot reach, and it needs none to go on;
* the lease does not name this store as in sync, or this store has never heard of the epoch that the lease has;
* the newest version of a fragment is damaged in this store;
* the key is missing, or older than this store since Redis has lost writes: then a leader that may still live is first
  given the time to put it right, a store that is newer goes first, and whoever leads founds a line
  (:mod:`aggregator.state.founding`).

Whoever could object is heard through brokers alone. So each of these waits counts only the time for which every broker
that answers has answered without a pause: one that was away, or began anew, has yet to hear the others itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from aggregator.interface.leader_notes import CandidateWaits, LeaderFollowed, LeaseWon, ReplicaNotDurable
from aggregator.standby.candidate_events import (
    Arrived,
    CandidateAction,
    CandidateEvent,
    Heard,
    Keep,
    Kept,
    Lead,
    LeaseTaken,
    Poll,
    Polled,
    Quit,
    SendFollow,
    Take,
    Tick,
    Unpolled,
)
from aggregator.state.founding import Founding, Key, foundings_in, foundings_of, made_under, shards_in, stray
from broker.base.transitions import Staged, Transitions
from broker.wire.messages import Follow, Following, Replica, ReplicaRun, Stored, newness
from broker.wire.records import LeaseView

#: The longest pause between two words of a standby, however long the lease is: whether a broker is reachable, and whom
#: a leader or a broker takes for silent, is counted in seconds and not in leases.
BEAT_S = 0.5
#: A broker that was not heard for so long is not reachable, and not asked for its opinion.
BROKER_FRESH_S = 3.0
#: Until a standby that an ended run has left behind goes home, in seconds.
ENDED_S = 5.0
#: How long a lease that is missing or older than the store is left to a leader that may still live, in lease times.
MISSING_LEASES = 3
_RUN = -1


@dataclass(frozen=True, slots=True)
class _Broker:
    """The last answer of a broker, and since when it has answered without a pause."""

    since_s: float
    at_s: float
    said: Following


class Place(StrEnum):
    """The stage of a candidate."""

    FOLLOWING = "following"
    TAKING = "taking"
    LEADING = "leading"


#: A lease that was asked for, and of which Redis says nothing, shows in the next poll if it was granted.
STAGES = Transitions(
    "a candidate",
    Place.FOLLOWING,
    {
        Place.FOLLOWING: {"take": Place.TAKING},
        Place.TAKING: {"granted": Place.LEADING, "refused, unanswered": Place.FOLLOWING},
    },
)


class Candidate:
    """One process that may lead a shard.

    Args:
        name: Of this store, the same in all its lives.
        shard: Which fragments,
        shards: .. of how many.
        lease_s: Silence after which a leader may be replaced; polled four times as often, or every ``BEAT_S``.
        yields: Leaves a run that nobody leads to others for a while: it was started to stand by.
        stored: Fragment -> (version, digest) of its newest whole version in the store.
        record: The run record in the store; None: there is none.
        damaged: Fragments whose newest version is not what was written. Somebody may have seen it, so this store must
            not lead; whoever leads mends it.
        now_s: Monotonic seconds.

    Attributes:
        epoch: Of the leader that it follows; it takes nothing of a lower one.
        objection: Why it does not lead, for people; empty while somebody else does.
    """

    def __init__(
        self,
        *,
        name: str,
        shard: int,
        shards: int = 1,
        lease_s: float,
        yields: bool,
        stored: Mapping[int, Key],
        record: Mapping[str, Any] | None,
        damaged: frozenset[int] = frozenset(),
        now_s: float,
    ) -> None:
        self.name, self.shard = name, shard
        self._shards = shards
        self.at = Staged(STAGES)
        self.epoch = 0 if record is None else record["epoch"]
        self.objection = ""
        self._lease_s = lease_s
        self._patience_s = (MISSING_LEASES + 1) * lease_s + 2.0 if yields else 0.0
        self._began_at_s = now_s
        self._stored = dict(stored)
        self._run = self.epoch, -1  # epoch and serial of the run record; -1 where this process has not been told
        self._foundings = foundings_of(record)
        self._stray = ""  # what following the leader would erase
        self._leaders_shards = shards  # how many the leader counts
        self._vetted_epoch = 0  # of the leader whose run record says that this store may follow it
        self._damaged = set(damaged)
        self._followed_epoch = 0  # of the leader heard last in this life
        self._arrived_last: dict[int, int] = {}  # of this epoch: fragment -> round of what came last; -1 for the record
        self._keeping = 0  # writes under way
        self._missing_since_s: float | None = None  # since when there is no key, or one older than this store
        self._brokers: dict[int, _Broker] = {}
        self._tick_at_s = now_s
        self._polling = False
        self._wanted_epoch = 0
        self._founding: Founding | None = None  # of the lease that is asked for
        self._actions: list[CandidateAction] = []

    # --- what the driver calls ----------------------------------------------------------------------------------

    def handle(self, event: CandidateEvent, now_s: float) -> list[CandidateAction]:
        """Takes one event in and returns what to do, in order."""
        match event:
            case Polled(lease=lease):
                self._polled(lease, now_s)
            case Unpolled(detail=detail):
                self._polling, self._missing_since_s = False, None
                self._object(f"Redis does not answer: {detail}")
                if self.place is Place.TAKING:
                    self.at.take("refused, unanswered")
            case LeaseTaken(granted=granted):
                self._taken(granted)
            case Heard(broker=broker, following=following):
                self._heard(broker, following, now_s)
            case Arrived(message=message):
                self._arrived(message)
            case Kept():
                self._kept(event)
            case Tick():
                pass
        if now_s >= self._tick_at_s and self.place is not Place.LEADING:
            self._tick_at_s = now_s + min(self._lease_s / 4, BEAT_S)
            self._follow()
            if not self._polling and self.place is Place.FOLLOWING:
                self._polling = True
                self._actions.append(Poll())
        actions, self._actions = self._actions, []
        return actions

    @property
    def place(self) -> Place:
        """Returns its present stage."""
        return self.at.stage

    def next_deadline_s(self) -> float | None:
        """Returns when to send :class:`Tick`; None once it leads."""
        return None if self.place is Place.LEADING else self._tick_at_s

    # --- following ----------------------------------------------------------------------------------------------

    def _heard(self, broker: int, following: Following, now_s: float) -> None:
        """Takes a broker's answer; one with a lower epoch is a new process, which knows nobody yet."""
        before = self._brokers.get(broker)
        anew = before is None or now_s >= before.at_s + BROKER_FRESH_S or following.epoch < before.said.epoch
        since_s = now_s if before is None or anew else before.since_s
        self._brokers[broker] = _Broker(since_s, now_s, following)

    def _arrived(self, message: Replica | ReplicaRun) -> None:
        if self.place is not Place.FOLLOWING or message.epoch < self.epoch:
            return
        if not self._vetted(message):
            return
        if message.epoch > self.epoch:
            self._actions.append(LeaderFollowed(epoch=message.epoch))
            self._arrived_last.clear()
        # Over several brokers, or in a copy, an earlier commit may come last: what was acknowledged must stay.
        p, order = (
            (_RUN, message.serial) if isinstance(message, ReplicaRun) else (message.fragment_id, message.round_id)
        )
        if order < self._arrived_last.get(p, -1):
            return
        self._arrived_last[p] = order
        self.epoch = self._followed_epoch = message.epoch
        self._keeping += 1
        self._actions.append(Keep(message=message))

    def _vetted(self, message: Replica | ReplicaRun) -> bool:
        """Returns whether this store may follow the sender: its run record must have come, and allow it."""
        if message.epoch == self._vetted_epoch:
            return True
        if not isinstance(message, ReplicaRun) or self._keeping:
            return False  # sent again; the last one of the leader before must be in before the stores are compared
        try:
            self._stray = stray(self._stored, self._foundings, foundings_in(message.record))
        except ValueError as err:
            self._actions.append(ReplicaNotDurable(detail=str(err)))
            return False
        self._leaders_shards = shards_in(message.record) or self._shards
        fits = not self._stray and self._leaders_shards == self._shards
        if fits:
            self._vetted_epoch = message.epoch
        return fits

    def _kept(self, event: Kept) -> None:
        self._keeping -= 1
        if event.problem:
            self._actions.append(ReplicaNotDurable(detail=event.problem))
            return
        match event.message:
            case Replica(fragment_id=p, fragment_version=version, digest=digest):
                self._stored[p] = version, digest
                self._damaged.discard(p)
            case ReplicaRun(epoch=epoch, serial=serial):
                if (epoch, serial) >= self._run:
                    self._run, self._foundings = (epoch, serial), foundings_in(event.message.record)
        self._follow()

    def _follow(self) -> None:
        """Returns this store's state for ``follow``; the epoch is the leader's once anything of it is durable."""
        serial = max(0, self._run[1])
        known = self._run[0] if self._run[1] >= 0 else 0  # a record of an earlier life says nothing of its serial
        self._actions.append(
            SendFollow(
                follow=Follow(
                    shard=self.shard,
                    epoch=self.epoch,
                    stored=self._says,
                    made_under=self._made_under,
                    run_epoch=known,
                    run_serial=serial,
                )
            )
        )

    @property
    def _says(self) -> tuple[Stored, ...]:
        return tuple(Stored(fragment_id=p, fragment_version=v, digest=d) for p, (v, d) in sorted(self._stored.items()))

    @property
    def _made_under(self) -> int:
        return made_under(self._run[0], self._foundings, self._stored)

    # --- leading ------------------------------------------------------------------------------------------------

    def _polled(self, lease: LeaseView, now_s: float) -> None:
        self._polling = False
        if self.place is not Place.FOLLOWING:
            return
        if lease.ended and lease.epoch == self._followed_epoch:
            if self.name in lease.in_sync or lease.age_s >= ENDED_S:  # what is here is whole, or will not become so
                self._actions.append(Quit())
            return
        if not self._void(lease):
            self._missing_since_s = None
        elif self._missing_since_s is None:
            self._missing_since_s = now_s
        objection = self._what_speaks_against(lease, now_s)
        self._object(objection if objection != "" else self._why_not_followed(lease))
        if objection is None:
            heard = [each.said for each in self._brokers.values()]
            epochs = [each.epoch for each in heard] + [each.newest.made_under for each in heard if each.newest]
            self._wanted_epoch = 1 + max([lease.epoch, self.epoch, *epochs])
            self.at.take("take")
            self._founding = None
            if self._unvouched(lease):
                name = f"{self._wanted_epoch}.{self.name}"
                self._founding = Founding(name=name, after=self._made_under, base=dict(self._stored))
            store_epoch = self._run[0]
            take = Take(expected_epoch=lease.epoch, epoch=self._wanted_epoch, store_epoch=store_epoch)
            self._actions.append(take)

    def _void(self, lease: LeaseView) -> bool:
        """Whether the lease says nothing: there is none, or one that Redis had long ago."""
        return lease.epoch < max(1, self._run[0])

    def _unvouched(self, lease: LeaseView) -> bool:
        """Returns True if no lease, now or when it was taken, says that this store has all published versions.

        What this store began to found before it died, it has to found again.
        """
        return self._void(lease) or not lease.synced

    def _what_speaks_against(self, lease: LeaseView, now_s: float) -> str | None:
        """Says why not to lead; None if nothing does, empty if simply somebody else leads."""
        own, void = lease.holder == self.name, self._void(lease)
        if not void and not lease.expired(self._lease_s):  # though it be its own: a copy may lead under its name
            return ""
        if self._keeping:
            return ""  # a moment later: it may be what was published last
        answering = [each for each in self._brokers.values() if now_s < each.at_s + BROKER_FRESH_S]
        if not answering:
            asked_for_long = now_s >= self._began_at_s + BROKER_FRESH_S
            return "no broker answers" if asked_for_long else ""  # at the start none had the time to
        fresh, heard_for_s = [each.said for each in answering], now_s - max(each.since_s for each in answering)
        heard_s = min((f.leader_heard_ago_s for f in fresh if f.leader_heard_ago_s is not None), default=None)
        if heard_s is not None and heard_s < self._lease_s:
            return ""
        newest = max((f.epoch for f in fresh), default=0)
        if not void and lease.in_sync and self.name not in lease.in_sync:
            return (
                f"{lease.holder} led last, and this store was not in sync with it; if no store that was is left, "
                f"delete the key lease:{self.shard} of this run in Redis"
            )
        if not void and self._run[0] < lease.synced:
            return f"this store has nothing of epoch {lease.synced}"
        if self._damaged:
            which = ", ".join(map(str, sorted(self._damaged)))
            return f"the newest version of fragment {which} is damaged in this store, and whoever leads must mend it"
        behind = self._behind(fresh)
        if behind:
            return f"behind: {behind}"
        settling_s = 2 * MISSING_LEASES * self._lease_s
        if void or heard_for_s < settling_s:  # a lease that Redis has from a snapshot may be old as well
            newer = self._newer_store(fresh, None if void else lease.in_sync)
            if newer:
                return newer
        if not own and newest < lease.synced and heard_for_s < settling_s / 2:
            return ""  # everything starts anew: who led last may be about to
        if void:
            assert self._missing_since_s is not None
            begun = bool(self._stored) or newest > 0
            wait_s = MISSING_LEASES * self._lease_s if begun else 0.0
            waited_s = min(heard_for_s, now_s - self._missing_since_s)
            if waited_s < wait_s or heard_for_s < self._patience_s:
                return ""
        return None

    def _behind(self, brokers: list[Following]) -> str:
        for following in brokers:
            for held in following.stored:
                p, version = held.fragment_id, held.fragment_version
                have, digest = self._stored.get(p, (-1, ""))
                if version > have:
                    return f"a broker holds version {version} of fragment {p}, this store {have}"
                if version == have and held.digest != digest:
                    return f"a broker holds version {version} of fragment {p} with other bytes than this store"
        return ""

    def _newer_store(self, brokers: list[Following], among: frozenset[str] | None) -> str:
        """Returns the other standby with a newer store, among those in sync if the lease names any."""
        own = newness(self._made_under, self._says)
        for following in brokers:
            other = following.newest
            if other is None or (among is not None and other.name not in among):
                continue
            if newness(other.made_under, other.stored) > own:
                return f"the store of {other.name} is newer; to go on from less, stop that one"
        return ""

    def _why_not_followed(self, lease: LeaseView) -> str:
        if self._leaders_shards != self._shards:
            return (
                f"{lease.holder or 'the leader'} counts {self._leaders_shards} shards, this standby {self._shards}: "
                f"start it with --shards {self._leaders_shards}"
            )
        if not self._stray:
            return ""
        return (
            f"this store holds {self._stray}, which {lease.holder or 'the leader'} began without, and does not follow: "
            f"let this one lead in its place, or remove this store to follow"
        )

    def _taken(self, granted: bool) -> None:
        if granted:
            self.at.take("granted")
            self.epoch = self._wanted_epoch
            self._actions.append(LeaseWon(epoch=self.epoch))
            self._actions.append(Lead(epoch=self.epoch, founding=self._founding))
        else:
            self.at.take("refused, unanswered")

    def _object(self, objection: str | None) -> None:
        """Notes why this store does not lead, when that has changed."""
        before, self.objection = self.objection, objection or ""
        if self.objection and self.objection != before:
            self._actions.append(CandidateWaits(detail=self.objection))
