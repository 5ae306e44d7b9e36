"""The island's state machine: when to hand over, what to adopt, what to say. Pure; it never waits.

Per fragment::

    IDLE --asked, copy at hand--> CAPTURING --Captured--> IDLE             (the contribution is outstanding)
    IDLE --version arrives------> PREPARING --Prepared--> READY --installed at a boundary--> IDLE

A fragment does one thing at a time: between preparing a version and installing it no copy is captured, so the shift
that was prepared stays right. Copies taken before an installation are dropped by it.

Every trained step of a fragment is handed over at most once: ``handed`` only grows, and a capture takes the range
from there to the boundary of its copy (design, section 4.2).
"""

from __future__ import annotations

from typing import Any, assert_never

from broker.fragments import FragmentManifest, TensorSpec, shard_of
from broker.hearing import Hearing
from broker.messages import (
    AGGREGATOR,
    BROKER,
    Channel,
    Contribution,
    Donor,
    Envelope,
    Fate,
    FetchState,
    FleetState,
    Heartbeat,
    Join,
    Leave,
    Nothing,
    Outstanding,
    Phase,
    Reason,
    Refused,
    Resolution,
    RunSettings,
    Seed,
    Share,
    StatePart,
    StateSource,
    Version,
    Want,
    Welcome,
)
from broker.ranges import StepRange
from broker.schema import MAX_OUTSTANDING
from islands.brokers import BrokerChoice
from islands.donation import Giver, Receiver
from islands.events import (
    Action,
    Boundary,
    Capture,
    Captured,
    Connect,
    EncodeSeed,
    Event,
    Fail,
    Joined,
    Leaving,
    Line,
    Note,
    Prepare,
    Prepared,
    Received,
    RefreshOptimizer,
    RenewBulk,
    Restored,
    SeedEncoded,
    Send,
    StateChecked,
    StateCopied,
    StateNeeded,
    Tick,
    Vitals,
    Watch,
)
from islands.fragment import RESEND_S, Backoff, Fragment, Pending, Point, Stage
from islands.shares import Trail

JOIN_AGAIN_S = (0.5, 5.0)  # first and longest pause between joins
#: On a slow one: pauses in multiples of a contribution's journey as measured, lest copies queue behind each other.
RESEND_JOURNEYS = (3.0, 12.0)
NOTHING_AGAIN_S = 1.0
FENCED_FOR_S = 1.0


class Island:
    """One life of one island.

    Args:
        island_id: The id to ask for; empty for the next free one.
        hint: A name that survives a restart.
        nonce: Random, different in each life.
        tensors: Every tensor that is not local.
        tokens_per_step: Tokens in one inner step.
        brokers: How many there are to choose from.
        broker_silent_s: Silence after which the next one is tried.
    """

    def __init__(
        self,
        *,
        island_id: str,
        hint: str,
        nonce: str,
        tensors: tuple[TensorSpec, ...],
        tokens_per_step: int,
        brokers: int = 1,
        broker_silent_s: float = 2.0,
    ) -> None:
        self.island_id = island_id
        self.incarnation = 0
        self.nonce = nonce
        self.manifest: FragmentManifest | None = None
        self.settings: RunSettings | None = None
        self.shares: tuple[Share, ...] = ()  #: its part of the data, and what it has taken over
        self.fragments: dict[int, Fragment] = {}
        self.phase = Phase.SEEDING
        self.done = False  #: the training loop should end
        self.finished = False  #: everything is handed over and the final versions are installed
        self.at = Point(0, 0)
        self.vitals = Vitals(loss=None, step_time_s=None, sync_share=0.0, bytes_up=0, bytes_down=0)
        self.published: tuple[int, ...] = ()  #: the newest versions there are, as last heard
        self.optimizer = StateSource.PENDING  #: what the inner optimizer started from

        self._hearing = Hearing()
        self._choice = BrokerChoice(brokers, nonce, broker_silent_s)
        self._join = Join(nonce=nonce, island_id=island_id, hint=hint, tensors=tensors, tokens_per_step=tokens_per_step)
        self._join_backoff = Backoff(*JOIN_AGAIN_S)
        self._heartbeat_at_s: float | None = None
        self._trail = Trail()
        self._receiver, self._giver = Receiver(), Giver()
        self._optimizer_from: int | None = None  # the step at which the inner optimizer was fresh; None: never here
        self._journey_s = 0.0  # average time until the aggregator is known to have a contribution
        self._want = self._patience()
        self._watched: frozenset[int] = frozenset()
        self._due_soon: frozenset[int] = frozenset()
        self._stopped = False
        self._clean_from: int | None = 0  # parameters are finite from this step on; None while they are replaced
        self._news: dict[int, tuple[int, int]] = {}  # shard -> epoch and sequence of its newest FleetState
        self._open_shards: set[int] = set()  # those that may make another version
        self.heard_at_s: float | None = None
        self._fenced_since_s: float | None = None
        self._progress = (0, 0, 1.0)  # trained_tokens, own tokens then, fleet_ratio
        self._progress_tokens = 0.0

    # --- the interface of the drivers -------------------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """Whether the island is a member of the run."""
        return self.incarnation > 0

    @property
    def broker(self) -> int:
        """The place of the broker to speak through."""
        return self._choice.at

    @property
    def remembered_runs(self) -> int:
        """How long the list is of what was trained on and not handed over yet."""
        return len(self._trail)

    @property
    def startable(self) -> bool:
        """Whether every fragment has its first version ready to be installed."""
        return self.joined and all(f.stage is Stage.READY or f.version >= 0 for f in self.fragments.values())

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
                self._boundary(event, now_s, actions)
            case Vitals():
                self.vitals = event
                return actions  # for the next heartbeat, whenever that is: it also needs a boundary that is up to date
            case Captured():
                self._captured(event, now_s, actions)
            case Prepared():
                fragment = self.fragments[event.fragment_id]
                if fragment.stage is Stage.PREPARING:
                    fragment.stage = Stage.READY
            case SeedEncoded():
                self.fragments[event.fragment_id].seeding = False
                seed = Seed(fragment_id=event.fragment_id, payload=event.payload)
                actions.append(Send(to=AGGREGATOR, message=seed))
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
                self.optimizer = event.source
                self._optimizer_from = self.at.step if event.source is StateSource.FRESH else None
            case Tick():
                pass
            case Leaving():
                leave = Leave(inner_step=self.at.step, tokens=self.at.tokens, reason=event.reason)
                if self.joined:
                    actions.append(Send(to=AGGREGATOR, message=leave))
                return actions
            case _:
                assert_never(event)
        self._advance(now_s, actions)
        return actions

    def next_deadline_s(self) -> float | None:
        """Returns when to send :class:`Tick`, if nothing else happens before."""
        speak_at_s = self._heartbeat_at_s if self.joined else self._join_backoff.due_at_s
        deadlines = speak_at_s, self._choice.due_at_s(), self._receiver.next_deadline_s(), self._giver.next_deadline_s()
        return min((at_s for at_s in deadlines if at_s is not None), default=None)

    def schedule_tokens(self, own_tokens: int) -> float:
        """Returns the fleet's progress in tokens, for learning-rate schedules; it never decreases.

        Tokens the fleet had trained when last reported, plus own tokens since times the fleet's ratio: a rejoining
        island is on the right point at once, and an outage of everybody else does not freeze the rate.
        """
        trained, own_then, ratio = self._progress
        self._progress_tokens = max(self._progress_tokens, trained + (own_tokens - own_then) * ratio)
        return self._progress_tokens

    # --- messages ---------------------------------------------------------------------------------------------

    def _received(self, event: Received, now_s: float, actions: list[Action]) -> None:
        message = event.envelope.message
        self._listen(event.envelope, now_s)
        if message.channel is Channel.BULK:
            self._hearing.heard(now_s)
        match message:
            case Welcome():
                self._welcome(message, now_s, actions)
            case FleetState():
                news = (message.epoch, event.envelope.sequence)
                if self.joined and news > self._news.get(message.shard, (0, -1)):
                    self._news[message.shard] = news
                    self.heard_at_s = now_s
                    self._fenced_since_s = None
                    self._fleet_state(message, now_s, actions)
            case Version():
                self._version(message, event.flaw, now_s, actions)
            case Refused():
                self._refused(message, now_s, actions)
            case Donor():
                self._receiver.named(message, now_s, actions)
            case FetchState():
                state_id = f"{self.incarnation}.{self.at.step}"
                trained = self._optimizer_trained
                self._giver.fetch(event.envelope.sender, message, state_id, trained, now_s, actions)
            case StatePart():
                self._receiver.part(event.envelope.sender, message, event.flaw, now_s, actions)
            case _:
                actions.append(self._note("message.unexpected", kind=type(message).__name__))

    def _listen(self, envelope: Envelope, now_s: float) -> None:
        """Notes that the broker lives, and whether an aggregator answers through it."""
        match envelope.message:
            case Welcome() | FleetState():
                self._choice.answered(now_s)
            case Refused(reason=Reason.NOT_LEADER) if envelope.sender == BROKER:
                self._choice.leaderless(now_s)
            case _:
                self._choice.heard()

    def _welcome(self, welcome: Welcome, now_s: float, actions: list[Action]) -> None:
        if welcome.nonce != self.nonce or welcome.incarnation <= self.incarnation:
            return
        again = self.manifest is not None
        self.island_id, self.incarnation = welcome.island_id, welcome.incarnation
        self.settings, self.shares = welcome.settings, (welcome.share, *welcome.taken_over)
        self._choice.welcomed(welcome.settings.heartbeat_interval_s)
        self._news = {0: (welcome.epoch, -1)}
        if not again:
            self.manifest = FragmentManifest(welcome.fragments)
            self._hearing.expect(4 * max(self.manifest.sizes, default=0))
            self.at = Point(welcome.start_step, welcome.start_tokens)
            self.fragments = {p: Fragment(handed=self.at, counted=self.at.step) for p in range(len(self.manifest))}
            self.published = tuple(-1 for _ in self.fragments)
            actions.append(
                Joined(
                    island_id=self.island_id,
                    incarnation=self.incarnation,
                    manifest=self.manifest,
                    start_step=welcome.start_step,
                    start_tokens=welcome.start_tokens,
                )
            )
        else:
            start = Point(welcome.start_step, welcome.start_tokens)
            for fragment in self.fragments.values():
                fragment.begin_again(start)
        self._heartbeat_at_s = now_s
        self._want = self._patience()
        self._send_want(now_s, actions)

    def _fleet_state(self, state: FleetState, now_s: float, actions: list[Action]) -> None:
        theirs = [p for p in self.fragments if shard_of(p, state.shards) == state.shard]
        if state.phase is Phase.ENDED:
            self._open_shards.discard(state.shard)
        else:
            self._open_shards.add(state.shard)
        if state.shard == 0:  # which decides for all
            self.phase = state.phase
            shares = (state.share, *state.taken_over)
            self.shares = shares if shares != self.shares else self.shares
            self._progress = (state.trained_tokens, self.at.tokens, state.fleet_ratio)
            if state.phase in (Phase.FLUSHING, Phase.ENDED):
                self.done = True
        newest = dict(enumerate(state.versions))
        self.published = tuple(newest.get(p, -1) if p in theirs else v for p, v in enumerate(self.published))
        self._due_soon = self._due_soon.difference(theirs).union(p for p in state.due_soon if p in theirs)
        for resolution in state.resolutions:
            self._resolve(resolution, now_s, actions)
        open_rounds = {r.fragment_id: r.round_id for r in state.rounds}
        for p in theirs:
            fragment, round_id = self.fragments[p], open_rounds.get(p)
            fragment.flushing = state.phase in (Phase.FLUSHING, Phase.ENDED)
            if round_id is None or round_id < fragment.answered:
                fragment.asked = None
            elif round_id > fragment.answered:
                fragment.asked = round_id
            elif fragment.nothing_at_s is not None and now_s >= fragment.nothing_at_s + NOTHING_AGAIN_S:
                fragment.asked = round_id  # the last answer, "nothing", seems lost
        for p in state.seed:
            seeded = self.fragments.get(p)
            if seeded is not None and not seeded.seeding and seeded.seed.due(now_s):
                seeded.seeding = True
                seeded.seed.tried(now_s)
                actions.append(EncodeSeed(fragment_id=p))
        if self._hearing.missing(self._lacking(), now_s):
            self._renew_bulk(now_s, actions)
        elif self._lacking() and self._want.due(now_s):
            self._send_want(now_s, actions)

    def _version(self, version: Version, flaw: str, now_s: float, actions: list[Action]) -> None:
        fragment = self.fragments.get(version.fragment_id)
        if fragment is None or version.fragment_version <= fragment.newest:
            return
        if version.fragment_version < fragment.version:
            return  # a late copy, while the version here is wanted once more: versions never go back
        if flaw:
            actions.append(self._note("version.refused", fragment=version.fragment_id, detail=flaw))
            return  # the next Want asks for it again
        for merged in version.contributions:
            if (merged.island_id, merged.incarnation) == (self.island_id, self.incarnation):
                fragment.outstanding.pop((merged.steps.from_step, merged.steps.to_step), None)
        fragment.newer = version
        self._want = self._patience()
        self._send_want(now_s, actions)

    def _refused(self, refused: Refused, now_s: float, actions: list[Action]) -> None:
        if refused.reason is Reason.NOT_LEADER and refused.kind in ("heartbeat", "join"):
            return  # nothing is wrong with either, and both are repeated: see islands.brokers for what follows
        fields = {"kind": refused.kind, "reason": str(refused.reason), "detail": refused.detail}
        actions.append(self._note("message.refused", **fields))
        match refused.reason:
            case Reason.UNKNOWN_ISLAND if self.joined:
                self._rejoin(actions)
            case Reason.FENCED:
                # One refusal may mean a message that was still on its way when this island joined anew; who is
                # fenced for good hears nothing else.
                if self._fenced_since_s is None:
                    self._fenced_since_s = now_s
                elif now_s >= self._fenced_since_s + FENCED_FOR_S:
                    cure = "give every island an id of its own, or let the other process end first"
                    actions.append(Fail(reason=f"another process has joined as {self.island_id!r}", cure=cure))
            case Reason.MANIFEST | Reason.PROTOCOL_VERSION | Reason.WRONG_RUN:
                actions.append(Fail(reason=str(refused.reason), cure=refused.detail))
            case Reason.OVERSIZE if refused.kind == "join":
                actions.append(Fail(reason=str(refused.reason), cure=refused.detail))
            case _:
                pass  # whatever was refused is sent again in time, or its resolution says why not

    def _rejoin(self, actions: list[Action]) -> None:
        """The aggregator does not know this life: joins as the next one, from here, with nothing to hand over."""
        self.nonce = f"{self.nonce.split('.')[0]}.{self.incarnation}"
        self._join = Join(
            nonce=self.nonce,
            island_id=self.island_id,
            hint=self._join.hint,
            tensors=self._join.tensors,
            tokens_per_step=self._join.tokens_per_step,
        )
        self._join_backoff = Backoff(*JOIN_AGAIN_S)
        self.incarnation = 0
        for fragment in self.fragments.values():
            fragment.outstanding.clear()
            fragment.overwrite = True
        actions.append(self._note("island.rejoins", step=self.at.step))

    def _resolve(self, resolution: Resolution, now_s: float, actions: list[Action]) -> None:
        fragment = self.fragments.get(resolution.fragment_id)
        key = (resolution.from_step, resolution.to_step)
        pending = fragment.outstanding.get(key) if fragment is not None else None
        if fragment is None or pending is None:
            return
        match resolution.fate:
            case Fate.WAITING:
                self._arrived(pending, now_s)
                pending.backoff = self._patience()
                pending.backoff.tried(now_s)
            case Fate.MERGED:
                self._arrived(pending, now_s)
                del fragment.outstanding[key]
            case Fate.UNKNOWN | Fate.RETRY:
                pending.arrived = False  # or not any more: what an aggregator held in memory went with it
                if pending.backoff.due(now_s):
                    pending.backoff.tried(now_s)
                    pending.sent_once = False
                    actions.append(Send(to=AGGREGATOR, message=pending.message))
            case Fate.REFUSED:
                del fragment.outstanding[key]
                self._lost(resolution, actions)
            case _:
                assert_never(resolution.fate)

    def _arrived(self, pending: Pending, now_s: float) -> None:
        """Takes note that the aggregator has it; measures a journey that needed no second attempt, once."""
        pending.arrived = True
        if pending.sent_once:
            pending.sent_once = False
            sample_s = now_s - pending.sent_at_s
            self._journey_s = sample_s if not self._journey_s else 0.8 * self._journey_s + 0.2 * sample_s

    def _patience(self) -> Backoff:
        """Returns how long to wait before something is sent again, on a link as it has shown itself."""
        first_s, longest_s = (max(s, n * self._journey_s) for s, n in zip(RESEND_S, RESEND_JOURNEYS, strict=True))
        return Backoff(first_s, longest_s)

    def _lost(self, resolution: Resolution, actions: list[Action]) -> None:
        """A contribution was refused for good: where the local parameters are to blame, takes the global ones."""
        actions.append(
            self._note(
                "contribution.refused",
                fragment=resolution.fragment_id,
                from_step=resolution.from_step,
                to_step=resolution.to_step,
                reason=str(resolution.reason),
                detail=resolution.detail,
            )
        )
        if resolution.reason is Reason.STALE:
            self.fragments[resolution.fragment_id].overwrite = True
        elif resolution.reason is Reason.NOT_FINITE and self._clean_from is not None:
            if resolution.from_step < self._clean_from:
                return  # captured before the recovery, and refused after it
            self._clean_from = None
            for fragment in self.fragments.values():
                fragment.overwrite = True
            self._optimizer_from = self.at.step
            actions.append(RefreshOptimizer())
        self._want = self._patience()  # the version wanted may be one that is here already

    # --- training ---------------------------------------------------------------------------------------------

    def _boundary(self, boundary: Boundary, now_s: float, actions: list[Action]) -> None:
        self.at = Point(boundary.inner_step, boundary.tokens)
        for step, taken in boundary.trained:
            self._trail.add(step, taken)
        for p in boundary.installed:
            self._installed(self.fragments[p])
        if self._clean_from is None and not any(f.awaits_overwrite for f in self.fragments.values()):
            self._clean_from = self._optimizer_from = self.at.step  # here, and not when it was asked for
        for p in boundary.copied:
            self.fragments[p].copy = self.at
        if boundary.stopped:
            self._stopped = True
            self._heartbeat_at_s = now_s  # the flush waits for what it says

    def _installed(self, fragment: Fragment) -> None:
        assert fragment.stage is Stage.READY, fragment
        assert fragment.incoming is not None
        fragment.count(self.at.step)
        if fragment.incoming_keep == 0:
            fragment.drop(self.at)
        fragment.version = fragment.incoming.fragment_version
        fragment.incoming, fragment.copy, fragment.stage = None, None, Stage.IDLE

    def _captured(self, event: Captured, now_s: float, actions: list[Action]) -> None:
        p, fragment = event.fragment_id, self.fragments[event.fragment_id]
        assert fragment.stage is Stage.CAPTURING, fragment
        assert fragment.capturing is not None
        steps, fragment.capturing, fragment.stage = fragment.capturing, None, Stage.IDLE
        if not self.joined:
            return  # lost its membership meanwhile
        contribution = Contribution(
            round_id=fragment.answered,
            fragment_id=p,
            steps=steps,
            trained_on=fragment.take_trained_on(),
            data=self._trail.data_of(steps.from_step, steps.to_step),
            payload=event.payload,
        )
        assert self.manifest is not None
        self._trail.forget(min(self.fragments[q].undescribed_from for q in self.manifest.moving))
        pending = Pending(contribution, self._patience(), sent_at_s=now_s)
        pending.backoff.tried(now_s)
        fragment.outstanding[(steps.from_step, steps.to_step)] = pending
        actions.append(Send(to=AGGREGATOR, message=contribution))

    # --- time -------------------------------------------------------------------------------------------------

    def _advance(self, now_s: float, actions: list[Action]) -> None:
        """Does whatever the state and the time now call for; called after every event."""
        left, patience_s = self._choice.at, self._choice.patience_s
        why = self._choice.move(now_s)
        if why is not None:
            facts = {"broker": left, "reason": str(why), "next": self._choice.at}
            actions.append(self._note("broker.left", **facts, patience_s=round(patience_s, 2)))
            actions.append(Connect(broker=self._choice.at))
        if not self.joined:
            if self._join_backoff.due(now_s):
                self._join_backoff.tried(now_s)
                self._choice.asked(now_s)
                actions.append(Send(to=AGGREGATOR, message=self._join))
            return
        for p, fragment in self.fragments.items():
            if fragment.stage is Stage.IDLE and fragment.newer is not None:
                self._prepare(fragment, actions)
            if fragment.asked is None or fragment.stage is Stage.CAPTURING:
                continue
            if fragment.congested:
                self._pass(p, fragment, now_s, actions)
            elif fragment.copy is not None and fragment.answerable(self.at):
                self._answer(p, fragment, fragment.copy, now_s, actions)
        asked = frozenset(p for p, f in self.fragments.items() if f.asked is not None)
        watched = frozenset() if self._stopped else self._due_soon | asked
        if watched != self._watched:
            self._watched = watched
            actions.append(Watch(fragments=watched))
        self._giver.advance(now_s)
        self._receiver.advance(now_s, actions)
        if self.done:
            self._receiver.end("the run ends", actions)
        if self._heartbeat_at_s is not None and now_s >= self._heartbeat_at_s:
            self._heartbeat(now_s, actions)
        if self.phase is Phase.ENDED and not self._open_shards and self._stopped and not self._lacking():
            self.finished = all(f.stage is Stage.IDLE and not f.outstanding for f in self.fragments.values())

    def _prepare(self, fragment: Fragment, actions: list[Action]) -> None:
        assert fragment.newer is not None
        assert self.settings is not None
        # Nothing trained since the last hand-over and nothing to come: the global parameters, exactly.
        settled = self._stopped and fragment.handed == self.at
        first = fragment.version < 0
        keep = 0.0 if fragment.overwrite or settled or first else self.settings.keep
        fragment.incoming, fragment.newer, fragment.incoming_keep = fragment.newer, None, keep
        fragment.overwrite, fragment.stage = False, Stage.PREPARING
        actions.append(Prepare(version=fragment.incoming, keep=keep))

    def _answer(self, p: int, fragment: Fragment, copy: Point, now_s: float, actions: list[Action]) -> None:
        """Answers an open round from the copy at hand: with a contribution, or with "nothing"."""
        if fragment.overwrite:
            fragment.drop(copy)  # spoilt: never handed over, and gone with the next version
        if copy.step <= fragment.handed.step:
            self._pass(p, fragment, now_s, actions)
            return
        assert fragment.asked is not None
        fragment.answered, fragment.asked, fragment.nothing_at_s = fragment.asked, None, None
        fragment.count(copy.step)
        fragment.capturing = StepRange(
            from_step=fragment.handed.step,
            to_step=copy.step,
            from_tokens=fragment.handed.tokens,
            to_tokens=copy.tokens,
        )
        fragment.handed, fragment.stage = copy, Stage.CAPTURING
        actions.append(Capture(fragment_id=p, step=copy.step))

    def _pass(self, p: int, fragment: Fragment, now_s: float, actions: list[Action]) -> None:
        """Answers an open round with "nothing": it need not wait for this island."""
        assert fragment.asked is not None
        fragment.answered, fragment.asked, fragment.nothing_at_s = fragment.asked, None, now_s
        actions.append(Send(to=AGGREGATOR, message=Nothing(round_id=fragment.answered, fragment_id=p)))

    def _introduce(self, now_s: float, actions: list[Action]) -> None:
        """Tells a broker that knows nothing all it needs, at once: a new connection, or a new broker behind an old one.

        What was on its way may be lost. The answer to the heartbeat says which contributions are, and these are sent
        again without a pause; a copy that arrives twice is known by its range.
        """
        self._hearing.begin()
        if not self.joined:
            self._join_backoff = Backoff(*JOIN_AGAIN_S)
            return
        self._heartbeat_at_s = now_s
        self._send_bulk_again(now_s, actions)

    def _renew_bulk(self, now_s: float, actions: list[Action]) -> None:
        """Versions are published and none comes: the bulk connection may bring in bytes that it never delivers."""
        actions.append(self._note("bulk.renewed", next_patience_s=round(self._hearing.patience_s, 1)))
        actions.append(RenewBulk())
        self._want = self._patience()
        self._send_bulk_again(now_s, actions)

    def _send_bulk_again(self, now_s: float, actions: list[Action]) -> None:
        """What was on its way over the bulk connection may be lost: it is due again as soon as it is known to be."""
        for fragment in self.fragments.values():
            fragment.seed.due_at_s = min(fragment.seed.due_at_s, now_s)
            for pending in fragment.outstanding.values():
                pending.backoff.due_at_s = min(pending.backoff.due_at_s, now_s)
        self._send_want(now_s, actions)

    def _heartbeat(self, now_s: float, actions: list[Action]) -> None:
        assert self.settings is not None
        self._heartbeat_at_s = now_s + self.settings.heartbeat_interval_s
        # The oldest of each fragment first: what there is no room for is asked about as soon as others are resolved.
        every = sorted((n, p, steps) for p, f in self.fragments.items() for n, steps in enumerate(f.outstanding))
        outstanding = tuple(
            Outstanding(fragment_id=p, from_step=from_step, to_step=to_step)
            for _, p, (from_step, to_step) in every[:MAX_OUTSTANDING]
        )
        beat = Heartbeat(
            inner_step=self.at.step,
            tokens=self.at.tokens,
            loss=self.vitals.loss,
            step_time_s=self.vitals.step_time_s,
            sync_share=self.vitals.sync_share,
            bytes_up=self.vitals.bytes_up,
            bytes_down=self.vitals.bytes_down,
            versions=tuple(f.version for f in self.fragments.values()),
            overwritten_tokens=tuple(f.overwritten_tokens for f in self.fragments.values()),
            outstanding=outstanding,
            stopped=self._stopped,
            optimizer=self.optimizer,
        )
        self._choice.asked(now_s)
        actions.append(Send(to=AGGREGATOR, message=beat))

    @property
    def _optimizer_trained(self) -> bool:
        """Whether the inner optimizer has seen a sync interval of steps, here or where its state came from."""
        if self.settings is None or self.optimizer is StateSource.PENDING or self._stopped:
            return False
        since = self._optimizer_from
        return since is None or self.at.step - since >= self.settings.sync_interval_steps

    def _lacking(self) -> bool:
        """Whether a newer version is published than the one here or on its way into the parameters."""
        return any(self.published[p] > f.newest for p, f in self.fragments.items())

    def _send_want(self, now_s: float, actions: list[Action]) -> None:
        self._want.tried(now_s)
        actions.append(Send(to=BROKER, message=Want(versions=tuple(f.newest for f in self.fragments.values()))))

    def _note(self, name: str, **fields: Any) -> Note:
        return Note(name=name, fields=fields)
