"""Which plots an experiment gets, and which cells share a panel. Draws nothing itself (:mod:`ops.lab.plots`)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ops.lab import plots
from ops.lab.cells import CellKey, grouped, label, labels, varying
from ops.lab.chapter import Findings
from ops.lab.records import Record

#: More lines than this cannot be told apart in one panel; more panels than this are a wall.
LINES = 8
PANELS = 9

#: Participation that is everybody's, but for what ends with the run: there is nothing to see.
ALL = 0.995

RATE, MOMENTUM = "outer_learning_rate", "outer_momentum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A drawn plot: its title, the name of its file, its bytes."""

    title: str
    file: str
    svg: bytes


def of(each: Findings) -> tuple[Picture, ...]:
    """Returns the plots of an experiment; those that its records have no data for are left out."""
    name = each.experiment.name
    return tuple(
        Picture(title=f"{name}: {title}", file=f"{name}-{kind}.svg", svg=draw()) for kind, title, draw in _wanted(each)
    )


def _wanted(each: Findings) -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """Yields (kind, title, how to draw it), the one that answers the question first."""
    cells = grouped(each.final, each.experiment.cells())
    names = varying(dict(cell) for cell in cells)
    if len(cells) > 1:
        yield "loss", "loss by cell", lambda: plots.loss_by_cell(named(cells, names))
    if grid := outer_grid(each.final):
        yield "outer-grid", "loss by outer rate and momentum", lambda: plots.outer_grid(grid, each.final)
    if shown := panels({cell: runs for cell, runs in cells.items() if any(len(run.curve) > 1 for run in runs)}):
        yield "loss-tokens", "loss against tokens", lambda: plots.loss_against_tokens(shown)
        yield "loss-time", "loss against virtual time", lambda: plots.loss_against_time(shown)
    took_part = named({cell: runs for cell, runs in cells.items() if any(run.staleness for run in runs)}, names)
    if any(run.participation < ALL for runs in took_part.values() for run in runs):
        yield "participation", "participation", lambda: plots.participation(took_part)
    stale = named({cell: runs for cell, runs in cells.items() if any(run.staleness_histogram for run in runs)}, names)
    if stale:
        few = dict(list(stale.items())[:LINES])
        of_all = f" (first {len(few)} of {len(stale)} cells)" if len(few) < len(stale) else ""
        yield "staleness", f"staleness of contributions{of_all}", lambda: plots.staleness_histogram(few)
    if with_rounds := [run for runs in cells.values() for run in runs if run.gantt]:
        first = with_rounds[0]
        of_cell = f"{label(first.cell, names)}, seed {first.seed}"
        yield "rounds", f"the first rounds of one run ({of_cell})", lambda: plots.rounds(first)


def named(cells: Mapping[CellKey, Sequence[Record]], names: Sequence[str]) -> dict[str, Sequence[Record]]:
    """Returns label -> runs, a label naming those fields."""
    return dict(zip(labels((dict(cell) for cell in cells), names), cells.values(), strict=True))


def panels(cells: Mapping[CellKey, Sequence[Record]]) -> dict[str, dict[str, Sequence[Record]]]:
    """Returns title -> lines. Few cells share one panel; more are split by the field that needs the fewest panels.

    If no field splits them so that lines can be told apart, they are split as they come; what is then beyond the last
    panel is not drawn, and the last title says so.
    """
    names = varying(dict(cell) for cell in cells)
    if len(cells) <= LINES:
        return {"": named(cells, names)} if cells else {}
    splits = []
    for name in names:
        split: dict[str, dict[CellKey, Sequence[Record]]] = {}
        for cell, runs in cells.items():
            title = label(dict(cell), [name]) if name in dict(cell) else f"no {name}"
            split.setdefault(title, {})[cell] = runs
        if len(split) <= min(PANELS, len(cells) // 2) and max(map(len, split.values())) <= LINES:
            others = [each for each in names if each != name]
            splits.append({title: named(part, others) for title, part in split.items()})
    if splits:
        return min(splits, key=len)
    lines = list(named(cells, names).items())
    chunks = [dict(lines[first : first + LINES]) for first in range(0, len(lines), LINES)]
    shown = {f"cells {k * LINES + 1} to {k * LINES + len(part)}": part for k, part in enumerate(chunks[:PANELS])}
    if len(chunks) > PANELS:
        title, part = shown.popitem()
        shown[f"{title} of {len(lines)}"] = part
    return shown


def outer_grid(records: Sequence[Record]) -> dict[tuple[float, float], float]:
    """Returns (outer rate, outer momentum) -> mean loss over seeds, of the runs that differ in nothing else.

    There may be several families of such runs (other islands, another merge rule): the first of the largest counts.
    Means are over the seeds that all its points have. Nothing if its points are a row, a column or a diagonal.
    """
    families: dict[str, dict[tuple[float, float], dict[int, float]]] = {}
    for record in records:
        if RATE not in record.settings or MOMENTUM not in record.settings:
            continue
        others = {name: value for name, value in record.settings.items() if name not in (RATE, MOMENTUM, "seed")}
        family = families.setdefault(json.dumps(others, sort_keys=True), {})
        point = (float(record.settings[RATE]), float(record.settings[MOMENTUM]))
        family.setdefault(point, {})[record.seed] = math.inf if record.diverged else record.loss
    grid = max(families.values(), key=len, default={})
    rates, momenta = ({point[axis] for point in grid} for axis in (0, 1))
    seeds = set.intersection(*(set(losses) for losses in grid.values())) if grid else set()
    if min(len(rates), len(momenta)) < 2 or len(grid) <= max(len(rates), len(momenta)) or not seeds:
        return {}
    return {point: math.fsum(losses[seed] for seed in seeds) / len(seeds) for point, losses in grid.items()}
