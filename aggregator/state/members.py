"""The members of a run: ids, incarnations, liveness, and the last report of each island."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aggregator.rules.deadlines import Living
from broker.base.transitions import Staged, Transitions
from broker.routing.liveness import Liveness, LivenessConfig, liveness
from broker.wire.messages import Departure, Enrolled, Heartbeat, Resolution, StateSource

#: Rounds in a row that an island may miss before rounds stop waiting for it.
MISSES_BEFORE_UNRESPONSIVE = 2
#: Earlier processes of an island whose joins are still known: late or repeated ones arrive within seconds.
EARLIER_REMEMBERED = 8
#: No island has had so many lives: who claims one beyond lies, and the next one must find room above.
MOST_INCARNATION = 2**48
#: Islands of whose lives only they themselves tell, and processes that wait for an id: no more than so many are known.
MOST_CLAIMS = 10_000


class MemberStage(StrEnum):
    """The stage of a member between joins and departures; whether it is heard is :class:`Liveness`."""

    ENROLLED = "enrolled"  # with several shards its life begins when all have said how far they know the last one
    HERE = "here"
    LEFT = "left"
    PAUSED = "paused"  # its next process goes on with this life
    CLOSED = "closed"  # its training loop has ended


_GONE = {"join": MemberStage.ENROLLED, "resume": MemberStage.HERE, "heard": MemberStage.HERE}
STAGES = Transitions(
    "a member",
    MemberStage.ENROLLED,
    {
        MemberStage.ENROLLED: {"join": MemberStage.ENROLLED, "begin": MemberStage.HERE},
        MemberStage.HERE: {
            "join": MemberStage.ENROLLED,
            "resume": MemberStage.HERE,
            "stopped": MemberStage.LEFT,
            "paused": MemberStage.PAUSED,
            "closed": MemberStage.CLOSED,
            "supersede": MemberStage.LEFT,
        },
        MemberStage.LEFT: {**_GONE, "supersede": MemberStage.LEFT},
        MemberStage.PAUSED: {**_GONE, "supersede": MemberStage.LEFT},
        MemberStage.CLOSED: {**_GONE, "supersede": MemberStage.LEFT, "reopen": MemberStage.LEFT},
    },
)


def _unwatched(_: str) -> None:
    """Does nothing: the watcher of a member outside :class:`Members`."""


@dataclass(slots=True)
class Member:
    """One island, through all its incarnations."""

    island_id: str
    index: int  #: order of joining
    hint: str
    incarnation: int
    nonce: str  #: of the process that joined last
    tokens_per_step: int  #: as declared; 0: left open
    last_seen_s: float
    at: Staged[MemberStage] = field(default_factory=lambda: Staged(STAGES))
    start: tuple[int, int] = (0, 0)  #: step and token counter at which this incarnation began
    counted_at_s: float = 0.0  #: when its counters were last believed
    missed_rounds: int = 0  #: in a row; an island that answers again starts over
    standing: bool = False  #: it is heard, and makes no steps
    heartbeat: Heartbeat | None = None  #: the last one of this incarnation, by ``beat_sequence``
    beat_sequence: int = -1  #: of the envelope that it came in
    resolutions: list[Resolution] = field(default_factory=list)  #: to tell with the next state
    presumed: bool = False  #: it joined an earlier life of the aggregator, and has not joined this one
    stopped_sequence: int | None = None  #: of the first heartbeat that said that it has stopped
    corruptions: int = 0  #: of this incarnation: a fragment that it held was corrupt in its memory
    emptied: dict[int, int] = field(default_factory=dict)  #: fragment -> sequence of its "nothing" in the flush
    optimizer: StateSource = StateSource.PENDING  #: what this incarnation's inner optimizer started from
    refusals: dict[str, int] = field(default_factory=dict)  #: reason -> count, over all incarnations
    earlier: deque[str] = field(default_factory=lambda: deque(maxlen=EARLIER_REMEMBERED))  #: nonces before the last one
    watch: Callable[[str], None] = field(default=_unwatched, repr=False, compare=False)  #: told its id as it changes

    @property
    def begun(self) -> bool:
        """True once its life has begun, at :attr:`start`."""
        return self.at.stage is not MemberStage.ENROLLED

    @property
    def left(self) -> bool:
        """True if this life has left, in whatever way: nothing more is expected of it."""
        return self.at.stage not in (MemberStage.ENROLLED, MemberStage.HERE)

    @property
    def paused(self) -> bool:
        """True once it has left and kept its progress for its next process."""
        return self.at.stage is MemberStage.PAUSED

    @property
    def closed(self) -> bool:
        """True once it has left for good: its training loop has closed."""
        return self.at.stage is MemberStage.CLOSED

    @property
    def responds(self) -> bool:
        """True if rounds wait for it while it lives."""
        return self.missed_rounds < MISSES_BEFORE_UNRESPONSIVE and not self.standing

    def begin(self, step: int, tokens: int) -> None:
        """Begins its life, at this step and token counter."""
        self.at.take("begin")
        self.start = step, tokens
        self.watch(self.island_id)

    def leave(self, departure: Departure = Departure.STOPPED) -> None:
        """Notes that the island has said that its process ends."""
        self.at.take(str(departure))
        self.watch(self.island_id)

    def come_back(self) -> None:
        """Takes an island back that had left, and is heard in the same life."""
        self.at.take("heard")
        self.watch(self.island_id)

    def heard(self, now_s: float) -> None:
        """Notes that the island was heard."""
        self.last_seen_s = now_s
        self.watch(self.island_id)

    def answered(self) -> None:
        """Notes that the island has answered a round."""
        if self.missed_rounds:
            self.missed_rounds = 0
            self.watch(self.island_id)

    def missed(self) -> None:
        """Notes that a round was closed without its answer."""
        self.missed_rounds += 1
        self.watch(self.island_id)

    def stands(self, standing: bool) -> None:
        """Notes that the island makes no steps, or makes some again."""
        self.standing = standing
        self.watch(self.island_id)

    def supersede(self) -> None:
        """Ends the present life, if there still is one: its process is fenced, and has to join again."""
        self.incarnation += 1
        self.at.take("supersede")
        self.nonce, self.heartbeat, self.presumed = "", None, False
        self.watch(self.island_id)

    @property
    def stopped(self) -> bool:
        """Whether the island has ended its training loop, for the flush."""
        return self.heartbeat is not None and self.heartbeat.stopped

    @property
    def ready(self) -> bool:
        """Whether it holds every fragment, so that it can train; after a takeover that is presumed."""
        return self.presumed if self.heartbeat is None else min(self.heartbeat.versions, default=0) >= 0


@dataclass(slots=True)
class PendingJoins:
    """Islands whose join waits for a run record to be durable: (serial of that record, island id)."""

    welcomes: list[tuple[int, str]] = field(default_factory=list)
    #: Their lives begin when every shard has said how far it knows the last one.
    beginning: list[tuple[int, str]] = field(default_factory=list)

    def holds(self, island_id: str) -> bool:
        """True while an island is not welcomed yet, and does not know its id."""
        return island_id in [each for _, each in (*self.beginning, *self.welcomes)]


class Members:
    """The islands of a run. Everything that must survive a restart is in :meth:`record`.

    Who lives is not asked of every member with every message (:mod:`aggregator.rules.deadlines`): each member tells
    :meth:`changed` when it is heard, has answered or missed a round, or comes or goes.
    """

    def __init__(self, config: LivenessConfig) -> None:
        self._config = config
        self._watchers: list[Callable[[str], None]] = []
        self._living = Living(self.lives, self.dies_at_s)
        self.live_ids = self._living.ids  #: ids of the live members at a time; one object while they are the same
        self._live: tuple[frozenset[str], list[Member]] | None = None  # these are made when they are asked for
        self._responsive: tuple[frozenset[str], frozenset[str]] | None = None  # of those that live
        self.standing: set[str] = set()  #: ids of those that made no step for a while, living or not
        self._all_closed: bool | None = None
        self._rows: dict[str, list[Any]] = {}  # of the record, as it was made last
        self._unrecorded: set[str] = set()  # those that have changed since
        self._members: dict[str, Member] = {}  # by id, in their order
        self._named: dict[str, Member] = {}  # by the nonces of their processes, as far as these are remembered
        self._claims: dict[str, int] = {}  # by id, the latest one last
        self._asked: dict[str, float] = {}  # nonce -> when it first asked for what an island that lives may have

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    def __len__(self) -> int:
        """Returns the number of islands that ever joined."""
        return len(self._members)

    def get(self, island_id: str) -> Member | None:
        """The member of that id, or None."""
        return self._members.get(island_id)

    def __getitem__(self, island_id: str) -> Member:
        return self._members[island_id]

    def by_nonce(self, nonce: str) -> Member | None:
        """The member whose current process introduced itself with ``nonce``."""
        member = self._named.get(nonce)
        return member if member is not None and member.nonce == nonce else None

    def replaced_by(self, nonce: str) -> Member | None:
        """Returns the member that process ``nonce`` was before a later one replaced it; None if not known."""
        member = self._named.get(nonce)
        return member if member is not None and nonce in member.earlier else None

    def id_for(self, island_id: str, hint: str, nonce: str, now_s: float) -> str | None:
        """Returns the id for a process that asks to join: the one that it names, if any.

        Else that of an island with its hint which does not live, the one heard last; else the next free one. A hint is
        no identity: two machines may have one host name. An island with this hint that lives may be the former life of
        this very process, killed a moment ago, or another island. That shows within ``dead_after_s``: the first falls
        silent, the second is heard again.

        Returns:
            None while that is open; the process asks again.
        """
        if island_id:
            return island_id
        holders = [m for m in self if hint and m.hint == hint]
        alive = [m for m in holders if self.state(m, now_s) in (Liveness.ALIVE, Liveness.SUSPECT)]
        if alive:
            asked_s = self._asked.setdefault(nonce, now_s)
            if len(self._asked) > MOST_CLAIMS:
                del self._asked[next(iter(self._asked))]
            # What the former life said last may come with the join, or right after it: that is no sign of life.
            if any(m.last_seen_s < asked_s + self._config.heartbeat_interval_s for m in alive):
                return None
        self._asked.pop(nonce, None)
        gone = [m for m in holders if m not in alive]
        return max(gone, key=lambda m: m.last_seen_s).island_id if gone else self._next_free()

    def admit(self, island_id: str, hint: str, nonce: str, tokens_per_step: int, now_s: float) -> Member:
        """Takes an island in, or in again under the next incarnation, which fences all earlier ones.

        It is above those that were :meth:`claimed`, too.
        """
        member = self._members.get(island_id)
        if member is None:
            member = Member(island_id, len(self._members), hint, 0, nonce, tokens_per_step, now_s)
            self._add(member)
        member.incarnation = max(member.incarnation, self._claims.pop(island_id, 0)) + 1
        member.at.take("join")
        self._renew(member, hint, nonce, tokens_per_step, now_s)
        return member

    def resumable(self, nonce: str, now_s: float) -> Member | None:
        """The member whose last process had ``nonce`` and is gone, so that another may go on with its life.

        While that process is heard it is none: of two copies of one machine, one would speak for the other.
        """
        member = self.by_nonce(nonce) if nonce else None
        if member is None or not member.begun:
            return None
        gone = member.left or member.heartbeat is None or not self.lives(member.island_id, now_s)
        return member if gone else None

    def resume(self, member: Member, nonce: str, tokens_per_step: int, now_s: float) -> None:
        """Continues a member's life in another process: counters stand, the last process's reports do not."""
        heard = member.beat_sequence  # messages of both are counted on, and late ones of the last are told by that
        member.at.take("resume")
        self._renew(member, member.hint, nonce, tokens_per_step, now_s)
        member.beat_sequence = heard

    def claimed(self, island_id: str, incarnation: int) -> None:
        """Notes a life unknown here, by its own word: this store has gone back since that began.

        Brokers were there, and fence every life below it: under a lower one the island would be told to end. Nor may
        two lives have the same number, for their contributions could not be told apart.
        """
        if self._claims.get(island_id, 0) < incarnation <= MOST_INCARNATION:
            self._claims.pop(island_id, None)
            self._claims[island_id] = incarnation
            if len(self._claims) > MOST_CLAIMS:
                del self._claims[next(iter(self._claims))]

    def _renew(self, member: Member, hint: str, nonce: str, tokens_per_step: int, now_s: float) -> None:
        """Forgets what belongs to an earlier life."""
        if nonce != member.nonce:
            if len(member.earlier) == EARLIER_REMEMBERED:
                self._named.pop(member.earlier[0], None)
            member.earlier.append(member.nonce)
        self._named[nonce] = member
        member.nonce, member.hint, member.tokens_per_step = nonce, hint or member.hint, tokens_per_step
        member.last_seen_s, member.counted_at_s, member.missed_rounds, member.standing = now_s, now_s, 0, False
        member.heartbeat, member.beat_sequence, member.presumed = None, -1, False
        member.optimizer, member.stopped_sequence, member.corruptions = StateSource.PENDING, None, 0
        member.resolutions.clear()
        member.emptied.clear()
        self.changed(member.island_id)

    def state(self, member: Member, now_s: float) -> Liveness:
        """Returns how alive a member is."""
        return Liveness.LEFT if member.left else liveness(now_s - member.last_seen_s, self._config)

    def watch(self, watcher: Callable[[str], None]) -> None:
        """Adds a watcher, called with the id of each member that changes, is heard, or misses a round."""
        self._watchers.append(watcher)

    def changed(self, island_id: str) -> None:
        """Notes that a member has changed, and calls the watchers."""
        member = self._members[island_id]
        if self._responsive is not None and member.responds != (island_id in self._responsive[1]):
            self._responsive = None
        if member.closed is not self._all_closed:
            self._all_closed = None
        (self.standing.add if member.standing else self.standing.discard)(island_id)
        self._unrecorded.add(island_id)
        self._living.changed(island_id)
        for watcher in self._watchers:
            watcher(island_id)

    def live(self, now_s: float) -> list[Member]:
        """Members that are not dead and have not left, by id; those whose life has not begun yet do not count."""
        ids = self._living.ids(now_s)
        if self._live is None or self._live[0] is not ids:
            self._live = ids, [m for m in self._members.values() if m.island_id in ids]
        return self._live[1]

    def lives(self, island_id: str, now_s: float) -> bool:
        """Whether an island is one of the live ones."""
        m = self._members.get(island_id)
        return m is not None and m.at.stage is MemberStage.HERE and now_s - m.last_seen_s < self._config.dead_after_s

    def responsive(self, now_s: float) -> frozenset[str]:
        """Ids of the live members that rounds wait for; the same object as long as they are the same."""
        ids = self._living.ids(now_s)
        if self._responsive is None or self._responsive[0] is not ids:
            self._responsive = ids, frozenset(m.island_id for m in self.live(now_s) if m.responds)
        return self._responsive[1]

    def next_death_s(self, now_s: float) -> float | None:
        """Returns when the next live member would be dead if it stayed silent."""
        death_s = self._living.next_death_s(now_s)
        # A millisecond late rather than early: rounding must not wake the caller before :meth:`state` agrees.
        return None if death_s is None else death_s + 0.001

    def dies_at_s(self, island_id: str) -> float:
        """Returns when an island is dead if it stays silent, give or take the rounding of a sum."""
        return self._members[island_id].last_seen_s + self._config.dead_after_s

    def record(self) -> dict[str, Any]:
        """Returns what must survive a restart, as plain data."""
        for island_id in self._unrecorded:  # of the others nothing has changed
            self._rows[island_id] = self._row(self._members[island_id])
        self._unrecorded.clear()
        return {"members": {island_id: self._rows[island_id] for island_id in self._members}}

    @staticmethod
    def _row(m: Member) -> list[Any]:
        # Whoever has paused is merely away: a successor waits for it as for everybody.
        left = m.left and not m.paused
        row = [m.index, m.hint, m.incarnation, m.nonce, m.tokens_per_step, left, list(m.start), m.begun]
        return [*row, m.closed] if m.closed else row

    def reopen(self) -> None:
        """Treats islands that left for good as merely away: the run expects islands again."""
        for member in self:
            if member.closed:
                member.at.take("reopen")
                self.changed(member.island_id)

    @property
    def all_closed(self) -> bool:
        """True once every island that ever joined has left for good."""
        if self._all_closed is None:
            self._all_closed = bool(self._members) and all(member.closed for member in self._members.values())
        return self._all_closed

    def enrolled(self) -> tuple[Enrolled, ...]:
        """Returns the members as other shards need them."""
        return tuple(
            Enrolled(
                island_id=m.island_id,
                index=m.index,
                hint=m.hint,
                incarnation=m.incarnation,
                nonce=m.nonce,
                tokens_per_step=m.tokens_per_step,
                left=m.left and not m.paused,
                begun=m.begun,
                start_step=m.start[0],
                start_tokens=m.start[1],
            )
            for m in self
        )

    def enrol(self, e: Enrolled, now_s: float) -> Member:
        """Takes over an island, or its new life, from shard 0; the life has not begun yet."""
        member = self._members.get(e.island_id)
        if member is None:
            member = Member(e.island_id, e.index, e.hint, 0, e.nonce, e.tokens_per_step, now_s)
            self._add(member)
        if e.incarnation > member.incarnation:
            member.at.take("join")
            self._renew(member, e.hint, e.nonce, e.tokens_per_step, now_s)
            member.incarnation = e.incarnation
        return member

    def restore(self, record: Mapping[str, Any], now_s: float) -> None:
        """Reads :meth:`record` back; every known member counts as live for a while."""
        for name, row in record["members"].items():
            index, hint, incarnation, nonce, tokens_per_step, left, start, *more = row
            stage = MemberStage.LEFT if left else MemberStage.HERE
            if not all(more[:1]):  # which records of a single shard had not from the beginning
                stage = MemberStage.ENROLLED
            if any(more[1:]):
                stage = MemberStage.CLOSED
            at = Staged(STAGES, stage)
            member = Member(name, index, hint, incarnation, nonce, tokens_per_step, now_s, at, start=tuple(start))
            member.counted_at_s, member.presumed = now_s, True
            self._add(member)

    def _add(self, member: Member) -> None:
        """Adds a new member; members stay in the order of their ids."""
        last = next(reversed(self._members), "")
        self._members[member.island_id] = member
        if member.island_id < last:
            self._members = dict(sorted(self._members.items()))
        self._named[member.nonce] = member
        member.watch = self.changed
        self._all_closed = None
        self.changed(member.island_id)

    def _next_free(self) -> str:
        return next(name for i in range(len(self) + 1) if (name := f"island-{i}") not in self._members)
