"""Picks the donor of optimizer state for a rejoining island (reference.md, section 8.6).

An island that finds no checkpoint of its own asks for a donor, again and again until it is answered. A donor is an
island that lives, answers its rounds, and has trained a whole sync interval in this life, so that its optimizer knows
the run: an untrained island is never a donor. Neither is a quarantined one. Of those left, the one heard most recently
is named; as heartbeats interleave, the work goes round. The state itself passes between the two, through the broker,
and never comes here.

A donor serves few islands at once. Where all are busy, nothing is answered: the island asks again, and starts fresh
when its own patience ends. Where nobody could ever give, it is told so at once.
"""

from __future__ import annotations

from aggregator.interface.events import Received, Send
from aggregator.interface.notes import DonorNamed, IslandRestored
from aggregator.state.members import Member
from aggregator.state.run import Run
from broker.routing.liveness import Liveness
from broker.wire.messages import AskDonor, Donor, Heartbeat, Phase, StateSource

#: Islands that one donor gives its state to at a time.
MOST_RECEIVERS = 4
#: Silence of a donor after which the next one is asked for: at least this, and so many of its steps, for it copies its
#: state between two.
WAIT_S, WAIT_STEPS = 8.0, 4.0
#: A donor that was named and not heard of again, neither in a heartbeat nor in a question, is free after this long.
FORGET_S = 60.0


class Donations:
    """The donors and receivers of optimizer state, and the source of each island's."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._given: dict[tuple[str, int], tuple[str, float]] = {}  # island's life -> its donor, and when it asked last

    def ask(self, member: Member, ask: AskDonor, event: Received) -> None:
        """Names a donor, or reports that there is none; does neither while all possible donors are busy."""
        run, receiver = self._run, (member.island_id, member.incarnation)
        self._forget()
        able = {m.island_id: m for m in run.fleet.members if m is not member and self._able(m)}
        before, _ = self._given.pop(receiver, ("", 0.0))
        open_to_it = [m for name, m in able.items() if name not in ask.tried]
        busy = [donor for donor, _ in self._given.values()]
        free = [m for m in open_to_it if busy.count(m.island_id) < MOST_RECEIVERS]
        if open_to_it and not free:
            return
        chosen = next((m for m in free if m.island_id == before), None)  # a repeated question: the same answer
        if chosen is None and free:
            chosen = max(free, key=lambda m: (m.last_seen_s, m.island_id))
            run.note(DonorNamed(island=member.island_id, donor=chosen.island_id, tried=list(ask.tried)))
        if chosen is None:
            run.emit(Send(to=member.island_id, message=Donor(island_id="", wait_s=0.0)))
            return
        self._given[receiver] = chosen.island_id, run.now_s
        step_s = chosen.heartbeat.step_time_s if chosen.heartbeat is not None else None
        wait_s = max(WAIT_S, WAIT_STEPS * (step_s or 0.0))
        run.emit(Send(to=member.island_id, message=Donor(island_id=chosen.island_id, wait_s=wait_s)))

    def heard(self, member: Member, beat: Heartbeat) -> None:
        """Takes note of where an island's optimizer state came from, once it says so."""
        if beat.optimizer is StateSource.PENDING or member.optimizer is beat.optimizer:
            return
        member.optimizer = beat.optimizer
        donor, _ = self._given.pop((member.island_id, member.incarnation), ("", 0.0))
        restored = IslandRestored(
            island=member.island_id,
            incarnation=member.incarnation,
            optimizer=beat.optimizer,
            donor=donor if donor and beat.optimizer is StateSource.DONOR else None,
        )
        self._run.note(restored)

    def _able(self, m: Member) -> bool:
        """Returns True if an island could give its state, apart from being busy with others."""
        run, beat = self._run, m.heartbeat
        if run.phase is not Phase.RUNNING or beat is None or beat.stopped or not m.ready:
            return False
        trained_steps = beat.inner_step - run.books.ledger.life(m.island_id, m.incarnation).start_step
        return (
            beat.optimizer is not StateSource.PENDING
            and trained_steps >= run.config.sync_interval
            and m.responds  # a donor copies its state between two steps
            and run.fleet.members.state(m, run.now_s) is Liveness.ALIVE
            and not run.fleet.quarantine.holds(m.island_id, run.now_s)  # who knows what its optimizer has seen
        )

    def _forget(self) -> None:
        """Frees the donors of islands that are gone, or have been silent about it for long."""
        run = self._run
        for (island_id, incarnation), (_, at_s) in list(self._given.items()):
            member = run.fleet.members[island_id]
            if member.incarnation != incarnation or member.left or run.now_s - at_s > FORGET_S:
                del self._given[island_id, incarnation]
