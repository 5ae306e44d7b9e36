"""Closed forms of :mod:`ops.goodput.timeline`: fast enough for a planner, and oracles of its tests.

An elastic island is a renewal process: it trains until a failure takes effect or a returned slice has waited long
enough, whichever is first, and pauses. Failures come as a Poisson process; with constant repair times returns are the
same process, later, so both are independent of each other over any time shorter than a repair. Sums and integrals below
are exact then, for many slices per island; where an island has one or two, simulate. So do where an island pauses so
much that what it trains gets too stale to be merged.
"""

from __future__ import annotations

import math

import numpy as np

from ops.goodput.fleet import FailureModel, Fleet, Mode, all_slices

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


def expected_slowest(count: int) -> float:
    """Returns the mean of the greatest of ``count`` standard normal draws; 1.42 for eight."""
    x = np.linspace(-10.0, 10.0, 4001)
    below = np.array([0.5 * math.erfc(-each / math.sqrt(2.0)) for each in x])
    above_zero, below_zero = 1.0 - below[2000:] ** count, below[:2001] ** count
    return float(np.trapezoid(above_zero, x[2000:]) - np.trapezoid(below_zero, x[:2001]))


def in_step_share(fleet: Fleet, model: FailureModel) -> float:
    """Returns the share of a step that the mean group of a synchronous job computes before it waits."""
    spread = math.hypot(model.speed_spread, model.step_jitter)
    return 1.0 / (1.0 + expected_slowest(fleet.islands) * spread) if fleet.islands > 1 else 1.0


def has_closed_form(fleet: Fleet, model: FailureModel) -> bool:
    """Returns whether :func:`goodput` and :func:`uptime` are exact up to edge effects for this fleet."""
    independent = model.domain_mtbi_days is None and model.coordinator_mtbi_days is None
    group, slices = _group(fleet, model)
    many = slices >= 20 or fleet.mode is Mode.DP
    longest_s = max(model.scale_down_s, model.scale_up_s) + model.catch_up_s
    if not (independent and many) or fleet.mode is Mode.DILOCO:
        return False
    # What repaired slices miss while they wait to rejoin; they wait no longer than until the next failure.
    rate = group / model.chip_mtbi_s
    waits_s = -math.expm1(-rate * model.rejoin_wait_s) / rate
    if fleet.mode is not Mode.DP and away_share(group, slices, model) * waits_s > _NEGLIGIBLE * model.repair_s:
        return False
    # Returns have to be independent of the failures of the same cycle, so no slice may be back within one.
    if fleet.mode is not Mode.DP and model.repair_s < longest_s + model.rejoin_wait_s + model.check_s:
        return False
    return fleet.mode is not Mode.DECOUPLED or not _gets_stale(fleet, model, longest_s)


def _gets_stale(fleet: Fleet, model: FailureModel, longest_pause_s: float) -> bool:
    """Says whether more than a trace of training is refused, since islands that miss rounds get too stale."""
    misses_all = (1.0 - _island_share(fleet, model)) ** model.max_staleness
    return longest_pause_s >= model.max_staleness * model.interval_s or misses_all > _NEGLIGIBLE


def goodput(fleet: Fleet, model: FailureModel) -> float:
    """Returns the expected goodput of a fleet that :func:`has_closed_form`."""
    if fleet.mode is Mode.DP:
        return rigid_share(fleet.chips, model) * in_step_share(fleet, model)
    if fleet.mode is Mode.ELASTIC_DP:
        present = 1.0 - away_share(*_group(fleet, model), model)
        return training_share(*_group(fleet, model), model) * present * in_step_share(fleet, model)
    return _island_share(fleet, model) * (1.0 - away_share(*_group(fleet, model), model))


def uptime(fleet: Fleet, model: FailureModel) -> float:
    """Returns the expected share of time with any training, for a fleet that :func:`has_closed_form`."""
    if fleet.mode is Mode.DP:
        return rigid_share(fleet.chips, model)
    if fleet.mode is Mode.ELASTIC_DP:
        return training_share(*_group(fleet, model), model)
    return 1.0 - (1.0 - _island_share(fleet, model)) ** fleet.islands


def _island_share(fleet: Fleet, model: FailureModel) -> float:
    return training_share(*_group(fleet, model), model, catch_up_s(fleet, model))


def _group(fleet: Fleet, model: FailureModel) -> tuple[int, int]:
    """Returns chips and slices of what pauses as one: an island, or the job."""
    if fleet.mode is Mode.DECOUPLED:
        chips = fleet.chips_of(fleet.islands - 1)
        return chips, model.slices(chips)
    return fleet.chips, all_slices(fleet, model)


def catch_up_s(fleet: Fleet, model: FailureModel) -> float:
    """Returns what a pause costs an island beyond its own scaling; one that is alone has missed nothing."""
    return model.catch_up_s if fleet.mode is Mode.DECOUPLED and fleet.islands > 1 else 0.0
