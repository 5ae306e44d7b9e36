"""Seeding: takes version 0 whole from one island; if that one dies, from the next.

An island that lives and yet supplies nothing, or nothing that can be taken, is passed over where there is another one.

With several shards each plants the seeds of its own fragments, and shard 0 decides whose, and when all are there.

The small files of its model come beside it, and hold nothing up (:class:`ModelFiles`).
"""

from __future__ import annotations

import math
from collections import Counter

from aggregator.interface.events import FilesKept, KeepFiles, Plant, Received, Send
from aggregator.interface.notes import (
    ModelFilesKept,
    ModelFilesNotGiven,
    ModelFilesNotKept,
    RunSeeded,
    SeederChosen,
    SeederPassedOver,
)
from aggregator.rounds.notices import Notices
from aggregator.rounds.publishing import Publishing
from aggregator.rounds.roster import Adopter, Keeper
from aggregator.state.fragment import Stage
from aggregator.state.members import Member
from aggregator.state.run import Run
from broker.process.demands import FILES
from broker.wire.messages import RETRY_REASONS, FetchFiles, FilesPart, Payload, Phase, Reason, Seed
from broker.wire.small_files import MOST_PARTS, PART_BYTES

#: A seeder of which nothing new has come for so long is passed over: this, and the time that its largest fragment takes
#: at so slow a rate. Twice as long each time that everybody was, up to so many times.
PATIENCE_S, BYTES_PER_S, MOST_DOUBLINGS = 30.0, 1e6, 6
#: A part of the small files is asked for again after so long, twice as long each time: it may wait behind tensors.
#: After so many times another island is asked.
FILES_AGAIN_S, MOST_ASKED = 10.0, 6


class Seeding:
    """Gets version 0 from one island; each shard gets its own part."""

    def __init__(self, run: Run, notices: Notices, roster: Keeper | Adopter, publishing: Publishing) -> None:
        self._run = run
        self._notices = notices
        self._roster = roster
        self._publishing = publishing
        self._begin_serial = 0  # of the record that says that version 0 is whole everywhere
        self._began_at_s = run.now_s
        self._heard_at_s = run.now_s  # when something was taken from the seeder, or it was chosen
        self._passed_over: set[tuple[str, int]] = set()  # islands and incarnations that were asked in vain
        self._times_over = 0  # how often everybody was

    def advance(self) -> None:
        """Begins the run once version 0 is whole, and until then asks for it; only before it has begun.

        It has no deadline: with any later event a silent seeder is passed over.
        """
        if not self._complete():
            self._choose()
            return
        for p in sorted(self._run.model.fragments):
            self._publishing.publish(p)
        self._notices.tell_all()

    def _choose(self) -> None:
        """Asks the first live island for everything, unless one that may yet supply it is asked already."""
        run, origin = self._run, self._run.origin
        if run.config.shard or origin.began or not run.model.fragments:
            return
        if any(f.stage is not Stage.IDLE for f in run.model.fragments.values()):
            return  # what is computed or written now must not be taken for the next island's
        if run.fleet.deaf(run.now_s):
            self._heard_at_s = run.now_s
        silent = run.now_s >= self._heard_at_s + self._patience_s()
        seeder = origin.seeder
        if seeder is not None and seeder not in self._passed_over and run.fleet.has(seeder, run.now_s):
            if not silent:
                return  # as with most messages: nobody else is looked at
            self._passed_over.add(seeder)
        live = [m for m in run.fleet.members.live(run.now_s) if not run.fleet.quarantine.holds(m.island_id, run.now_s)]
        able = {(m.island_id, m.incarnation): m for m in live}
        if not able:
            return
        fresh = able.keys() - self._passed_over
        if not fresh:  # all were asked in vain: once more, with more patience; whoever is alone goes on
            self._passed_over.clear()
            self._times_over += silent and self._times_over < MOST_DOUBLINGS
            fresh = able.keys() - ({seeder} if len(able) > 1 else set())
        life = min(fresh, key=lambda each: able[each].index)
        self._heard_at_s = run.now_s
        if life == seeder:
            return
        if seeder in able:
            run.note(SeederPassedOver(island=seeder[0], incarnation=seeder[1]))
        member, origin.seeder = able[life], life
        origin.seeding_id = run.schedule.next_round_id()
        for fragment in run.model.fragments.values():
            fragment.version = -1
        if run.config.shards > 1:
            run.record.save()  # which tells the others
        run.note(SeederChosen(island=member.island_id, incarnation=member.incarnation))
        self._notices.tell(member)

    def _patience_s(self) -> float:
        model = self._run.model
        assert model.manifest is not None
        ours_is_here = all(f.version >= 0 for f in model.fragments.values())  # what other shards wait for is not known
        num_bytes = 4 * (sum(model.manifest.sizes) if ours_is_here else max(model.manifest.sizes))
        return (PATIENCE_S + num_bytes / BYTES_PER_S) * 2.0**self._times_over

    def seed(self, member: Member, seed: Seed, event: Received) -> None:
        """Takes one fragment of version 0, from the island that was asked."""
        run = self._run
        if run.origin.seeder != (member.island_id, member.incarnation) or run.phase is not Phase.SEEDING:
            return  # asked of somebody else by now, or done: a late copy
        fragment = run.model.fragments.get(seed.fragment_id)
        if fragment is None:
            self._notices.refuse(event, Reason.UNKNOWN_FRAGMENT, f"no fragment {seed.fragment_id}")
        elif event.flaw is not None:
            self._notices.refuse(event, event.flaw.reason, event.flaw.detail)
            if event.flaw.reason not in RETRY_REASONS:
                self._passed_over.add(run.origin.seeder)
        elif fragment.stage is Stage.IDLE and fragment.version < 0:
            fragment.plant(event.norm or 0.0)
            self._heard_at_s, run.origin.planted = run.now_s, True
            run.emit(Plant(fragment_id=seed.fragment_id, payload=seed.payload))

    def _complete(self) -> bool:
        """Returns True if all of version 0 is durable, in every shard and on record; the run begins then."""
        run = self._run
        if not run.model.fragments or any(f.version < 0 for f in run.model.fragments.values()):
            return False
        if not run.origin.began:
            if not isinstance(self._roster, Keeper) or not self._roster.seeded:
                return False
            run.origin.began = True
        run.origin.digests = {p: fragment.digest for p, fragment in run.model.fragments.items()}
        if run.config.shards > 1 or run.config.failover:  # others go by what is on record
            if not self._begin_serial:
                self._begin_serial = run.record.save()
            if run.record.durable_serial < self._begin_serial:
                return False
        run.phase = Phase.RUNNING
        if not self._begin_serial:
            run.record.save()  # nobody waits for it: it tells an emptied store that there was something to lose
        run.note(RunSeeded(fragments=len(run.model.fragments), seconds=round(run.now_s - self._began_at_s, 3)))
        return True


class ModelFiles:
    """Gets the small files of the model from an island, part by part: at first from the seeder.

    Their digest stands among what the run began with, by its first island. Whoever leads next, and has them not beside
    its own store, asks anew. One that has none of that digest says so, and one that knows of no files is silent.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._here = ""  # the digest of what is beside the store
        self._giver: tuple[str, int] | None = None
        self._parts: list[Payload] = []
        self._again_at_s = math.inf
        self._in_vain: Counter[tuple[str, int]] = Counter()  # by life

    def heard(self, member: Member) -> None:
        """Asks an island that was heard, if nobody else gives, or again."""
        run, life = self._run, (member.island_id, member.incarnation)
        if run.config.shard or run.origin.inputs.get(FILES, self._here) == self._here:
            return
        if self._giver is not None and run.fleet.has(self._giver, run.now_s):
            if life != self._giver or run.now_s < self._again_at_s:
                return
            self._in_vain[life] += 1
        elif run.phase is Phase.SEEDING and life != run.origin.seeder:
            return
        if self._in_vain[life] >= MOST_ASKED:
            self._give_up(life)
        else:
            if life != self._giver:
                self._giver, self._parts = life, []
            self._ask()

    def part(self, member: Member, part: FilesPart, event: Received) -> None:
        """Takes the next part; the last one leads to a write."""
        life = member.island_id, member.incarnation
        if life != self._giver or part.part != len(self._parts) or part.digest != self._run.origin.inputs.get(FILES):
            return
        count = -(-part.num_bytes // PART_BYTES)
        if not part.part < count <= MOST_PARTS or event.payload_bytes > PART_BYTES:
            self._give_up(life)
            return
        self._parts.append(part.payload)
        self._in_vain[life] = 0
        if len(self._parts) < count:
            self._ask()
            return
        self._again_at_s = math.inf  # until it is known what came of them
        parts, self._parts = tuple(self._parts), []
        self._run.emit(KeepFiles(digest=part.digest, num_bytes=part.num_bytes, parts=parts))

    def kept(self, event: FilesKept) -> None:
        """Notes the model files that are beside the store."""
        giver, self._giver = self._giver, None
        if event.detail:
            self._run.note(ModelFilesNotKept(island=giver[0] if giver else "", detail=event.detail))
            if giver is not None:
                self._in_vain[giver] = MOST_ASKED
        else:
            self._here = event.digest
            self._run.note(ModelFilesKept(island=giver[0] if giver else "", digest=event.digest))

    def _ask(self) -> None:
        assert self._giver is not None
        again_s = FILES_AGAIN_S * 2.0 ** self._in_vain[self._giver]
        self._again_at_s = self._run.now_s + again_s
        message = FetchFiles(digest=self._run.origin.inputs[FILES], part=len(self._parts))
        self._run.emit(Send(to=self._giver[0], message=message))

    def _give_up(self, life: tuple[str, int]) -> None:
        self._in_vain[life] = MOST_ASKED
        if life == self._giver:
            self._giver = None
            self._run.note(ModelFilesNotGiven(island=life[0], incarnation=life[1]))
