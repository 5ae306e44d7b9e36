"""Goodput, uptime, waste by cause and mean staleness of time lines, with confidence intervals. Pure.

Goodput is the share of the allocated time of all slices that trains what counts. Uptime is the share of time in which
at least one island trains. Goodput and all waste add up to 1.

Confidence intervals are of the mean over a long run, by batch means: :data:`BATCHES` equal parts of the time line are
taken as independent. They tell how far another seed may lie, not how well the model fits the world.

Staleness: each fragment is merged once per sync interval of the fleet's clock, which advances at the mean rate of the
islands that are not down. An island that trains at that moment hands over its training since the last hand-over; one
that pauses misses the round and hands over more at the next. It adopts the new version ``overlap`` steps later.
Staleness is the mean over the steps of a contribution of (version it is merged into - version the step was trained on),
as the aggregator computes it (reference.md, section 4.4). One with a step older than ``max_staleness`` is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.forecast.failures import BATCHES, FailureModel
from ops.forecast.timeline import Cause, Floats, TimeLine

CONFIDENCE = 0.95

#: Two-sided 95 % quantile of Student's t with BATCHES - 1 = 19 degrees of freedom.
_T_QUANTILE = 2.093


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A share of 0 to 1 and the interval that covers its mean with :data:`CONFIDENCE`."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The shares of the fleet's time: useful, up, and wasted by cause."""

    goodput: Estimate
    uptime: Estimate
    wasted: Mapping[Cause, Estimate]  # with goodput they add up to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Training of one island that was wasted."""

    cause: Cause
    at_s: Floats  # when it was found out, in seconds, [k]
    lost_s: Floats  # how much, in seconds of the whole island, [k]


def account(lines: Sequence[TimeLine], dropped: Sequence[Dropped] = ()) -> Account:
    """Returns the shares of time of equal islands, or of one job; ``dropped``: wasted training."""
    duration_s, count = lines[0].duration_s, len(lines)
    edges_s = np.linspace(0.0, duration_s, BATCHES + 1)
    useful_s = np.zeros(BATCHES)
    wasted_s = {cause: np.zeros(BATCHES) for cause in Cause}
    for line in lines:
        present_s = np.diff(np.interp(edges_s, *line.trained()))
        useful_s += present_s
        wasted_s[Cause.CAPACITY_AWAY] += np.diff(np.interp(edges_s, *line.trained(whole=True))) - present_s
        for cause, spans in line.idle.items():
            wasted_s[cause] += np.diff(np.interp(edges_s, *_running_total(*_steps_of([(spans[:, 0], spans[:, 1])]))))
    for each in dropped:
        lost_s = np.histogram(np.clip(each.at_s, 0.0, duration_s), edges_s, weights=each.lost_s)[0]
        wasted_s[each.cause] += lost_s
        useful_s -= lost_s
    batch_s = duration_s / BATCHES
    times_s, training = _steps_of([(line.from_s, line.to_s) for line in lines])
    stepping_s = np.diff(np.interp(edges_s, *_running_total(times_s, training > 0)))
    return Account(
        goodput=batch_means(useful_s / (batch_s * count)),
        uptime=batch_means(stepping_s / batch_s),
        wasted={cause: batch_means(seconds / (batch_s * count)) for cause, seconds in wasted_s.items()},
    )


def _steps_of(intervals: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Returns the number of open intervals over time: ascending edges, and the count after each."""
    starts_s, ends_s = (np.concatenate(column) for column in zip(*intervals, strict=True))
    times_s = np.concatenate([[0.0], starts_s, ends_s])
    changes = np.concatenate([[0.0], np.ones_like(starts_s), -np.ones_like(ends_s)])
    order = np.argsort(times_s, kind="stable")
    return times_s[order], np.cumsum(changes[order])


def _running_total(times_s: Floats, rates: NDArray[Any]) -> tuple[Floats, Floats]:
    """Returns the integral of a step function at its edges; the last rate is not used."""
    return times_s, np.concatenate([[0.0], np.cumsum(np.diff(times_s) * rates[:-1])])


def batch_means(samples: Floats) -> Estimate:
    """Returns the mean of equally long batches and its confidence interval, cut to 0..1."""
    half = _T_QUANTILE * float(np.std(samples, ddof=1)) / math.sqrt(len(samples))
    mean = min(1.0, max(0.0, float(np.mean(samples))))  # cut: the last bit of a sum
    return Estimate(value=mean, low=max(0.0, mean - half), high=min(1.0, mean + half))


# --- staleness ----------------------------------------------------------------------------------------------------

#: Contributions that are looked at, at least where the run is long enough; fragments are alike but for their phase.
_SAMPLE = 400_000


def contributions(lines: Sequence[TimeLine], model: FailureModel) -> tuple[float | None, list[Dropped]]:
    """Returns the mean staleness of merged training, and each island's training refused as too stale."""
    times_s, clock_s = fleet_clock(lines)
    rounds = int(clock_s[-1] / model.interval_s)
    phases = min(model.sync_interval, max(1, _SAMPLE // max(1, rounds * len(lines))))
    total, merged = 0.0, 0
    refused: list[list[tuple[Floats, Floats]]] = [[] for _ in lines]
    for phase in range(phases):
        targets_s = (np.arange(rounds) + (phase + 0.5) / phases) * model.interval_s
        due_s = np.interp(targets_s, clock_s, times_s)
        for line, of_island in zip(lines, refused, strict=True):
            at_s, staleness, oldest, seconds = _of_island(line, due_s, model)
            fresh = oldest <= model.max_staleness
            total, merged = total + float(np.sum(staleness[fresh])), merged + int(np.sum(fresh))
            of_island.append((at_s[~fresh], seconds[~fresh] / phases))
    dropped: list[Dropped] = []
    for of_island in refused:
        at, lost = (np.concatenate(column) for column in zip(*of_island, strict=True))
        dropped.append(Dropped(cause=Cause.STALE, at_s=at, lost_s=lost))
    return total / merged if merged else None, dropped


def fleet_clock(lines: Sequence[TimeLine]) -> tuple[Floats, Floats]:
    """Returns the knots of the fleet's clock: times, and training towards the sync interval."""
    trains = _steps_of([(line.from_s, line.to_s) for line in lines])
    down = _steps_of([(line.down_from_s, line.down_to_s) for line in lines])
    times_s = np.unique(np.concatenate([trains[0], down[0], [lines[0].duration_s]]))
    training, missing = (count[np.searchsorted(at_s, times_s, side="right") - 1] for at_s, count in (trains, down))
    return _running_total(times_s, training / np.maximum(len(lines) - missing, 1.0))


def _of_island(line: TimeLine, due_s: Floats, model: FailureModel) -> tuple[Floats, Floats, Floats, Floats]:
    """Returns time, staleness, oldest staleness and training of each contribution of an island.

    Training is in seconds of the whole island. Round j closes at ``due_s[j]`` while version j is the newest. ``begin``
    and ``end`` below are training time; versions change along it where the island adopts, so that the integral of the
    version over it is linear in between.
    """
    knots_s, earned_s = line.trained(whole=True)
    adopts = np.interp(due_s + model.overlap * model.step_s, knots_s, earned_s)  # version j + 1, by work
    corners = np.concatenate([[0.0], adopts, [earned_s[-1]]])
    integral = np.concatenate([[0.0], np.cumsum(np.diff(corners) * np.arange(len(corners) - 1))])

    interval = np.searchsorted(line.from_s, due_s, side="right") - 1
    trains = (interval >= 0) & (due_s < line.to_s[interval]) if len(line.from_s) else np.zeros(len(due_s), bool)
    j = np.flatnonzero(trains)
    start_s = np.concatenate([[0.0], due_s[j]])[:-1]
    if len(line.down_from_s):  # training that was not handed over is lost
        last = np.searchsorted(line.down_from_s, due_s[j], side="right") - 1
        start_s = np.where(last >= 0, np.maximum(start_s, line.down_to_s[np.maximum(last, 0)]), start_s)
    begin, end = np.interp(start_s, knots_s, earned_s), np.interp(due_s[j], knots_s, earned_s)
    some = end > begin + 1e-9
    j, start_s, begin, end = j[some], start_s[some], begin[some], end[some]
    of_versions = np.interp(end, corners, integral) - np.interp(begin, corners, integral)
    staleness = np.maximum(0.0, j - of_versions / (end - begin))
    oldest = j - np.searchsorted(adopts, begin + 1e-9, side="right")
    seconds = np.interp(due_s[j], *line.trained()) - np.interp(start_s, *line.trained())
    return due_s[j], staleness, oldest.astype(np.float64), seconds
