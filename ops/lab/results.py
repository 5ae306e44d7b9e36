"""docs/results.md as a pure function of experiments and records: no figure of a run is typed in by hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from ops.lab import published
from ops.lab.chapter import Findings, Plot, chapter, compute
from ops.lab.comparisons import Finding, distinct
from ops.lab.markdown import anchor, count, details, gap, percent, table
from ops.lab.records import Record, independent
from ops.lab.statistics import Verdict
from ops.lab.verdicts import told_verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page that comes from elsewhere.

    Attributes:
        title: Of the part.
        body: Returns its Markdown, given the directory of plots relative to the page.
        plots: File, in the directory of plots -> what draws it.
    """

    title: str
    body: Callable[[str], str]
    plots: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)


HEAD = """\
# Results

Written by `atoll lab report` from the records in `{records}`: no figure of a run, no interval, no verdict is
typed in by hand, and the same records give the same bytes. Only notes and reasons quote figures: of what is known from
elsewhere, or of runs that led to an experiment. Every experiment names the command that runs it again, and where it
differs from what was published.

- Losses are held-out, of the global model, in nats per token (of a task of your own: what it evaluates). Lower is
  better.
- Two methods are compared seed by seed, as candidate / baseline - 1 of their losses; above 0 the candidate is worse.
  Figures are means over seeds with Student's 95 % interval. Both are judged on the same sequences: an interval speaks
  of other seeds with these sequences and at the chosen rates, neither of the luck of choosing a rate nor of other
  text, for which some claims have a column of their own. One seed decides nothing. A cell's loss is the mean over all
  its seeds, a claim's over those that both sides have.
- A claim is put to the test, whatever it says: *holds* means that it is true for the whole interval, *fails* that it
  is true nowhere in it, *identical* that what was compared changed no bit of any run, so that nothing was tested,
  *inconclusive* anything else. Claims of "better" are corrected for their number, those of "not worse" are not: of many
  that are true in the mean, a few will hold or fail by chance. For one that is open the page says about how many seeds
  would decide four times in five, if mean and scatter stay as they are.
- Seeds are added while an interval is wider than the margin, from the fourth on, so that one 95 % interval in twelve
  to fifteen misses. Where a verdict was open, some claims were planned with more later, and *new seeds alone* says
  what those say. The verdict is by all of them: where the truth lies on the margin, one in twelve is wrong after two
  looks at numbers fixed beforehand, one in eight after three, one in nine where the first look was whenever seeds had
  stopped being added, instead of one in twenty. Rules and rates that won in an experiment were made its
  candidates, on the same seeds: what it says of them is exploratory.
- Time is virtual: the production code runs in a modelled fleet, and only the arithmetic is real.
"""

WORDS = """\
M islands train; each takes H inner steps between two merges of one of the model's P fragments, and goes on training
for tau steps while a fragment travels. K contributions close a round, at once or after a grace period; *keep* is the
share of local progress that survives the adoption of a merged fragment. *Participation* is the share of the live
islands that a round merged; *staleness* is in versions, from the one that a contribution was trained from to the one
it became part of; *wasted* are tokens that were trained and never merged; *cosine* is the mean one between the
contributions of a round; *p90* is what nine of ten stay below; *error over sequences* the standard error of a loss
over the held-out sequences; *over text* the half-width of a 95 % interval of a difference over other held-out text,
with the same seeds: those of which both runs told the losses of parts of it, in brackets how many. A merged
pseudo-gradient D is the *mean* of the contributions, or *RDA*: their mean direction with their mean length. *Stock* is
Nesterov with rate 0.7 and momentum 0.9 on the mean; *plain SGD* is rate 1 without momentum. A tuned value is
*interior* if smaller and larger ones were tried and were worse. *Holm* is the correction for several claims of one
experiment. *tiny* and *small* are our byte transformers of 0.12 M and 0.9 M parameters.
{lab} and {design} have the rest."""


def document(
    experiments: Sequence[Findings],
    plots: Mapping[str, Sequence[Plot]],
    sections: Sequence[Section] = (),
    *,
    folder: str = "results",
    records: str = "docs/results/records",
    docs: str | None = ".",
) -> str:
    """Returns the whole page.

    Args:
        experiments: In any order; the page begins with those whose claims were published.
        plots: Experiment -> its plots.
        sections: Parts from elsewhere, shown before the experiments.
        folder: Directory of plots, relative to the page.
        records: Directory that they come from.
        docs: Directory of the documents that the page refers to, relative to it; None if they are nowhere near.
    """
    experiments = sorted(experiments, key=_published_first)
    other = {name: f"docs/{name}.md" if docs is None else _link(docs, name) for name in ("lab", "design")}
    parts = [HEAD.format(records=records), details("Words", WORDS.format(**other))]
    parts += [_counted(experiments), _targets(experiments), _claims(experiments, plots)]
    parts += [f"## {section.title}\n\n{section.body(folder).strip()}" for section in sections]
    parts += [_spent(experiments)]
    parts += [chapter(each, plots.get(each.experiment.name, ())) for each in experiments]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _link(docs: str, name: str) -> str:
    return f"[{name}.md]({PurePosixPath(docs, name)}.md)"


def _published_first(each: Findings) -> tuple[bool, str]:
    return not any(finding.comparison.published is not None for finding in each.claims), each.experiment.name


def _counted(experiments: Sequence[Findings]) -> str:
    tested = [finding for each in experiments for finding in each.claims if finding.seeds]
    found = distinct(tested)
    if not found:
        return ""
    runs = len(independent(record for each in experiments for record in each.records))
    wide = sum(
        finding.interval is not None and finding.interval.half_width > finding.comparison.margin > 0
        for finding in found
    )
    rest = f" In {wide} the interval is still wider than the margin." if wide else ""
    if again := len(tested) - len(found):
        rest += f" {again} more of the same kind and margin rest on the same runs as another, and are counted with it."
    return f"Of {len(found)} claims tested in {runs} runs: {_verdicts(found)}.{rest}"


def _verdicts(found: Sequence[Finding]) -> str:
    counted = Counter(str(finding.verdict) for finding in found)
    return ", ".join(f"{number} **{verdict}**" for verdict, number in sorted(counted.items()))


def _targets(experiments: Sequence[Findings]) -> str:
    """What the project set out to show, and how much of it is seen."""
    targets: dict[str, list[tuple[str, Finding]]] = {}
    for each in experiments:
        for finding in each.claims:
            if finding.comparison.target and finding.seeds:
                targets.setdefault(finding.comparison.target, []).append((each.experiment.name, finding))
    rows = []
    for target, tested in targets.items():
        measured = [(found.mean, gap(found), name) for name, each in tested if (found := each.interval) is not None]
        ends = (min(measured), max(measured))[: len(measured)] if measured else ()
        told = [f"{figure} ([{name}]({anchor(name)}))" for _, figure, name in ends]
        rows.append((target, _verdicts(distinct(finding for _, finding in tested)), *(*told, "", "")[:2]))
    return f"## Targets\n\n{table(('target', 'claims', '>lowest mean', '>highest mean'), rows)}" if rows else ""


def _claims(experiments: Sequence[Findings], plots: Mapping[str, Sequence[Plot]]) -> str:
    rows = []
    for each in experiments:
        name = each.experiment.name
        shown = plots.get(name, ())
        for finding in each.claims:
            claim = finding.comparison
            if not claim.source:
                continue
            rows.append(
                (
                    f"{claim.claim} ({claim.source})",
                    finding.name if finding.name != "all" else "",
                    "" if claim.published is None else percent(claim.published),
                    gap(finding.interval),
                    str(len(finding.differences)),
                    told_verdict(finding) if finding.seeds else "not run yet",
                    claim.why if finding.seeds and finding.verdict is not Verdict.HOLDS else "",
                    f"[{name}]({anchor(name)})" + (f", [plot]({shown[0].file})" if shown else ""),
                )
            )
    if not rows:
        return ""
    what = ("claim put to the test (source)", "where", ">published", ">ours", ">seeds", "verdict")
    rest = "A figure is called published as its source prints it; how far seeds scattered there is not known."
    for islands in published.DILOCO:
        low, high = published.rounded(islands)
        rest += (
            f" The losses behind the gap of {islands} islands at {count(min(published.DATA_PARALLEL))} parameters have "
            f"two decimals: it may be anything from {percent(low)} to {percent(high)}."
        )
    return f"## Published claims\n\n{table((*what, 'where we differ, why', 'experiment'), rows)}\n\n{rest}"


def _spent(experiments: Sequence[Findings]) -> str:
    rows = []
    for each in experiments:
        name = each.experiment.name
        rows.append((f"[{name}]({anchor(name)})", f"`{each.command}`", *compute(each.records)))
    records = [record for each in experiments for record in independent(each.records)]
    runs = independent(records)
    if len(rows) > 1:
        rows.append(("all", "", *compute(runs)))
    if not rows:
        return ""
    head = ("experiment", "command", ">runs", ">tokens", ">time here", ">of it training")
    rest = "Times are of the clock, with the waiting for a processor in them, in training and elsewhere."
    if taken_over := len(records) - len(runs):
        rest += (
            f" {taken_over} runs stand in two experiments, as the first rung of the one and the last of the other; "
            "the last row counts them once."
        )
    parts = (table(head, rows), rest, _repeated(runs))
    return "## Commands and compute\n\n" + "\n\n".join(part for part in parts if part)


def _repeated(records: Sequence[Record]) -> str:
    """What runs say that several experiments made, each for itself, of the same settings and seed."""
    losses: dict[str, list[Record]] = {}
    for record in records:
        losses.setdefault(record.key, []).append(record)
    shared = [runs for runs in losses.values() if len(runs) > 1 and all(0 < run.loss < math.inf for run in runs)]
    if not shared:
        return ""
    same = sum(len({run.loss for run in runs}) == 1 for runs in shared)
    modes = Counter(str(runs[0].settings.get("mode", "")) for runs in shared)
    of_modes = ", ".join(f"{number} {mode}" for mode, number in sorted(modes.items()) if mode)
    builds = sum(len({run.code for run in runs}) > 1 for runs in shared)
    far = max(max(run.loss for run in runs) / min(run.loss for run in runs) - 1 for runs in shared)
    rest = f"; the others differ by {100 * far:.2g} % at most" if same < len(shared) else ""
    by_mode = f" ({of_modes})" if of_modes else ""
    return (
        f"Runs with the same settings and seed that several experiments made, each for itself: {len(shared)}{by_mode}, "
        f"{builds} of them by different revisions of the sources. {same} have the same loss to the last bit{rest}."
    )
