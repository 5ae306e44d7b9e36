"""The goodput of a fleet of any size under failures: simulated from draws, and in closed form. Pure.

Chips fail (:mod:`ops.forecast.failures`), islands pause and go on (:mod:`ops.forecast.timeline`); what that leaves is
counted by :mod:`ops.forecast.accounts`. Where there is a closed form, it stands beside what was simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ops.forecast.accounts import Account, Dropped, account, contributions
from ops.forecast.failures import (
    DAY_S,
    FailureModel,
    SimulatedFleet,
    all_slices,
    check_together,
    interruptions,
)
from ops.forecast.fleet import Mode
from ops.forecast.timeline import Cause, Pause, TimeLine, elastic_line, rigid_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a simulation."""

    fleet: SimulatedFleet
    model: FailureModel
    account: Account
    staleness: (
        float | None
    )  # mean of merged contributions, in versions; None: nothing was merged, or nothing can be stale (synchronous jobs)
    closed_form: tuple[float, float] | None  # expected goodput and uptime, where there is a closed form


def simulate(fleet: SimulatedFleet, model: FailureModel) -> Result:
    """Simulates a fleet; the same arguments give the same result.

    Raises:
        ConfigError: It would take hours.
    """
    check_together(fleet, model)
    staleness, dropped = None, list[Dropped]()
    if fleet.mode is Mode.DECOUPLED:
        lines = island_lines(fleet, model)
        staleness, dropped = contributions(lines, model)
        dropped += [Dropped(cause=Cause.ISLAND_LOST, at_s=line.down_from_s, lost_s=line.lost_s) for line in lines]
    else:
        losses = interruptions(fleet.chips, model, fleet.seed)
        if fleet.mode is Mode.DP:
            lines = [rigid_line(losses, model, fleet.duration_s)]
        else:
            lines = [elastic_line(losses, all_slices(fleet, model), model, fleet.duration_s)]
    closed = (expected_goodput(fleet, model), uptime(fleet, model)) if has_closed_form(fleet, model) else None
    return Result(fleet=fleet, model=model, account=account(lines, dropped), staleness=staleness, closed_form=closed)


def island_lines(fleet: SimulatedFleet, model: FailureModel) -> list[TimeLine]:
    """Returns the lives of elastic islands that do not wait for each other."""
    lines = []
    for i in range(fleet.islands):
        chips = fleet.chips_of(i)
        losses, slices = interruptions(chips, model, fleet.seed, i), model.slices(chips)
        lines.append(elastic_line(losses, slices, model, fleet.duration_s, catch_up_s=catch_up_s(fleet, model)))
    return lines


def pauses(model: FailureModel, *, chips: int, islands: int, duration_s: float, seed: int) -> list[list[Pause]]:
    """Returns the pauses of each island of a large fleet, to be played to a small one that really trains.

    They are in order of time, without overlap, and end with the ``duration_s`` virtual seconds of the small one; the
    seed is that of :func:`simulate`.
    """
    fleet = SimulatedFleet(chips=chips, islands=islands, days=duration_s / DAY_S, seed=seed)
    check_together(fleet, model)
    return [line.gaps() for line in island_lines(fleet, model)]


# --- closed forms -------------------------------------------------------------------------------------------------
#
# An elastic island is a renewal process: it trains until a failure takes effect or a returned slice has waited long
# enough, whichever is first, and pauses. Failures come as a Poisson process; with constant repair times returns are the
# same process, later, so both are independent of each other over any time shorter than a repair. Sums and integrals
# below are exact then, for many slices per island; where an island has one or two, simulate. So do where an island
# pauses so much that what it trains gets too stale to be merged.

#: The share of all training that closed forms leave out.
_NEGLIGIBLE = 0.003


def away_share(chips: int, slices: int, model: FailureModel) -> float:
    """Returns the share of slices that are away, in repair: mean down / (mean up + mean down).

    The same follows from M/G/infinity: slices in repair are a Poisson number whose mean is rate times repair time. That
    a repaired slice waits for a pause to rejoin in is left out: see :func:`has_closed_form`.
    """
    slice_mtbi_s = model.chip_mtbi_s * slices / chips
    return model.repair_s / (slice_mtbi_s + model.repair_s)


def training_share(chips: int, slices: int, model: FailureModel, catch_up_s: float = 0.0) -> float:
    """Returns the share of time that an elastic island or job trains: mean up / (mean up + mean down)."""
    away = away_share(chips, slices, model)
    rate = chips / model.chip_mtbi_s * (1.0 - away)  # of failures that hit; of returns as well
    wait_s, check_s = model.rejoin_wait_s, model.check_s
    if check_s <= 0.0:
        up_s = -math.expm1(-rate * wait_s) / rate + math.exp(-rate * wait_s) / (2.0 * rate)
    else:
        # A failure takes effect at a check, so that survival up to x is exp(-rate * (last check up to x)). The wait for
        # a returned slice ends with survival exp(-rate * (x - wait)) beyond the wait. Their product is integrated from
        # check to check up to the wait; beyond it, the intervals are alike up to a factor.
        whole = math.ceil(wait_s / check_s)
        starts = np.arange(whole + 1) * check_s
        pieces = np.exp(-rate * starts) * np.diff(_survived_s(np.append(starts, starts[-1] + check_s), rate, wait_s))
        last = float(pieces[-1])  # the first interval wholly beyond the wait
        up_s = float(np.sum(pieces[:-1])) + last / -math.expm1(-2.0 * rate * check_s)
    scales_up = math.exp(-rate * wait_s) / 2.0
    down_s = model.scale_down_s + (model.scale_up_s - model.scale_down_s) * scales_up + catch_up_s
    return up_s / (up_s + down_s)


def _survived_s(x_s: np.ndarray, rate: float, wait_s: float) -> np.ndarray:
    """Integral from 0 to x of min(1, exp(-rate * (x - wait)))."""
    beyond_s = np.maximum(x_s - wait_s, 0.0)
    integral: np.ndarray = np.minimum(x_s, wait_s) - np.expm1(-rate * beyond_s) / rate
    return integral


def rigid_share(chips: int, model: FailureModel) -> float:
    """Returns the part of the time in which a job that stops as a whole trains."""
    rate, check_s = chips / model.chip_mtbi_s, model.check_s
    up_s = check_s / -math.expm1(-rate * check_s) if check_s > 0.0 else 1.0 / rate
    return up_s / (up_s + model.restart_s)


def has_closed_form(fleet: SimulatedFleet, model: FailureModel) -> bool:
    """Returns whether expected goodput and uptime are exact here, up to edge effects."""
    if fleet.mode is Mode.DP:
        return True
    group, slices = _group(fleet, model)
    if slices < 20:
        return False
    # What repaired slices miss while they wait to rejoin; they wait no longer than until the next failure.
    rate = group / model.chip_mtbi_s
    waits_s = -math.expm1(-rate * model.rejoin_wait_s) / rate
    if away_share(group, slices, model) * waits_s > _NEGLIGIBLE * model.repair_s:
        return False
    # Returns have to be independent of the failures of the same cycle, so no slice may be back within one.
    longest_s = max(model.scale_down_s, model.scale_up_s) + model.catch_up_s
    if model.repair_s < longest_s + model.rejoin_wait_s + model.check_s:
        return False
    return fleet.mode is not Mode.DECOUPLED or not _gets_stale(fleet, model, longest_s)


def _gets_stale(fleet: SimulatedFleet, model: FailureModel, longest_pause_s: float) -> bool:
    """Says whether more than a trace of training is refused, since islands that miss rounds get too stale."""
    misses_all = (1.0 - _pausing_share(fleet, model)) ** model.max_staleness
    return longest_pause_s >= model.max_staleness * model.interval_s or misses_all > _NEGLIGIBLE


def expected_goodput(fleet: SimulatedFleet, model: FailureModel) -> float:
    """Returns the expected goodput of a fleet that :func:`has_closed_form`."""
    if fleet.mode is Mode.DP:
        return rigid_share(fleet.chips, model)
    return _pausing_share(fleet, model) * (1.0 - away_share(*_group(fleet, model), model))


def uptime(fleet: SimulatedFleet, model: FailureModel) -> float:
    """Returns the expected share of time with any training, for a fleet that :func:`has_closed_form`."""
    if fleet.mode is Mode.DP:
        return rigid_share(fleet.chips, model)
    alike = fleet.islands if fleet.mode is Mode.DECOUPLED else 1
    return 1.0 - (1.0 - _pausing_share(fleet, model)) ** alike


def _pausing_share(fleet: SimulatedFleet, model: FailureModel) -> float:
    return training_share(*_group(fleet, model), model, catch_up_s(fleet, model))


def _group(fleet: SimulatedFleet, model: FailureModel) -> tuple[int, int]:
    """Returns chips and slices of what pauses as one: an island, or the job."""
    if fleet.mode is Mode.DECOUPLED:
        chips = fleet.chips_of(fleet.islands - 1)
        return chips, model.slices(chips)
    return fleet.chips, all_slices(fleet, model)


def catch_up_s(fleet: SimulatedFleet, model: FailureModel) -> float:
    """Returns what a pause costs an island beyond its own scaling; one that is alone has missed nothing."""
    return model.catch_up_s if fleet.mode is Mode.DECOUPLED and fleet.islands > 1 else 0.0
