"""Version 0: it comes whole from one island; if that one dies half-way, what it sent is dropped for the next one's.

With several shards each plants the seeds of its own fragments, and shard 0 decides whose, and when all are there.
"""

from __future__ import annotations

from aggregator.events import Plant, Received
from aggregator.members import Member
from aggregator.membership import Membership
from aggregator.roster import Adopter, Keeper
from aggregator.run import Run, Stage
from broker.messages import Phase, Reason, Seed


class Seeding:
    """Gets version 0 from one island; of several shards each gets its part of it."""

    def __init__(self, run: Run, membership: Membership, roster: Keeper | Adopter) -> None:
        self._run = run
        self._membership = membership
        self._roster = roster
        self._begin_serial = 0  # of the record that says that version 0 is whole everywhere
        self._began_at_s = run.now_s

    def choose(self) -> None:
        """Asks the first live island for everything, unless one that lives is asked already."""
        run = self._run
        live = {(m.island_id, m.incarnation): m for m in run.members.live(run.now_s)}
        if run.config.shard or run.began or not live or not run.fragments or run.seeder in live:
            return
        if any(f.stage is not Stage.IDLE for f in run.fragments.values()):
            return  # what is computed or written now must not be taken for the next island's
        member = min(live.values(), key=lambda m: m.index)
        run.seeder = member.island_id, member.incarnation
        run.seeding_id = run.next_round_id()
        for fragment in run.fragments.values():
            fragment.version = -1
        if run.config.shards > 1:
            run.save()  # which tells the others
        run.note("seeder.chosen", island=member.island_id, incarnation=member.incarnation)
        self._membership.tell(member)

    def seed(self, member: Member, seed: Seed, event: Received) -> None:
        """Takes one fragment of version 0, from the island that was asked."""
        run = self._run
        if run.seeder != (member.island_id, member.incarnation) or run.phase is not Phase.SEEDING:
            return  # asked of somebody else by now, or done: a late copy
        fragment = run.fragments.get(seed.fragment_id)
        if fragment is None:
            self._membership.refuse(event, Reason.UNKNOWN_FRAGMENT, f"no fragment {seed.fragment_id}")
        elif event.flaw is not None:
            self._membership.refuse(event, event.flaw.reason, event.flaw.detail)
        elif fragment.stage is Stage.IDLE and fragment.version < 0:
            fragment.stage = Stage.COMPUTING
            fragment.norms.seed_norm = event.norm or 0.0
            run.emit(Plant(fragment_id=seed.fragment_id, payload=seed.payload))

    def complete(self) -> bool:
        """Whether all of version 0 is durable, in every shard and on record; the run begins then."""
        run = self._run
        if not run.fragments or any(f.version < 0 for f in run.fragments.values()):
            return False
        if not run.began:
            if not isinstance(self._roster, Keeper) or not self._roster.seeded:
                return False
            run.began = True
        if run.config.shards > 1:
            if not self._begin_serial:
                self._begin_serial = run.save()
            if run.durable_serial < self._begin_serial:
                return False
        run.phase = Phase.RUNNING
        run.note("run.seeded", fragments=len(run.fragments), seconds=round(run.now_s - self._began_at_s, 3))
        return True
