"""The island's state machine: it hands over, adopts and reports. Pure; it never waits.

The stages of a fragment are a table (:data:`islands.protocol.fragment.STAGES`). Copies taken before an installation are
dropped by it.

The machine has parts, each with a state of its own: :class:`islands.protocol.member.Member`,
:class:`islands.protocol.fleet.Fleet`, :class:`islands.protocol.hand_over.HandOver`,
:class:`islands.protocol.adoption.Adoption`, :class:`islands.protocol.broker_choice.BrokerChoice`, and both sides of
:mod:`islands.protocol.donation`. Here every event is given to those that it concerns, and after each event they all do,
in a fixed order, what the time now calls for.
"""

from __future__ import annotations

import math
from typing import assert_never

from broker.routing.resending import Carried
from broker.wire.fragments import FragmentManifest, TensorSpec
from broker.wire.messages import (
    AGGREGATOR,
    Block,
    Demand,
    Donor,
    FetchFiles,
    FetchState,
    FilesPart,
    FleetState,
    Join,
    Reason,
    Refused,
    RunSettings,
    StatePart,
    StateSource,
    Version,
    Welcome,
)
from broker.wire.small_files import NO_FILES, Packed
from islands.protocol.adoption import Adoption
from islands.protocol.broker_choice import BrokerChoice
from islands.protocol.donation import Giver, Receiver
from islands.protocol.events import (
    Action,
    Boundary,
    Captured,
    Corrupted,
    Event,
    Fail,
    Joined,
    Leaving,
    Line,
    Note,
    Prepared,
    Received,
    Restored,
    SeedEncoded,
    Send,
    StateChecked,
    StateCopied,
    StateNeeded,
    Tick,
    Vitals,
)
from islands.protocol.fleet import Fleet
from islands.protocol.fragment import Point, Stage
from islands.protocol.hand_over import HandOver
from islands.protocol.member import Member
from islands.protocol.paused import Paused
from islands.protocol.state import Training


class Island:
    """One life of one island.

    Args:
        island_id: The id to ask for; empty for the next free one.
        hint: A name that survives a restart.
        nonce: Random, different in each life.
        tensors: Every tensor that is not local.
        tokens_per_step: Tokens in one inner step.
        inner_optimizer: Its name, if it is known.
        demands: What of the run's recipe this island insists on.
        brokers: How many there are to choose from.
        broker_silent_s: Silence after which the next one is tried.
        paused: What an earlier process of this island has left to go on with.
        files: The small files of its model.
        several_hosts: See :class:`islands.protocol.hand_over.HandOver`.

    Attributes:
        fragments: Every fragment, by number.
        fates: How many contributions of this process were merged, and how many refused for good.
        schedule: The progress of the whole run in tokens, for learning-rate schedules.
        finished: Everything is handed over and the final versions are installed.
    """

    def __init__(
        self,
        *,
        island_id: str,
        hint: str,
        nonce: str,
        tensors: tuple[TensorSpec, ...],
        tokens_per_step: int,
        inner_optimizer: str = "",
        demands: tuple[Demand, ...] = (),
        brokers: int = 1,
        broker_silent_s: float = 2.0,
        paused: Paused | None = None,
        files: Packed = NO_FILES,
        several_hosts: bool = False,
    ) -> None:
        self.finished = False
        join = Join(
            nonce=nonce,
            island_id=island_id,
            hint=hint,
            tensors=tensors,
            tokens_per_step=tokens_per_step,
            resumes="" if paused is None else paused.nonce,
            inner_optimizer=inner_optimizer,
            demands=demands,
        )
        self._paused, self._files = paused, files
        self._training = Training()
        self._fleet = Fleet()
        self._bulk: int | None = None  # the bulk connection's number; None: whatever it is, it was spoken over
        self._choice = BrokerChoice(brokers, nonce, broker_silent_s)
        self._member = Member(join, self._training, self._choice)
        self._hand_over = HandOver(self._training, self._member, self._fleet, several_hosts=several_hosts)
        self._adoption = Adoption(self._training, self._fleet)
        self._receiver, self._giver = Receiver(), Giver()
        self.fragments, self.fates = self._training.fragments, self._hand_over.fates
        self.schedule = self._fleet.schedule

    # --- what the drivers may know ----------------------------------------------------------------------------

    @property
    def island_id(self) -> str:
        """The id asked for, and once the island is a member the one it was given."""
        return self._member.island_id

    @property
    def incarnation(self) -> int:
        """The number of this life of the island; 0 before it is a member."""
        return self._member.incarnation

    @property
    def nonce(self) -> str:
        """Random, different in each life."""
        return self._member.nonce

    @property
    def joined(self) -> bool:
        """Whether the island is a member of the run."""
        return self._member.incarnation > 0

    @property
    def broker(self) -> int:
        """The place of the broker to speak through."""
        return self._choice.at

    @property
    def manifest(self) -> FragmentManifest | None:
        """The run's fragments, once they are known."""
        return self._training.manifest

    @property
    def settings(self) -> RunSettings | None:
        """The run's settings, once they are known."""
        return self._training.settings

    @property
    def at(self) -> Point:
        """The last boundary."""
        return self._training.at

    @property
    def optimizer(self) -> StateSource:
        """Returns the source that the inner optimizer started from."""
        return self._training.optimizer

    @property
    def startable(self) -> bool:
        """Whether every fragment has its first version ready to be installed."""
        return self.joined and all(f.stage is Stage.READY or f.version >= 0 for f in self.fragments.values())

    @property
    def delivered(self) -> bool:
        """Whether a stopped island has nothing left that the aggregator is not known to have."""
        training = self._training
        return training.stopped and all(
            fragment.handed == training.at
            and fragment.capturing is None
            and all(pending.arrived for pending in fragment.outstanding.values())
            for fragment in (self.fragments[p] for p in (self.manifest.moving if self.manifest is not None else ()))
        )

    def pause(self, run_id: str, sequence: int) -> Paused | None:
        """Returns the state for the next process of this life (:meth:`.hand_over.HandOver.paused`)."""
        return self._hand_over.paused(run_id, sequence) if self.joined else None

    @property
    def done(self) -> bool:
        """Whether the training loop should end."""
        return self._fleet.done

    @property
    def published(self) -> tuple[int, ...]:
        """The newest versions there are, as last heard."""
        return self._fleet.published

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Its blocks of the data."""
        return self._fleet.blocks

    @property
    def held_back(self) -> bool:
        """Returns whether a version that is here waits until others are installed."""
        return self._adoption.held_back

    # --- events -----------------------------------------------------------------------------------------------

    def start(self, now_s: float) -> list[Action]:
        """Returns the first actions; the driver connects to :attr:`broker`."""
        actions: list[Action] = []
        self._choice.start(now_s)
        self._advance(now_s, actions)
        return actions

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Takes one event in and returns what to do, in order."""
        actions: list[Action] = []
        match event:
            case Received():
                self._received(event, now_s, actions)
            case Boundary():
                self._boundary(event, now_s)
            case Vitals():
                self._member.vitals = event
                return actions  # for the next heartbeat, whenever that is: it also needs a boundary that is up to date
            case Captured():
                self._hand_over.captured(event, now_s, actions)
                self._corrupted(event, now_s, actions)
            case Prepared():
                mends = self._adoption.prepared(event.fragment_id, overwrites=bool(event.flaw))
                self._corrupted(event, now_s, actions, mends=mends)
            case Corrupted():
                self._corrupted(event, now_s, actions)
            case SeedEncoded():
                self._hand_over.seed_encoded(event, actions)
            case Line():
                self._choice.line(event.stands, now_s)
                if event.stands:
                    self._introduce(now_s, actions)
            case StateNeeded():
                self._receiver.begin(event.most_bytes, event.patience_s, now_s, actions)
            case StateChecked():
                self._receiver.checked(event.flaw, now_s, actions)
            case StateCopied():
                self._giver.copied(event.parts, event.state_bytes, now_s, actions)
            case Restored():
                self._training.restored(event.source)
            case Tick():
                pass
            case Leaving():
                self._member.leave(event.reason, event.departure, actions)
                return actions
            case _:
                assert_never(event)
        self._advance(now_s, actions)
        return actions

    def next_deadline_s(self) -> float | None:
        """Returns when to send :class:`Tick`, if nothing else happens before."""
        due_s = min(self._member.due_at_s, self._choice.due_at_s, self._receiver.due_at_s, self._giver.due_at_s)
        return None if due_s == math.inf else due_s

    def _received(self, event: Received, now_s: float, actions: list[Action]) -> None:
        envelope, message = event.envelope, event.envelope.message
        flaw = self._training.misfit(message, self._member.join.tensors)
        if flaw:
            actions.append(Note(name="message.misfit", fields={"kind": type(message).__name__, "detail": flaw}))
            return
        self._choice.listen(envelope, now_s)
        match message:
            case Welcome() if not message.settings.data_ahead_s:
                cure = "the run has one share of the data for each island (data_ahead_s = 0), which is not known here"
                actions.append(Fail(reason=str(Reason.PROTOCOL_VERSION), cure=cure))
            case Welcome():
                if self._member.welcomed(message, now_s):
                    self._welcome(message, now_s, actions)
            case FleetState():
                if self.joined and self._fleet.heard(message, envelope.sequence, self.at.tokens):
                    self._fleet_state(message, event.carried, now_s, actions)
            case Version():
                if self._adoption.arrived(message, event.flaw, now_s, actions):
                    self._hand_over.merged(message)
            case Refused(reason=Reason.RUN_ENDED, kind="heartbeat"):
                if self.joined and not self._fleet.deserted:
                    self._fleet.desert()
                    actions.append(Note(name="run.deserted", fields={"step": self.at.step, "tokens": self.at.tokens}))
            case Refused():
                self._member.refused(message, now_s, actions)
            case Donor():
                self._receiver.named(message, now_s, actions)
            case FetchState():
                state_id = f"{self.incarnation}.{self.at.step}"
                trained = self._training.optimizer_trained
                self._giver.fetch(envelope.sender, message, state_id, trained, now_s, actions)
            case FetchFiles():
                self._give_files(message, actions)
            case StatePart():
                self._receiver.part(envelope.sender, message, event.flaw, now_s, actions)
            case _:
                actions.append(Note(name="message.unexpected", fields={"kind": type(message).__name__}))

    def _give_files(self, asked: FetchFiles, actions: list[Action]) -> None:
        """Answers with a part of the small files, or that there are none of that digest."""
        digest, size, parts = self._files
        there = asked.digest == digest and asked.part < len(parts)
        payload = parts[asked.part] if there else ()
        part = FilesPart(digest=asked.digest, part=asked.part, num_bytes=size if there else 0, payload=payload)
        actions.append(Send(to=AGGREGATOR, message=part))

    def _welcome(self, welcome: Welcome, now_s: float, actions: list[Action]) -> None:
        """Begins a life: that of the process, with which the driver begins too, or a later one."""
        training = self._training
        first = training.welcomed(welcome)
        self._fleet.welcomed(welcome)
        self._hand_over.begin_blocks()
        self._choice.welcomed(welcome.settings.heartbeat_interval_s)
        if first:
            assert training.manifest is not None
            self._resume(welcome, now_s, actions)
            joined = Joined(
                island_id=self.island_id,
                incarnation=self.incarnation,
                manifest=training.manifest,
                start_step=training.at.step,
                start_tokens=training.at.tokens,
            )
            actions.append(joined)
        self._adoption.want_anew(now_s, actions)

    def _resume(self, welcome: Welcome, now_s: float, actions: list[Action]) -> None:
        """Continues an earlier process's life; if the run has begun another life, kept contributions are lost."""
        paused, self._paused = self._paused, None
        if paused is None:
            return
        if not paused.fits(welcome):
            facts = {"steps": paused.at.step, "life": paused.incarnation, "contributions": len(paused.contributions)}
            detail = "the run has begun another life of this island: its tokens are lost with the earlier one"
            actions.append(Note(name="progress.dropped", fields={**facts, "detail": detail}))
            return
        self._training.resume(paused)
        self._hand_over.resume(paused.contributions, paused.cursors, now_s)
        self._fleet.resume(paused.cursors)

    def _fleet_state(self, state: FleetState, carried: Carried | None, now_s: float, actions: list[Action]) -> None:
        """Takes in a shard's answer: the fates of contributions, open rounds, published versions."""
        self._member.known()
        if carried is not None:
            if self._bulk not in (None, carried.connection):
                self._bulk_broke(now_s, actions)
            self._bulk = carried.connection
        for resolution in state.resolutions:
            if self._hand_over.resolve(resolution, state.epoch, now_s, actions, carried):
                self._adoption.refused(resolution, actions)
        self._hand_over.asked(state, now_s, actions, carried)
        self._adoption.want_again(now_s, actions)

    def _bulk_broke(self, now_s: float, actions: list[Action]) -> None:
        """Notes a new bulk connection: messages under way over the old one are lost.

        The broker knows it by what is said over it: until then it has nowhere to send versions to.
        """
        self._hand_over.due_again(now_s)
        self._adoption.want_anew(now_s, actions)

    def _boundary(self, boundary: Boundary, now_s: float) -> None:
        training = self._training
        training.at = Point(boundary.inner_step, boundary.tokens)
        self._hand_over.trained(boundary.trained)
        self._adoption.installed(boundary.installed)
        for p in boundary.copied:
            training.fragments[p].copy = training.at
        if boundary.stopped:
            training.stopped = True
            self._member.beat_now(now_s)  # the flush waits for what it says

    def _corrupted(
        self, event: Captured | Prepared | Corrupted, now_s: float, actions: list[Action], *, mends: bool = False
    ) -> None:
        """Repairs corrupt fragments, and reports them before they are repaired."""
        if event.flaw:
            self._adoption.corrupted(event.fragment_id, event.flaw, now_s, actions, mends=mends)
            self._member.beat_besides()

    def _introduce(self, now_s: float, actions: list[Action]) -> None:
        """Tells a broker that knows nothing all it needs: a new connection, or a new broker behind an old one.

        What was on its way may be lost. The answer to the heartbeat says which contributions are, and these are sent
        again without a pause; a copy that arrives twice is known by its range.
        """
        self._member.introduce()
        self._bulk = None
        if self.joined:
            self._bulk_broke(now_s, actions)

    # --- time -------------------------------------------------------------------------------------------------

    def _advance(self, now_s: float, actions: list[Action]) -> None:
        """Does whatever the state and the time now call for; called after every event."""
        training, joined = self._training, self.joined
        ends = joined and training.stopped and self._fleet.ended
        self._choice.advance(now_s, actions)
        if joined:
            if ends:
                self._adoption.end(now_s, actions)
            for p, fragment in training.fragments.items():
                # Before the next version is prepared: until that is installed nothing can be handed over, and an island
                # whose boundaries are rarer than versions would never come to it.
                self._hand_over.advance(p, fragment, now_s, actions)
                if fragment.newer is not None:
                    self._adoption.prepare(fragment, actions)
            self._hand_over.watch(actions)
        self._donate(now_s, actions)
        if joined and self._fleet.done:
            self._receiver.end("the run ends", actions)
        self._member.advance(now_s, actions)
        if ends:
            deserted = self._fleet.deserted
            # Not for good: what was adopted last may be found corrupt, and is adopted anew.
            self.finished = not self._adoption.lacking and all(
                f.stage is Stage.IDLE and (deserted or not f.outstanding) for f in training.fragments.values()
            )

    def _donate(self, now_s: float, actions: list[Action]) -> None:
        """Advances both sides of a donation, also between two lives: patience ends there as it would in one.

        What they ask for then is asked again: nobody answers who is no member.
        """
        self._giver.advance(now_s)
        if now_s >= self._receiver.due_at_s:
            due: list[Action] = []
            self._receiver.advance(now_s, due)
            actions += due if self.joined else [action for action in due if not isinstance(action, Send)]
