"""The life of a round: contributions in, decisions, weights, the commit, and what is published (design, section 4).

Each fragment goes through::

    IDLE --open--> COLLECTING --close--> COMPUTING --Computed--> PERSISTING --Persisted--> IDLE, one version on
                       \\--cancel--> IDLE

and contributions are admitted at any time: into the open round, or held for the next one. The order contract is
*persist before publish*: a version is sent only after its commit is reported durable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from aggregator.admission import Admission, admit, too_stale
from aggregator.events import (
    Commit,
    Computed,
    Merge,
    Part,
    Persist,
    Persisted,
    PersistFailed,
    Publish,
    Received,
)
from aggregator.members import Member
from aggregator.membership import Membership
from aggregator.outliers import Sample
from aggregator.quorum import Verdict, Waits
from aggregator.round import Admitted, Round
from aggregator.run import Fragment, Run, Stage
from aggregator.shelves import Shelves
from aggregator.staleness import Trained, mean_staleness, merge_weights, most_tokens_per_step, presence_factor
from broker.messages import Attached, Contribution, Fate, Merged, Nothing, Phase, Reason, Resolution

PERSIST_RETRY_S = 1.0
#: Time for islands that a broker's outage cut off to come back in, in heartbeats: measured are up to 2.7.
HEARTBEATS_TO_SETTLE = 3

#: Reasons that cast doubt on the counters themselves: nothing is booked by them.
_UNBOOKED = (Reason.IMPLAUSIBLE, Reason.OVERLAP)


class Rounds:
    """All rounds of a run."""

    def __init__(self, run: Run, membership: Membership) -> None:
        self._run = run
        self._membership = membership
        self._shelves = Shelves(run.now_s)
        self._settled_at_s = -math.inf  # before that, islands are on their way back

    # --- answers ----------------------------------------------------------------------------------------------

    def nothing(self, member: Member, nothing: Nothing, sequence: int) -> None:
        """Takes note that an island hands nothing over in an open round; in a flush, that it has nothing left."""
        round_ = self._run.open_rounds.get(nothing.round_id)
        if round_ is not None:
            round_.answer_nothing(member.island_id)
            member.missed_rounds = 0
            if round_.flush:
                member.emptied[round_.fragment_id] = sequence

    def contribution(self, member: Member, contribution: Contribution, event: Received) -> None:
        """Admits a contribution into the open round of its fragment, or holds it for the next; or says why not."""
        run, p = self._run, contribution.fragment_id
        if p not in run.moving:
            self._membership.refuse(event, Reason.UNKNOWN_FRAGMENT, f"no fragment {p} falls due in this run")
            return
        admission = self._admit(member, contribution, event)
        if admission.fate is not Fate.WAITING or not admission.first:
            self._answer(member, contribution, admission)
            return
        steps = contribution.steps
        run.ledger.wait(member.island_id, member.incarnation, p, steps)
        run.shares.wait(p, contribution.data)
        member.counted_at_s = run.now_s
        run.clock.report(member.island_id, steps.to_step, run.now_s)
        run.journeys.arrived(contribution.round_id, run.now_s)
        member.missed_rounds = 0
        admitted = Admitted(
            island_id=member.island_id,
            incarnation=member.incarnation,
            round_id=contribution.round_id,
            fragment_id=p,
            steps=steps,
            trained_on=contribution.trained_on,
            payload=contribution.payload,
            payload_bytes=event.payload_bytes,
            norm=event.norm,
            data=contribution.data,
        )
        fragment = run.fragments[p]
        fresh = False
        if fragment.stage is Stage.COLLECTING and fragment.round is not None:
            fresh = fragment.round.offer(admitted)
        else:
            fragment.held.append(admitted)
        run.note(
            "contribution.accepted" if fresh else "contribution.held",
            island=member.island_id,
            fragment=p,
            round=contribution.round_id,
            from_step=steps.from_step,
            to_step=steps.to_step,
        )

    def _admit(self, member: Member, contribution: Contribution, event: Received) -> Admission:
        run, p = self._run, contribution.fragment_id
        if run.phase is Phase.ENDED:
            return Admission(fate=Fate.REFUSED, reason=Reason.RUN_ENDED, detail="the run is over", first=False)
        life, steps = run.ledger.life(member.island_id, member.incarnation), contribution.steps
        misplaced = run.shares.refusal(
            member.island_id,
            member.index,
            p,
            contribution.data,
            steps=steps.steps,
            most_batches=steps.to_step - life.start_step,
        )
        return admit(
            contribution,
            flaw=event.flaw,
            quarantined=run.quarantine.why(member.island_id, run.now_s),
            life=life,
            account=run.ledger.account(member.island_id, member.incarnation, p),
            current_version=run.fragments[p].version,
            max_staleness=run.config.max_staleness,
            tokens_per_step=run.most_tokens_per_step(member),
            most_steps=run.most_steps(member),
            free_bytes=run.config.held_bytes - run.waiting_bytes(),
            payload_bytes=event.payload_bytes,
            misplaced=misplaced,
            crowded=run.crowded(member.island_id, contribution),
        )

    def _answer(self, member: Member, contribution: Contribution, admission: Admission) -> None:
        """Tells an island at once that its contribution was refused, is to be sent again, or was known already."""
        run, p, steps = self._run, contribution.fragment_id, contribution.steps
        if admission.first:
            assert admission.reason is not None
            refused = admission.fate is Fate.REFUSED
            if refused:
                run.count_refusal(admission.reason, member)
                if admission.reason not in _UNBOOKED:
                    run.ledger.refuse(member.island_id, member.incarnation, p, steps, admission.reason)
                run.offence(member, admission.reason, steps.from_step)
            round_ = run.open_rounds.get(contribution.round_id)
            if round_ is not None and (refused or admission.reason is Reason.QUEUE_FULL):
                # Its answer is in, worth nothing; or there is room for it only once this round has closed.
                round_.answer_nothing(member.island_id)
            run.note(
                "contribution.refused" if refused else "contribution.retry",
                island=member.island_id,
                fragment=p,
                from_step=steps.from_step,
                to_step=steps.to_step,
                reason=admission.reason,
                detail=admission.detail,
            )
        fate = Fate.WAITING if run.in_commit(member, contribution) else admission.fate
        resolution = Resolution(
            fragment_id=p,
            from_step=steps.from_step,
            to_step=steps.to_step,
            fate=fate,
            reason=admission.reason,
            detail=admission.detail,
        )
        member.resolutions.append(resolution)
        self._membership.tell(member)

    def refuse_waiting(self, c: Admitted, reason: Reason, detail: str) -> None:
        """Refuses a contribution that had been let in."""
        run = self._run
        run.ledger.refuse(c.island_id, c.incarnation, c.fragment_id, c.steps, reason)
        run.shares.refuse(c.fragment_id, c.data)
        member = run.members[c.island_id]
        run.count_refusal(reason, member)
        if member.incarnation == c.incarnation:
            run.offence(member, reason, c.steps.from_step)
            resolution = Resolution(
                fragment_id=c.fragment_id,
                from_step=c.steps.from_step,
                to_step=c.steps.to_step,
                fate=Fate.REFUSED,
                reason=reason,
                detail=detail,
            )
            member.resolutions.append(resolution)
        run.note("contribution.refused", island=c.island_id, fragment=c.fragment_id, reason=reason, detail=detail)

    # --- opening and closing ----------------------------------------------------------------------------------

    def deadlines_s(self) -> list[float]:
        """Returns the moments at which :meth:`advance` may have something to do."""
        run = self._run
        again = [f.persist_again_at_s for f in run.fragments.values()]
        deadlines = [at_s for at_s in again if at_s is not None]
        for round_ in run.open_rounds.values():
            looked = round_.peek(run.now_s, self._waited_for(round_), self._live(), self._waits())
            deadlines.append(run.now_s if looked.recheck_at_s is None else looked.recheck_at_s)
        if run.open_rounds:
            death_s = run.members.next_death_s(run.now_s)
            deadlines += [] if death_s is None else [death_s]
        if run.phase is Phase.RUNNING and run.pacer is not None and len(run.busy) < self._allowed():
            waits_s = (run.pacer.due_in_s(p, run.now_s) for p in run.moving if p not in run.busy)
            # One millisecond late rather than early: an estimate that falls short would wake us again at once.
            deadlines += [run.now_s + wait_s + 0.001 for wait_s in waits_s if wait_s is not None]
        return deadlines

    def advance(self) -> None:
        """Asks again for what was not durable, closes what is decided, and opens what is due."""
        run = self._run
        for fragment in run.fragments.values():
            if fragment.persist_again_at_s is not None and run.now_s >= fragment.persist_again_at_s:
                fragment.persist_again_at_s = None
                assert fragment.commit is not None
                run.emit(Persist(commit=fragment.commit))
        for round_ in list(run.open_rounds.values()):
            self._close_if_decided(round_)
        while run.phase is Phase.RUNNING and run.pacer is not None and len(run.busy) < self._allowed():
            due = run.pacer.most_overdue(run.now_s, run.busy)
            if due is None:
                break
            run.pacer.opened(due, run.now_s)
            self.open(due)

    def open(self, p: int, *, flush: bool = False) -> None:
        """Opens a round: everyone who can train is asked, and what was held joins it."""
        run, fragment = self._run, self._run.fragments[p]
        asked = [m for m in run.members.live(run.now_s) if m.ready]
        round_ = Round(
            round_id=run.next_round_id(),
            fragment_id=p,
            opened_at_s=run.now_s,
            asked=frozenset(m.island_id for m in asked),
            flush=flush,
        )
        for admitted in fragment.held:
            round_.offer(admitted)
        fragment.held.clear()
        fragment.round, fragment.stage = round_, Stage.COLLECTING
        run.open_rounds[round_.round_id] = round_
        run.journeys.opened(round_.round_id, run.now_s)
        held = len(round_.contributions)
        run.note("round.opened", round=round_.round_id, fragment=p, asked=len(asked), held=held, flush=flush)
        for member in asked:
            self._membership.tell(member)

    def _close_if_decided(self, round_: Round) -> None:
        run, fragment = self._run, self._run.fragments[round_.fragment_id]
        waited_for = self._waited_for(round_)
        decision = round_.look(run.now_s, waited_for, self._live(), self._waits())
        if decision.verdict is Verdict.WAIT:
            return
        del run.open_rounds[round_.round_id]
        fragment.closed_at_s = run.now_s
        missing = sorted(round_.owing(waited_for))
        for island_id in missing:
            run.members[island_id].missed_rounds += 1
        timed_out = run.now_s - round_.opened_at_s >= run.config.round_timeout_s
        if round_.quorum_met_at_s is not None and not timed_out:
            run.journeys.quorum_met(round_.quorum_met_at_s - round_.opened_at_s)
        parts = self._weigh(round_, fragment) if decision.verdict is Verdict.CLOSE else ()
        facts = {"round": round_.round_id, "fragment": round_.fragment_id, "reason": decision.reason}
        if not parts:
            run.note("round.cancelled", **facts)
            fragment.round, fragment.stage, fragment.flushed = None, Stage.IDLE, round_.flush
            return
        run.note("round.closed", **facts, missing=missing)
        round_.closed_because, round_.missing = decision.reason, missing
        fragment.stage = Stage.COMPUTING
        version = fragment.version + 1
        merge = Merge(round_id=round_.round_id, fragment_id=round_.fragment_id, fragment_version=version, parts=parts)
        run.emit(merge)

    def _let_in(self, round_: Round, fragment: Fragment) -> list[tuple[Admitted, float]]:
        """Returns what a closing round consists of, and by what its lengths are multiplied.

        What has become too old while it was held is refused here, and what is too long: only now can it be compared
        with what the others sent.
        """
        run = self._run
        young: list[Admitted] = []
        for c in round_.in_merge_order():
            stale = too_stale(c.trained_on, fragment.version, run.config.max_staleness)
            if stale:
                self.refuse_waiting(c, Reason.STALE, stale)
            else:
                young.append(c)
        if not young:
            return []
        samples = [Sample(island_id=c.island_id, norm=c.norm, steps=c.steps.steps) for c in young]
        fleet = run.members.responsive(run.now_s) - run.quarantine.out(run.now_s)
        restarts = fragment.norms.restarts
        length = run.length(round_.fragment_id)
        findings = fragment.norms.judge(samples, fleet, run.config.outlier_factor, length=length)
        if fragment.norms.restarts > restarts:
            norms = {c.island_id: c.norm for c in young}
            run.note("norms.restarted", fragment=round_.fragment_id, round=round_.round_id, norms=norms)
        kept: list[tuple[Admitted, float]] = []
        for c, finding in zip(young, findings, strict=True):
            if finding.refused:
                self.refuse_waiting(c, Reason.OUTLIER, finding.refused)
            else:
                kept.append((c, finding.scale))
                run.behaved(run.members[c.island_id])
        return kept

    def _weigh(self, round_: Round, fragment: Fragment) -> tuple[Part, ...]:
        """Fixes the weights of a closing round."""
        run = self._run
        let_in = self._let_in(round_, fragment)
        if not let_in:
            return ()
        kept, scales = zip(*let_in, strict=True)
        staleness = [mean_staleness(c.trained_on, fragment.version) for c in kept]
        trained = [
            Trained(island_id=c.island_id, tokens=c.steps.tokens, steps=c.steps.steps, staleness=s)
            for c, s in zip(kept, staleness, strict=True)
        ]
        present = {c.island_id for c in kept}
        live = run.eligible() | present
        presence = presence_factor(len(present), len(live), run.config.presence_exponent)
        rates = [self._membership.tokens_per_step(run.members[island_id]) for island_id in sorted(live)]
        most = most_tokens_per_step(rates)
        weights = merge_weights(trained, run.config.staleness_exponent, presence, most_tokens_per_step=most)
        # Shortening is one more reason why a step is smaller: all three are one factor of the length.
        weights = tuple(
            replace(w, staleness_weight=w.staleness_weight * scale, merge_weight=w.merge_weight * scale)
            for w, scale in zip(weights, scales, strict=True)
        )
        weighed = list(zip(kept, staleness, weights, strict=True))
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
                data=c.data,
            )
            for c, s, w in weighed
        )
        return tuple(
            Part(
                island_id=c.island_id,
                steps=c.steps,
                payload=c.payload,
                token_weight=w.token_weight,
                staleness_weight=w.staleness_weight,
            )
            for c, _, w in weighed
        )

    # --- towards a version ------------------------------------------------------------------------------------

    def computed(self, event: Computed) -> None:
        """New parameters are in memory: asks for their commit, with the books as they will be then."""
        run, p = self._run, event.fragment_id
        fragment = run.fragments[p]
        if fragment.stage is not Stage.COMPUTING:
            return
        assert event.fragment_version == fragment.version + 1, (event, fragment.version)
        round_ = fragment.round
        if round_ is not None:
            self._book(p, round_)
            round_.contributions.clear()  # their bytes are in the new version: nobody needs them any more
        fragment.stage = Stage.PERSISTING
        fragment.commit = Commit(
            fragment_id=p,
            fragment_version=event.fragment_version,
            epoch=run.epoch,
            digest=event.digest,
            round_id=round_.round_id if round_ is not None else run.seeding_id,
            contributions=round_.merged if round_ is not None else (),
            ledger={**run.ledger.slice(p), "norms": fragment.norms.record(), "data": run.shares.slice(p)}
            if p in run.moving
            else {},
        )
        run.emit(Persist(commit=fragment.commit))

    def _book(self, p: int, round_: Round) -> None:
        """Books what a round has merged."""
        run = self._run
        for merged in round_.merged:
            run.ledger.merge(merged.island_id, merged.incarnation, p, merged.steps)
            run.shares.merge(p, merged.data)
        islands = {m.island_id for m in round_.merged}
        live = run.eligible() | islands
        run.ledger.count(p, len(islands), len(islands) / len(live), _mean_staleness(round_.merged))

    def persisted(self, event: Persisted) -> bool:
        """A commit is durable: the version exists. Returns whether it is one of version 0."""
        run, fragment = self._run, self._run.fragments[event.fragment_id]
        commit, round_ = fragment.commit, fragment.round
        if commit is None or commit.fragment_version != event.fragment_version:
            return False
        run.disk_works()
        fragment.version, fragment.digest = commit.fragment_version, commit.digest
        fragment.contributions = commit.contributions
        fragment.commit, fragment.round, fragment.stage = None, None, Stage.IDLE
        if round_ is None:
            return True
        fragment.flushed = round_.flush
        run.journeys.committed(round_.opened_at_s, fragment.closed_at_s, run.now_s)
        self.publish(event.fragment_id)
        self._note_commit(commit, round_)
        return False

    def _note_commit(self, commit: Commit, round_: Round) -> None:
        run = self._run
        islands = {m.island_id for m in commit.contributions}
        live = run.eligible() | islands
        run.note(
            "version.committed",
            fragment=commit.fragment_id,
            version=commit.fragment_version,
            round=commit.round_id,
            islands=len(islands),
            live=len(live),
            tokens=sum(m.steps.tokens for m in commit.contributions),
            staleness_mean=round(_mean_staleness(commit.contributions), 3),
            staleness_max=round(max(m.staleness for m in commit.contributions), 3),
            reason=round_.closed_because,
            missing=round_.missing,
            took_s=round(run.now_s - round_.opened_at_s, 4),
            digest=commit.digest,
            contributions=[_plain(m) for m in commit.contributions],
        )

    def persist_failed(self, event: PersistFailed) -> None:
        """A commit is not durable: nothing is published, and it is asked for again."""
        run, fragment = self._run, self._run.fragments[event.fragment_id]
        if fragment.commit is None or fragment.commit.fragment_version != event.fragment_version:
            return
        fragment.persist_again_at_s = run.now_s + PERSIST_RETRY_S
        run.disk_failed(event.detail)
        facts = {"fragment": event.fragment_id, "version": event.fragment_version, "detail": event.detail}
        run.note("version.not_durable", **facts, retry_s=PERSIST_RETRY_S)

    # --- publishing -------------------------------------------------------------------------------------------

    def publish(self, p: int, by: int | None = None) -> None:
        """Sends the newest durable version of a fragment to each broker, or again to the one at place ``by``."""
        fragment = self._run.fragments[p]
        if by is None:
            fragment.published_at_s = self._run.now_s
        publish = Publish(
            fragment_id=p,
            fragment_version=fragment.version,
            digest=fragment.digest,
            contributions=fragment.contributions,
            by=by,
        )
        self._run.emit(publish)

    def attached(self, attached: Attached, broker: int) -> None:
        """Publishes again what a broker lacks: it came back empty, or a version was lost on the way."""
        run = self._run
        away_since_s = self._shelves.answered(broker, attached.versions, run.now_s)
        if run.phase is Phase.SEEDING:
            return
        if away_since_s is not None:
            self._start_over(broker, away_since_s)
        held = dict(enumerate(attached.versions))
        newest = {p: (fragment.version, fragment.published_at_s) for p, fragment in run.fragments.items()}
        for p in self._shelves.lacking(broker, held, newest, run.now_s):
            self.publish(p, by=broker)

    def _start_over(self, broker: int, lost_at_s: float) -> None:
        """Whoever speaks through this broker could not answer while it was away, and counts as just heard.

        If there was no other broker, open rounds count as just opened, too, and rounds have time until everybody has
        had some heartbeats to come back in. Otherwise every open round would close with the first island that is back,
        and the others be missed.
        """
        run = self._run
        nobody = self._shelves.alone(broker, run.now_s)
        for member in run.members.live(lost_at_s):
            if nobody or run.ways.to(member.island_id) in (None, broker):
                member.last_seen_s, member.missed_rounds = run.now_s, 0
        if nobody:
            self.resume()
            self._settled_at_s = run.now_s + HEARTBEATS_TO_SETTLE * run.config.heartbeat_interval_s
        run.note("broker.back", broker=broker, open_rounds=len(run.open_rounds))

    def resume(self) -> None:
        """Open rounds count as just opened: for a while nobody could answer, or was heard."""
        run = self._run
        for round_ in run.open_rounds.values():
            round_.opened_at_s, round_.quorum_met_at_s = run.now_s, None
            run.journeys.opened(round_.round_id, run.now_s)

    # --- measures ---------------------------------------------------------------------------------------------

    def _live(self) -> int:
        return len(self._run.eligible())

    def _waits(self) -> Waits:
        waits = self._run.journeys.waits(self._run.median_step_s)
        return replace(waits, settled_at_s=self._settled_at_s)

    def _allowed(self) -> int:
        return self._run.journeys.rounds_allowed(len(self._run.moving), self._run.median_step_s)

    def _waited_for(self, round_: Round) -> frozenset[str]:
        """Returns the islands that hold up a round: the responsive ones; all live ones where that leaves nobody."""
        responsive = self._run.members.responsive(self._run.now_s) - self._run.quarantine.out(self._run.now_s)
        if round_.flush or not round_.asked & responsive:
            return frozenset(m.island_id for m in self._run.members.live(self._run.now_s))
        return responsive


def _mean_staleness(merged: Sequence[Merged]) -> float:
    return sum(m.staleness * m.steps.steps for m in merged) / sum(m.steps.steps for m in merged)


def _plain(m: Merged) -> dict[str, object]:
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
