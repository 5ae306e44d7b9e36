"""Simulates the goodput of a fleet of any size under random failures. Pure.

Chips fail (:mod:`ops.forecast.failures`), islands pause and continue (:mod:`ops.forecast.timeline`), and
:mod:`ops.forecast.accounts` counts the useful time.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    # Mean of merged contributions, in versions; None: nothing was merged, or nothing can be stale (synchronous jobs).
    staleness: float | None


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
    return Result(fleet=fleet, model=model, account=account(lines, dropped), staleness=staleness)


def island_lines(fleet: SimulatedFleet, model: FailureModel) -> list[TimeLine]:
    """Returns the lives of elastic islands that do not wait for each other."""
    lines = []
    for i in range(fleet.islands):
        chips = fleet.chips_of(i)
        losses, slices = interruptions(chips, model, fleet.seed, i), model.slices(chips)
        lines.append(elastic_line(losses, slices, model, fleet.duration_s, catch_up_s=catch_up_s(fleet, model)))
    return lines


def pauses(model: FailureModel, *, chips: int, islands: int, duration_s: float, seed: int) -> list[list[Pause]]:
    """Returns the pauses of each island of a large fleet, for replay in a small fleet that trains.

    They are in order of time, without overlap, and end with the ``duration_s`` virtual seconds of the small one; the
    seed is that of :func:`simulate`.
    """
    fleet = SimulatedFleet(chips=chips, islands=islands, days=duration_s / DAY_S, seed=seed)
    check_together(fleet, model)
    return [line.gaps() for line in island_lines(fleet, model)]


def catch_up_s(fleet: SimulatedFleet, model: FailureModel) -> float:
    """Returns the seconds to catch up after a pause; 0 for an island that is alone."""
    return model.catch_up_s if fleet.mode is Mode.DECOUPLED and fleet.islands > 1 else 0.0
