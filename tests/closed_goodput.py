"""The expected goodput and uptime of a fleet under failures, in closed form: an oracle for what is simulated.

An elastic island is a renewal process: it trains until a failure takes effect or a returned slice has waited long
enough, whichever is first, and pauses. Failures come as a Poisson process; with constant repair times returns are the
same process, later, so both are independent of each other over any time shorter than a repair. The sums are exact then,
for many slices per island, unless islands pause so much that what they train gets too stale to be merged.
"""

import math

import numpy as np

from ops.forecast.failures import all_slices
from ops.forecast.fleet import Mode
from ops.forecast.goodput import catch_up_s


def away_share(chips, slices, model):
    """The share of slices in repair: mean down / (mean up + mean down)."""
    slice_mtbi_s = model.chip_mtbi_s * slices / chips
    return model.repair_s / (slice_mtbi_s + model.repair_s)


def training_share(chips, slices, model, catch_up_s=0.0):
    """The share of time that an elastic island or job trains."""
    rate = chips / model.chip_mtbi_s * (1.0 - away_share(chips, slices, model))  # of failures that hit, and of returns
    wait_s, check_s = model.rejoin_wait_s, model.check_s
    if check_s <= 0.0:
        up_s = -math.expm1(-rate * wait_s) / rate + math.exp(-rate * wait_s) / (2.0 * rate)
    else:
        # A failure takes effect at a check, so that survival up to x is exp(-rate * (last check up to x)). The wait for
        # a returned slice ends with survival exp(-rate * (x - wait)) beyond the wait. Their product is integrated from
        # check to check up to the wait; beyond it, the intervals are alike up to a factor.
        starts = np.arange(math.ceil(wait_s / check_s) + 1) * check_s
        edges = np.append(starts, starts[-1] + check_s)
        survived = np.minimum(edges, wait_s) - np.expm1(-rate * np.maximum(edges - wait_s, 0.0)) / rate
        pieces = np.exp(-rate * starts) * np.diff(survived)
        up_s = np.sum(pieces[:-1]) + pieces[-1] / -math.expm1(-2.0 * rate * check_s)
    scales_up = math.exp(-rate * wait_s) / 2.0
    return up_s / (up_s + model.scale_down_s + (model.scale_up_s - model.scale_down_s) * scales_up + catch_up_s)


def expected(fleet, model):
    """Goodput and uptime of a fleet whose islands have twenty slices or more."""
    if fleet.mode is Mode.DP:
        rate = fleet.chips / model.chip_mtbi_s
        up_s = model.check_s / -math.expm1(-rate * model.check_s) if model.check_s > 0.0 else 1.0 / rate
        return (up_s / (up_s + model.restart_s),) * 2
    decoupled = fleet.mode is Mode.DECOUPLED
    chips = fleet.chips_of(fleet.islands - 1) if decoupled else fleet.chips
    slices = model.slices(chips) if decoupled else all_slices(fleet, model)
    trains = training_share(chips, slices, model, catch_up_s(fleet, model))
    goodput = trains * (1.0 - away_share(chips, slices, model))
    return goodput, 1.0 - (1.0 - trains) ** (fleet.islands if decoupled else 1)
