"""The report on experiments: tables of verdicts and plots, from records alone.

A page is text with blocks that are written anew, between ``<!-- lab KIND ORIGIN: NAME .. -->`` and ``<!-- end -->``:

* KIND is ``table`` or ``list`` of claims, or ``count`` of their verdicts.
* ORIGIN is ``published`` for claims with a source, ``own`` for the others.
* NAME is an experiment.

Images that the page shows are drawn anew: ``NAME-loss.svg`` has held-out loss over tokens, ``NAME-claims.svg`` the
intervals of all claims of an experiment; ``published-claims.svg`` those of the published claims of all experiments, and
``published-law.svg`` gaps by size beside the scaling law.
"""

from __future__ import annotations

import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from broker.base.errors import ConfigError
from ops.lab.records import Record
from ops.lab.statistics import Finding, Interval, Verdict, findings
from ops.plans.experiment import Experiment, Kind, label, varying
from ops.plans.scaling import FITTED_FROM, LAW, law_gap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLOCK = re.compile(r"<!-- lab (\w+) (\w+): ([\w. -]*?) -->\n.*?<!-- end -->", re.DOTALL)
_IMAGE = re.compile(r"\]\((?:[^)]*/)?([\w.-]+)-(loss|claims|law)\.svg\)")

#: More lines than this cannot be told apart in one plot.
LINES = 8
#: Parameters at which the plot of the law begins, and the gaps in percent that it shows: few seeds have long intervals.
SMALLEST, GAPS = 1e5, (-2, 6)

_WORDS = {Verdict.HOLDS: "holds", Verdict.FAILS: "fails", Verdict.INCONCLUSIVE: "open", Verdict.IDENTICAL: "open"}
_PUBLISHED = {Verdict.HOLDS: "reproduced", Verdict.FAILS: "not reproduced"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """An experiment with its findings.

    Attributes:
        experiment: The experiment.
        results: For each of its cells, seed -> record (:func:`ops.lab.schedule.current`).
    """

    experiment: Experiment
    results: Sequence[Mapping[int, Record]]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The verdicts on its claims."""
        return findings(self.experiment, self.results)


# --- the page -------------------------------------------------------------------------------------------------------


def filled(page: str, chapters: Iterable[Chapter]) -> str:
    """Returns a page with all of its generated blocks rewritten.

    Raises:
        ConfigError: A block names something that there is not.
    """
    by_name = {each.experiment.name: each for each in chapters}

    def block(match: re.Match[str]) -> str:
        kind, origin, listed = match.groups()
        for name in listed.split():
            if name not in by_name:
                raise ConfigError("page", match[0].partition("\n")[0], f"names {name}, of which there is no experiment")
        found = [
            (each.experiment, finding)
            for each in (by_name[name] for name in listed.split())
            for finding in each.findings
            if bool(finding.comparison.source) == (origin == "published")
        ]
        written = {"table": _table, "list": _list, "count": _count}
        if kind not in written or origin not in ("published", "own"):
            cure = "must read table, list or count, then published or own"
            raise ConfigError("page", match[0].partition("\n")[0], cure)
        return f"<!-- lab {kind} {origin}: {listed} -->\n{written[kind](found)}\n<!-- end -->"

    return _BLOCK.sub(block, page)


def _table(found: Sequence[tuple[Experiment, Finding]]) -> str:
    sourced = any(each.comparison.source for _, each in found)
    published, line = ("published | ", "---:|") if sourced else ("", "")
    rows = [
        f"| claim | {published}ours (95 % interval) | seeds | verdict | command |",
        f"|---|{line}---:|---:|---|---|",
    ]
    for experiment, each in found:
        claim = each.comparison
        figure = "" if claim.published is None else f"{100 * claim.published:+.2g} %"
        source = f" ({claim.source})" if claim.source else ""
        cells = (
            f"{_claim_of(each)}{source}",
            *([figure] if sourced else []),
            difference(each.interval),
            str(len(each.differences)),
            in_words(each),
            f"`{experiment.command}`",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _list(found: Sequence[tuple[Experiment, Finding]]) -> str:
    return "\n".join(
        f"* {_claim_of(each)}: {difference(each.interval)}, {in_words(each)} (`{experiment.name}`)"
        for experiment, each in found
    )


def _count(found: Sequence[tuple[Experiment, Finding]]) -> str:
    counted = Counter(in_words(finding).partition(":")[0] for _, finding in found)
    return f"{len(found)} claims: {', '.join(f'{number} {word}' for word, number in sorted(counted.items()))}."


def _claim_of(finding: Finding) -> str:
    return finding.comparison.claim + (f" [{finding.name}]" if finding.name != "all" else "")


def in_words(finding: Finding) -> str:
    """Returns a verdict in words, with its reason."""
    words = _WORDS | _PUBLISHED if finding.comparison.source else _WORDS
    reason = "the runs are identical" if finding.verdict is Verdict.IDENTICAL else finding.reason
    return words[finding.verdict] + (f": {reason}" if reason else "")


def difference(found: Interval | None) -> str:
    """Returns a relative difference with its interval."""
    if found is None:
        return "-"
    spread = f" ± {100 * found.half_width:.2f} %" if math.isfinite(found.half_width) else ""
    return f"{100 * found.mean:+.2f} %{spread}"


# --- plots ----------------------------------------------------------------------------------------------------------

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")  # Okabe and Ito
_STYLES = ("-", "--", "-.", ":")
_LOOK: Mapping[str, Any] = {
    "svg.hashsalt": "atoll",  # ids of clip paths and markers: random without it
    "svg.fonttype": "none",  # text stays text: small files, readable diffs
    "font.family": ["DejaVu Sans"],  # comes with Matplotlib, so that the layout is the same everywhere
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
}


def plots(page: str, chapters: Iterable[Chapter]) -> dict[str, bytes]:
    """Returns file -> SVG for the plots of a page.

    Raises:
        ConfigError: It shows a plot of something that there is not.
    """
    by_name = {each.experiment.name: each for each in chapters}
    drawn = {}
    for name, kind in dict.fromkeys(_IMAGE.findall(page)):
        if name == "published" and kind != "loss":
            published = [f for each in by_name.values() for f in each.findings if f.comparison.published is not None]
            svg = claims_plot(published) if kind == "claims" else law_plot(published)
        elif name in by_name and kind != "law":
            svg = claims_plot(by_name[name].findings) if kind == "claims" else loss_plot(by_name[name])
        else:
            raise ConfigError("page", f"{name}-{kind}.svg", "is no plot of an experiment that there is")
        drawn[f"{name}-{kind}.svg"] = svg
    return drawn


def loss_plot(of: Chapter) -> bytes:
    """Returns a plot of held-out loss over tokens: each cell's mean over seeds, with their range.

    Cells with more lines than can be told apart are left out from the last one on.
    """
    import numpy as np

    with drawing((6.2, 3.6)) as (figure, axes):
        for i, (name, runs) in enumerate(list(_lines(of).items())[:LINES]):
            points = min(len(run.curve) for run in runs)
            curves = np.array([run.curve[-points:] for run in runs])  # seeds, points, (tokens, seconds, loss)
            xs, losses = curves[:, :, 0].mean(axis=0) / 1e6, curves[:, :, 2]
            colour = COLOURS[i % len(COLOURS)]
            axes.plot(
                xs, losses.mean(axis=0), color=colour, linestyle=_STYLES[i % len(_STYLES)], linewidth=1.3, label=name
            )
            axes.fill_between(xs, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.18, linewidth=0)
        axes.set(xlabel="tokens trained (millions)", ylabel="held-out loss", title=of.experiment.name)
        if axes.get_legend_handles_labels()[1]:
            axes.legend()
        return svg(figure)


def claims_plot(found: Sequence[Finding]) -> bytes:
    """Returns a plot with a row for each claim: difference with interval, margin, published value."""
    shown = [each for each in found if each.interval is not None]
    with drawing((8.6, 1.0 + 0.3 * max(1, len(shown)))) as (figure, axes):
        axes.axvline(0, color="black", linewidth=0.8)
        for row, each in enumerate(shown):
            assert each.interval is not None
            colour = {Verdict.HOLDS: COLOURS[2], Verdict.FAILS: COLOURS[1]}.get(each.verdict, COLOURS[0])
            width = 100 * each.interval.half_width if math.isfinite(each.interval.half_width) else None
            axes.errorbar([100 * each.interval.mean], [row], xerr=width, fmt="o", color=colour, capsize=3, markersize=4)
            margin, better = 100 * each.comparison.margin, each.comparison.kind is Kind.BETTER
            axes.plot([-margin if better else margin], [row], "|", color="#777777", markersize=11)
            if each.comparison.published is not None:
                axes.plot([100 * each.comparison.published], [row], "x", color="black", markersize=5)
        axes.set_xlabel("candidate / baseline - 1 (%)\nbar: margin of the claim, cross: published")
        axes.set_yticks(range(len(shown)), [_short(_claim_of(each)) for each in shown])
        axes.set_ylim(max(1, len(shown)) - 0.5, -0.5)
        return svg(figure)


def law_plot(found: Sequence[Finding]) -> bytes:
    """Returns a plot of gaps by parameters, with the scaling law drawn through them."""
    import numpy as np

    sizes = np.geomspace(SMALLEST, FITTED_FROM, 50)
    with drawing((6.2, 3.6)) as (figure, axes):
        for colour, islands in zip(COLOURS, LAW, strict=False):
            law = [100 * law_gap(size, islands) for size in sizes]
            axes.plot(sizes, law, "--", color=colour, linewidth=1, marker="x", markevery=[-1], label=f"M = {islands}")
            for each in found:
                if each.interval is not None and each.comparison.law[1:] == (islands,):
                    mean, width = 100 * each.interval.mean, 100 * each.interval.half_width
                    at = each.comparison.law[0] * (1 + 0.05 * islands)  # side by side where sizes are the same
                    shown = width if math.isfinite(width) else None
                    axes.errorbar(at, mean, yerr=shown, fmt="o", color=colour, capsize=3, markersize=4)
        axes.set(xscale="log", ylim=GAPS, xlabel="parameters", ylabel="gap to data-parallel training (%)")
        axes.legend(title="dashed: the law, fitted from the cross on")
        return svg(figure)


def _short(text: str, most: int = 76) -> str:
    return text if len(text) <= most else f"{text[: most - 2].rstrip()} .."


def _lines(of: Chapter) -> dict[str, list[Record]]:
    """Returns label -> runs of that cell, in the order of the grid."""
    cells = of.experiment.cells()
    names = varying(cells)
    lines: dict[str, list[Record]] = {}
    for cell, by_seed in zip(cells, of.results, strict=True):
        runs = [record for _, record in sorted(by_seed.items()) if record.curve and not record.diverged]
        if runs:
            lines.setdefault(label(cell, names), []).extend(runs)
    return lines


@contextmanager
def drawing(size: tuple[float, float]) -> Iterator[tuple[Figure, Axes]]:
    """Yields a figure with one pair of axes, in our style.

    Matplotlib is imported when a plot is drawn and not before, and without pyplot: no window, no global state.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    look: Any = dict(_LOOK)
    with style.context(["default", look]):  # whatever is in this user's own matplotlibrc
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots()


def svg(figure: Figure) -> bytes:
    """Returns the figure as SVG without date and program version."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": "atoll lab report"})
    # Lines of path data end in a blank, which every tool that looks at diffs complains about.
    return b"\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + b"\n"
