"""The tables of a chapter that speak of its claims: verdicts, and the extra tokens for equal loss. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ops.lab.comparisons import Finding, correction
from ops.lab.curves import REACH
from ops.lab.markdown import gap, percent, table
from ops.lab.statistics import Verdict, distance, interval, seeds_for

#: So many seeds nobody will run: how many more it would take is not told.
MANY_SEEDS = 1000


def told_verdict(finding: Finding) -> str:
    """Returns a verdict in bold, with its reason if it has one of its own, and what makes its interval doubtful."""
    told = f"**{finding.verdict}**" + (f": {finding.reason}" if finding.reason else "")
    if 0 < finding.same < len(finding.differences):
        told += f" ({finding.same} of {len(finding.differences)} pairs are identical runs: the interval says little)"
    return told


def verdicts(found: Sequence[Finding]) -> str:
    rows = []
    for finding in found:
        claim = finding.comparison
        margin = f"{claim.kind}, {100 * claim.margin:g} %" if claim.margin else str(claim.kind)
        figures = [
            f"{loss:.4f}" if math.isfinite(loss) else "" for loss in (finding.candidate_loss, finding.baseline_loss)
        ]
        where = finding.name if finding.name != "all" else ""
        seeds = str(len(finding.differences))
        if len(finding.seeds) < claim.seeds:
            seeds += f" of {claim.seeds}"
        text = _over_text(finding)
        new = finding.new_seeds
        alone = f"{gap(new)} ({new.count})" if new is not None else ""
        told = (gap(finding.interval), text, seeds, alone, _needed(finding), told_verdict(finding))
        rows.append((claim.claim, where, margin, *figures, *told))
    if not rows:
        return ""
    what = ("claim put to the test", "where", "kind, margin")
    seeds_head = (">seeds", ">new seeds alone", ">about so many to a verdict")
    head = (*what, ">candidate", ">baseline", ">difference", ">over text", *seeds_head, "verdict")
    return "\n\n".join(part for part in (table(head, rows), correction(found)) if part)


def _over_text(finding: Finding) -> str:
    text = finding.over_text
    if text is None:
        return ""
    return f"± {100 * text.half_width:.2f} %" + (f" ({text.count})" if text.count < len(finding.differences) else "")


def _needed(finding: Finding) -> str:
    """Says how many seeds a verdict would take, four times in five, if mean and scatter stay as they are."""
    found = finding.interval
    if found is None or finding.verdict is not Verdict.INCONCLUSIVE or finding.reason:
        return ""
    away = distance(found, finding.comparison.kind, finding.comparison.margin)
    if not 0 < away < found.half_width < math.inf:
        return ""
    needed = seeds_for(found, away, at_most=MANY_SEEDS, level=finding.level)
    return str(needed) if needed < MANY_SEEDS else f"{MANY_SEEDS} or more"


def extra_tokens(found: Sequence[Finding]) -> str:
    rows = []
    for finding in found:
        if not finding.extra:
            continue
        reached = [each for each in finding.extra.values() if each is not None]
        extrapolated = sum(each.extrapolated for each in reached)
        missed = len(finding.extra) - len(reached)
        remarks = [f"extrapolated for {extrapolated} of {len(finding.extra)} seeds"] if extrapolated else []
        if missed:
            nowhere = f"neither on the curve nor, by its power law, within {REACH:g} times the run"
            remarks.append(f"{nowhere} for {missed} of {len(finding.extra)} seeds")
        extra = "-"
        if reached:
            found_extra = interval([each.extra for each in reached])
            # Those that did not reach it needed more than any that did.
            extra = f"above {percent(found_extra.mean, 1)}" if missed else gap(found_extra, digits=1)
        where = finding.name if finding.name != "all" else ""
        rows.append((finding.comparison.claim, where, extra, "; ".join(remarks)))
    if not rows:
        return ""
    head = ("claim", "where", ">extra tokens for equal loss", "how")
    caption = (
        "Tokens that the candidate needs beyond the baseline's to reach its loss, read off the candidate's curve, or "
        "extrapolated by the power law of its last half. With a decaying learning rate both understate the difference."
    )
    return f"{caption}\n\n{table(head, rows)}"
