"""How results of ``atoll simulate`` look: text, JSON, a plot. Decides nothing."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker.process.settings import to_table
from broker.wire.errors import Unavailable
from ops.goodput.availability import BATCHES, CONFIDENCE, Account, Estimate
from ops.goodput.caveats import caveats, caveats_of_all, changed
from ops.goodput.fleet import FailureModel, Fleet, Mode, all_slices
from ops.goodput.published import CHIPS, TABLE_1, Row
from ops.goodput.staleness import Staleness
from ops.goodput.timeline import Cause

if TYPE_CHECKING:
    from ops.goodput.simulation import Result

MEANING: Mapping[Cause, str] = {
    Cause.PAUSED: "paused: scaling down or up, restarting",
    Cause.CAPACITY_AWAY: "slices under repair",
    Cause.ISLAND_DOWN: "islands down as a whole",
    Cause.WAITING: "waiting for slower or paused islands",
    Cause.COORDINATOR: "coordinator away",
    Cause.ISLAND_LOST: "trained, lost with its island",
    Cause.STALE: "trained, refused as too stale",
}


# --- text -----------------------------------------------------------------------------------------------------------


def text(result: Result) -> str:
    """Returns a result for people."""
    fleet, model, account = result.fleet, result.model, result.account
    fleet_s = model.chip_mtbi_s / fleet.chips
    what = f"{_counted(fleet.chips, 'chip')} in {_counted(fleet.islands, 'island')}, {fleet.mode.value}"
    group = f", an island every {duration(fleet_s * fleet.islands)}" if fleet.islands > 1 else ""
    lines = [
        f"{what}: {_counted(fleet.days, 'day')}, seed {fleet.seed}",
        f"interruptions: a chip every {duration(model.chip_mtbi_s)}, the fleet every {duration(fleet_s)}{group}",
        f"slices: {all_slices(fleet, model):,} of {_slice_chips(result):,.0f} chips, which leave and return together",
        "",
        f"goodput   {_estimate(account.goodput)}",
        f"uptime    {_estimate(account.uptime)}",
    ]
    if result.closed_form is not None:
        goodput, uptime = result.closed_form
        lines.append(f"          by closed form {goodput:.1%} and {uptime:.1%}")
    lines += [f"          {each}" for each in caveats(fleet, model, account.goodput.value)]
    lines += ["", f"wasted tokens, as a share of what the fleet could train ({CONFIDENCE:.0%} confidence):"]
    named = sorted((each for each in account.wasted.items() if each[1].value > 0.0), key=lambda each: -each[1].value)
    lines += [
        f"{share.value:8.2%}  {share.low:6.2%} to {share.high:6.2%}   {MEANING[cause]}" for cause, share in named
    ] or ["  none"]
    if result.staleness is not None:
        lines += ["", *_staleness(result.staleness)]
    return "\n".join(lines)


def _estimate(each: Estimate) -> str:
    return f"{each.value:7.2%}   ({CONFIDENCE:.0%} confidence: {each.low:.2%} to {each.high:.2%})"


def _staleness(each: Staleness) -> list[str]:
    quantiles = f"median {each.p50:.2f}, 90 % {each.p90:.2f}, 99 % {each.p99:.2f}"
    interval = f" ({each.mean_ci[0]:.3f} to {each.mean_ci[1]:.3f})" if each.mean_ci is not None else ""
    lines = [f"staleness of contributions when merged, in versions: mean {each.mean:.3f}{interval}, {quantiles}"]
    edges = [*each.histogram, float("inf")]
    for (low, high), share in zip(pairwise(edges), each.histogram.values(), strict=True):
        if share > 0.0:
            bounds = f"{low:g} to {high:g}" if high < float("inf") else f"{low:g} and more"
            lines.append(f"{share:8.2%}  {bounds}".ljust(26) + "#" * round(40 * share))
    return [line.rstrip() for line in lines]


def _counted(number: float, noun: str) -> str:
    shown = f"{number:,}" if isinstance(number, int) else f"{number:,g}"
    return f"{shown} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Returns a duration in the unit that suits it."""
    for unit, length_s in (("years", 365.25 * 86_400), ("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= length_s:
            number = f"{seconds / length_s:,.3g}"
            return f"{number} {unit.removesuffix('s') if number == '1' else unit}"
    return f"{seconds:,.1f} s"


# --- JSON -----------------------------------------------------------------------------------------------------------


def to_json(result: Result) -> dict[str, Any]:
    """Returns a result as one JSON object; shares are 0 to 1."""
    fleet, account, closed = result.fleet, result.account, result.closed_form
    return {
        "mode": fleet.mode.value,
        "chips": fleet.chips,
        "islands": fleet.islands,
        "goodput": account.goodput.value,
        "goodput_ci": [account.goodput.low, account.goodput.high],
        "uptime": account.uptime.value,
        "uptime_ci": [account.uptime.low, account.uptime.high],
        "confidence": {"level": CONFIDENCE, "method": f"{BATCHES} batch means"},
        "waste": {cause.value: each.value for cause, each in account.wasted.items()},
        "waste_ci": {cause.value: [each.low, each.high] for cause, each in account.wasted.items()},
        "staleness": _staleness_json(result.staleness),
        "closed_form": None if closed is None else {"goodput": closed[0], "uptime": closed[1]},
        "warning": "; ".join(caveats(fleet, result.model, account.goodput.value)) or None,
        "slices": {"all": all_slices(fleet, result.model), "chips_each": _slice_chips(result)},
        "parameters": _parameters(fleet, result.model),
        "seed": fleet.seed,
    }


def _parameters(fleet: Fleet, model: FailureModel) -> dict[str, Any]:
    """What was not asked for is null: a table has no such thing, and would leave it out."""
    never = {each.name: None for each in fields(model) if getattr(model, each.name) is None}
    return {"days": fleet.days, **never, **to_table(model)}


def _slice_chips(result: Result) -> float:
    chips = result.fleet.chips_of(0)
    return chips / result.model.slices(chips)


def _staleness_json(each: Staleness | None) -> dict[str, Any] | None:
    if each is None:
        return None
    edges = [*each.histogram, None]
    classes = zip(pairwise(edges), each.histogram.values(), strict=True)
    histogram = [{"from": low, "to": high, "share": share} for (low, high), share in classes]
    return {"unit": "versions", **asdict(each), "histogram": histogram}


# --- the paper's table ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of table 1.

    Attributes:
        fleet: What was simulated.
        published: Goodput in percent.
        account: What became of the fleet.
    """

    row: Row
    fleet: Fleet
    published: int
    account: Account

    @property
    def chips(self) -> int:
        """Chips of the whole fleet."""
        return self.fleet.chips

    @property
    def name(self) -> str:
        """How text names it."""
        return f"{self.row.name} with {self.chips:,} chips"

    @property
    def difference(self) -> float:
        """Simulated less published goodput, in percentage points."""
        return 100.0 * self.account.goodput.value - self.published


def table_text(cells: Sequence[Cell], model: FailureModel) -> str:
    """Returns the table for people: simulated goodput, published goodput, difference in points; and what to know."""
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
    return "\n".join([*lines, *_table_caveats(cells, model)])


def _table_caveats(cells: Sequence[Cell], model: FailureModel) -> list[str]:
    other = changed(model)
    runs = [(cell.name, cell.fleet, cell.account.goodput.value) for cell in cells]
    return [*([other] if other else []), *caveats_of_all(runs, model)]


def table_json(cells: Sequence[Cell], model: FailureModel) -> dict[str, Any]:
    """Returns the table as one JSON object; shares are 0 to 1."""
    return {
        "cells": [
            {
                "mode": cell.row.mode,
                "islands": cell.row.islands,
                "chips": cell.chips,
                "goodput": cell.account.goodput.value,
                "goodput_ci": [cell.account.goodput.low, cell.account.goodput.high],
                "uptime": cell.account.uptime.value,
                "published": cell.published / 100,
            }
            for cell in cells
        ],
        "greatest_difference": max(abs(cell.difference) for cell in cells) / 100,
        "warning": "; ".join(_table_caveats(cells, model)) or None,
        "parameters": _parameters(cells[0].fleet, model),
        "seed": cells[0].fleet.seed,
    }


# --- the plot ---------------------------------------------------------------------------------------------------------

_COLOURS: Mapping[str, str] = {"decoupled": "#0b6e99", "diloco": "#8a5fbf", "elastic-dp": "#d9822b", "dp": "#a33b3b"}


def plot(path: Path, result: Result, curves: Mapping[str, Iterable[tuple[int, float]]]) -> None:
    """Writes an SVG: goodput over fleet size, where the tokens of this fleet went, and staleness.

    Raises:
        Unavailable: matplotlib is not installed, or the file cannot be written.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as err:
        raise Unavailable("--plot needs matplotlib; install it with: pip install matplotlib", definite=True) from err
    panels = 3 if result.staleness is not None else 2
    # The salt makes element ids, and so the bytes, the same for the same result; text stays text.
    with matplotlib.rc_context({"svg.hashsalt": "atoll", "svg.fonttype": "none", "font.size": 9.0}):
        figure = figures.Figure(figsize=(4.6 * panels, 3.8), layout="constrained")
        axes = figure.subplots(1, panels)
        _plot_curves(axes[0], result, curves)
        _plot_waste(axes[1], result)
        if result.staleness is not None:
            _plot_staleness(axes[2], result.staleness)
        try:
            figure.savefig(path, format="svg", metadata={"Date": None})
        except OSError as err:
            raise Unavailable(f"cannot write {path}: {err.strerror}; choose another --plot", definite=True) from err


def _plot_curves(axis: Any, result: Result, curves: Mapping[str, Iterable[tuple[int, float]]]) -> None:
    fleet, goodput = result.fleet, result.account.goodput
    for mode, points in curves.items():
        chips, shares = zip(*points, strict=True)
        axis.plot(chips, [100 * share for share in shares], color=_COLOURS[mode], label=mode)
    for row, published in TABLE_1.items() if result.model.mtbi_years == 1.0 else ():  # as the paper has it
        if row.mode != Mode.DECOUPLED.value or row.islands == fleet.islands:
            axis.plot(list(published), list(published.values()), "o", mfc="none", color=_COLOURS[row.mode])
    below, above = 100 * (goodput.value - goodput.low), 100 * (goodput.high - goodput.value)
    axis.errorbar([fleet.chips], [100 * goodput.value], yerr=[[below], [above]], fmt="k*", label="this simulation")
    axis.set(xscale="log", ylim=(0, 102), xlabel="chips", ylabel="goodput, %")
    axis.set_title(f"{_counted(fleet.islands, 'island')} (circles: the paper's table 1)", fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)


def _plot_waste(axis: Any, result: Result) -> None:
    found = {MEANING[cause]: each for cause, each in result.account.wasted.items() if each.value > 0.0}
    shares = [100 * each.value for each in found.values()]
    below = [100 * (each.value - each.low) for each in found.values()]
    above = [100 * (each.high - each.value) for each in found.values()]
    axis.barh(list(found), shares, xerr=[below, above], color=_COLOURS[result.fleet.mode.value])
    axis.set(xlabel="% of the tokens that the fleet could train")
    axis.set_title("wasted, by cause", fontsize=9)


def _plot_staleness(axis: Any, staleness: Staleness) -> None:
    edges = list(staleness.histogram)
    names = [f"{low:g}-{high:g}" for low, high in pairwise(edges)] + [f"{edges[-1]:g}+"]
    axis.bar(names, [100 * share for share in staleness.histogram.values()], color=_COLOURS["decoupled"])
    axis.tick_params(axis="x", rotation=60)
    axis.set(xlabel="versions", ylabel="% of merged contributions")
    axis.set_title(f"staleness (mean {staleness.mean:.2f})", fontsize=9)
