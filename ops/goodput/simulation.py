"""Goodput and uptime of a fleet of any size, from drawn failures. Pure.

Chips fail, islands pause and go on (:mod:`ops.goodput.fleet`, :mod:`ops.goodput.timeline`), synchronous ones wait for
each other (:mod:`ops.goodput.barrier`); what that leaves is counted by :mod:`ops.goodput.availability`. Where there is
a closed form (:mod:`ops.goodput.renewal`), it stands beside what was simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from broker.wire.errors import ConfigError
from ops.goodput import renewal
from ops.goodput.availability import Account, Dropped, account, trained_by
from ops.goodput.barrier import coupled
from ops.goodput.fleet import (
    DAY_S,
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
from ops.goodput.staleness import Staleness, contributions
from ops.goodput.timeline import Cause, TimeLine, elastic_line, rigid_line, without

#: Called with the part of the work that is done, 0 to 1.
Progress = Callable[[float], None]

#: Fleets that are drawn to see how much their lasting speeds matter.
_SPEED_DRAWS = 400

#: Steps that are drawn to see how long the slowest group takes, and step times at a time: 80 MB.
_STEP_DRAWS, _DRAWN_AT_ONCE = 10_000, 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a fleet.

    Attributes:
        staleness: Of merged contributions; None where nothing was merged, or nothing can be stale (synchronous jobs).
        closed_form: Expected goodput and uptime, where there is a closed form.
    """

    fleet: Fleet
    model: FailureModel
    account: Account
    staleness: Staleness | None
    closed_form: tuple[float, float] | None


def simulate(fleet: Fleet, model: FailureModel, on_progress: Progress = lambda done: None) -> Result:
    """Simulates a fleet; the same arguments give the same result.

    Raises:
        ConfigError: The two do not fit each other.
    """
    check_together(fleet, model)
    coordinator = coordinator_outages(fleet, model)
    dropped: list[Dropped] = []
    staleness, in_step = None, 1.0
    deviation = 0.0 if fleet.mode is Mode.DECOUPLED else _in_step_deviation(fleet, model)
    if fleet.mode is Mode.DECOUPLED:
        lines = island_lines(fleet, model, on_progress)
        staleness, dropped = contributions(lines, model, coordinator)
        dropped += [_beyond_hold(line, coordinator, model) for line in lines]
    elif fleet.mode is Mode.DILOCO:
        free = island_lines(fleet, model, lambda done: on_progress(done / 2))
        rng = generator(fleet.seed, Stream.SPEEDS)
        paces = speeds(fleet, model, rng)
        lines = coupled(free, paces, model, coordinator, rng, on_progress=_half(fleet, on_progress))
    else:
        lines = [_job_line(fleet, model, coordinator, on_progress)]
        in_step = _in_step_share(fleet, model)
    if fleet.mode in (Mode.DECOUPLED, Mode.DILOCO):
        alone = fleet.mode is Mode.DECOUPLED  # or everybody waits at the next barrier
        dropped += [_lost_with(line, coordinator if alone else [], model) for line in lines]
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


def island_lines(fleet: Fleet, model: FailureModel, on_progress: Progress = lambda done: None) -> list[TimeLine]:
    """Returns the lives of elastic islands that do not wait for each other."""
    lines = []
    for i, domains in enumerate(domain_outages(fleet, model)):

        def report(now_s: float, i: int = i) -> None:
            on_progress((i + now_s / fleet.duration_s) / fleet.islands)

        losses = island_losses(i, fleet, model, domains)
        slices, catch_up_s = model.slices(fleet.chips_of(i)), renewal.catch_up_s(fleet, model)
        line = elastic_line(losses, slices, model, fleet.duration_s, catch_up_s=catch_up_s, on_progress=report)
        lines.append(line)
        report(fleet.duration_s)
    return lines


def _job_line(fleet: Fleet, model: FailureModel, coordinator: list[Outage], on_progress: Progress) -> TimeLine:
    """One synchronous job over all chips; without a coordinator it does not run."""
    losses = job_losses(fleet, model, domain_outages(fleet, model))

    def report(now_s: float) -> None:
        on_progress(now_s / fleet.duration_s)

    if fleet.mode is Mode.DP:
        line = rigid_line(losses, model, fleet.duration_s, on_progress=report)
    else:
        line = elastic_line(losses, all_slices(fleet, model), model, fleet.duration_s, on_progress=report)
    return without(line, coordinator, Cause.COORDINATOR)


def _in_step_share(fleet: Fleet, model: FailureModel) -> float:
    """Part of a step that the mean group computes while the slowest one sets the pace, from drawn step times."""
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


def _in_step_deviation(fleet: Fleet, model: FailureModel) -> float:
    """Relative standard deviation, between seeds, of the part of a step that lasting differences in speed leave."""
    rng = generator(fleet.seed, Stream.SPEEDS, 1)
    draws = (np.array(speeds(fleet, model, rng)) for _ in range(_SPEED_DRAWS))
    shares = np.array([np.mean(paces) / np.max(paces) for paces in draws])
    return float(np.std(shares, ddof=1) / np.mean(shares))


def _beyond_hold(line: TimeLine, coordinator: list[Outage], model: FailureModel) -> Dropped:
    """What a decoupled island trained while the coordinator was away for longer than islands may go on alone."""
    begin_s, end_s = np.array(beyond_hold(coordinator, model), dtype=np.float64).reshape(-1, 2).T
    knots = trained_by(line)
    return Dropped(cause=Cause.COORDINATOR, at_s=end_s, lost_s=np.interp(end_s, *knots) - np.interp(begin_s, *knots))


def _lost_with(line: TimeLine, coordinator: list[Outage], model: FailureModel) -> Dropped:
    """What an island took with it when it went down, unless that was wasted anyway: too long after the coordinator.

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


def _half(fleet: Fleet, on_progress: Progress) -> Progress:
    return lambda now_s: on_progress(0.5 + now_s / fleet.duration_s / 2)


# --- for other parts of the program ---------------------------------------------------------------------------------


class Pause(NamedTuple):
    """A time in which an island does not train, in virtual seconds from the start of the run."""

    at_s: float
    for_s: float


def pauses(
    model: FailureModel, *, chips: int, islands: int, duration_s: float, seed: int, time_scale: float = 1.0
) -> list[list[Pause]]:
    """Returns the pauses of each island of a large fleet, to be played to a small one that really trains.

    Args:
        model: Of the large fleet, in its own time.
        chips: Of the large fleet.
        islands: Of both.
        duration_s: Virtual seconds of the small one, all of which are covered.
        seed: The same one as of :func:`simulate` gives the pauses behind its result.
        time_scale: Virtual seconds per second of the large fleet; 0.01 turns a pause of 20 s into one of 0.2 s.

    Returns:
        Per island, in order of time, without overlap, none beyond ``duration_s``.

    Raises:
        ConfigError: Something of it cannot be.
    """
    if not time_scale > 0.0:
        raise ConfigError("time_scale", time_scale, "must be above 0")
    fleet = Fleet(chips=chips, islands=islands, days=duration_s / time_scale / DAY_S, seed=seed)
    check_together(fleet, model)
    return [
        [Pause(at_s * time_scale, for_s * time_scale) for at_s, for_s in line.gaps()]
        for line in island_lines(fleet, model)
    ]
