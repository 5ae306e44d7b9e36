"""Accepts a contribution or refuses it, with a reason (reference.md, section 9).

That of the payload, such as a NaN, was found as it arrived (:mod:`aggregator.merge.payload_checks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from aggregator.interface.events import Flaw
from aggregator.ledger.lives import Account, Life
from broker.wire.messages import RETRY_REASONS, Contribution, Fate, Reason, TrainedOn

_VERSION = attrgetter("fragment_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The decision on a contribution; ``first`` is False for a copy of one that arrived before."""

    fate: Fate
    reason: Reason | None = None
    detail: str = ""
    first: bool = True


def admit(
    contribution: Contribution,
    *,
    flaw: Flaw | None,
    quarantined: str,
    life: Life,
    account: Account,
    current_version: int,
    oldest_allowed: int,
    tokens_per_step: int,
    most_steps: int,
    free_bytes: int,
    payload_bytes: int,
    misplaced: tuple[Reason, str] | None = None,
    crowded: str = "",
) -> Admission:
    """Decides on one contribution of a known island to a known fragment.

    Copies are recognised first, so that re-sending is always safe; then the counters, the payload, the versions and the
    space are judged. Counters come before the rest: what a refusal wastes is booked by them. A flaw is told even to an
    island that is ``quarantined`` (says why and for how long; empty if it is not): it may have to recover from it.
    ``RETRY`` means that the island should send the same bytes again. ``misplaced`` says what is wrong with the data it
    was trained on (:meth:`aggregator.ledger.data_blocks.DataBlocks.refusal`), ``crowded`` why too much of its island
    waits already (:meth:`aggregator.state.fragment.Fragment.crowded`).
    """
    steps = contribution.steps
    copy = _recognise(contribution, account)
    if copy is not None:
        return copy
    implausible = _implausible(contribution, life, tokens_per_step, most_steps)
    if implausible:
        return Admission(fate=Fate.REFUSED, reason=Reason.IMPLAUSIBLE, detail=implausible)
    if account.overlaps(steps):
        detail = f"steps [{steps.from_step}, {steps.to_step}) were handed over before, in part"
        return Admission(fate=Fate.REFUSED, reason=Reason.OVERLAP, detail=detail)
    trained = life.trained_tokens_by(steps.to_step, steps.to_tokens)
    if account.known_tokens + steps.tokens > trained:
        detail = f"{steps.tokens} tokens more than the {account.known_tokens} known, of {trained} trained"
        return Admission(fate=Fate.REFUSED, reason=Reason.IMPLAUSIBLE, detail=detail)
    if misplaced is not None:
        reason, detail = misplaced
        return Admission(fate=Fate.REFUSED, reason=reason, detail=detail)
    if flaw is not None:
        fate = Fate.RETRY if flaw.reason in RETRY_REASONS else Fate.REFUSED
        return Admission(fate=fate, reason=flaw.reason, detail=flaw.detail)
    if quarantined:
        return Admission(fate=Fate.REFUSED, reason=Reason.QUARANTINED, detail=quarantined)
    newest = max(map(_VERSION, contribution.trained_on))
    if newest > current_version:
        detail = f"trained on version {newest}, the newest is {current_version}"
        return Admission(fate=Fate.REFUSED, reason=Reason.FUTURE_VERSION, detail=detail)
    stale = too_stale(contribution.trained_on, current_version, oldest_allowed)
    if stale:
        return Admission(fate=Fate.REFUSED, reason=Reason.STALE, detail=stale)
    if payload_bytes > free_bytes:
        detail = f"{payload_bytes} bytes do not fit into the {free_bytes} left for contributions that wait"
        return Admission(fate=Fate.RETRY, reason=Reason.QUEUE_FULL, detail=detail)
    if crowded:
        return Admission(fate=Fate.RETRY, reason=Reason.QUEUE_FULL, detail=crowded)
    return Admission(fate=Fate.WAITING)


def too_stale(trained_on: Sequence[TrainedOn], current_version: int, oldest_allowed: int) -> str:
    """Says why a contribution is too old to be merged into ``current_version``; empty if it is not.

    ``oldest_allowed`` is :meth:`aggregator.state.fragment.Fragment.oldest_allowed`.
    """
    oldest = min(map(_VERSION, trained_on))
    if oldest >= oldest_allowed:
        return ""
    behind, limit = current_version - oldest, current_version - oldest_allowed
    return f"oldest step was trained on version {oldest}, {behind} behind; the limit is {limit}"


def _recognise(contribution: Contribution, account: Account) -> Admission | None:
    steps = contribution.steps
    if steps.steps <= 0:
        return None  # nothing at all is part of everything
    if (steps.from_step, steps.to_step) in account.waiting:
        return Admission(fate=Fate.WAITING, detail="a copy of one that waits", first=False)
    if account.merged.covers(steps.from_step, steps.to_step):
        return Admission(fate=Fate.MERGED, detail="a copy of one that was merged", first=False)
    if account.refused.covers(steps.from_step, steps.to_step):
        reason = account.why_refused(steps.from_step, steps.to_step)
        return Admission(fate=Fate.REFUSED, reason=reason, detail="a copy of one that was refused", first=False)
    return None


def _implausible(contribution: Contribution, life: Life, tokens_per_step: int, most_steps: int) -> str:
    steps = contribution.steps
    parts = [t.steps for t in contribution.trained_on]
    trained = sum(parts)
    if steps.steps <= 0 or steps.tokens < 0:
        return f"range [{steps.from_step}, {steps.to_step}) with {steps.tokens} tokens holds nothing"
    versions = map(_VERSION, contribution.trained_on)
    if trained != steps.steps or min(parts, default=1) <= 0 or min(versions, default=0) < 0:
        return f"trained_on accounts for {trained} steps of {steps.steps}"
    if steps.from_step < life.start_step:
        return f"starts at step {steps.from_step}, before this incarnation began at {life.start_step}"
    if steps.to_step > most_steps:
        return f"ends at step {steps.to_step}, at most {most_steps} are possible by now"
    if steps.tokens > steps.steps * tokens_per_step:
        return f"{steps.tokens} tokens in {steps.steps} steps of {tokens_per_step}"
    most = life.start_tokens + (steps.to_step - life.start_step) * tokens_per_step
    if steps.to_tokens > most:
        return f"token counter {steps.to_tokens} at step {steps.to_step}, at most {most} are possible"
    return ""
