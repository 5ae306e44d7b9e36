"""What becomes of a decoupled site's work on a link that is narrower than the pace of the others takes. Pure.

Such a link is always full. Up, each of P fragments waits for the others and is handed over again when it has arrived:
a contribution covers as many times more steps as the link is too narrow, and its journey takes as long. Down, versions
that were not begun are skipped, and the one at hand grows as old. Nothing of this loses a step by itself; but what was
trained on a version that is more than ``max_staleness`` behind is refused.

Measured with the cores in virtual time (H = 24 and 48, P = 3 to 16, f32, one link of four 1.1 to 6 times too narrow;
``tests/sim/test_narrow_links.py`` keeps some of it): sites take part as often as said here, and all of their tokens are
merged up to an age of one version below the limit. From there on the share falls as :data:`FADES` says, give or take
ten percentage points in the mean, thirty at most; with limits of 2 to 4 as with 8. A link that is wide enough in both
directions keeps ages even, and nothing is lost up to the limit itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: So many versions more, beyond one below the limit, and 1 / e of the tokens are merged: ages scatter widely there.
FADES = 2.4


@dataclass(frozen=True, slots=True)
class Arrival:
    """What of one site's work arrives.

    Attributes:
        participation: Share of the versions that it is in, at most: less where it is late.
        received: Share of the versions that it gets.
        age: Of its oldest steps when they are merged, in versions.
        in_time: Share of what it trains that is not too stale by then.
    """

    participation: float
    received: float
    age: float
    in_time: float


def arrival(up_full: float, down_full: float, fragments: int, *, max_staleness: int, later: float = 0.0) -> Arrival:
    """Returns what of a site's work arrives.

    Args:
        up_full: What contributions at the fleet's pace would take of the site's link: above 1 it is too narrow.
        down_full: Likewise of versions.
        fragments: P.
        max_staleness: Versions that a step may be behind, by the aggregator's setting.
        later: Versions that are made in the time by which its way there and back is longer than the median site's.
    """
    # Steps since the last hand-over, and the way up: of a free link an interval and one fragment's time.
    age = 2 * up_full if up_full > 1 else 1 + up_full / fragments
    # A version is a fragment's time old when it comes, and in use until the next one does.
    age += down_full * (1 + 1 / fragments) if down_full > 1 else down_full / fragments
    age += later
    scattered = 1.0 if max(up_full, down_full) > 1 else min(1.0, later)
    fresh = math.exp((max_staleness - scattered - age) / FADES)
    return Arrival(
        participation=1 / max(1.0, up_full),
        received=1 / max(1.0, down_full),
        age=age,
        in_time=min(1.0, fresh),
    )
