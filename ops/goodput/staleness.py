"""How stale the contributions of decoupled islands are when they are merged, in versions, from their time lines.

Each fragment is merged once per sync interval of the fleet's own clock, which advances with the islands: at the mean
rate of those that are not down, as the lower median of the design does over more than a pause or two, and not at all
while the coordinator is away. An island that trains at that moment hands over what it has trained since its last
hand-over; one that pauses misses the round and hands over more at the next. It adopts the new version ``overlap`` steps
later.

Staleness is the mean over the steps of a contribution of (version it is merged into - version the step was trained
on), as the aggregator computes it (design, section 4.4). One with a step older than ``max_staleness`` is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ops.goodput.availability import BATCHES, Dropped, half_width, running_total, steps_of, trained_by
from ops.goodput.fleet import FailureModel, Outage, beyond_hold
from ops.goodput.timeline import Cause, Floats, TimeLine, without

#: Edges of the histogram, in versions; the last class has no upper end.
EDGES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)

#: Contributions that are looked at, at least where the run is long enough; fragments are alike but for their phase.
_SAMPLE = 400_000

#: Contributions that the distribution is of, about, where there are more.
_MOST = 20_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Distribution of the staleness of merged contributions, in versions.

    Attributes:
        contributions: How many it is of, a sample of all.
        mean_ci: Confidence interval of the mean; None where some part of the time merged nothing.
        histogram: Lower edge of a class -> share of contributions in it.
    """

    contributions: int
    mean: float
    p50: float
    p90: float
    p99: float
    histogram: Mapping[float, float]
    mean_ci: tuple[float, float] | None = None


def distribution(values: Floats) -> Staleness | None:
    """Returns the distribution of some values; None if there are none."""
    if not len(values):
        return None
    counts = np.histogram(values, [*EDGES, np.inf])[0] / len(values)
    p50, p90, p99 = np.percentile(values, [50, 90, 99]).tolist()
    return Staleness(
        contributions=len(values),
        mean=float(np.mean(values)),
        p50=p50,
        p90=p90,
        p99=p99,
        histogram=dict(zip(EDGES, counts.tolist(), strict=True)),
    )


def contributions(
    lines: Sequence[TimeLine], model: FailureModel, coordinator: Sequence[Outage]
) -> tuple[Staleness | None, list[Dropped]]:
    """Returns the distribution of staleness, and for each island the training that was refused as too stale."""
    times_s, clock_s = fleet_clock(lines, coordinator)
    rounds = int(clock_s[-1] / model.interval_s)
    phases = min(model.sync_interval, max(1, _SAMPLE // max(1, rounds * len(lines))))
    alone = beyond_hold(coordinator, model)  # wasted already
    counting = [trained_by(without(line, alone, Cause.COORDINATOR)) for line in lines]
    every = max(1, rounds * phases * len(lines) // _MOST)  # of so many, some tell as much and fit into memory
    merged: list[Floats] = []
    sums, counts = np.zeros(BATCHES), np.zeros(BATCHES)
    refused: list[list[tuple[Floats, Floats]]] = [[] for _ in lines]
    for phase in range(phases):
        targets_s = (np.arange(rounds) + (phase + 0.5) / phases) * model.interval_s
        due_s = np.interp(targets_s, clock_s, times_s)
        for line, counted, of_island in zip(lines, counting, refused, strict=True):
            at_s, staleness, oldest, seconds = _of_island(line, due_s, model, counted)
            fresh = oldest <= model.max_staleness
            merged.append(staleness[fresh][::every])
            batch = np.minimum((at_s[fresh] / line.duration_s * BATCHES).astype(np.intp), BATCHES - 1)
            sums += np.bincount(batch, weights=staleness[fresh], minlength=BATCHES)
            counts += np.bincount(batch, minlength=BATCHES)
            of_island.append((at_s[~fresh], seconds[~fresh] / phases))
    dropped: list[Dropped] = []
    for of_island in refused:
        at, lost = (np.concatenate(column) for column in zip(*of_island, strict=True))
        dropped.append(Dropped(cause=Cause.STALE, at_s=at, lost_s=lost))
    found = distribution(np.concatenate(merged))
    if found is not None and np.all(counts > 0):
        half = half_width(sums / counts)
        found = replace(found, mean_ci=(max(0.0, found.mean - half), found.mean + half))
    return found, dropped


def fleet_clock(lines: Sequence[TimeLine], coordinator: Sequence[Outage]) -> tuple[Floats, Floats]:
    """Returns the knots of the fleet's clock: times, and seconds of training that count towards the sync interval."""
    trains = _count([(line.from_s, line.to_s) for line in lines])
    down = _count([(line.down_from_s, line.down_to_s) for line in lines])
    away = _count([(np.array([each.from_s for each in coordinator]), np.array([each.to_s for each in coordinator]))])
    end_s = lines[0].duration_s
    times_s = np.unique(np.concatenate([trains[0], down[0], away[0], [end_s]]))
    times_s = times_s[times_s <= end_s]
    training, missing, closed = (_at(times_s, *each) for each in (trains, down, away))
    present = np.maximum(len(lines) - missing, 1.0)
    return running_total(times_s, np.where(closed > 0, 0.0, training / present))


def _count(intervals: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    starts, ends = (np.concatenate(column) for column in zip(*intervals, strict=True))
    return steps_of(starts, ends)


def _at(times_s: Floats, edges_s: Floats, values: Floats) -> Floats:
    found: Floats = values[np.searchsorted(edges_s, times_s, side="right") - 1]
    return found


def _of_island(
    line: TimeLine, due_s: Floats, model: FailureModel, counted: tuple[Floats, Floats]
) -> tuple[Floats, Floats, Floats, Floats]:
    """Returns time, staleness, oldest staleness and training (in whole-island seconds) of an island's contributions.

    Training is what ``counted`` has of it, the knots of :func:`trained_by` of a line without what is wasted anyway.

    Round j closes at ``due_s[j]`` while version j is the newest. ``work`` below is training time; versions change along
    it where the island adopts, so that the integral of the version over it is linear in between.
    """
    knots_s, earned_s = trained_by(line, whole=True)
    adopts = np.interp(due_s + model.overlap * model.step_s, knots_s, earned_s)  # version j + 1, by work
    corners = np.concatenate([[0.0], adopts, [earned_s[-1]]])
    integral = np.concatenate([[0.0], np.cumsum(np.diff(corners) * np.arange(len(corners) - 1))])

    interval = np.searchsorted(line.from_s, due_s, side="right") - 1
    trains = (interval >= 0) & (due_s < line.to_s[interval]) if len(line.from_s) else np.zeros(len(due_s), bool)
    j = np.flatnonzero(trains)
    start_s = np.concatenate([[0.0], due_s[j]])[:-1]
    if len(line.down_from_s):  # what it had not handed over went with it
        last = np.searchsorted(line.down_from_s, due_s[j], side="right") - 1
        start_s = np.where(last >= 0, np.maximum(start_s, line.down_to_s[np.maximum(last, 0)]), start_s)
    begin, end = np.interp(start_s, knots_s, earned_s), np.interp(due_s[j], knots_s, earned_s)
    some = end > begin + 1e-9
    j, start_s, begin, end = j[some], start_s[some], begin[some], end[some]
    of_versions = np.interp(end, corners, integral) - np.interp(begin, corners, integral)
    staleness = np.maximum(0.0, j - of_versions / (end - begin))
    oldest = j - np.searchsorted(adopts, begin + 1e-9, side="right")
    seconds = np.interp(due_s[j], *counted) - np.interp(start_s, *counted)
    return due_s[j], staleness, oldest.astype(np.float64), seconds
