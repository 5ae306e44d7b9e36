"""Warnings beside a simulated goodput that rests on too little, or exceeds a real fleet's. Pure."""

from __future__ import annotations

from dataclasses import fields

from ops.goodput.accounts import BATCHES
from ops.goodput.fleet import FailureModel, Fleet, Mode, all_slices, expected_failures

#: A run may well see none of fewer failures than these, and take that for certain.
_FEW = 10.0

#: A mean time between interruptions that stands for never.
_NEVER_YEARS = 1e6

#: A share of the goodput; less is not worth a sentence.
_NOTEWORTHY = 0.005


def caveats(fleet: Fleet, model: FailureModel) -> list[str]:
    """Returns what to know before the goodput is believed; usually nothing."""
    found = []
    expected = expected_failures(fleet, model)
    if model.mtbi_years >= _NEVER_YEARS:
        del expected["interruptions"]
    few = [f"{count:.2g} {what}" for what, count in expected.items() if count < _FEW]
    if few:
        said = f"with {' and '.join(few)} to be expected the intervals are too narrow"
        found.append(f"{said}; simulate more --days")
    repairs_s = {} if fleet.mode is Mode.DP else {"interruptions": model.repair_s}  # dp has spare slices
    repairs_s |= {"domain failures": model.domain_repair_min * 60.0, "coordinator failures": model.coordinator_repair_s}
    long = [what for what in expected if repairs_s.get(what, 0.0) > fleet.duration_s / BATCHES]
    if long:  # batches in which the same slices are away are not independent, and nothing is away at first
        said = f"repairs after {' and '.join(long)} last longer than a {BATCHES}th of the simulated time"
        found.append(f"{said}: the goodput is too high and its interval too narrow; simulate more --days")
    return [*found, *bounds(fleet, model)]


def bounds(fleet: Fleet, model: FailureModel) -> list[str]:
    """Returns the warnings that hold however long the fleet is simulated."""
    found = []
    alone = fleet.mode in (Mode.DECOUPLED, Mode.DILOCO)
    who, chips = ("an island", fleet.chips_of(0)) if alone else ("the job", fleet.chips)
    every_s = model.chip_mtbi_s / chips
    lost = min(1.0, (model.step_s - model.check_s) / 2 / every_s)
    if every_s < model.check_s or lost >= _NOTEWORTHY:
        found.append(
            f"training up to the next check counts, whatever part of a step that is: with an interruption of {who} "
            f"every {every_s:.3g} s the goodput is an upper bound"
        )
    slices = all_slices(fleet, model)
    without_s = model.scale_down_s + model.scale_up_s + model.repair_s / slices
    if fleet.mode is Mode.DP and model.restart_s < without_s:
        found.append(
            f"dp restarts on spare slices that cost nothing here; elastic modes go without one of {slices} slices for "
            f"{model.repair_s:g} s instead: compare with --repair-s 0"
        )
    return found


def changed(model: FailureModel) -> str:
    """Returns which settings are others than those of table 1 of the paper, or empty."""
    pairs = [(each.name, getattr(model, each.name), getattr(FailureModel(), each.name)) for each in fields(model)]
    told = [
        f"{name} = {value:g} ({'none' if usual is None else f'{usual:g}'})"
        for name, value, usual in pairs
        if value != usual
    ]
    return f"other settings than the published table has or is fitted with: {', '.join(told)}" if told else ""
