"""The aggregator's state machine: events and a clock reading in, actions out.

This module is the switchboard: it hands each event to the part that knows about it, and then lets every part do what
the time calls for. The parts share one :class:`aggregator.state.run.Run`:

* :mod:`aggregator.rounds.membership`: joins, heartbeats, farewells;
* :mod:`aggregator.rounds.notices`: what islands are told;
* :mod:`aggregator.rounds.seeding`: version 0;
* :mod:`aggregator.rounds.roster`: what concerns all shards, where there are several;
* :mod:`aggregator.rounds.donation`: who gives a rejoining island the state of its inner optimizer;
* :mod:`aggregator.rounds.intake`: contributions;
* :mod:`aggregator.rounds.rounds`: when rounds open and close, and their weights;
* :mod:`aggregator.rounds.commits`: what makes of a merge a version;
* :mod:`aggregator.rounds.publishing`: versions to the brokers;
* :mod:`aggregator.rounds.ending`: the flush and the end;
* :mod:`aggregator.rounds.store_behind`: what is done where peers hold more than the store.

The order contract of the actions is *persist before anyone hears of it*: a version is sent only after its commit is
reported durable, a join is answered only after the incarnation it gives away is, and nothing is said under an epoch
that is not. Design: sections 3, 4, 8 and 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from aggregator.config import AggregatorConfig
from aggregator.events import (
    Action,
    Commit,
    Computed,
    Event,
    Fenced,
    NotLetIn,
    Persisted,
    PersistFailed,
    Received,
    RenewBulk,
    RunSaved,
    RunSaveFailed,
    Send,
    Stop,
    Tick,
)
from aggregator.rounds.brokers import DeafBrokers
from aggregator.rounds.commits import Commits
from aggregator.rounds.donation import Donations
from aggregator.rounds.ending import Ending
from aggregator.rounds.intake import Intake
from aggregator.rounds.membership import Membership
from aggregator.rounds.notices import Notices
from aggregator.rounds.publishing import Publishing
from aggregator.rounds.roster import Adopter, Keeper
from aggregator.rounds.rounds import Rounds
from aggregator.rounds.seeding import Seeding
from aggregator.rounds.store_behind import StoreBehind
from aggregator.state.founding import MAX_FOUNDINGS, Founding
from aggregator.state.run import Run
from aggregator.state.run_settings import changes
from broker.wire.messages import (
    BROKER,
    AskDonor,
    Attach,
    AttachBulk,
    Attached,
    Channel,
    Contribution,
    Fate,
    Heartbeat,
    Join,
    Leave,
    Nothing,
    Phase,
    Reason,
    Roster,
    Rostered,
    Seed,
)

ATTACH_INTERVAL_S = 1.0
SAVE_RETRY_S = 1.0


class Aggregator:
    """One aggregator shard: the only one of its run, or one of several with fragments of its own.

    Args:
        config: The settings.
        now_s: Monotonic seconds at the start.
        record: The run record of an earlier life of this store, or None for a new run.
        commits: The newest durable commit per fragment, with that record.
        epoch: What the lease says; at least one more than the record's. One aggregator alone counts for itself.
        founding: Where no lease vouches for what the store has.

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
        founding: Founding | None = None,
    ) -> None:
        self.run = Run(config, now_s)
        self.run.epoch = epoch
        self._changes = changes(config, record)
        if record is not None:
            self.run.restore(record, commits or {})
        if founding is not None:
            self.run.foundings = (*self.run.foundings, founding)[-MAX_FOUNDINGS:]
        self._notices = Notices(self.run)
        self._membership = Membership(self.run, self._notices)
        keeps = Adopter if config.shard else Keeper
        self._roster: Keeper | Adopter = keeps(self.run, self._membership)
        self._seeding = Seeding(self.run, self._notices, self._roster)
        self._donations = Donations(self.run)
        self._intake = Intake(self.run, self._notices)
        self._rounds = Rounds(self.run, self._notices, self._intake)
        self._publishing = Publishing(self.run)
        self._commits = Commits(self.run, self._publishing)
        self._ending = Ending(self.run, self._notices, self._intake, self._rounds, self._roster, self._publishing)
        self._behind = StoreBehind(self.run)
        self._save_again_at_s: float | None = None
        self._attach_at_s = now_s
        # A standby that asks a broker about the leader must not take a pause for silence.
        self._attach_interval_s = min(ATTACH_INTERVAL_S, config.lease_s / 4) if config.failover else ATTACH_INTERVAL_S
        self._hearings = DeafBrokers()

    def start(self, now_s: float) -> list[Action]:
        """Returns the first actions: the epoch becomes durable before anything is said under it."""
        self.run.now_s = now_s
        self.run.save()
        self.run.note("aggregator.started", epoch=self.run.epoch, phase=str(self.run.phase), versions=self.run.versions)
        for each in self._changes:
            self.run.note("aggregator.setting_changed", field=each.field, was=each.was, now=each.now)
        return self._drain()

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Takes one event in and returns what to do, in order."""
        self.run.now_s = now_s
        self.run.clock.look_again()
        if self._behind and not isinstance(event, Stop | RunSaved | RunSaveFailed):
            self._wait_behind(event)
            if self._behind:
                return self._drain()
        else:
            self._take(event)
        if not self.finished:
            self._advance()
        return self._drain()

    def next_deadline_s(self, now_s: float) -> float | None:
        """Returns when to send :class:`Tick`, if nothing else happens before."""
        self.run.now_s = now_s
        if self.finished or not self.leading:
            return self._save_again_at_s
        if self._behind:
            return self._attach_at_s
        parts = (self._commits, self._rounds, self._ending)
        deadlines = [self._attach_at_s, *(deadline_s for part in parts for deadline_s in part.deadlines_s())]
        if self._save_again_at_s is not None:
            deadlines.append(self._save_again_at_s)
        roster_at_s = self._roster.deadline_s() if isinstance(self._roster, Keeper) else None
        return min(deadlines if roster_at_s is None else [*deadlines, roster_at_s])

    @property
    def leading(self) -> bool:
        """Whether this life's epoch is durable, so that it may speak."""
        return self.run.durable_serial > 0

    @property
    def finished(self) -> bool:
        """Whether the driver may exit."""
        return self.run.finished

    @property
    def behind(self) -> bool:
        """Whether peers hold newer versions than the store, so that nothing may be said."""
        return bool(self._behind)

    def _take(self, event: Event) -> None:
        """Hands an event to the part that knows about it."""
        match event:
            case Received():
                if self.leading:  # before that: everything that matters is repeated
                    self._received(event)
            case Computed():
                self._commits.computed(event)
            case Persisted():
                self._commits.persisted(event)
            case PersistFailed():
                self._commits.persist_failed(event)
            case RunSaved():
                self.run.durable_serial = max(self.run.durable_serial, event.serial)
                self.run.disk_works()
                self._roster.saved()
            case RunSaveFailed():
                self._save_again_at_s = self.run.now_s + SAVE_RETRY_S
                self.run.disk_failed(event.detail)
                self.run.note("run_record.failed", detail=event.detail, retry_s=SAVE_RETRY_S)
            case Fenced():
                self._behind.fenced(event)
            case NotLetIn(broker=broker, detail=detail):
                sentence = f"broker {broker} does not let this aggregator in: {detail}"
                self.run.troubles.begin(f"broker {broker}", sentence, self.run.now_s)
            case Tick():
                pass
            case Stop():
                self.run.finish("stopped by the operator")
            case _:
                assert_never(event)

    def _received(self, event: Received) -> None:
        self._behind.compare(event)
        if self._behind:
            return
        self._ending.reached = True
        envelope, message = event.envelope, event.envelope.message
        if message.channel is Channel.BULK:
            self._hearings.came(event.broker, self.run.now_s, event.carried)
        match message:
            case Join():
                self.run.routes.heard(envelope, event.broker)
                self._membership.join(message)
            case Attached():
                self._attached(message, event)
            case Heartbeat() | Nothing() | Leave() | Seed() | Contribution() | AskDonor():
                self._from_member(event, message)
            case Roster() if isinstance(self._roster, Adopter):
                self._roster.adopt(message)
            case Rostered() if isinstance(self._roster, Keeper):
                self._roster.told(message)
            case _:
                self.run.note("message.unexpected", kind=type(message).__name__, sender=envelope.sender)

    def _attached(self, attached: Attached, event: Received) -> None:
        """Sends a broker what it lacks; has a bulk connection made anew that stands and delivers nothing."""
        run, broker = self.run, event.broker
        outage = self._publishing.answered(attached, broker)
        if run.manifest is None or run.phase is Phase.SEEDING:
            return
        if outage is not None:
            self._rounds.start_over(outage)
        self._publishing.attached(attached, broker, event.carried, outage)
        lacks = any(held < newest for held, newest in zip(attached.versions, run.versions, strict=False))
        largest_bytes = 4 * max(run.manifest.sizes)
        held = run.of_ours(attached.versions)
        if self._hearings.answered(broker, held, lacks, largest_bytes, run.now_s, event.carried):
            run.note("bulk.renewed", broker=broker, lacks=lacks)
            run.emit(RenewBulk(by=broker))
            self._publishing.renewed(broker)

    def _from_member(
        self, event: Received, message: Heartbeat | Nothing | Leave | Seed | Contribution | AskDonor
    ) -> None:
        run, envelope = self.run, event.envelope
        member = run.members.get(envelope.sender)
        if run.config.shard and (member is None or envelope.incarnation > member.incarnation):
            return  # shard 0 knows it, and tells us; all that matters is repeated
        if member is not None and not member.begun:
            return  # not welcome yet
        if member is None or envelope.incarnation > member.incarnation:
            run.members.claimed(envelope.sender, envelope.incarnation)
            detail = f"no island {envelope.sender!r} with incarnation {envelope.incarnation} is known: join again"
            self._notices.refuse(event, Reason.UNKNOWN_ISLAND, detail)
            return
        if envelope.incarnation < member.incarnation:
            # A broker that has seen the later one says so itself; this one has not, and nobody else would tell. Should
            # the later one be behind that address by now, one refusal does it no harm.
            detail = f"incarnation {envelope.incarnation} has ended: {member.incarnation} has joined"
            self._notices.refuse(event, Reason.FENCED, detail)
            return
        newest = run.routes.heard(envelope, event.broker)
        member.last_seen_s = run.now_s
        match message:
            case Heartbeat():
                if member.left and newest:
                    member.at.take("heard")  # else a frozen broker may have kept this one past the farewell
                if self._membership.heartbeat(member, message, event):
                    ours = [each for each in message.outstanding if run.owns(each.fragment_id)]
                    fates = (self._membership.resolve(member, each).fate for each in ours)
                    self._hearings.listed(event.broker, member.island_id, Fate.UNKNOWN in fates, run.now_s)
                    self._donations.heard(member, message)
                    self._ending.advance()
                    self._ending.close_gaps(member, message, envelope.sequence)
                    self._notices.tell(member)
            case Nothing():
                self._intake.nothing(member, message, envelope.sequence)
            case Leave():
                self._membership.leave(member, message, event)
            case Seed():
                self._seeding.seed(member, message, event)
            case Contribution():
                self._intake.contribution(member, message, event)
            case AskDonor():
                self._donations.ask(member, message)
            case _:
                assert_never(message)

    def _advance(self) -> None:
        """Lets every part do what the state and the time now call for; called after every event."""
        run = self.run
        run.clock.look_again()
        run.remember_pace()
        if self._save_again_at_s is not None and run.now_s >= self._save_again_at_s:
            self._save_again_at_s = None
            run.save()
        if not self.leading:
            return
        self._attach()
        if self._behind:
            return
        self._membership.settle_shares()
        if run.phase is Phase.SEEDING:
            if self._seeding.complete():
                for p in sorted(run.fragments):
                    self._publishing.publish(p)
                self._notices.tell_all()
            else:
                self._seeding.choose()
        self._ending.advance()
        self._commits.advance()
        self._rounds.advance()
        if isinstance(self._roster, Adopter):
            self._roster.advance(self._ending.flushed)
        else:
            self._roster.advance()

    def _attach(self) -> None:
        """Says to every broker, again and again, who leads and what there is."""
        run = self.run
        if run.now_s >= self._attach_at_s:
            self._attach_at_s = run.now_s + self._attach_interval_s
            c = run.config
            ended = run.phase is Phase.ENDED
            attach = Attach(shard=c.shard, shards=c.shards, epoch=run.epoch, versions=run.versions, ended=ended)
            run.emit(Send(to=BROKER, message=attach))
            run.emit(Send(to=BROKER, message=AttachBulk(shard=c.shard, epoch=run.epoch, shards=c.shards)))
            if isinstance(self._roster, Adopter):
                self._roster.say(self._ending.flushed)

    def _wait_behind(self, event: Event) -> None:
        """Attaches and listens, and does nothing else until the store is not behind any more."""
        self._behind.listen(event)
        self._attach()
        missed = self._behind.advance()
        if not self._behind:
            self._rounds.resume()
        for each in missed:
            self._take(each)

    def _drain(self) -> list[Action]:
        """Empties the outbox; what is for an island goes by the broker over which that was last heard."""
        actions, self.run.outbox = self.run.outbox, []
        return [self._addressed(action) if isinstance(action, Send) else action for action in actions]

    def _addressed(self, send: Send) -> Send:
        by = self.run.routes.to(send.to) if send.by is None else send.by
        return send if by is None else Send(to=send.to, message=send.message, by=by)
