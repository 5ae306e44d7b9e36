"""docs/results.md as a pure function of experiments and records. No number in it is typed in by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ops.lab.chapter import Findings, Plot, chapter, compute
from ops.lab.markdown import anchor, gap, percent, table


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the page that comes from elsewhere.

    Attributes:
        title: Of the part.
        body: Returns its Markdown.
        plots: File, in the directory of plots -> what draws it.
    """

    title: str
    body: Callable[[], str]
    plots: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)


HEAD = """\
# Results

Written by `atoll lab report` from the records in `docs/results/records`; no number on this page is typed in by hand,
and the same records give the same bytes. Every experiment names the command that runs it again.

- Losses are held-out, of the global model, in nats per token. Lower is better.
- Two methods are compared seed by seed, as candidate / baseline - 1 of their losses; above 0 the candidate is worse.
  Figures are means over seeds with Student's 95 % interval. Both are judged on the same sequences, so the standard
  error over sequences, which is given beside each loss, is no part of it. One seed decides nothing.
- A verdict is *holds* if the claim is true for the whole interval, *fails* if it is true nowhere in it, and
  *inconclusive* otherwise.
- Time is virtual: the production code runs in a modelled fleet, and only the arithmetic is real.
"""


def document(
    experiments: Sequence[Findings], plots: Mapping[str, Sequence[Plot]], sections: Sequence[Section] = ()
) -> str:
    """Returns the whole page.

    Args:
        experiments: In the order of the page.
        plots: Experiment -> its plots.
        sections: Parts from elsewhere, shown before the experiments.
    """
    parts = [HEAD, _claims(experiments, plots), _spent(experiments)]
    parts += [f"## {section.title}\n\n{section.body().strip()}" for section in sections]
    parts += [chapter(each, plots.get(each.experiment.name, ())) for each in experiments]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _claims(experiments: Sequence[Findings], plots: Mapping[str, Sequence[Plot]]) -> str:
    rows = []
    for each in experiments:
        name = each.experiment.name
        shown = plots.get(name, ())
        for finding in each.found:
            claim = finding.comparison
            if not claim.source:
                continue
            rows.append(
                (
                    f"{claim.claim} ({claim.source})",
                    finding.name if finding.name != "all" else "",
                    "" if claim.published is None else percent(claim.published),
                    gap(finding.found),
                    str(len(finding.differences)),
                    f"**{finding.verdict}**" if finding.differences else "not run yet",
                    f"[{name}]({anchor(name)})",
                    f"[plot]({shown[0].file})" if shown else "",
                )
            )
    if not rows:
        return ""
    head = ("claim (source)", "where", ">published", ">ours", ">seeds", "verdict", "experiment", "plot")
    return f"## Published claims\n\n{table(head, rows)}"


def _spent(experiments: Sequence[Findings]) -> str:
    rows = []
    for each in experiments:
        name = each.experiment.name
        notes = each.experiment.notes
        rows.append((f"[{name}]({anchor(name)})", f"`{each.experiment.command}`", *compute(each.records), notes))
    if len(rows) > 1:
        rows.append(("all", "", *compute([record for each in experiments for record in each.records]), ""))
    head = ("experiment", "command", ">runs", ">tokens", ">time here", ">of it training", "where we differ, and why")
    return f"## Commands, compute, and where we differ\n\n{table(head, rows)}" if rows else ""
