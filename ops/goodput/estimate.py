"""The goodput to be expected of a fleet, in a second or two: for planners, and for curves over many sizes. Pure.

By closed form where there is one, else from a simulation that is just long enough; what fails rarely is found apart.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from broker.wire.errors import ConfigError
from ops.goodput import renewal
from ops.goodput.fleet import (
    DAY_S,
    MAX_OUTAGES,
    MOST,
    FailureModel,
    Fleet,
    Mode,
    Stream,
    check_domains,
    generator,
    speeds,
)
from ops.goodput.simulation import simulate

#: Length of a simulation where :func:`expected_goodput` has no closed form: about a second of computing.
ESTIMATE_EVENTS = 100_000
_ESTIMATE_ISLANDS = 64
_ESTIMATE_RARE = 300  # failures of one coordinator, of one domain, or of chips that hardly fail
_ESTIMATE_ROUNDS = 10_000_000  # where chips never fail
_NEVER_YEARS = 1e9

#: What a round of one island takes to compute, in pauses: it is cheap where nobody pauses.
_ROUND = 0.05

#: Rounds of all islands, and interruptions: about two seconds of computing each.
_MOST_ROUNDS, _MOST_INTERRUPTIONS = 5_000_000, 500_000

#: A fleet begins whole. After so many repair times a tenth of the slices that are away is not noticed.
_LEAST_REPAIRS = 5

#: Failures of the whole fleet in an interval, up to which its length hardly matters: 0.0007 of DiLoCo's goodput.
_FEW_IN_A_ROUND = 0.03

#: Draws of lasting speeds of which the most usual is simulated.
_SPEED_DRAWS = 400


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
        ConfigError: Something of it cannot be, or chips fail too often to be simulated (``mtbi_years``).
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
    rate = fleet.chips / settled.chip_mtbi_s
    if rate * _LEAST_REPAIRS * settled.repair_s > _MOST_INTERRUPTIONS:
        cure = (
            f"has one of {chips:,} chips fail every {1.0 / rate:.2g} s, too often to be simulated: give a longer time"
        )
        raise ConfigError("mtbi_years", settled.mtbi_years, cure)
    in_rounds = fleet.mode in (Mode.DILOCO, Mode.DECOUPLED)
    if fleet.mode is not Mode.DECOUPLED:
        fleet = replace(fleet, seed=_usual_seed(fleet, settled))
    if in_rounds:
        settled = _with_long_rounds(fleet, settled, events)
    rounds = fleet.islands / settled.interval_s if in_rounds else 0.0
    per_s = rate + _ROUND * rounds
    # A day is long beside repairs, where what fails in it is not too much.
    least_s = max(_LEAST_REPAIRS * settled.repair_s, min(DAY_S, 5.0 * events / per_s))
    duration_s = max(least_s, events / per_s)
    if in_rounds:
        duration_s = min(duration_s, _MOST_ROUNDS / rounds)
    days = min(duration_s / DAY_S, MOST)  # where nothing ever fails it would be longer
    return simulate(replace(fleet, days=days), settled).account.goodput.value


def _with_long_rounds(fleet: Fleet, model: FailureModel, events: int) -> FailureModel:
    """Returns the model with rounds so far apart that enough failures are seen between them.

    Small fleets with short steps have millions of rounds for a failure. What an island loses with it of a longer
    interval is below 2e-4 of all training, and that failures share an interval stays rare.
    """
    rate = fleet.chips / model.chip_mtbi_s
    enough_s = _ESTIMATE_RARE * fleet.islands * _ROUND / (events * rate)
    interval_s = min(enough_s, _FEW_IN_A_ROUND / rate, DAY_S)
    return replace(model, step_s=max(model.step_s, interval_s / model.sync_interval))


def _usual_seed(fleet: Fleet, model: FailureModel) -> int:
    """Returns a seed whose lasting speeds cost about what such draws cost in the mean.

    One draw of them lasts for a whole simulation, however long. To take them out and put their mean loss back in would
    count twice what waiting for the slowest hides of pauses.
    """
    draws = (np.array(speeds(fleet, model, generator(seed, Stream.SPEEDS))) for seed in range(_SPEED_DRAWS))
    shares = np.array([np.mean(paces) / np.max(paces) for paces in draws])
    return int(np.argmin(np.abs(shares - np.mean(shares))))


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
