"""What the lines of peers come to: syncs, time held up, stalls. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]


def sync_ms(lines: Sequence[Line], *, begins_s: float, ends_s: float) -> float | None:
    """Returns the milliseconds from capture to adoption of a whole model: the sum of fragments' medians.

    Args:
        lines: Of one peer.
        begins_s: Syncs are counted that were captured from here on ...
        ends_s: ... and adopted until then.
    """
    by_fragment: dict[int, list[float]] = {}
    for line in _of("synced", lines, begins_s, ends_s):
        if line["committed"] and line["capture_s"] >= begins_s:
            by_fragment.setdefault(line["fragment"], []).append(line["at_s"] - line["capture_s"])
    return 1e3 * sum(map(statistics.median, by_fragment.values())) if by_fragment else None


def whole_syncs(lines: Sequence[Line], fragments: int, *, begins_s: float, ends_s: float) -> float:
    """Returns how often a peer has adopted a whole model: the syncs of its fragments over their number."""
    return sum(1 for line in _of("synced", lines, begins_s, ends_s) if line["committed"]) / fragments


def longer_ms(what: str, lines: Sequence[Line], syncs: float, *, begins_s: float, ends_s: float) -> float | None:
    """Returns the milliseconds that each sync adds to a part of steps, beyond the median of all steps.

    Args:
        what: ``took_s``, the call of the system, for which the training thread is held up; or ``changed_s``, the change
            of the parameters, which waits where copies and additions that the call has dispatched are still at work.
        lines: Of one peer.
        syncs: In that time.
        begins_s: Steps are counted that ended from here on ...
        ends_s: ... until then.
    """
    took_s = [line[what] for line in _of("step", lines, begins_s, ends_s)]
    if not took_s or not syncs:
        return None
    usual_s = statistics.median(took_s)
    return float(1e3 * sum(max(0.0, each - usual_s) for each in took_s) / syncs)


def stall_s(lines: Sequence[Line], *, fault_s: float, ends_s: float) -> float:
    """Returns the longest time without a step after a fault: until the end if there was none any more."""
    times = [line["at_s"] for line in lines if line["kind"] == "step" and line["at_s"] <= ends_s]
    before = max((at_s for at_s in times if at_s <= fault_s), default=fault_s)
    after = [before, *[at_s for at_s in times if at_s > fault_s], ends_s]
    return float(max(b - a for a, b in itertools.pairwise(after)))


def steps_per_s(lines: Sequence[Line], *, begins_s: float, ends_s: float) -> float:
    """Returns how fast a peer stepped."""
    return len(_of("step", lines, begins_s, ends_s)) / max(1e-9, ends_s - begins_s)


def finite(lines: Sequence[Line], *, begins_s: float, ends_s: float) -> bool:
    """Says whether a peer's parameters were finite after each of its steps."""
    return all(line["finite"] for line in _of("step", lines, begins_s, ends_s))


def failure(lines: Sequence[Line]) -> str | None:
    """Returns what a peer ended with, if it did."""
    return next((line["error"] for line in lines if line["kind"] == "failed"), None)


def _of(kind: str, lines: Sequence[Line], begins_s: float, ends_s: float) -> list[Line]:
    return [line for line in lines if line["kind"] == kind and begins_s <= line["at_s"] <= ends_s]
