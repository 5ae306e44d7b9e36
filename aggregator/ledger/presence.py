"""An island, as far as its data are concerned: what must be known of it, and what it is told. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from broker.wire.messages import Block, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """One island, as far as shares are concerned.

    Attributes:
        home: Number of its own share.
        away_s: Seconds since it was heard; infinite once it has left.
        able: It trains now, and what it trains is merged, so it can take a share over.
        quarantined: Nothing that it trains is merged: it keeps its home, and what it took over goes on to others.
        batch_tokens: Tokens in one of its batches; 0: it has not said.
        step_time_s: Of its inner steps; None: not known yet.
        block: Number of the block that it trains.
        released: Numbers of blocks that it needs no more.
    """

    island_id: str
    home: int
    away_s: float
    able: bool
    quarantined: bool = False
    batch_tokens: int = 0
    step_time_s: float | None = None
    block: int = 0
    released: tuple[int, ...] = ()


class Told(NamedTuple):
    """The data of one island, for its next :class:`~broker.wire.messages.FleetState`."""

    share: Share
    taken_over: tuple[Share, ...] = ()
    blocks: tuple[Block, ...] = ()
