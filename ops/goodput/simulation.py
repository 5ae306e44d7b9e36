"""The goodput of a fleet of any size: simulated from drawn failures, or expected. Pure.

Chips fail (:mod:`ops.goodput.fleet`), islands pause, go on and wait for each other (:mod:`ops.goodput.timeline`); what
that leaves is counted by :mod:`ops.goodput.accounts`. Where there is a closed form (:mod:`ops.goodput.renewal`), it
stands beside what was simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from broker.wire.errors import ConfigError
from ops.goodput import renewal
from ops.goodput.accounts import Account, Dropped, Staleness, account, contributions, trained_by
from ops.goodput.fleet import (
    DAY_S,
    MOST,
    FailureModel,
    Fleet,
    Mode,
    Outage,
    Stream,
    all_slices,
    beyond_hold,
    check_together,
    coordinator_outages,
    domain_outages,
    generator,
    island_losses,
    job_losses,
    speeds,
)
from ops.goodput.timeline import Cause, TimeLine, coupled, elastic_line, rigid_line, without

#: Fleets that are drawn to see how much their lasting speeds matter.
_SPEED_DRAWS = 400

#: Steps that are drawn to see how long the slowest group takes, and step times at a time: 80 MB.
_STEP_DRAWS, _DRAWN_AT_ONCE = 10_000, 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a simulation."""

    fleet: Fleet
    model: FailureModel
    account: Account
    staleness: Staleness | None  # None: nothing was merged, or nothing can be stale (synchronous jobs)
    closed_form: tuple[float, float] | None  # expected goodput and uptime, where there is a closed form


def simulate(fleet: Fleet, model: FailureModel) -> Result:
    """Simulates a fleet; the same arguments give the same result.

    Raises:
        ConfigError: The two do not fit each other.
    """
    check_together(fleet, model)
    coordinator = coordinator_outages(fleet, model)
    dropped: list[Dropped] = []
    staleness, in_step = None, 1.0
    if fleet.mode is Mode.DECOUPLED:
        lines = island_lines(fleet, model)
        staleness, dropped = contributions(lines, model, coordinator)
        dropped += [_beyond_hold(line, coordinator, model) for line in lines]
        dropped += [_lost_with(line, coordinator, model) for line in lines]
    elif fleet.mode is Mode.DILOCO:
        rng = generator(fleet.seed, Stream.SPEEDS)
        lines = coupled(island_lines(fleet, model), speeds(fleet, model, rng), model, coordinator, rng)
        dropped = [_lost_with(line, [], model) for line in lines]  # without a coordinator they wait at the next barrier
    else:
        lines = [_job_line(fleet, model, coordinator)]
        in_step = _in_step_share(fleet, model)
    deviation = 0.0
    if fleet.mode is not Mode.DECOUPLED:
        rng = generator(fleet.seed, Stream.SPEEDS, 1)
        shares = np.array([share_of_slowest(fleet, model, rng) for _ in range(_SPEED_DRAWS)])
        deviation = float(np.std(shares, ddof=1) / np.mean(shares))
    closed = None
    if renewal.has_closed_form(fleet, model):
        closed = renewal.goodput(fleet, model), renewal.uptime(fleet, model)
    return Result(
        fleet=fleet,
        model=model,
        account=account(lines, dropped, in_step=in_step, deviation=deviation),
        staleness=staleness,
        closed_form=closed,
    )


def island_lines(fleet: Fleet, model: FailureModel) -> list[TimeLine]:
    """Returns the lives of elastic islands that do not wait for each other."""
    catch_up_s = renewal.catch_up_s(fleet, model)
    lines = []
    for i, domain in enumerate(domain_outages(fleet, model)):
        losses, slices = island_losses(i, fleet, model, domain), model.slices(fleet.chips_of(i))
        lines.append(elastic_line(losses, slices, model, fleet.duration_s, catch_up_s=catch_up_s))
    return lines


def _job_line(fleet: Fleet, model: FailureModel, coordinator: list[Outage]) -> TimeLine:
    """One synchronous job over all chips; without a coordinator it does not run."""
    losses = job_losses(fleet, model, domain_outages(fleet, model))
    if fleet.mode is Mode.DP:
        line = rigid_line(losses, model, fleet.duration_s)
    else:
        line = elastic_line(losses, all_slices(fleet, model), model, fleet.duration_s)
    return without(line, coordinator, Cause.COORDINATOR)


def share_of_slowest(fleet: Fleet, model: FailureModel, rng: np.random.Generator) -> float:
    """Returns the share of time that islands of fixed drawn speeds compute if all wait for the slowest."""
    paces = np.array(speeds(fleet, model, rng))
    return float(np.mean(paces) / np.max(paces))


def _in_step_share(fleet: Fleet, model: FailureModel) -> float:
    """Part of a step that the mean group computes if the slowest sets the pace, from drawn step times."""
    rng = generator(fleet.seed, Stream.SPEEDS)
    paces = np.array(speeds(fleet, model, rng))
    means, slowest = [], []
    rows = max(1, _DRAWN_AT_ONCE // fleet.islands)
    for first in range(0, _STEP_DRAWS, rows):
        shape = min(rows, _STEP_DRAWS - first), fleet.islands
        steps = paces * (1.0 + model.step_jitter * rng.standard_normal(shape))
        means.append(np.mean(steps, axis=1))
        slowest.append(np.max(steps, axis=1))
    return float(np.mean(np.concatenate(means)) / np.mean(np.concatenate(slowest)))


def _beyond_hold(line: TimeLine, coordinator: list[Outage], model: FailureModel) -> Dropped:
    """Returns a decoupled island's training in outages of the coordinator, after their first ``hold_s``."""
    begin_s, end_s = np.array(beyond_hold(coordinator, model), dtype=np.float64).reshape(-1, 2).T
    knots = trained_by(line)
    return Dropped(cause=Cause.COORDINATOR, at_s=end_s, lost_s=np.interp(end_s, *knots) - np.interp(begin_s, *knots))


def _lost_with(line: TimeLine, coordinator: list[Outage], model: FailureModel) -> Dropped:
    """Returns the training lost as an island went down, unless the coordinator's absence had wasted it.

    While the coordinator is away nothing is handed over: all that was trained since then goes as well.
    """
    at_s = line.down_from_s
    kept = trained_by(without(line, beyond_hold(coordinator, model), Cause.COORDINATOR))
    since_s = np.concatenate([[0.0], line.down_to_s])[: len(at_s)]
    from_s, to_s = np.array([(-math.inf, -math.inf), *coordinator], dtype=np.float64).T
    last = np.searchsorted(from_s, at_s, side="right") - 1
    unheard_s = np.where(at_s < to_s[last], np.maximum(from_s[last], since_s), at_s)
    most_s, more_s = (np.interp(at_s, *kept) - np.interp(begin_s, *kept) for begin_s in (since_s, unheard_s))
    return Dropped(cause=Cause.ISLAND_LOST, at_s=at_s, lost_s=np.minimum(line.lost_s + more_s, most_s))


class Pause(NamedTuple):
    """A time in which an island does not train, in virtual seconds from the start of the run."""

    at_s: float
    for_s: float


def pauses(
    model: FailureModel, *, chips: int, islands: int, duration_s: float, seed: int, time_scale: float = 1.0
) -> list[list[Pause]]:
    """Returns the pauses of each island of a large fleet, to be played to a small one that really trains.

    They are in order of time, without overlap, and end with the ``duration_s`` virtual seconds of the small one; the
    seed is that of :func:`simulate`. A ``time_scale`` of 0.01 turns a pause of 20 s into one of 0.2 s.
    """
    if not time_scale > 0.0:
        raise ConfigError("time_scale", time_scale, "must be above 0")
    fleet = Fleet(chips=chips, islands=islands, days=duration_s / time_scale / DAY_S, seed=seed)
    check_together(fleet, model)
    return [
        [Pause(at_s * time_scale, for_s * time_scale) for at_s, for_s in line.gaps()]
        for line in island_lines(fleet, model)
    ]


# --- the expected goodput -----------------------------------------------------------------------------------------

#: Length of a simulation where :func:`expected_goodput` has no closed form: about a second of computing.
ESTIMATE_EVENTS = 100_000
_ESTIMATE_ISLANDS = 64
_ESTIMATE_RARE = 300  # failures of chips that hardly fail

#: Computing that a round of one island takes, in pauses: it is cheap where nobody pauses.
_ROUND = 0.05

#: Rounds of all islands, and interruptions: about two seconds of computing each.
_MOST_ROUNDS, _MOST_INTERRUPTIONS = 5_000_000, 500_000

#: A fleet begins whole. After so many repair times a tenth of the slices that are away is not noticed.
_LEAST_REPAIRS = 5

#: Failures of the whole fleet in an interval, up to which its length hardly matters: 0.0007 of DiLoCo's goodput.
_FEW_IN_A_ROUND = 0.03


def expected_goodput(
    *,
    mode: Mode | str = Mode.DECOUPLED,
    chips: int,
    islands: int,
    model: FailureModel | None = None,
    events: int | None = None,
    **failures: Any,
) -> float:
    """Returns the goodput that failures of chips leave, 0 to 1; domains and the coordinator never fail.

    By closed form where there is one, else from a simulation of about so many pauses (``events``, or
    :data:`ESTIMATE_EVENTS`). ``failures`` are fields of the model that differ, such as ``mtbi_years=0.5``.

    Raises:
        ConfigError: Something of it cannot be, or chips fail too often to be simulated (``mtbi_years``).
    """
    events = events or ESTIMATE_EVENTS
    settled = replace(model or FailureModel(), **failures)
    settled = replace(settled, domain_mtbi_days=None, coordinator_mtbi_days=None)
    fleet = Fleet(mode=Mode(mode), chips=chips, islands=islands)
    if renewal.has_closed_form(fleet, settled):
        return renewal.goodput(fleet, settled)
    if fleet.mode is Mode.DECOUPLED and islands > _ESTIMATE_ISLANDS:
        # Islands that wait for nobody and fail by themselves: some of them stand for all.
        fleet = replace(fleet, chips=fleet.chips_of(islands - 1) * _ESTIMATE_ISLANDS, islands=_ESTIMATE_ISLANDS)
    rate = fleet.chips / settled.chip_mtbi_s
    if rate * _LEAST_REPAIRS * settled.repair_s > _MOST_INTERRUPTIONS:
        often = f"has one of {chips:,} chips fail every {1.0 / rate:.2g} s, too often to be simulated"
        raise ConfigError("mtbi_years", settled.mtbi_years, f"{often}: give a longer time")
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
    shares = np.array([share_of_slowest(fleet, model, generator(seed, Stream.SPEEDS)) for seed in range(_SPEED_DRAWS)])
    return int(np.argmin(np.abs(shares - np.mean(shares))))
