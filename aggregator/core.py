"""The aggregator's state machine: events and a clock reading in, actions out. Nothing else decides anything.

Each fragment goes through::

    IDLE --due--> COLLECTING --decision--> COMPUTING --Computed--> PERSISTING --Persisted--> IDLE, one version on
                       \\--cancelled--> IDLE

and contributions are admitted at any time: into the open round, or held for the next one. The order contract of the
actions is *persist before publish*: a version is sent only after its commit is reported durable, and a join is
answered only after the incarnation it gives away is.

Design: sections 3, 4, 8 and 9 of docs/design.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, assert_never

from aggregator.admission import Admission, admit, too_stale
from aggregator.config import AggregatorConfig
from aggregator.events import (
    Action,
    Commit,
    Computed,
    Event,
    Finished,
    Manifested,
    Merge,
    Note,
    Part,
    Persist,
    Persisted,
    PersistFailed,
    Plant,
    Publish,
    Received,
    RunSaved,
    RunSaveFailed,
    SaveRun,
    Send,
    Stop,
    Tick,
)
from aggregator.journeys import Journeys
from aggregator.ledger import Ledger
from aggregator.members import Member, Members
from aggregator.pacing import Pacer, StepClock
from aggregator.quorum import Verdict, Waits
from aggregator.round import Admitted, Round
from aggregator.staleness import Trained, mean_staleness, merge_weights
from broker.fragments import FragmentManifest, Kind, TensorSpec, partition
from broker.messages import (
    BROKER,
    Attach,
    AttachBulk,
    Attached,
    Contribution,
    Fate,
    FleetState,
    Heartbeat,
    Join,
    Leave,
    Merged,
    Nothing,
    OpenRound,
    Outstanding,
    Phase,
    Reason,
    Refused,
    Resolution,
    RunSettings,
    Seed,
    Welcome,
    joining,
)

ATTACH_INTERVAL_S = 1.0
SAVE_RETRY_S = 1.0
#: A flush that does not get all it waits for in so many round timeouts ends without it.
FLUSH_TIMEOUTS = 5
#: How long an ended run stays up for islands that still fetch the last versions.
LINGER_S = 10.0


class Stage(StrEnum):
    """Where a fragment is between two versions."""

    IDLE = "idle"
    COLLECTING = "collecting"
    COMPUTING = "computing"
    PERSISTING = "persisting"


@dataclass(slots=True)
class Fragment:
    """One fragment's versions and its current round."""

    stage: Stage = Stage.IDLE
    version: int = -1  #: the newest durable one
    digest: str = ""
    contributions: tuple[Merged, ...] = ()  #: of the newest durable version
    round: Round | None = None  #: while COLLECTING, COMPUTING, PERSISTING a merge
    closed_at_s: float = 0.0
    commit: Commit | None = None  #: while PERSISTING
    persist_again_at_s: float | None = None
    held: list[Admitted] = field(default_factory=list)
    flushed: bool = False
    published_at_s: float | None = None
    republish_after_s: float = 1.0

    def in_commit(self, island_id: str, incarnation: int, contribution: Contribution) -> bool:
        """Whether a contribution is in the version that is being made durable right now."""
        parts = self.commit.contributions if self.commit else ()
        return any(
            (m.island_id, m.incarnation, m.steps) == (island_id, incarnation, contribution.steps) for m in parts
        )


class Aggregator:
    """One aggregator shard that owns every fragment of its run.

    Args:
        config: The settings.
        now_s: Monotonic seconds at the start.
        record: The run record of an earlier life of this store, or None for a new run.
        commits: The newest durable commit per fragment, with that record.
    """

    def __init__(
        self,
        config: AggregatorConfig,
        *,
        now_s: float,
        record: Mapping[str, Any] | None = None,
        commits: Mapping[int, Commit] | None = None,
    ) -> None:
        self.config = config
        self.phase = Phase.SEEDING
        self.epoch = 1
        self.manifest: FragmentManifest | None = None
        self.fragments: dict[int, Fragment] = {}
        self.members = Members(config.liveness, config.islands)
        self.ledger = Ledger({})
        self.clock = StepClock(config.heartbeat_interval_s)
        self.pacer: Pacer | None = None
        self.journeys = Journeys(config)
        self.rounds_by_contributors: Counter[int] = Counter()
        self.refusals: Counter[str] = Counter()
        self.participation: list[float] = []
        self.staleness: list[float] = []
        self.finished = False

        self._next_round_id = 1
        self._serial = 0  # of the newest run record asked for
        self._durable_serial = 0
        self._save_again_at_s: float | None = None
        self._welcomes: list[tuple[int, str]] = []  # (serial to wait for, island id)
        self._seeder: tuple[str, int] | None = None
        self._attach_at_s = now_s
        self._flush_began_s: float | None = None
        self._linger_until_s: float | None = None
        self._due_soon_at_s = -1.0
        self._due_in_s: dict[int, float] = {}
        self._started_at_s = now_s
        self._open_rounds: dict[int, Round] = {}
        if record is not None:
            self._restore(record, commits or {}, now_s)

    # --- the interface of the drivers -------------------------------------------------------------------------

    def start(self, now_s: float) -> list[Action]:
        """Returns the first actions: the epoch becomes durable before anything is said under it."""
        actions: list[Action] = []
        if self.manifest is not None:
            actions.append(Manifested(manifest=self.manifest))
        self._save_run(actions)
        actions.append(self._note("aggregator.started", epoch=self.epoch, phase=str(self.phase), versions=self.versions))
        return actions

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Takes one event in and returns what to do, in order."""
        actions: list[Action] = []
        match event:
            case Received():
                self._received(event, now_s, actions)
            case Computed():
                self._computed(event, now_s, actions)
            case Persisted():
                self._persisted(event, now_s, actions)
            case PersistFailed():
                self._persist_failed(event, now_s, actions)
            case RunSaved():
                self._run_saved(event, now_s, actions)
            case RunSaveFailed():
                self._save_again_at_s = now_s + SAVE_RETRY_S
                actions.append(self._note("run_record.failed", detail=event.detail, retry_s=SAVE_RETRY_S))
            case Tick():
                pass
            case Stop():
                self._finish("stopped by the operator", actions)
            case _:
                assert_never(event)
        self._advance(now_s, actions)
        return actions

    def next_deadline_s(self, now_s: float) -> float | None:
        """Returns when to send :class:`Tick`, if nothing else happens before."""
        if self.finished or not self.leading:
            return self._save_again_at_s
        deadlines: list[float | None] = [self._attach_at_s, self._save_again_at_s, self._linger_until_s]
        collecting = False
        for fragment in self.fragments.values():
            deadlines.append(fragment.persist_again_at_s)
            if fragment.stage is Stage.COLLECTING and fragment.round is not None:
                collecting = True
                deadlines.append(self._peek(fragment.round, now_s))
        if collecting:
            deadlines.append(self.members.next_death_s(now_s))
        if self.phase is Phase.RUNNING and self.pacer is not None and len(self._busy()) < self._rounds_allowed(now_s):
            waits = (self.pacer.due_in_s(p, now_s) for p in self._moving() if p not in self._busy())
            soonest = min((w for w in waits if w is not None), default=None)
            if soonest is not None:
                # One millisecond late rather than early: an estimate that falls short would tick again at once.
                deadlines.append(now_s + soonest + 0.001)
        if self._flush_began_s is not None:
            ends = (self._flush_began_s + n * self.config.round_timeout_s for n in (1, FLUSH_TIMEOUTS))
            deadlines += [end_s for end_s in ends if end_s > now_s]
        return min((d for d in deadlines if d is not None), default=None)

    @property
    def versions(self) -> tuple[int, ...]:
        """The newest published version per fragment, -1 for none."""
        if any(f.version < 0 for f in self.fragments.values()):
            return tuple(-1 for _ in self.fragments)  # version 0 is published whole or not at all
        return tuple(self.fragments[p].version for p in sorted(self.fragments))

    @property
    def leading(self) -> bool:
        """Whether this life's epoch is durable, so that it may speak."""
        return self._durable_serial > 0

    # --- messages ---------------------------------------------------------------------------------------------

    def _received(self, event: Received, now_s: float, actions: list[Action]) -> None:
        envelope, message = event.envelope, event.envelope.message
        if not self.leading:
            return  # everything that matters is repeated
        if isinstance(message, Join):
            self._join(message, now_s, actions)
            return
        if isinstance(message, Attached):
            self._attached(message, now_s, actions)
            return
        if not isinstance(message, Heartbeat | Nothing | Leave | Seed | Contribution):
            actions.append(self._note("message.unexpected", kind=type(message).__name__, sender=envelope.sender))
            return
        member = self.members.get(envelope.sender)
        if member is None or envelope.incarnation > member.incarnation:
            detail = f"no island {envelope.sender!r} with incarnation {envelope.incarnation} is known: join again"
            self._refuse(event, Reason.UNKNOWN_ISLAND, detail, actions)
            return
        if envelope.incarnation < member.incarnation:
            # Not answered: the address belongs to the later incarnation. The broker tells the old process.
            self.refusals[Reason.FENCED] += 1
            return
        member.last_seen_s = now_s
        if member.left and not isinstance(message, Leave):
            member.left = False
        match message:
            case Heartbeat():
                self._heartbeat(member, message, envelope.sequence, now_s, actions)
            case Nothing():
                round_ = self._open_rounds.get(message.round_id)
                if round_ is not None and not round_.closed:
                    round_.answer_nothing(member.island_id)
                    member.missed_rounds = 0
                    if round_.flush:
                        member.emptied[message.fragment_id] = envelope.sequence
            case Leave():
                self._leave(member, message, actions)
            case Seed():
                self._seed(member, message, event, actions)
            case Contribution():
                self._contribution(member, message, event, now_s, actions)
            case _:
                assert_never(message)

    def _join(self, join: Join, now_s: float, actions: list[Action]) -> None:
        known = self.members.by_nonce(join.nonce)
        if known is not None:  # a repetition: the same answer, once it is durable
            if all(island_id != known.island_id for _, island_id in self._welcomes):
                self._welcome(known, now_s, actions)
            return
        address = joining(join.nonce)
        if self.manifest is None:
            try:
                manifest = partition(join.tensors, self.config.fragments)
            except ValueError as err:
                refused = Refused(kind="join", sequence=-1, reason=Reason.MANIFEST, detail=str(err))
                actions.append(Send(to=address, message=refused))
                self.refusals[Reason.MANIFEST] += 1
                return
            self._adopt_manifest(manifest)
            actions.append(Manifested(manifest=manifest))
        assert self.manifest is not None
        difference = _first_difference(self.manifest, join.tensors)
        if difference:
            self.refusals[Reason.MANIFEST] += 1
            refused = Refused(kind="join", sequence=-1, reason=Reason.MANIFEST, detail=difference)
            actions.append(Send(to=address, message=refused))
            actions.append(self._note("join.refused", island=join.island_id or join.hint, detail=difference))
            return
        start_step, start_tokens = 0, 0
        member = self.members.admit(join.island_id, join.hint, join.nonce, join.tokens_per_step, now_s)
        start_step, start_tokens = self.ledger.resume_point(member.island_id)
        self.ledger.begin(member.island_id, member.incarnation, start_step, start_tokens)
        self.clock.forget(member.island_id)
        if self.pacer is not None:
            self.pacer.forget(member.island_id)
        self._save_run(actions)
        self._welcomes.append((self._serial, member.island_id))
        actions.append(
            self._note(
                "island.joined",
                island=member.island_id,
                incarnation=member.incarnation,
                start_step=start_step,
                islands=len(self.members.live(now_s)),
            )
        )

    def _welcome(self, member: Member, now_s: float, actions: list[Action]) -> None:
        assert self.manifest is not None
        life = self.ledger.life(member.island_id, member.incarnation)
        welcome = Welcome(
            nonce=member.nonce,
            island_id=member.island_id,
            incarnation=member.incarnation,
            epoch=self.epoch,
            fragments=self.manifest.fragments,
            settings=self._settings(member),
            share=self.members.share(member),
            start_step=life.start_step,
            start_tokens=life.start_tokens,
        )
        actions.append(Send(to=joining(member.nonce), message=welcome))

    def _heartbeat(
        self, member: Member, beat: Heartbeat, sequence: int, now_s: float, actions: list[Action]
    ) -> None:
        if len(beat.versions) != len(self.fragments) or len(beat.overwritten_tokens) != len(self.fragments):
            return  # of another manifest: cannot be an island of this run
        life = self.ledger.life(member.island_id, member.incarnation)
        most = life.start_tokens + max(0, beat.inner_step - life.start_step) * member.tokens_per_step
        if beat.inner_step < life.start_step or (member.tokens_per_step and beat.tokens > most):
            self.refusals[Reason.IMPLAUSIBLE] += 1
            member.refusals[Reason.IMPLAUSIBLE] = member.refusals.get(Reason.IMPLAUSIBLE, 0) + 1
            detail = f"heartbeat claims {beat.tokens} tokens at step {beat.inner_step}, at most {most} are possible"
            refused = Refused(kind="heartbeat", sequence=-1, reason=Reason.IMPLAUSIBLE, detail=detail)
            actions.append(Send(to=member.island_id, message=refused))
            return
        member.heartbeat = beat
        self.ledger.report(member.island_id, member.incarnation, beat.inner_step, beat.tokens)
        self.ledger.overwritten(member.island_id, member.incarnation, beat.overwritten_tokens)
        if beat.stopped:
            self.clock.forget(member.island_id)
        elif member.ready:
            self.clock.report(member.island_id, beat.inner_step, now_s, beat.step_time_s)
        self._begin_flush_if_due(now_s, actions)
        if self.phase is Phase.FLUSHING and beat.stopped:
            self._close_gaps(member, beat, sequence)
        for item in beat.outstanding:
            member.resolutions.append(self._resolve(member, item))
        self._tell(member, now_s, actions)

    def _leave(self, member: Member, leave: Leave, actions: list[Action]) -> None:
        if member.left:
            return
        member.left = True
        self.ledger.report(member.island_id, member.incarnation, leave.inner_step, leave.tokens)
        self.ledger.end(member.island_id)
        self.clock.forget(member.island_id)
        actions.append(self._note("island.left", island=member.island_id, step=leave.inner_step, reason=leave.reason))
        self._save_run(actions)

    def _seed(self, member: Member, seed: Seed, event: Received, actions: list[Action]) -> None:
        if self._seeder != (member.island_id, member.incarnation) or self.phase is not Phase.SEEDING:
            return  # asked of somebody else by now, or done: a late copy
        fragment = self.fragments.get(seed.fragment_id)
        if fragment is None:
            self._refuse(event, Reason.UNKNOWN_FRAGMENT, f"no fragment {seed.fragment_id}", actions)
            return
        if event.flaw is not None:
            self._refuse(event, event.flaw.reason, event.flaw.detail, actions)
            return
        if fragment.stage is Stage.IDLE and fragment.version < 0:
            fragment.stage = Stage.COMPUTING
            actions.append(Plant(fragment_id=seed.fragment_id, payload=seed.payload))

    def _contribution(
        self, member: Member, contribution: Contribution, event: Received, now_s: float, actions: list[Action]
    ) -> None:
        fragment = self.fragments.get(contribution.fragment_id)
        if fragment is None or contribution.fragment_id not in self._moving():
            self._refuse(event, Reason.UNKNOWN_FRAGMENT, f"no fragment {contribution.fragment_id} falls due", actions)
            return
        name, p, steps = member.island_id, contribution.fragment_id, contribution.steps
        if self.phase is Phase.ENDED:
            over = Admission(fate=Fate.REFUSED, reason=Reason.RUN_ENDED, detail="the run is over", first=False)
            self._answer(member, contribution, over, now_s, actions)
            return
        admission = admit(
            contribution,
            flaw=event.flaw,
            life=self.ledger.life(name, member.incarnation),
            account=self.ledger.account(name, member.incarnation, p),
            current_version=fragment.version,
            max_staleness=self.config.max_staleness,
            tokens_per_step=member.tokens_per_step,
            free_bytes=self.config.held_bytes - self.waiting_bytes(),
            payload_bytes=event.payload_bytes,
        )
        if admission.fate is not Fate.WAITING or not admission.first:
            self._answer(member, contribution, admission, now_s, actions)
            return
        self.ledger.wait(name, member.incarnation, p, steps)
        self.clock.report(name, steps.to_step, now_s)
        member.missed_rounds = 0
        admitted = Admitted(
            island_id=name,
            incarnation=member.incarnation,
            round_id=contribution.round_id,
            fragment_id=p,
            steps=steps,
            trained_on=contribution.trained_on,
            payload=contribution.payload,
            payload_bytes=event.payload_bytes,
            arrived_at_s=now_s,
        )
        self.journeys.arrived(contribution.round_id, now_s)
        if fragment.stage is Stage.COLLECTING and fragment.round is not None:
            fresh = fragment.round.offer(admitted)
        else:
            fragment.held.append(admitted)
            fresh = False
        actions.append(
            self._note(
                "contribution.accepted" if fresh else "contribution.held",
                island=name,
                fragment=p,
                round=contribution.round_id,
                from_step=steps.from_step,
                to_step=steps.to_step,
            )
        )

    def _answer(
        self, member: Member, contribution: Contribution, admission: Admission, now_s: float, actions: list[Action]
    ) -> None:
        """Tells an island at once that its contribution was refused, is to be sent again, or was known already."""
        p, steps = contribution.fragment_id, contribution.steps
        if admission.fate is Fate.REFUSED and admission.first:
            assert admission.reason is not None
            self._count_refusal(member, admission.reason)
            if admission.reason not in (Reason.IMPLAUSIBLE, Reason.OVERLAP):  # their counters cannot be booked
                self.ledger.refuse(member.island_id, member.incarnation, p, steps, admission.reason)
            round_ = self.fragments[p].round
            if round_ is not None and not round_.closed and contribution.round_id == round_.round_id:
                round_.answer_nothing(member.island_id)  # its answer is in, worth nothing
        if admission.fate in (Fate.REFUSED, Fate.RETRY) and admission.first:
            actions.append(
                self._note(
                    "contribution.refused" if admission.fate is Fate.REFUSED else "contribution.retry",
                    island=member.island_id,
                    fragment=p,
                    from_step=steps.from_step,
                    to_step=steps.to_step,
                    reason=admission.reason,
                    detail=admission.detail,
                )
            )
        fate = admission.fate
        if self.fragments[p].in_commit(member.island_id, member.incarnation, contribution):
            fate = Fate.WAITING  # booked as merged, but not durable yet
        member.resolutions.append(
            Resolution(
                fragment_id=p,
                from_step=steps.from_step,
                to_step=steps.to_step,
                fate=fate,
                reason=admission.reason,
                detail=admission.detail,
            )
        )
        self._tell(member, now_s, actions)

    def _resolve(self, member: Member, item: Outstanding) -> Resolution:
        """Says what became of one contribution that its island asks about."""
        p, steps = item.fragment_id, (item.from_step, item.to_step)
        fate, reason = Fate.UNKNOWN, None
        if p in self._moving():
            account = self.ledger.account(member.island_id, member.incarnation, p)
            commit = self.fragments[p].commit
            in_commit = commit is not None and any(
                (m.island_id, m.incarnation, m.steps.from_step) == (member.island_id, member.incarnation, steps[0])
                for m in commit.contributions
            )
            if steps in account.waiting or in_commit:
                fate = Fate.WAITING
            elif account.merged.covers(*steps):
                fate = Fate.MERGED
            elif account.refused.covers(*steps):
                fate, reason = Fate.REFUSED, Reason.OVERLAP
        if fate is Fate.UNKNOWN and self.phase is Phase.ENDED:
            fate, reason = Fate.REFUSED, Reason.RUN_ENDED
        return Resolution(fragment_id=p, from_step=steps[0], to_step=steps[1], fate=fate, reason=reason)

    def _attached(self, attached: Attached, now_s: float, actions: list[Action]) -> None:
        """Publishes again what the broker lacks: it came back empty, or a version was lost on the way."""
        held = dict(enumerate(attached.versions))
        if self.phase is Phase.SEEDING:
            return
        for p, fragment in self.fragments.items():
            if held.get(p, -1) >= fragment.version:
                fragment.republish_after_s = ATTACH_INTERVAL_S
            elif fragment.published_at_s is None or now_s - fragment.published_at_s >= fragment.republish_after_s:
                fragment.republish_after_s *= 2  # a slow link may still be busy with the last copy
                self._publish(p, now_s, actions)

    # --- completions ------------------------------------------------------------------------------------------

    def _computed(self, event: Computed, now_s: float, actions: list[Action]) -> None:
        fragment = self.fragments[event.fragment_id]
        if fragment.stage is not Stage.COMPUTING:
            return  # a seed that was given up meanwhile
        assert event.fragment_version == fragment.version + 1, (event, fragment.version)
        merged: tuple[Merged, ...] = ()
        round_id = 0
        if fragment.round is not None:
            round_id = fragment.round.round_id
            merged = fragment.round.merged
            for part in merged:
                self.ledger.merge(part.island_id, part.incarnation, event.fragment_id, part.steps)
            fragment.round.contributions.clear()  # their bytes are in the new version: nobody needs them any more
        fragment.stage = Stage.PERSISTING
        fragment.commit = Commit(
            fragment_id=event.fragment_id,
            fragment_version=event.fragment_version,
            epoch=self.epoch,
            digest=event.digest,
            round_id=round_id,
            contributions=merged,
            ledger=self.ledger.slice(event.fragment_id),
        )
        actions.append(Persist(commit=fragment.commit))

    def _persisted(self, event: Persisted, now_s: float, actions: list[Action]) -> None:
        fragment = self.fragments[event.fragment_id]
        commit = fragment.commit
        if commit is None or commit.fragment_version != event.fragment_version:
            return
        fragment.version, fragment.digest = commit.fragment_version, commit.digest
        fragment.contributions = commit.contributions
        fragment.commit, fragment.stage, fragment.persist_again_at_s = None, Stage.IDLE, None
        round_, fragment.round = fragment.round, None
        if round_ is None:
            self._seeded(now_s, actions)
            return
        self.journeys.committed(round_.opened_at_s, fragment.closed_at_s, now_s)
        islands = {m.island_id for m in commit.contributions}
        self.rounds_by_contributors[len(islands)] += 1
        live = {m.island_id for m in self.members.live(now_s)} | islands
        self.participation.append(len(islands) / len(live))
        steps = sum(m.steps.steps for m in commit.contributions)
        staleness = sum(m.staleness * m.steps.steps for m in commit.contributions) / steps
        self.staleness.append(staleness)
        fragment.flushed = round_.flush
        self._publish(event.fragment_id, now_s, actions)
        actions.append(
            self._note(
                "version.committed",
                fragment=event.fragment_id,
                version=commit.fragment_version,
                round=round_.round_id,
                islands=len(islands),
                live=len(live),
                tokens=sum(m.steps.tokens for m in commit.contributions),
                staleness_mean=round(staleness, 3),
                staleness_max=round(max(m.staleness for m in commit.contributions), 3),
                took_s=round(now_s - round_.opened_at_s, 4),
                digest=commit.digest,
                contributions=[_plain_merged(m) for m in commit.contributions],
            )
        )

    def _persist_failed(self, event: PersistFailed, now_s: float, actions: list[Action]) -> None:
        fragment = self.fragments[event.fragment_id]
        if fragment.commit is None or fragment.commit.fragment_version != event.fragment_version:
            return
        fragment.persist_again_at_s = now_s + SAVE_RETRY_S
        actions.append(
            self._note(
                "version.not_durable",
                fragment=event.fragment_id,
                version=event.fragment_version,
                detail=event.detail,
                retry_s=SAVE_RETRY_S,
            )
        )

    def _run_saved(self, event: RunSaved, now_s: float, actions: list[Action]) -> None:
        self._durable_serial = max(self._durable_serial, event.serial)
        ready = [island_id for serial, island_id in self._welcomes if serial <= self._durable_serial]
        self._welcomes = [(s, i) for s, i in self._welcomes if s > self._durable_serial]
        for island_id in ready:
            member = self.members.get(island_id)
            assert member is not None
            self._welcome(member, now_s, actions)

    # --- time -------------------------------------------------------------------------------------------------

    def _advance(self, now_s: float, actions: list[Action]) -> None:
        """Does whatever the state and the time now call for; called after every event."""
        if self.finished:
            return
        if self._save_again_at_s is not None and now_s >= self._save_again_at_s:
            self._save_again_at_s = None
            self._save_run(actions)
        if not self.leading:
            return
        if now_s >= self._attach_at_s:
            self._attach_at_s = now_s + ATTACH_INTERVAL_S
            versions = self.versions
            actions.append(Send(to=BROKER, message=Attach(shard=0, epoch=self.epoch, versions=versions)))
            actions.append(Send(to=BROKER, message=AttachBulk(shard=0, epoch=self.epoch)))
        for fragment in self.fragments.values():
            if fragment.persist_again_at_s is not None and now_s >= fragment.persist_again_at_s:
                fragment.persist_again_at_s = None
                assert fragment.commit is not None
                actions.append(Persist(commit=fragment.commit))
        if self.phase is Phase.SEEDING:
            self._choose_seeder(now_s, actions)
            return
        self._begin_flush_if_due(now_s, actions)
        for p in sorted(self.fragments):
            self._close_if_decided(p, now_s, actions)
        if self.phase is Phase.RUNNING:
            self._open_due_rounds(now_s, actions)
        elif self.phase is Phase.FLUSHING:
            self._flush(now_s, actions)
        elif self.phase is Phase.ENDED and self._linger_until_s is not None:
            gone = not self.members.live(now_s)
            if gone or now_s >= self._linger_until_s:
                self._finish("every island has left" if gone else "islands were given time to leave", actions)

    def _open_due_rounds(self, now_s: float, actions: list[Action]) -> None:
        assert self.pacer is not None
        while len(self._busy()) < self._rounds_allowed(now_s):
            p = self.pacer.most_overdue(now_s, self._busy())
            if p is None:
                return
            self.pacer.opened(p, now_s)
            self._open(p, now_s, actions)

    def _open(self, p: int, now_s: float, actions: list[Action], *, flush: bool = False) -> None:
        fragment = self.fragments[p]
        asked = [m for m in self.members.live(now_s) if m.ready]
        round_ = Round(
            round_id=self._next_round_id,
            fragment_id=p,
            opened_at_s=now_s,
            asked=frozenset(m.island_id for m in asked),
            flush=flush,
        )
        self._next_round_id += 1
        for admitted in fragment.held:
            round_.offer(admitted)
        fragment.held.clear()
        fragment.round, fragment.stage = round_, Stage.COLLECTING
        self._open_rounds[round_.round_id] = round_
        self.journeys.opened(round_.round_id, now_s)
        actions.append(
            self._note(
                "round.opened",
                round=round_.round_id,
                fragment=p,
                asked=len(asked),
                held=len(round_.contributions),
                flush=flush,
            )
        )
        for member in asked:
            self._tell(member, now_s, actions)

    def _close_if_decided(self, p: int, now_s: float, actions: list[Action]) -> None:
        fragment = self.fragments[p]
        round_ = fragment.round
        if fragment.stage is not Stage.COLLECTING or round_ is None:
            return
        responsive = self._waited_for(round_, now_s)
        live = len(self.members.live(now_s))
        decision = round_.decide(now_s, responsive, live, self._waits(now_s))
        if decision.verdict is Verdict.WAIT:
            return
        del self._open_rounds[round_.round_id]
        fragment.closed_at_s = now_s
        for island_id in round_.owing(responsive):
            member = self.members.get(island_id)
            assert member is not None
            member.missed_rounds += 1
        timed_out = now_s - round_.opened_at_s >= self.config.round_timeout_s
        if round_.quorum_met_at_s is not None and not timed_out:
            self.journeys.quorum_met(round_.quorum_met_at_s - round_.opened_at_s)
        parts = self._weigh(round_, fragment, actions) if decision.verdict is Verdict.CLOSE else []
        if not parts:
            actions.append(
                self._note("round.cancelled", round=round_.round_id, fragment=p, reason=decision.reason)
            )
            fragment.round, fragment.stage, fragment.flushed = None, Stage.IDLE, round_.flush
            return
        fragment.stage = Stage.COMPUTING
        actions.append(
            self._note(
                "round.closed",
                round=round_.round_id,
                fragment=p,
                reason=decision.reason,
                missing=sorted(round_.owing(responsive)),
            )
        )
        actions.append(
            Merge(round_id=round_.round_id, fragment_id=p, fragment_version=fragment.version + 1, parts=tuple(parts))
        )

    def _weigh(self, round_: Round, fragment: Fragment, actions: list[Action]) -> list[Part]:
        """Fixes the weights of a closing round; a held contribution that has become too old is refused here."""
        kept: list[Admitted] = []
        for c in round_.in_merge_order():
            stale = too_stale(_as_contribution(c), fragment.version, self.config.max_staleness)
            if stale:
                self._refuse_waiting(c, Reason.STALE, stale, actions)
            else:
                kept.append(c)
        staleness = [mean_staleness(c.trained_on, fragment.version) for c in kept]
        offered = [
            Trained(island_id=c.island_id, tokens=c.steps.tokens, steps=c.steps.steps, staleness=s)
            for c, s in zip(kept, staleness, strict=True)
        ]
        weights = merge_weights(offered, self.config.staleness_exponent) if offered else ()
        round_.merged = tuple(
            Merged(
                island_id=c.island_id,
                incarnation=c.incarnation,
                steps=c.steps,
                staleness=s,
                token_weight=w.token_weight,
                staleness_weight=w.staleness_weight,
                merge_weight=w.merge_weight,
                fresh=round_.is_fresh(c),
            )
            for c, s, w in zip(kept, staleness, weights, strict=True)
        )
        return [
            Part(
                island_id=c.island_id,
                steps=c.steps,
                payload=c.payload,
                token_weight=w.token_weight,
                staleness_weight=w.staleness_weight,
            )
            for c, w in zip(kept, weights, strict=True)
        ]

    def _refuse_waiting(self, c: Admitted, reason: Reason, detail: str, actions: list[Action]) -> None:
        self.ledger.refuse(c.island_id, c.incarnation, c.fragment_id, c.steps, reason)
        member = self.members.get(c.island_id)
        assert member is not None
        self._count_refusal(member, reason)
        if member.incarnation == c.incarnation:
            member.resolutions.append(
                Resolution(
                    fragment_id=c.fragment_id,
                    from_step=c.steps.from_step,
                    to_step=c.steps.to_step,
                    fate=Fate.REFUSED,
                    reason=reason,
                    detail=detail,
                )
            )
        actions.append(
            self._note("contribution.refused", island=c.island_id, fragment=c.fragment_id, reason=reason, detail=detail)
        )

    # --- beginning and end ------------------------------------------------------------------------------------

    def _choose_seeder(self, now_s: float, actions: list[Action]) -> None:
        """Asks one live island for all of version 0; if it dies half-way, what it sent is dropped for the next one."""
        live = {(m.island_id, m.incarnation) for m in self.members.live(now_s)}
        if self._seeder in live or not live or not self.fragments:
            return
        first = min(live, key=lambda key: self._index(key[0]))
        self._seeder = first
        for fragment in self.fragments.values():
            fragment.version, fragment.stage, fragment.commit = -1, Stage.IDLE, None
        actions.append(self._note("seeder.chosen", island=first[0], incarnation=first[1]))
        member = self.members.get(first[0])
        if member is not None and all(island_id != first[0] for _, island_id in self._welcomes):
            self._tell(member, now_s, actions)

    def _seeded(self, now_s: float, actions: list[Action]) -> None:
        if any(f.version < 0 for f in self.fragments.values()):
            return
        self.phase = Phase.RUNNING
        actions.append(self._note("run.seeded", fragments=len(self.fragments), seconds=round(now_s - self._started_at_s, 3)))
        for p in sorted(self.fragments):
            self._publish(p, now_s, actions)
        for member in self.members.live(now_s):
            self._tell(member, now_s, actions)

    def _begin_flush_if_due(self, now_s: float, actions: list[Action]) -> None:
        target = self.config.total_tokens
        if self.phase is not Phase.RUNNING or not target or self.ledger.trained_tokens() < target:
            return
        self.phase = Phase.FLUSHING
        self._flush_began_s = now_s
        actions.append(self._note("run.flushing", trained_tokens=self.ledger.trained_tokens(), target=target))
        for member in self.members.live(now_s):
            self._tell(member, now_s, actions)

    def _flush(self, now_s: float, actions: list[Action]) -> None:
        assert self._flush_began_s is not None
        running = [m for m in self.members.live(now_s) if m.ready and not m.stopped]
        if running and now_s < self._flush_began_s + self.config.round_timeout_s:
            return
        patient = now_s < self._flush_began_s + FLUSH_TIMEOUTS * self.config.round_timeout_s
        settled = True
        for p in self._moving():
            fragment = self.fragments[p]
            if fragment.stage is not Stage.IDLE:
                settled = False
                continue
            missing = patient and self._missing(p, now_s)
            settled = settled and fragment.flushed and not missing
            # What a closed flush round did not bring is asked for again, at the pace of heartbeats.
            again = missing and now_s >= fragment.closed_at_s + self.config.heartbeat_interval_s
            if (again or not fragment.flushed) and len(self._busy()) < self.config.rounds_in_flight:
                self._open(p, now_s, actions, flush=True)
        if settled:
            self._give_up_the_rest(actions)
            self.phase = Phase.ENDED
            self._flush_began_s, self._linger_until_s = None, now_s + LINGER_S
            books = self.ledger.books().tokens()
            actions.append(self._note("run.ended", **books))
            for member in self.members.live(now_s):
                self._tell(member, now_s, actions)

    def _give_up_the_rest(self, actions: list[Action]) -> None:
        """What is not merged when the run ends never will be: it is booked as wasted."""
        for p in self._moving():
            for held in self.fragments[p].held:
                self._refuse_waiting(held, Reason.RUN_ENDED, "it came after the flush", actions)
            self.fragments[p].held.clear()
        lost = self.ledger.books().tokens()["in_flight"]
        if lost:
            actions.append(self._note("run.flush_incomplete", lost_tokens=lost))
        for member in self.members:
            self.ledger.end(member.island_id)

    def _close_gaps(self, member: Member, beat: Heartbeat, sequence: int) -> None:
        """Books what a stopped island has handed over, waits for nothing about, and nobody remembers.

        It had nothing left when it answered the flush, and has nothing outstanding in a heartbeat sent after that: the
        fate of the rest was known to an earlier life of the aggregator and lost with it.
        """
        pending = {item.fragment_id for item in beat.outstanding}
        for p, emptied in member.emptied.items():
            if sequence > emptied and p not in pending:
                self.ledger.close_gap(member.island_id, member.incarnation, p)

    def _missing(self, p: int, now_s: float) -> bool:
        """Whether a live island has trained steps on this fragment whose fate is still open."""
        for member in self.members.live(now_s):
            if member.stopped:
                life = self.ledger.life(member.island_id, member.incarnation)
                if life.accounts[p].spent_tokens < life.trained_tokens:
                    return True
        return False

    def _finish(self, reason: str, actions: list[Action]) -> None:
        if not self.finished:
            self.finished = True
            actions.append(self._note("aggregator.finished", reason=reason, phase=str(self.phase)))
            actions.append(Finished())

    # --- parts ------------------------------------------------------------------------------------------------

    def _tell(self, member: Member, now_s: float, actions: list[Action]) -> None:
        """Sends an island the state it needs; resolutions gathered so far go with it."""
        if any(island_id == member.island_id for _, island_id in self._welcomes):
            return  # it does not know its id yet
        rounds = tuple(
            OpenRound(round_id=r.round_id, fragment_id=r.fragment_id)
            for r in self._open_rounds.values()
            if member.island_id not in r.answered
        )
        trained = self.ledger.trained_tokens()
        resolutions = {(r.fragment_id, r.from_step, r.to_step): r for r in member.resolutions}
        member.resolutions.clear()
        state = FleetState(
            epoch=self.epoch,
            phase=self.phase,
            rounds=rounds,
            due_soon=self._due_soon(member, now_s),
            versions=self.versions,
            resolutions=tuple(resolutions.values()),
            seed=self._seed_wanted(member),
            trained_tokens=trained,
            fleet_ratio=self._fleet_ratio(member, now_s),
            share=self.members.share(member),
        )
        actions.append(Send(to=member.island_id, message=state))

    def _due_soon(self, member: Member, now_s: float) -> tuple[int, ...]:
        """Returns the fragments that open before this island's next boundary but one, or the next announcement."""
        if self.pacer is None or self.phase is not Phase.RUNNING:
            return ()
        if not 0 <= now_s - self._due_soon_at_s < self.config.heartbeat_interval_s / 20:
            self._due_soon_at_s = now_s
            waits = {p: self.pacer.due_in_s(p, now_s) for p in self._moving()}
            self._due_in_s = {p: w for p, w in waits.items() if w is not None}
        own_s = self.clock.step_time_s(member.island_id) or 0.0
        fleet_s = self.clock.median_step_time_s(now_s) or 0.0
        horizon_s = 2 * max(own_s, fleet_s) + self.pacer.spacing_steps * fleet_s
        return tuple(p for p, wait_s in self._due_in_s.items() if wait_s <= horizon_s)

    def _seed_wanted(self, member: Member) -> tuple[int, ...]:
        if self.phase is not Phase.SEEDING or self._seeder != (member.island_id, member.incarnation):
            return ()
        return tuple(p for p, f in self.fragments.items() if f.version < 0 and f.stage is Stage.IDLE)

    def _fleet_ratio(self, member: Member, now_s: float) -> float:
        """Tokens the fleet trains while this island trains one, from step times."""
        rates: dict[str, float] = {}
        for island_id in self.clock.advancing(now_s):
            other, step_time_s = self.members.get(island_id), self.clock.step_time_s(island_id)
            if other is not None and step_time_s:
                rates[island_id] = other.tokens_per_step / step_time_s
        own = rates.get(member.island_id)
        return sum(rates.values()) / own if own else float(max(1, len(rates)))

    def _settings(self, member: Member) -> RunSettings:
        c = self.config
        return RunSettings(
            sync_interval_steps=c.sync_interval,
            keep=c.keep,
            codec=c.codec,
            heartbeat_interval_s=c.heartbeat_interval_s,
            total_tokens=c.total_tokens,
            tokens_per_fleet_step=max(1, member.tokens_per_step * c.islands),
            seed=c.seed,
        )

    def _publish(self, p: int, now_s: float, actions: list[Action]) -> None:
        fragment = self.fragments[p]
        fragment.published_at_s = now_s
        actions.append(
            Publish(
                fragment_id=p,
                fragment_version=fragment.version,
                digest=fragment.digest,
                contributions=fragment.contributions,
            )
        )

    def _save_run(self, actions: list[Action]) -> None:
        self._serial += 1
        manifest = None if self.manifest is None else [[_plain_spec(t) for t in f] for f in self.manifest.fragments]
        record = {
            "run_id": self.config.run_id,
            "epoch": self.epoch,
            "manifest": manifest,
            "next_round_id": self._next_round_id,
            **self.members.record(),
        }
        actions.append(SaveRun(serial=self._serial, record=record))

    def _restore(self, record: Mapping[str, Any], commits: Mapping[int, Commit], now_s: float) -> None:
        self.epoch = record["epoch"] + 1
        self.members.restore(record, now_s)
        if record["manifest"] is None:
            return
        specs = tuple(tuple(_spec_from_plain(row) for row in f) for f in record["manifest"])
        self._adopt_manifest(FragmentManifest(specs))
        # Round ids must never repeat, or an answer to a round before the restart would count as fresh after it.
        last_round = max((c.round_id for c in commits.values()), default=0)
        self._next_round_id = max(record["next_round_id"], last_round) + 1_000_000
        if set(commits) == set(self.fragments):
            for p, commit in commits.items():
                fragment = self.fragments[p]
                fragment.version, fragment.digest = commit.fragment_version, commit.digest
                fragment.contributions = commit.contributions
                self.ledger.restore(p, commit.ledger)
            self.phase = Phase.RUNNING
        for member in self.members:
            start = self.ledger.resume_point(member.island_id)
            try:
                self.ledger.life(member.island_id, member.incarnation)
            except KeyError:
                self.ledger.begin(member.island_id, member.incarnation, *start)

    def _adopt_manifest(self, manifest: FragmentManifest) -> None:
        self.manifest = manifest
        self.fragments = {p: Fragment() for p in range(len(manifest))}
        self.ledger = Ledger({p: manifest.sizes[p] for p in manifest.moving})
        self.pacer = Pacer(manifest.moving, self.config.sync_interval, self.clock)

    def _refuse(self, event: Received, reason: Reason, detail: str, actions: list[Action]) -> None:
        envelope = event.envelope
        member = self.members.get(envelope.sender)
        if member is not None:
            self._count_refusal(member, reason)
        else:
            self.refusals[reason] += 1
        kind = type(envelope.message).__name__.lower()
        actions.append(self._note("message.refused", sender=envelope.sender, kind=kind, reason=reason, detail=detail))
        refused = Refused(kind=kind, sequence=envelope.sequence, reason=reason, detail=detail)
        actions.append(Send(to=envelope.sender, message=refused))

    def _count_refusal(self, member: Member, reason: Reason) -> None:
        self.refusals[reason] += 1
        member.refusals[reason] = member.refusals.get(reason, 0) + 1

    def _waits(self, now_s: float) -> Waits:
        return self.journeys.waits(self.clock.median_step_time_s(now_s) or 0.0)

    def _peek(self, round_: Round, now_s: float) -> float | None:
        live = len(self.members.live(now_s))
        return round_.look(now_s, self._waited_for(round_, now_s), live, self._waits(now_s)).recheck_at_s or now_s

    def _waited_for(self, round_: Round, now_s: float) -> frozenset[str]:
        """Returns the islands that hold up a round: the responsive ones; all live ones where that leaves nobody."""
        responsive = self.members.responsive(now_s)
        if round_.flush or not round_.asked & responsive:
            return frozenset(m.island_id for m in self.members.live(now_s))
        return responsive

    def _rounds_allowed(self, now_s: float) -> int:
        step_s = self.clock.median_step_time_s(now_s) or 0.0
        return self.journeys.rounds_allowed(len(self._moving()), step_s)

    def _busy(self) -> frozenset[int]:
        return frozenset(p for p, f in self.fragments.items() if f.stage is not Stage.IDLE)

    def _moving(self) -> tuple[int, ...]:
        return self.manifest.moving if self.manifest is not None else ()

    def _index(self, island_id: str) -> int:
        member = self.members.get(island_id)
        assert member is not None
        return member.index

    def waiting_bytes(self) -> int:
        """Bytes of the contributions that wait in open rounds or are held; bounded by the configuration."""
        total = 0
        for fragment in self.fragments.values():
            total += sum(c.payload_bytes for c in fragment.held)
            if fragment.round is not None:
                total += sum(c.payload_bytes for c in fragment.round.contributions)
        return total

    def _note(self, name: str, **fields: Any) -> Note:
        return Note(name=name, fields=fields)


def _first_difference(manifest: FragmentManifest, tensors: tuple[TensorSpec, ...]) -> str:
    """Says how an island's tensors differ from the run's; empty if they agree. Its own dtype is its own business."""
    ours = manifest.tensors()
    theirs = {t.name: t for t in tensors if t.kind is not Kind.LOCAL}
    for name in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            return f"tensor {name!r} is {'unknown to the run' if a is None else 'missing'}: use the run's model settings"
        for field_ in ("shape", "kind", "unit_axes"):
            if getattr(a, field_) != getattr(b, field_):
                return (
                    f"tensor {name!r} has {field_} {getattr(b, field_)}, "
                    f"the run has {getattr(a, field_)}: use the run's model settings"
                )
    return ""


def _as_contribution(c: Admitted) -> Contribution:
    return Contribution(
        round_id=c.round_id, fragment_id=c.fragment_id, steps=c.steps, trained_on=c.trained_on, payload=None
    )


def _plain_merged(m: Merged) -> dict[str, Any]:
    return {
        "island": m.island_id,
        "incarnation": m.incarnation,
        "steps": [m.steps.from_step, m.steps.to_step],
        "tokens": m.steps.tokens,
        "staleness": round(m.staleness, 6),
        "token_weight": m.token_weight,
        "merge_weight": m.merge_weight,
        "fresh": m.fresh,
    }


def _plain_spec(t: TensorSpec) -> list[Any]:
    return [t.name, list(t.shape), t.dtype, str(t.kind), t.unit_axes]


def _spec_from_plain(row: list[Any]) -> TensorSpec:
    name, shape, dtype, kind, unit_axes = row
    return TensorSpec(name=name, shape=tuple(shape), dtype=dtype, kind=Kind(kind), unit_axes=unit_axes)
