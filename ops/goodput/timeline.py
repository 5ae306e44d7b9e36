"""What islands and jobs make of their failures: when they train, with which share of their slices, and why not.

Two state machines, driven by drawn losses (:mod:`ops.goodput.fleet`) and nothing else::

    elastic   TRAINING --a loss, at the next check--> SCALING DOWN --+--> TRAINING with what is there
                 |  \\--slices are back and waited long--> SCALING UP --+
                 +--the last slice went--> DOWN --a slice is back, restart--> TRAINING
    rigid     TRAINING --a loss, at the next check--> RESTARTING --> TRAINING, whole

The mesh is settled at the end of a pause: slices lost during it are left out and slices that came back are taken in
without further cost. So failures that hit during a pause are absorbed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ops.goodput.fleet import FailureModel, Loss

Floats = NDArray[np.float64]
Progress = Callable[[float], None]


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
    """The life of an island or a job.

    Attributes:
        duration_s: Its length; everything below lies within.
        from_s: Starts of the intervals in which it trains, ascending, float64 ``[n]``.
        to_s: Their ends; no two intervals overlap.
        share: Part of its slices that trains in each, 0 to 1.
        idle: When it does not train, by cause: (from, to) of all that is not in an interval, ``[k, 2]``.
        down_from_s: Moments at which it lost its last slice, and with it what it had not handed over, ``[k]``.
        down_to_s: When it trained again.
        lost_s: Training of a whole island, in seconds, that was lost at each of these moments.
    """

    duration_s: float
    from_s: Floats
    to_s: Floats
    share: Floats
    idle: Mapping[Cause, Floats]
    down_from_s: Floats
    down_to_s: Floats
    lost_s: Floats

    @property
    def trained_s(self) -> float:
        """Seconds in which it trains, with whatever share of its slices."""
        return float(np.sum(self.to_s - self.from_s))

    @property
    def idle_s(self) -> dict[Cause, float]:
        """Seconds in which it does not train, by cause."""
        return {cause: float(np.sum(spans[:, 1] - spans[:, 0])) for cause, spans in self.idle.items()}

    def gaps(self) -> list[tuple[float, float]]:
        """Returns (start, length) of the times in which it does not train, in seconds."""
        starts = np.concatenate([[0.0], self.to_s])
        ends = np.concatenate([self.from_s, [self.duration_s]])
        return [(at, to - at) for at, to in zip(starts.tolist(), ends.tolist(), strict=True) if to > at]


class _Recorder:
    """Collects a time line, cut off at its end."""

    def __init__(self, end_s: float) -> None:
        self.end_s = end_s
        self.training: list[tuple[float, float, float]] = []
        self.down: list[tuple[float, float, float]] = []
        self.spans: dict[Cause, list[tuple[float, float]]] = {cause: [] for cause in Cause}

    def train(self, from_s: float, to_s: float, share: float) -> None:
        if from_s < min(to_s, self.end_s):
            self.training.append((from_s, min(to_s, self.end_s), share))

    def idle(self, from_s: float, to_s: float, cause: Cause) -> None:
        if from_s < min(to_s, self.end_s):
            self.spans[cause].append((from_s, min(to_s, self.end_s)))

    def lose(self, from_s: float, to_s: float, lost_s: float) -> None:
        if from_s < self.end_s:
            self.down.append((from_s, min(to_s, self.end_s), lost_s))

    def line(self) -> TimeLine:
        training = np.array(self.training, dtype=np.float64).reshape(-1, 3)
        down = np.array(self.down, dtype=np.float64).reshape(-1, 3)
        return TimeLine(
            duration_s=self.end_s,
            from_s=training[:, 0],
            to_s=training[:, 1],
            share=training[:, 2],
            idle={cause: np.array(spans, dtype=np.float64).reshape(-1, 2) for cause, spans in self.spans.items()},
            down_from_s=down[:, 0],
            down_to_s=down[:, 1],
            lost_s=down[:, 2],
        )


def elastic_line(
    losses: Iterator[Loss],
    slices: int,
    model: FailureModel,
    end_s: float,
    *,
    catch_up_s: float = 0.0,
    on_progress: Progress | None = None,
) -> TimeLine:
    """Returns the life of an island or job that goes on with the slices it has.

    Args:
        losses: In order of time, without end.
        slices: Of the island or job.
        model: What things cost.
        end_s: Simulated seconds.
        catch_up_s: Added to each pause.
        on_progress: Called with the simulated time now and then.
    """
    recorder = _Recorder(end_s)
    returns: list[tuple[float, int]] = []  # heap of (when, how many) for the slices that are away
    away, now_s, since_restart_s, pauses = 0, 0.0, 0.0, 0
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
        recorder.train(now_s, stop_s, share)
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
        recorder.idle(stop_s, resume_s, Cause.ISLAND_DOWN if down else Cause.PAUSED)
        if down:
            recorder.lose(stop_s, resume_s, share * not_handed_over_s(since_restart_s, model.interval_s))
            since_restart_s = 0.0
        now_s = resume_s
        pauses += 1
        if on_progress is not None and pauses % 16_384 == 0:
            on_progress(min(now_s, end_s))
    return recorder.line()


def rigid_line(
    losses: Iterator[Loss], model: FailureModel, end_s: float, *, on_progress: Progress | None = None
) -> TimeLine:
    """Returns the life of a job that any loss stops as a whole, until it has restarted with all its slices.

    A single slice is replaced by a spare, so that the restart is all it costs; a domain is waited for.
    """
    recorder = _Recorder(end_s)
    now_s, pauses = 0.0, 0
    loss = next(losses)
    while now_s < end_s:
        stop_s = loss.at_s if math.isinf(loss.draw) else noticed_s(loss.at_s, now_s, model.check_s)
        recorder.train(now_s, stop_s, 1.0)
        resume_s, down = stop_s + model.restart_s, False
        while loss.at_s <= min(resume_s, end_s):
            if math.isinf(loss.draw):
                resume_s, down = max(resume_s, loss.back_s + model.restart_s), True
            loss = next(losses)
        recorder.idle(stop_s, resume_s, Cause.ISLAND_DOWN if down else Cause.PAUSED)
        now_s = resume_s
        pauses += 1
        if on_progress is not None and pauses % 16_384 == 0:
            on_progress(min(now_s, end_s))
    return recorder.line()


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
