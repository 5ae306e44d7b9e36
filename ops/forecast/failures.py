"""A fleet of many chips and its failures: settings, draws from a seed, warnings. Pure.

Chips are interrupted as a Poisson process. They come in slices, which leave and return as a whole; slices make up an
island.

The defaults reproduce table 1 of Decoupled DiLoCo (https://arxiv.org/abs/2604.21428). Its time between interruptions is
used as it is; the paper prints none of its other figures. Those marked "fitted" were chosen together, once, so that all
twenty cells come out; the others are round figures that hardly matter there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from broker.base.errors import ConfigError
from broker.base.settings import setting
from ops.forecast.fleet import Mode, check

YEAR_S = 365.25 * 86_400.0
DAY_S = 86_400.0

#: Limits of a simulation by subject; more would take hours, or too much memory.
MOST_EVENTS = {"interruptions": 200_000_000, "rounds of all islands": 50_000_000}

#: The largest value of any setting, beyond which sums overflow, and the smallest of a positive one.
MOST, LEAST = 1e12, 1e-9

#: The parts of a simulated time that are taken as independent, for confidence intervals.
BATCHES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureModel:
    """Failures of chips, and their costs.

    Elastic jobs and islands of every mode share one set of costs, so that modes differ by how they are coupled only.
    """

    mtbi_years: float = setting(1.0, "mean time between interruptions of one chip, in years (paper: 1)")
    slice_chips: int = setting(64, "chips that leave and return together")
    repair_s: float = setting(1800.0, "seconds until an interrupted slice is back")

    # Fitted, with the next four. An interruption counts from the next check on: training up to there is kept, and all
    # interruptions since the last check share one pause. It models notices given ahead, and failures injected
    # between steps, as the paper does it. Without it the non-elastic row falls off too fast (14 % for 18 at 2.4 M).
    check_s: float = setting(
        5.5,
        "an interruption takes effect at the next of such checks, in seconds; training up to there counts; 0: at once",
    )
    scale_down_s: float = setting(22.3, "pause to continue without lost slices; further losses during it cost no time")
    scale_up_s: float = setting(8.0, "pause to take slices back that have waited long enough")
    # Slices that are ready rejoin for nothing in a pause that happens anyway. So a failure costs scale-down plus
    # scale-up where failures are rare, and little more than the scale-down where they are frequent: table 1 says 35 s
    # per failure at its rare end and 20 s at the other.
    rejoin_wait_s: float = setting(90.0, "seconds that a returned slice waits for a pause that happens anyway")
    restart_s: float = setting(
        83.5, "restart of a stopped job or island on spare slices: reschedule, load, redo lost steps"
    )
    # What sets an island apart from an elastic job of its size: 54 % for two islands of 1.2 M chips, 58 % for the job.
    catch_up_s: float = setting(1.0, "an island's fetching of the versions that others made while it paused")

    step_s: float = setting(1.0, "seconds of an inner step")
    sync_interval: int = setting(24, "inner steps between two merges of a fragment")
    # As in the laboratory and in real runs: a version arrives within the next step, unless links are slow.
    overlap: int = setting(1, "inner steps between handing a fragment over and adopting the merged version")
    max_staleness: int = setting(8, "a contribution with a step trained on an older version than this is refused")

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot be."""
        for each in fields(self):
            least = {"mtbi_years": LEAST, "step_s": LEAST, "slice_chips": 1, "sync_interval": 1}.get(each.name, 0)
            check(each.name, getattr(self, each.name), least, MOST, "; give that for what never happens")
        if self.overlap >= self.sync_interval:
            raise ConfigError("overlap", self.overlap, f"must be below sync_interval = {self.sync_interval}")

    @property
    def chip_mtbi_s(self) -> float:
        """Mean seconds between interruptions of one chip."""
        return self.mtbi_years * YEAR_S

    @property
    def interval_s(self) -> float:
        """Training time between two merges of a fragment."""
        return self.sync_interval * self.step_s

    def slices(self, chips: int) -> int:
        """Slices of an island: equal ones, as near to ``slice_chips`` as its chips allow."""
        return max(1, math.floor(chips / self.slice_chips + 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedFleet:
    """A fleet of equal chips, and the simulated time."""

    mode: Mode = setting(Mode.DECOUPLED, "how the fleet trains; streaming and diloco are only planned")
    chips: int = setting(1_200_000, "chips of the whole fleet")
    islands: int = setting(8, "islands of the fleet; a synchronous job has slices of their sizes")
    days: float = setting(30.0, "simulated days")
    seed: int = setting(0, "of all random draws: the same one gives the same result, byte for byte")

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot be."""
        if self.mode in (Mode.STREAMING, Mode.DILOCO):
            raise ConfigError("mode", self.mode.value, "is not simulated: take decoupled, elastic-dp or dp")
        check("islands", self.islands, 1, MOST)
        check("chips", self.chips, self.islands, MOST, ": at least one per island")
        check("days", self.days, LEAST, MOST)
        check("seed", self.seed, 0, MOST)

    @property
    def duration_s(self) -> float:
        """Simulated seconds."""
        return self.days * DAY_S

    def chips_of(self, island: int) -> int:
        """Returns the chips of each island; the first islands have one more if the division is uneven."""
        return self.chips // self.islands + (island < self.chips % self.islands)


def all_slices(fleet: SimulatedFleet, model: FailureModel) -> int:
    """Returns the number of slices of the whole fleet, also if its islands train as one job."""
    larger = fleet.chips % fleet.islands
    equal = fleet.islands - larger
    return larger * model.slices(fleet.chips_of(0)) + equal * model.slices(fleet.chips_of(fleet.islands - 1))


def expected_interruptions(fleet: SimulatedFleet, model: FailureModel) -> float:
    """Returns the expected number of chip failures in the simulated time."""
    return fleet.chips / model.chip_mtbi_s * fleet.duration_s


def check_together(fleet: SimulatedFleet, model: FailureModel) -> None:
    """Raises ConfigError if the simulation would take hours."""
    events = {"interruptions": expected_interruptions(fleet, model)}
    if fleet.mode is Mode.DECOUPLED:
        events["rounds of all islands"] = fleet.islands * fleet.duration_s / model.interval_s
    for name, count in events.items():
        if count > MOST_EVENTS[name]:
            cure = f"would be {count:.1e} {name}; at most {MOST_EVENTS[name]:.0e}: simulate fewer days"
            raise ConfigError("days", fleet.days, cure)


# --- draws --------------------------------------------------------------------------------------------------------

#: Draws that are made at a time.
_CHUNK = 4096


class Loss(NamedTuple):
    """The interruption of a slice."""

    at_s: float
    draw: float  # 0 to 1: which slice it hits, as a share, those that are away first


def interruptions(chips: int, model: FailureModel, seed: int, island: int = 0) -> Iterator[Loss]:
    """Yields the losses of an island or job without end: a Poisson process of rate ``chips`` / MTBI.

    Each ``island`` has random numbers of its own, so that no setting shifts the draws of another.
    """
    rng = np.random.default_rng([seed, *b"chips", island])
    at_s, mean_s = 0.0, model.chip_mtbi_s / chips
    while True:
        times = at_s + np.cumsum(rng.exponential(mean_s, _CHUNK))
        draws = rng.random(_CHUNK)
        for at_s, draw in zip(times.tolist(), draws.tolist(), strict=True):
            yield Loss(at_s, draw)


# --- warnings -----------------------------------------------------------------------------------------------------

#: A run may well see none of fewer failures than these, and take that for certain.
_FEW = 10.0

#: A mean time between interruptions that means never.
_NEVER_YEARS = 1e6

#: A share of the goodput; less is not worth a sentence.
_NOTEWORTHY = 0.005


def caveats(fleet: SimulatedFleet, model: FailureModel) -> list[str]:
    """Returns warnings about the simulated goodput; usually none."""
    found = []
    expected = expected_interruptions(fleet, model)
    if expected < _FEW and model.mtbi_years < _NEVER_YEARS:
        few = f"with {expected:.2g} interruptions to be expected the intervals are too narrow"
        found.append(f"{few}; simulate more --days")
    # Batches in which the same slices are away are not independent, and nothing is away at first; dp has spare slices.
    if model.repair_s > fleet.duration_s / BATCHES and fleet.mode is not Mode.DP:
        said = f"repairs after interruptions last longer than a {BATCHES}th of the simulated time"
        found.append(f"{said}: the goodput is too high and its interval too narrow; simulate more --days")
    alone = fleet.mode is Mode.DECOUPLED
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
