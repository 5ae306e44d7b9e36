"""A simulated result as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from itertools import pairwise
from typing import Any

from broker.process.settings import to_table
from ops.goodput.accounts import BATCHES, CONFIDENCE, Estimate, Staleness
from ops.goodput.caveats import caveats
from ops.goodput.fleet import FailureModel, Fleet, all_slices
from ops.goodput.simulation import Result
from ops.goodput.timeline import Cause

MEANING: Mapping[Cause, str] = {
    Cause.PAUSED: "paused: scaling down or up, restarting",
    Cause.CAPACITY_AWAY: "slices under repair",
    Cause.ISLAND_DOWN: "islands down as a whole",
    Cause.WAITING: "waiting for slower or paused islands",
    Cause.COORDINATOR: "coordinator away",
    Cause.ISLAND_LOST: "trained, lost with its island",
    Cause.STALE: "trained, refused as too stale",
}


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
    lines += [f"          {each}" for each in caveats(fleet, model)]
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
        "warning": "; ".join(caveats(fleet, result.model)) or None,
        "slices": {"all": all_slices(fleet, result.model), "chips_each": _slice_chips(result)},
        "parameters": parameters_json(fleet, result.model),
        "seed": fleet.seed,
    }


def parameters_json(fleet: Fleet, model: FailureModel) -> dict[str, Any]:
    """Returns the settings for JSON: null for those not asked for, which a TOML table would leave out."""
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
