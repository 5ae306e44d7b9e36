"""A fleet of many chips and what goes wrong in it: settings, and failures drawn from a seed.

Chips are interrupted as a Poisson process. They come in slices, which leave and return as a whole; slices make up an
island. What the paper leaves out can be added: failures that take a whole domain at once (a region, several islands, or
a part of one), and failures of the coordinator. What an island does about it is in :mod:`ops.goodput.timeline`.

The defaults reproduce table 1 of Decoupled DiLoCo (https://arxiv.org/abs/2604.21428). Its figure for the time between
interruptions is used as it is; the paper prints none of its others. Those marked "fitted" below were chosen together,
once, so that all twenty cells come out; the others are round figures that hardly matter there.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from broker.process.settings import setting
from broker.wire.errors import ConfigError

YEAR_S = 365.25 * 86_400.0
DAY_S = 86_400.0

#: Draws that are made at a time.
_CHUNK = 4096

#: Loops over single failures: beyond this many a simulation takes hours, which nobody means to ask for.
MAX_INTERRUPTIONS = 200_000_000

#: The same of the rounds of all islands, which take memory too: 130 bytes each.
MAX_ROUNDS = 50_000_000

#: The same of outages of domains and of the coordinator.
MAX_OUTAGES = 10_000_000

#: Of any setting: seconds, years or chips beyond it overflow sums.
MOST = 1e12

#: The least time between checks, in seconds: closed forms add up what happens between all of a wait.
LEAST_CHECK_S = 1e-3

#: Domains of an island.
MAX_DOMAINS = 1000

#: By how much, as a share, equal domains may miss their island: 0.33 is a third.
_EVEN = 0.02


class Mode(StrEnum):
    """How the fleet trains."""

    DECOUPLED = "decoupled"  # islands that never wait for each other
    ELASTIC_DP = "elastic-dp"  # one synchronous job that goes on with the slices it has
    DP = "dp"  # one synchronous job that stops until it is whole again
    DILOCO = "diloco"  # elastic islands that all meet at a barrier every sync interval


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureModel:
    """How chips, domains and the coordinator fail, and what that costs.

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
    domain_islands: float = setting(1.0, "islands in a domain: a whole number, or 1 / a whole number for a part of one")
    domain_repair_min: float = setting(60.0, "minutes until a domain is back")
    coordinator_mtbi_days: float | None = setting(None, "mean days between coordinator failures (default: none)")
    coordinator_repair_s: float = setting(60.0, "seconds until the coordinator is back")
    hold_s: float = setting(3600.0, "islands train this long without a coordinator; what follows is wasted")

    def __post_init__(self) -> None:
        for name in ("mtbi_years", "step_s", "domain_islands"):
            _require(name, getattr(self, name), above=0.0)
        for name in ("slice_chips", "sync_interval"):
            _require(name, getattr(self, name), least=1)
        for name in ("domain_mtbi_days", "coordinator_mtbi_days"):
            if getattr(self, name) is not None:
                _require(name, getattr(self, name), above=0.0)
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                _require(each.name, value, least=0)
        if 0.0 < self.check_s < LEAST_CHECK_S:
            raise ConfigError("check_s", self.check_s, f"must be at least {LEAST_CHECK_S:g}, or 0 for at once")
        for name in ("speed_spread", "step_jitter"):
            if getattr(self, name) > 0.3:
                raise ConfigError(name, getattr(self, name), "must be at most 0.3; it is a share, not a percentage")
        if self.domain_islands > 1.0 and self.domain_islands % 1.0:
            raise ConfigError("domain_islands", self.domain_islands, "must be whole above 1; below 1 it is a part")
        if self.domain_islands * MAX_DOMAINS < 1.0:
            cure = f"must be at least {1.0 / MAX_DOMAINS:g}; what fails alone in smaller parts are chips (mtbi_years)"
            raise ConfigError("domain_islands", self.domain_islands, cure)
        if abs(self.domains_of_island * self.domain_islands - 1.0) > _EVEN and self.domain_islands < 1.0:
            n = int(1.0 / self.domain_islands)
            cure = f"must divide an island evenly: {1.0 / n:.3g} for {n}, or {1.0 / (n + 1):.3g} for {n + 1} domains"
            raise ConfigError("domain_islands", self.domain_islands, cure)
        if self.overlap >= self.sync_interval:
            raise ConfigError("overlap", self.overlap, f"must be below sync_interval = {self.sync_interval}")

    @property
    def chip_mtbi_s(self) -> float:
        """Mean seconds between interruptions of one chip."""
        return self.mtbi_years * YEAR_S

    @property
    def domains_of_island(self) -> int:
        """Domains that an island consists of; 1 where one holds a whole island, or several."""
        return max(1, round(1.0 / self.domain_islands))

    @property
    def interval_s(self) -> float:
        """Training time between two merges of a fragment."""
        return self.sync_interval * self.step_s

    def slices(self, chips: int) -> int:
        """Slices of an island: equal ones, as near to ``slice_chips`` as its chips allow."""
        return max(1, math.floor(chips / self.slice_chips + 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is simulated, and for how long."""

    mode: Mode = setting(Mode.DECOUPLED, "how the fleet trains")
    chips: int = setting(1_200_000, "chips of the whole fleet")
    islands: int = setting(8, "islands; groups that keep in step where there is one synchronous job")
    days: float = setting(30.0, "simulated days")
    seed: int = setting(0, "of all random draws: the same one gives the same result, byte for byte")

    def __post_init__(self) -> None:
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


def check_together(fleet: Fleet, model: FailureModel) -> None:
    """Raises ConfigError where a fleet and a failure model do not fit each other, or would take hours."""
    check_domains(fleet, model)
    interruptions = fleet.chips / model.chip_mtbi_s * fleet.duration_s
    if interruptions > MAX_INTERRUPTIONS:
        cure = f"would be {interruptions:.1e} interruptions; at most {MAX_INTERRUPTIONS:.0e}: simulate fewer days"
        raise ConfigError("days", fleet.days, cure)
    rounds = fleet.islands * fleet.duration_s / model.interval_s
    if rounds > MAX_ROUNDS and fleet.mode in (Mode.DECOUPLED, Mode.DILOCO):
        cure = f"would be {rounds:.1e} rounds of all islands; at most {MAX_ROUNDS:.0e}: simulate fewer days"
        raise ConfigError("days", fleet.days, cure)

    away = _outages_of(fleet, model)
    if away > MAX_OUTAGES:
        cure = (
            f"would be {away:.1e} failures of domains and coordinators; at most {MAX_OUTAGES:.0e}: simulate fewer days"
        )
        raise ConfigError("days", fleet.days, cure)


def _outages_of(fleet: Fleet, model: FailureModel) -> float:
    """Returns how many outages of domains, each in every island that it takes, and of the coordinator are expected."""
    found = 0.0
    if model.domain_mtbi_days is not None:
        cycle_s = model.domain_mtbi_days * DAY_S + model.domain_repair_min * 60.0
        found += fleet.islands * model.domains_of_island * fleet.duration_s / cycle_s
    if model.coordinator_mtbi_days is not None:
        found += fleet.duration_s / (model.coordinator_mtbi_days * DAY_S + model.coordinator_repair_s)
    return found


def check_domains(fleet: Fleet, model: FailureModel) -> None:
    """Raises ConfigError where a domain has more islands than the fleet, or less than a slice of one."""
    if model.domain_mtbi_days is None:
        return
    if model.domain_islands > fleet.islands:
        cure = f"must be at most the number of islands, {fleet.islands}"
        raise ConfigError("domain_islands", model.domain_islands, cure)
    slices = model.slices(fleet.chips_of(fleet.islands - 1))
    if model.domains_of_island > slices:
        cure = f"must be at least {1.0 / slices:.3g}: an island has {slices} slices of {model.slice_chips} chips"
        raise ConfigError("domain_islands", model.domain_islands, cure)


def _require(name: str, value: float, *, above: float | None = None, least: float | None = None) -> None:
    if not value <= MOST:  # infinite, or no number
        raise ConfigError(name, value, f"must be at most {MOST:g}; give that for what never happens")
    if above is not None and not value > above:
        raise ConfigError(name, value, f"must be above {above:g}")
    if least is not None and not value >= least:
        raise ConfigError(name, value, f"must be at least {least:g}")


# --- draws --------------------------------------------------------------------------------------------------------


class Stream(StrEnum):
    """What random numbers are for; each purpose has a stream of its own, so that one setting does not shift another."""

    CHIPS = "chips"
    DOMAINS = "domains"
    COORDINATOR = "coordinator"
    SPEEDS = "speeds"


def generator(seed: int, stream: Stream, index: int = 0) -> np.random.Generator:
    """Returns the random numbers for one purpose, such as the interruptions of one island."""
    return np.random.default_rng([seed, *stream.value.encode(), index])


class Loss(NamedTuple):
    """Slices that are interrupted at once.

    Attributes:
        at_s: When.
        slices: How many.
        back_s: When they are repaired.
        draw: Uniform in 0..1: which slice it hits, as a share of all, those that are away first; infinite for domains,
            which are hit whatever is away.
    """

    at_s: float
    slices: int
    back_s: float
    draw: float


def interruptions(chips: int, model: FailureModel, rng: np.random.Generator) -> Iterator[Loss]:
    """Yields the interruptions of single chips without end: a Poisson process of rate ``chips`` / MTBI."""
    at_s, mean_s, repair_s = 0.0, model.chip_mtbi_s / chips, model.repair_s
    while True:
        times = at_s + np.cumsum(rng.exponential(mean_s, _CHUNK))
        draws = rng.random(_CHUNK)
        for at_s, draw in zip(times.tolist(), draws.tolist(), strict=True):
            yield Loss(at_s, 1, at_s + repair_s, draw)


class Outage(NamedTuple):
    """A time during which something is gone as a whole."""

    from_s: float
    to_s: float


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
    """Returns the ends of long outages of the coordinator, in which islands that train on do it for nothing."""
    return [Outage(o.from_s + model.hold_s, o.to_s) for o in coordinator if o.to_s - o.from_s > model.hold_s]


class DomainOutage(NamedTuple):
    """Part of an island that is gone with its domain: from one to another, 0 to 1."""

    outage: Outage
    domain: int
    begin: float
    end: float


def domain_outages(fleet: Fleet, model: FailureModel) -> list[list[DomainOutage]]:
    """Returns, for each island, the outages of the domains it belongs to.

    Domains of several islands hit all of them at the same time; the last domain is smaller where they do not divide
    evenly. A domain of half an island means that each island has two, which fail independently of each other.
    """
    found: list[list[DomainOutage]] = [[] for _ in range(fleet.islands)]
    if model.domain_mtbi_days is None:
        return found
    mean_up_s, repair_s = model.domain_mtbi_days * DAY_S, model.domain_repair_min * 60.0
    size, parts = max(1, int(model.domain_islands)), model.domains_of_island
    for domain in range(math.ceil(fleet.islands / size) * parts):
        rng = generator(fleet.seed, Stream.DOMAINS, domain)
        first, place = domain // parts * size, domain % parts
        for outage in outages(mean_up_s, repair_s, fleet.duration_s, rng):
            for island in range(first, min(first + size, fleet.islands)):
                found[island].append(DomainOutage(outage, domain, place / parts, (place + 1) / parts))
    return found


def island_losses(island: int, fleet: Fleet, model: FailureModel, domains: list[DomainOutage]) -> Iterator[Loss]:
    """Yields everything that an island loses, in order of time, without end."""
    chips = fleet.chips_of(island)
    single = interruptions(chips, model, generator(fleet.seed, Stream.CHIPS, island))
    return _with_domains(single, domains, model.slices(chips))


def job_losses(fleet: Fleet, model: FailureModel, domains: list[list[DomainOutage]]) -> Iterator[Loss]:
    """Yields everything that one job over all chips loses, in order of time, without end."""
    single = interruptions(fleet.chips, model, generator(fleet.seed, Stream.CHIPS))
    of_job: dict[tuple[int, Outage], DomainOutage] = {}
    before = 0
    for i, of_island in enumerate(domains):
        chips = fleet.chips_of(i)
        for each in of_island:  # the islands of a domain stand side by side
            begin, end = ((before + at * chips) / fleet.chips for at in (each.begin, each.end))
            known = of_job.get((each.domain, each.outage))
            begin = begin if known is None else known.begin
            of_job[each.domain, each.outage] = each._replace(begin=begin, end=end)
        before += chips
    return _with_domains(single, list(of_job.values()), all_slices(fleet, model))


def _with_domains(single: Iterator[Loss], domains: list[DomainOutage], slices: int) -> Iterator[Loss]:
    """Adds the losses of domains; where theirs are no whole slices, all of them together are still all slices."""
    if not domains:
        return single
    return heapq.merge(single, sorted(_loss_of(each, slices) for each in domains))


def _loss_of(each: DomainOutage, slices: int) -> Loss:
    num_slices = max(1, round(each.end * slices) - round(each.begin * slices))
    return Loss(each.outage.from_s, num_slices, each.outage.to_s, math.inf)


def speeds(fleet: Fleet, model: FailureModel, rng: np.random.Generator) -> list[float]:
    """Returns each island's lasting step time, relative to the mean of all islands it is drawn from."""
    return (1.0 + model.speed_spread * rng.standard_normal(fleet.islands)).tolist()  # type: ignore[no-any-return]
