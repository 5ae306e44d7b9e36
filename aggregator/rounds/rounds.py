"""Opens and closes rounds, and weighs their contributions (reference.md, sections 4.1, 4.4 and 4.5).

The stages of a fragment are a table (:data:`aggregator.state.fragment.STAGES`). Contributions are admitted at any time
(:mod:`aggregator.rounds.intake`): into the open round, or held for the next one. What follows the order to merge is in
:mod:`aggregator.rounds.commits`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from aggregator.interface.events import Merge, Part
from aggregator.interface.leader_notes import BrokerBack
from aggregator.interface.merge_rule import MergeRound, Offered, Question, load
from aggregator.interface.notes import RoundCancelled, RoundClosed, RoundOpened, VersionsAdapted
from aggregator.rounds.brokers import Outage
from aggregator.rounds.intake import Intake
from aggregator.rounds.notices import Notices
from aggregator.rules.outliers import Offer
from aggregator.rules.pacing import Lockstep, Pacer
from aggregator.rules.quorum import Decision, Verdict, Waits
from aggregator.rules.staleness import presence_factor, weighed
from aggregator.state.fragment import Fragment
from aggregator.state.round import Round
from aggregator.state.run import Run
from broker.chunks.choices import VersionCodec
from broker.wire.messages import Codec, Merged, Pacing, Phase

#: Time for islands that a broker's outage cut off to come back in, in heartbeats: measured are up to 2.7.
HEARTBEATS_TO_SETTLE = 3
#: Likewise for those that a leader finds in its store: their broker may have been away with the one before.
HEARTBEATS_TO_RETURN = 2


class Fleet(NamedTuple):
    """The part of the fleet's state that decides on every open round.

    Attributes:
        live_ids: Ids of the live islands.
        responsive: Of these, those that rounds wait for, without those in quarantine.
        live: How many of them are eligible and make steps, so that a round can have their answers.
        waits: How long a round waits now.
    """

    live_ids: frozenset[str]
    responsive: frozenset[str]
    live: int
    waits: Waits


class Rounds:
    """All rounds of a run."""

    def __init__(self, run: Run, notices: Notices, intake: Intake) -> None:
        self._run = run
        self._notices = notices
        self._intake = intake
        self._rule = load(run.config.merge)  # of one's own, if any
        self._settled_at_s = -math.inf  # before that, islands are on their way back
        self._settles = False  # and none of their rounds has closed since they were cut off
        self._trusted_of: tuple[frozenset[str], frozenset[str]] = frozenset(), frozenset()  # responsive, in quarantine
        self._trusted: frozenset[str] = frozenset()  # the first without the second
        self._versions: VersionCodec | None = None  # until there is a manifest
        self._looked_at: Fleet | None = None  # with which all open rounds were looked at last
        self._recheck_at_s = math.inf  # when one of them is decided by the time alone
        if run.phase is Phase.RUNNING:
            self._settle(HEARTBEATS_TO_RETURN)

    # --- opening and closing ----------------------------------------------------------------------------------

    def advance(self) -> None:
        """Closes the rounds that are decided, and opens those that are due; registers when to look again."""
        run, moments = self._run, list[float]()
        changed = bool(run.schedule.open_rounds) and self._close_decided()
        if run.phase is Phase.RUNNING and run.schedule.pacer is not None:
            changed = self._open_due(run.schedule.pacer, moments) or changed
        if run.schedule.open_rounds:
            if changed:
                self._recheck_at_s = min(self._rechecks_s())
                self._looked_at = None
            moments.append(self._recheck_at_s)
            death_s = run.fleet.members.next_death_s(run.now_s)
            moments += [] if death_s is None else [death_s]
        run.deadlines.put("rounds", min(moments, default=math.inf))

    def _close_decided(self) -> bool:
        """Closes the open rounds that are decided; returns whether there was one.

        With most messages nothing has changed that decides on a round, and its time has not come.
        """
        run, fleet = self._run, self._fleet()
        same = fleet == self._looked_at and run.now_s < self._recheck_at_s
        if same and not any(round_.changed for round_ in run.schedule.open_rounds.values()):
            return False
        self._looked_at, self._recheck_at_s, closed = fleet, math.inf, False
        for round_ in list(run.schedule.open_rounds.values()):
            if closed:  # islands that were missed or refused, and the time to the quorum, concern the others too
                fleet = self._fleet()
            waited_for = self._waited_for(round_, fleet)
            decision = round_.look(run.now_s, waited_for, fleet.live, fleet.waits)
            if decision.recheck_at_s is not None:
                self._recheck_at_s = min(self._recheck_at_s, decision.recheck_at_s)
            else:
                self._close(round_, decision, waited_for)
                closed = True
        return closed

    def _open_due(self, pacer: Pacer | Lockstep, moments: list[float]) -> bool:
        """Opens the rounds that are due, as many as may be open; returns whether there was one.

        Where more may be open it adds to ``moments`` when the next one falls due.
        """
        run, schedule, opened = self._run, self._run.schedule, False
        moving, steps = len(run.model.moving), schedule.interval.steps
        allowed = schedule.round_times.rounds_allowed(moving, schedule.step_s, steps)
        while len(schedule.open_rounds) < allowed and run.model.num_busy() < allowed:
            free = run.model.free()
            due = pacer.most_overdue(run.now_s, free) if self._may_open() else None
            if due is None:
                waits_s = pacer.due_in_s(free, run.now_s).values()
                # One millisecond late rather than early: an estimate that falls short would wake us again at once.
                moments += [run.now_s + wait_s + 0.001 for wait_s in waits_s]
                break
            pacer.opened(due, run.now_s)
            self.open(due)
            opened = True
        return opened

    def _rechecks_s(self) -> Iterator[float]:
        """Yields when each open round is to be looked at again: now, if one that has closed decides it."""
        now_s, fleet = self._run.now_s, self._fleet()
        for round_ in self._run.schedule.open_rounds.values():
            looked = round_.peek(now_s, self._waited_for(round_, fleet), fleet.live, fleet.waits)
            yield now_s if looked.recheck_at_s is None else looked.recheck_at_s

    def _may_open(self) -> bool:
        """Returns True if a round may open; in lockstep with a ready island, the first time with all expected."""
        run, c = self._run, self._run.config
        if c.pacing is not Pacing.LOCKSTEP:
            return True
        begun = any(version > 0 for version in run.versions)
        ready = (m.ready for m in run.fleet.members.live(run.now_s))
        return any(ready) if begun else sum(ready) >= (c.quorum or c.islands)

    def open(self, p: int, *, flush: bool = False) -> None:
        """Opens a round: everyone who can train is asked, and what was held joins it."""
        run, fragment = self._run, self._run.model.fragments[p]
        asked = [m for m in run.fleet.members.live(run.now_s) if m.ready]
        round_ = Round(
            round_id=run.schedule.next_round_id(),
            fragment_id=p,
            opened_at_s=run.now_s,
            asked=frozenset(m.island_id for m in asked),
            flush=flush,
        )
        for admitted in fragment.held:
            round_.offer(admitted)
        fragment.open(round_)
        run.schedule.open_rounds[round_.round_id] = round_
        run.schedule.round_times.opened(round_.round_id, run.now_s)
        held = len(round_.contributions)
        run.note(RoundOpened(round=round_.round_id, fragment=p, asked=len(asked), held=held, flush=flush))
        self._notices.announce(asked, round_.round_id)

    def _close(self, round_: Round, decision: Decision, waited_for: frozenset[str]) -> None:
        """Closes a round, and orders the merge of what it has brought, if anything."""
        run, fragment = self._run, self._run.model.fragments[round_.fragment_id]
        interval, self._settles = run.schedule.interval, False
        del run.schedule.open_rounds[round_.round_id]
        fragment.closed_at_s = run.now_s
        missing = sorted(round_.owing(waited_for))
        for island_id in missing:
            run.fleet.members[island_id].missed()
        timed_out = run.now_s - round_.opened_at_s >= run.config.round_timeout_s
        if round_.quorum_met_at_s is not None and not timed_out:
            run.schedule.round_times.quorum_met(round_.quorum_met_at_s - round_.opened_at_s)
        parts = self._weigh(round_, fragment) if decision.verdict is Verdict.CLOSE else ()
        number, p, reason = round_.round_id, round_.fragment_id, decision.reason
        if not parts:
            run.note(RoundCancelled(round=number, fragment=p, reason=reason))
            fragment.cancel()
            return
        run.note(RoundClosed(round=number, fragment=p, reason=reason, missing=missing))
        round_.closed_because, round_.missing = decision.reason, missing
        version = fragment.version + 1
        merge = Merge(
            round_id=round_.round_id,
            fragment_id=round_.fragment_id,
            fragment_version=version,
            parts=parts,
            outer_rule=interval.outer_rule(run.config.outer_rule, fragment.interval),
            capped=run.config.caps,
            version_codec=self._version_codec(round_.fragment_id),
        )
        if round_.question is not None:
            merge = replace(merge, factors=round_.question.factors, compares=round_.question.own.rule.compares)
        fragment.close(merge, interval.changed)
        run.emit(merge)

    def _version_codec(self, p: int) -> Codec:
        """Returns the number format of the next version of a fragment, which follows the links down."""
        run = self._run
        if self._versions is None:
            manifest = run.model.manifest
            assert manifest is not None
            self._versions = VersionCodec(run.config, manifest.sizes, run.model.moving, manifest.moving)
        beats = [member.heartbeat for member in run.fleet.members.live(run.now_s)]
        down = self._versions.merges(p, beats, run.now_s)
        if down is not None:
            run.note(VersionsAdapted(codec=str(self._versions.codec), down=down))
        return self._versions.codec

    def _question(self, fragment_id: int, kept: Sequence[Offer], merged: Sequence[Merged]) -> Question | None:
        """Returns the question to the run's own merge rule; None if the run has none."""
        run, fragment = self._run, self._run.model.fragments[fragment_id]
        if self._rule is None:
            return None
        total = math.fsum(w.token_weight for w in merged)
        offered = tuple(
            Offered(
                island_id=w.island_id,
                tokens=w.steps.tokens,
                steps=w.steps.steps,
                staleness=w.staleness,
                share=w.token_weight / total if total else 0.0,
                length=(c.norm or 0.0) * w.staleness_weight,
            )
            for c, w in zip(kept, merged, strict=True)
        )
        version, shard = fragment.version + 1, run.config.shard
        asked = MergeRound(shard=shard, fragment_id=fragment_id, fragment_version=version, contributions=offered)
        return Question(own=self._rule, round=asked, state=fragment.rule_state)

    def _weigh(self, round_: Round, fragment: Fragment) -> tuple[Part, ...]:
        """Fixes the weights of a closing round."""
        run = self._run
        let_in = self._intake.let_in(round_, fragment)
        if not let_in:
            return ()
        kept, scales = zip(*let_in, strict=True)
        present = {c.island_id for c in kept}
        live = run.fleet.eligible(run.now_s) | present
        presence = presence_factor(len(present), len(live), run.config.presence_exponent)
        if run.config.trusts:
            round_.trust = run.books.trust.factors(sorted(present))
        most, paces = run.fleet.claims.bounds(present) if run.config.caps else (None, None)
        round_.merged = weighed(
            kept,
            fragment.version,
            run.config.staleness_exponent,
            presence,
            is_fresh=round_.is_fresh,
            scales=scales,
            most_tokens_per_step=most,
            paces=paces,
            capped=run.config.caps,
            trust=round_.trust,
        )
        round_.question = self._question(round_.fragment_id, kept, round_.merged)
        parts = [
            Part(
                island_id=c.island_id,
                steps=c.steps,
                payload=c.payload,
                token_weight=w.token_weight,
                staleness_weight=w.staleness_weight,
            )
            for c, w in zip(kept, round_.merged, strict=True)
        ]
        return tuple(parts)

    # --- after an outage --------------------------------------------------------------------------------------

    def start_over(self, outage: Outage) -> None:
        """After a broker outage, treats its islands as just heard: they could not answer meanwhile.

        If there was no other broker (it was alone), open rounds count as just opened, too, and stay open until all
        islands have had some heartbeats to come back in. Otherwise every open round would close with the first
        island that is back, and miss the others. Islands that were silent before the outage are not helped, and a
        broker that is lost again and again gives no more time until a round has closed.
        """
        run = self._run
        heard_from_s = outage.since_s - HEARTBEATS_TO_SETTLE * run.fleet.heartbeat_interval_s(run.now_s)
        for member in run.fleet.members.live(outage.since_s):
            if member.last_seen_s >= heard_from_s and (
                outage.alone or run.fleet.routes.to(member.island_id) in (None, outage.broker)
            ):
                member.heard(run.now_s)
                member.answered()
        if outage.alone:
            self.resume()
            if not self._settles:
                self._settle(HEARTBEATS_TO_SETTLE)
        run.note(BrokerBack(broker=outage.broker, open_rounds=len(run.schedule.open_rounds)))

    def _settle(self, heartbeats: int) -> None:
        """Gives rounds time: until then none closes because its time is over."""
        self._settles = True
        self._settled_at_s = self._run.now_s + heartbeats * self._run.fleet.heartbeat_interval_s(self._run.now_s)

    def resume(self) -> None:
        """Treats open rounds as just opened, after a time in which nobody could answer or be heard."""
        run = self._run
        for round_ in run.schedule.open_rounds.values():
            round_.opened_at_s, round_.quorum_met_at_s, round_.changed = run.now_s, None, True
            run.schedule.round_times.opened(round_.round_id, run.now_s)

    # --- measures ---------------------------------------------------------------------------------------------

    def _fleet(self) -> Fleet:
        """Returns what decides on every open round; its sets are the same objects while they stay the same."""
        run, now_s = self._run, self._run.now_s
        waits = run.schedule.round_times.waits(run.schedule.step_s, run.schedule.interval.steps, self._settled_at_s)
        live_ids, responsive = run.fleet.members.live_ids(now_s), run.fleet.members.responsive(now_s)
        out = run.fleet.quarantine.out(now_s)
        live = len(live_ids) - len((out | run.fleet.members.standing) & live_ids)
        if out:
            if self._trusted_of[0] is not responsive or self._trusted_of[1] != out:
                self._trusted_of, self._trusted = (responsive, out), responsive - out
            responsive = self._trusted
        return Fleet(live_ids, responsive, live, waits)

    @staticmethod
    def _waited_for(round_: Round, fleet: Fleet) -> frozenset[str]:
        """Returns the islands that hold up a round: responsive ones; in a flush or without any, all live ones."""
        none = round_.flush or round_.asked.isdisjoint(fleet.responsive)
        return fleet.live_ids if none else fleet.responsive
