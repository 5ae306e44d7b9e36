"""Quorum: closes a round or waits, and gives the reason (reference.md, section 4.5)."""

from __future__ import annotations

import math
from collections.abc import Set
from enum import StrEnum
from typing import NamedTuple


class Verdict(StrEnum):
    """The verdict on an open round."""

    WAIT = "wait"
    CLOSE = "close"  # merge what is there
    CANCEL = "cancel"  # nothing came, nothing will


class Decision(NamedTuple):
    """A verdict, why, and when to ask again."""

    verdict: Verdict
    reason: str
    recheck_at_s: float | None = None


class RoundView(NamedTuple):
    """The facts about a round that decide its closing.

    Attributes:
        opened_at_s: When it opened.
        fresh: Islands whose answer to this very round has arrived.
        held: Islands that take part with a contribution held over from an earlier round only.
        owing: Live, responsive islands that have not answered yet.
        quorum_met_at_s: When the last fresh contribution that the quorum needed arrived; None before.
        flush: The last round of its fragment: everybody is waited for.
    """

    opened_at_s: float
    fresh: Set[str]
    held: Set[str]
    owing: Set[str]
    quorum_met_at_s: float | None
    flush: bool = False


class Waits(NamedTuple):
    """The waiting times of a round, from measurements.

    Attributes:
        quorum: K, from the configuration.
        grace_s: Wait after the quorum.
        arrivals_s: Wait after the opening that would have let nine in ten past contributions in.
        timeout_s: When a round closes whatever happens.
        settled_at_s: Before this moment islands that were cut off together may still be on their way back: a round
            closes for want of time only later.
    """

    quorum: int
    grace_s: float
    arrivals_s: float
    timeout_s: float
    settled_at_s: float = -math.inf


def effective_quorum(quorum: int, live: int) -> int:
    """Returns K, shrunk to the live islands, never below 1."""
    return max(1, min(quorum, live))


def decide(now_s: float, view: RoundView, live: int, waits: Waits) -> Decision:
    """Says whether the open round closes at ``now_s``, and why.

    It closes when every live island that owes an answer has given it; or when K fresh ones have and the wait
    is over; or at the timeout with what is there. Held contributions take part but never close a round: else
    groups of islands would take turns.
    """
    held_over = len(view.held - view.fresh) if view.held else 0
    taking_part = len(view.fresh) + held_over
    have = f"{len(view.fresh)} of {live} live islands"
    if held_over:
        have += f" and {held_over} held over"
    timeout_at_s = view.opened_at_s + waits.timeout_s
    if not view.owing:
        if taking_part:
            return Decision(verdict=Verdict.CLOSE, reason=f"complete: {have}")
        return Decision(verdict=Verdict.CANCEL, reason=f"nobody has anything to hand over: {have}")
    if now_s >= timeout_at_s:
        missing = ", ".join(sorted(view.owing))
        if taking_part:
            return Decision(verdict=Verdict.CLOSE, reason=f"timeout: {have}, missing {missing}")
        return Decision(verdict=Verdict.CANCEL, reason=f"timeout with nothing: missing {missing}")
    if view.flush:
        waiting = f"flush waits for {len(view.owing)}: {have}"
        return Decision(verdict=Verdict.WAIT, reason=waiting, recheck_at_s=timeout_at_s)
    quorum = effective_quorum(waits.quorum, live)
    named = f"quorum {quorum}" if quorum == waits.quorum else f"quorum {waits.quorum}, lowered to {quorum}"
    if len(view.fresh) < quorum or view.quorum_met_at_s is None:
        return Decision(verdict=Verdict.WAIT, reason=f"below {named}: {have}", recheck_at_s=timeout_at_s)
    ends_at_s = max(view.quorum_met_at_s + waits.grace_s, view.opened_at_s + waits.arrivals_s, waits.settled_at_s)
    if now_s < ends_at_s:
        recheck_at_s = min(ends_at_s, timeout_at_s)
        return Decision(verdict=Verdict.WAIT, reason=f"in grace window: {have}", recheck_at_s=recheck_at_s)
    return Decision(verdict=Verdict.CLOSE, reason=f"{named} met and grace window over: {have}")


def grace_window_s(*, factor: float, overlap_steps: int, step_s: float, quorum_s: float, sync_s: float) -> float:
    """Returns how long to wait for stragglers once the quorum is met.

        grace = clamp(gamma * (tau * xi_step - xi_quorum - xi_sync), 0, tau * xi_step)

    Islands do not need the version before tau steps have passed; what is left of that time costs nothing.

    Reference: Decoupled DiLoCo, https://arxiv.org/abs/2604.21428, equation 3.
    """
    budget_s = overlap_steps * step_s
    return min(max(0.0, factor * (budget_s - quorum_s - sync_s)), budget_s)
