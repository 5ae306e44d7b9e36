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
from ops.goodput.timeline import Cause, Floats, Progress, TimeLine, without

_CHUNK = 1024


@dataclass(slots=True)
class _Island:
    """An island's intervals of training, and how far they are used up."""

    from_s: list[float]
    to_s: list[float]
    index: int = 0

    def trains_until_s(self, now_s: float) -> float:
        """Returns when the next pause begins; ``now_s`` or less if that is not known to lie ahead."""
        if self.index >= len(self.from_s) or self.from_s[self.index] > now_s:
            return now_s
        return self.to_s[self.index]

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
    steps_s = np.array([pace * model.interval_s for pace in paces])
    # Steps of one interval add up, so that their jitter averages out.
    jitter = model.step_jitter / math.sqrt(model.sync_interval)
    waits: list[Floats] = []  # barrier -> when each island was there, and the barrier itself
    stuck: list[tuple[float, float]] = []
    outage, start_s, used = 0, 0.0, _CHUNK
    barriers = [np.zeros(1)]
    work_s, through_s = np.empty((0, len(lines))), np.zeros(1)
    while start_s < end_s:
        if used == _CHUNK:
            factors = np.maximum(0.1, 1.0 + jitter * rng.standard_normal((_CHUNK, len(lines))))
            work_s, used = steps_s * factors, 0
            through_s = np.concatenate([[0.0], np.cumsum(work_s.max(axis=1))])
            if on_progress is not None:
                on_progress(start_s)
        # While nobody pauses, and that is nearly always where failures are rare, one barrier follows from another.
        until_s = min(end_s, *(island.trains_until_s(start_s) for island in islands))
        if outage < len(coordinator):
            until_s = min(until_s, coordinator[outage].from_s)
        free = int(np.searchsorted(through_s, through_s[used] + until_s - start_s)) - 1 - used
        if free > 0:
            ends_s = start_s + through_s[used : used + free + 1] - through_s[used]
            there_s = ends_s[:-1, np.newaxis] + work_s[used : used + free]
            waits.append(np.column_stack([there_s, ends_s[1:]]))
            barriers.append(ends_s[1:])
            start_s, used = float(ends_s[-1]), used + free
            continue
        finishes = [island.finish_s(start_s, each) for island, each in zip(islands, work_s[used].tolist(), strict=True)]
        used += 1
        barrier_s = min(max(finishes), end_s)
        waits.append(np.array([[*finishes, barrier_s]]))
        while outage < len(coordinator) and coordinator[outage].to_s <= barrier_s:
            outage += 1
        start_s = barrier_s
        if outage < len(coordinator) and coordinator[outage].from_s < barrier_s < end_s:
            start_s = min(coordinator[outage].to_s, end_s)
            stuck.append((barrier_s, start_s))
        barriers.append(np.array([start_s]))
    there = np.concatenate(waits)
    result = []
    for k, line in enumerate(lines):
        waited = there[there[:, k] < there[:, -1]][:, [k, -1]]
        together = without(without(line, stuck, Cause.COORDINATOR), waited, Cause.WAITING)
        result.append(replace(together, lost_s=_lost_since_barrier_s(together, np.concatenate(barriers))))
    return result


def _lost_since_barrier_s(line: TimeLine, barriers_s: np.ndarray) -> np.ndarray:
    """Returns what an island that went down had trained since the last barrier, where everything is handed over.

    What it lost before, in the same interval, is lost once.
    """
    knots = np.stack([line.from_s, line.to_s], axis=1).ravel()
    seconds = np.stack([np.zeros_like(line.share), (line.to_s - line.from_s) * line.share], axis=1).ravel()
    if not len(knots) or not len(line.down_from_s):
        return np.zeros_like(line.down_from_s)
    barrier_s = barriers_s[np.searchsorted(barriers_s, line.down_from_s, side="right") - 1]
    since_s = np.maximum(barrier_s, np.concatenate([[0.0], line.down_to_s[:-1]]))
    trained_s = np.cumsum(seconds)
    lost_s: np.ndarray = np.interp(line.down_from_s, knots, trained_s) - np.interp(since_s, knots, trained_s)
    return lost_s
