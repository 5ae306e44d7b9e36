"""Commits: turn new parameters in memory into a durable version with its ledger.

The order contract is *persist before publish*: a version is sent only after its commit is reported durable. What could
not be made durable is asked for again, and meanwhile nothing of it is known to anybody.

A merge goes on from the version before, in its file. Where that is not what was written, its fragment stands still, it
alone: the brokers are asked for the version, whose name proves it, and the same merge is tried again with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from aggregator.interface.events import Commit, Computed, MergeFailed, Persist, Persisted, PersistFailed, Received, Send
from aggregator.interface.notes import (
    FleetAgrees,
    FleetDiverging,
    IntervalChanged,
    Merging,
    VersionCommitted,
    VersionDamaged,
    VersionMended,
    VersionNotDurable,
)
from aggregator.rounds.publishing import Publishing
from aggregator.rules.trust import Agreement
from aggregator.state.fragment import Fragment, Stage
from aggregator.state.round import Round
from aggregator.state.run import Run
from broker.wire.messages import (
    AGGREGATOR,
    BROKER,
    Merged,
    Pacing,
    Phase,
    Standings,
    Trusted,
    Version,
    WantBack,
)

PERSIST_RETRY_S = 1.0
#: Where the store has lost bytes of a version: a broker sends all of it each time.
MERGE_RETRY_S = 10.0


class Commits:
    """The commits of all fragments, seeds included."""

    def __init__(self, run: Run, publishing: Publishing) -> None:
        self._run = run
        self._publishing = publishing
        self._others_know = False  # other shards, that not all islands are plainly trusted
        self._failed: set[int] = set()  # fragments with a merge or a write that is to be asked for again

    def advance(self) -> None:
        """Asks again for merges and writes that failed."""
        if not self._failed:
            return
        run, again_s = self._run, math.inf
        for p in sorted(self._failed):
            fragment = run.model.fragments[p]
            if fragment.persist_again_at_s is not None and run.now_s >= fragment.persist_again_at_s:
                fragment.persist_again_at_s = None
                assert fragment.commit is not None
                fragment.write_asked_at_s = run.now_s
                run.emit(Persist(commit=fragment.commit))
            if fragment.merge_again_at_s is not None and run.now_s >= fragment.merge_again_at_s:
                fragment.merge_again_at_s = run.now_s + MERGE_RETRY_S
                assert fragment.merge is not None
                run.emit(fragment.merge)  # somebody may have put the file right
            moments = [at_s for at_s in (fragment.persist_again_at_s, fragment.merge_again_at_s) if at_s is not None]
            if not moments:
                self._failed.remove(p)
            again_s = min([again_s, *moments])
        run.deadlines.put("commits", again_s)

    def merge_failed(self, event: MergeFailed) -> None:
        """Stops a fragment whose newest version the store has damaged, and asks brokers for that version."""
        run, p = self._run, event.fragment_id
        fragment = run.model.fragments[p]
        if fragment.merge is None or fragment.merge.fragment_version != event.fragment_version:
            return
        self._failed.add(p)
        fragment.merge_again_at_s = run.now_s + MERGE_RETRY_S
        sentence = f"fragment {p} stands still, until a broker gives its newest version back: {event.detail}"
        if run.troubles.begin(f"damaged {p}", sentence, run.now_s):
            run.note(VersionDamaged(fragment=p, version=fragment.version, detail=event.detail))
        run.emit(Send(to=BROKER, message=WantBack(fragment_id=p)))

    def given_back(self, event: Received) -> None:
        """Tries a merge again with the version that a broker gave back, after the store lost bytes of it."""
        run, version = self._run, event.envelope.message
        assert isinstance(version, Version)
        fragment = run.model.fragments.get(version.fragment_id)
        if fragment is None or not fragment.stands_still:
            return
        named = version.fragment_version, version.digest, version.base
        if named == (fragment.version, fragment.digest, None):
            fragment.merge_again_at_s = run.now_s + MERGE_RETRY_S
            assert fragment.merge is not None
            run.emit(replace(fragment.merge, given_back=version.payload))

    def computed(self, event: Computed) -> None:
        """Asks for the commit of new parameters, together with the books as they will be then."""
        run, books, p = self._run, self._run.books, event.fragment_id
        fragment = run.model.fragments[p]
        if fragment.stage is not Stage.COMPUTING or run.phase is Phase.ENDED:
            return
        assert event.fragment_version == fragment.version + 1, (event, fragment.version)
        round_, rule = fragment.round, dict[str, Any]()
        lasted_s = run.troubles.end(f"damaged {p}", run.now_s)
        if lasted_s is not None:
            run.note(VersionMended(fragment=p, version=fragment.version, after_s=round(lasted_s, 3)))
        if round_ is not None:
            if lasted_s is None:
                run.schedule.interval.merging.done(fragment.closed_at_s, run.now_s)
            rule = _asked(fragment, round_, event.cosines)
            self._book(p, round_)
            self._compare(event, round_)
            round_.release()
        commit = Commit(
            fragment_id=p,
            fragment_version=event.fragment_version,
            epoch=run.epoch,
            digest=event.digest,
            round_id=round_.round_id if round_ is not None else run.origin.seeding_id,
            contributions=round_.merged if round_ is not None else (),
            ledger={
                **books.ledger.slice(p),
                "norms": fragment.norms.record(),
                "data": books.data.batches.slice(p),
                # What directions have shown, once there is any: tapes of earlier releases have none.
                **({"trust": books.trust.record(), "course": asdict(books.course)} if books.trust.rounds else {}),
                **({"interval": fragment.interval} if fragment.interval else {}),
                **rule,
            }
            if p in run.model.moving
            else {},
        )
        fragment.computed(commit)
        fragment.write_asked_at_s = run.now_s
        run.emit(Persist(commit=commit))

    def _book(self, p: int, round_: Round) -> None:
        """Books what a round has merged."""
        run = self._run
        for merged in round_.merged:
            run.books.ledger.merge(merged.island_id, merged.incarnation, p, merged.steps)
            run.books.data.batches.merge(p, merged.data)
        islands = {m.island_id for m in round_.merged}
        live = run.fleet.eligible(run.now_s) | islands
        run.books.ledger.count(p, len(islands), len(islands) / len(live), _mean_staleness(round_.merged))

    def _compare(self, event: Computed, round_: Round) -> None:
        """Learns from the directions in a merge; an island that points against the others is kept out."""
        run, merge = self._run, self._run.model.fragments[event.fragment_id].merge
        if merge is None:
            return
        round_.momentum_cosine = event.momentum_cosine
        if event.momentum_cosine is not None:
            run.books.course.moved(event.momentum_cosine, len(run.model.moving))
        if not event.cosines:
            return
        compared = [merge.parts[i].island_id for i in merge.compared]
        found = round_.agreement = run.books.trust.learn(compared, event.cosines)
        if found is None:
            return
        self._judge_course(found.level)
        if not run.config.trusts:
            return
        for island_id, share in found.opposed.items():
            run.opposed(island_id, f"agreement {share:.0%} of the usual")
        rows = run.books.trust.rows() if run.config.shards > 1 else []
        if rows or self._others_know:
            self._others_know = bool(rows)
            islands = tuple(Trusted(island_id=i, weight=weight, alarms=alarms) for i, weight, alarms in rows)
            run.emit(Send(to=AGGREGATOR, message=Standings(shard=run.config.shard, islands=islands)))

    def _judge_course(self, level: float) -> None:
        """Says when the islands' directions come apart, which they do before the loss rises."""
        run, course = self._run, self._run.books.course
        course.learn(level, len(run.model.moving))
        agreement, usual = round(course.present, 4), round(course.usual, 4)
        if course.fallen:
            sentence = (
                f"the islands' directions agree by {course.present:.2f}, by {course.usual:.2f} until lately: training "
                "begins to diverge; look at the losses of the islands, restart with a lower outer_learning_rate, or "
                "with a lower learning rate of the task, or go back: `snapshots restore`"
            )
            if run.troubles.begin("divergence", sentence, run.now_s):
                run.note(FleetDiverging(agreement=agreement, usual=usual))
        elif (lasted_s := run.troubles.end("divergence", run.now_s)) is not None:
            run.note(FleetAgrees(agreement=agreement, usual=usual, after_s=round(lasted_s, 3)))

    def told(self, event: Received) -> None:
        """Takes another shard's weights and alarms of islands; quarantines those that it has quarantined."""
        run, said = self._run, event.envelope.message
        assert isinstance(said, Standings)
        if said.shard == run.config.shard or not run.config.trusts:
            return
        known = [each for each in said.islands if run.fleet.members.get(each.island_id) is not None]
        rows = {each.island_id: (each.weight, each.alarms) for each in known}
        for island_id in run.books.trust.told(said.shard, rows):
            run.opposed(island_id, f"shard {said.shard} has found it")

    def persisted(self, event: Persisted) -> None:
        """Publishes a version whose commit has become durable; version 0 waits until all of it is there."""
        run, fragment = self._run, self._run.model.fragments[event.fragment_id]
        commit = fragment.commit
        if commit is None or commit.fragment_version != event.fragment_version:
            return
        run.disk_works()
        round_ = fragment.persisted(run.now_s, run.config.max_staleness_s)
        if round_ is None:
            return
        fragment.flushed = round_.flush
        run.schedule.round_times.committed(round_.opened_at_s, fragment.closed_at_s, run.now_s)
        if not run.config.failover:  # on their way to standbys several versions are at a time
            run.schedule.interval.writing.done(fragment.write_asked_at_s, run.now_s)
        self._publishing.publish(event.fragment_id, merged=True)
        self._note_commit(commit, round_)
        self._follow_stages_and_journeys()

    def _follow_stages_and_journeys(self) -> None:
        """Opens rounds as far apart as stages and journeys want, if this aggregator sets the schedule."""
        run = self._run
        if run.config.pacing is not Pacing.ADAPTIVE or run.phase is not Phase.RUNNING:
            return
        schedule, interval = run.schedule, run.schedule.interval
        was = interval.steps
        because = interval.follow(schedule.median_step_s(run.now_s), schedule.round_times.there_and_back_s)
        if because:
            schedule.set_interval(interval.steps, run.now_s)
            run.note(IntervalChanged(steps=interval.steps, was=was, because=because))
            self._warn_of_rare_rounds(because)

    def _warn_of_rare_rounds(self, because: str) -> None:
        """Says when islands are alone for much longer than the recipe says."""
        run, interval = self._run, self._run.schedule.interval
        if not interval.far_longer:
            run.troubles.end("interval", run.now_s)
            return
        times = interval.steps / interval.recipe_steps
        sentence = (
            f"a round every {interval.steps} steps, {times:.1f} times as many as the recipe says: {because}; take "
            "fewer or nearer islands, a faster disk, more --shards, or a larger --sync-interval"
        )
        run.troubles.begin("interval", sentence, run.now_s)

    def _note_commit(self, commit: Commit, round_: Round) -> None:
        run = self._run
        islands = {m.island_id for m in commit.contributions}
        live = run.fleet.eligible(run.now_s) | islands
        agreement, merged = round_.agreement, commit.contributions
        merging = [_merging(m, agreement, round_.trust) for m in merged]
        tokens, staleness = [m.tokens for m in merging], [m.staleness for m in merged]
        committed = VersionCommitted(
            fragment=commit.fragment_id,
            version=commit.fragment_version,
            round=commit.round_id,
            islands=len(islands),
            live=len(live),
            tokens=sum(tokens),
            staleness_mean=round(_mean_staleness(merged), 3),
            staleness_max=round(max(staleness), 3),
            reason=round_.closed_because,
            missing=round_.missing,
            took_s=round(run.now_s - round_.opened_at_s, 4),
            digest=commit.digest,
            contributions=merging,
            agreement=None if agreement is None else round(agreement.level, 4),
            momentum_cosine=round_.momentum_cosine,
        )
        run.note(committed)

    def persist_failed(self, event: PersistFailed) -> None:
        """Asks again for a commit that failed; until it is durable nothing is published."""
        run, fragment = self._run, self._run.model.fragments[event.fragment_id]
        if fragment.commit is None or fragment.commit.fragment_version != event.fragment_version:
            return
        self._failed.add(event.fragment_id)
        fragment.persist_again_at_s = run.now_s + PERSIST_RETRY_S
        run.disk_failed(event.detail)
        failed = VersionNotDurable(
            fragment=event.fragment_id, version=event.fragment_version, detail=event.detail, retry_s=PERSIST_RETRY_S
        )
        run.note(failed)


def _asked(fragment: Fragment, round_: Round, cosines: Sequence[float]) -> dict[str, Any]:
    """Multiplies weights by those of the run's own merge rule; returns its part of the commit."""
    if round_.question is None:
        return {}
    factors, fragment.rule_state = round_.question.answer(cosines)
    round_.merged = tuple(
        replace(m, staleness_weight=m.staleness_weight * factor, merge_weight=m.merge_weight * factor)
        for m, factor in zip(round_.merged, factors, strict=True)
    )
    return {"rule": {"merge": round_.question.own.name, "state": json.loads(fragment.rule_state)}}


def _mean_staleness(merged: Sequence[Merged]) -> float:
    total, steps = 0.0, 0
    for m in merged:
        its = m.steps.steps
        total += m.staleness * its
        steps += its
    return total / steps


def _merging(m: Merged, agreement: Agreement | None, trust: Mapping[str, float]) -> Merging:
    found = {} if agreement is None else agreement.islands
    return Merging(
        agreement=round(found[m.island_id], 4) if m.island_id in found else None,
        trust=round(trust[m.island_id], 4) if found and m.island_id in trust else None,
        island=m.island_id,
        incarnation=m.incarnation,
        steps=(m.steps.from_step, m.steps.to_step),
        tokens=m.steps.tokens,
        staleness=round(m.staleness, 6),
        token_weight=m.token_weight,
        merge_weight=m.merge_weight,
        fresh=m.fresh,
    )
