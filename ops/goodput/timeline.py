r"""The time line of an island or a job: when it trains, with which share of slices, and why not. Pure.

Two state machines, driven by drawn losses (:mod:`ops.goodput.fleet`)::

    elastic   TRAINING --a loss, at the next check--> SCALING DOWN --+--> TRAINING with what is there
                 |  \--slices are back and waited long--> SCALING UP --+
                 +--the last slice went--> DOWN --a slice is back, restart--> TRAINING
    rigid     TRAINING --a loss, at the next check--> RESTARTING --> TRAINING, whole

The mesh is settled at the end of a pause: slices lost during it are left out and slices that came back are taken in
without further cost. So failures that hit during a pause are absorbed.

Islands of synchronous DiLoCo meet at a barrier every sync interval. One that is paused keeps the others waiting, from
the moment they have done their steps; up to there its pause is hidden. The exchange itself takes no time here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ops.goodput.fleet import FailureModel, Loss, Outage

Floats = NDArray[np.float64]


class Cause(StrEnum):
    """Why time of the fleet trained nothing that counts."""

    PAUSED = "paused"  # scaling down, up, catching up; restarting where that is all a job can do
    CAPACITY_AWAY = "capacity_away"  # slices under repair while the rest trains
    ISLAND_DOWN = "island_down"  # no slice left, up to the end of the restart
    WAITING = "waiting"  # for slower or paused islands
    COORDINATOR = "coordinator"  # the coordinator was away, for longer than islands may go on alone
    ISLAND_LOST = "island_lost"  # trained, but gone with the island before it was handed over
    STALE = "stale"  # trained, but refused as too stale


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLine:
    """The life of an island or a job."""

    duration_s: float  # its length; everything below lies within
    from_s: Floats  # starts of the intervals in which it trains, ascending, float64 [n]
    to_s: Floats  # their ends; no two intervals overlap
    share: Floats  # part of its slices that trains in each, 0 to 1
    idle: Mapping[Cause, Floats]  # (from, to) of all that is not in an interval, by cause, [k, 2]
    down_from_s: Floats  # when it lost its last slice, and with it what it had not handed over, [k]
    down_to_s: Floats  # when it trained again
    lost_s: Floats  # training of a whole island, in seconds, that was lost at each of these moments

    @property
    def idle_s(self) -> dict[Cause, float]:
        """Seconds in which it does not train, by cause."""
        return {cause: float(np.sum(spans[:, 1] - spans[:, 0])) for cause, spans in self.idle.items()}

    def gaps(self) -> list[tuple[float, float]]:
        """Returns (start, length) of the times in which it does not train, in seconds."""
        starts = np.concatenate([[0.0], self.to_s])
        ends = np.concatenate([self.from_s, [self.duration_s]])
        return [(at, to - at) for at, to in zip(starts.tolist(), ends.tolist(), strict=True) if to > at]


@dataclass(slots=True)
class _Record:
    """A time line under way: rows may end after its end."""

    end_s: float
    training: list[tuple[float, float, float]] = field(default_factory=list)  # from, to, share
    idle: dict[Cause, list[tuple[float, float]]] = field(default_factory=lambda: {cause: [] for cause in Cause})
    down: list[tuple[float, float, float]] = field(default_factory=list)  # from, to, lost

    def line(self) -> TimeLine:
        """Returns the time line, cut off at its end."""
        training, down = self._cut(self.training, 3), self._cut(self.down, 3)
        return TimeLine(
            duration_s=self.end_s,
            from_s=training[:, 0],
            to_s=training[:, 1],
            share=training[:, 2],
            idle={cause: self._cut(spans, 2) for cause, spans in self.idle.items()},
            down_from_s=down[:, 0],
            down_to_s=down[:, 1],
            lost_s=down[:, 2],
        )

    def _cut(self, rows: Sequence[tuple[float, ...]], columns: int) -> Floats:
        found = np.array(rows, dtype=np.float64).reshape(-1, columns)
        found[:, 1] = np.minimum(found[:, 1], self.end_s)
        return found[found[:, 0] < found[:, 1]]


def elastic_line(
    losses: Iterator[Loss],
    slices: int,
    model: FailureModel,
    end_s: float,
    *,
    catch_up_s: float = 0.0,
) -> TimeLine:
    """Returns the life up to ``end_s`` of an island or job of ``slices`` that goes on with those it has.

    ``losses`` are in order of time, without end; ``catch_up_s`` is added to each pause.
    """
    record = _Record(end_s)
    returns: list[tuple[float, int]] = []  # heap of (when, how many) for the slices that are away
    away, now_s, since_restart_s = 0, 0.0, 0.0
    loss = next(losses)
    while now_s < end_s:
        share = 1.0 - away / slices
        stop_s = returns[0][0] + model.rejoin_wait_s if returns else math.inf
        while loss.at_s < stop_s and loss.draw * slices < away:  # it hits a slice that is away already
            loss = next(losses)
        pause_s = model.scale_up_s
        if loss.at_s < stop_s:
            stop_s = min(stop_s, loss.at_s if loss.slices >= slices else noticed_s(loss.at_s, now_s, model.check_s))
            pause_s = model.scale_down_s
        record.training.append((now_s, stop_s, share))
        since_restart_s += stop_s - now_s

        resume_s, down = stop_s + pause_s + catch_up_s, False
        while True:
            while loss.at_s <= min(resume_s, end_s):
                if loss.draw * slices >= away:
                    away += loss.slices
                    heapq.heappush(returns, (loss.back_s, loss.slices))
                loss = next(losses)
            while returns and returns[0][0] <= resume_s:
                away -= heapq.heappop(returns)[1]
            if away < slices:
                break
            down = True
            resume_s = returns[0][0] + model.restart_s
        record.idle[Cause.ISLAND_DOWN if down else Cause.PAUSED].append((stop_s, resume_s))
        if down:
            record.down.append((stop_s, resume_s, share * not_handed_over_s(since_restart_s, model.interval_s)))
            since_restart_s = 0.0
        now_s = resume_s
    return record.line()


def rigid_line(losses: Iterator[Loss], model: FailureModel, end_s: float) -> TimeLine:
    """Returns the life of a job that any loss stops until it has restarted with all its slices.

    A single slice is replaced by a spare, so that the restart is all it costs; a domain is waited for.
    """
    record = _Record(end_s)
    now_s = 0.0
    loss = next(losses)
    while now_s < end_s:
        stop_s = loss.at_s if math.isinf(loss.draw) else noticed_s(loss.at_s, now_s, model.check_s)
        record.training.append((now_s, stop_s, 1.0))
        resume_s, down = stop_s + model.restart_s, False
        while loss.at_s <= min(resume_s, end_s):
            if math.isinf(loss.draw):
                resume_s, down = max(resume_s, loss.back_s + model.restart_s), True
            loss = next(losses)
        record.idle[Cause.ISLAND_DOWN if down else Cause.PAUSED].append((stop_s, resume_s))
        now_s = resume_s
    return record.line()


def noticed_s(at_s: float, since_s: float, check_s: float) -> float:
    """Returns when something at ``at_s`` takes effect; checks come every ``check_s`` after ``since_s``."""
    if check_s <= 0.0:
        return at_s
    return since_s + math.ceil((at_s - since_s) / check_s) * check_s


def not_handed_over_s(trained_s: float, interval_s: float) -> float:
    """Returns how much of the training since a restart, in seconds, is not handed over yet.

    A mean over fragments, whose hand-overs are spread evenly over the interval: half an interval once all have had
    their first.
    """
    if trained_s >= interval_s:
        return interval_s / 2.0
    return trained_s - trained_s**2 / (2.0 * interval_s)


def without(line: TimeLine, windows: Sequence[tuple[float, float]] | Floats, cause: Cause) -> TimeLine:
    """Returns a time line that does not train in ``windows``, ascending (from, to) that do not overlap."""
    cut = np.asarray(windows, dtype=np.float64).reshape(-1, 2)
    if not len(cut) or not len(line.from_s):
        return line
    edges = np.unique(np.concatenate([line.from_s, line.to_s, np.clip(cut.ravel(), 0.0, line.duration_s)]))
    middles = (edges[:-1] + edges[1:]) / 2.0
    interval = np.searchsorted(line.from_s, middles, side="right") - 1
    window = np.searchsorted(cut[:, 0], middles, side="right") - 1
    trains = (interval >= 0) & (middles < line.to_s[interval])
    keeps = trains & ~((window >= 0) & (middles < cut[window, 1]))
    shorter = replace(line, from_s=edges[:-1][keeps], to_s=edges[1:][keeps], share=line.share[interval[keeps]])
    lost = trains & ~keeps
    spans = np.stack([edges[:-1][lost], edges[1:][lost]], axis=1)
    return replace(shorter, idle={**line.idle, cause: np.concatenate([line.idle[cause], spans])})


# --- barriers -----------------------------------------------------------------------------------------------------

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
) -> list[TimeLine]:
    """Returns the lives of islands that wait for each other, from their ``lines`` if nobody waited.

    ``paces`` are their lasting step times, relative to ``model.step_s``; ``rng`` draws the jitter. No barrier
    opens while the ``coordinator`` is away.
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
    """Returns the seconds that an island had trained since the last barrier when it went down.

    At a barrier everything is handed over. Training lost earlier in the same interval is not counted again.
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
