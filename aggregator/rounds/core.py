"""The aggregator's state machine: events and a clock reading in, actions out.

This module is the switchboard. One table (:meth:`Aggregator._table`) has the handler of each kind of event and message.
After an event each part that has something to do does it, in a fixed order (:meth:`Aggregator._advance`), and registers
when it may have more to do without another event. The parts share one :class:`aggregator.state.run.Run`:

* :mod:`aggregator.rounds.membership`: joins, heartbeats, farewells;
* :mod:`aggregator.rounds.doubts`: claims that are not believed, memory that is corrupt;
* :mod:`aggregator.state.sharing`: whose data move;
* :mod:`aggregator.rounds.notices`: what islands are told;
* :mod:`aggregator.rounds.seeding`: version 0, and the small files of its model;
* :mod:`aggregator.rounds.roster`: what concerns all shards, where there are several;
* :mod:`aggregator.rounds.donation`: who gives a rejoining island the state of its inner optimizer;
* :mod:`aggregator.rounds.intake`: contributions;
* :mod:`aggregator.rounds.rounds`: when rounds open and close, and their weights;
* :mod:`aggregator.rounds.commits`: what makes of a merge a version;
* :mod:`aggregator.rounds.publishing`: versions to the brokers;
* :mod:`aggregator.rounds.ending`: the flush and the end;
* :mod:`aggregator.rounds.recovery`: what is done where peers hold more than the store.

The order contract of the actions is *persist before anyone hears of it*: a version is sent only after its commit is
reported durable, a join is answered only after the incarnation it gives away is, and nothing is said under an epoch
that is not. See docs/reference.md, sections 3, 4, 8 and 9.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aggregator.interface.config import AggregatorConfig
from aggregator.interface.events import (
    Action,
    Commit,
    Computed,
    Event,
    Fenced,
    FilesKept,
    MergeFailed,
    NotLetIn,
    Persisted,
    PersistFailed,
    Received,
    RunSaved,
    RunSaveFailed,
    Send,
    Stop,
    Tick,
)
from aggregator.interface.leader_notes import AggregatorStarted, MessageUnexpected, RunRecordFailed
from aggregator.rounds.commits import Commits
from aggregator.rounds.donation import Donations
from aggregator.rounds.doubts import Doubts
from aggregator.rounds.ending import Ending
from aggregator.rounds.intake import Intake
from aggregator.rounds.membership import Membership
from aggregator.rounds.notices import Notices
from aggregator.rounds.publishing import Publishing
from aggregator.rounds.recovery import StoreBehind
from aggregator.rounds.roster import Adopter, Keeper
from aggregator.rounds.rounds import Rounds
from aggregator.rounds.seeding import ModelFiles, Seeding
from aggregator.state.assembly import Assembly
from aggregator.state.founding import MAX_FOUNDINGS, Founding
from aggregator.state.members import Member
from aggregator.state.run import Run
from aggregator.state.run_record import restore, write
from aggregator.state.run_settings import changes, completed
from aggregator.state.sharing import Sharing
from broker.wire.messages import (
    AskDonor,
    Attached,
    Contribution,
    FilesPart,
    Heartbeat,
    HostPart,
    Join,
    Leave,
    Nothing,
    Phase,
    Roster,
    Rostered,
    Seed,
    Standings,
    Version,
    WantWhole,
)

SAVE_RETRY_S = 1.0


class Aggregator:
    """One aggregator shard: the only one of its run, or one of several with fragments of its own.

    Args:
        config: The settings.
        now_s: Monotonic seconds at the start.
        record: The run record of an earlier life of this store, or None for a new run.
        commits: The newest durable commit per fragment, with that record.
        epoch: Epoch of the lease, above that of the record. A single aggregator counts for itself.
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
        config = completed(config, record)
        self.run = Run(config, now_s)
        self.run.epoch = epoch
        self._changes = changes(config, record)
        if record is not None:
            restore(self.run, record, commits or {})
        if founding is not None:
            self.run.record.foundings = (*self.run.record.foundings, founding)[-MAX_FOUNDINGS:]
        notices = self._notices = Notices(self.run)
        self._sharing = Sharing(self.run)
        self._doubts = Doubts(self.run)
        self._membership = Membership(self.run, notices, self._sharing, self._doubts)
        keeps = Adopter if config.shard else Keeper
        self._roster: Keeper | Adopter = keeps(self.run, self._membership)
        self._donations = Donations(self.run)
        self._assembly = Assembly(self.run)
        self._intake = Intake(self.run, notices)
        self._rounds = Rounds(self.run, notices, self._intake)
        self._publishing = Publishing(self.run)
        self._seeding = Seeding(self.run, notices, self._roster, self._publishing)
        self._files = ModelFiles(self.run)
        self._commits = Commits(self.run, self._publishing)
        self._ending = Ending(self.run, notices, self._intake, self._rounds, self._roster, self._publishing)
        self._behind = StoreBehind(self.run)
        self._handlers, self._from_members = self._table()

    def _table(self) -> tuple[dict[type, Callable[[Any], None]], dict[type, Callable[[Member, Any, Received], None]]]:
        """Returns the handlers: of events and messages from anybody; of messages from islands that joined."""
        anybody: dict[type, Callable[[Any], None]] = {
            Received: self._received,
            Computed: self._commits.computed,
            MergeFailed: self._commits.merge_failed,
            Persisted: self._commits.persisted,
            PersistFailed: self._commits.persist_failed,
            RunSaved: self._run_saved,
            RunSaveFailed: self._run_save_failed,
            FilesKept: self._files.kept,
            Fenced: self._behind.fenced,
            NotLetIn: self._publishing.not_let_in,
            Tick: lambda _: None,
            Stop: lambda _: self.run.finish("stopped by the operator"),
            Join: self._membership.join,
            Attached: self._attached,
            Version: self._commits.given_back,
            WantWhole: self._publishing.want_whole,
            Standings: self._commits.told,
            (Roster if isinstance(self._roster, Adopter) else Rostered): self._roster.told,
        }
        members: dict[type, Callable[[Member, Any, Received], None]] = {
            Heartbeat: self._heartbeat,
            Nothing: self._intake.nothing,
            Leave: self._membership.leave,
            Seed: self._seeding.seed,
            Contribution: self._contribution,
            HostPart: lambda *_: None,  # part of what is assembled first
            AskDonor: self._donations.ask,
            FilesPart: self._files.part,
        }
        return anybody, members

    def start(self, now_s: float) -> list[Action]:
        """Returns the first actions: the epoch becomes durable before anything is said under it."""
        self.run.now_s = now_s
        self.run.record.save()
        run = self.run
        run.note(AggregatorStarted(epoch=run.epoch, phase=str(run.phase), versions=run.versions))
        for each in self._changes:
            run.note(each)
        return self._drain()

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Takes one event in and returns what to do, in order."""
        self.run.now_s = now_s
        self.run.schedule.clock.look_again()
        if self._behind.active and not isinstance(event, Stop | RunSaved | RunSaveFailed):
            self._wait_behind(event)
            if self._behind.active:
                return self._drain()
        else:
            self._handlers[type(event)](event)
        if not self.run.finished:
            self._advance()
        return self._drain()

    def next_deadline_s(self) -> float | None:
        """Returns when to send :class:`Tick`, if nothing else happens before."""
        deadlines = self.run.deadlines
        if self.finished or not self.leading:
            return deadlines.get("save")
        if self._behind.active:
            return deadlines.get("attach")
        first = deadlines.first()
        return None if first is None else first[0]

    @property
    def leading(self) -> bool:
        """Whether this life's epoch is durable, so that it may speak."""
        return self.run.record.durable_serial > 0

    @property
    def finished(self) -> bool:
        """Whether the driver may exit."""
        return self.run.finished

    # --- events and messages ----------------------------------------------------------------------------------

    def _received(self, event: Received) -> None:
        """Hands a message to its handler, with its sender where only joined islands send that kind."""
        if not self.leading:
            return  # everything that matters is repeated
        self._behind.compare(event)
        if self._behind.active:
            return
        self._ending.reached = True
        message = event.envelope.message
        if type(message) in self._from_members:
            member = self._membership.sender(event)
            whole = self._assembly.take(event) if member is not None else None
            if member is not None and whole is not None:
                self._from_members[type(whole.envelope.message)](member, whole.envelope.message, whole)
        elif (handler := self._handlers.get(type(message))) is not None:
            handler(event)
        else:
            self.run.note(MessageUnexpected(kind=type(message).__name__, sender=event.envelope.sender))

    def _attached(self, event: Received) -> None:
        """Sends a broker the versions that it lacks; gives more time to islands that its absence cut off."""
        attached = event.envelope.message
        assert isinstance(attached, Attached)
        outage = self._publishing.answered(attached, event.broker)
        if outage is not None:
            self._rounds.start_over(outage)
        self._publishing.attached(attached, event, outage)

    def _heartbeat(self, member: Member, beat: Heartbeat, event: Received) -> None:
        """Takes in an island's counters, tells the parts concerned, and answers with the fleet's state."""
        asked = self._membership.heartbeat(member, beat, event)
        if asked is None:
            return
        self._donations.heard(member, beat)
        self._files.heard(member)
        self._ending.heard(member, beat, event)

    def _contribution(self, member: Member, contribution: Contribution, event: Received) -> None:
        """Takes an island's contribution in, or refuses it; its counters are the newest ones of that island."""
        self._intake.contribution(member, contribution, event)
        self._doubts.believe(member)

    def _run_saved(self, event: RunSaved) -> None:
        self.run.record.written(event.serial)
        self.run.disk_works()
        self._roster.saved()

    def _run_save_failed(self, event: RunSaveFailed) -> None:
        self.run.record.failed()
        self.run.deadlines.put("save", self.run.now_s + SAVE_RETRY_S)
        self.run.disk_failed(event.detail)
        self.run.note(RunRecordFailed(detail=event.detail, retry_s=SAVE_RETRY_S))

    # --- what the time calls for ------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Lets the parts do what the state and the time now call for; called after every event.

        Data move before rounds close and open.
        """
        run = self.run
        run.schedule.clock.look_again()
        run.schedule.remember_pace(run.now_s)
        save_again_at_s = run.deadlines.get("save")
        if save_again_at_s is not None and run.now_s >= save_again_at_s:
            run.deadlines.drop("save")
            run.record.save()
        if not self.leading:
            return
        self._attach()
        if self._behind.active:
            return
        self._sharing.advance()
        if run.phase is Phase.SEEDING:
            self._seeding.advance()
        self._ending.advance()
        self._commits.advance()
        self._rounds.advance()
        if run.config.shards > 1:
            self._roster.advance()
        self._notices.advance()

    def _attach(self) -> None:
        """Tells every broker, again and again, the leader and its versions."""
        if self._publishing.attach() and isinstance(self._roster, Adopter):
            self._roster.say()

    def _wait_behind(self, event: Event) -> None:
        """Attaches and listens, and does nothing else until the store is not behind any more."""
        self._behind.listen(event)
        self._attach()
        missed = self._behind.advance()
        if not self._behind.active:
            self._rounds.resume()
        for each in missed:
            self._handlers[type(each)](each)

    def _drain(self) -> list[Action]:
        """Empties the outbox; messages to an island go by the broker over which it was last heard."""
        write(self.run)
        actions, self.run.outbox = self.run.outbox, []
        return [self._addressed(action) if isinstance(action, Send) else action for action in actions]

    def _addressed(self, send: Send) -> Send:
        by = self.run.fleet.routes.to(send.to) if send.by is None else send.by
        return send if by is None else Send(to=send.to, message=send.message, by=by)
