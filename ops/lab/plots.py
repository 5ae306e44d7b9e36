"""The plots of the laboratory, as SVG; they are drawn on :mod:`ops.lab.canvas`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ops.lab.canvas import COLOURS, PANEL, colour, drawing, legend, style_of, svg
from ops.lab.comparisons import TOLERANCE
from ops.lab.records import Record
from ops.lab.settings import is_language
from ops.lab.statistics import Interval

#: Label -> records of one cell, one per seed.
Series = Mapping[str, Sequence[Record]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GapLine:
    """A relative gap over tokens per parameter.

    Attributes:
        way: (tokens per parameter, gap) by growing tokens, from the curves of losses.
        end: Tokens per parameter of the whole run, and the reported gap.
    """

    way: Sequence[tuple[float, float]]
    end: tuple[float, Interval]


def loss_against_tokens(panels: Mapping[str, Series]) -> bytes:
    """Returns held-out loss over tokens: mean over seeds as a line, the range of seeds as a band.

    Args:
        panels: Title of a panel -> its lines, at most eight. Records without a curve are left out.
    """
    return _curves(panels, column=0, title="Held-out loss against tokens: mean and range of seeds")


def loss_against_time(panels: Mapping[str, Series]) -> bytes:
    """Returns held-out loss over the virtual time of the modelled fleet, as :func:`loss_against_tokens` does."""
    return _curves(panels, column=1, title="Held-out loss against virtual time: mean and range of seeds")


def staleness_histogram(series: Series) -> bytes:
    """Returns the share of contributions by staleness, one line of steps for every cell, all seeds together."""
    with drawing(1) as (figure, (axes,)):
        for i, (name, records) in enumerate(series.items()):
            counts: dict[float, float] = {}
            for record in records:
                for versions, number in record.staleness_histogram:
                    counts[versions] = counts.get(versions, 0.0) + number
            total = math.fsum(counts.values())
            if not total:
                continue
            top = round(4 * max(counts))
            edges = [(k - 0.5) / 4 for k in range(top + 2)]
            shares = [100 * counts.get(k / 4, 0.0) / total for k in range(top + 1)]
            axes.stairs(shares, edges, color=colour(i), linestyle=style_of(i), label=name, linewidth=1.4)
        axes.set(title="Staleness of merged contributions", xlabel="staleness (versions)", ylabel="contributions (%)")
        legend(axes)
        return svg(figure)


def loss_by_cell(series: Series) -> bytes:
    """Returns the final held-out loss of every cell: a mark at the mean over seeds, and a dot for each of them.

    Grey lines join the dots of one seed: seeds are paired, so their shape tells more than where they lie. They
    end where the next cell has other tokens: those losses are not paired.
    """
    with drawing(1, size=(PANEL[0], 0.9 + 0.24 * len(series))) as (figure, (axes,)):
        by_seed: dict[int, list[tuple[Record, int]]] = {}
        for row, records in enumerate(series.values()):
            for record in records:
                if not record.diverged:
                    by_seed.setdefault(record.seed, []).append((record, row))
        for points in by_seed.values():
            for (one, upper), (other, lower) in itertools.pairwise(points):
                if abs(one.tokens / other.tokens - 1) < TOLERANCE:
                    axes.plot([one.loss, other.loss], [upper, lower], color="#bbbbbb", linewidth=0.7)
        for row, records in enumerate(series.values()):
            losses = [record.loss for record in records if not record.diverged]
            if not losses:
                axes.text(0.5, row, "diverged", transform=axes.get_yaxis_transform(), ha="center", va="center")
                continue
            axes.plot(losses, [row] * len(losses), "o", color=COLOURS[0], markersize=4, alpha=0.6, markeredgewidth=0)
            axes.vlines(math.fsum(losses) / len(losses), row - 0.35, row + 0.35, color=COLOURS[1], linewidth=2)
        figure.suptitle("Held-out loss: seeds and their mean")  # long names leave the axes too narrow for it
        axes.set_xlabel(_loss_of(record for records in series.values() for record in records))
        axes.set_yticks(range(len(series)), list(series))
        axes.set_ylim(len(series) - 0.5, -0.5)
        return svg(figure)


def participation(series: Series) -> bytes:
    """Returns a bar per cell: the share of live islands that a round merged; dots are seeds."""
    with drawing(1, size=(PANEL[0], 0.9 + 0.3 * len(series))) as (figure, (axes,)):
        for row, records in enumerate(series.values()):
            shares = [100 * record.participation for record in records]
            axes.barh(row, math.fsum(shares) / len(shares), height=0.6, color=COLOURS[0], alpha=0.75)
            axes.plot(shares, [row] * len(shares), "o", color="black", markersize=2.5)
        figure.suptitle("Participation")
        axes.set(xlabel="live islands merged per round (%)", xlim=(0, 103))
        axes.set_yticks(range(len(series)), list(series))
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        return svg(figure)


def rounds(record: Record) -> bytes:
    """Returns when the first rounds of a run were opened, closed and committed, a lane for every fragment.

    A bar's colour is the number of contributors; its pale end is the way from closing to the durable commit.
    """
    fragments = sorted({row[3] for row in record.gantt})
    contributors = [int(row[4]) for row in record.gantt]
    with drawing(1, size=(PANEL[0], 1.2 + 0.22 * len(fragments))) as (figure, (axes,)):
        import matplotlib
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import BoundaryNorm

        steps = list(range(min(contributors), max(contributors) + 2))
        colours = matplotlib.colormaps["viridis_r"].resampled(max(2, len(steps) - 1))
        norm = BoundaryNorm([each - 0.5 for each in steps], colours.N) if len(steps) > 2 else None
        for opened_s, closed_s, committed_s, fragment, merged in record.gantt:
            lane = fragments.index(fragment)
            colour = colours(norm(merged)) if norm else colours(0.7)
            # On a fast link a round is thinner than a pixel: the edge keeps it visible.
            axes.barh(
                lane, closed_s - opened_s, left=opened_s, height=0.7, color=colour, edgecolor=colour, linewidth=0.6
            )
            axes.barh(lane, committed_s - closed_s, left=closed_s, height=0.7, color=colour, alpha=0.4)
        axes.set(title="The first rounds: opened to closed, pale until committed", xlabel="virtual time (s)")
        axes.set_ylabel("fragment")
        axes.set_yticks(range(len(fragments)), [f"{int(each)}" for each in fragments])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        if norm:
            ticks = steps[:-1] if len(steps) < 12 else steps[:-1:4]
            figure.colorbar(ScalarMappable(norm, colours), ax=axes, label="contributors", ticks=ticks)
        return svg(figure)


def gap_against_tokens(panels: Mapping[str, Mapping[str, GapLine]]) -> bytes:
    """Returns relative gaps over the tokens that each parameter has seen; the last one has its 95 % interval.

    Args:
        panels: Title of a panel -> label -> line. A label has one colour in all panels.
    """
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    with drawing(len(panels), size=(12.0, 3.6 * len(panels)), columns=1) as (figure, all_axes):
        for axes, (name, lines) in zip(all_axes, panels.items(), strict=True):
            axes.axhline(0, color="black", linewidth=0.8)
            for label, line in lines.items():
                shade, dashes = colour(labels.index(label)), style_of(labels.index(label))
                points = [*line.way, (line.end[0], line.end[1].mean)]
                xs, ys = [x for x, _ in points], [100 * y for _, y in points]
                axes.plot(xs, ys, "o", color=shade, linestyle=dashes, markersize=2.5, linewidth=1.2, label=label)
                half_width = line.end[1].half_width
                if math.isfinite(half_width):
                    axes.errorbar(xs[-1:], ys[-1:], yerr=[100 * half_width], capsize=3, color=shade, linewidth=1.2)
            sizes = [x for line in lines.values() for x in (*(x for x, _ in line.way), line.end[0])]
            round_sizes = [digit * 10.0**power for power in range(-3, 7) for digit in (1, 2, 5)]
            ticks = [each for each in round_sizes if min(sizes) <= each <= max(sizes)]
            axes.set(xscale="log", xlabel="tokens per parameter", ylabel="decoupled / baseline - 1 (%)", title=name)
            axes.set_xticks(ticks, [f"{each:g}" for each in ticks])
            axes.set_xticks([], minor=True)
            legend(axes, beside=True)  # a line for each of many experiments
        return svg(figure)


def outer_grid(losses: Mapping[tuple[float, float], float], records: Sequence[Record] = ()) -> bytes:
    """Returns a map of mean held-out loss by outer rate and outer momentum; the lowest is framed.

    Args:
        losses: (rate, momentum) -> loss; infinite where a run diverged.
        records: The runs behind them, which say in what unit.
    """
    from matplotlib.patches import Rectangle

    rates, momenta = sorted({rate for rate, _ in losses}), sorted({momentum for _, momentum in losses})
    rows = [[losses.get((rate, momentum), math.nan) for rate in rates] for momentum in momenta]
    finite = [loss for row in rows for loss in row if math.isfinite(loss)]
    with drawing(1, size=(1.8 + 0.75 * len(rates), 1.3 + 0.45 * len(momenta))) as (figure, (axes,)):
        shown = [[loss if math.isfinite(loss) else math.nan for loss in row] for row in rows]
        corners = [[each - 0.5 for each in range(count + 1)] for count in (len(rates), len(momenta))]
        axes.pcolormesh(*corners, shown, cmap="viridis")
        middle = (min(finite) + max(finite)) / 2 if finite else 0.0
        for y, row in enumerate(rows):
            for x, loss in enumerate(row):
                text = "" if math.isnan(loss) else f"{loss:.3f}" if math.isfinite(loss) else "diverged"
                dark = math.isfinite(loss) and loss < middle
                axes.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
                if finite and loss == min(finite):
                    corner = (x - 0.5, y - 0.5)
                    axes.add_patch(Rectangle(corner, 1, 1, facecolor="none", edgecolor=COLOURS[1], linewidth=2))
        axes.set_xticks(range(len(rates)), [f"{each:g}" for each in rates])
        axes.set_yticks(range(len(momenta)), [f"{each:g}" for each in momenta])
        title = f"Held-out {_loss_of(records)}"
        axes.set(title=title, xlabel="outer learning rate", ylabel="outer momentum")
        axes.grid(visible=False)
        return svg(figure)


# --- parts --------------------------------------------------------------------------------------------------------


def _curves(panels: Mapping[str, Series], *, column: int, title: str) -> bytes:
    largest = max(
        (row[column] for series in panels.values() for records in series.values() for r in records for row in r.curve),
        default=1.0,
    )
    scale, unit = _token_unit(largest) if column == 0 else _time_unit(largest)
    loss = _loss_of(r for series in panels.values() for records in series.values() for r in records)
    with drawing(len(panels)) as (figure, all_axes):
        for axes, (name, series) in zip(all_axes, panels.items(), strict=False):
            for i, (cell, records) in enumerate(series.items()):
                xs, mean, low, high = _over_seeds([record for record in records if record.curve], column)
                if not xs:
                    continue
                scaled = [x / scale for x in xs]
                axes.plot(scaled, mean, color=colour(i), linestyle=style_of(i), linewidth=1.3, label=cell)
                axes.fill_between(scaled, low, high, color=colour(i), alpha=0.18, linewidth=0)
            axes.set(title=name or title, xlabel=unit, ylabel=loss)
            legend(axes)
        if len(panels) > 1:
            figure.suptitle(title)
        return svg(figure)


def _over_seeds(records: Sequence[Record], column: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Returns x, mean, lowest and highest loss over seeds, at the points of the first seed that all of them reached.

    The first point of a run is often far above the others, at initialisation; without tokens it is left out.
    """
    import numpy as np

    curves = []
    for record in records:
        points = [(row[column], row[2]) for row in record.curve if row[0] > 0 and math.isfinite(row[2])]
        if points:
            curves.append(points)
    if not curves:
        return [], [], [], []
    first = max(points[0][0] for points in curves)
    last = min(points[-1][0] for points in curves)
    # Seeds end within a few steps of each other: the last common point is one of the grid.
    xs = sorted({x for x, _ in curves[0] if first <= x <= last} | {first, last})
    losses = np.array([np.interp(xs, [x for x, _ in points], [y for _, y in points]) for points in curves])
    return xs, losses.mean(axis=0).tolist(), losses.min(axis=0).tolist(), losses.max(axis=0).tolist()


def _loss_of(records: Iterable[Record]) -> str:
    """Names losses on an axis: those of a task of one's own are whatever it evaluates."""
    return "loss (nats per token)" if all(is_language(record.settings) for record in records) else "loss"


def _token_unit(largest: float) -> tuple[float, str]:
    for scale, word in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")):
        if largest >= scale:
            return scale, f"tokens trained ({word})"
    return 1.0, "tokens trained"


def _time_unit(largest_s: float) -> tuple[float, str]:
    if largest_s >= 7200:
        return 3600.0, "virtual time (h)"
    return (60.0, "virtual time (min)") if largest_s >= 300 else (1.0, "virtual time (s)")
