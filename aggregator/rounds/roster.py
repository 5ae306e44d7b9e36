"""The roster: decisions of shard 0 that other shards need on disk (reference.md, section 5.8). Pure.

A run may be cut into several aggregator shards. Each owns its fragments whole: rounds, weights, books, store, lease and
standbys. What concerns an island or the run as a whole is decided in one place, shard 0: who joins and under which
incarnation, who supplies version 0, whose which part of the data is, and the phase. It says so in a *roster*, an
excerpt of its run record, as soon as that is durable; the others write it into theirs and answer when that is durable.
A serial number of shard 0's record is *agreed* once every shard has it.

Two decisions need to know first what the other shards hold, so each takes two steps. The first takes away: the old life
of an island that joins again, or the owner of a block that ends. No shard takes anything more from there, and each
answers how far it had come. The second gives, from the furthest of these points on, and nobody hears of it before it is
agreed. So no step and no batch is handed over twice, whichever shard is how late.

Version 0 is whole when every shard has its part of it on disk; nobody publishes before shard 0 has written that down.
"""

from __future__ import annotations

import math
from dataclasses import replace

from aggregator.interface.events import Received, Send
from aggregator.rounds.membership import Membership
from aggregator.state.fragment import Stage
from aggregator.state.run import Run
from broker.wire.fragments import FragmentManifest
from broker.wire.messages import AGGREGATOR, Begin, Enrolled, Phase, Reached, Roster, Rostered

#: A roster that is not answered is sent again after so long.
AGAIN_S = 0.5
#: A shard that was not heard for so long is complained about.
SILENT_S = 3.0


class Keeper:
    """Shard 0's side of the roster. A run of one shard agrees as soon as its record is durable."""

    def __init__(self, run: Run, membership: Membership) -> None:
        self._run = run
        self._membership = membership
        self._others = range(1, run.config.shards)
        self._heard: dict[int, tuple[Rostered, float]] = {}  # shard -> what it said last, and when
        self._agreed = dict.fromkeys(self._others, 0)  # the highest serial that was ever durable there
        self._sent_at_s: dict[int, float] = {}
        self._roster: Roster | None = None  # the newest that may be told
        self._began_s = run.now_s

    def saved(self) -> None:
        """Notes that our record is durable up to a serial, so that others may be told of it."""
        run, before = self._run, self._roster
        while run.other_shards.rosters and run.other_shards.rosters[0].serial <= run.record.durable_serial:
            self._roster = run.other_shards.rosters.pop(0)
        if self._roster is not before:
            for shard in self._others:
                self._send(shard)
        self._settle()

    def told(self, event: Received) -> None:
        """Takes another shard's answer."""
        run, said = self._run, event.envelope.message
        assert isinstance(said, Rostered)
        shard = said.shard
        if shard not in self._agreed or (shard in self._heard and said.epoch < self._heard[shard][0].epoch):
            return
        self._heard[shard] = said, run.now_s
        if said.roster_epoch == run.epoch:
            self._agreed[shard] = max(self._agreed[shard], said.roster_serial)
        for begin in said.begins:
            at = begin.step, begin.tokens
            run.other_shards.begins[begin.island_id] = max(at, run.other_shards.begins.get(begin.island_id, at))
        for reached in said.reached:
            run.books.data.reached_elsewhere(reached.share, reached.batch)
        self._settle()

    def advance(self) -> None:
        """Sends rosters again that were not answered, and notes shards that are silent."""
        run = self._run
        for shard in self._others:
            said = self._heard.get(shard)
            silent_s = run.now_s - (said[1] if said is not None else self._began_s)
            if silent_s >= SILENT_S and run.phase is not Phase.ENDED:
                text = "its fragments stand still, nobody joins: look at its log"
                run.troubles.begin(f"shard {shard}", f"aggregator shard {shard} is silent: {text}", run.now_s)
            else:
                run.troubles.end(f"shard {shard}", run.now_s)
            if self._owes(shard) and run.now_s >= self._sent_at_s[shard] + AGAIN_S:
                self._send(shard)
        again_s = (self._sent_at_s[shard] + AGAIN_S for shard in self._others if self._owes(shard))
        run.deadlines.put("roster", min(again_s, default=math.inf))

    @property
    def seeded(self) -> bool:
        """Whether every other shard has its part of version 0."""
        said = [self._heard[shard][0] if shard in self._heard else None for shard in self._others]
        return all(each is not None and each.seeding_id == self._run.origin.seeding_id for each in said)

    def flushing_until_s(self, silent_s: float) -> float | None:
        """Returns the time until which shard 0 waits for flushes of silent shards; None if all are done."""
        left = [self._heard.get(shard) for shard in self._others]
        heard = [self._began_s if each is None else each[1] for each in left if each is None or not each[0].flushed]
        return max(heard) + silent_s if heard else None

    def unaware(self, serial: int) -> list[int]:
        """Returns the shards that have not answered that they have our record up to a serial."""
        return [shard for shard, agreed in self._agreed.items() if agreed < serial]

    def _owes(self, shard: int) -> bool:
        """Whether a shard, as it is now, has not answered the newest roster."""
        said = self._heard[shard][0] if shard in self._heard else None
        known = (said.roster_epoch, said.roster_serial) if said is not None else None
        return self._roster is not None and known != (self._run.epoch, self._roster.serial)

    def _settle(self) -> None:
        run = self._run
        agreed = min([run.record.durable_serial, *self._agreed.values()])
        if agreed > run.other_shards.agreed_serial:
            run.other_shards.agreed_serial = agreed
            self._membership.saved(agreed)

    def _send(self, shard: int) -> None:
        assert self._roster is not None
        self._sent_at_s[shard] = self._run.now_s
        self._run.emit(Send(to=AGGREGATOR, message=replace(self._roster, to_shard=shard)))


class Adopter:
    """The other shards' side of the roster."""

    def __init__(self, run: Run, membership: Membership) -> None:
        self._run = run
        self._membership = membership
        self._adopted = False  # anything, in this life
        self._saving: list[tuple[int, tuple[int, int]]] = []  # serial of our record -> the roster in it
        self._durable = (0, 0)
        self._said: Rostered | None = None

    def told(self, event: Received) -> None:
        """Takes over a roster of shard 0, unless a newer one is known."""
        run, roster = self._run, event.envelope.message
        assert isinstance(roster, Roster)
        at, last = (roster.epoch, roster.serial), run.other_shards.roster_at
        if roster.to_shard != run.config.shard or at < last or (self._adopted and at == last):
            return
        if not self._seed(roster):
            return  # what is computed or written now must not be taken for another island's; it is sent again
        run.other_shards.roster_at, self._adopted = at, True
        for each in roster.members:
            self._enrol(each)
        run.books.data.adopt(roster.tenures)
        run.other_shards.told_phase = roster.phase
        run.origin.began = run.origin.began or run.other_shards.told_phase is not Phase.SEEDING
        self._saving.append((run.record.save(), at))

    def saved(self) -> None:
        """Notes that our record is durable up to a serial, and the rosters in it with it."""
        run = self._run
        run.other_shards.agreed_serial = run.record.durable_serial
        while self._saving and self._saving[0][0] <= run.record.durable_serial:
            _, self._durable = self._saving.pop(0)
        self._membership.saved(run.record.durable_serial)

    def advance(self) -> None:
        """Answers shard 0 again if the answer has changed since it was sent; no work here waits for a time."""
        if self._said is not None and self._said != self._answer():
            self.say()

    def say(self) -> None:
        """Sends this shard's answer to shard 0."""
        self._said = self._answer()
        self._run.emit(Send(to=AGGREGATOR, message=self._said))

    def _answer(self) -> Rostered:
        run = self._run
        whole = bool(run.model.fragments) and all(f.version >= 0 for f in run.model.fragments.values())
        begins = [(m.island_id, *run.books.ledger.resume_point(m.island_id)) for m in run.fleet.members if not m.begun]
        return Rostered(
            shard=run.config.shard,
            epoch=run.epoch,
            roster_epoch=self._durable[0],
            roster_serial=self._durable[1],
            seeding_id=run.origin.seeding_id if whole and self._durable == run.other_shards.roster_at else 0,
            flushed=run.model.flushed and self._durable == run.other_shards.roster_at,
            begins=tuple(Begin(island_id=i, step=step, tokens=tokens) for i, step, tokens in begins),
            reached=tuple(Reached(share=n, batch=run.books.data.batches.reached(n)) for n in run.books.data.nobodys()),
        )

    def _seed(self, roster: Roster) -> bool:
        """Takes over the choice of the seeding island; returns False while that has to wait."""
        run = self._run
        if run.model.manifest is None and roster.recipe is not None:
            run.adopt_manifest(FragmentManifest(roster.fragments), roster.recipe)
        # Once it has begun, the attempt is the one that was whole here: that was asked before.
        another = roster.phase is Phase.SEEDING and roster.seeding_id != run.origin.seeding_id
        if run.phase is Phase.SEEDING and another and not run.origin.began:
            if any(f.stage is not Stage.IDLE for f in run.model.fragments.values()):
                return False
            for fragment in run.model.fragments.values():
                fragment.version = -1
            run.origin.seeding_id = roster.seeding_id
        run.origin.seeder = (roster.seeder, roster.seeder_incarnation) if roster.seeder else None
        return True

    def _enrol(self, told: Enrolled) -> None:
        """Takes over an island's life: a new one ends the old at once, and begins once shard 0 knows where."""
        run, known = self._run, self._run.fleet.members.get(told.island_id)
        before, nonce = (0, "") if known is None else (known.incarnation, known.nonce)
        member = run.fleet.members.enrol(told, run.now_s)
        if member.incarnation > before:
            self._membership.fence(member)
        elif (member.incarnation, member.begun) == (told.incarnation, True) and nonce != told.nonce:
            run.fleet.members.resume(member, told.nonce, told.tokens_per_step, run.now_s)
            self._membership.replaced(member)
        if member.incarnation > told.incarnation:
            return
        if told.begun and not member.begun:
            member.begin(told.start_step, told.start_tokens)
            self._membership.begin_books(member, *member.start)
            if run.phase is Phase.ENDED:
                run.books.ledger.end(member.island_id)
        if told.left and not member.left:
            member.leave()
            run.books.ledger.end(member.island_id)
            run.schedule.clock.forget(member.island_id)
            run.fleet.claims.leave(member.island_id)
