"""Doubts about islands, for notes and status: claims that are not believed, memory that is corrupt."""

from __future__ import annotations

from aggregator.interface.notes import IslandBelieved, IslandCorrupted, IslandDoubted
from aggregator.state.members import Member
from aggregator.state.run import Run
from broker.wire.messages import Heartbeat

#: So often in one life an island may find its memory corrupt before status says that its machine is to be replaced.
CORRUPTIONS = 3


class Doubts:
    """Looks at what each island says of itself."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def believe(self, member: Member) -> None:
        """Counts an island's newest tokens as far as its claims are believed, and notes those that are not."""
        run, island_id = self._run, member.island_id
        life, beat = run.books.ledger.life(island_id, member.incarnation), member.heartbeat
        step_time_s = None if beat is None else beat.step_time_s
        doubted = run.fleet.claims.report(island_id, life.last_step, life.last_tokens, step_time_s, run.now_s)
        if member.left:
            run.fleet.claims.leave(island_id)
        run.books.ledger.doubt(island_id, member.incarnation, doubted)
        name, sentence = f"claims of {island_id}", "" if member.left else run.fleet.claims.doubts(island_id)
        if sentence and run.troubles.begin(name, sentence, run.now_s):
            run.note(IslandDoubted(island=island_id, detail=sentence))
        elif not sentence and run.troubles.end(name, run.now_s) is not None and not member.left:
            run.note(IslandBelieved(island=island_id))

    def corruption(self, member: Member, beat: Heartbeat) -> None:
        """Notes fragments that an island held and holds no more: it has found them corrupt."""
        run, last, name = self._run, member.heartbeat, f"corrupted {member.island_id}"
        if last is None:
            run.troubles.end(name, run.now_s)  # a new life, perhaps on another machine
        elif -1 in beat.versions:
            for p, (had, has) in enumerate(zip(last.versions, beat.versions, strict=True)):
                if had >= 0 > has and run.model.owns(p):
                    member.corruptions += 1
                    times, island_id = member.corruptions, member.island_id
                    run.note(IslandCorrupted(island=island_id, fragment=p, version=had, times=times))
            if member.corruptions >= CORRUPTIONS:
                how = f"corrupt in its memory {member.corruptions} times, last at step {beat.inner_step}"
                cure = "it adopts what is corrupt anew, and its log has the tensors: replace the machine"
                run.troubles.begin(name, f"{member.island_id} was {how}: {cure}", run.now_s)
