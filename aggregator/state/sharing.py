"""Blocks of data that islands are given, or that end: when to look for them. Pure.

What moves is decided in :mod:`aggregator.ledger.data_blocks`, from the presence of every island. With most messages
nothing can move: so an island is looked at only if what decides of it has changed since the last time, or its silence
has become long enough; everybody only if that may concern others, or a quarantine ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from aggregator.ledger.data_blocks import Dealt, Presence
from aggregator.rules.deadlines import ROUNDING_S, Deadlines
from aggregator.state.members import Member
from aggregator.state.run import Run
from broker.wire.messages import Phase

#: In a run of more islands than this, moves of data are written down together: so far apart for each island beyond. A
#: record names every island and all that it has, and each begins a block every few seconds, with one more in reserve.
SAVED_AT_ONCE, SAVED_APART_S = 64, 0.0005


class Facts(NamedTuple):
    """The facts about an island whose change may move data: its :class:`Presence` without the time."""

    gone: bool
    able: bool
    batch_tokens: int
    block: int
    released: tuple[int, ...]


class Sharing:
    """Gives and ends blocks of the data; a part of the core that acts by itself."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._unseen: dict[str, None] = dict.fromkeys(m.island_id for m in run.fleet.members)  # changed, or heard
        self._seen: dict[str, Facts] = {}  # of each island, when it was looked at last
        self._paused: set[str] = set()  # whose last contributions may still be merged, which nobody is told of
        self._look_at_s = -math.inf  # when everybody is to be looked at by the time alone
        self._silences = Deadlines()  # when an island may be dead, or away for too long: not before that
        self._save_at_s: float | None = None  # what has moved and is not on record
        self._saved_at_s = -math.inf
        run.fleet.members.watch(lambda island_id: self._unseen.__setitem__(island_id, None))

    def look_again(self) -> None:
        """Marks all islands for re-examination after ownership changed."""
        self._look_at_s = -math.inf

    def _may_move(self) -> bool:
        """Returns True if data may move now: only shard 0 moves them, and only during training.

        Not while nobody can be heard: whoever seems to be away then most likely trains on what is theirs.
        """
        run = self._run
        return run.phase is Phase.RUNNING and not run.config.shard and not run.fleet.deaf(run.now_s)

    def advance(self) -> None:
        """Moves data between islands that are away and others; a move is durable before anyone is told.

        The deadline is that for writing down what has moved; a block itself moves with any event after its time.
        """
        run = self._run
        if not self._may_move():
            run.deadlines.drop("sharing")
            return
        changed = self._changed()
        if run.now_s >= self._look_at_s:
            self._seen = {m.island_id: self._facts(m) for m in run.fleet.members}
            moved = run.books.data.settle([self._presence(m, self._seen[m.island_id]) for m in run.fleet.members])
            self._look_at_s = -math.inf if moved else self._next_s()
        else:
            moved = run.books.data.settle_some(changed) if changed else []
        if moved or self._save_at_s is not None:
            self.note(moved)
            self._save(bool(moved))

    def _save(self, moved: bool) -> None:
        """Writes moves to the record; in a large fleet several together, since a record names all islands."""
        run = self._run
        if moved and self._save_at_s is None:
            spare = max(0, len(run.fleet.members) - SAVED_AT_ONCE)
            self._save_at_s = max(run.now_s, self._saved_at_s + spare * SAVED_APART_S)
        if self._save_at_s is not None and run.now_s >= self._save_at_s:
            self._saved_at_s, self._save_at_s = run.now_s, None
            run.record.save()
        run.deadlines.put("sharing", math.inf if self._save_at_s is None else self._save_at_s)

    def note(self, moved: Iterable[Dealt]) -> None:
        """Notes the data that have moved."""
        for each in moved:
            self._run.note(each.note())

    def _changed(self) -> list[Presence]:
        """Returns the islands with a change that may move data, and those that are silent too long."""
        run, changed = self._run, []
        silent = dict.fromkeys(self._silences.due(run.now_s + ROUNDING_S))
        for island_id in dict.fromkeys([*self._unseen, *self._paused, *silent]):
            member = run.fleet.members[island_id]
            before, facts = self._seen.get(island_id), self._facts(member)
            self._seen[island_id] = facts
            long_away = facts.gone or run.now_s - member.last_seen_s >= run.config.dead_after_s - ROUNDING_S
            if before != facts or (island_id in silent and long_away):
                changed.append(self._presence(member, facts))
            if island_id not in self._silences and (at_s := self._silent_at_s(member)) is not None:
                self._silences.put(island_id, at_s)  # one that is too early costs a look
            waits = member.paused and not facts.gone
            (self._paused.add if waits else self._paused.discard)(island_id)
        self._unseen.clear()
        return changed

    def _facts(self, m: Member) -> Facts:
        beat, able = m.heartbeat, self._run.fleet.counts(m.island_id, self._run.now_s) and m.ready and not m.stopped
        block, released = (0, ()) if beat is None else (beat.block, beat.released)
        return Facts(m.left and self._left_nothing(m), able, m.tokens_per_step, block, released)

    def _presence(self, m: Member, facts: Facts) -> Presence:
        return Presence(
            island_id=m.island_id,
            away_s=math.inf if facts.gone else self._run.now_s - m.last_seen_s,
            able=facts.able,
            batch_tokens=facts.batch_tokens,
            step_time_s=None if m.heartbeat is None else m.heartbeat.step_time_s,
            block=facts.block,
            released=facts.released,
        )

    def _left_nothing(self, member: Member) -> bool:
        """Returns True if the data of an island that left may go to others: no contribution is under way.

        One that has paused may have kept contributions, which would be refused once its data are another's. So that
        waits until all it trained is merged. With several shards no one of them knows, and its data wait for it.
        """
        if not member.paused:
            return True
        run = self._run
        return run.config.shards == 1 and run.books.ledger.life(member.island_id, member.incarnation).settled

    def _silent_at_s(self, member: Member) -> float | None:
        """Returns the next moment at which an island that stays silent is dead, or away for too long."""
        run = self._run
        moments = (member.last_seen_s + wait_s for wait_s in (run.config.dead_after_s, run.config.takeover_s))
        return min((at_s for at_s in moments if at_s > run.now_s + ROUNDING_S), default=None)

    def _next_s(self) -> float:
        """Returns the first moment at which a quarantine ends."""
        held = self._run.fleet.quarantine.now(self._run.now_s).values()
        return min((each.until_s for each in held), default=math.inf) - ROUNDING_S
