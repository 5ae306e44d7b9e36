"""Unmerged progress that a paused island leaves to its next process. Pure.

An island that is told to end hands over what it has, if somebody takes it. What is not known to be merged then is kept
beside its checkpoint (:mod:`islands.session.paused_file`), as the contributions that they are. The next process joins
as the same life (``Join.resumes``) and lists them as outstanding, as if the first one had merely been silent for a
while. So the aggregator's ledger merges each of them once, whatever it had heard of them before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from broker.wire.messages import Contribution, Welcome
from islands.protocol.fragment import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """The state of an island's life at the end of its process.

    Attributes:
        run_id: Of the run.
        island_id: Of the island.
        incarnation: Which life.
        nonce: Of the process that ended.
        sequence: Of the last message that it sent: the next one goes on counting.
        at: Its counters: everything before is in a contribution, merged, or among ``overwritten_tokens``.
        overwritten_tokens: Per fragment, tokens of this life that are in no contribution.
        cursors: Block -> the next batch of it: all before are trained.
        contributions: Those that nobody is known to have merged.
    """

    run_id: str
    island_id: str
    incarnation: int
    nonce: str
    sequence: int
    at: Point
    overwritten_tokens: tuple[int, ...]
    cursors: Mapping[int, int]
    contributions: tuple[Contribution, ...]

    def fits(self, welcome: Welcome) -> bool:
        """Returns whether the run lets a process in as this very life."""
        same = (welcome.island_id, welcome.incarnation) == (self.island_id, self.incarnation)
        return same and len(welcome.fragments) == len(self.overwritten_tokens) and welcome.start_step <= self.at.step
