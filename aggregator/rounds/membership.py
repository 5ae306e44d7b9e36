"""Membership: joins, heartbeats and farewells; whose message may be heard."""

from __future__ import annotations

from aggregator.interface.events import Received, Send
from aggregator.interface.notes import (
    IslandAdvancing,
    IslandJoined,
    IslandLeft,
    IslandResumed,
    IslandStanding,
    JoinRefused,
    RecipeSettled,
    TooManyHeartbeats,
)
from aggregator.rounds.doubts import Doubts
from aggregator.rounds.notices import Notices
from aggregator.rules.recipes import settle
from aggregator.state.members import Member
from aggregator.state.model_limits import fragments_of, misfit
from aggregator.state.run import Run
from aggregator.state.sharing import Sharing
from broker.base.errors import ConfigError
from broker.process.demands import INIT, contradicted, inputs_of, other_input
from broker.wire.fragments import FragmentManifest, Kind, TensorSpec, merged_by
from broker.wire.messages import (
    FASTEST_STEP_S,
    SLOWEST_STEP_S,
    Fate,
    Heartbeat,
    HostPart,
    Join,
    Leave,
    Outstanding,
    Pacing,
    Phase,
    Reason,
    Refused,
    Resolution,
    RunSettings,
    Welcome,
    joining,
    recipe_digest,
    recipe_of,
)

#: Islands that a run remembers at the most; each that ever joined costs a row in every commit.
MOST_MEMBERS = 10_000


class Membership:
    """Lets islands in and out, and believes their counters or not."""

    def __init__(self, run: Run, notices: Notices, sharing: Sharing, doubts: Doubts) -> None:
        self._run = run
        self._notices = notices
        self._sharing = sharing
        self._doubts = doubts
        unbegun = [] if run.config.shard else [member for member in run.fleet.members if not member.begun]
        run.fleet.pending_joins.beginning = [(1, member.island_id) for member in unbegun]

    def sender(self, event: Received) -> Member | None:
        """Returns the member that a message is from; None where it is not to be heard, or was refused."""
        run, envelope = self._run, event.envelope
        member = run.fleet.members.get(envelope.sender)
        if run.config.shard and (member is None or envelope.incarnation > member.incarnation):
            return None  # shard 0 knows it, and tells us; all that matters is repeated
        if member is not None and not member.begun:
            return None  # not welcome yet
        if member is None or envelope.incarnation > member.incarnation:
            run.fleet.members.claimed(envelope.sender, envelope.incarnation)
            detail = f"no island {envelope.sender!r} with incarnation {envelope.incarnation} is known: join again"
            self._notices.refuse(event, Reason.UNKNOWN_ISLAND, detail)
            return None
        if envelope.incarnation < member.incarnation:
            # A broker that has seen the later one says so itself; this one has not, and nobody else would tell. Should
            # the later one be behind that address by now, one refusal does it no harm.
            detail = f"incarnation {envelope.incarnation} has ended: {member.incarnation} has joined"
            self._notices.refuse(event, Reason.FENCED, detail)
            return None
        if isinstance(envelope.message, HostPart):
            return member  # hosts number their messages by themselves, and the speaker alone says that it is there
        newest = run.fleet.routes.heard(envelope, event.broker)
        member.heard(run.now_s)
        if member.left and newest and isinstance(envelope.message, Heartbeat):
            member.come_back()  # else a frozen broker may have kept this one past the farewell
        return member

    # --- joining ----------------------------------------------------------------------------------------------

    def join(self, event: Received) -> None:
        """Admits an island under its next incarnation, once that is durable, or refuses it with the reason."""
        run, join = self._run, event.envelope.message
        assert isinstance(join, Join)
        run.fleet.routes.heard(event.envelope, event.broker)
        known = run.fleet.members.by_nonce(join.nonce)
        if known is not None:  # a repetition: the same answer, once it is durable
            known.heard(run.now_s)
            if not run.fleet.pending_joins.holds(known.island_id):
                if run.other_shards.agreed_serial:
                    self._welcome(known)
                else:
                    # Do the other shards know it?
                    run.fleet.pending_joins.welcomes.append((run.record.saved_serial, known.island_id))
            return
        if run.fleet.deaf(run.now_s):
            return  # who is silent may only not be heard, and must not lose its id: the process asks again
        paused = run.fleet.members.resumable(join.resumes, run.now_s)
        if paused is not None:
            island_id: str | None = paused.island_id
        else:
            island_id = run.fleet.members.id_for(join.island_id, join.hint, join.nonce, run.now_s)
        refusal = self._refusal(join, island_id)
        if refusal is not None:
            reason, detail = refusal
            run.fleet.count_refusal(reason)
            run.note(JoinRefused(island=join.island_id or join.hint, reason=reason, detail=detail))
            refused = Refused(kind="join", sequence=-1, reason=reason, detail=detail)
            run.emit(Send(to=joining(join.nonce), message=refused))
            return
        if paused is not None:
            self._resume(paused, join)
            return
        assert island_id is not None
        member = run.fleet.members.admit(island_id, join.hint, join.nonce, join.tokens_per_step, run.now_s)
        self.fence(member)
        if run.config.shards == 1:
            self._begin(member)
            return
        run.other_shards.begins.pop(member.island_id, None)
        run.books.data.leave(member.island_id)
        self._sharing.look_again()
        # One that has not begun gives way to this one: nobody has taken anything of it.
        pending = run.fleet.pending_joins
        pending.beginning = [each for each in pending.beginning if each[1] != member.island_id]
        pending.beginning.append((run.record.save(), member.island_id))

    def _resume(self, member: Member, join: Join) -> None:
        """Continues an island's life, whose books are open, in another process, which brings unmerged steps."""
        run = self._run
        run.fleet.members.resume(member, join.nonce, join.tokens_per_step, run.now_s)
        self.replaced(member)
        dealt = run.books.data.resume(member.island_id, member.tokens_per_step)
        run.fleet.pending_joins.welcomes.append((run.record.save(), member.island_id))
        life = run.books.ledger.life(member.island_id, member.incarnation)
        resumed = IslandResumed(
            island=member.island_id,
            incarnation=member.incarnation,
            last_step=life.last_step,
            start_step=life.start_step,
        )
        run.note(resumed)
        self._sharing.note(dealt)

    def fence(self, member: Member) -> None:
        """Fences an island's earlier life: nothing more is taken from it, or expected."""
        self.replaced(member)
        self._run.fleet.quarantine.joined(member.island_id)

    def replaced(self, member: Member) -> None:
        """Excuses a new process of an island from what the one before was asked for; it may answer."""
        run = self._run
        for round_ in run.schedule.open_rounds.values():
            round_.excuse(member.island_id)
        run.schedule.clock.forget(member.island_id)
        assert run.schedule.pacer is not None
        run.schedule.pacer.forget(member.island_id)

    def _begin(self, member: Member) -> None:
        """Opens the books of a new life, at the furthest step that any shard knows of the last one."""
        run = self._run
        known = run.books.ledger.resume_point(member.island_id)
        start_step, start_tokens = max(known, run.other_shards.begins.get(member.island_id, known))
        member.begin(start_step, start_tokens)
        self.begin_books(member, start_step, start_tokens)
        if run.phase is Phase.ENDED:
            run.books.ledger.end(member.island_id)  # the books are closed: what it trains now is lost
        dealt = run.books.data.join(member.island_id, member.tokens_per_step)
        run.fleet.pending_joins.welcomes.append((run.record.save(), member.island_id))
        joined = IslandJoined(
            island=member.island_id,
            incarnation=member.incarnation,
            start_step=start_step,
            islands=len(run.fleet.members.live(run.now_s)),
        )
        run.note(joined)
        self._sharing.note(dealt)

    def begin_books(self, member: Member, step: int, tokens: int) -> None:
        """Opens the books of an island's life, at this step and token counter."""
        run = self._run
        run.books.ledger.begin(member.island_id, member.incarnation, step, tokens)
        run.fleet.claims.begin(member.island_id, step, tokens, member.tokens_per_step, run.now_s)

    def saved(self, serial: int) -> None:
        """Welcomes the islands that waited for the run record of that serial to be durable."""
        self._run.books.data.saved(serial)
        if self._run.config.shards > 1:
            self._sharing.look_again()  # what was nobody's may be given now
        pending = self._run.fleet.pending_joins
        beginning = [island_id for waits_for, island_id in pending.beginning if waits_for <= serial]
        pending.beginning = [each for each in pending.beginning if each[0] > serial]
        for island_id in dict.fromkeys(beginning):
            self._begin(self._run.fleet.members[island_id])
        ready = [island_id for waits_for, island_id in pending.welcomes if waits_for <= serial]
        pending.welcomes = [each for each in pending.welcomes if each[0] > serial]
        for member in (self._run.fleet.members[island_id] for island_id in ready):
            if member.begun:  # else it has joined anew meanwhile
                self._welcome(member)

    def _refusal(self, join: Join, island_id: str | None) -> tuple[Reason, str] | None:
        """Says why an island cannot take part; the first island's tensors fix the fragments.

        Those of one that came, supplied nothing and is gone are forgotten when another one comes with its own.
        """
        run = self._run
        most = run.config.max_tokens_per_step
        member = run.fleet.members.replaced_by(join.nonce)
        if member is not None:  # admitted, it would fence the process that is there
            return Reason.FENCED, f"a later process has joined as {member.island_id}: a replaced one does not come back"
        if join.tokens_per_step > most:
            detail = f"tokens_per_step is {join.tokens_per_step}: the aggregator allows {most} (max_tokens_per_step)"
            return Reason.IMPLAUSIBLE, detail
        if island_id is None:
            detail = f"an island is here as {join.hint}: heard again, it keeps its id, and this one gets another"
            return Reason.QUEUE_FULL, f"{detail}; silent, it was this one's former life: ask again"
        if len(run.fleet.members) >= MOST_MEMBERS and run.fleet.members.get(island_id) is None:
            return Reason.QUEUE_FULL, f"{MOST_MEMBERS} islands have joined, the run takes no more"
        founds = run.model.manifest is None or (self._unused() and bool(self._differs(join)))
        recipe = recipe_of(run.config)
        try:
            recipe = settle(recipe, join.inner_optimizer, join.demands) if founds else recipe
            contradiction = contradicted(recipe, join.demands)
            inputs = inputs_of(join.demands)
        except ConfigError as err:
            return Reason.RECIPE, str(err)
        asked = run.config.init_digest
        if founds and asked and inputs.get(INIT) != asked:
            has = inputs.get(INIT, "not given")
            contradiction = f"{INIT} is {has} at the island, and the run begins with {asked}: give it the same file"
        elif not contradiction and not founds:
            contradiction = other_input(run.origin.inputs, inputs)
        if contradiction:
            return Reason.RECIPE, contradiction
        if founds:
            try:
                manifest = fragments_of(join.tensors, recipe, run.config)
            except ValueError as err:
                return Reason.MANIFEST, str(err)
            problem = misfit(manifest, run.config)
            if problem is not None:
                return Reason.OVERSIZE, f"the aggregator's {problem}"
            run.adopt_manifest(manifest, recipe)
            run.origin.inputs = inputs
            table = run.recipe_table()
            digest, optimizer = recipe_digest(table), join.inner_optimizer
            run.note(RecipeSettled(digest=digest, inner_optimizer=optimizer, table=table))
            for member in run.fleet.members:  # they had joined with other tensors
                member.supersede()
                self.begin_books(member, 0, 0)
                run.books.ledger.end(member.island_id)
        difference = self._differs(join)
        return (Reason.MANIFEST, difference) if difference else None

    def _differs(self, join: Join) -> str:
        """Says how an island's tensors differ from the run's, under its merge rule; empty if they agree."""
        manifest = self._run.model.manifest
        assert manifest is not None
        return first_difference(manifest, merged_by(join.tensors, self._run.config.kernel))

    def _unused(self) -> bool:
        """Returns True if the fragments may still change: no version 0 is here, nor an island to supply it.

        With several shards the others have them too, and keep them.
        """
        run = self._run
        begun = run.phase is not Phase.SEEDING or run.origin.began or run.origin.planted
        return not begun and run.config.shards == 1 and not run.fleet.members.live(run.now_s)

    def _look_at_fleet(self) -> None:
        """Warns if the fleet has become too large for the time that an island may be silent."""
        run, sentence = self._run, self._run.fleet.too_many_heartbeats(self._run.now_s)
        if not sentence:
            run.troubles.end("heartbeats", run.now_s)
        elif run.troubles.begin("heartbeats", sentence, run.now_s):
            run.note(TooManyHeartbeats(detail=sentence))

    def _welcome(self, member: Member) -> None:
        run, c = self._run, self._run.config
        assert run.model.manifest is not None
        self._look_at_fleet()
        life = run.books.ledger.life(member.island_id, member.incarnation)
        settings = RunSettings(
            recipe=recipe_of(c),
            heartbeat_interval_s=run.fleet.heartbeat_interval_s(run.now_s),
            total_tokens=c.total_tokens,
            tokens_per_fleet_step=max(1, member.tokens_per_step * c.islands),
            seed=c.seed,
            islands=c.islands,
            data_ahead_s=c.data_ahead_s,
        )
        welcome = Welcome(
            nonce=member.nonce,
            island_id=member.island_id,
            incarnation=member.incarnation,
            epoch=run.epoch,
            fragments=run.model.manifest.fragments,
            settings=settings,
            blocks=run.books.data.told(member.island_id),
            start_step=life.start_step,
            start_tokens=life.start_tokens,
        )
        run.emit(Send(to=joining(member.nonce), message=welcome))

    # --- hearing ----------------------------------------------------------------------------------------------

    def heartbeat(self, member: Member, beat: Heartbeat, event: Received) -> list[Resolution] | None:
        """Takes in an island's counters; returns the fates it asks for, None if the counters cannot be true."""
        run = self._run
        known = 0 if run.model.manifest is None else len(run.model.manifest)
        if len(beat.versions) != known or len(beat.overwritten_tokens) != known:
            detail = f"it speaks of {len(beat.versions)} fragments, the run has {known}"
            self._notices.refuse(event, Reason.MANIFEST, detail)
            return None
        lie = self._impossible(member, beat.inner_step, beat.tokens) or self._overdrawn(member, beat) or _unreal(beat)
        if not lie and run.holds_nothing(member) and any(version >= 0 for version in run.model.of_ours(beat.versions)):
            lie = f"it claims to hold version {max(run.model.of_ours(beat.versions))} of a run that has not begun"
        if lie:
            self._notices.refuse(event, Reason.IMPLAUSIBLE, lie)
            return None
        overtaken = event.envelope.sequence < member.beat_sequence  # by another way: it says what was, not what is
        if not overtaken:
            self._doubts.corruption(member, beat)
            member.heartbeat, member.beat_sequence, member.counted_at_s = beat, event.envelope.sequence, run.now_s
        run.books.ledger.report(member.island_id, member.incarnation, beat.inner_step, beat.tokens)
        self._doubts.believe(member)  # before anybody asks whether the run is at its end
        run.books.ledger.overwritten(member.island_id, member.incarnation, beat.overwritten_tokens)
        if beat.stopped:
            first = member.stopped_sequence
            sequence = event.envelope.sequence
            member.stopped_sequence = sequence if first is None else min(first, sequence)
            run.schedule.clock.forget(member.island_id)
        elif member.ready and not overtaken:
            run.schedule.clock.report(member.island_id, beat.inner_step, run.now_s, beat.step_time_s)
        self._look_at_steps(member)
        asked = [self._resolve(member, item) for item in beat.outstanding if run.model.owns(item.fragment_id)]
        member.resolutions += asked
        return asked

    def _look_at_steps(self, member: Member) -> None:
        """Notes whether an island makes steps; rounds do not wait for one that makes none.

        Its training loop was left without a word, or is busy with something else. One that has stopped is not known to
        the clock; in lockstep islands stand still because they wait for a round.
        """
        run = self._run
        if run.config.pacing is Pacing.LOCKSTEP:
            return
        standing = run.schedule.clock.standing(member.island_id, run.now_s, run.config.dead_after_s)
        if standing is not member.standing:
            member.stands(standing)
            run.note((IslandStanding if standing else IslandAdvancing)(island=member.island_id))

    def _impossible(self, member: Member, inner_step: int, tokens: int) -> str:
        """Returns why an island cannot have trained ``tokens`` in its steps; empty if it can."""
        run = self._run
        life = run.books.ledger.life(member.island_id, member.incarnation)
        most = life.most_steps(run.now_s - member.counted_at_s)
        if not life.start_step <= inner_step <= most:
            return f"it claims step {inner_step}, from {life.start_step} to {most} are possible"
        per_step = member.tokens_per_step or run.config.max_tokens_per_step
        most = life.start_tokens + (inner_step - life.start_step) * per_step
        if tokens > most:
            return f"it claims {tokens} tokens at step {inner_step}, at most {most} are possible"
        return ""

    def _overdrawn(self, member: Member, beat: Heartbeat) -> str:
        """Names a fragment of which more tokens were dropped than remained; empty if there is none."""
        if not any(beat.overwritten_tokens):
            return ""  # all that is known beside that arrived, and was counted as trained when it did
        life = self._run.books.ledger.life(member.island_id, member.incarnation)
        trained = life.trained_tokens_by(beat.inner_step, beat.tokens)
        for p, account in life.accounts.items():
            known = account.known_tokens - account.wasted_tokens[Reason.OVERWRITTEN]
            if known + beat.overwritten_tokens[p] > trained:
                dropped = beat.overwritten_tokens[p]
                return f"it claims to have dropped {dropped} tokens of fragment {p}: {known} of {trained} are known"
        return ""

    def leave(self, member: Member, leave: Leave, event: Received) -> None:
        """Takes an island out: nothing more is expected, unless its next process resumes this life."""
        run = self._run
        if member.left:
            return
        member.leave(leave.departure)
        lie = self._impossible(member, leave.inner_step, leave.tokens)
        if lie:
            self._notices.refuse(event, Reason.IMPLAUSIBLE, lie)  # it goes all the same, with the counters known before
        else:
            run.books.ledger.report(member.island_id, member.incarnation, leave.inner_step, leave.tokens)
        self._doubts.believe(member)
        if not member.paused:
            run.books.ledger.end(member.island_id)
        run.schedule.clock.forget(member.island_id)
        left = IslandLeft(
            island=member.island_id, step=leave.inner_step, reason=leave.reason, departure=leave.departure
        )
        run.note(left)
        run.record.save()

    def _resolve(self, member: Member, item: Outstanding) -> Resolution:
        """Returns the resolution of a contribution that its island asks about."""
        run, p = self._run, item.fragment_id
        fate, reason = Fate.UNKNOWN, None
        if p in run.model.moving:
            life, steps = (member.island_id, member.incarnation), (item.from_step, item.to_step)
            account = run.books.ledger.account(*life, p)
            if steps in account.waiting or run.model.fragments[p].in_commit(*life, item.from_step):
                fate = Fate.WAITING
            elif account.merged.covers(*steps):
                fate = Fate.MERGED
            elif account.refused.covers(*steps):
                fate, reason = Fate.REFUSED, account.why_refused(*steps)
        if fate is Fate.UNKNOWN and run.phase is Phase.ENDED:
            fate, reason = Fate.REFUSED, Reason.RUN_ENDED
        return Resolution(fragment_id=p, from_step=item.from_step, to_step=item.to_step, fate=fate, reason=reason)


def _unreal(beat: Heartbeat) -> str:
    """Says what is wrong with the pace that a heartbeat claims; empty if nothing is."""
    if beat.step_time_s is None or FASTEST_STEP_S <= beat.step_time_s <= SLOWEST_STEP_S:
        return ""
    return f"it claims {beat.step_time_s:.3g} s for a step, from {FASTEST_STEP_S:g} to {SLOWEST_STEP_S:g} are possible"


def first_difference(manifest: FragmentManifest, tensors: tuple[TensorSpec, ...]) -> str:
    """Says how an island's tensors differ from the run's, dtypes aside; empty if they agree."""
    ours = manifest.whole
    theirs = {t.name: t for t in tensors if t.kind is not Kind.LOCAL}
    for name in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            return (
                f"tensor {name!r} is {'unknown to the run' if a is None else 'missing'}: use the run's model settings"
            )
        for attribute in ("shape", "kind", "unit_axes"):
            mine, its = getattr(a, attribute), getattr(b, attribute)
            if mine != its:
                return f"tensor {name!r} has {attribute} {its}, the run has {mine}: use the run's model settings"
    return ""
