"""Intake of answers to a round: admits, holds, refuses or asks again (reference.md, sections 4.3, 9).

There are two gates. As a contribution arrives it is checked by itself (:mod:`aggregator.ledger.refusals`), and goes
into the open round of its fragment, or is held for the next one. As its round closes it may have become too old by
waiting, and can be compared with what the others sent (:mod:`aggregator.rules.outliers`).
"""

from __future__ import annotations

from aggregator.interface.events import Received
from aggregator.interface.notes import (
    ContributionAccepted,
    ContributionHeld,
    ContributionRefused,
    ContributionRetry,
    IslandReleased,
    NormsRestarted,
)
from aggregator.ledger.refusals import Admission, admit, too_stale
from aggregator.rounds.notices import Notices
from aggregator.rules.outliers import Offer
from aggregator.state.fragment import Fragment, Stage
from aggregator.state.members import Member
from aggregator.state.round import Round
from aggregator.state.run import Run
from broker.wire.messages import Contribution, Fate, Nothing, Phase, Reason, Resolution
from broker.wire.ranges import StepRange

#: Reasons that cast doubt on the counters themselves: nothing is booked by them.
_UNBOOKED = (Reason.IMPLAUSIBLE, Reason.OVERLAP)


class Intake:
    """Lets contributions into rounds, and tells their senders why not."""

    def __init__(self, run: Run, notices: Notices) -> None:
        self._run = run
        self._notices = notices

    # --- as they arrive ---------------------------------------------------------------------------------------

    def nothing(self, member: Member, nothing: Nothing, event: Received) -> None:
        """Takes note that an island hands nothing over in an open round; in a flush, that it has nothing left."""
        round_ = self._run.schedule.open_rounds.get(nothing.round_id)
        if round_ is not None:
            round_.answer_nothing(member.island_id)
            member.answered()
            if round_.flush:
                member.emptied[round_.fragment_id] = event.envelope.sequence

    def contribution(self, member: Member, contribution: Contribution, event: Received) -> None:
        """Admits a contribution to its fragment's open round, or holds it for the next; or says why not."""
        run, p = self._run, contribution.fragment_id
        if p not in run.model.moving:
            self._notices.refuse(event, Reason.UNKNOWN_FRAGMENT, f"no fragment {p} falls due in this run")
            return
        admission = self._admit(member, contribution, event)
        if admission.fate is not Fate.WAITING or not admission.first:
            self._answer(member, contribution, admission)
            return
        steps = contribution.steps
        run.books.ledger.wait(member.island_id, member.incarnation, p, steps)
        run.books.data.batches.wait(p, contribution.data)
        member.counted_at_s = run.now_s
        run.schedule.clock.report(member.island_id, steps.to_step, run.now_s)
        run.schedule.round_times.arrived(contribution.round_id, run.now_s)
        member.answered()
        offer = Offer(
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
        fragment = run.model.fragments[p]
        fresh = False
        if fragment.stage is Stage.COLLECTING and fragment.round is not None:
            fresh = fragment.round.offer(offer)
        else:
            fragment.hold(offer)
        kept = ContributionAccepted if fresh else ContributionHeld
        run.note(
            kept(
                island=member.island_id,
                fragment=p,
                round=contribution.round_id,
                from_step=steps.from_step,
                to_step=steps.to_step,
            )
        )

    def _admit(self, member: Member, contribution: Contribution, event: Received) -> Admission:
        run, p = self._run, contribution.fragment_id
        if run.phase is Phase.ENDED:
            return Admission(fate=Fate.REFUSED, reason=Reason.RUN_ENDED, detail="the run is over", first=False)
        life, steps = run.books.ledger.life(member.island_id, member.incarnation), contribution.steps
        fragment = run.model.fragments[p]
        misplaced = run.books.data.refusal(member.island_id, p, contribution.data, steps.steps)
        admission = admit(
            contribution,
            flaw=event.flaw,
            quarantined=run.fleet.quarantine.why(member.island_id, run.now_s),
            life=life,
            account=run.books.ledger.account(member.island_id, member.incarnation, p),
            current_version=fragment.version,
            oldest_allowed=fragment.oldest_allowed(run.config, run.now_s),
            tokens_per_step=member.tokens_per_step or run.config.max_tokens_per_step,
            most_steps=life.most_steps(run.now_s - member.counted_at_s),
            free_bytes=run.model.held_bytes - run.model.waiting_bytes(),
            payload_bytes=event.payload_bytes,
            misplaced=misplaced,
            crowded=fragment.crowded(member.island_id, len(contribution.data)),
        )
        closed = contribution.round_id not in run.schedule.open_rounds and run.phase is Phase.RUNNING
        if closed and not run.config.hold and admission.fate is Fate.WAITING and admission.first:
            detail = f"round {contribution.round_id} has closed, and the recipe holds nothing for the next one"
            return Admission(fate=Fate.REFUSED, reason=Reason.LATE, detail=detail)
        return admission

    def _answer(self, member: Member, contribution: Contribution, admission: Admission) -> None:
        """Tells an island at once that its contribution was refused, is to be sent again, or was known."""
        run, p, steps = self._run, contribution.fragment_id, contribution.steps
        if admission.first:
            assert admission.reason is not None
            refused = admission.fate is Fate.REFUSED
            if refused:
                run.fleet.count_refusal(admission.reason, member)
                if admission.reason not in _UNBOOKED:
                    run.books.ledger.refuse(member.island_id, member.incarnation, p, steps, admission.reason)
                run.offence(member, admission.reason, steps.from_step)
            round_ = run.schedule.open_rounds.get(contribution.round_id)
            if round_ is not None and (refused or admission.reason is Reason.QUEUE_FULL):
                # Its answer is in, worth nothing; or there is room for it only once this round has closed.
                round_.answer_nothing(member.island_id)
            answer = ContributionRefused if refused else ContributionRetry
            run.note(
                answer(
                    island=member.island_id,
                    fragment=p,
                    from_step=steps.from_step,
                    to_step=steps.to_step,
                    reason=admission.reason,
                    detail=admission.detail,
                )
            )
        merging = run.model.fragments[p].in_commit(member.island_id, member.incarnation, steps.from_step)
        fate = Fate.WAITING if merging else admission.fate
        _resolve(member, p, steps, fate, admission.reason, admission.detail)
        self._notices.tell(member)

    # --- as their round closes --------------------------------------------------------------------------------

    def let_in(self, round_: Round, fragment: Fragment) -> list[tuple[Offer, float]]:
        """Returns the contributions of a closing round, and the factors of their lengths.

        What has become too old while it was held is refused here, and what is too long: only now can it be compared
        with what the others sent.
        """
        run = self._run
        young: list[Offer] = []
        oldest = fragment.oldest_allowed(run.config, run.now_s)
        for c in round_.in_merge_order():
            stale = too_stale(c.trained_on, fragment.version, oldest)
            if stale:
                self.refuse_waiting(c, Reason.STALE, stale)
            else:
                young.append(c)
        if not young:
            return []
        fleet = run.fleet.members.responsive(run.now_s) - run.fleet.quarantine.out(run.now_s)
        restarts = fragment.norms.restarts
        length = run.model.length(round_.fragment_id) if fragment.norms.warming_up else 0.0
        findings = fragment.norms.judge(
            young, fleet, run.config.outlier_factor, length=length, levelled=run.config.trusts
        )
        if fragment.norms.restarts > restarts:
            norms = {c.island_id: c.norm for c in young}
            run.note(NormsRestarted(fragment=round_.fragment_id, round=round_.round_id, norms=norms))
        kept: list[tuple[Offer, float]] = []
        for c, finding in zip(young, findings, strict=True):
            if finding.refused:
                self.refuse_waiting(c, Reason.OUTLIER, finding.refused)
            else:
                kept.append((c, finding.scale))
                if run.fleet.quarantine.behaved(c.island_id, run.now_s):
                    run.note(IslandReleased(island=c.island_id))
                    run.record.save()
        return kept

    def refuse_waiting(self, c: Offer, reason: Reason, detail: str) -> None:
        """Refuses a contribution that had been let in."""
        run = self._run
        run.books.ledger.refuse(c.island_id, c.incarnation, c.fragment_id, c.steps, reason)
        run.books.data.batches.refuse(c.fragment_id, c.data)
        member = run.fleet.members[c.island_id]
        run.fleet.count_refusal(reason, member)
        if member.incarnation == c.incarnation:
            run.offence(member, reason, c.steps.from_step)
            _resolve(member, c.fragment_id, c.steps, Fate.REFUSED, reason, detail)
        run.note(ContributionRefused(island=c.island_id, fragment=c.fragment_id, reason=reason, detail=detail))


def _resolve(member: Member, p: int, steps: StepRange, fate: Fate, reason: Reason | None, detail: str) -> None:
    """Notes the resolution of a contribution, to be sent with the island's next state."""
    resolution = Resolution(
        fragment_id=p, from_step=steps.from_step, to_step=steps.to_step, fate=fate, reason=reason, detail=detail
    )
    member.resolutions.append(resolution)
