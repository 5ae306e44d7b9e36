"""What comes out of a laboratory run, before it becomes a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from islands.tasks.task import Params

#: Rounds kept for the picture of how they overlap.
GANTT_ROUNDS = 60


class Point(NamedTuple):
    """One point of a loss curve."""

    tokens: int
    virtual_s: float
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The final global model of a run and what it took.

    Attributes:
        params: Global parameters at the end.
        curve: Held-out loss on the way, in nats per token, without the end.
        tokens: Trained, by all islands.
        merged_tokens: Of those, in the global model.
        wasted: Cause -> tokens.
        virtual_s: Duration of the run in virtual time.
        train_s: Wall time inside training steps.
        rounds: Merges of one fragment.
        participation: Mean share of live islands in a round.
        staleness: Of contributions, in versions: mean, p50, p90, max.
        staleness_histogram: (versions, contributions), in steps of a quarter.
        gantt: (opened, closed, committed, fragment, contributors) of the first rounds, virtual seconds.
        cosine: Mean cosine between two contributions of a round; None where nothing was merged.
        autocorrelation: Mean cosine between successive merged pseudo-gradients of a fragment.
    """

    params: Params
    curve: Sequence[Point]
    tokens: int
    merged_tokens: int
    virtual_s: float
    train_s: float
    wasted: Mapping[str, int] = field(default_factory=dict)
    rounds: int = 0
    participation: float = 1.0
    staleness: Mapping[str, float] = field(default_factory=dict)
    staleness_histogram: Sequence[tuple[float, int]] = ()
    gantt: Sequence[tuple[float, float, float, int, int]] = ()
    cosine: float | None = None
    autocorrelation: float | None = None


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Returns mean, p50, p90 and max; nothing for nothing."""
    if not values:
        return {}
    p50, p90 = np.percentile(values, [50, 90])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p90": float(p90), "max": float(max(values))}
