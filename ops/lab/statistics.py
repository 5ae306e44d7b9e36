"""Judges claims from records: paired differences, their intervals, and verdicts.

Two methods are compared seed by seed: both start from the same parameters and see the same text, so the difference
d = candidate / baseline - 1 is free of what both share of these. Of n such differences we report the mean and
Student's 95 % interval. With one seed the interval is the whole line, and every verdict is "inconclusive".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean
from typing import Any, NamedTuple

from scipy import stats

from ops.lab.records import Record
from ops.plans.experiment import Comparison, Equal, Experiment, Kind, label, varying

#: Chance of a false "better". A two-sided interval of 95 % misses on one side in this share of the cases.
ONE_SIDED = 0.025

#: Runs of a pair may differ by this share in the equal quantity, because islands do not end at an exact step.
TOLERANCE = 0.01


class Verdict(StrEnum):
    """The verdict on a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    INCONCLUSIVE = "inconclusive"
    IDENTICAL = "identical"  # what was compared changed nothing, so nothing was tested


class Interval(NamedTuple):
    """A mean with the half-width of its interval, infinite for a single value."""

    mean: float
    half_width: float

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half_width


def interval(values: Sequence[float]) -> Interval:
    """Returns the mean of at least one independent value, with Student's two-sided 95 % interval."""
    if len(values) == 1:
        return Interval(values[0], math.inf)
    return Interval(fmean(values), float(stats.t.isf(ONE_SIDED, len(values) - 1) * stats.sem(values)))


def judge(found: Interval, kind: Kind, margin: float) -> Verdict:
    """Returns the verdict on a claim: it holds for every value in the interval, for none, or for some."""
    if kind is Kind.BETTER:
        holds, fails = found.high < -margin, found.low >= -margin
    else:
        holds, fails = found.high <= margin, found.low > margin
    return Verdict.HOLDS if holds else Verdict.FAILS if fails else Verdict.INCONCLUSIVE


def p_better(differences: Sequence[float], margin: float) -> float:
    """Returns the one-sided p-value of a "better" claim.

    It is the chance of a mean this low if the truth were -margin.
    """
    if len(set(differences)) == 1:
        return float(differences[0] >= -margin)
    return float(stats.ttest_1samp(differences, -margin, alternative="less").pvalue)


def holm(p_values: Sequence[float], level: float = ONE_SIDED) -> tuple[bool, ...]:
    """Returns which claims Holm's method accepts, so that any is false with chance at most ``level``.

    Holm's step-down rule (Scandinavian Journal of Statistics 6, 1979): the k-th smallest p-value of m, counted from
    0, is held against level / (m - k); the first that exceeds it fails, and all larger ones with it.
    """
    stands = [False] * len(p_values)
    for k, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > level / (len(p_values) - k):
            break
        stands[index] = True
    return tuple(stands)


# --- findings -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The verdict on a claim in one group of cells.

    Attributes:
        comparison: The claim.
        group: The fields that candidate and baseline share here.
        name: The group in a few words.
        differences: Seed -> candidate / baseline - 1 of the losses.
        interval: Mean and interval of the differences; None if there are none.
        p_value: One-sided, of "better" claims with at least two pairs.
        verdict: The verdict on this group.
        reason: An addition to the verdict; may be empty.
    """

    comparison: Comparison
    group: Mapping[str, Any]
    name: str
    differences: Mapping[int, float] = field(default_factory=dict)
    interval: Interval | None = None
    p_value: float | None = None
    verdict: Verdict = Verdict.INCONCLUSIVE
    reason: str = ""


def findings(experiment: Experiment, results: Sequence[Mapping[int, Record]]) -> tuple[Finding, ...]:
    """Returns the verdicts of one experiment; "better" claims are corrected for their number (Holm).

    Args:
        experiment: Its claims are the family that is corrected for.
        results: For each of its cells, seed -> record (:func:`ops.lab.schedule.current`).
    """
    found = []
    for comparison in experiment.comparisons:
        pairings = experiment.pairings(comparison)
        shown = varying(pairing.group for pairing in pairings)
        for pairing in pairings:
            finding = Finding(comparison=comparison, group=pairing.group, name=label(pairing.group, shown))
            # A file that was checked has one cell on each side.
            found.append(_judged(finding, results[pairing.candidates[0]], results[pairing.baselines[0]]))
    family = [i for i, finding in enumerate(found) if finding.p_value is not None]
    stands = holm([found[i].p_value or 0.0 for i in family])
    for i, stand in zip(family, stands, strict=True):
        if found[i].verdict is Verdict.HOLDS and not stand:
            reason = f"holds by itself (p = {found[i].p_value:.2g}), not as one of {len(family)} claims (Holm)"
            found[i] = replace(found[i], verdict=Verdict.INCONCLUSIVE, reason=reason)
    return tuple(found)


def _judged(finding: Finding, ours: Mapping[int, Record], theirs: Mapping[int, Record]) -> Finding:
    """Returns the verdict on a group: pairs its runs by seed, and judges the differences."""
    comparison = finding.comparison
    both = sorted(ours.keys() & theirs.keys())
    if unlike := _unlike([(ours[seed], theirs[seed]) for seed in both]):
        return replace(finding, reason=unlike)
    if diverged := sorted(seed for seed in ours if ours[seed].diverged):
        sound = any(seed in theirs and not theirs[seed].diverged for seed in diverged)
        reason = f"the candidate diverged (seed {', '.join(map(str, diverged))})"
        return replace(finding, verdict=Verdict.FAILS if sound else Verdict.INCONCLUSIVE, reason=reason)
    pairs = [seed for seed in both if not theirs[seed].diverged]
    # After those that diverged, which ended before the others.
    if unequal := _unequal([(ours[seed], theirs[seed]) for seed in pairs], comparison.equal):
        return replace(finding, reason=unequal)
    lost = ", ".join(str(seed) for seed in both if theirs[seed].diverged)
    reason = f"left out, since the baseline diverged: seed {lost}" if lost else ""
    if not pairs:
        return replace(finding, reason=reason or "no seed was run for both")
    differences = {seed: ours[seed].loss / theirs[seed].loss - 1 for seed in pairs}
    found = interval(tuple(differences.values()))
    identical = len(pairs) > 1 and not any(differences.values())
    doubt = _doubt([ours[s].loss for s in pairs], [theirs[s].loss for s in pairs])
    tested = comparison.kind is Kind.BETTER and len(pairs) > 1 and not identical and not doubt
    verdict = Verdict.INCONCLUSIVE if doubt else judge(found, comparison.kind, comparison.margin)
    return replace(
        finding,
        differences=differences,
        interval=found,
        p_value=p_better(tuple(differences.values()), comparison.margin) if tested else None,
        verdict=Verdict.IDENTICAL if identical else verdict,
        reason=reason or doubt,
    )


def _unlike(pairs: Sequence[tuple[Record, Record]]) -> str:
    """Returns why runs cannot be compared, because they saw different texts; empty if they can."""
    if len({run.corpus for pair in pairs for run in pair}) > 1:
        return "not all runs saw the same text: remove the records of one"
    if any(run.loss <= 0 for pair in pairs for run in pair):
        return "a loss at or below 0 cannot be part of a ratio: let the task return one above 0"
    return ""


def _unequal(pairs: Sequence[tuple[Record, Record]], what: Equal) -> str:
    """Returns the pair in which one run has spent more than the other; empty if there is none."""
    for ours, theirs in pairs:
        mine, other = (each.tokens if what is Equal.TOKENS else each.virtual_s for each in (ours, theirs))
        if other and abs(mine / other - 1) > TOLERANCE:
            unit = "trained tokens" if what is Equal.TOKENS else "virtual seconds"
            return f"{unit} differ by more than {TOLERANCE:.0%} (seed {ours.seed}: {mine:,.0f} and {other:,.0f})"
    return ""


def _doubt(candidates: Sequence[float], baselines: Sequence[float]) -> str:
    """Returns why the losses allow no verdict; empty if they do."""
    if len(candidates) == 1:
        return "one seed decides nothing"
    if len(set(candidates)) == len(set(baselines)) == 1:
        return "no seed changes a loss: they do not scatter, so there is nothing to judge them by"
    return ""
