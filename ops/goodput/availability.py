"""From time lines to goodput, uptime and waste by cause, with confidence intervals.

Goodput is the share of the allocated time of all slices that trains what counts; each island is measured at its own
speed, so that being slow is no waste, but waiting for the slow is. Uptime is the share of time in which at least one
island trains. Goodput and all waste add up to 1.

Confidence intervals are of the mean over a long run: by batch means, the time line cut into :data:`BATCHES` equal parts
which are taken as independent; where islands wait for the slowest, whose speed is drawn once for a run, what other
draws would do is added. They tell how far another seed may lie, not how well the model fits the world.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ops.goodput.timeline import Cause, Floats, TimeLine

BATCHES = 20
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
    """Where the fleet's time went."""

    goodput: Estimate
    uptime: Estimate
    wasted: Mapping[Cause, Estimate]

    @property
    def waste(self) -> dict[Cause, float]:
        """The same without intervals; with goodput they add up to 1."""
        return {cause: each.value for cause, each in self.wasted.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Training of one island that did not count in the end.

    Attributes:
        at_s: When it was found out, in seconds, ``[k]``.
        lost_s: How much, in seconds of the whole island, ``[k]``.
    """

    cause: Cause
    at_s: Floats
    lost_s: Floats


def account(
    lines: Sequence[TimeLine], dropped: Sequence[Dropped] = (), *, in_step: float = 1.0, deviation: float = 0.0
) -> Account:
    """Returns where the time of equally large islands went.

    Args:
        lines: One per island, or one for a single job; of one length.
        dropped: What was trained for nothing, of any island.
        in_step: Part of the training time that steps need on average; the rest is waiting within a step, in jobs whose
            groups keep in step.
        deviation: Relative standard deviation of goodput between seeds that the time line of one does not show: what
            it has less is waited for.
    """
    duration_s, count = lines[0].duration_s, len(lines)
    edges_s = np.linspace(0.0, duration_s, BATCHES + 1)
    useful_s = np.zeros(BATCHES)
    wasted_s = {cause: np.zeros(BATCHES) for cause in Cause}
    for line in lines:
        present_s = np.diff(np.interp(edges_s, *trained_by(line)))
        useful_s += in_step * present_s
        wasted_s[Cause.CAPACITY_AWAY] += np.diff(np.interp(edges_s, *trained_by(line, whole=True))) - present_s
        wasted_s[Cause.WAITING] += (1.0 - in_step) * present_s
        for cause, spans in line.idle.items():
            idle = running_total(*steps_of(spans[:, 0], spans[:, 1]))
            wasted_s[cause] += np.diff(np.interp(edges_s, *idle))
    for each in dropped:
        lost_s = np.histogram(np.clip(each.at_s, 0.0, duration_s), edges_s, weights=each.lost_s)[0]
        wasted_s[each.cause] += lost_s
        useful_s -= lost_s
    batch_s = duration_s / BATCHES
    stepping_s = np.diff(np.interp(edges_s, *stepping_by(lines)))
    useful = useful_s / (batch_s * count)
    unseen = deviation * float(np.mean(useful))
    return Account(
        goodput=batch_means(useful, unseen=unseen),
        uptime=batch_means(stepping_s / batch_s),
        wasted={
            cause: batch_means(seconds / (batch_s * count), unseen=unseen if cause is Cause.WAITING else 0.0)
            for cause, seconds in wasted_s.items()
        },
    )


def trained_by(line: TimeLine, *, whole: bool = False) -> tuple[Floats, Floats]:
    """Returns the knots of a function that grows linearly between them: times, and seconds trained up to each.

    Seconds of the whole island: one with half of its slices earns half a second per second; with ``whole``, a full one.
    """
    gains = line.to_s - line.from_s if whole else (line.to_s - line.from_s) * line.share
    knots = np.stack([line.from_s, line.to_s], axis=1).ravel()
    earned = np.cumsum(np.stack([np.zeros_like(gains), gains], axis=1).ravel())
    return np.concatenate([[0.0], knots]), np.concatenate([[0.0], earned])


def stepping_by(lines: Sequence[TimeLine]) -> tuple[Floats, Floats]:
    """Returns the knots of the time in which at least one of the islands trained, as :func:`trained_by` does."""
    starts = np.concatenate([line.from_s for line in lines])
    ends = np.concatenate([line.to_s for line in lines])
    times_s, training = steps_of(starts, ends)
    return running_total(times_s, (training > 0).astype(np.float64))


def steps_of(starts_s: Floats, ends_s: Floats) -> tuple[Floats, Floats]:
    """Returns how many of some intervals hold at each time: edges, ascending, and the count from each to the next."""
    times_s = np.concatenate([[0.0], starts_s, ends_s])
    changes = np.concatenate([[0.0], np.ones_like(starts_s), -np.ones_like(ends_s)])
    order = np.argsort(times_s, kind="stable")
    return times_s[order], np.cumsum(changes[order])


def running_total(times_s: Floats, rates: Floats) -> tuple[Floats, Floats]:
    """Returns the integral of a step function at its edges; the last rate is not used."""
    return times_s, np.concatenate([[0.0], np.cumsum(np.diff(times_s) * rates[:-1])])


def half_width(samples: Floats) -> float:
    """Returns half of the confidence interval of the mean of equally long batches, :data:`BATCHES` of them."""
    return _T_QUANTILE * float(np.std(samples, ddof=1)) / math.sqrt(len(samples))


def batch_means(samples: Floats, *, unseen: float = 0.0) -> Estimate:
    """Returns the mean of equally long batches and its confidence interval, cut to 0..1.

    Args:
        samples: One for each batch.
        unseen: Standard deviation of what all batches share, and so do not show.
    """
    mean = float(np.mean(samples))
    half = math.hypot(half_width(samples), _T_QUANTILE * unseen)
    mean = min(1.0, max(0.0, mean))  # the last bit of a sum
    return Estimate(value=mean, low=max(0.0, mean - half), high=min(1.0, mean + half))
