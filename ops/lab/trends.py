"""How gaps change with sizes: slopes and lines by least squares on logarithms, with their intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ops.lab.statistics import ONE_SIDED, Interval, student_quantile


def trend(sizes: Sequence[float], gaps: Sequence[float], groups: Sequence[object] | None = None) -> Interval:
    """Returns the slope of a gap per tenfold of size, with its 95 % interval, by least squares on log10(size).

    Args:
        sizes: Parameters or tokens of each gap, above 0.
        gaps: Relative differences, independent of each other: one of each experiment, not one of each of its seeds,
            which share what that experiment does to a gap.
        groups: What each gap shares with others beside the slope: every group has a level of its own, so only
            differences within groups count. Default: all are of one group.

    Raises:
        ValueError: All sizes of every group are equal, so that there is no slope.
    """
    members: dict[object, list[tuple[float, float]]] = {}
    for group, size, gap in zip(groups or [None] * len(sizes), sizes, gaps, strict=True):
        members.setdefault(group, []).append((math.log10(size), gap))
    points = [point for group in members.values() for point in _centred(group)]
    spread = math.fsum(x * x for x, _ in points)
    if spread == 0:
        raise ValueError("a trend needs at least two sizes")
    slope = math.fsum(x * y for x, y in points) / spread
    free = len(points) - len(members) - 1
    if free < 1:
        return Interval(mean=slope, half_width=math.inf, count=len(points))
    error = math.sqrt(math.fsum((y - slope * x) ** 2 for x, y in points) / free / spread)
    return Interval(mean=slope, half_width=student_quantile(1 - ONE_SIDED, free) * error, count=len(points))


def plane(first: Sequence[float], second: Sequence[float], gaps: Sequence[float]) -> tuple[Interval, Interval]:
    """Returns the slopes of a gap per tenfold of each of two sizes, the other one held fixed, with 95 % intervals.

    Least squares on the logarithms of both together.

    Args:
        first: Such as parameters, above 0.
        second: Such as tokens of each, above 0.
        gaps: As for :func:`trend`.

    Raises:
        ValueError: There are fewer than three gaps, or one size follows from the other.
    """
    n = len(gaps)
    x, y, z = (_deviations(values) for values in (list(map(math.log10, first)), list(map(math.log10, second)), gaps))
    xx, yy, xy, xz, yz = (_product(a, b) for a, b in ((x, x), (y, y), (x, y), (x, z), (y, z)))
    apart = xx * yy - xy * xy
    if n < 3 or apart <= 1e-9 * xx * yy:
        raise ValueError("two slopes need three gaps at sizes of which neither follows from the other")
    slopes = ((yy * xz - xy * yz) / apart, (xx * yz - xy * xz) / apart)
    widths = (math.inf, math.inf)
    if free := n - 3:
        left = [c - slopes[0] * a - slopes[1] * b for a, b, c in zip(x, y, z, strict=True)]
        error = math.sqrt(_product(left, left) / free / apart)
        t = student_quantile(1 - ONE_SIDED, free)
        widths = (t * error * math.sqrt(yy), t * error * math.sqrt(xx))
    one, other = (Interval(mean=m, half_width=w, count=n) for m, w in zip(slopes, widths, strict=True))
    return one, other


def level_at(size: float, sizes: Sequence[float], gaps: Sequence[float]) -> Interval:
    """Returns the height of the line of :func:`trend` at a size, with its 95 % interval: wider, the farther it is.

    Raises:
        ValueError: As :func:`trend`; or there are two gaps, which lie on any line.
    """
    slope = trend(sizes, gaps)
    n = len(gaps)
    if n < 3:
        raise ValueError("the error of a line needs three gaps")
    xs = [math.log10(each) for each in sizes]
    middle = math.fsum(xs) / n
    away = math.log10(size) - middle
    # The slope's own half width is t * s / sqrt(spread).
    spread = _product(_deviations(xs), _deviations(xs))
    half_width = slope.half_width * math.sqrt(spread / n + away * away)
    return Interval(mean=math.fsum(gaps) / n + slope.mean * away, half_width=half_width, count=n)


def _deviations(values: Sequence[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def _product(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _centred(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    x_mean, y_mean = (math.fsum(values) / len(points) for values in zip(*points, strict=True))
    return [(x - x_mean, y - y_mean) for x, y in points]
