"""Claims put to the test: which runs are paired to check each of them, and what they say. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ops.lab.cells import Cell, CellKey, cell_key, contains, label, rank, varying
from ops.lab.claims import Comparison, Equal
from ops.lab.curves import ExtraTokens, extra_tokens
from ops.lab.records import Record, Stage
from ops.lab.statistics import (
    ONE_SIDED,
    TEXT_PARTS,
    Interval,
    Kind,
    Verdict,
    holm,
    interval,
    judge,
    over_text,
    p_better,
    paired_differences,
)

T = TypeVar("T")

#: Runs of a pair may differ by this share in what is to be equal: islands end when they hear of it, not at a step.
TOLERANCE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What the records say about a claim in one group of cells.

    Attributes:
        comparison: The claim.
        group: The fields that candidate and baseline share here; empty if nothing of the candidate was run.
        name: The group in a few words.
        differences: Seed -> candidate / baseline - 1 of the losses.
        candidate_loss: Mean over those seeds, nats per token; infinite if there are none.
        baseline_loss: The same.
        parameters: Of the candidate's model; 0 if there are no pairs.
        interval: Mean and interval of the differences; None if there are none.
        over_text: The difference with its interval over other text, with the same seeds: those of which both runs told
            of blocks of it; None if there are none.
        p_value: One-sided, of "better" claims with at least two pairs.
        verdict: Of this group.
        reason: What the verdict alone does not say; empty if nothing.
        extra: Seed -> extra tokens for equal loss; None where neither curve nor power law get there.
        cells: Of candidate and baseline, of which another seed would narrow the interval.
        seeds: Those run of both, whatever came of them; empty if nothing was.
        settled: More seeds cannot change the verdict.
        level: One-sided, at which it would hold: less where several claims are corrected for their number.
    """

    comparison: Comparison
    group: Mapping[str, Any]
    name: str
    differences: Mapping[int, float] = field(default_factory=dict)
    candidate_loss: float = math.inf
    baseline_loss: float = math.inf
    parameters: int = 0
    interval: Interval | None = None
    over_text: Interval | None = None
    p_value: float | None = None
    verdict: Verdict = Verdict.INCONCLUSIVE
    reason: str = ""
    extra: Mapping[int, ExtraTokens | None] = field(default_factory=dict)
    cells: tuple[Cell, ...] = ()
    seeds: tuple[int, ...] = ()
    settled: bool = False
    level: float = ONE_SIDED

    @property
    def new_seeds(self) -> Interval | None:
        """Of the seeds after the last look at the claim; None if there was none, or none of them has been run."""
        if not self.comparison.looks:
            return None
        new = tuple(each for seed, each in self.differences.items() if seed >= self.comparison.looks[-1])
        return interval(new) if new else None

    @property
    def same(self) -> int:
        """Pairs whose runs came out the same to the last bit."""
        return sum(not difference for difference in self.differences.values())


def findings(comparisons: Iterable[Comparison], records: Sequence[Record]) -> tuple[Finding, ...]:
    """Returns the verdicts of one experiment; "better" claims are corrected for how many there are (Holm).

    Args:
        comparisons: Of one experiment, which is the family that is corrected for.
        records: Of the same; tuning runs do not count.
    """
    final = [record for record in records if record.stage is Stage.FINAL]
    found = [finding for comparison in comparisons for finding in _findings(comparison, final)]
    family = [i for i, finding in enumerate(found) if finding.p_value is not None]
    stands = holm([found[i].p_value or 0.0 for i in family])
    for i, stand in zip(family, stands, strict=True):
        if found[i].verdict is Verdict.HOLDS and not stand:
            reason = (
                f"holds by itself (p = {found[i].p_value:.2g}), not as one of {len(family)} claims of its kind (Holm)"
            )
            found[i] = replace(found[i], verdict=Verdict.INCONCLUSIVE, reason=reason)
    open_ones = [i for i, stand in zip(family, stands, strict=True) if not stand]
    for i in open_ones:  # what the first of them to hold would have to reach
        found[i] = replace(found[i], level=ONE_SIDED / len(open_ones))
    return tuple(found)


def distinct(found: Iterable[Finding]) -> list[Finding]:
    """Returns those that do not rest on the runs of an earlier one, asked in the same way: they count once."""
    kept: dict[object, Finding] = {}
    for i, each in enumerate(found):
        claim, pairs = each.comparison, tuple(sorted(each.differences.items()))
        asked = (claim.kind, claim.margin, claim.equal, pairs) if any(each.differences.values()) else i
        kept.setdefault(asked, each)
    return list(kept.values())


def _findings(comparison: Comparison, records: Sequence[Record]) -> list[Finding]:
    candidates, baselines = sides(comparison, records, cell_of=_cell)
    if not candidates:
        return [Finding(comparison=comparison, group={}, name="all", reason="nothing of the candidate was run")]
    of_groups = groups(comparison, candidates, cell_of=_cell)
    shown = dict.fromkeys((*comparison.by, *varying(dict(group) for group in of_groups)))
    found = []
    for key in sorted(of_groups, key=lambda key: rank(dict(key), shown)):
        group = dict(key)
        matching = [record for record in baselines if fits(record.cell, group, comparison)]
        found.append(_judged(comparison, group, label(group, shown), of_groups[key], matching))
    return found


def _cell(record: Record) -> Cell:
    return record.cell


def sides(comparison: Comparison, things: Iterable[T], *, cell_of: Callable[[T], Cell]) -> tuple[list[T], list[T]]:
    """Returns what of some things that have a cell is of the candidate, and what of the rest is of the baseline."""
    candidates, baselines = [], []
    for each in things:
        if contains(cell_of(each), comparison.candidate):
            candidates.append(each)
        elif contains(cell_of(each), comparison.baseline):
            baselines.append(each)
    return candidates, baselines


def groups(comparison: Comparison, candidates: Iterable[T], *, cell_of: Callable[[T], Cell]) -> dict[CellKey, list[T]]:
    """Returns the candidates by what is neither selected nor ignored: there is a verdict for each of these groups."""
    found: dict[CellKey, list[T]] = {}
    for each in candidates:
        key = cell_key(cell_of(each), without=(*comparison.candidate, *comparison.ignore))
        found.setdefault(key, []).append(each)
    return found


def fits(baseline: Cell, group: Cell, comparison: Comparison) -> bool:
    """Says whether a baseline's cell fits a group.

    A field that only one of both has is no difference: data-parallel training has no quorum, and serves for all.
    """
    free = {*comparison.candidate, *comparison.baseline, *comparison.ignore}
    return contains(baseline, {name: value for name, value in group.items() if name in baseline and name not in free})


def _judged(
    comparison: Comparison, group: Cell, name: str, candidates: Sequence[Record], baselines: Sequence[Record]
) -> Finding:
    """Pairs the runs of a group by seed, and judges the differences."""
    finding = Finding(comparison=comparison, group=group, name=name)
    if not baselines:
        return replace(finding, reason="nothing of the baseline was run")
    for who, runs in (("candidate", candidates), ("baseline", baselines)):
        seeds = [record.seed for record in runs]
        if len(seeds) != len(set(seeds)):
            names = ", ".join(varying(record.cell for record in runs)) or "settings outside the cell"
            reason = f"several runs of the {who} with the same seed differ in {names}: name it in the comparison"
            return replace(finding, reason=reason)
    ours = {record.seed: record for record in candidates}
    theirs = {record.seed: record for record in baselines}
    both = tuple(sorted(ours.keys() & theirs.keys()))
    finding = replace(finding, seeds=both, cells=(candidates[0].cell, baselines[0].cell))
    if unlike := _unlike([(ours[seed], theirs[seed]) for seed in both]):
        return replace(finding, reason=unlike, settled=True)
    if diverged := sorted(seed for seed in ours if ours[seed].diverged):
        seeds_text = ", ".join(map(str, diverged))
        sound = any(seed in theirs and not theirs[seed].diverged for seed in diverged)
        verdict = Verdict.FAILS if sound else Verdict.INCONCLUSIVE
        return replace(finding, verdict=verdict, reason=f"the candidate diverged (seed {seeds_text})", settled=sound)
    lost = sorted(seed for seed in ours if seed in theirs and theirs[seed].diverged)
    pairs = [seed for seed in sorted(ours.keys() & theirs.keys()) if seed not in lost]
    # After those that diverged, which ended before the others.
    if unequal := _unequal([(ours[seed], theirs[seed]) for seed in pairs], comparison.equal):
        return replace(finding, reason=unequal, settled=True)
    reason = f"left out, since the baseline diverged: seed {', '.join(map(str, lost))}" if lost else ""
    if not pairs:
        return replace(finding, reason=reason or "no seed was run for both")
    differences = paired_differences({s: ours[s].loss for s in pairs}, {s: theirs[s].loss for s in pairs})
    found = interval(tuple(differences.values()))
    identical = len(pairs) > 1 and not any(differences.values())
    doubt = _doubt([ours[s].loss for s in pairs], [theirs[s].loss for s in pairs])
    tested = comparison.kind is Kind.BETTER and len(pairs) > 1 and not identical and not doubt
    verdict = Verdict.INCONCLUSIVE if doubt else judge(found, comparison.kind, comparison.margin)
    return replace(
        finding,
        differences=differences,
        candidate_loss=math.fsum(ours[s].loss for s in pairs) / len(pairs),
        baseline_loss=math.fsum(theirs[s].loss for s in pairs) / len(pairs),
        parameters=ours[pairs[0]].parameters,
        interval=found,
        over_text=_over_text([ours[s] for s in pairs], [theirs[s] for s in pairs]),
        p_value=p_better(tuple(differences.values()), comparison.margin) if tested else None,
        verdict=Verdict.IDENTICAL if identical else verdict,
        reason=reason or doubt,
        extra={
            s: _extra(ours[s], theirs[s])
            for s in pairs
            if comparison.equal is Equal.TOKENS and ours[s].curve and theirs[s].curve and not identical
        },
    )


def _unlike(pairs: Sequence[tuple[Record, Record]]) -> str:
    """Says why runs must not be compared: they saw different texts. Empty if nothing is in the way."""
    if any(ours.corpus != theirs.corpus for ours, theirs in pairs):
        return "candidate and baseline saw different texts"
    if len({ours.corpus for ours, _ in pairs}) > 1:
        return "not all seeds saw the same text: remove the records of one"
    if any(run.loss <= 0 for pair in pairs for run in pair):
        return "a loss at or below 0 cannot be part of a ratio: let the task return one above 0"
    return ""


def _unequal(pairs: Sequence[tuple[Record, Record]], what: Equal) -> str:
    """Says in which pair one run has spent more than the other; empty if they are level."""
    for ours, theirs in pairs:
        mine, other = _spent(ours, what), _spent(theirs, what)
        if other and abs(mine / other - 1) > TOLERANCE:
            unit = "trained tokens" if what is Equal.TOKENS else "virtual seconds"
            cure = "; islands end a step apart, of which more steps are a smaller part" if what is Equal.TOKENS else ""
            form = ",.0f" if what is Equal.TOKENS else ",.4g"
            told = f"(seed {ours.seed}: {mine:{form}} and {other:{form}})"
            return f"{unit} differ by more than {100 * TOLERANCE:g} % {told}{cure}"
    return ""


def _doubt(candidates: Sequence[float], baselines: Sequence[float]) -> str:
    """Says what makes the losses of all pairs no basis for a verdict; empty if nothing does."""
    if len(candidates) == 1:
        return "one seed decides nothing"
    if len({*candidates, *baselines}) == 1:
        return f"every run of every seed has the loss {candidates[0]:g}: it does not tell what was trained"
    if len(set(candidates)) == len(set(baselines)) == 1:
        return "every seed gives the same two losses: they do not scatter, so there is nothing to judge them by"
    return ""


def _over_text(candidates: Sequence[Record], baselines: Sequence[Record]) -> Interval | None:
    pairs = [(a, b) for a, b in zip(candidates, baselines, strict=True) if a.blocks and b.blocks]
    texts = {(len(run.blocks), run.sequences, run.settings.get("task.context")) for pair in pairs for run in pair}
    if len(texts) != 1 or len(pairs[0][0].blocks) < TEXT_PARTS:
        return None
    return over_text([ours.blocks for ours, _ in pairs], [theirs.blocks for _, theirs in pairs])


def _spent(record: Record, what: Equal) -> float:
    return record.tokens if what is Equal.TOKENS else record.virtual_s


def _extra(candidate: Record, baseline: Record) -> ExtraTokens | None:
    """Extra tokens for the last loss of the baseline's own curve, which was read on the same sequences."""
    tokens, _, loss = baseline.curve[-1]
    if not tokens > 0 or not math.isfinite(loss):
        return None
    return extra_tokens([(n, each) for n, _, each in candidate.curve], loss=loss, tokens=tokens)


def correction(found: Sequence[Finding]) -> str:
    """States how "better" claims were corrected; empty if there was nothing to correct."""
    count = sum(finding.p_value is not None for finding in found)
    if count < 2:
        return ""
    return (
        f'The {count} claims of the kind "better" were corrected together (Holm): the chance that any of them holds '
        f"falsely is at most {ONE_SIDED:.1%}, where the number of seeds was fixed beforehand."
    )
