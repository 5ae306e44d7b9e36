"""What a handful of seeds can say: intervals, verdicts, corrections. Pure.

Two methods are compared seed by seed: both start from the same parameters and see the same text, so the difference
d = candidate / baseline - 1 is free of what both share of these. Of n such differences we report the mean and
Student's 95 % interval. With one seed the interval is the whole line, and every verdict is "inconclusive": that is no
special case below, it is what n - 1 = 0 degrees of freedom mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

CONFIDENCE = 0.95

#: Chance of a false "better". A two-sided interval of 95 % misses on one side in this share of the cases.
ONE_SIDED = (1 - CONFIDENCE) / 2


class Kind(StrEnum):
    """What a comparison claims about candidate / baseline - 1."""

    NOT_WORSE = "not-worse"  # at most the margin
    BETTER = "better"  # below minus the margin
    EQUAL = "equal"  # between minus and plus the margin


class Verdict(StrEnum):
    """What the data say about a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    INCONCLUSIVE = "inconclusive"
    IDENTICAL = "identical"  # what was compared changed nothing, so nothing was tested


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and how far off it may be.

    Attributes:
        mean: Of the values.
        half_width: Of the interval around it; infinite for one value.
        count: How many values.
    """

    mean: float
    half_width: float
    count: int

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half_width


# --- Student's distribution ---------------------------------------------------------------------------------------


def student_cdf(t: float, freedom: int) -> float:
    """Returns P(T <= t) for Student's T with a whole number of degrees of freedom.

    Exact, as a finite sum (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4). SciPy would
    do, but it is here only because JAX happens to need it.
    """
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom, 2):  # the term of cos^k; even: 1/2, 3/4, 5/6, ..; odd: 2/3, 4/5, 6/7, ..
        term *= (k - 1) / k * cosine * cosine
        total += term
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total  # P(|T| <= |t|), with the sign of t
    return (1 + within) / 2


def student_quantile(probability: float, freedom: int) -> float:
    """Returns the t with P(T <= t) = probability, by bisection until two neighbouring floats are left."""
    if probability < 0.5:
        return -student_quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while student_cdf(high, freedom) < probability:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        if student_cdf(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return high


# --- paired differences -------------------------------------------------------------------------------------------


def paired_differences(candidate: Mapping[int, float], baseline: Mapping[int, float]) -> dict[int, float]:
    """Returns seed -> candidate / baseline - 1, for the seeds that both have, in order.

    Args:
        candidate: Seed -> loss.
        baseline: Seed -> loss, above 0.
    """
    return {seed: candidate[seed] / baseline[seed] - 1 for seed in sorted(candidate.keys() & baseline.keys())}


#: Parts of the held-out text that count as independent: fewer than blocks, since a long file is several of these.
TEXT_PARTS = 8


def over_text(candidate: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]]) -> Interval:
    """Returns the relative difference with the interval in which other held-out text would leave it, seeds as they are.

    The interval over seeds says where the mean would lie with other seeds, on this text. Text that is close together is
    alike, so what counts as independent are ``TEXT_PARTS`` parts of it. The difference is a ratio of two means over
    them, and its error the usual one of such a ratio: of what each part deviates from it.

    Args:
        candidate: Seed by seed the losses of consecutive blocks of the held-out text, as many as there are parts or
            more.
        baseline: The same, of the same blocks and seeds.

    Returns:
        Mean candidate / mean baseline - 1 of these seeds; ``count`` is how many they are.
    """
    ours, theirs = ([math.fsum(part) for part in _parts(runs)] for runs in (candidate, baseline))
    ratio = math.fsum(ours) / math.fsum(theirs)
    level = math.fsum(theirs) / len(theirs)
    around = interval([(a - ratio * b) / level for a, b in zip(ours, theirs, strict=True)])
    return Interval(mean=ratio - 1, half_width=around.half_width, count=len(candidate))


def _parts(runs: Sequence[Sequence[float]]) -> list[list[float]]:
    """Returns the losses of all runs in each part of the text."""
    blocks = list(zip(*runs, strict=True))
    edges = [round(part * len(blocks) / TEXT_PARTS) for part in range(TEXT_PARTS + 1)]
    return [[x for block in blocks[a:b] for x in block] for a, b in itertools.pairwise(edges)]


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean of independent values with Student's two-sided 95 % interval.

    Raises:
        ValueError: There are no values.
    """
    n = len(values)
    if n == 0:
        raise ValueError("an interval needs at least one value")
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean=mean, half_width=math.inf, count=1)
    return Interval(mean=mean, half_width=student_quantile(1 - ONE_SIDED, n - 1) * _standard_error(values), count=n)


def _standard_error(values: Sequence[float]) -> float:
    n = len(values)
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1) / n)


def judge(found: Interval, kind: Kind, margin: float) -> Verdict:
    """Says whether a claim holds for every value in the interval, for none, or for some."""
    low, high = found.low, found.high
    match kind:
        case Kind.NOT_WORSE:
            holds, fails = high <= margin, low > margin
        case Kind.BETTER:
            holds, fails = high < -margin, low >= -margin
        case Kind.EQUAL:
            holds, fails = -margin <= low and high <= margin, low > margin or high < -margin
        case _:
            assert_never(kind)
    return Verdict.HOLDS if holds else Verdict.FAILS if fails else Verdict.INCONCLUSIVE


def distance(found: Interval, kind: Kind, margin: float) -> float:
    """Returns how far the mean is from where the verdict changes: an interval that is narrower decides."""
    match kind:
        case Kind.NOT_WORSE:
            return abs(found.mean - margin)
        case Kind.BETTER:
            return abs(found.mean + margin)
        case Kind.EQUAL:
            return abs(abs(found.mean) - margin)


def p_better(differences: Sequence[float], margin: float) -> float:
    """Returns the chance of a mean this low if the truth were -margin: the one-sided p-value of a "better" claim.

    Raises:
        ValueError: There are fewer than two differences.
    """
    if len(differences) < 2:
        raise ValueError("a p-value needs at least two differences")
    above = math.fsum(differences) / len(differences) + margin
    error = _standard_error(differences)
    if error == 0:
        return 0.0 if above < 0 else 1.0
    return student_cdf(above / error, len(differences) - 1)


def holm(p_values: Sequence[float], level: float = ONE_SIDED) -> tuple[bool, ...]:
    """Returns which of several claims stand together, so that the chance of any false one is at most ``level``.

    Holm's step-down rule (Scandinavian Journal of Statistics 6, 1979): the k-th smallest p-value of m, counted from
    0, is held against level / (m - k); the first that exceeds it fails, and all larger ones with it.
    """
    stands = [False] * len(p_values)
    for k, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > level / (len(p_values) - k):
            break
        stands[index] = True
    return tuple(stands)


#: Seeds before the first look at an interval. Who stops as soon as an interval happens to be narrow stops too early:
#: looking from two seeds on, one in eight to ten 95 % intervals misses at worst; from four on one in fifteen with up to
#: six seeds, one in twelve with up to twelve and more (simulated, over all ratios of margin to scatter).
SEEDS_BEFORE_LOOKING = 4


def seeds_needed(differences: Sequence[float], *, margin: float, max_seeds: int) -> bool:
    """Says whether another seed is to be run: the interval is wider than the margin, and there may be more.

    It does not ask for the verdict. Who adds seeds until the verdict pleases finds what he looks for. Nor does it look
    at the interval of fewer than ``SEEDS_BEFORE_LOOKING`` seeds.

    Args:
        differences: Of the seeds so far.
        margin: Relative, of the claim. At 0 all ``max_seeds`` are run.
        max_seeds: Where it ends.
    """
    if len(differences) >= max_seeds:
        return False
    return len(differences) < SEEDS_BEFORE_LOOKING or interval(differences).half_width > margin


#: How often as many seeds as :func:`seeds_for` says decide.
POWER = 0.8


def seeds_for(found: Interval, away: float, *, at_most: int, level: float = ONE_SIDED) -> int:
    """Returns how many seeds decide, ``POWER`` of the time, if mean and scatter are as those seen so far.

    Where the interval is as wide as the mean is ``away``, every other set of seeds decides: the mean of each set lies
    elsewhere. So it is to be narrower, by the quantile of ``POWER``.

    Args:
        found: Of two values or more.
        away: How far the mean is from where the verdict changes, above 0.
        at_most: Where the search ends.
        level: One-sided, of the test that is to decide.
    """
    deviation = found.half_width * math.sqrt(found.count) / student_quantile(1 - ONE_SIDED, found.count - 1)
    # Of a normal distribution: never too many.
    count = max(2, math.ceil(((1.95 + 0.84) * deviation / away) ** 2))
    while count < at_most:
        quantiles = student_quantile(1 - level, count - 1) + student_quantile(POWER, count - 1)
        if quantiles * deviation / math.sqrt(count) <= away:
            break
        count += 1
    return min(count, at_most)
