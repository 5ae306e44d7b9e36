"""How many tokens a loss costs: read off a run's curve, or off its power law where the run ended too early. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: (tokens, loss) by growing tokens.
Points = Sequence[tuple[float, float]]

#: No law is followed further than this many times the length of the run it was fitted to.
REACH = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraTokens:
    """What a candidate needs to reach a baseline's loss.

    Attributes:
        tokens: At which the candidate has that loss.
        extra: The same, relative to the baseline's tokens, minus 1; negative if the candidate needs fewer.
        extrapolated: The candidate did not get there; its power law did.
    """

    tokens: float
    extra: float
    extrapolated: bool


def extra_tokens(curve: Points, *, loss: float, tokens: float) -> ExtraTokens | None:
    """Returns the extra tokens for equal loss, or None if neither the curve nor its power law gets there.

    The law is followed for ``REACH`` times the run. A run whose learning rate decays is worse in its middle than a run
    that is planned to end there: a saving read off within a curve is thus less than the true one, and so is a cost
    that is extrapolated from its steep end.

    Args:
        curve: Of the candidate. Points without tokens, or without a finite loss above 0, do not count.
        loss: The baseline's last.
        tokens: At which the baseline had it, above 0.
    """
    points = [(n, each) for n, each in curve if n > 0 and 0 < each < math.inf]
    reached = tokens_to_reach(points, loss)
    extrapolated = reached is None
    if reached is None:
        reached = _followed(points, loss)
    if reached is None:
        return None
    return ExtraTokens(tokens=reached, extra=reached / tokens - 1, extrapolated=extrapolated)


def tokens_to_reach(points: Points, loss: float) -> float | None:
    """Returns the tokens from which on a curve stays at or below a loss; None if it ends above.

    Between two points the loss falls linearly in the logarithm of tokens. A curve that lies below from its first point
    on gives that point's tokens, which is then an upper bound.
    """
    if not points or points[-1][1] > loss:
        return None
    above = max((i for i, (_, each) in enumerate(points) if each > loss), default=-1)
    if above < 0:
        return points[0][0]
    (n0, loss0), (n1, loss1) = points[above], points[above + 1]
    share = (loss0 - loss) / (loss0 - loss1)
    return math.exp((1 - share) * math.log(n0) + share * math.log(n1))


def exponent(points: Points) -> float:
    """Returns b of the power law loss ~ tokens ** -b, by least squares on logarithms.

    Without a floor: over the last half of one run a floor cannot be told from a smaller b.

    Raises:
        ValueError: All points are at the same tokens.
    """
    xs, ys = [math.log(n) for n, _ in points], [math.log(loss) for _, loss in points]
    x_mean, y_mean = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    spread = math.fsum((x - x_mean) ** 2 for x in xs)
    if spread == 0:
        raise ValueError("a power law needs points at two sizes at least")
    return -math.fsum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread


def _followed(points: Points, loss: float) -> float | None:
    """Where a curve that ended above a loss reaches it: from its last point on, by the law of its last half."""
    if not points or loss <= 0:
        return None
    end, last_loss = points[-1]
    last_half = [point for point in points if point[0] >= end / 2]
    if len(last_half) < 3:
        return None
    b = exponent(last_half)
    if b <= 0:
        return None
    log_times = math.log(last_loss / loss) / b
    return end * math.exp(log_times) if log_times <= math.log(REACH) else None
