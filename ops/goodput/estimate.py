"""The goodput to be expected of a fleet, in about a second at most: for planners, and for curves over many sizes. Pure.

By closed form where there is one, else from a simulation that is just long enough; what fails rarely is found apart.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

from ops.goodput import renewal
from ops.goodput.fleet import DAY_S, MAX_OUTAGES, FailureModel, Fleet, Mode, check_domains
from ops.goodput.simulation import simulate

#: Length of a simulation where :func:`expected_goodput` has no closed form: about a second of computing.
ESTIMATE_EVENTS = 100_000
_ESTIMATE_ISLANDS = 64
_ESTIMATE_RARE = 300  # failures of one coordinator, or of one domain
_ESTIMATE_ROUNDS = 10_000_000
_NEVER_YEARS = 1e9


def expected_goodput(
    *,
    mode: Mode | str = Mode.DECOUPLED,
    chips: int,
    islands: int,
    model: FailureModel | None = None,
    events: int = ESTIMATE_EVENTS,
    **failures: Any,
) -> float:
    """Returns the goodput to be expected, 0 to 1: by closed form where there is one, else from a short simulation.

    Args:
        mode: How the fleet trains.
        chips: Of the whole fleet.
        islands: How many share them.
        model: How it fails.
        events: Length of that simulation, in pauses.
        failures: Fields of :class:`ops.goodput.fleet.FailureModel` that differ, such as ``mtbi_years=0.5``.

    Raises:
        ConfigError: Something of it cannot be.
    """
    settled = replace(model or FailureModel(), **failures)
    fleet = Fleet(mode=Mode(mode), chips=chips, islands=islands)
    check_domains(fleet, settled)
    if renewal.has_closed_form(fleet, settled):
        return renewal.goodput(fleet, settled)
    calm = replace(settled, coordinator_mtbi_days=None, domain_mtbi_days=None)
    if settled != calm:
        # What fails once in weeks takes years to be seen often enough, and takes about the same part of any fleet: that
        # part is found by itself, and for domains where chips do not fail.
        goodput = expected_goodput(mode=mode, chips=chips, islands=islands, model=calm, events=events)
        only_domains = replace(settled, mtbi_years=_NEVER_YEARS, coordinator_mtbi_days=None)
        return goodput * _left_by_coordinator(fleet, settled) * _left_by_domains(fleet.mode, islands, only_domains)
    if fleet.mode is Mode.DECOUPLED and islands > _ESTIMATE_ISLANDS and settled.domain_mtbi_days is None:
        # Islands that wait for nobody and fail by themselves: some of them stand for all.
        fleet = replace(fleet, chips=fleet.chips_of(islands - 1) * _ESTIMATE_ISLANDS, islands=_ESTIMATE_ISLANDS)
    # What a simulation computes per simulated second: pauses, and rounds, which are cheap where nobody pauses.
    rounds = 0.02 if fleet.mode in (Mode.DILOCO, Mode.DECOUPLED) else 0.0
    per_s = fleet.chips / settled.chip_mtbi_s + rounds * fleet.islands / settled.interval_s
    # A day is long beside repairs, and some of them are enough where thousands of islands fail in it.
    least_days = min(1.0, max(10.0 * settled.repair_s / DAY_S, 20.0 * events / per_s / DAY_S))
    days = max(least_days, events / per_s / DAY_S)
    return simulate(replace(fleet, days=days), settled).account.goodput.value


def _left_by_coordinator(fleet: Fleet, model: FailureModel) -> float:
    """Part of the goodput that coordinator failures leave: each takes the same of all islands, after a mean wait."""
    if model.coordinator_mtbi_days is None:
        return 1.0
    away_s, interval_s = model.coordinator_repair_s, model.interval_s
    lost_s = away_s
    if fleet.mode is Mode.DECOUPLED:
        held_s = min(away_s, model.hold_s)
        lost_s = away_s - held_s + _lost_unheard_s(_goes_down(fleet, model), away_s, held_s)
    elif fleet.mode is Mode.DILOCO:  # islands train on to their barrier, which is as far away as chance has it
        lost_s = away_s - interval_s / 2 if away_s > interval_s else away_s**2 / (2 * interval_s)
    return 1.0 - lost_s / (model.coordinator_mtbi_days * DAY_S + away_s)


def _goes_down(fleet: Fleet, model: FailureModel) -> float:
    """How often an island that trains goes down whole, per second: its last slice, or the domain it stands in.

    Slices fail and are repaired by themselves, so that n of them have gone as often as the last one goes while n - 1
    are away.
    """
    chips = fleet.chips_of(fleet.islands - 1)
    slices = model.slices(chips)
    rate, away = chips / slices / model.chip_mtbi_s, renewal.away_share(chips, slices, model)
    whole = model.domain_mtbi_days is not None and model.domains_of_island == 1
    by_domain = 1.0 / (model.domain_mtbi_days * DAY_S) if whole and model.domain_mtbi_days else 0.0
    return slices * rate * (1.0 - away) * away ** (slices - 1) / (1.0 - away**slices) + by_domain


def _lost_unheard_s(rate: float, away_s: float, held_s: float) -> float:
    """Mean training that an island loses in an outage of the coordinator, of the ``held_s`` that would have counted.

    What is trained x after its beginning is lost if the island goes down before its end, at ``rate``: with probability
    1 - exp(-rate * (away - x)), integrated over x from 0 to ``held_s``.
    """
    if rate * away_s < 1e-9:
        return 0.0
    return held_s - (math.exp(-rate * (away_s - held_s)) - math.exp(-rate * away_s)) / rate


@cache
def _left_by_domains(mode: Mode, islands: int, model: FailureModel) -> float:
    """Part of the goodput that failures of domains leave, simulated for long enough, where chips never fail."""
    if model.domain_mtbi_days is None:
        return 1.0
    days = _ESTIMATE_RARE * model.domain_mtbi_days
    if mode in (Mode.DECOUPLED, Mode.DILOCO):
        days = min(days, _ESTIMATE_ROUNDS * model.interval_s / islands / DAY_S)
    cycle_days = model.domain_mtbi_days + model.domain_repair_min / (24 * 60)
    days = min(days, MAX_OUTAGES * cycle_days / (2 * islands * model.domains_of_island))
    fleet = Fleet(mode=mode, chips=islands * model.slice_chips * model.domains_of_island, islands=islands, days=days)
    calm = simulate(replace(fleet, days=min(1.0, days)), replace(model, domain_mtbi_days=None))
    return simulate(fleet, model).account.goodput.value / calm.account.goodput.value
