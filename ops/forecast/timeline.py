r"""Time lines of islands and jobs: when they train, with which share of slices, and why not. Pure.

Two state machines, driven by drawn losses (:mod:`ops.forecast.failures`)::

    elastic   TRAINING --a loss, at the next check--> SCALING DOWN --+--> TRAINING with what is there
                 |  \--slices are back and waited long--> SCALING UP --+
                 +--the last slice went--> DOWN --a slice is back, restart--> TRAINING
    rigid     TRAINING --a loss, at the next check--> RESTARTING --> TRAINING, whole

The mesh is settled at the end of a pause: slices lost during it are left out and slices that came back are taken in
without further cost. So failures that hit during a pause are absorbed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ops.forecast.failures import FailureModel, Loss

Floats = NDArray[np.float64]


class Cause(StrEnum):
    """The cause of time without useful training."""

    PAUSED = "paused"  # scaling down, up, catching up; restarting where that is all a job can do
    CAPACITY_AWAY = "capacity_away"  # slices under repair while the rest trains
    ISLAND_DOWN = "island_down"  # no slice left, up to the end of the restart
    ISLAND_LOST = "island_lost"  # trained, but gone with the island before it was handed over
    STALE = "stale"  # trained, but refused as too stale


class Pause(NamedTuple):
    """A time in which an island does not train, in seconds from the start of its line."""

    at_s: float
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLine:
    """The life of an island or a job."""

    duration_s: float  # its length; everything below lies within
    from_s: Floats  # starts of the intervals in which it trains, ascending, float64 [n]
    to_s: Floats  # their ends; no two intervals overlap
    share: Floats  # part of its slices that trains in each, 0 to 1
    idle: Mapping[Cause, Floats]  # (from, to) of all that is not in an interval, by cause, [k, 2]
    down_from_s: Floats  # losses of its last slice, and so of all training not handed over, [k]
    down_to_s: Floats  # when it trained again
    lost_s: Floats  # training of a whole island, in seconds, that was lost at each of these moments

    def gaps(self) -> list[Pause]:
        """Returns the pauses in order."""
        starts = np.concatenate([[0.0], self.to_s])
        ends = np.concatenate([self.from_s, [self.duration_s]])
        return [Pause(at, to - at) for at, to in zip(starts.tolist(), ends.tolist(), strict=True) if to > at]

    def trained(self, *, whole: bool = False) -> tuple[Floats, Floats]:
        """Returns the knots of a piecewise linear function: times, and seconds trained up to each.

        Seconds of the whole island: one with half of its slices earns half a second per second; with ``whole``, a full
        one.
        """
        gains = self.to_s - self.from_s if whole else (self.to_s - self.from_s) * self.share
        knots = np.stack([self.from_s, self.to_s], axis=1).ravel()
        earned = np.cumsum(np.stack([np.zeros_like(gains), gains], axis=1).ravel())
        return np.concatenate([[0.0], knots]), np.concatenate([[0.0], earned])


@dataclass(slots=True)
class _Record:
    """A time line under construction; rows may end after its end."""

    training: list[tuple[float, float, float]] = field(default_factory=list)  # from, to, share
    idle: dict[Cause, list[tuple[float, float]]] = field(default_factory=lambda: {cause: [] for cause in Cause})
    down: list[tuple[float, float, float]] = field(default_factory=list)  # from, to, lost

    def line(self, end_s: float) -> TimeLine:
        """Returns the time line, cut off at its end."""

        def cut(rows: Sequence[tuple[float, ...]], columns: int) -> Floats:
            found = np.array(rows, dtype=np.float64).reshape(-1, columns)
            found[:, 1] = np.minimum(found[:, 1], end_s)
            return found[found[:, 0] < found[:, 1]]

        from_s, to_s, share = cut(self.training, 3).T
        down_from_s, down_to_s, lost_s = cut(self.down, 3).T
        return TimeLine(
            duration_s=end_s,
            from_s=from_s,
            to_s=to_s,
            share=share,
            idle={cause: cut(spans, 2) for cause, spans in self.idle.items()},
            down_from_s=down_from_s,
            down_to_s=down_to_s,
            lost_s=lost_s,
        )


def elastic_line(
    losses: Iterator[Loss], slices: int, model: FailureModel, end_s: float, *, catch_up_s: float = 0.0
) -> TimeLine:
    """Returns the time line up to ``end_s`` of an island or job that continues with its remaining slices.

    ``losses`` are in order of time, without end; ``catch_up_s`` is added to each pause.
    """
    record = _Record()
    returns_s: deque[float] = deque()  # when each slice that is away is repaired
    now_s, since_restart_s, earned_s = 0.0, 0.0, 0.0
    loss = next(losses)
    while now_s < end_s:
        share = 1.0 - len(returns_s) / slices
        stop_s = returns_s[0] + model.rejoin_wait_s if returns_s else math.inf
        while loss.at_s < stop_s and loss.draw * slices < len(returns_s):  # it hits a slice that is away already
            loss = next(losses)
        pause_s = model.scale_up_s
        if loss.at_s < stop_s:
            stop_s = min(stop_s, loss.at_s if slices == 1 else noticed_s(loss.at_s, now_s, model.check_s))
            pause_s = model.scale_down_s
        record.training.append((now_s, stop_s, share))
        since_restart_s, earned_s = since_restart_s + stop_s - now_s, earned_s + share * (stop_s - now_s)

        resume_s, down = stop_s + pause_s + catch_up_s, False
        while True:
            while loss.at_s <= min(resume_s, end_s):
                if loss.draw * slices >= len(returns_s):
                    returns_s.append(loss.at_s + model.repair_s)
                loss = next(losses)
            while returns_s and returns_s[0] <= resume_s:
                returns_s.popleft()
            if len(returns_s) < slices:
                break
            down = True
            resume_s = returns_s[0] + model.restart_s
        record.idle[Cause.ISLAND_DOWN if down else Cause.PAUSED].append((stop_s, resume_s))
        if down:
            lost_s = min(earned_s, share * not_handed_over_s(since_restart_s, model.interval_s))
            record.down.append((stop_s, resume_s, lost_s))
            since_restart_s = earned_s = 0.0
        now_s = resume_s
    return record.line(end_s)


def rigid_line(losses: Iterator[Loss], model: FailureModel, end_s: float) -> TimeLine:
    """Returns the time line of a job that stops at any loss until it has restarted with all slices.

    A spare replaces the lost slice, so the restart is the only cost.
    """
    record = _Record()
    now_s = 0.0
    loss = next(losses)
    while now_s < end_s:
        stop_s = noticed_s(loss.at_s, now_s, model.check_s)
        resume_s = stop_s + model.restart_s
        record.training.append((now_s, stop_s, 1.0))
        record.idle[Cause.PAUSED].append((stop_s, resume_s))
        while loss.at_s <= min(resume_s, end_s):
            loss = next(losses)
        now_s = resume_s
    return record.line(end_s)


def noticed_s(at_s: float, since_s: float, check_s: float) -> float:
    """Returns when an event at ``at_s`` is noticed, with checks every ``check_s`` after ``since_s``."""
    if check_s <= 0.0:
        return at_s
    return since_s + math.ceil((at_s - since_s) / check_s) * check_s


def not_handed_over_s(trained_s: float, interval_s: float) -> float:
    """Returns the training since a restart that is not handed over yet, in seconds.

    A mean over fragments, whose hand-overs are spread evenly over the interval: half an interval once all have had
    their first.
    """
    if trained_s >= interval_s:
        return interval_s / 2.0
    return trained_s - trained_s**2 / (2.0 * interval_s)
