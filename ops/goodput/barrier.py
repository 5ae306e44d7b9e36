"""Synchronous DiLoCo: islands that fail on their own, and meet at a barrier every sync interval.

An island that is paused keeps the others waiting, from the moment they have done their steps; up to there its pause is
hidden. The exchange itself takes no time here: what links cost is another question.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ops.goodput.fleet import FailureModel, Outage
from ops.goodput.timeline import Cause, Progress, TimeLine, without

_CHUNK = 1024


@dataclass(slots=True)
class _Island:
    """An island's intervals of training, and how far they are used up."""

    from_s: list[float]
    to_s: list[float]
    index: int = 0

    def finish_s(self, start_s: float, work_s: float) -> float:
        """Returns when ``work_s`` of training from ``start_s`` on are done; infinite if that is after the end."""
        i, count = self.index, len(self.from_s)
        while i < count:
            begin_s = max(self.from_s[i], start_s)
            available_s = self.to_s[i] - begin_s
            if available_s >= work_s:
                self.index = i
                return begin_s + work_s
            work_s -= max(0.0, available_s)
            i += 1
        self.index = i
        return math.inf


def coupled(
    lines: Sequence[TimeLine],
    paces: Sequence[float],
    model: FailureModel,
    coordinator: Sequence[Outage],
    rng: np.random.Generator,
    *,
    on_progress: Progress | None = None,
) -> list[TimeLine]:
    """Returns the lives of islands that wait for each other.

    Args:
        lines: The islands' lives if nobody waited, of one length.
        paces: Their lasting step times, relative to ``model.step_s``.
        model: Sync interval and jitter.
        coordinator: Outages of the coordinator, during which no barrier opens.
        rng: For the jitter.
        on_progress: Called with the simulated time now and then.
    """
    end_s = lines[0].duration_s
    islands = [_Island(from_s=line.from_s.tolist(), to_s=line.to_s.tolist()) for line in lines]
    steps_s = [pace * model.interval_s for pace in paces]
    # Steps of one interval add up, so that their jitter averages out.
    jitter = model.step_jitter / math.sqrt(model.sync_interval)
    waits: list[list[tuple[float, float]]] = [[] for _ in lines]
    stuck: list[tuple[float, float]] = []
    barriers, outage, start_s = [0.0], 0, 0.0
    factors: list[list[float]] = []
    while start_s < end_s:
        if not factors:
            factors = np.maximum(0.1, 1.0 + jitter * rng.standard_normal((_CHUNK, len(lines)))).tolist()
            if on_progress is not None:
                on_progress(start_s)
        finishes = [
            island.finish_s(start_s, step_s * factor)
            for island, step_s, factor in zip(islands, steps_s, factors.pop(), strict=True)
        ]
        barrier_s = min(max(finishes), end_s)
        for finish_s, of_island in zip(finishes, waits, strict=True):
            if finish_s < barrier_s:
                of_island.append((finish_s, barrier_s))
        while outage < len(coordinator) and coordinator[outage].to_s <= barrier_s:
            outage += 1
        start_s = barrier_s
        if outage < len(coordinator) and coordinator[outage].from_s < barrier_s < end_s:
            start_s = min(coordinator[outage].to_s, end_s)
            stuck.append((barrier_s, start_s))
        barriers.append(start_s)
    result = []
    for line, of_island in zip(lines, waits, strict=True):
        together = without(without(line, stuck, Cause.COORDINATOR), of_island, Cause.WAITING)
        result.append(replace(together, lost_s=_lost_since_barrier_s(together, np.array(barriers))))
    return result


def _lost_since_barrier_s(line: TimeLine, barriers_s: np.ndarray) -> np.ndarray:
    """Returns what an island that went down had trained since the last barrier, where everything is handed over."""
    knots = np.stack([line.from_s, line.to_s], axis=1).ravel()
    seconds = np.stack([np.zeros_like(line.share), (line.to_s - line.from_s) * line.share], axis=1).ravel()
    if not len(knots) or not len(line.down_from_s):
        return np.zeros_like(line.down_from_s)
    barrier_s = barriers_s[np.searchsorted(barriers_s, line.down_from_s, side="right") - 1]
    trained_s = np.cumsum(seconds)
    lost_s: np.ndarray = np.interp(line.down_from_s, knots, trained_s) - np.interp(barrier_s, knots, trained_s)
    return lost_s
