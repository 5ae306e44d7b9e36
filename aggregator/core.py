"""The aggregator's state machine: events and a clock reading in, actions out. Nothing else decides anything.

This module is the switchboard: it hands each event to the part that knows about it, and then lets every part do what
the time calls for. The parts share one :class:`aggregator.run.Run`:

* :mod:`aggregator.membership`: joins, heartbeats, farewells; what each island is told;
* :mod:`aggregator.seeding`: version 0;
* :mod:`aggregator.rounds`: contributions, rounds, weights, commits, publication;
* :mod:`aggregator.ending`: the flush and the end.

The order contract of the actions is *persist before anyone hears of it*: a version is sent only after its commit is
reported durable, a join is answered only after the incarnation it gives away is, and nothing is said under an epoch
that is not. Design: sections 3, 4, 8 and 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from aggregator.config import AggregatorConfig
from aggregator.ending import Ending
from aggregator.events import (
    Action,
    Commit,
    Computed,
    Event,
    Fenced,
    Persisted,
    PersistFailed,
    Received,
    RunSaved,
    RunSaveFailed,
    Send,
    Stop,
    Tick,
)
from aggregator.membership import Membership
from aggregator.rounds import Rounds
from aggregator.run import Run
from aggregator.seeding import Seeding
from broker.messages import (
    BROKER,
    Attach,
    AttachBulk,
    Attached,
    Contribution,
    Heartbeat,
    Join,
    Leave,
    Nothing,
    Phase,
    Reason,
    Seed,
)

ATTACH_INTERVAL_S = 1.0
SAVE_RETRY_S = 1.0


class Aggregator:
    """One aggregator shard that owns every fragment of its run.

    Args:
        config: The settings.
        now_s: Monotonic seconds at the start.
        record: The run record of an earlier life of this store, or None for a new run.
        commits: The newest durable commit per fragment, with that record.
        epoch: What the lease says; at least one more than the record's. One aggregator alone counts for itself.

    Attributes:
        run: Everything it knows, for whoever reports on it.
    """

    def __init__(
        self,
        config: AggregatorConfig,
        *,
        now_s: float,
        record: Mapping[str, Any] | None = None,
        commits: Mapping[int, Commit] | None = None,
        epoch: int = 1,
    ) -> None:
        self.run = Run(config, now_s)
        self.run.epoch = epoch
        if record is not None:
            self.run.restore(record, commits or {})
        self._membership = Membership(self.run)
        self._seeding = Seeding(self.run, self._membership)
        self._rounds = Rounds(self.run, self._membership)
        self._ending = Ending(self.run, self._membership, self._rounds)
        self._save_again_at_s: float | None = None
        self._attach_at_s = now_s
        # A standby that asks a broker about the leader must not take a pause for silence.
        self._attach_interval_s = min(ATTACH_INTERVAL_S, config.lease_s / 4) if config.failover else ATTACH_INTERVAL_S
        self._fenced_at: set[int] = set()  # brokers where a later epoch leads

    def start(self, now_s: float) -> list[Action]:
        """Returns the first actions: the epoch becomes durable before anything is said under it."""
        self.run.now_s = now_s
        self.run.save()
        self.run.note("aggregator.started", epoch=self.run.epoch, phase=str(self.run.phase), versions=self.run.versions)
        return self._drain()

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Takes one event in and returns what to do, in order."""
        self.run.now_s = now_s
        match event:
            case Received():
                if self.leading:  # before that: everything that matters is repeated
                    self._received(event)
            case Computed():
                self._rounds.computed(event)
            case Persisted():
                if self._rounds.persisted(event) and self._seeding.complete():
                    for p in sorted(self.run.fragments):
                        self._rounds.publish(p)
                    self._membership.tell_all()
            case PersistFailed():
                self._rounds.persist_failed(event)
            case RunSaved():
                self.run.durable_serial = max(self.run.durable_serial, event.serial)
                self._membership.saved(self.run.durable_serial)
            case RunSaveFailed():
                self._save_again_at_s = now_s + SAVE_RETRY_S
                self.run.note("run_record.failed", detail=event.detail, retry_s=SAVE_RETRY_S)
            case Fenced():
                self._fenced(event)
            case Tick():
                pass
            case Stop():
                self._ending.finish("stopped by the operator")
            case _:
                assert_never(event)
        if not self.finished:
            self._advance()
        return self._drain()

    def next_deadline_s(self, now_s: float) -> float | None:
        """Returns when to send :class:`Tick`, if nothing else happens before."""
        self.run.now_s = now_s
        if self.finished or not self.leading:
            return self._save_again_at_s
        deadlines = [self._attach_at_s, *self._rounds.deadlines_s(), *self._ending.deadlines_s()]
        if self._save_again_at_s is not None:
            deadlines.append(self._save_again_at_s)
        return min(deadlines)

    @property
    def leading(self) -> bool:
        """Whether this life's epoch is durable, so that it may speak."""
        return self.run.durable_serial > 0

    @property
    def finished(self) -> bool:
        """Whether the driver may exit."""
        return self._ending.finished

    def _received(self, event: Received) -> None:
        envelope, message = event.envelope, event.envelope.message
        match message:
            case Join():
                self.run.ways.heard(envelope.sender, event.broker)
                self._membership.join(message)
            case Attached():
                self._rounds.attached(message, event.broker)
            case Heartbeat() | Nothing() | Leave() | Seed() | Contribution():
                self._from_member(event, message)
            case _:
                self.run.note("message.unexpected", kind=type(message).__name__, sender=envelope.sender)

    def _from_member(self, event: Received, message: Heartbeat | Nothing | Leave | Seed | Contribution) -> None:
        run, envelope = self.run, event.envelope
        member = run.members.get(envelope.sender)
        if member is None or envelope.incarnation >= member.incarnation:
            run.ways.heard(envelope.sender, event.broker)
        if member is None or envelope.incarnation > member.incarnation:
            detail = f"no island {envelope.sender!r} with incarnation {envelope.incarnation} is known: join again"
            self._membership.refuse(event, Reason.UNKNOWN_ISLAND, detail)
            return
        if envelope.incarnation < member.incarnation:
            # Not answered: the address belongs to the later incarnation. The broker tells the old process.
            run.count_refusal(Reason.FENCED)
            return
        member.last_seen_s = run.now_s
        match message:
            case Heartbeat():
                member.left = False
                if self._membership.heartbeat(member, message, event):
                    self._ending.advance()
                    self._ending.close_gaps(member, message, envelope.sequence)
                    self._membership.tell(member)
            case Nothing():
                self._rounds.nothing(member, message, envelope.sequence)
            case Leave():
                self._membership.leave(member, message, event)
            case Seed():
                self._seeding.seed(member, message, event)
            case Contribution():
                self._rounds.contribution(member, message, event)
            case _:
                assert_never(message)

    def _advance(self) -> None:
        """Lets every part do what the state and the time now call for; called after every event."""
        run = self.run
        if self._save_again_at_s is not None and run.now_s >= self._save_again_at_s:
            self._save_again_at_s = None
            run.save()
        if not self.leading:
            return
        if run.now_s >= self._attach_at_s:
            self._attach_at_s = run.now_s + self._attach_interval_s
            attach = Attach(shard=0, epoch=run.epoch, versions=run.versions)
            run.emit(Send(to=BROKER, message=attach))
            run.emit(Send(to=BROKER, message=AttachBulk(shard=0, epoch=run.epoch)))
        if run.phase is Phase.SEEDING:
            self._seeding.choose()
        self._ending.advance()
        self._rounds.advance()

    def _fenced(self, event: Fenced) -> None:
        """A later epoch leads at a broker: said once per broker."""
        if event.broker not in self._fenced_at:
            self._fenced_at.add(event.broker)
            self.run.note("aggregator.fenced", epoch=self.run.epoch, broker=event.broker, detail=event.detail)

    def _drain(self) -> list[Action]:
        """Empties the outbox; what is for an island goes by the broker over which that was last heard."""
        actions, self.run.outbox = self.run.outbox, []
        return [self._addressed(action) if isinstance(action, Send) else action for action in actions]

    def _addressed(self, send: Send) -> Send:
        by = self.run.ways.to(send.to) if send.by is None else send.by
        return send if by is None else Send(to=send.to, message=send.message, by=by)
