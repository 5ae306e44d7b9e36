"""Table 1 of Decoupled DiLoCo (https://arxiv.org/abs/2604.21428) beside simulated cells, and a plot."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from broker.wire.errors import ConfigError, Unavailable, cure_of
from ops.goodput.accounts import Account
from ops.goodput.caveats import caveats, changed
from ops.goodput.fleet import FailureModel, Fleet, Mode, check_together
from ops.goodput.simulation import Result, expected_goodput, simulate
from ops.goodput.view import parameters_json

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of table 1."""

    name: str
    mode: str
    islands: int  # of a synchronous job its groups, whose number the paper does not say and that hardly counts


#: Goodput in percent, by chips. One interruption per chip and year.
TABLE_1: Mapping[Row, Mapping[int, int]] = {
    Row(name="DP, not elastic", mode="dp", islands=8): dict(zip(CHIPS, (72, 57, 38, 27, 18), strict=True)),
    Row(name="elastic DP", mode="elastic-dp", islands=8): dict(zip(CHIPS, (88, 80, 69, 58, 40), strict=True)),
    Row(name="decoupled, 2 islands", mode="decoupled", islands=2): dict(zip(CHIPS, (94, 88, 80, 70, 54), strict=True)),
    Row(name="decoupled, 8 islands", mode="decoupled", islands=8): dict(zip(CHIPS, (98, 96, 94, 88, 80), strict=True)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of table 1: the published goodput in percent, and the account of the simulated fleet."""

    row: Row
    fleet: Fleet
    published: int
    account: Account

    @property
    def name(self) -> str:
        """Its row and its chips."""
        return f"{self.row.name} with {self.fleet.chips:,} chips"

    @property
    def difference(self) -> float:
        """Simulated less published goodput, in percentage points."""
        return 100.0 * self.account.goodput.value - self.published


def table(fleet: Fleet, model: FailureModel, on_cell: Callable[[int, int], None] = lambda done, of: None) -> list[Cell]:
    """Returns table 1 with each cell simulated, for as long and from the seed that ``fleet`` says."""
    fleets = [
        (row, replace(fleet, mode=Mode(row.mode), chips=chips, islands=row.islands), goodput)
        for row, published in TABLE_1.items()
        for chips, goodput in published.items()
    ]
    for _, one, _ in fleets:  # before the first of them has taken its time
        check_together(one, model)
    cells = []
    for i, (row, one, goodput) in enumerate(fleets):
        on_cell(i, len(fleets))
        cells.append(Cell(row=row, fleet=one, published=goodput, account=simulate(one, model).account))
    return cells


def table_text(cells: Sequence[Cell], model: FailureModel) -> str:
    """Returns the table as text: simulated and published goodput, their difference, and warnings."""
    width = max(len(cell.row.name) for cell in cells)
    header = "".join(f"{f'{chips:,}':>19}" for chips in CHIPS)
    lines = ["goodput in %: simulated / published, difference", "chips".ljust(width) + header]
    for row in TABLE_1:
        of_row = [cell for cell in cells if cell.row == row]
        shown = (f"{100 * c.account.goodput.value:.1f} / {c.published} {c.difference:+5.1f}" for c in of_row)
        lines.append(row.name.ljust(width) + "".join(f"{each:>19}" for each in shown))
    worst = max(cells, key=lambda cell: abs(cell.difference))
    mean = sum(abs(cell.difference) for cell in cells) / len(cells)
    lines.append(f"mean distance {mean:.1f} points, greatest {abs(worst.difference):.1f} ({worst.name})")
    return "\n".join([*lines, *_warnings(cells, model)])


def _warnings(cells: Sequence[Cell], model: FailureModel) -> list[str]:
    """Other settings than the published ones, and the first cell that has caveats, for all that do."""
    found = [changed(model)] if changed(model) else []
    told = {cell.name: each for cell in cells if (each := caveats(cell.fleet, model))}
    if told:
        name, sentences = next(iter(told.items()))
        others = f", and {len(told) - 1} more alike" if len(told) > 1 else ""
        found.append(f"{name}{others}: {'; '.join(sentences)}")
    return found


def table_json(cells: Sequence[Cell], model: FailureModel) -> dict[str, Any]:
    """Returns the table as one JSON object; shares are 0 to 1."""
    return {
        "cells": [
            {
                "mode": cell.row.mode,
                "islands": cell.row.islands,
                "chips": cell.fleet.chips,
                "goodput": cell.account.goodput.value,
                "goodput_ci": [cell.account.goodput.low, cell.account.goodput.high],
                "uptime": cell.account.uptime.value,
                "published": cell.published / 100,
            }
            for cell in cells
        ],
        "greatest_difference": max(abs(cell.difference) for cell in cells) / 100,
        "warning": "; ".join(_warnings(cells, model)) or None,
        "parameters": parameters_json(cells[0].fleet, model),
        "seed": cells[0].fleet.seed,
    }


# --- the plot -----------------------------------------------------------------------------------------------------

#: Fleets that curves are of, from the least chips to the most, and how many: those of table 1, and some beyond.
_CURVE_CHIPS, _CURVE_SIZES = (50_000, 10_000_000), 12

_COLOURS: Mapping[str, str] = {"decoupled": "#0b6e99", "diloco": "#8a5fbf", "elastic-dp": "#d9822b", "dp": "#a33b3b"}


def check_plot(path: Path) -> None:
    """Raises ConfigError for a file that cannot be written, before anything is simulated."""
    if path.suffix != ".svg":
        raise ConfigError("plot", str(path), "must end in .svg, which is what it is")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError("plot", str(path), "cannot be written; choose a folder that exists and that you may write to")


def curves(fleet: Fleet, model: FailureModel) -> Mapping[str, list[tuple[int, float]]]:
    """Returns goodput over fleet size for each mode, as (chips, goodput), by :func:`expected_goodput`.

    The fleet's own size is one of them; sizes that fail too often to be simulated are left out.
    """
    smallest, largest = min(_CURVE_CHIPS[0], fleet.chips), max(_CURVE_CHIPS[1], fleet.chips)
    sizes = {max(int(each), fleet.islands) for each in np.geomspace(smallest, largest, _CURVE_SIZES)}
    own = [fleet.mode] if fleet.mode is Mode.DILOCO else []  # has no closed form: drawn where it was asked for
    found: dict[str, list[tuple[int, float]]] = {}
    for mode in (Mode.DECOUPLED, *own, Mode.ELASTIC_DP, Mode.DP):
        for chips in sorted({*sizes, fleet.chips}):
            try:
                goodput = expected_goodput(mode=mode, chips=chips, islands=fleet.islands, model=model)
            except ConfigError:
                continue
            found.setdefault(mode.value, []).append((chips, goodput))
    return found


def plot(path: Path, result: Result, curves: Mapping[str, Iterable[tuple[int, float]]]) -> None:
    """Writes an SVG: goodput over fleet size, with the paper's figures and the simulated one.

    Raises:
        Unavailable: matplotlib is not installed, or the file cannot be written.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as err:
        raise Unavailable("--plot needs matplotlib; install it with: pip install matplotlib", definite=True) from err
    fleet, goodput = result.fleet, result.account.goodput
    # The salt makes element ids, and so the bytes, the same for the same result; text stays text.
    with matplotlib.rc_context({"svg.hashsalt": "atoll", "svg.fonttype": "none", "font.size": 9.0}):
        figure = figures.Figure(figsize=(5.2, 3.8), layout="constrained")
        axis = figure.subplots()
        for mode, points in curves.items():
            chips, shares = zip(*points, strict=True)
            axis.plot(chips, [100 * share for share in shares], color=_COLOURS[mode], label=mode)
        for row, published in TABLE_1.items() if result.model.mtbi_years == 1.0 else ():  # as the paper has it
            if row.mode != Mode.DECOUPLED.value or row.islands == fleet.islands:
                axis.plot(list(published), list(published.values()), "o", mfc="none", color=_COLOURS[row.mode])
        below, above = 100 * (goodput.value - goodput.low), 100 * (goodput.high - goodput.value)
        axis.errorbar([fleet.chips], [100 * goodput.value], yerr=[[below], [above]], fmt="k*", label="this simulation")
        axis.set(xscale="log", ylim=(0, 102), xlabel="chips", ylabel="goodput, % (lines: failures of chips alone)")
        axis.set_title(f"{fleet.islands} islands (circles: the paper's table 1)", fontsize=9)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
        try:
            figure.savefig(path, format="svg", metadata={"Date": None})
        except OSError as err:
            raise Unavailable(f"cannot write {path}: {err.strerror}; {cure_of(err)}", definite=True) from err
