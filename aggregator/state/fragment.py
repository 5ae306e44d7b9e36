"""One fragment on the aggregator's side: its newest version, and the round or commit that makes the next. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from aggregator.events import Commit
from aggregator.rules.outliers import FragmentNorms
from aggregator.state.round import Admitted, Round
from broker.wire.messages import Merged


class Stage(StrEnum):
    """Where a fragment is between two versions."""

    IDLE = "idle"
    COLLECTING = "collecting"
    COMPUTING = "computing"
    PERSISTING = "persisting"


@dataclass(slots=True)
class Fragment:
    """One fragment's versions and its current round."""

    stage: Stage = Stage.IDLE
    version: int = -1  #: the newest durable one
    digest: str = ""
    contributions: tuple[Merged, ...] = ()  #: of the newest durable version
    round: Round | None = None  #: while COLLECTING; while COMPUTING and PERSISTING what it brought
    closed_at_s: float = 0.0
    commit: Commit | None = None  #: while PERSISTING
    persist_again_at_s: float | None = None
    held: list[Admitted] = field(default_factory=list)
    norms: FragmentNorms = field(default_factory=FragmentNorms)
    flushed: bool = False
    published_at_s: float | None = None  #: the newest version, to all brokers
    on_their_way: dict[int, float] = field(default_factory=dict)  #: versions that no broker has said it has, since when
    undelivered: bool = False  #: one of them for longer than that usually takes

    @property
    def waiting(self) -> list[Admitted]:
        """Contributions that are held, or in the round."""
        return self.held + (self.round.contributions if self.round is not None else [])

    def in_commit(self, island_id: str, incarnation: int, from_step: int) -> bool:
        """Whether a contribution is in the version that is being made durable right now."""
        parts = self.commit.contributions if self.commit else ()
        return any(
            (m.island_id, m.incarnation, m.steps.from_step) == (island_id, incarnation, from_step) for m in parts
        )
