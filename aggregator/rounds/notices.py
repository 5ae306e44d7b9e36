"""Builds messages to islands: refusals, and the whole state of the fleet.

Rounds that are open, fragments that soon are, versions, and how fast the fleet trains beside an island stand in every
:class:`FleetState`; what became of a contribution in the one that answers a heartbeat which asks for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from aggregator.interface.events import Received, Send
from aggregator.interface.leader_notes import MessageRefused
from aggregator.state.fragment import Stage
from aggregator.state.members import Member
from aggregator.state.run import Run
from broker.wire.messages import FleetState, OpenRound, Phase, Reason, Refused, Resolution

#: What concerns all islands is told to so many at once; to the others at this pace, in portions. To tell a thousand at
#: once, and to take in what all of them answer, kept a heartbeat waiting for two seconds.
AT_ONCE, PER_S, PORTION = 64, 250.0, 8


class Notices:
    """Tells islands what they need to know, from the run as it is now."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._untold: dict[str, None] = {}  # ids of islands that are yet to hear of an open round, in their order
        self._room, self._room_at_s = float(AT_ONCE), run.now_s  # how many could be told then
        self._due_in_s: dict[int, float] = {}
        self._due_asked_at_s = float("-inf")

    def refuse(self, event: Received, reason: Reason, detail: str) -> None:
        """Tells the sender of a message why it was not taken, and counts it."""
        envelope = event.envelope
        member = self._run.fleet.members.get(envelope.sender)
        self._run.fleet.count_refusal(reason, member)
        if member is not None and member.incarnation == envelope.incarnation:
            self._run.offence(member, reason, 0)
        kind = type(envelope.message).__name__.lower()
        self._run.note(MessageRefused(sender=envelope.sender, kind=kind, reason=reason, detail=detail))
        refused = Refused(kind=kind, sequence=envelope.sequence, reason=reason, detail=detail)
        self._run.emit(Send(to=envelope.sender, message=refused, by=event.broker))

    def tell_all(self, *, absent: bool = False) -> None:
        """Sends every live island its state; with ``absent`` also those that are away, for their brokers."""
        run = self._run
        for member in run.fleet.members if absent else run.fleet.members.live(run.now_s):
            if not member.left:
                self.tell(member)

    def announce(self, members: Sequence[Member], number: int) -> None:
        """Tells islands of an open round, in a large fleet one by one, unless they hear of it before.

        Args:
            members: Whom it concerns.
            number: Number of the round: each round begins with other islands.
        """
        first = number * AT_ONCE % len(members) if members else 0
        self._untold.update(dict.fromkeys(m.island_id for m in (*members[first:], *members[:first])))
        self._tell_some()

    def advance(self) -> None:
        """Tells some of those that wait, once there is room for a portion of them."""
        if self._untold and self._room_now() >= min(PORTION, len(self._untold)):
            self._tell_some()
        missing = min(PORTION, len(self._untold)) - self._room
        # One millisecond late rather than early, as with rounds.
        again_at_s = self._room_at_s + missing / PER_S + 0.001 if self._untold else math.inf
        self._run.deadlines.put("notices", again_at_s)

    def _tell_some(self) -> None:
        """Tells as many of those that wait as there is room for."""
        run = self._run
        self._room, self._room_at_s = self._room_now(), run.now_s
        for island_id in list(itertools.islice(self._untold, int(self._room))):
            del self._untold[island_id]
            self._room -= 1
            member = run.fleet.members.get(island_id)
            if member is not None and not member.left:
                self.tell(member)

    def _room_now(self) -> float:
        since_s = self._run.now_s - self._room_at_s
        return AT_ONCE if since_s < 0 else min(AT_ONCE, self._room + PER_S * since_s)  # a clock may go back

    def tell(self, member: Member) -> None:
        """Sends an island the state it needs, unless it does not know its id yet."""
        self._untold.pop(member.island_id, None)
        if not self._run.fleet.pending_joins.holds(member.island_id):
            self._run.emit(Send(to=member.island_id, message=self._fleet_state(member)))

    def _fleet_state(self, member: Member) -> FleetState:
        """Returns the state for an island, with the resolutions since the last one, which are forgotten."""
        run = self._run
        rounds = [
            OpenRound(round_id=r.round_id, fragment_id=r.fragment_id)
            for r in run.schedule.open_rounds.values()
            if member.island_id not in r.answered
        ]
        resolutions: tuple[Resolution, ...] = ()
        if member.resolutions:
            newest = {(r.fragment_id, r.from_step, r.to_step): r for r in member.resolutions}
            resolutions = tuple(newest.values())
            member.resolutions.clear()
        return FleetState(
            epoch=run.epoch,
            phase=run.phase,
            rounds=tuple(rounds),
            due_soon=self._due_soon(member),
            versions=run.versions,
            resolutions=resolutions,
            seed=self._seed_wanted(member) if run.phase is Phase.SEEDING else (),
            trained_tokens=run.books.ledger.counted_tokens(),
            fleet_ratio=run.schedule.rates.ratio(member.island_id, run.now_s),
            blocks=run.books.data.told(member.island_id),
            shard=run.config.shard,
            shards=run.config.shards,
        )

    def _due_soon(self, member: Member) -> tuple[int, ...]:
        """Returns fragments that open before the island's next boundary but one, or the next announcement."""
        run = self._run
        if run.schedule.pacer is None or run.phase is not Phase.RUNNING:
            return ()
        if not 0 <= run.now_s - self._due_asked_at_s < run.config.heartbeat_interval_s / 20:
            self._due_asked_at_s = run.now_s
            delivered = [p for p in run.model.moving if not run.model.fragments[p].undelivered]
            self._due_in_s = run.schedule.pacer.due_in_s(delivered, run.now_s)
        own_s = run.schedule.clock.step_time_s(member.island_id) or 0.0
        fleet_s = run.schedule.median_step_s(run.now_s)
        horizon_s = 2 * max(own_s, fleet_s) + run.schedule.pacer.spacing_steps * fleet_s
        return tuple([p for p, wait_s in self._due_in_s.items() if wait_s <= horizon_s])

    def _seed_wanted(self, member: Member) -> tuple[int, ...]:
        run = self._run
        if run.origin.seeder != (member.island_id, member.incarnation):
            return ()
        return tuple(p for p, f in run.model.fragments.items() if f.version < 0 and f.stage is Stage.IDLE)
