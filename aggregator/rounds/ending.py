"""Ends a run: islands stop, every fragment is flushed, and the rest is counted as wasted.

See docs/reference.md, section 4.9.
"""

from __future__ import annotations

import math

from aggregator.interface.events import Received
from aggregator.interface.notes import RunEnded, RunFlushIncomplete, RunFlushing, RunLingers
from aggregator.rounds.intake import Intake
from aggregator.rounds.notices import Notices
from aggregator.rounds.publishing import Publishing
from aggregator.rounds.roster import Adopter, Keeper
from aggregator.rounds.rounds import Rounds
from aggregator.state.fragment import Stage
from aggregator.state.members import Member
from aggregator.state.run import Run
from broker.wire.messages import Heartbeat, Phase, Reason

#: A flush that brings no version for so many round timeouts ends without what it still waits for.
FLUSH_TIMEOUTS = 5
#: And after so many whatever it brings: what islands hold takes its time on a slow link, and one that lies has no end.
FLUSH_TIMEOUTS_MOST = 100
#: Why a run ends before its target.
ALL_CLOSED = "every island has closed its training loop"
#: How long an ended run stays up for islands that still fetch the last versions.
LINGER_S = 10.0
#: And at most, while a broker that answers lacks one of them, without which islands cannot end, or while another shard
#: has not heard of the end.
LINGER_MOST_S = 600.0


class Ending:
    """The flush, and what comes after."""

    def __init__(
        self,
        run: Run,
        notices: Notices,
        intake: Intake,
        rounds: Rounds,
        roster: Keeper | Adopter,
        publishing: Publishing,
    ) -> None:
        self._run = run
        self._roster = roster
        self._publishing = publishing
        self.reached = False  #: a broker knows this process, and so that the run has ended: it tells who comes later
        self._notices = notices
        self._intake = intake
        self._rounds = rounds
        self._flush_began_s: float | None = None
        self._flush_moved_s = 0.0  # when it brought something last
        self._flush_versions = 0  # of all fragments together, by then
        #: Of the record that says that the run has ended; the first one of a successor does.
        self._ended_serial = int(run.phase is Phase.ENDED)
        # In a process that begins with an ended run: islands, and brokers, that have not heard of it still may.
        self._begins_ended = run.phase is Phase.ENDED
        self._linger_until_s: float | None = run.now_s + LINGER_S if self._begins_ended else None
        self._linger_most_s = run.now_s + LINGER_MOST_S

    def advance(self) -> None:
        """Begins the flush at the target, carries it on, and ends the run when it is done."""
        run = self._run
        if run.phase is Phase.RUNNING and (why := self._why_now()):
            run.phase = Phase.FLUSHING
            self._flush_began_s = self._flush_moved_s = run.now_s
            self._flush_versions = self._versions()
            trained, target = run.books.ledger.trained_tokens(), run.config.total_tokens
            run.note(RunFlushing(reason=why, trained_tokens=trained, target=target))
            if why == ALL_CLOSED:
                sentence = f"ends after {trained} of {target or 'any number of'} tokens: {why}"
                run.troubles.begin("early end", sentence, run.now_s)
            if run.config.shards > 1:
                run.record.save()  # which tells the others
            self._notices.tell_all()
        if run.phase is Phase.FLUSHING and run.other_shards.told_phase is Phase.ENDED and not run.model.num_busy():
            self._end()  # as shard 0 has
        elif run.phase is Phase.FLUSHING:
            self._flush()
        elif run.phase is Phase.ENDED and self._linger_until_s is not None:
            # All of them silent at once is more likely a network that is down: only who has said so is gone. And the
            # record that says how it ended goes to the standbys too: none of them must begin where this one ended.
            gone = (
                not self._begins_ended
                and all(member.left for member in run.fleet.members)
                and run.record.durable_serial >= run.record.saved_serial
                and run.other_shards.agreed_serial >= self._ended_serial
            )  # the other shards need to know of the end, and no more
            if gone:
                self._run.finish("every island has left")
            elif run.now_s >= self._linger_until_s:
                self._linger_on()
        if run.phase is not Phase.RUNNING:
            self._register()

    def _register(self) -> None:
        """Registers when :meth:`advance` may have something to do."""
        moments = [] if self._linger_until_s is None else [self._linger_until_s]
        if (began_s := self._flush_began_s) is not None:
            ends = (
                began_s + self._run.config.round_timeout_s,
                self._patient_until_s(began_s),
                self._others_until_s(began_s),
            )
            moments += [end_s for end_s in ends if end_s > self._run.now_s]
        self._run.deadlines.put("ending", min(moments, default=math.inf))

    def heard(self, member: Member, beat: Heartbeat, event: Received) -> None:
        """Takes note of an island's heartbeat and answers it; its counters may be the last to wait for."""
        self.advance()
        self._close_gaps(member, beat, event.envelope.sequence)
        self._notices.tell(member)

    def _close_gaps(self, member: Member, beat: Heartbeat, sequence: int) -> None:
        """Records steps that a stopped island handed over, and whose fate a restart of the aggregator lost.

        It had nothing left when it answered the flush after it had stopped, and has nothing outstanding in a heartbeat
        sent after that: the fate of the rest was known to an earlier life of the aggregator and lost with it. What it
        answered before it had stopped says nothing of the step that it was at.
        """
        stopped_at = member.stopped_sequence
        if self._run.phase is not Phase.FLUSHING or not beat.stopped or stopped_at is None:
            return
        pending = {item.fragment_id for item in beat.outstanding}
        for p, emptied in member.emptied.items():
            if sequence > emptied > stopped_at and p not in pending:
                self._run.books.ledger.close_gap(member.island_id, member.incarnation, p)

    def _why_now(self) -> str:
        """Returns why it is time to end, empty if it is not; shard 0 decides that for all."""
        run, target = self._run, self._run.config.total_tokens
        if run.config.shard:
            return "shard 0 says so" if run.other_shards.told_phase in (Phase.FLUSHING, Phase.ENDED) else ""
        if target and run.books.ledger.counted_tokens() >= target:
            return "its tokens are trained"
        if run.fleet.members.all_closed and len(run.fleet.members) >= run.config.islands:
            return ALL_CLOSED
        return ""

    def _flush(self) -> None:
        run, config = self._run, self._run.config
        assert self._flush_began_s is not None
        if run.fleet.deaf(run.now_s):  # nobody could bring anything: it begins anew once somebody can
            self._flush_began_s = self._flush_moved_s = run.now_s
            for p in run.model.moving:
                run.model.fragments[p].flushed = False
            return
        running = any(self._trains(member) for member in run.fleet.members.live(run.now_s))
        if running and run.now_s < self._flush_began_s + config.round_timeout_s:
            return
        if (versions := self._versions()) != self._flush_versions:
            self._flush_versions, self._flush_moved_s = versions, run.now_s
        patient = run.now_s < self._patient_until_s(self._flush_began_s)
        if patient and not run.fleet.members.live(run.now_s) and not all(member.left for member in run.fleet.members):
            return  # they all fell silent at once: cut off, most likely, and they bring what is missing
        settled = True
        for p in run.model.moving:
            fragment = run.model.fragments[p]
            if fragment.stage is not Stage.IDLE:
                settled = settled and fragment.stands_still and not patient  # its newest version is the last one then
                continue
            missing = patient and self._missing(p)
            settled = settled and fragment.flushed and not missing
            # What a closed flush round did not bring is asked for again, at the pace of heartbeats.
            again = missing and run.now_s >= fragment.closed_at_s + config.heartbeat_interval_s
            if (again or not fragment.flushed) and run.model.num_busy() < config.rounds_in_flight:
                self._rounds.open(p, flush=True)
        run.model.flushed = settled
        if isinstance(self._roster, Keeper):
            over = run.now_s >= self._others_until_s(self._flush_began_s)
        else:  # shard 0 says when, unless it has gone, as the islands have
            over = not patient and not run.fleet.members.live(run.now_s)
        if settled and over:
            self._end()

    def _versions(self) -> int:
        """Grows with each version of each fragment."""
        return sum(self._run.model.fragments[p].version for p in self._run.model.moving)

    def _patient_until_s(self, began_s: float) -> float:
        """Returns the time at which a flush ends if it brings nothing more."""
        timeout_s = self._run.config.round_timeout_s
        return min(self._flush_moved_s + FLUSH_TIMEOUTS * timeout_s, began_s + FLUSH_TIMEOUTS_MOST * timeout_s)

    def _others_until_s(self, began_s: float) -> float:
        """Returns the time until which shard 0 waits for silent shards' flushes; each waits as long itself."""
        timeout_s, until_s = self._run.config.round_timeout_s, None
        if isinstance(self._roster, Keeper):
            until_s = self._roster.flushing_until_s(FLUSH_TIMEOUTS * timeout_s)
        if until_s is None:
            return began_s
        return min(max(until_s, began_s + FLUSH_TIMEOUTS * timeout_s), began_s + FLUSH_TIMEOUTS_MOST * timeout_s)

    def _end(self) -> None:
        run = self._run
        self._give_up_the_rest()
        run.phase = Phase.ENDED
        self._flush_began_s = None
        self._linger_until_s, self._linger_most_s = run.now_s + LINGER_S, run.now_s + LINGER_MOST_S
        run.note(RunEnded(**run.books.ledger.books().tokens()))
        self._ended_serial = run.record.save()
        self._notices.tell_all(absent=True)

    def _linger_on(self) -> None:
        """Prolongs the end for islands whose broker lacks some of the last versions.

        And for shards that were away and have not heard of the end: nobody else tells them.
        """
        run = self._run
        self._notices.tell_all(absent=True)
        theirs = {run.fleet.routes.to(member.island_id) for member in run.fleet.members.live(run.now_s)}
        lacking = [broker for broker in self._publishing.lacking(LINGER_S) if theirs & {broker, None}]
        shards = self._roster.unaware(self._ended_serial) if isinstance(self._roster, Keeper) else []
        if (lacking or shards or not self.reached or run.fleet.deaf(run.now_s)) and run.now_s < self._linger_most_s:
            run.note(RunLingers(lacking=lacking, shards=shards, reached=self.reached))
            self._linger_until_s = min(run.now_s + LINGER_S, self._linger_most_s)
        else:
            self._run.finish("islands were given time to leave")

    def _missing(self, p: int) -> bool:
        """Returns True if a live, stopped island has steps on this fragment neither merged nor wasted."""
        return any(m.stopped and self._owes_steps(m, p) for m in self._run.fleet.members.live(self._run.now_s))

    def _trains(self, member: Member) -> bool:
        """Returns True if an island may make steps, or has made some, and has not stopped yet.

        One that has found a fragment corrupt holds no version of it, and trains on until it has one. One that has only
        just come back fetches the versions, and brings what it had kept.
        """
        life = self._run.books.ledger.life(member.island_id, member.incarnation)
        return not member.stopped and (member.ready or member.corruptions > 0 or life.trained_tokens > 0)

    def _owes_steps(self, member: Member, p: int) -> bool:
        """Returns True if steps of an island on fragment ``p`` are neither merged nor wasted yet."""
        life = self._run.books.ledger.life(member.island_id, member.incarnation)
        return life.accounts[p].spent_tokens < life.trained_tokens

    def _give_up_the_rest(self) -> None:
        """Books everything that is not merged at the end of the run as wasted."""
        run = self._run
        for p in run.model.moving:
            for held in run.model.fragments[p].held:
                self._intake.refuse_waiting(held, Reason.RUN_ENDED, "it came after the flush")
            run.model.fragments[p].release()
            run.model.fragments[p].merge_again_at_s = None
        lost = run.books.ledger.books().tokens()["in_flight"]
        if lost:
            run.note(RunFlushIncomplete(lost_tokens=lost))
        for member in run.fleet.members:
            run.books.ledger.end(member.island_id)
