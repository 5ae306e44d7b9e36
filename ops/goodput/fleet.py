"""A fleet of many chips and its failures: settings, their checks, and draws from a seed. Pure.

Chips are interrupted as a Poisson process. They come in slices, which leave and return as a whole; slices make up an
island. What the paper leaves out can be added: failures of domains (regions of whole islands) and of the coordinator.

The defaults reproduce table 1 of Decoupled DiLoCo (https://arxiv.org/abs/2604.21428). Its time between interruptions is
used as it is; the paper prints none of its other figures. Those marked "fitted" were chosen together, once, so that all
twenty cells come out; the others are round figures that hardly matter there.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from broker.process.settings import setting
from broker.wire.errors import ConfigError

YEAR_S = 365.25 * 86_400.0
DAY_S = 86_400.0

#: The most that a simulation goes through, by what it is; more would take hours, or too much memory.
MOST_EVENTS = {"interruptions": 200_000_000, "rounds of all islands": 50_000_000}
MOST_OUTAGES = 10_000_000

#: The most of any setting: seconds, years or chips beyond it overflow sums.
MOST = 1e12

#: The least time between checks, in seconds: closed forms add up what happens between all of a wait.
LEAST_CHECK_S = 1e-3


class Mode(StrEnum):
    """Ways of training on a fleet."""

    DECOUPLED = "decoupled"  # islands that never wait for each other
    ELASTIC_DP = "elastic-dp"  # one synchronous job that goes on with the slices it has
    DP = "dp"  # one synchronous job that stops until it is whole again
    DILOCO = "diloco"  # elastic islands that all meet at a barrier every sync interval


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureModel:
    """Failures of chips, domains and the coordinator, and their costs.

    Elastic jobs and islands of every mode share one set of costs, so that modes differ by how they are coupled only.
    """

    mtbi_years: float = setting(1.0, "mean time between interruptions of one chip, in years (paper: 1)")
    slice_chips: int = setting(64, "chips that leave and return together")
    repair_s: float = setting(1800.0, "seconds until an interrupted slice is back")

    # Fitted, with the next four. An interruption counts from the next check on: training up to there is kept, and all
    # interruptions since the last check share one pause. It stands for notices given ahead, and for failures injected
    # between steps, as the paper does it. Without it the non-elastic row falls off too fast (14 % for 18 at 2.4 M).
    check_s: float = setting(
        5.5,
        "an interruption takes effect at the next of such checks, in seconds; training up to there counts; 0: at once",
    )
    scale_down_s: float = setting(22.3, "pause to go on without lost slices; more losses during it cost no more time")
    scale_up_s: float = setting(8.0, "pause to take slices back that have waited long enough")
    # Slices that are ready rejoin for nothing in a pause that happens anyway. So a failure costs scale-down plus
    # scale-up where failures are rare, and little more than the scale-down where they are frequent: table 1 says 35 s
    # per failure at its rare end and 20 s at the other.
    rejoin_wait_s: float = setting(90.0, "seconds that a returned slice waits for a pause that happens anyway")
    restart_s: float = setting(
        83.5, "restart of what stopped whole, on spare slices: reschedule, load, redo what is lost"
    )
    # What sets an island apart from an elastic job of its size: 54 % for two islands of 1.2 M chips, 58 % for the job.
    catch_up_s: float = setting(1.0, "an island's fetching of the versions that others made while it paused")

    # The slowest of an island's thousands of chips sets its pace, and maxima of thousands hardly differ: hence small.
    speed_spread: float = setting(0.001, "relative standard deviation of step times between islands, lasting")
    step_jitter: float = setting(0.001, "relative standard deviation of an island's step times, from step to step")

    step_s: float = setting(1.0, "seconds of an inner step")
    sync_interval: int = setting(24, "inner steps between two merges of a fragment; between barriers with diloco")
    # As in the laboratory and in real runs: what is merged arrives within the next step, unless links are slow.
    overlap: int = setting(1, "inner steps between handing a fragment over and adopting what it was merged into")
    max_staleness: int = setting(8, "a contribution with a step trained on an older version than this is refused")

    domain_mtbi_days: float | None = setting(None, "mean days between failures of one domain (default: none fails)")
    domain_islands: int = setting(1, "islands in a domain, such as a region")
    domain_repair_min: float = setting(60.0, "minutes until a domain is back")
    coordinator_mtbi_days: float | None = setting(None, "mean days between coordinator failures (default: none)")
    coordinator_repair_s: float = setting(60.0, "seconds until the coordinator is back")
    hold_s: float = setting(3600.0, "islands train this long without a coordinator; what follows is wasted")

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot be."""
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("mtbi_years", "step_s", "domain_mtbi_days", "coordinator_mtbi_days"):
                _require(each.name, value, above=0.0)
            else:
                counted = each.name in ("slice_chips", "sync_interval", "domain_islands")
                _require(each.name, value, least=1 if counted else 0)
        if 0.0 < self.check_s < LEAST_CHECK_S:
            raise ConfigError("check_s", self.check_s, f"must be at least {LEAST_CHECK_S:g}, or 0 for at once")
        for name in ("speed_spread", "step_jitter"):
            if getattr(self, name) > 0.3:
                raise ConfigError(name, getattr(self, name), "must be at most 0.3; it is a share, not a percentage")
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
class Fleet:
    """A fleet, and for how long it is simulated."""

    mode: Mode = setting(Mode.DECOUPLED, "how the fleet trains")
    chips: int = setting(1_200_000, "chips of the whole fleet")
    islands: int = setting(8, "islands; groups that keep in step where there is one synchronous job")
    days: float = setting(30.0, "simulated days")
    seed: int = setting(0, "of all random draws: the same one gives the same result, byte for byte")

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot be."""
        _require("islands", self.islands, least=1)
        _require("chips", self.chips, least=1)
        _require("days", self.days, above=0.0)
        if self.seed < 0:
            raise ConfigError("seed", self.seed, "must be at least 0")
        if self.chips < self.islands:
            raise ConfigError("chips", self.chips, f"must be at least one per island: {self.islands}")

    @property
    def duration_s(self) -> float:
        """Simulated seconds."""
        return self.days * DAY_S

    def chips_of(self, island: int) -> int:
        """Chips of an island; the first ones have one more where they do not divide evenly."""
        return self.chips // self.islands + (island < self.chips % self.islands)


def all_slices(fleet: Fleet, model: FailureModel) -> int:
    """Returns the slices of the whole fleet: those of its islands, also where they train as one job."""
    larger = fleet.chips % fleet.islands
    equal = fleet.islands - larger
    return larger * model.slices(fleet.chips_of(0)) + equal * model.slices(fleet.chips_of(fleet.islands - 1))


def expected_failures(fleet: Fleet, model: FailureModel) -> dict[str, float]:
    """Returns failure kind -> times expected in the simulated time, without kinds that never fail."""
    found = {"interruptions": fleet.chips / model.chip_mtbi_s * fleet.duration_s}
    if model.domain_mtbi_days is not None:  # what is away does not fail
        cycle_s = model.domain_mtbi_days * DAY_S + model.domain_repair_min * 60.0
        found["domain failures"] = math.ceil(fleet.islands / model.domain_islands) * fleet.duration_s / cycle_s
    if model.coordinator_mtbi_days is not None:
        cycle_s = model.coordinator_mtbi_days * DAY_S + model.coordinator_repair_s
        found["coordinator failures"] = fleet.duration_s / cycle_s
    return found


def check_together(fleet: Fleet, model: FailureModel) -> None:
    """Raises ConfigError where a fleet and a failure model do not fit each other, or would take hours."""
    if model.domain_mtbi_days is not None and model.domain_islands > fleet.islands:
        cure = f"must be at most the number of islands, {fleet.islands}"
        raise ConfigError("domain_islands", model.domain_islands, cure)
    events = expected_failures(fleet, model)
    if fleet.mode in (Mode.DECOUPLED, Mode.DILOCO):
        events["rounds of all islands"] = fleet.islands * fleet.duration_s / model.interval_s
    for name, count in events.items():
        most = MOST_EVENTS.get(name, MOST_OUTAGES)
        if count > most:
            cure = f"would be {count:.1e} {name}; at most {most:.0e}: simulate fewer days"
            raise ConfigError("days", fleet.days, cure)


def _require(name: str, value: float | None, *, above: float | None = None, least: float | None = None) -> None:
    if value is None:
        return
    if not value <= MOST:  # infinite, or no number
        raise ConfigError(name, value, f"must be at most {MOST:g}; give that for what never happens")
    if above is not None and not value > above:
        raise ConfigError(name, value, f"must be above {above:g}")
    if least is not None and not value >= least:
        raise ConfigError(name, value, f"must be at least {least:g}")


# --- draws --------------------------------------------------------------------------------------------------------

#: Draws that are made at a time.
_CHUNK = 4096


class Stream(StrEnum):
    """Purposes of random numbers: each has its own stream, so that no setting shifts another's draws."""

    CHIPS = "chips"
    DOMAINS = "domains"
    COORDINATOR = "coordinator"
    SPEEDS = "speeds"


def generator(seed: int, stream: Stream, index: int = 0) -> np.random.Generator:
    """Returns the random numbers for one purpose, such as the interruptions of one island."""
    return np.random.default_rng([seed, *stream.value.encode(), index])


class Loss(NamedTuple):
    """Slices that are interrupted at once."""

    at_s: float
    slices: int
    back_s: float  # when they are repaired
    draw: (
        float  # 0 to 1: which slice it hits, as a share, those that are away first; infinite: a domain, which hits all
    )


class Outage(NamedTuple):
    """A time during which something is gone as a whole."""

    from_s: float
    to_s: float


def interruptions(chips: int, model: FailureModel, rng: np.random.Generator) -> Iterator[Loss]:
    """Yields the interruptions of single chips without end: a Poisson process of rate ``chips`` / MTBI."""
    at_s, mean_s, repair_s = 0.0, model.chip_mtbi_s / chips, model.repair_s
    while True:
        times = at_s + np.cumsum(rng.exponential(mean_s, _CHUNK))
        draws = rng.random(_CHUNK)
        for at_s, draw in zip(times.tolist(), draws.tolist(), strict=True):
            yield Loss(at_s, 1, at_s + repair_s, draw)


def outages(mean_up_s: float, repair_s: float, end_s: float, rng: np.random.Generator) -> list[Outage]:
    """Returns the outages of one thing up to ``end_s``: exponential times between, constant repairs."""
    found: list[Outage] = []
    at_s = float(rng.exponential(mean_up_s))
    while at_s < end_s:
        found.append(Outage(at_s, at_s + repair_s))
        at_s += repair_s + float(rng.exponential(mean_up_s))
    return found


def coordinator_outages(fleet: Fleet, model: FailureModel) -> list[Outage]:
    """Returns when the coordinator (syncer, aggregator) is away."""
    if model.coordinator_mtbi_days is None:
        return []
    rng = generator(fleet.seed, Stream.COORDINATOR)
    return outages(model.coordinator_mtbi_days * DAY_S, model.coordinator_repair_s, fleet.duration_s, rng)


def beyond_hold(coordinator: Sequence[Outage], model: FailureModel) -> list[Outage]:
    """Returns the ends of long outages of the coordinator, in which islands train for nothing."""
    return [Outage(o.from_s + model.hold_s, o.to_s) for o in coordinator if o.to_s - o.from_s > model.hold_s]


def domain_outages(fleet: Fleet, model: FailureModel) -> list[list[Outage]]:
    """Returns, for each island, the outages of its domain; the last domain may be smaller than others.

    All islands of a domain are hit at the same time.
    """
    if model.domain_mtbi_days is None:
        return [[] for _ in range(fleet.islands)]
    mean_up_s, repair_s = model.domain_mtbi_days * DAY_S, model.domain_repair_min * 60.0
    of_domains = [
        outages(mean_up_s, repair_s, fleet.duration_s, generator(fleet.seed, Stream.DOMAINS, domain))
        for domain in range(math.ceil(fleet.islands / model.domain_islands))
    ]
    return [of_domains[island // model.domain_islands] for island in range(fleet.islands)]


def island_losses(island: int, fleet: Fleet, model: FailureModel, domain: Sequence[Outage]) -> Iterator[Loss]:
    """Yields everything that an island loses, in order of time, without end."""
    chips = fleet.chips_of(island)
    single = interruptions(chips, model, generator(fleet.seed, Stream.CHIPS, island))
    return _with_domains(single, [_of_domain(each, model.slices(chips)) for each in domain])


def job_losses(fleet: Fleet, model: FailureModel, domains: Sequence[Sequence[Outage]]) -> Iterator[Loss]:
    """Yields everything that one job over all chips loses, in order of time, without end."""
    single = interruptions(fleet.chips, model, generator(fleet.seed, Stream.CHIPS))
    slices, lost = all_slices(fleet, model), []
    ends = [0, *accumulate(map(fleet.chips_of, range(fleet.islands)))]
    for first in range(0, fleet.islands, model.domain_islands):
        last = min(first + model.domain_islands, fleet.islands)
        # Where domains hold no whole slices, all of them together still hold all slices.
        begin, end = (round(chips / fleet.chips * slices) for chips in (ends[first], ends[last]))
        lost += [_of_domain(each, max(1, end - begin)) for each in domains[first]]
    return _with_domains(single, lost)


def _with_domains(single: Iterator[Loss], domains: list[Loss]) -> Iterator[Loss]:
    return heapq.merge(single, sorted(domains)) if domains else single


def _of_domain(each: Outage, slices: int) -> Loss:
    return Loss(each.from_s, slices, each.to_s, math.inf)


def speeds(fleet: Fleet, model: FailureModel, rng: np.random.Generator) -> list[float]:
    """Returns each island's lasting step time, relative to the mean of all islands it is drawn from."""
    return (1.0 + model.speed_spread * rng.standard_normal(fleet.islands)).tolist()  # type: ignore[no-any-return]
